"""unpack: pieces of one flat buffer into many tensors, cast and scaled, in one launch.

``tensor_i = scale * flat[offset_i : offset_i + numel_i]``. The mirror image of ``many``: one
program a tile, the tile table says where it reads and the pointer table where it writes. Bytes that
must move: every element read once and written once.

Legend: a tile record is (segment, start, numel, total, offset, beta index); see tables.py.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from gtpgraph.kernels import tables
from gtpgraph.kernels.common import TRITON_DTYPES, on_device

NUM_WARPS = 4


@triton.jit
def unpack_tile(p_out, p_from, o, numel, scale):
    m = o < numel
    value = tl.load(p_from + o, mask=m, other=0.0).to(tl.float32) * scale
    tl.store(p_out + o, value.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def unpack_kernel(
    p_flat,
    p_tiles,
    p_pointers,
    p_token,
    scale,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    p_record = p_tiles + i * RECORD
    segment = tl.load(p_record)
    start = tl.load(p_record + 1)
    numel = tl.load(p_record + 2)
    offset = tl.load(p_record + 4)
    address = tl.load(p_pointers + segment)
    if (address % 16 == 0) & (offset % 8 == 0) & (numel % 8 == 0):
        address = address // 16 * 16  # rounded rather than hinted, as in many.py
        p_out = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        o = start // TILE * TILE + tl.arange(0, TILE)  # [TILE]
        unpack_tile(p_out, p_flat + offset // 8 * 8, o, numel // 8 * 8, scale)
    else:
        p_out = address.to(tl.pointer_type(DTYPE))
        o = start + tl.arange(0, TILE)
        unpack_tile(p_out, p_flat + offset, o, numel, scale)
    if i == 0:
        tl.store(p_token, 0)


def unpack(
    tensors: list[torch.Tensor], flat: torch.Tensor, offsets: list[int], scale: float
) -> torch.Tensor:
    """Launch; arguments as ``ops.unpack``, checked there. Returns the token, uint8 [1]."""
    token = torch.empty(1, dtype=torch.uint8, device=flat.device)
    numels = tuple(t.numel() for t in tensors)

    def segments() -> Iterator[tables.Segment]:
        for numel, offset in zip(numels, offsets, strict=True):
            yield tables.Segment(offset, numel, numel)

    table = tables.tile_table("unpack", (numels, tuple(offsets)), flat.device, segments)
    if table.num_tiles == 0:
        return token.zero_()
    with on_device(flat):
        unpack_kernel[(table.num_tiles,)](
            flat, table.records, tables.pointer_table(tensors, flat.device), token, scale,
            DTYPE=TRITON_DTYPES[tensors[0].dtype], TILE=tables.TILE, RECORD=tables.RECORD,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return token
