"""Device tables for kernels that work on many tensors in one launch.

Two tables, because they change at different times. The *tile table* says which piece of which
tensor a program works on: it depends on shapes and offsets, is made once per plan, and is kept for
good, since a captured graph holds its address. The *pointer table* holds the tensors' addresses:
it is kept while the addresses stay the same, and under capture it is filled by one copy node from
pinned memory that stays alive, so that a replay does no host work and allocates nothing.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

TILE = 4096  # elements a program handles
RECORD = 6  # int64 fields a tile record has
_POINTER_TABLES = 64  # kept outside of capture, least recently used first out
_ARENA_ENTRIES = 1 << 17  # int64 entries (1 MiB) of pinned memory that captured copies read


@dataclass(frozen=True)
class Segment:
    """One tensor's place: elements [offset, offset + numel) of flat, then padding up to ``total``."""

    offset: int
    numel: int
    total: int
    index: int = 0
    first: bool = True


@dataclass(frozen=True)
class TileTable:
    """``records`` int64 [num_tiles, RECORD]: segment, start, numel, total, offset, beta index.

    The beta index is -1 where the contribution is a later one (b = 1).
    """

    records: torch.Tensor
    num_tiles: int


_tiles: dict[tuple[torch.device, tuple[Segment, ...]], TileTable] = {}
_pointers: OrderedDict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = OrderedDict()
_arenas: list[torch.Tensor] = []
_arena_used = 0
_lock = threading.Lock()


def tile_records(segments: tuple[Segment, ...]) -> list[list[int]]:
    """The rows of a tile table, in the order of the segments (host only)."""
    rows = []
    for number, s in enumerate(segments):
        beta_index = s.index if s.first else -1
        for start in range(0, s.total, TILE):
            rows.append([number, start, s.numel, s.total, s.offset, beta_index])
    return rows


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tile_table(op: str, segments: tuple[Segment, ...], device: torch.device) -> TileTable:
    """The tile table of a plan, made at its first call.

    Raises:
        RuntimeError: the first call is under CUDA graph capture (the upload would be replayed).
    """
    key = (device, segments)
    table = _tiles.get(key)
    if table is None:
        if _capturing(device):
            raise RuntimeError(
                f"gtpgraph::{op}: first call with these shapes and offsets is under CUDA graph "
                "capture; expected its tile table to exist. Run the step once before capturing it"
            )
        rows = tile_records(segments)
        records = torch.tensor(rows, dtype=torch.int64).view(-1, RECORD).to(device)
        table = _tiles[key] = TileTable(records, len(rows))
    return table


def pointer_table(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Addresses of ``tensors``, int64 [len(tensors)] on ``device`` (0 for an empty tensor)."""
    pointers = tuple(t.data_ptr() for t in tensors)
    if device.type != "cuda":
        return torch.tensor(pointers, dtype=torch.int64)
    if _capturing(device):
        return _captured_pointers(pointers, device)
    _reserve(2 * len(pointers))  # so that the capture that follows finds pinned memory
    key = (device, pointers)
    with _lock:
        table = _pointers.pop(key, None)
        if table is None:
            table = torch.tensor(pointers, dtype=torch.int64).pin_memory().to(device)
        _pointers[key] = table
        if len(_pointers) > _POINTER_TABLES:
            _pointers.popitem(last=False)
    return table


def _reserve(entries: int) -> None:
    """Make sure that the arena holds ``entries`` more; pinning is not allowed under capture."""
    global _arena_used
    with _lock:
        if not _arenas or _arena_used + entries > _arenas[-1].numel():
            size = max(_ARENA_ENTRIES, entries)
            _arenas.append(torch.empty(size, dtype=torch.int64, pin_memory=True))
            _arena_used = 0


def _captured_pointers(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    global _arena_used
    _reserve(len(pointers))
    with _lock:
        host = _arenas[-1][_arena_used : _arena_used + len(pointers)]
        _arena_used += len(pointers)
    host.copy_(torch.tensor(pointers, dtype=torch.int64))
    return torch.empty(len(pointers), dtype=torch.int64, device=device).copy_(
        host, non_blocking=True
    )
