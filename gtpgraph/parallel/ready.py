"""Who owes how many readiness reports, and when a bucket has received all of them.

In: forward calls of regions, settled contributions and reports. Out: a call of `on_bucket` for each
complete bucket, and the list of faults at the end of a step. No tensors, no collectives.

What a weight owes has two parts. The captured part is declared: a region's forward calls under grad
and outside recomputation, times its sites. The eager part is learned from the first synchronised
step with the same set of regions; before that it is known only where it must be zero: a GTP weight
that was not gathered eagerly in this step, or any weight of a region that covers the whole model.
A weight is satisfied when no region call is outstanding and the eager part has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gtpgraph.parallel.ready_faults import disagreements, short_regions, short_weights, some
from gtpgraph.parallel.ready_records import RegionCalls, ReplayCounts, Report, WeightCount

__all__ = ["ReadyLedger", "RegionCalls", "ReplayCounts", "Report"]


class ReadyLedger:
    """Counts of one data-parallel wrapper.

    Args:
        weights: (first FQN, bucket, is GTP-sharded), in the order of their indices.
        num_buckets: buckets there are.
        on_bucket: called with a bucket's number the moment its counts are met.
    """

    def __init__(
        self,
        weights: Sequence[tuple[str, int, bool]],
        num_buckets: int,
        on_bucket: Callable[[int], None],
    ) -> None:
        self._weights = [WeightCount(*w) for w in weights]
        self._members: list[list[int]] = [[] for _ in range(num_buckets)]
        for index, weight in enumerate(self._weights):
            self._members[weight.bucket].append(index)
        self._num_frozen = [0] * num_buckets
        self._on_bucket = on_bucket
        # By the regions called and the weights frozen, for both change who finalises how often.
        self._learned: dict[tuple[frozenset[str], frozenset[int]], list[int | None]] = {}
        self._frozen: frozenset[int] = frozenset()
        self._regions: dict[str, RegionCalls] = {}
        self._last_active: frozenset[str] = frozenset()
        self._satisfied: list[set[int]] = [set() for _ in range(num_buckets)]
        self.dispatched = [False] * num_buckets
        self.left: list[int] = []  # buckets that were dispatched in this step, in order
        self.overlap = True
        self.ordered = False  # a bucket leaves behind all lower ones: the same order on all ranks
        self.broken = False
        # Kept until a region is called or something else is learned: every report reads them.
        self._active_now: frozenset[str] | None = None
        self._learned_now: list[int | None] | None = None

    # -- what is owed ---------------------------------------------------------------------------

    def declare(self, region: RegionCalls) -> None:
        """Make a region known. A name that is compiled again replaces its predecessor."""
        old = self._regions.get(region.name)
        if old is not None:
            for weight in self._weights:
                weight.regions = [r for r in weight.regions if r is not old]
        self._regions[region.name] = region
        self._active_now = None
        for index in region.sites:
            self._weights[index].regions.append(region)

    def region_forward(self, region: RegionCalls) -> None:
        """A forward call under grad, outside recomputation: its backward is owed."""
        region.forwards += 1
        self._active_now = None
        for index, count in region.sites.items():
            weight = self._weights[index]
            weight.owed += count
            self._satisfied[weight.bucket].discard(index)

    def forget_forward(self, region: RegionCalls) -> None:
        """Take one forward call back: its backward will not come."""
        if region.outstanding > 0:
            region.forwards -= 1
            self._active_now = None
            for index, count in region.sites.items():
                self._weights[index].owed -= count

    def region_backward(self, region: RegionCalls, *, sync: bool) -> None:
        """Entry to a region's backward, before anything is launched.

        Raises:
            RuntimeError: no forward call of the region is outstanding, or a bucket it adds to has
                left already; the weights are named.
        """
        late = [i for i in region.sites if self.dispatched[self._weights[i].bucket]]
        if region.outstanding <= 0 or late:
            names = [self._weights[i].name for i in (late or region.sites)]
            raise RuntimeError(
                f"region {region.name}: expected {region.forwards} backward(s) for as many forward "
                f"calls, got one more (retain_graph and a second backward, or a backward after "
                f"finish_grad_sync()); surplus reports of {some(names)}. Call the model once for "
                "each backward, and run all but the last under no_sync()."
            )
        region.backwards += 1
        region.synced += sync

    def enter_replay(
        self, counts: ReplayCounts, calls: Iterable[RegionCalls], *, sync: bool
    ) -> None:
        """Entry to the replay of a whole step, in which the regions `calls` run.

        Raises:
            RuntimeError: a bucket that it adds to has left already.
        """
        late = [b for b in counts.buckets if self.dispatched[b]]
        if late:
            names = [w.name for w in self._weights if w.bucket in late]
            raise RuntimeError(
                f"captured step: expected one replay in this step, got one more; surplus reports "
                f"of {some(names)}. Run all but the last under no_sync()."
            )
        for index, _, declared in counts.weights:
            self._weights[index].owed += declared
        for region in calls:
            region.forwards += 1
            region.backwards += 1
            region.synced += sync
        self._active_now = None

    def report_replay(self, counts: ReplayCounts) -> None:
        """All reports of a replayed graph at once: the same as settling and reporting each of its
        occurrences in order, without a call for each."""
        self._active()
        learned = self._learned_now
        for index, eager, declared in counts.weights:
            weight = self._weights[index]
            weight.contributed = True
            weight.owed -= declared
            weight.captured += declared
            weight.eager += eager
            expected = None if learned is None else learned[index]
            if expected is None:
                expected = self._expected_eager(index)
            met = weight.owed == 0 and weight.eager == expected
            if met and weight.watched and not weight.frozen:
                self._satisfied[weight.bucket].add(index)
        if self.overlap and self.ordered:
            self._dispatch_in_order()
        elif self.overlap:
            for bucket in counts.buckets:
                if self._is_complete(bucket):
                    self.dispatch(bucket)

    def settle(self, index: int, *, declared: bool = True) -> None:
        """One contribution of the weight stands in main_grad; a region had declared it, or not.

        Raises:
            RuntimeError: its bucket has left, so what was declared was too little.
        """
        weight = self._weights[index]
        if self.dispatched[weight.bucket]:
            raise RuntimeError(
                f"{weight.name}: expected all of its occurrences before bucket {weight.bucket} "
                f"left, got one more after {weight.reports} report(s): its regions declared too "
                "few. This is a fault of gtpgraph; report it with the plan."
            )
        weight.owed -= declared
        weight.contributed = True

    def settle_eager(self, index: int, *, sync: bool) -> None:
        """An eager contribution is about to be added.

        Raises:
            RuntimeError: the weight has reported as often as it owes, or its bucket has left.
        """
        weight = self._weights[index]
        learned = self._learned_eager(index)
        expected, why = learned, "learned from an earlier one"
        if learned is None and weight.is_gtp:
            expected, why = weight.gathers, "it was gathered as often"
        surplus = expected is not None and weight.eager >= expected
        if self.dispatched[weight.bucket] or (sync and surplus):
            raise RuntimeError(
                f"{weight.name}: expected {weight.reports if expected is None else expected} eager "
                f"finalisation(s) in this step ({why}), got one more. Run all but the last "
                "backward under no_sync(), or call forget_ready_counts() when the model uses its "
                "weights differently now."
            )
        weight.contributed = True

    def watch(self, index: int, watched: bool) -> None:
        """Whether the weight's reports come to this ledger."""
        self._weights[index].watched = watched

    def gathered(self, index: int) -> None:
        """An eager gather under grad: the weight may have an eager use in this step."""
        self._weights[index].gathers += 1

    # -- reports --------------------------------------------------------------------------------

    def report(self, index: int, *, captured: bool) -> None:
        """One readiness report; calls `on_bucket` when it completes the weight's bucket."""
        weight = self._weights[index]
        if captured:
            weight.captured += 1
        else:
            weight.eager += 1
        if self.overlap and self._is_satisfied(index):
            self._satisfied[weight.bucket].add(index)
            if self.ordered:
                self._dispatch_in_order()
            elif self._is_complete(weight.bucket):
                self.dispatch(weight.bucket)

    def _is_complete(self, bucket: int) -> bool:
        return len(self._satisfied[bucket]) == len(self._members[bucket]) - self._num_frozen[bucket]

    def _dispatch_in_order(self) -> None:
        for bucket, gone in enumerate(self.dispatched):
            if not gone and not self._is_complete(bucket):
                return
            self.dispatch(bucket)

    def dispatch(self, bucket: int) -> None:
        """Hand the bucket over, once."""
        if not self.dispatched[bucket]:
            self.dispatched[bucket] = True
            self.left.append(bucket)
            self._on_bucket(bucket)

    def _is_satisfied(self, index: int) -> bool:
        weight = self._weights[index]
        met = weight.owed == 0 and weight.eager == self._expected_eager(index)
        return met and weight.watched and not weight.frozen

    def _active(self) -> frozenset[str]:
        if self._active_now is None:
            self._active_now = frozenset(r.name for r in self._regions.values() if r.forwards)
            self._learned_now = self._lessons(self._active_now)
        return self._active_now

    def _learned_eager(self, index: int) -> int | None:
        """Eager reports of an earlier step with the same regions; None where nobody counted."""
        self._active()
        learned = self._learned_now
        return None if learned is None else learned[index]

    def _lessons(self, regions: frozenset[str]) -> list[int | None] | None:
        return self._learned.get((regions, self._frozen))

    def _expected_eager(self, index: int) -> int | None:
        learned = self._learned_eager(index)
        if learned is not None:
            return learned
        weight = self._weights[index]
        if any(r.whole_model and r.forwards for r in weight.regions):
            return 0
        return 0 if weight.is_gtp and weight.gathers == 0 and weight.regions else None

    # -- steps ----------------------------------------------------------------------------------

    def faults(self, *, allow_unused: bool) -> list[str]:
        """What is wrong at the end of a synchronised step, one line a weight or region."""
        learned = self._lessons(self._active()) or [None] * len(self._weights)
        lines = [] if allow_unused else short_regions(self._regions.values(), self._weights)
        lines += [] if allow_unused else short_weights(self._weights, learned)
        eager = self._lessons(frozenset())
        if eager is not None and self._active():
            lines += disagreements(self._weights, eager)
        return lines

    def close_step(self) -> None:
        """Learn the eager counts of a finished step (once for each set of regions)."""
        key = self._active(), self._frozen
        learned = self._learned.setdefault(key, [None] * len(self._weights))
        for index, weight in enumerate(self._weights):
            if learned[index] is None and weight.watched:
                learned[index] = weight.eager
        self._last_active = self._active() or self._last_active
        for region in self._regions.values():
            region.calls_a_step = region.forwards or region.calls_a_step
            if region.backwards:
                region.synced_a_step = region.synced
            region.forwards = region.backwards = region.synced = 0
        self._active_now = None
        for weight in self._weights:
            weight.owed = weight.gathers = 0

    def start_step(self, frozen: Iterable[int] = ()) -> None:
        """No reports yet. Forward calls that already ran stay owed, unless a fault left them.

        `frozen`: weights that need no gradient in this step.
        """
        self._freeze(frozenset(frozen))
        for region in self._regions.values():
            region.forwards = 0 if self.broken else region.outstanding
            region.backwards = region.synced = 0
        self._active_now = None
        if self.broken:
            for weight in self._weights:
                weight.owed = 0
        self.broken = False
        for weight in self._weights:
            weight.eager = weight.captured = 0
            weight.contributed = False
        for done in self._satisfied:
            done.clear()
        self.dispatched = [False] * len(self.dispatched)
        self.left = []

    @property
    def frozen(self) -> frozenset[int]:
        """Weights that need no gradient in this step, by index."""
        return self._frozen

    def _freeze(self, frozen: frozenset[int]) -> None:
        if frozen == self._frozen:
            return
        self._frozen = frozen
        self._active_now = None
        self._num_frozen = [sum(i in frozen for i in members) for members in self._members]
        for index, weight in enumerate(self._weights):
            weight.frozen = index in frozen

    @property
    def last_active(self) -> frozenset[str]:
        """Regions that were called in the last finished step with any."""
        return self._last_active

    def forget(self) -> None:
        """Learn the eager counts anew in the next synchronised step."""
        self._learned.clear()
        self._active_now = None

    def ready_counts(self) -> dict[str, int]:
        """Reports owed in one synchronised step, where known: those of the regions that the last
        captured step called, before one all of them once, plus what was learned eagerly with them.
        """
        names = self._last_active or frozenset(self._regions)
        eager = self._lessons(names) or [None] * len(self._weights)
        captured: Counter[int] = Counter()
        for region in (self._regions[name] for name in names):
            times = 1 if region.synced_a_step is None else region.synced_a_step
            captured.update({i: n * times for i, n in region.sites.items()})
        return {w.name: captured[i] + (eager[i] or 0) for i, w in enumerate(self._weights)}
