"""shard_reduce: ``main = b * main + scale * sum_r fp32(recv[r])``, a reduce-scatter's arithmetic.

An all-to-all delivers ``recv`` [R, N]: row r is rank r's contribution to this rank's shard, bf16 on
the wire. The sum is taken in fp32 in the order of the ranks, with no temporary. Bytes that must
move, an element: R wire values read, main read (not when b == 0) and written once.

Rows are taken up to eight at a time: their loads are independent and all in flight together, and 64
ranks need no more registers than 8.

Legend: R ranks, N elements stored, V elements that are valid (the rest of main is stored as zero).
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

from gtpgraph.kernels.common import cdiv, factor, on_device, store_stats, update
from gtpgraph.kernels.stats import STATS_TILE

# Swept on one H200: at 8 ranks every block of 512 to 4096 within 0.5%, at 64 this 3% before 1024/4.
BLOCK, NUM_WARPS = STATS_TILE, 8


@triton.jit
def sum_rows(p_row, stride, m, BLOCK: tl.constexpr, R: tl.constexpr):
    """``sum_r fp32(row r)`` in the order of r; ``p_row`` [BLOCK] points into row 0."""
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(R // 8):
        for j in tl.static_range(8):
            total += tl.load(p_row + j * stride, mask=m, other=0.0).to(tl.float32)
        p_row += 8 * stride
    for j in tl.static_range(R % 8):
        total += tl.load(p_row + j * stride, mask=m, other=0.0).to(tl.float32)
    return total


@triton.jit
def reduce_block(
    p_main,
    p_recv,
    stride,
    o,
    m_value,
    m_main,
    b,
    scale,
    p_partial,
    R: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    value = sum_rows(p_recv + o, stride, m_value, BLOCK, R)
    # Padding is stored as zero: its old contents don't count.
    b = tl.where(m_value, b, 0.0)
    new = update(p_main + o, m_main, b, value, scale)
    if STATS:
        store_stats(p_partial, tl.where(m_value, new, 0.0))


@triton.jit(do_not_specialize=["index"])
def shard_reduce_kernel(
    p_flat,
    p_recv,
    p_beta,
    p_token,
    p_partials,
    index,
    offset,
    scale,
    stride,
    N,
    V,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b = factor(p_beta, index, FIRST)
    stride = tl.cast(stride, tl.int64)
    p_main = p_flat + offset
    p_partial = p_partials + 2 * i
    if (i + 1) * BLOCK <= V:
        m = tl.full([BLOCK], 1, tl.int1)
        reduce_block(p_main, p_recv, stride, o, m, m, b, scale, p_partial, R, STATS, BLOCK)
    else:
        reduce_block(p_main, p_recv, stride, o, o < V, o < N, b, scale, p_partial, R, STATS, BLOCK)
    if i == 0:
        tl.store(p_token, 0)


def shard_reduce(
    flat: torch.Tensor,
    recv: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    valid: int,
    partials: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch; arguments as ``ops.shard_reduce``, checked there. Returns the token, uint8 [1]."""
    token = torch.empty(1, dtype=torch.uint8, device=flat.device)
    ranks, numel = recv.shape
    if numel == 0:
        return token.zero_()
    with on_device(flat):
        shard_reduce_kernel[(cdiv(numel, BLOCK),)](
            flat, recv, beta, token, flat if partials is None else partials,
            index, offset, scale, recv.stride(0), numel, valid,
            R=ranks, FIRST=first, STATS=partials is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return token
