"""scatter_accumulate: rows added into main_grad where indices say, without a dense gradient.

``main[indices[n]] += scale * values[n]``, equal indices summed first, in fp32 and in the order of
n, as aten.embedding_dense_backward does it: sort the indices (torch's stable sort), then let one
program sum each run of equal ones. No atomics, so that two runs agree bit for bit. A first
contribution scales or clears main before (``prepare``, which returns at once where its factor is
1).

Bytes that must move: values read once, the rows that are hit read and written once; all of main
written once where it is cleared.

Legend: N rows of C columns, main [ROWS, C], sorted ascending [N], order [N] (sorted = indices at
order); a program has BC columns of the run that starts at its position.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

from gtpgraph.kernels.common import cdiv, on_device, update
from gtpgraph.kernels.wgrad_gemm import PREPARE_BLOCK, PREPARE_PROGRAMS, PREPARE_WARPS
from gtpgraph.kernels.wgrad_gemm import prepare_kernel as prepare

# A run of one, the usual one, takes a single step; a frequent token's takes one for BN of its rows.
BLOCK_N, BLOCK_C, NUM_WARPS = 16, 256, 4


@triton.jit
def scatter_kernel(
    p_flat,
    p_values,
    p_sorted,
    p_order,
    offset,
    scale,
    N,
    C,
    ROWS,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(p_sorted + i).to(tl.int64)
    before = tl.load(p_sorted + i - 1, mask=i > 0, other=-1).to(tl.int64)
    if (row != before) & (row >= 0) & (row < ROWS):
        o_c = tl.program_id(1) * BC + tl.arange(0, BC)  # [BC]
        m_c = o_c < C
        acc = tl.zeros([BC], tl.float32)
        start = i
        going = 1
        while going > 0:
            o_n = start + tl.arange(0, BN)  # [BN]
            m_n = o_n < N
            same = tl.load(p_sorted + o_n, mask=m_n, other=-1).to(tl.int64) == row
            m_n = m_n & same
            n = tl.load(p_order + o_n, mask=m_n, other=0)
            p_tile = p_values + n[:, None] * C + o_c[None, :]
            tile = tl.load(p_tile, mask=m_n[:, None] & m_c[None, :], other=0.0)  # [BN, BC]
            acc += tl.sum(tile.to(tl.float32), axis=0)
            start += BN
            going = tl.min(m_n.to(tl.int32), axis=0)
        one = tl.full([], 1.0, tl.float32)
        update(p_flat + offset + row * C + o_c, m_c, one, acc, scale)


def scatter_accumulate(
    flat: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    rows: int,
) -> torch.Tensor:
    """Launch; arguments as ``ops_scatter.scatter_accumulate``, checked there. Returns the token."""
    num, columns = values.shape
    with on_device(flat):
        numel = rows * columns
        if first and numel:
            programs = min(PREPARE_PROGRAMS, cdiv(numel, PREPARE_BLOCK))
            prepare[(programs,)](
                flat, beta, index, offset, numel,
                BLOCK=PREPARE_BLOCK, PROGRAMS=programs, num_warps=PREPARE_WARPS,
            )  # fmt: skip
        if num and columns:
            ascending, order = torch.sort(torch.where(indices < 0, indices + rows, indices),
                                          stable=True)  # fmt: skip
            scatter_kernel[(num, cdiv(columns, BLOCK_C))](
                flat, values, ascending, order, offset, scale, num, columns, rows,
                BN=BLOCK_N, BC=BLOCK_C, num_warps=NUM_WARPS,
            )  # fmt: skip
    return torch.empty(1, dtype=torch.uint8, device=flat.device)
