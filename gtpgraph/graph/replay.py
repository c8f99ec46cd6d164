"""Replay a region: its forward and backward as captured graphs, in several instances.

In: the lowered callables of a region and the arguments that AOTAutograd passes. Out: their results,
from replays. Every (input shapes) has instances of its own, and each forward in flight another::

    call 1  of a shape   runs as it is: the warm-up is the step itself, so it has no side effects
    call 2               captured, then replayed
    later                replayed; only the true inputs are copied in

Parameters, buffers, main_grads and saved activations are static: a graph reads them where they lie.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gtpgraph import compat
from gtpgraph.graph.captured import Captured, capture_call
from gtpgraph.graph.driver import Driver
from gtpgraph.graph.recording import Recording
from gtpgraph.kernels.readiness import recording

if TYPE_CHECKING:
    from gtpgraph.graph.region import Region

log = logging.getLogger("gtpgraph.replay")
DISPATCH = ("after", "event", "in_graph")
ShapeKey = tuple[object, ...]


@dataclass(frozen=True)
class ReplayOptions:
    """`dispatch`: when reports are made; `max_captures`: shapes captured per region;
    `max_in_flight`: forwards whose backwards have not run; `wgrads_in_flight`: accumulates beside
    the main line of a graph."""

    dispatch: str = "event"
    max_captures: int = 8
    max_in_flight: int = 4
    wgrads_in_flight: int = 2

    def check(self, function: str) -> None:
        """Raise one ValueError that lists every option out of range."""
        bad = []
        if self.dispatch not in DISPATCH:
            bad.append(f"dispatch: expected one of {DISPATCH}, got {self.dispatch!r}")
        if self.max_captures < 1 or self.max_in_flight < 1:
            bad.append("max_captures and max_in_flight: expected 1 or more")
        if self.wgrads_in_flight < 0:
            bad.append(f"wgrads_in_flight: expected 0 or more, got {self.wgrads_in_flight}")
        if bad:
            raise ValueError(f"{function}: " + "; ".join(bad) + ".")


@dataclass(eq=False)
class Instance:
    """A forward and a backward that belong together through the activations between them."""

    forward: Captured | None = None
    backwards: dict[bool, tuple[Captured, Recording]] = field(default_factory=dict)
    in_flight: bool = False  # from a forward to its backward


@dataclass(eq=False)
class RegionReplay:
    """Instances of one region, by input shapes; `shapes` counts them over its recompilations."""

    region: Region
    driver: Driver
    options: ReplayOptions
    num_saved: int
    shapes: Counter[str] = field(default_factory=Counter)
    warm: set[ShapeKey] = field(default_factory=set)
    backward_is_warm: bool = False
    instances: dict[ShapeKey, list[Instance]] = field(default_factory=dict)
    _by_pointer: dict[int, Instance] = field(default_factory=dict)
    _told: bool = False
    _closed: bool = False

    @property
    def family(self) -> str:
        return self.region.name.split(".")[0]

    # -- forward --------------------------------------------------------------------------------

    def forward(self, compiled: Any, args: list[Any]) -> Any:
        """Run the region's forward: captured where that is possible."""
        key = tuple(tuple(a.shape) if isinstance(a, Tensor) else a for a in args)
        if key not in self.warm or self._closed:
            self.warm.add(key)
            return compat.call_boxed(compiled, args)
        instance = self._free_instance(key)
        if instance is None:
            return compat.call_boxed(compiled, args)
        if instance.forward is None:
            instance.forward = self._capture_forward(compiled, args)
        captured = instance.forward
        captured.feed(args)
        args.clear()
        captured.graph.replay()
        return self._hand_out(instance, captured)

    def _free_instance(self, key: ShapeKey) -> Instance | None:
        if self.region.calls.outstanding <= 1:  # this call's own: no earlier backward is owed
            for instance in (i for known in self.instances.values() for i in known):
                instance.in_flight = False
        known = self.instances.get(key)
        if known is None:
            if self.shapes[self.family] >= self.options.max_captures:
                self._tell(f"{self.shapes[self.family]} input shapes are captured (max_captures)")
                return None
            self.shapes[self.family] += 1
            known = self.instances[key] = []
        free = next((i for i in known if not i.in_flight), None)
        if free is None and len(known) >= self.options.max_in_flight:
            self._tell(f"{len(known)} forwards wait for their backward (max_in_flight)")
            return None
        if free is None:
            free = Instance()
            known.append(free)
        return free

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            log.warning("region %s runs uncaptured: %s", self.region.name, why)

    def _capture_forward(self, compiled: Any, args: list[Any]) -> Captured:
        static = self._static_pointers()
        # what it saves for its backward outlives the replays of any other graph
        return capture_call(
            self.driver, compiled, args, static, f"{self.region.name} forward", lasting=True
        )

    def _static_pointers(self) -> set[int]:
        module = self.region.wrapper.module
        tensors = [*module.parameters(), *module.buffers(), *self.region.wrapper.staging_buffers()]
        return {t.data_ptr() for t in tensors}

    def _hand_out(self, instance: Instance, captured: Captured) -> list[Any]:
        """Results as new tensors over the same memory: autograd marks what it is given."""
        cut = len(captured.outputs) - self.num_saved
        results = [o.detach() if isinstance(o, Tensor) else o for o in captured.outputs[:cut]]
        saved = captured.outputs[cut:]
        # A saved view of a parameter tells no instance from another; the copy of an input does.
        own = {p for k, p in enumerate(captured.pointers) if k not in captured.dynamic}
        instance.in_flight = True
        for tensor in saved:
            if isinstance(tensor, Tensor) and tensor.numel() and tensor.data_ptr() not in own:
                self._by_pointer[tensor.data_ptr()] = instance
                break
        return results + saved

    # -- backward -------------------------------------------------------------------------------

    def find(self, args: list[Any]) -> Instance | None:
        """The instance whose forward saved these arguments, if it was a captured one."""
        for arg in args:
            if isinstance(arg, Tensor):
                instance = self._by_pointer.get(arg.data_ptr())
                if instance is not None:
                    return instance
        return None

    def backward(self, compiled: Any, args: list[Any], instance: Instance) -> list[Any]:
        """Capture if need be, replay, report; returns the graph's outputs (copies).

        `args` are AOTAutograd's; flat buffers, betas and staging are appended here.
        """
        wrapper = self.region.wrapper
        reducing = self.options.dispatch == "in_graph" and wrapper.sync
        if reducing not in instance.backwards:
            instance.backwards[reducing] = self._capture_backward(
                compiled, args, instance, reducing
            )
        captured, record = instance.backwards[reducing]
        captured.feed([*args, *captured.inputs[len(args) :]])
        args.clear()
        record.prepare()
        captured.graph.replay()
        instance.in_flight = False
        events = record.events
        if self.options.dispatch == "after":
            end = self.driver.now()
            events = dict.fromkeys(events, end)
        record.finished(events)
        wrapper.report_replay(record)
        # Its outputs lie in memory that the next backward graph may use; those of UNGRAPHED weights
        # wait in the eager queue for longer than that.
        return [o.clone() if isinstance(o, Tensor) else o for o in captured.outputs]

    def _capture_backward(
        self, compiled: Any, args: list[Any], instance: Instance, reducing: bool
    ) -> tuple[Captured, Recording]:
        region = self.region
        owned = [region.wrapper.buckets[b] for b in region.buckets]
        last = Counter(s.state.bucket.number for s in region.sites)
        # a bucket may be reduced inside only if no one else reported into it in the last step
        alone = {b for b, n in last.items() if region.wrapper.bucket_reports[b] == n}
        whole = frozenset(alone if reducing else ())
        flying = self.options.wgrads_in_flight if region.lasts else 0
        record = Recording(
            region.wrapper, self.driver, last, in_graph=whole, wgrads_in_flight=flying
        )
        record.betas = {b.number: b.zeros.clone() for b in owned}
        extra = [b.flat for b in owned] + [record.betas[b.number] for b in owned]
        extra += region.staging
        static = self._static_pointers() | {t.data_ptr() for t in extra}
        assert instance.forward is not None
        for tensor in (*instance.forward.inputs, *instance.forward.outputs):
            if isinstance(tensor, Tensor):
                static.add(tensor.data_ptr())
        with recording(_Recorder(region, record)):
            captured = capture_call(
                self.driver, compiled, args + extra, static, f"{region.name} backward",
                lasting=False, scope=lambda: record.capturing(beside_all=True),
            )  # fmt: skip
        plan = [(o.weight, o.use) for o in region.plan.occurrences]
        record.check(plan, f"region {region.name}")
        return captured, record

    def close(self) -> None:
        """Free every graph. Idempotent."""
        for known in self.instances.values():
            for instance in known:
                if instance.forward is not None:
                    instance.forward.graph.reset()
                for captured, _ in instance.backwards.values():
                    captured.graph.reset()
        self.instances.clear()
        self._by_pointer.clear()
        self._closed = True


class _Recorder:
    """The readiness ops of a backward that is being captured."""

    def __init__(self, region: Region, record: Recording) -> None:
        self._region = region
        self._record = record

    def grad_ready(self, site: int) -> None:
        """Record the occurrence; the report itself is made at every replay."""
        entry = self._region.sites[site]
        self._record.record(entry.state, entry.use, self._region.name, declared=True)

    def bucket_reduce(self, bucket: int) -> None:
        """In-graph reductions are not captured by this lowering."""
        raise NotImplementedError(
            f"region {self._region.name}: bucket {bucket} asks for an in-graph reduction; use "
            "dispatch='event'."
        )
