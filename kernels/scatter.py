"""scatter_accumulate: rows added into main_grad where indices say, without a dense gradient.

``main[indices[n]] += scale * values[n]``, equal indices summed first, in fp32 and one order. No
atomics, so that two runs agree bit for bit, and no sort (torch's takes 0.3 ms for 8192 rows): rows
of equal index find each other, and the first one sums them. A first contribution scales or clears
main before (``prepare``, which returns at once where its factor is 1)::

    links    N x N comparisons: how many rows of this index follow row n, and which is the next?
             (-1 of them where another one precedes it)
    scatter  the first ones add their row and those that follow: a few from link to link, many by a
             walk through the indices, a chunk at a time

Bytes that must move: values read once, the rows that are hit read and written once; all of main
written once where it is cleared. For few rows: comparisons grow with N^2.

Legend: N rows of C columns, main [ROWS, C]; count, link [N]; a program of ``scatter`` has BC
columns of one row.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

from gtpgraph.kernels.common import cdiv, on_device, update
from gtpgraph.kernels.wgrad_gemm import PREPARE_BLOCK, PREPARE_PROGRAMS, PREPARE_WARPS
from gtpgraph.kernels.wgrad_gemm import prepare_kernel as prepare

LINK_ROWS, LINK_OTHERS = 16, 256
BLOCK_N, BLOCK_C, NUM_WARPS = 64, 128, 4
FEW = tl.constexpr(8)  # a link costs the latency of two dependent loads, a chunk that of more


@triton.jit
def wrapped(index, m, ROWS):
    """int32 indices, those from the end made positive, -1 for those outside main or the mask."""
    index = tl.where(index < 0, index + ROWS, index)
    return tl.where(m & (index >= 0) & (index < ROWS), index, -1).to(tl.int32)


@triton.jit
def links_kernel(p_indices, p_count, p_link, N, ROWS, BN: tl.constexpr, BM: tl.constexpr):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)  # [BN] whose links
    m_n = o_n < N
    mine = wrapped(tl.load(p_indices + o_n, mask=m_n, other=0).to(tl.int64), m_n, ROWS)
    earlier = tl.zeros([BN, BM], tl.int32)
    count = tl.zeros([BN, BM], tl.int32)
    link = tl.full([BN, BM], 2147483647, tl.int32)
    for start in range(0, N, BM):
        o_m = start + tl.arange(0, BM)
        m_m = o_m < N
        other = wrapped(tl.load(p_indices + o_m, mask=m_m, other=0).to(tl.int64), m_m, ROWS)
        same = mine[:, None] == other[None, :]
        follows = same & (o_m[None, :] > o_n[:, None])
        earlier |= (same & (o_m[None, :] < o_n[:, None])).to(tl.int32)
        count += follows.to(tl.int32)
        link = tl.minimum(link, tl.where(follows, o_m[None, :], 2147483647))
    is_first = (tl.max(earlier, axis=1) == 0) & (mine >= 0)
    tl.store(p_count + o_n, tl.where(is_first, tl.sum(count, axis=1), -1), mask=m_n)
    tl.store(p_link + o_n, tl.min(link, axis=1), mask=m_n)


@triton.jit
def scatter_kernel(
    p_flat,
    p_values,
    p_indices,
    p_count,
    p_link,
    offset,
    scale,
    N,
    C,
    ROWS,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    count = tl.load(p_count + i)
    if count >= 0:
        row = tl.load(p_indices + i).to(tl.int64)
        row = tl.where(row < 0, row + ROWS, row)
        o_c = tl.program_id(1) * BC + tl.arange(0, BC)  # [BC]
        m_c = o_c < C
        acc = tl.load(p_values + i * C + o_c, mask=m_c, other=0.0).to(tl.float32)
        if count <= FEW:
            n = i
            for _ in range(count):
                n = tl.load(p_link + n).to(tl.int64)
                acc += tl.load(p_values + n * C + o_c, mask=m_c, other=0.0).to(tl.float32)
        else:
            for start in range(i + 1, N, BN):
                o_n = start + tl.arange(0, BN)  # [BN]
                m_n = o_n < N
                other = tl.load(p_indices + o_n, mask=m_n, other=0).to(tl.int64)
                same = wrapped(other, m_n, ROWS).to(tl.int64) == row
                if tl.max(same.to(tl.int32), axis=0) > 0:
                    p_tile = p_values + o_n[:, None].to(tl.int64) * C + o_c[None, :]
                    tile = tl.load(p_tile, mask=same[:, None] & m_c[None, :], other=0.0)
                    acc += tl.sum(tile.to(tl.float32), axis=0)
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
            count, link = torch.empty(2, num, dtype=torch.int32, device=flat.device)
            links_kernel[(cdiv(num, LINK_ROWS),)](
                indices, count, link, num, rows, BN=LINK_ROWS, BM=LINK_OTHERS, num_warps=NUM_WARPS
            )
            scatter_kernel[(num, cdiv(columns, BLOCK_C))](
                flat, values, indices, count, link, offset, scale, num, columns, rows,
                BN=BLOCK_N, BC=BLOCK_C, num_warps=NUM_WARPS,
            )  # fmt: skip
    return torch.empty(1, dtype=torch.uint8, device=flat.device)
