"""Device tables for kernels that work on many tensors in one launch.

Two tables, because they change at different times. The *tile table* says which piece of which
tensor a program works on: it depends on shapes and offsets, is made once per plan, and is kept for
good, since a captured graph holds its address. The *pointer table* holds the tensors' addresses:
it is kept while the addresses stay the same. Under capture the addresses are those of every replay,
so the table is filled at once, beside the capture, and the graph holds its kernel alone: a replay
copies nothing, does no host work and allocates nothing.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

TILE = 2048  # elements a program handles: 4 warps, 68.2 us where 4096 with 8 took 71.3
RECORD = 6  # int64 fields a tile record has
_POINTER_TABLES = 64  # kept outside of capture, least recently used first out
_ARENA_ENTRIES = 1 << 17  # int64 entries (1 MiB) of the memory that holds captured pointer tables
_UPLOAD_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Segment:
    """One tensor's place: ``numel`` elements of flat from ``offset``, padding up to ``total``."""

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


_tiles: dict[tuple[torch.device, Hashable], TileTable] = {}
_pointers: OrderedDict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = OrderedDict()
_arenas: dict[torch.device, list["_Arena"]] = {}  # never freed: captured graphs hold addresses
_lock = threading.Lock()


def tile_records(segments: Iterable[Segment]) -> list[list[int]]:
    """The rows of a tile table, in the order of the segments (host only)."""
    rows = []
    for number, s in enumerate(segments):
        beta_index = s.index if s.first else -1
        for start in range(0, s.total, TILE):
            rows.append([number, start, s.numel, s.total, s.offset, beta_index])
    return rows


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tile_table(
    op: str, layout: Hashable, device: torch.device, segments: Callable[[], Iterable[Segment]]
) -> TileTable:
    """The tile table of a plan, made at its first call.

    Args:
        op: who asks, for the error.
        layout: what ``segments`` follows from; plain tuples, since it is hashed at every call.
        segments: makes them, called at the first call only.

    Raises:
        RuntimeError: the first call is under CUDA graph capture (the upload would be replayed).
    """
    key = (device, (op, layout))
    table = _tiles.get(key)
    if table is None:
        if _capturing(device):
            raise RuntimeError(
                f"gtpgraph::{op}: first call with these shapes and offsets is under CUDA graph "
                "capture; expected its tile table to exist. Run the step once before capturing it"
            )
        rows = tile_records(segments())
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
    _arena(device, len(pointers), spare=_ARENA_ENTRIES // 4)  # none can be made under capture
    key = (device, pointers)
    with _lock:
        table = _pointers.pop(key, None)
        if table is None:
            table = torch.tensor(pointers, dtype=torch.int64).pin_memory().to(device)
        _pointers[key] = table
        if len(_pointers) > _POINTER_TABLES:
            _pointers.popitem(last=False)
    table.record_stream(torch.cuda.current_stream(device))  # it may be dropped before it is read
    return table


class _Arena:
    """Memory that captured pointer tables are cut from, and the stream that fills it.

    Made outside of capture, for allocating and pinning are not allowed inside. The stream is not
    part of any capture, so its copies run at once; whether they have is read from ``echo``, pinned
    memory that they copy the table back to, since asking CUDA would break the capture.
    """

    def __init__(self, entries: int, device: torch.device) -> None:
        self.host = torch.empty(entries, dtype=torch.int64, pin_memory=True)
        self.echo = torch.full((entries,), -1, dtype=torch.int64).pin_memory()
        self.table = torch.empty(entries, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.left = entries

    def upload(self, pointers: tuple[int, ...]) -> torch.Tensor:
        """The table of ``pointers`` on the device, complete on return; call with the lock held."""
        start = self.host.numel() - self.left
        self.left -= len(pointers)
        host, echo, table = (
            t[start : start + len(pointers)] for t in (self.host, self.echo, self.table)
        )
        host.copy_(torch.tensor(pointers, dtype=torch.int64))
        with torch.cuda.stream(self.stream):
            table.copy_(host, non_blocking=True)
            echo.copy_(table, non_blocking=True)
        deadline = time.monotonic() + _UPLOAD_TIMEOUT_S
        while not torch.equal(echo, host):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"pointer table: not on the device after {_UPLOAD_TIMEOUT_S} s; the GPU is "
                    "blocked by other work, finish that before capturing"
                )
        return table


def _arena(device: torch.device, entries: int, spare: int = 0) -> _Arena:
    """The device's arena with room for ``entries``, and ``spare`` more for captures to come."""
    with _lock:
        arenas = _arenas.setdefault(device, [])
        if not arenas or arenas[-1].left < entries + spare:
            arenas.append(_Arena(max(_ARENA_ENTRIES, 4 * entries), device))
        return arenas[-1]


def _captured_pointers(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    arena = _arena(device, len(pointers))
    with _lock:
        return arena.upload(pointers)
