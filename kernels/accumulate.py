"""accumulate: ``main = b * main + scale * wgrad`` in one pass over memory.

Bytes that must move, an element: wgrad read once, main read (not when b == 0) and written once;
10 for bf16 into fp32. The contiguous kernel is a 1-D stream with 16-byte accesses; whole tiles take
an unmasked path, since a mask whose length is odd would cost the vector width. The strided kernel
walks 2-D tiles: each tile is loaded along wgrad's fastest dimension and written along main's,
Triton turning the tile around in shared memory, so both sides stay coalesced.

Legend: N elements; strided [B, M, N] with wgrad strides s_b, s_m, s_n and main row-major.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

from gtpgraph.kernels.common import cdiv, factor, on_device, store_stats, update
from gtpgraph.kernels.launch import launch
from gtpgraph.kernels.stats import STATS_TILE

# Swept on one H200, 134M elements: 1024/4 315 us, 2048/4 317, 2048/8 321, 4096/8 324; eviction and
# cache hints 318 to 355, a persistent grid 338. Strided, 14336 x 4096: 128x128 141.8, 64x64 144.3.
BLOCK, NUM_WARPS = 1024, 4
TILE_M, TILE_N, TILE_WARPS = 128, 128, 8


@triton.jit
def accumulate_block(p_main, p_wgrad, o, m, b, scale, p_partial, STATS: tl.constexpr):
    value = tl.load(p_wgrad + o, mask=m, other=0.0).to(tl.float32)
    new = update(p_main + o, m, b, value, scale)
    if STATS:
        store_stats(p_partial, tl.where(m, new, 0.0))


@triton.jit(do_not_specialize=["index"])
def accumulate_kernel(
    p_flat,
    p_wgrad,
    p_beta,
    p_token,
    p_partials,
    index,
    offset,
    scale,
    N,
    FIRST: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b = factor(p_beta, index, FIRST)
    p_main = p_flat + offset
    p_partial = p_partials + 2 * i
    if (i + 1) * BLOCK <= N:
        m = tl.full([BLOCK], 1, tl.int1)
        accumulate_block(p_main, p_wgrad, o, m, b, scale, p_partial, STATS)
    else:
        accumulate_block(p_main, p_wgrad, o, o < N, b, scale, p_partial, STATS)
    if i == 0:
        tl.store(p_token, 0)


@triton.jit(do_not_specialize=["index"])
def accumulate_strided_kernel(
    p_flat,
    p_wgrad,
    p_beta,
    p_token,
    index,
    offset,
    scale,
    M,
    N,
    s_b,
    s_m,
    s_n,
    FIRST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * tiles_n
    i_b = i // tiles
    i_m = i % tiles // tiles_n
    i_n = i % tiles_n
    o_m = i_m * TILE_M + tl.arange(0, TILE_M)  # [TILE_M]
    o_n = i_n * TILE_N + tl.arange(0, TILE_N)  # [TILE_N]
    m = (o_m < M)[:, None] & (o_n < N)[None, :]  # [TILE_M, TILE_N]
    b = factor(p_beta, index, FIRST)
    p_tile = p_wgrad + i_b * s_b + (o_m[:, None] * s_m + o_n[None, :] * s_n)
    value = tl.load(p_tile, mask=m, other=0.0).to(tl.float32)
    p_main = p_flat + offset + i_b * M * N + (o_m[:, None] * N + o_n[None, :])
    update(p_main, m, b, value, scale)
    if i == 0:
        tl.store(p_token, 0)


def collapse(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """[(size, stride), ...], outer first, neighbours that one stride describes merged."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def accumulate(
    flat: torch.Tensor,
    wgrad: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    partials: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch; arguments as ``ops.accumulate``, checked there. Returns the token, uint8 [1]."""
    token = torch.empty(1, dtype=torch.uint8, device=flat.device)
    numel = wgrad.numel()
    if numel == 0:
        return token.zero_()
    with on_device(flat):
        if wgrad.is_contiguous():
            block = BLOCK if partials is None else STATS_TILE
            stats = partials is not None
            key = ("accumulate", flat.device, flat.dtype, wgrad.dtype, offset, numel, first, stats)
            launch(
                accumulate_kernel, key, (cdiv(numel, block), 1, 1),
                (flat, wgrad, beta, token, partials if stats else flat,
                 index, offset, scale, numel),
                {"FIRST": first, "STATS": stats, "BLOCK": block}, num_warps=NUM_WARPS,
            )  # fmt: skip
        else:
            _launch_strided(flat, wgrad, beta, token, index, offset, scale, first)
    return token


def _launch_strided(
    flat: torch.Tensor,
    wgrad: torch.Tensor,
    beta: torch.Tensor,
    token: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
) -> None:
    dims = collapse(tuple(wgrad.shape), wgrad.stride())
    if len(dims) > 3:
        raise NotImplementedError(
            f"gtpgraph::accumulate: wgrad of shape {tuple(wgrad.shape)} with strides "
            f"{wgrad.stride()} needs {len(dims)} dimensions, the kernel takes 3; pass "
            "wgrad.contiguous()"
        )
    (size_b, s_b), (size_m, s_m), (size_n, s_n) = [(1, 0)] * (3 - len(dims)) + dims
    tiles = size_b * cdiv(size_m, TILE_M) * cdiv(size_n, TILE_N)
    accumulate_strided_kernel[(tiles,)](
        flat, wgrad, beta, token, index, offset, scale, size_m, size_n, s_b, s_m, s_n,
        FIRST=first, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=TILE_WARPS,
    )  # fmt: skip
