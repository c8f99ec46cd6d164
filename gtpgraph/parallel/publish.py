"""From updated masters to updated weights: gathers that the next forward may overlap.

In: a bucket whose master slice was just updated. Out: its weights, alike on every rank, at the
latest when somebody reads them::

    launch(slice)   cast -> all-gather over the bucket's own group, asynchronous
    publish()       wait -> copy into the weights

With `overlap` the weights of a bucket of GTP weights are published by their first reader: each one
carries `PUBLISH_ATTRIBUTE` until then, which a sharded module's property calls before it gathers.
Compiled and captured forwards, which gather ahead, state dicts and `close` publish everything
before they start. Buckets of ordinary weights, which are read without any sign, are never late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gtpgraph import compat
from gtpgraph.parallel.pieces import MasterSlice
from gtpgraph.parallel.shard_module import PUBLISH_ATTRIBUTE

if TYPE_CHECKING:
    from gtpgraph.parallel.data_parallel import DistributedDataParallel

__all__ = ["Publisher"]


@dataclass(eq=False)
class _Flight:
    """A gather on its way; `mine` lives as long as the collective reads it."""

    part: MasterSlice
    mine: Tensor
    whole: Tensor
    work: dist.Work | None
    stream: torch.cuda.Stream | None


class Publisher:
    """Gathers master slices into the weights of one wrapper."""

    def __init__(self, model: DistributedDataParallel, *, overlap: bool) -> None:
        self._model = model
        self._overlap = overlap
        self._flights: dict[int, _Flight] = {}
        if overlap:
            model.add_reader_hook(self.publish)

    @property
    def pending(self) -> list[int]:
        """Numbers of the buckets whose weights are still those before the last step."""
        return list(self._flights)

    def share(self, parts: tuple[MasterSlice, ...]) -> None:
        """Gather every slice; afterwards weights are new, or their first reader makes them so."""
        self.publish()
        late: list[MasterSlice] = []
        now: list[MasterSlice] = []
        for part in parts:
            states = [self._model.states[m.index] for m in part.bucket.members]
            gtp = self._overlap and all(state.spec is not None for state in states)
            (late if gtp else now).append(part)
        # What must be there at once goes first: groups have one order on all of their ranks.
        for part in (*now, *late):
            self._launch(part)
        for part in now:
            self.publish(part.bucket.number)
        for part in late:
            reader = partial(self.publish, part.bucket.number)
            for member in part.bucket.members:
                setattr(self._model.states[member.index].param, PUBLISH_ATTRIBUTE, reader)

    def _launch(self, part: MasterSlice) -> None:
        bucket, states = part.bucket, self._model.states
        dtypes = {states[m.index].param.dtype for m in bucket.members}
        mine = part.flat.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
        whole, work, group = mine, None, bucket.side.group
        if group is not None and mine.numel() != bucket.flat.numel():
            whole = mine.new_empty(bucket.flat.numel())
            work = compat.all_gather(whole, mine, group=group, async_op=True)
        stream = torch.cuda.current_stream(mine.device) if mine.is_cuda else None
        self._flights[bucket.number] = _Flight(part, mine, whole, work, stream)

    @torch.no_grad()
    def publish(self, number: int | None = None) -> None:
        """Wait for the gather of bucket `number` (None: of all) and write its weights; harmless
        when that is done. On a GPU the reader's stream waits, the host does not."""
        for each in [number] if number is not None else list(self._flights):
            flight = self._flights.pop(each, None)
            if flight is None:
                continue
            if flight.stream is None:
                self._write(flight)
                continue
            # On the step's own stream, whoever reads first: later readers are on it, or follow it.
            with torch.cuda.stream(flight.stream):
                self._write(flight)
            torch.cuda.current_stream(flight.whole.device).wait_stream(flight.stream)

    def _write(self, flight: _Flight) -> None:
        if flight.work is not None:
            flight.work.wait()
        for member in flight.part.bucket.members:
            param = self._model.states[member.index].param
            param.copy_(
                flight.whole[member.offset : member.offset + member.numel].view(member.shape)
            )
            param.__dict__.pop(PUBLISH_ATTRIBUTE, None)
