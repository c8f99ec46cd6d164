"""The few calls of a CUDA-graph runtime that capture needs, behind one interface.

In: a function that launches work. Out: something that launches the same work again. The CUDA driver
is the product; tests on machines without a GPU pass one that re-runs the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gtpgraph import compat
from gtpgraph.graph.branch import CudaBranch
from gtpgraph.kernels.beside import Branch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it again on the current stream."""

    def reset(self) -> None:
        """Free it; called before the groups that it uses are destroyed."""


class Driver(Protocol):
    """What capture asks of the device."""

    def capture(self, work: Callable[[], Any], *, lasting: bool) -> tuple[Graph, Any]:
        """Capture what `work` launches; nothing runs. Returns the graph and `work`'s result.

        A replay's results are valid until the next replay of the same graph if `lasting`, otherwise
        until the next replay of any graph that is not and was captured before: those share their
        memory.
        """

    @property
    def is_first(self) -> bool:
        """Whether nothing was captured into the shared memory so far: the results of the next graph
        last, `lasting` or not."""

    def mark(self) -> Any:
        """Inside a capture: an event that every replay records at this point."""

    def now(self) -> Any:
        """Outside a capture: an event behind everything launched on the current stream."""

    def branch(self, limit: int) -> Branch:
        """Inside a capture: the branch for accumulates, of which `limit` may run beside the main
        line before it waits for the oldest. Marks and forks are behind it."""

    def fork(self) -> AbstractContextManager[None]:
        """Inside a capture: a branch of the graph that starts at this point."""

    def join(self) -> None:
        """Inside a capture: the graph goes on when all its branches have ended."""


class CudaDriver:
    """CUDA graphs, those whose results must last in a memory pool of their own, others in one pool.

    A pool gives the scratch of one captured graph to the next as memory of any kind. In one pool
    the results of a graph could therefore lie in the scratch of one captured before it, whose next
    replay would overwrite them: right only if graphs were always replayed in the order of their
    capture, and forwards in flight, input shapes and variants without reductions are not. Graphs
    of one stream run one after another, so what only has scratch shares it in any order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared = torch.cuda.graph_pool_handle()
        self._is_shared = False
        # Of its own: torch keeps a cuBLAS workspace for each stream, which models must not share.
        self._stream = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)  # accumulates and marks
        self._reductions = torch.cuda.Stream(device)
        self._forked: set[torch.cuda.Stream] = set()

    def capture(self, work: Callable[[], Any], *, lasting: bool) -> tuple[Graph, Any]:
        """Capture `work` on its own stream; branches are joined before the capture ends."""
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if lasting else self._shared
        rng = torch.cuda.get_rng_state(self._device)
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = work()
                self.join()
        except BaseException:
            torch.cuda.set_stream(outside)  # torch leaves the capture's where ending it raises
            self._recover(rng, pool)
            raise
        outside.wait_stream(self._stream)
        self._is_shared = self._is_shared or not lasting
        return graph, result

    @property
    def is_first(self) -> bool:
        """Nobody's scratch is in the shared pool yet."""
        return not self._is_shared

    def _recover(self, rng: Tensor, pool: Any) -> None:
        """After a failed capture: the default generator still believes that it is captured and
        refuses random operations, and the allocator still routes to the pool."""
        self._forked.clear()
        index = self._device.index if self._device.index is not None else 0
        compat.end_pool(index, pool)
        self._shared = torch.cuda.graph_pool_handle()
        self._is_shared = False
        fresh = torch.Generator(device=self._device)
        fresh.set_state(rng)
        torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())

    def mark(self) -> torch.cuda.Event:
        """An external event: another stream may wait for it as soon as a replay is launched.

        On the side stream: in the chain of kernels its node costs 1 to 12 us (H200)."""
        event = torch.cuda.Event(external=True)
        event.record(self._behind(self._side))
        return event

    def now(self) -> torch.cuda.Event:
        """An ordinary event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def branch(self, limit: int) -> CudaBranch:
        """Accumulates on the side stream."""
        main = torch.cuda.current_stream(self._device)
        self._behind(self._side)
        return CudaBranch(main, self._side, limit)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """A side stream that starts behind what was captured so far, accumulates included."""
        stream = self._behind(self._reductions)
        if self._side in self._forked:
            stream.wait_stream(self._side)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The current stream waits for the side streams that something went to."""
        for stream in self._forked:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._forked.clear()

    def _behind(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """`stream`, behind what was captured so far on the current one."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._forked.add(stream)
        return stream
