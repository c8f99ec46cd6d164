"""A region at run time: what surrounds its lowered forward and backward graphs.

In: the arguments that AOTAutograd passes. Out: its results, None where a gradient was finalised
inside. Around the backward graph::

    may it run? -> append flat buffers, betas, staging -> run (grad_ready ops call back here)
                -> were the reports those of the plan? -> finalise the UNGRAPHED wgrads eagerly
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gtpgraph import compat
from gtpgraph.graph.chains import group_occurrences
from gtpgraph.graph.plan import RegionPlan
from gtpgraph.graph.replay import RegionReplay
from gtpgraph.graph.stack_room import with_room
from gtpgraph.kernels.readiness import recording
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.ready import RegionCalls
from gtpgraph.parallel.weights import WeightState


@dataclass(frozen=True)
class RegionSite:
    """A site as the running region needs it: whose contribution, and which use of the weight."""

    state: WeightState
    use: int


def declare_calls(
    plan: RegionPlan, by_fqn: dict[str, WeightState], uses: dict[int, int]
) -> RegionCalls:
    """What a region owes for each forward call, from its plan grouped as it will be dispatched."""
    sites: Counter[int] = Counter()
    for occurrences in group_occurrences(plan.occurrences).values():
        sites.update(by_fqn[o.weight].index for o in occurrences)
    sites.update(by_fqn[e.weight].index for e in plan.excluded)
    return RegionCalls(plan.name, dict(sites), uses)


@dataclass(eq=False)
class Region:
    """One captured piece of a model, compiled once.

    `sites` are GRAPHED, by site number; `leaving` are the UNGRAPHED contributions, in the order of
    the graph's extra outputs; `buckets` is the order of the flat (then beta) placeholders;
    `staging` are the buffers of the placeholders behind those; `removed` are output positions that
    the graph no longer has; `fused` says whether accumulates were fused, `lasts` whether their
    operands last long enough to run them beside the main line of a captured graph.
    """

    wrapper: DistributedDataParallel
    plan: RegionPlan
    calls: RegionCalls
    sites: Sequence[RegionSite]
    leaving: Sequence[RegionSite]
    buckets: Sequence[int]
    removed: Sequence[int]
    staging: Sequence[Tensor] = ()
    owner: object = None
    lowering: str = "eager"
    texts: dict[str, str] = field(default_factory=dict)
    replay: RegionReplay | None = None
    lasts: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        return self.plan.name

    def wrap_forward(self, compiled: Any) -> Callable[..., Any]:
        """The forward that counts its calls; recomputation inside a backward is not one."""

        def forward(args: list[Any]) -> Any:
            if compat.backward_id() is None:
                self.note_forward()
            try:
                if self.replay is None or self.wrapper.recording is not None:
                    return compat.call_boxed(compiled, args)
                return self.replay.forward(compiled, args)
            except BaseException:  # no output, so its backward cannot come
                if compat.backward_id() is None and self.wrapper.recording is None:
                    self.wrapper.ledger.forget_forward(self.calls)
                raise

        return compat.boxed(forward)

    def wrap_backward(self, compiled: Any) -> Callable[..., Any]:
        """The backward that finalises, reports, and returns None for what it finalised."""

        def backward(args: list[Any]) -> list[Any]:
            wrapper = self.wrapper
            wrapper.enter_backward()
            wrapper.enter_staging()
            if wrapper.recording is None:
                wrapper.ledger.region_backward(self.calls, sync=wrapper.sync)
            try:
                results = self._finish(self._run_backward(compiled, args))
                wrapper.check_open("backward")
                return results
            except BaseException:
                wrapper.ledger.broken = True
                raise

        return compat.boxed(backward)

    def note_forward(self) -> None:
        """A forward call under grad, outside recomputation: its backward is owed."""
        if self.wrapper.recording is None:
            self.wrapper.ledger.region_forward(self.calls)
        else:
            self.wrapper.recording.calls.append(self.calls)

    def _run_backward(self, compiled: Any, args: list[Any]) -> list[Any]:
        record, replay = self.wrapper.recording, self.replay
        if replay is not None and record is None:
            instance = replay.find(args)
            if instance is not None and replay.backward_is_warm:
                return replay.backward(compiled, args, instance)
            replay.backward_is_warm = True
        owned = [self.wrapper.buckets[b] for b in self.buckets]
        args.extend(bucket.flat for bucket in owned)
        args.extend(record.beta(b) if record is not None else b.beta() for b in owned)
        args.extend(self.staging)
        run = _Run(self)
        branching = nullcontext() if record is None else record.region(lasts=self.lasts)
        with recording(run), branching:
            outputs = list(with_room(compat.call_boxed, compiled, args))
        run.check()
        return outputs

    def _finish(self, outputs: list[Any]) -> list[Any]:
        kept = len(outputs) - len(self.leaving)
        for site, wgrad in zip(self.leaving, outputs[kept:], strict=True):
            self.wrapper.eager.push(site.state, wgrad, site.use, declared=True)
        results = outputs[:kept]
        for position in self.removed:
            results.insert(position, None)
        return results


class _Run:
    """One execution of a region's backward: the recorder of its readiness ops."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.recorded: list[int] = []

    def grad_ready(self, site: int) -> None:
        """Record the occurrence where it happens, then report it."""
        self.recorded.append(site)
        region = self._region
        state, use = region.sites[site].state, region.sites[site].use
        if region.wrapper.recording is not None:
            region.wrapper.recording.record(state, use, region.name, declared=True)
            return
        state.bucket.fill(state.member)
        region.wrapper.ledger.settle(state.index)
        region.wrapper.report(state, use, region.name, declared=True)

    def bucket_reduce(self, bucket: int) -> None:
        """An in-graph reduction: the bucket leaves here."""
        self._region.wrapper.ledger.dispatch(bucket)

    def check(self) -> None:
        """Raise RuntimeError unless exactly the plan's occurrences ran, in the plan's order."""
        expected = [o.site for o in self._region.plan.occurrences]
        if self.recorded == expected:
            return
        names = [o.weight for o in self._region.plan.occurrences]
        got = [names[s] if s < len(names) else f"site {s}" for s in self.recorded]
        k = next(
            (i for i, (a, b) in enumerate(zip(expected, self.recorded, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        raise RuntimeError(
            f"region {self._region.name}: expected the {len(expected)} occurrence(s) of its plan, "
            f"got {len(got)}; first difference at occurrence {k}: expected "
            f"{names[k] if k < len(names) else 'nothing'}, got {got[k] if k < len(got) else 'none'}"
            ". The lowered graph dropped or moved readiness ops: compile with lowering='eager'."
        )
