"""Collectives over GTP peers' buffers in symmetric memory: all-gather, reduce-scatter + accumulate.

Every rank holds a buffer in symmetric memory and reads the others' directly; nothing is copied in
between and multicast is not used.

    reduce-scatter   main = b * main + scale * sum_r fp32(buffer_r[rank * N : (rank + 1) * N])
    all-gather       out[r * N : (r + 1) * N] = buffer_r[0 : N], cast to out's dtype

The sum is taken in the order of the ranks, so every run gives the same bits. Each is barrier,
kernel, barrier on the current stream: after the first, every peer has filled its buffer; after the
second, every peer has read it, so that it may be filled again. All three can be captured in a CUDA
graph. Bytes that must move, an element: as ``shard_reduce``, R - 1 of R rows over the link.

Legend: R ranks, N elements a rank, ``p_peers`` int64 [R] the addresses of the peers' buffers.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from gtpgraph import compat
from gtpgraph.kernels.common import TRITON_DTYPES, cdiv, factor, on_device, update

BLOCK, NUM_WARPS = 1024, 4
_CHANNEL_BEFORE, _CHANNEL_AFTER = 0, 1


@triton.jit
def load_peer(p_peers, r, o, m, DTYPE: tl.constexpr):
    """Peer r's elements ``o``, as fp32; buffers start at multiples of 16 bytes."""
    address = tl.multiple_of(tl.load(p_peers + r), 16)
    p_buffer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    return tl.load(p_buffer + o, mask=m, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["index"])
def reduce_scatter_kernel(
    p_flat,
    p_peers,
    p_beta,
    p_token,
    index,
    offset,
    scale,
    start,
    N,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m = o < N
    value = tl.zeros([BLOCK], tl.float32)
    for group in range(R // 8):  # eight peers' loads in flight, and no more registers for 64
        for j in tl.static_range(8):
            value += load_peer(p_peers, group * 8 + j, start + o, m, DTYPE)
    for j in tl.static_range(R // 8 * 8, R):
        value += load_peer(p_peers, j, start + o, m, DTYPE)
    update(p_flat + offset + o, m, factor(p_beta, index, FIRST), value, scale)
    if i == 0:
        tl.store(p_token, 0)


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    p_out, p_peers, rank, N, DTYPE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    r = (tl.program_id(1) + rank) % R  # every rank starts with another peer
    o = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m = o < N
    value = load_peer(p_peers, r, o, m, DTYPE)
    p = p_out + tl.cast(r, tl.int64) * N + o
    tl.store(p, value.to(p_out.dtype.element_ty), mask=m)


@dataclass(frozen=True)
class Peers:
    """A buffer's peers. ``handle`` keeps their mappings alive; ``table`` is int64 [ranks]."""

    handle: Any
    table: torch.Tensor
    rank: int
    ranks: int

    def barrier(self, channel: int) -> None:
        """Wait on the current stream until every rank of the group is here."""
        self.handle.barrier(channel)


_attached: dict[tuple[int, str], Peers] = {}


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] of symmetric memory on a CUDA `device`, not attached yet, contents undefined.

    Local; every rank of a group must ask for the same size.
    """
    return compat.symmetric_empty(nbytes, device)


def attach(buffer: torch.Tensor, group_name: str) -> Peers:
    """Map the peers of ``buffer``; collective over the group, once per buffer, before any capture.

    Args:
        buffer: a tensor made by ``torch.distributed._symmetric_memory.empty``.
        group_name: the process group's name (``group.group_name``).

    Raises:
        ValueError: the buffer does not start at a multiple of 16 bytes of its allocation.
    """
    handle = compat.symmetric_rendezvous(buffer, group_name)
    pointers = list(handle.buffer_ptrs)
    shift = buffer.data_ptr() - pointers[handle.rank]
    if shift % 16:
        raise ValueError(
            f"attach: buffer starts {shift} bytes into its symmetric allocation, expected a "
            "multiple of 16; align the views that are exchanged"
        )
    table = torch.tensor([p + shift for p in pointers], dtype=torch.int64, device=buffer.device)
    peers = Peers(handle, table, handle.rank, handle.world_size)
    _attached[buffer.data_ptr(), group_name] = peers
    return peers


def detach(buffer: torch.Tensor, group_name: str) -> None:
    """Forget ``buffer``'s peers; its captured graphs must be gone."""
    _attached.pop((buffer.data_ptr(), group_name), None)


def peers_of(op: str, buffer: torch.Tensor, group_name: str, ranks: int) -> Peers:
    """The peers that :func:`attach` mapped; RuntimeError where it was not called."""
    peers = _attached.get((buffer.data_ptr(), group_name))
    if peers is None:
        raise RuntimeError(
            f"gtpgraph::{op}: the buffer has no peers in group {group_name!r}; call "
            "gtpgraph.kernels.symmetric.attach(buffer, group_name) on every rank of the group first"
        )
    if peers.ranks != ranks:
        raise ValueError(
            f"gtpgraph::{op}: ranks: group {group_name!r} has {peers.ranks}, got {ranks}"
        )
    return peers


def launch_reduce_scatter(
    flat: torch.Tensor,
    table: torch.Tensor,
    wire: torch.dtype,
    rank: int,
    numel: int,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
) -> torch.Tensor:
    """The arithmetic alone, over the buffers whose addresses ``table`` holds. Returns the token."""
    token = torch.empty(1, dtype=torch.uint8, device=flat.device)
    if numel == 0:
        return token.zero_()
    reduce_scatter_kernel[(cdiv(numel, BLOCK),)](
        flat, table, beta, token, index, offset, scale, rank * numel, numel,
        DTYPE=TRITON_DTYPES[wire], R=table.numel(), FIRST=first, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return token


def launch_all_gather(
    out: torch.Tensor, table: torch.Tensor, wire: torch.dtype, rank: int, numel: int
) -> None:
    """The copies alone, from the buffers whose addresses ``table`` holds."""
    if numel:
        all_gather_kernel[(cdiv(numel, BLOCK), table.numel())](
            out, table, rank, numel,
            DTYPE=TRITON_DTYPES[wire], R=table.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


def reduce_scatter(
    flat: torch.Tensor,
    buffer: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    group_name: str,
    ranks: int,
) -> torch.Tensor:
    """Barrier, kernel, barrier; arguments as ``ops.symm_reduce_scatter``. Returns the token."""
    peers = peers_of("symm_reduce_scatter", buffer, group_name, ranks)
    numel = buffer.numel() // peers.ranks
    with on_device(flat):
        peers.barrier(_CHANNEL_BEFORE)
        token = launch_reduce_scatter(
            flat, peers.table, buffer.dtype, peers.rank, numel, beta, index, offset, scale, first
        )
        peers.barrier(_CHANNEL_AFTER)
    return token


def all_gather(out: torch.Tensor, buffer: torch.Tensor, group_name: str, ranks: int) -> None:
    """Barrier, kernel, barrier; arguments as ``ops.symm_all_gather``."""
    peers = peers_of("symm_all_gather", buffer, group_name, ranks)
    with on_device(out):
        peers.barrier(_CHANNEL_BEFORE)
        launch_all_gather(out, peers.table, buffer.dtype, peers.rank, buffer.numel())
        peers.barrier(_CHANNEL_AFTER)
