"""How a bucket travels: the collective behind "reduce this bucket", chosen once per bucket.

In: a flat buffer whose contributions stand. Out: the sum over the bucket's group, in the slice that
this rank owns (or everywhere). Sums are made in fp32 whatever is on the wire::

    fp32 wire    reduce_scatter (or all_reduce) in place
    16-bit wire  cast -> all_to_all -> shard_reduce: every rank adds the chunks it received in fp32
                 and stores them into its own slice, in one pass and without a temporary
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gtpgraph import compat
from gtpgraph.kernels.ops import shard_reduce


class Reduction(Protocol):
    """Start and finish the reduction of one flat buffer; both run on the communication stream's
    order, `finish` on whatever stream reads the result."""

    def start(self, flat: Tensor) -> None:
        """Launch; `flat` [numel] holds every contribution."""

    def finish(self, flat: Tensor) -> None:
        """Wait, and put the sum into the owned slice of `flat`."""


class NoReduction:
    """The group of one rank: the contributions are the sum."""

    def start(self, flat: Tensor) -> None:
        """Nothing to send."""

    def finish(self, flat: Tensor) -> None:
        """Nothing to wait for."""


class InPlace:
    """reduce_scatter into the owned slice, or all_reduce, in the buffer's own dtype."""

    def __init__(self, group: dist.ProcessGroup, own: slice, *, everywhere: bool) -> None:
        self._group = group
        self._own = own
        self._everywhere = everywhere
        self._work: dist.Work | None = None

    def start(self, flat: Tensor) -> None:
        """Launch the collective on `flat` [numel]."""
        if self._everywhere:
            self._work = dist.all_reduce(flat, group=self._group, async_op=True)
        else:
            out = flat[self._own]
            self._work = compat.reduce_scatter(out, flat, group=self._group, async_op=True)

    def finish(self, flat: Tensor) -> None:
        """Wait for it."""
        if self._work is not None:
            self._work.wait()
        self._work = None


class NarrowWire:
    """Half the bytes on the wire, fp32 sums: all_to_all of cast chunks, then `shard_reduce`."""

    def __init__(
        self, group: dist.ProcessGroup, own: slice, wire: torch.dtype, *, everywhere: bool
    ) -> None:
        self._group = group
        self._own = own
        self._wire = wire
        self._everywhere = everywhere
        self._flight: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, flat: Tensor) -> None:
        """Cast `flat` [numel] and exchange its chunks; both buffers live until `finish`."""
        send = flat.to(self._wire)
        recv = torch.empty_like(send)
        work = dist.all_to_all_single(recv, send, group=self._group, async_op=True)
        assert work is not None
        self._flight = (work, recv, send)

    def finish(self, flat: Tensor) -> None:
        """Wait, and store the sum of the received chunks, in fp32, into the owned slice."""
        if self._flight is None:
            return
        work, recv, send = self._flight
        work.wait()
        for buffer in (recv, send):
            if buffer.is_cuda:  # made on the communication stream, last used on this one
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        ranks = dist.get_world_size(self._group)
        store = torch.zeros(1, device=flat.device)
        chunks = recv.view(ranks, -1)
        shard_reduce(flat, chunks, store, 0, self._own.start, 1.0, True)
        if self._everywhere:
            compat.all_gather(flat, flat[self._own].clone(), group=self._group)
        self._flight = None


def choose_reduction(
    group: dist.ProcessGroup | None,
    own: slice,
    *,
    wire: torch.dtype,
    everywhere: bool,
) -> Reduction:
    """The reduction of a bucket over `group` (None: one rank) with `wire` on the wire.

    `own` is this rank's slice of the flat buffer; `everywhere` asks for the sum on all ranks.
    """
    if group is None:
        return NoReduction()
    if wire.itemsize < 4:
        return NarrowWire(group, own, wire, everywhere=everywhere)
    return InPlace(group, own, everywhere=everywhere)
