"""What a capture records: every occurrence where it happens, in order, duplicates kept.

In: readiness ops and eager finalisations that run while a graph is captured. Out: for every replay,
the reports of that list, and for each bucket the event behind its last accumulate. Nothing is
inferred from the order of layers, and nothing is de-duplicated on the way: `[a, b, a]` stays three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gtpgraph.graph.driver import Driver
from gtpgraph.kernels.beside import Branch, beside
from gtpgraph.parallel.buckets import Bucket, Member, add_contribution
from gtpgraph.parallel.ready import RegionCalls, ReplayCounts, Report
from gtpgraph.parallel.reduction import NoReduction
from gtpgraph.parallel.weights import WeightState

if TYPE_CHECKING:
    from gtpgraph.parallel.data_parallel import DistributedDataParallel


@dataclass(frozen=True)
class Recorded:
    """One occurrence: whose, which use, finalised in which region (None: eager Python), and whether
    a region's forward call declares it (the UNGRAPHED chain's are, although they are eager)."""

    state: WeightState
    use: int
    region: str | None
    declared: bool


@dataclass(eq=False)
class Recording:
    """The occurrences of one captured graph, and what a replay needs to repeat them.

    `last` says after which occurrence of a bucket its event is recorded (how many there are in this
    graph, known from the plan or from a step that ran before); `betas` are static float32
    [members] buffers that captured accumulates read. Buckets in `in_graph` get all their reports
    from this graph: they are reduced inside it, on a branch behind the last accumulate (`reduced`).
    Accumulates run on `branch`, at most `wgrads_in_flight` of them beside the main line.
    """

    wrapper: DistributedDataParallel
    driver: Driver
    last: Counter[int]
    occurrences: list[Recorded] = field(default_factory=list)
    events: dict[int, Any] = field(default_factory=dict)
    betas: dict[int, Tensor] = field(default_factory=dict)
    calls: list[RegionCalls] = field(default_factory=list)
    in_graph: frozenset[int] = frozenset()
    wgrads_in_flight: int = 0
    branch: Branch | None = None
    reduced: set[int] = field(default_factory=set)
    _seen: dict[int, set[int]] = field(default_factory=dict)
    _counts: Counter[int] = field(default_factory=Counter)
    _beta_of: dict[int, Tensor] = field(default_factory=dict)
    _reports: dict[int, list[Report]] = field(default_factory=dict)

    # -- while the graph is captured ------------------------------------------------------------

    def record(self, state: WeightState, use: int, region: str | None, *, declared: bool) -> None:
        """An occurrence happens here; its accumulate was captured just before."""
        self.occurrences.append(Recorded(state, use, region, declared))
        number = state.bucket.number
        self._seen.setdefault(number, set()).add(state.member.slot)
        self._counts[number] += 1
        if self._counts[number] == self.last[number]:
            self._complete(state.bucket)

    def _complete(self, bucket: Bucket) -> None:
        if bucket.number in self.in_graph and len(self._seen[bucket.number]) == len(bucket.members):
            # what a reduction accumulates belongs to it: on the branch, all behind would wait
            with self.driver.fork(), beside(None):
                bucket.reduction.start(bucket.flat)
                bucket.reduction.finish(bucket.flat)
            self.reduced.add(bucket.number)
        else:
            self._mark(bucket)

    def _mark(self, bucket: Bucket) -> None:
        """An event behind what was captured so far, if a reduction will wait for it."""
        if not isinstance(bucket.reduction, NoReduction):
            self.events[bucket.number] = self.driver.mark()

    @contextmanager
    def capturing(self, *, beside_all: bool) -> Iterator[None]:
        """Around what is captured: accumulates may branch off (`beside_all`: every one inside, else
        those that say so), and all branches join the main line at the end."""
        # exchanges through staging buffers write main_grads too, in the main line
        if self.wgrads_in_flight and not self.wrapper.staging_buffers():
            self.branch = self.driver.branch(self.wgrads_in_flight)
        with beside(self.branch if beside_all else None):
            yield
        self._seal()

    @contextmanager
    def region(self, *, lasts: bool) -> Iterator[None]:
        """Around a region's graph within a captured step. `lasts`: its operands do, so that its
        accumulates may branch off; in the main line they go behind those that did."""
        if self.branch is not None and not lasts:
            self.branch.settle(0)
        with beside(self.branch if lasts else None):
            yield

    def _seal(self) -> None:
        """End of the capture: branches join the graph, and a bucket of which it was not known when
        it is complete is so here."""
        if self.branch is not None:
            self.branch.settle(0)
        self.driver.join()
        for number in self._seen.keys() - self.events.keys() - self.reduced:
            self._mark(self.wrapper.buckets[number])

    def beta(self, bucket: Bucket) -> Tensor:
        """float32 [members] for accumulates captured from here on: 1 for what was seen already."""
        base = self._static_beta(bucket)
        seen = self._seen.get(bucket.number, set())
        if not seen:
            return base
        if len(seen) == len(bucket.members):
            return bucket.ones
        mixed = base.clone()
        for slot in seen:
            mixed[slot : slot + 1].fill_(1.0)
        return mixed

    def add(self, bucket: Bucket, member: Member, wgrad: Tensor, scale: float) -> None:
        """Capture one eager accumulate; whether it stores is decided at each replay."""
        seen = self._seen.setdefault(bucket.number, set())
        beta = self._static_beta(bucket)
        first = member.slot not in seen
        with beside(self.branch):
            add_contribution(bucket.flat, wgrad, beta, member, scale, first)
        seen.add(member.slot)

    def _static_beta(self, bucket: Bucket) -> Tensor:
        beta = self.betas.get(bucket.number)
        if beta is None:
            raise RuntimeError(
                f"bucket {bucket.number}: expected one of the buckets {sorted(self.betas)} that an "
                "earlier step reached, got another. Run one step with the same inputs "
                "before capturing."
            )
        return beta

    # -- at every replay ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a replay: renew the betas of buckets whose state differs from the last replay, and
        mark what was written to them eagerly, behind which the whole replay would count."""
        for number, beta in self.betas.items():
            bucket = self.wrapper.buckets[number]
            if not isinstance(bucket.reduction, NoReduction):
                bucket.fence.settle()
            source = bucket.beta()
            if source is not self._beta_of.get(number):
                beta.copy_(source)
                self._beta_of[number] = source

    def finished(self, events: dict[int, Any]) -> None:
        """After a replay was launched: the buckets' contributions are done when `events` are."""
        buckets = self.wrapper.buckets
        for number, slots in self._seen.items():
            bucket = buckets[number]
            if len(slots) == len(bucket.filled):
                bucket.filled = [True] * len(slots)
            for slot in slots if len(slots) < len(bucket.filled) else ():
                bucket.filled[slot] = True
            if number in self.reduced:
                bucket.reduced_in_graph = True
            elif number in events:
                bucket.fence.wrote_at(events[number])
            else:
                bucket.fence.wrote()

    @cached_property
    def counts(self) -> ReplayCounts:
        """The recorded occurrences by weight and bucket, duplicates counted; after the capture."""
        eager = Counter(o.state.index for o in self.occurrences if not o.declared)
        declared = Counter(o.state.index for o in self.occurrences if o.declared)
        indices = dict.fromkeys(o.state.index for o in self.occurrences)
        last = {o.state.bucket.number: k for k, o in enumerate(self.occurrences)}
        weights = tuple((i, eager[i], declared[i]) for i in indices)
        return ReplayCounts(weights, tuple(sorted(last, key=last.__getitem__)))

    def reports(self, microbatch: int) -> list[Report]:
        """The replay's reports, in order; made once per microbatch number and shared."""
        made = self._reports.get(microbatch)
        if made is None:
            made = self._reports[microbatch] = [
                Report(o.state.fqn, o.use, o.region, microbatch) for o in self.occurrences
            ]
        return made

    def check(
        self, expected: Sequence[tuple[str, int]], what: str, *, reported: bool = False
    ) -> None:
        """Raise RuntimeError unless the recorded (weight, use) are `expected`, in that order.

        `reported`: leave out weights without a readiness hook, which accumulate silently.
        """
        recorded = [o for o in self.occurrences if not reported or o.state.ready_hook is not None]
        got = [(o.state.fqn, o.use) for o in recorded]
        if got == list(expected):
            return
        k = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        was, now = (str(x[k]) if k < len(x) else "nothing" for x in (list(expected), got))
        raise RuntimeError(
            f"{what}: expected the {len(expected)} occurrence(s) of the plan, recorded {len(got)}; "
            f"first difference at occurrence {k}: expected {was}, recorded {now}. Capture with the "
            "inputs and options that the plan was made with."
        )
