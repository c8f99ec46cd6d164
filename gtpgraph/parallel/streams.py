"""Which reduction may start when: events between computing streams and the communication stream.

In: marks left by whoever wrote to a bucket (an eager accumulate, a replayed graph). Out: a stream
on which the bucket's reduction may be launched. On a CPU everything is in order already and all
of it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gtpgraph import compat

_comm: dict[torch.device, torch.cuda.Stream] = {}


def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream, one a device, on which bucket reductions are launched."""
    stream = _comm.get(device)
    if stream is None:
        stream = _comm[device] = torch.cuda.Stream(device)
    return stream


class Fence:
    """Streams that wrote to one bucket in this step, and events of graphs that did.

    An event is recorded on each stream when the reduction is launched, or before a replay is
    (`settle`), not at each write: it stands for all of them and for nothing much behind the last.
    The record owns its events: an event must outlive the wait that is queued on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[int, torch.cuda.Event] = {}
        self._given: list[torch.cuda.Event] = []
        self._used: dict[int, torch.cuda.Stream] = {}
        self._done: torch.cuda.Event | None = None

    @property
    def active(self) -> bool:
        return self._device.type == "cuda"

    def wrote(self) -> None:
        """The current stream has just written to the bucket."""
        if not self.active:
            return
        handle = compat.current_stream_handle(self._device)
        if handle not in self._used:
            self._used[handle] = torch.cuda.current_stream(self._device)

    def settle(self) -> None:
        """Record the events of the writes so far: what is launched next is not to be waited for."""
        for writer in self._used.values():
            event = torch.cuda.Event()
            event.record(writer)
            self._given.append(event)
        self._used.clear()

    def wrote_at(self, event: torch.cuda.Event) -> None:
        """Whatever wrote to the bucket is done when `event` is (of a graph that is in flight)."""
        self._given.append(event)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Inside, the current stream is the communication stream, behind every write so far."""
        if not self.active:
            yield
            return
        stream = comm_stream(self._device)
        for handle, writer in self._used.items():
            event = self._own.get(handle)
            if event is None:
                event = self._own[handle] = torch.cuda.Event()
            event.record(writer)
            stream.wait_event(event)
        for event in self._given:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def join(self) -> None:
        """The current stream waits for what `reducing` launched; the marks are cleared."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._done = None
        self._used.clear()
        self._given.clear()
