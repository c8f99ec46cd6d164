"""ReadyLedger: what is owed, when a bucket leaves, and every way of getting it wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpgraph.parallel.ready import ReadyLedger, RegionCalls, ReplayCounts


class Ledger(ReadyLedger):
    """A ledger that writes down which bucket left, and behind how many reports."""

    def __init__(self, *weights: tuple[str, int, bool]) -> None:
        self.log: list[tuple[int, int]] = []
        self.num_reports = 0
        super().__init__(weights, 1 + max(w[1] for w in weights), self._leave)

    def _leave(self, bucket: int) -> None:
        self.log.append((bucket, self.num_reports))

    def forward(self, region: RegionCalls) -> None:
        self.region_forward(region)

    def backward(self, region: RegionCalls, sync: bool = True) -> None:
        self.region_backward(region, sync=sync)
        for index, count in region.sites.items():
            for _ in range(count):
                self.settle(index)
                if sync:
                    self.num_reports += 1
                    self.report(index, captured=True)

    def eager(self, index: int, sync: bool = True, gathers: int = 1) -> None:
        for _ in range(gathers):
            self.gathered(index)
        self.settle_eager(index, sync=sync)
        if sync:
            self.num_reports += 1
            self.report(index, captured=False)

    def start(self) -> None:
        self.start_step()
        self.log, self.num_reports = [], 0

    def finish(self, *, allow_unused: bool = False) -> list[str]:
        faults = self.faults(allow_unused=allow_unused)
        self.broken = bool(faults)
        if not faults:
            for bucket in range(len(self.dispatched)):
                self.dispatch(bucket)
            self.close_step()
        return faults


def region(name: str, sites: dict[int, int], **kw: object) -> RegionCalls:
    return RegionCalls(name, sites, dict(sites), **kw)  # type: ignore[arg-type]


def ledger(*regions: RegionCalls, weights: int = 2, gtp: bool = True) -> Ledger:
    """`weights` weights w0, w1, ... in one bucket."""
    made = Ledger(*((f"w{k}", 0, gtp) for k in range(weights)))
    for each in regions:
        made.declare(each)
    made.start()
    return made


class TestOverlap:
    def test_the_first_captured_step_overlaps(self) -> None:
        r = region("r0", {0: 2, 1: 1})
        made = ledger(r)
        made.forward(r), made.backward(r)
        assert made.log == [(0, 3)] and made.finish() == []

    def test_ordinary_weights_overlap_once_learned(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r, gtp=False)
        for expected in ([], [(0, 2)]):
            made.start()
            made.forward(r), made.backward(r)
            assert made.log == expected and made.finish() == []

    def test_a_whole_model_needs_no_learning(self) -> None:
        r = region("r0", {0: 1, 1: 1}, whole_model=True)
        made = ledger(r, gtp=False)
        made.forward(r), made.backward(r)
        assert made.log == [(0, 2)]

    def test_eager_steps_overlap_from_the_second(self) -> None:
        made = ledger()
        for expected in ([], [(0, 3)]):
            made.start()
            made.eager(1), made.eager(0), made.eager(1)
            assert made.log == expected and made.finish() == []

    def test_switched_off_everything_leaves_at_the_end(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.overlap = False
        made.forward(r), made.backward(r)
        assert made.log == []
        assert made.finish() == [] and made.log == [(0, 2)]

    def test_unwatched_weights_hold_their_bucket_to_the_end_and_are_not_checked(self) -> None:
        r = region("r0", {0: 1})
        made = ledger(r)
        made.watch(1, False)
        made.forward(r), made.backward(r)
        assert made.log == [] and made.finish() == []
        made.watch(1, True)
        made.start()
        made.forward(r), made.backward(r)
        assert "w1: expected at least one" in made.finish()[0]

    def test_a_short_weight_holds_back_its_bucket_alone(self) -> None:
        r, s = region("r0", {0: 1}), region("r1", {1: 1})
        made = Ledger(("a", 0, True), ("b", 1, True))
        made.declare(r), made.declare(s)
        made.start()
        made.forward(r), made.forward(s), made.backward(s)
        assert made.log == [(1, 1)]

    def test_a_gathered_weight_waits_for_its_eager_part(self) -> None:
        """Captured and eager uses in one step: nothing is known before the first such step."""
        r = region("r0", {0: 1})
        made = ledger(r, weights=1)
        for expected in ([], [(0, 2)]):
            made.start()
            made.gathered(0)
            made.forward(r), made.backward(r), made.eager(0)
            assert made.log == expected and made.finish() == []


class TestSurplus:
    def test_k03_found_on_entry_and_nothing_was_counted(self) -> None:
        r = region("r0", {0: 1, 1: 2})
        made = ledger(r)
        made.forward(r), made.backward(r)
        before = made.num_reports
        with pytest.raises(RuntimeError, match=r"region r0: expected 1 backward.*w0, w1"):
            made.backward(r)
        assert made.num_reports == before and r.backwards == 1

    def test_a_backward_without_any_forward(self) -> None:
        r = region("r0", {0: 1})
        with pytest.raises(RuntimeError, match=r"expected 0 backward\(s\)"):
            ledger(r, weights=1).backward(r)

    @pytest.mark.parametrize("sync", [True, False])
    def test_a_contribution_to_a_bucket_that_has_left(self, sync: bool) -> None:
        """Under no_sync() too: main_grad holds a reduction by then."""
        r = region("r0", {0: 1})
        made = ledger(r, weights=1)
        made.forward(r), made.backward(r)
        made.forward(r)
        with pytest.raises(RuntimeError, match="surplus reports of w0"):
            made.backward(r, sync)

    @pytest.mark.parametrize("sync", [True, False])
    def test_an_eager_contribution_to_a_bucket_that_has_left(self, sync: bool) -> None:
        made = ledger(weights=1)
        made.eager(0)
        made.finish()
        made.start()
        made.eager(0)
        assert made.dispatched == [True]
        with pytest.raises(RuntimeError, match="w0: expected 1 eager"):
            made.settle_eager(0, sync=sync)

    def test_k03_eager_surplus_before_its_bucket_has_left(self) -> None:
        """Learned: one each. The second contribution of w0 is refused before it is added."""
        made = ledger()
        made.eager(0), made.eager(1)
        assert made.finish() == []
        made.start()
        made.eager(0)
        with pytest.raises(RuntimeError, match="w0: expected 1 eager"):
            made.settle_eager(0, sync=True)
        made.settle_eager(0, sync=False)  # another microbatch may

    def test_forgetting_allows_another_count(self) -> None:
        made = ledger(weights=1)
        made.eager(0)
        made.finish()
        made.forget()
        made.start()
        made.eager(0), made.eager(0)
        assert made.finish() == []
        assert made.ready_counts() == {"w0": 2}


class TestShort:
    def test_forward_without_backward_names_region_and_weights(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.forward(r), made.forward(r), made.backward(r)
        assert made.log == []
        (line,) = made.finish()
        assert line.startswith("region r0: expected 2 backward(s)") and "w0, w1" in line
        assert made.finish(allow_unused=True) == [] and made.log == [(0, 2)]

    def test_k04_never_used_is_named_or_settled_with_zeros(self) -> None:
        r = region("r0", {0: 1})
        made = ledger(r)
        made.forward(r), made.backward(r)
        (line,) = made.finish()
        assert line.startswith("w1: expected at least one readiness report, got none")
        assert made.finish(allow_unused=True) == [] and made.log == [(0, 1)]

    def test_fewer_eager_reports_than_learned(self) -> None:
        made = ledger()
        made.eager(0), made.eager(0), made.eager(1)
        made.finish()
        made.start()
        made.eager(0), made.eager(1)
        (line,) = made.finish()
        assert line.startswith("w0: expected 2 eager report(s) (learned), got 1")

    def test_all_faults_come_together(self) -> None:
        r = region("r0", {0: 1})
        made = ledger(r, weights=3)
        made.forward(r)
        assert [line.split(":")[0] for line in made.finish()] == ["region r0", "w0", "w1", "w2"]

    def test_many_names_are_cut(self) -> None:
        r = region("r0", {k: 1 for k in range(9)})
        made = ledger(r, weights=9)
        made.forward(r), made.backward(r)
        with pytest.raises(RuntimeError, match=r"w0, w1, w2, w3, w4, w5 and 3 more"):
            made.backward(r)

    def test_a_faulty_step_leaves_nothing_behind(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.forward(r)
        assert made.finish() != []
        made.start()
        made.forward(r), made.backward(r)
        assert made.finish() == [] and made.log == [(0, 2)]
        assert made.ready_counts() == {"w0": 1, "w1": 1}


class TestSteps:
    def test_a_forward_before_zero_grad_stays_owed(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.forward(r)
        made.start()
        made.backward(r)
        assert made.finish() == [] and made.log == [(0, 2)]

    def test_an_abandoned_step_counts_for_nothing(self) -> None:
        """Backward, then zero_grad_buffer() instead of finish_grad_sync()."""
        made = ledger()
        made.eager(0), made.eager(1)
        assert made.finish() == []
        r = region("r0", {0: 1, 1: 1})
        made.declare(r)
        for _ in range(2):
            made.start()
            made.forward(r), made.backward(r)
        assert made.finish() == [] and made.ready_counts() == {"w0": 1, "w1": 1}
        assert r.calls_a_step == 1

    def test_k06_declared_counts_are_not_those_of_a_warm_up(self) -> None:
        """A warm-up of another shape compiles r0; the real batch compiles r0.1. Counts are per
        step, not per compilation."""
        r, again = region("r0", {0: 2, 1: 1}), region("r0.1", {0: 2, 1: 1})
        made = ledger(r)
        made.forward(r), made.backward(r)
        assert made.finish() == [] and made.ready_counts() == {"w0": 2, "w1": 1}
        made.declare(again)
        for _ in range(2):
            made.start()
            made.forward(again), made.backward(again)
            assert made.log == [(0, 3)]
            assert made.finish() == [] and made.ready_counts() == {"w0": 2, "w1": 1}

    def test_k06_a_learned_eager_warm_up_does_not_overrule_the_plan(self) -> None:
        """Eager learned fewer: an error that lists the weight, never a silent choice."""
        made = ledger()
        made.eager(0), made.eager(1)
        made.finish()
        r = region("r0", {0: 2, 1: 1})
        made.declare(r)
        made.start()
        made.forward(r), made.backward(r)
        (line,) = made.finish()
        assert line.startswith("w0: expected 1 report(s) as learned in an eager step, got 2")

    def test_coalesced_reports_are_compared_by_uses(self) -> None:
        made = ledger(weights=1)
        made.eager(0), made.eager(0), made.eager(0)
        made.finish()
        r = RegionCalls("r0", {0: 1}, {0: 3})
        made.declare(r)
        made.start()
        made.forward(r), made.backward(r)
        assert made.finish() == [] and made.ready_counts() == {"w0": 1}

    def test_ordinary_weights_report_once_a_region_and_may_differ_from_eager(self) -> None:
        made = ledger(gtp=False, weights=1)
        made.eager(0)
        made.finish()
        r, s = region("r0", {0: 1}), region("r1", {0: 1})
        made.declare(r), made.declare(s)
        made.start()
        for each in (r, s):
            made.forward(each)
        made.backward(r), made.backward(s)
        assert made.finish() == []

    def test_k07_a_region_called_twice(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.forward(r), made.forward(r)
        made.backward(r)
        assert made.log == []
        made.backward(r)
        assert made.log == [(0, 4)] and made.finish() == []
        assert made.ready_counts() == {"w0": 2, "w1": 2} and r.calls_a_step == 2

    def test_k08_eager_captured_eager(self) -> None:
        r = region("r0", {0: 2, 1: 1})
        made = ledger()

        def eager() -> None:
            made.eager(0), made.eager(1), made.eager(0)

        def captured() -> None:
            made.forward(r), made.backward(r)

        expected = [[], [(0, 3)], [(0, 3)], [(0, 3)], [(0, 3)]]
        for k, step in enumerate((eager, captured, captured, eager, captured)):
            if k == 1:
                made.declare(r)
            made.start()
            step()
            assert made.log == expected[k], k
            assert made.finish() == []
            assert made.ready_counts() == {"w0": 2, "w1": 1}

    def test_k11_accumulation_dispatches_once_on_the_last(self) -> None:
        r = region("r0", {0: 2, 1: 1})
        made = ledger(r)
        for _ in range(2):
            made.start()
            made.forward(r), made.backward(r, sync=False)
            assert made.log == []
            made.forward(r), made.backward(r)
            assert made.log == [(0, 3)] and made.finish() == []
            assert made.ready_counts() == {"w0": 2, "w1": 1}, "no_sync() owes none"
            assert r.calls_a_step == 2

    def test_k11_forwards_of_all_microbatches_first(self) -> None:
        r = region("r0", {0: 1, 1: 1})
        made = ledger(r)
        made.forward(r), made.forward(r)
        made.backward(r, sync=False)
        made.backward(r)
        assert made.log == [(0, 2)] and made.finish() == []

    def test_forget_forward_takes_one_back(self) -> None:
        r = region("r0", {0: 1})
        made = ledger(r, weights=1)
        made.forward(r)
        made.forget_forward(r), made.forget_forward(r)
        assert r.forwards == 0
        made.forward(r), made.backward(r)
        assert made.log == [(0, 1)] and made.finish() == []


# -- against a naive model ------------------------------------------------------------------------


@dataclass
class Program:
    """A step: microbatches, of which only the last reports; each runs regions (by number, forwards
    in this order, backwards in the opposite one) and adds eager contributions (by weight)."""

    weights: list[tuple[int, bool]]
    sites: list[dict[int, int]]
    microbatches: list[tuple[list[int], list[int]]]
    num_buckets: int = 1
    regions: list[RegionCalls] = field(default_factory=list)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    buckets = draw(st.integers(1, 3))
    spec = st.tuples(st.integers(0, buckets - 1), st.booleans())
    weights = draw(st.lists(spec, min_size=1, max_size=5))
    index = st.integers(0, len(weights) - 1)
    sites = draw(st.lists(st.dictionaries(index, st.integers(1, 3), min_size=1), max_size=3))
    calls = st.lists(st.integers(0, len(sites) - 1), max_size=4) if sites else st.just([])
    microbatch = st.tuples(calls, st.lists(index, max_size=5))
    batches = draw(st.lists(microbatch, min_size=1, max_size=3))
    return Program(weights, sites, batches, buckets)


def play(made: Ledger, program: Program) -> Counter[int]:
    """Run one step; reports by weight. Departures are checked as they happen."""
    reports: Counter[int] = Counter()
    to_come: Counter[int] = Counter()
    for calls, eager in program.microbatches:
        for number in calls:
            to_come.update(program.sites[number])
        to_come.update(eager)
    last = len(program.microbatches) - 1
    made.gone = lambda bucket: [  # type: ignore[attr-defined]
        w for w, (b, _) in enumerate(program.weights) if b == bucket and to_come[w]
    ]
    for k, (calls, eager) in enumerate(program.microbatches):
        for index in eager:
            made.gathered(index)
        for number in calls:
            made.forward(program.regions[number])
        for number in reversed(calls):
            region_ = program.regions[number]
            made.region_backward(region_, sync=k == last)
            for index, count in region_.sites.items():
                for _ in range(count):
                    made.settle(index)
                    to_come[index] -= 1
                    if k == last:
                        reports[index] += 1
                        made.num_reports += 1
                        made.report(index, captured=True)
        for index in eager:
            to_come[index] -= 1
            reports[index] += k == last
            made.eager(index, sync=k == last, gathers=0)
    return reports


class Watched(Ledger):
    def _leave(self, bucket: int) -> None:
        waiting = self.gone(bucket)  # type: ignore[attr-defined]
        assert not waiting, f"bucket {bucket} left before the contributions of {waiting}"
        super()._leave(bucket)


@settings(max_examples=150, deadline=None)
@given(programs(), st.booleans())
def test_against_a_naive_model(program: Program, ordered: bool) -> None:
    """Twice the same step. No bucket leaves before its last contribution; in the second step each
    bucket whose weights all report leaves exactly at the last of those reports (ordered: behind all
    lower ones); faults are the weights that nothing reached."""
    made = _resized(program)
    made.ordered = ordered
    program.regions = [region(f"r{k}", sites) for k, sites in enumerate(program.sites)]
    for each in program.regions:
        made.declare(each)
    reached = {w for calls, eager in program.microbatches for w in eager}
    for calls, _ in program.microbatches:
        reached |= {w for number in calls for w in program.sites[number]}
    unreached = {f"w{k}" for k in range(len(program.weights))} - {f"w{k}" for k in reached}
    for attempt in range(2):
        made.start()
        reports = play(made, program)
        faults = made.finish()
        assert {line.split(":")[0] for line in faults} == unreached
        if faults:
            continue
        assert sorted(b for b, _ in made.log) == list(range(program.num_buckets))
        if not program.regions or any(calls for calls, _ in program.microbatches):
            known = {f"w{k}": reports[k] for k in range(len(program.weights))}
            assert made.ready_counts() == known
        if attempt:
            _check_departures(made, program, reports)


def _resized(program: Program) -> Watched:
    """Buckets are numbered without gaps: the ones that drew no weight are dropped."""
    used = sorted({b for b, _ in program.weights})
    program.weights = [(used.index(b), gtp) for b, gtp in program.weights]
    program.num_buckets = len(used)
    return Watched(*((f"w{k}", b, gtp) for k, (b, gtp) in enumerate(program.weights)))


def _check_departures(made: Watched, program: Program, reports: Counter[int]) -> None:
    calls, eager = program.microbatches[-1]
    order = [
        w
        for number in reversed(calls)
        for w, count in program.sites[number].items()
        for _ in range(count)
    ] + list(eager)
    left = dict(made.log)
    if made.ordered:
        assert [b for b, _ in made.log] == list(range(program.num_buckets))
        return
    for bucket in range(program.num_buckets):
        members = [w for w, (b, _) in enumerate(program.weights) if b == bucket]
        if all(reports[w] for w in members):
            last = max(k for k, w in enumerate(order, start=1) if w in members)
            assert left[bucket] == last, (bucket, made.log, order)
        else:
            assert left[bucket] == len(order)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8),
    st.booleans(),
)
def test_a_replay_counts_like_its_occurrences_one_by_one(
    occurrences: list[tuple[int, bool]], ordered: bool
) -> None:
    """(weight, declared by a region): reported in bulk or one at a time, three steps alike."""
    sites = Counter(w for w, declared in occurrences if declared)
    totals = Counter(occurrences)
    last = {w % 2: k for k, (w, _) in enumerate(occurrences)}
    counts = ReplayCounts(
        tuple(
            (w, totals.get((w, False), 0), totals.get((w, True), 0))
            for w in {w for w, _ in occurrences}
        ),
        tuple(sorted(last, key=last.__getitem__)),
    )
    ledgers = []
    for bulk in (False, True):
        made = Ledger(*((f"w{k}", k % 2, True) for k in range(4)))
        made.ordered = ordered
        r = region("r0", dict(sites))
        made.declare(r)
        seen = []
        for _ in range(3):
            made.start()
            if bulk:
                made.enter_replay(counts, [r], sync=True)
                made.report_replay(counts)
            else:
                made.region_forward(r)
                made.region_backward(r, sync=True)
                for w in (w for w, declared in occurrences if not declared):
                    made.gathered(w)
                for w, declared in occurrences:
                    made.settle(w, declared=declared)
                    made.report(w, captured=declared)
            seen.append((made.finish(allow_unused=True), made.left, made.ready_counts()))
        ledgers.append(seen[1:])
    assert ledgers[0] == ledgers[1]
