"""accumulate_many and pack: many tensors of any shapes into one flat buffer, in one launch.

``main_i = b_i * main_i + scale * wgrad_i`` for every tensor i, or, packing, ``flat = scale *
tensor_i`` with the gaps between them stored as zero. One program handles one tile of one tensor:
it reads its record of the tile table, then the tensor's address, then streams the tile. Bytes that
must move are those of ``accumulate``; the records add under 0.5%.

Alignment is found at run time: where address, place and length are multiples of the vector width
the tile takes 16-byte accesses, else (a bias of 37 elements) narrow ones.

Legend: a tile record is (segment, start, numel, total, offset, beta index); see tables.py.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from gtpgraph.kernels import tables
from gtpgraph.kernels.common import TRITON_DTYPES, on_device, update
from gtpgraph.kernels.launch import launch

NUM_WARPS = 4


@triton.jit
def many_tile(p_main, p_wgrad, o, numel, total, b, scale, PADDED: tl.constexpr):
    m_value = o < numel
    value = tl.load(p_wgrad + o, mask=m_value, other=0.0).to(tl.float32)
    if PADDED:
        update(p_main + o, o < total, b, value, scale)
    else:
        update(p_main + o, m_value, b, value, scale)


@triton.jit
def many_kernel(
    p_flat,
    p_tiles,
    p_pointers,
    p_beta,
    p_token,
    scale,
    DTYPE: tl.constexpr,
    STORE: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    p_record = p_tiles + i * RECORD
    segment = tl.load(p_record)
    start = tl.load(p_record + 1)
    numel = tl.load(p_record + 2)
    total = tl.load(p_record + 3)
    offset = tl.load(p_record + 4)
    address = tl.load(p_pointers + segment)
    if STORE:  # packing: nothing old counts
        b = tl.full([], 0.0, tl.float32)
    else:
        beta_index = tl.load(p_record + 5)
        b = tl.full([], 1.0, tl.float32)
        if beta_index >= 0:
            b = tl.load(p_beta + beta_index)
    if (address % 16 == 0) & (offset % 8 == 0) & (numel % 8 == 0) & (total % 8 == 0):
        # Rounded rather than hinted: a hint would stick to the loaded value, in the other branch
        # too. Divisible addresses, places and lengths are what makes the accesses 16 bytes wide.
        address = address // 16 * 16
        p_wgrad = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        p_main = p_flat + offset // 8 * 8
        o = start // TILE * TILE + tl.arange(0, TILE)  # [TILE]
        many_tile(p_main, p_wgrad, o, numel // 8 * 8, total // 8 * 8, b, scale, STORE)
    else:
        p_wgrad = address.to(tl.pointer_type(DTYPE))
        o = start + tl.arange(0, TILE)
        many_tile(p_flat + offset, p_wgrad, o, numel, total, b, scale, STORE)
    if i == 0:
        tl.store(p_token, 0)


def _launch(
    flat: torch.Tensor,
    tensors: list[torch.Tensor],
    table: tables.TileTable,
    beta: torch.Tensor,
    scale: float,
    store: bool,
) -> torch.Tensor:
    token = torch.empty(1, dtype=torch.uint8, device=flat.device)
    if table.num_tiles == 0:
        return token.zero_()
    with on_device(flat):
        pointers = tables.pointer_table(tensors, flat.device)
        dtype = tensors[0].dtype
        launch(
            many_kernel, ("many", flat.device, flat.dtype, dtype, store, table.num_tiles),
            (table.num_tiles, 1, 1), (flat, table.records, pointers, beta, token, scale),
            {"DTYPE": TRITON_DTYPES[dtype], "STORE": store, "TILE": tables.TILE,
             "RECORD": tables.RECORD},
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return token


def accumulate_many(
    flat: torch.Tensor,
    wgrads: list[torch.Tensor],
    beta: torch.Tensor,
    indices: list[int],
    offsets: list[int],
    scale: float,
    first: list[bool],
) -> torch.Tensor:
    """Launch; arguments as ``ops.accumulate_many``, checked there. Returns the token."""
    numels = tuple(w.numel() for w in wgrads)

    def segments() -> Iterator[tables.Segment]:
        for offset, numel, index, is_first in zip(offsets, numels, indices, first, strict=True):
            yield tables.Segment(offset, numel, numel, index, is_first)

    layout = (numels, tuple(offsets), tuple(indices), tuple(first))
    table = tables.tile_table("accumulate_many", layout, flat.device, segments)
    return _launch(flat, wgrads, table, beta, scale, store=False)


def pack(
    flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int], scale: float
) -> torch.Tensor:
    """Launch; arguments as ``ops.pack``, checked there. Returns the token."""
    numels = tuple(t.numel() for t in tensors)
    starts = (*offsets, flat.numel())

    def segments() -> Iterator[tables.Segment]:
        yield tables.Segment(0, 0, starts[0])  # the gap before the first tensor
        for numel, start, end in zip(numels, starts[:-1], starts[1:], strict=True):
            yield tables.Segment(start, numel, end - start)

    table = tables.tile_table("pack", (numels, starts), flat.device, segments)
    nothing = tensors[0].new_empty(0) if tensors else flat[:0]  # what fills that gap
    beta = torch.empty(0, dtype=torch.float32, device=flat.device)
    return _launch(flat, [nothing, *tensors], table, beta, scale, store=True)
