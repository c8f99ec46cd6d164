"""A graph runtime for machines without a GPU: "capture" runs the work and takes its effects back,
"replay" runs it again and writes into the same outputs.

In: the calls of ``gtpgraph.graph.driver.Driver``. Out: the same behaviour as far as Python can see
it. What a real graph does not do is hidden: replays call no region's Python and report nothing.
What a real graph holds is replayed: a reduction that was captured runs again at its place, and
nowhere else. What a real capture refuses is refused: a value on the host.

Test modules load this file with ``gtpgraph.by_path.module_at`` under one name.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gtpgraph.graph.recording import Recording
from gtpgraph.kernels import readiness
from gtpgraph.kernels.beside import beside
from gtpgraph.kernels.readiness import recording
from gtpgraph.parallel.data_parallel import DistributedDataParallel

_aten = torch.ops.aten
HOST_SYNC = (_aten._local_scalar_dense.default, _aten.nonzero.default)


class _Capturing(TorchDispatchMode):
    """Refuses what a stream that is being captured refuses; `fail_at` fails at that op (from 0)."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__()
        self._left = fail_at
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what is compiled would run eagerly below this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_SYNC:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.count == self._left:
            raise RuntimeError(f"the capture breaks at operation {self.count}")
        self.count += 1
        return func(*args, **(kwargs or {}))


def _without_this_file(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    behind = _without_this_file(traceback.tb_next)
    if traceback.tb_frame.f_code.co_filename == __file__:
        return behind
    return TracebackType(behind, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


class _InGraph:
    """During one replay: starts the reductions that the graph holds, behind the accumulate that
    they were captured behind."""

    def __init__(self, record: Recording) -> None:
        self._record = record
        self._counts: Counter[int] = Counter()

    def passed(self, bucket: Any) -> None:
        number = bucket.number
        self._counts[number] += 1
        if number in self._record.reduced and self._counts[number] == self._record.last[number]:
            self._record.driver.wait_for_branch()  # type: ignore[attr-defined]
            bucket.reduction.start(bucket.flat)
            bucket.reduction.finish(bucket.flat)


class _RegionReplay:
    """Readiness ops of a region's graph that is replayed: kernels alone, so no reports."""

    def __init__(self, region: Any, record: Recording) -> None:
        self._region = region
        self._inside = _InGraph(record)

    def grad_ready(self, site: int) -> None:
        self._inside.passed(self._region.sites[site].state.bucket)

    def bucket_reduce(self, bucket: int) -> None:
        raise AssertionError("no lowering puts this op into a graph")


class _StepReplay(Recording):
    """The finalisations of a step's graph that is replayed: they add, and are not recorded."""

    inside: _InGraph

    def record(self, state: Any, use: int, region: str | None, *, declared: bool = True) -> None:
        self._seen.setdefault(state.bucket.number, set()).add(state.member.slot)
        self.inside.passed(state.bucket)


class HostBranch:
    """A branch that runs as late as a GPU may run it: only when something waits for it."""

    def __init__(self, driver: HostDriver, limit: int) -> None:
        self._driver, self._limit = driver, limit
        self._pending: list[tuple[Callable[..., Tensor], Any]] = []

    def run(self, launch: Callable[..., Tensor], args: Any) -> Tensor:
        self._driver.branched += self._driver.where == "capture"
        self._pending.append((launch, args))
        self.settle(self._limit)
        token: Tensor = args[0].new_zeros(1, dtype=torch.uint8)
        return token

    def settle(self, behind: int) -> None:
        while len(self._pending) > behind:
            launch, args = self._pending.pop(0)
            with beside(None), torch.no_grad(), _disable_current_modes():
                launch(*args)


class HostGraph:
    """`events` are those that every replay records, in the order of the capture."""

    def __init__(self, driver: HostDriver, work: Callable[[], Any], lasting: bool) -> None:
        self._driver, self._work, self.lasting = driver, work, lasting
        self.outputs: list[Any] = []
        self.record: Recording | None = driver.wrapper.recording
        running = readiness._running.recorders
        self.region: Any = getattr(running[-1], "_region", None) if running else None
        self.region_record: Any = getattr(running[-1], "_record", None) if running else None
        self.replays = 0
        self.alive = True

    def replay(self) -> None:
        assert self.alive, "a graph was replayed after its reset"
        self.replays += 1
        with self._driver.at("replay"):
            new = self._again()
        if not self.lasting:
            self._driver.overwrite_scratch(self)
        for old, value in zip(self.outputs, new, strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                old.copy_(value)

    def _again(self) -> list[Any]:
        wrapper = self._driver.wrapper
        if self.record is not None:
            silent = _StepReplay(wrapper, self._driver, self.record.last)
            silent.betas = self.record.betas
            silent.inside = _InGraph(self.record)
            if self.record.branch is not None:
                silent.branch = self._driver.branch(self.record.wgrads_in_flight)
            with wrapper.recording_into(silent):
                results = list(self._work())
            self._driver.join()
            return results
        if self.region is not None:
            with recording(_RegionReplay(self.region, self.region_record)):
                return list(self._work())
        return list(self._work())

    def reset(self) -> None:
        self.alive = False


class HostDriver:
    """Keeps what a capture must not touch as it was: main_grads, module buffers, saved activations,
    RNG state.

    `where` is "capture", "replay" or None; `marks` are the events made inside captures; `fail_at`
    breaks the next capture at that operation.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        self.graphs: list[HostGraph] = []
        self.where: str | None = None
        self.marks: list[str] = []
        self.forks = self.joins = self.nows = 0
        self.branched = 0  # accumulates that a capture sent to a branch
        self._branches: list[HostBranch] = []
        self.fail_at: int | None = None
        self.num_operations = 0  # of the last capture

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def capture(self, work: Callable[[], Any], *, lasting: bool) -> tuple[HostGraph, Any]:
        graph = HostGraph(self, work, lasting)
        kept = [b.flat for b in self.wrapper.buckets] + list(self.wrapper.buffers())
        # a backward may write over what its forward saved for it
        kept += [o for g in self.graphs if g.lasting for o in g.outputs if isinstance(o, Tensor)]
        saved = [t.detach().clone() for t in kept]
        mode, self.fail_at = _Capturing(self.fail_at), None
        try:
            with torch.random.fork_rng(), self.at("capture"), mode:
                graph.outputs = [o.detach() if isinstance(o, Tensor) else o for o in work()]
        except RuntimeError as error:  # a driver that refuses has no frame of Python
            raise error.with_traceback(_without_this_file(error.__traceback__)) from None
        finally:
            self.num_operations = mode.count
            with torch.no_grad():
                for tensor, value in zip(kept, saved, strict=True):
                    tensor.data.copy_(value)  # autograd need not hear of it
        self.graphs.append(graph)
        return graph, graph.outputs

    @property
    def is_first(self) -> bool:
        return all(graph.lasting for graph in self.graphs)

    def overwrite_scratch(self, replayed: HostGraph) -> None:
        """What a replay may do at worst: its scratch is where results of graphs lie that share its
        memory pool and were captured later."""
        kept = {b.flat.untyped_storage().data_ptr() for b in self.wrapper.buckets}
        kept |= {p.untyped_storage().data_ptr() for p in self.wrapper.parameters()}
        lasting = [o for g in self.graphs if g.lasting for o in g.outputs]
        kept |= {o.untyped_storage().data_ptr() for o in lasting if isinstance(o, Tensor)}
        for graph in self.graphs[self.graphs.index(replayed) + 1 :]:
            for output in () if graph.lasting else graph.outputs:
                if isinstance(output, Tensor) and output.is_floating_point():
                    if output.untyped_storage().data_ptr() not in kept:
                        output.fill_(float("nan"))

    def branch(self, limit: int) -> HostBranch:
        assert self.where is not None
        self._branches.append(HostBranch(self, limit))
        return self._branches[-1]

    def wait_for_branch(self) -> None:
        for branch in self._branches:
            branch.settle(0)

    def mark(self) -> str:
        assert self.where == "capture", "an event of a graph is recorded while it is captured"
        self.wait_for_branch()
        self.marks.append(f"mark {len(self.marks)}")
        return self.marks[-1]

    def now(self) -> str:
        assert self.where is None, "an ordinary event does not belong into a graph"
        self.nows += 1
        return f"now {self.nows}"

    def fork(self) -> contextlib.AbstractContextManager[None]:
        assert self.where == "capture"
        self.wait_for_branch()
        self.forks += 1
        return contextlib.nullcontext()

    def join(self) -> None:
        self.wait_for_branch()
        self._branches.clear()
        self.joins += self.where == "capture"  # a replay re-runs the code that was captured
