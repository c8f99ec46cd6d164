"""What a capture records: order and multiplicity (A2), betas, events, and the check of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpgraph.by_path import module_at
from gtpgraph.graph.recording import Recording
from gtpgraph.parallel.ready import Report
from gtpgraph.parallel.streams import Fence

t = module_at("gtpgraph_replay_tools", str(Path(__file__).parent / "replay_tools.py"))
Record = Callable[..., None]


def drop(record: Record, number: int, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
    if number != 2:
        record(*args, **kw)


def duplicate(record: Record, number: int, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
    record(*args, **kw)
    if number == 2:
        record(*args, **kw)


class Swap:
    def __init__(self) -> None:
        self.held: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(
        self, record: Record, number: int, args: tuple[Any, ...], kw: dict[str, Any]
    ) -> None:
        if number == 2:
            self.held = args, kw
            return
        record(*args, **kw)
        if self.held:
            held, self.held = self.held, None
            record(*held[0], **held[1])


@pytest.mark.parametrize(
    ("tamper", "recorded", "first"), [(drop, 6, 2), (duplicate, 8, 3), (Swap, 7, 2)]
)
@pytest.mark.parametrize("kind", t.KINDS)
def test_a_capture_that_records_anything_but_the_plan_is_an_error(
    kind: str, tamper: Any, recorded: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed(kind, model)
    before = r.train(t.batch())
    record, numbers = Recording.record, iter(range(100))
    change = tamper() if tamper is Swap else tamper

    def tampered(self: Recording, *args: Any, **kw: Any) -> None:
        change(lambda *a, **k: record(self, *a, **k), next(numbers), args, kw)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "record", tampered)
        model.zero_grad_buffer()
        with pytest.raises(
            RuntimeError,
            match=rf"expected the 7 occurrence\(s\) of the plan, recorded {recorded}; first "
            rf"difference at occurrence {first}: expected .* Capture with the inputs",
        ):
            r.run(t.batch())
    if kind != "regions":
        assert [g.alive for g in r.driver.graphs] == [False], "what failed the check is freed"
    for _ in range(3):  # the next step is right, and the capture may be made after all
        t.assert_equal(r.train(t.batch()), before)
    assert r.replays[-1] >= 2
    model.close()


# -- by hand ---------------------------------------------------------------------------------------


class Bench:
    """A recording of the wrapper's weights, by name."""

    def __init__(self, bucket_mb: float = 32.0, **last: int) -> None:
        self.model = t.wrapped(t.Net(), bucket_mb=bucket_mb)
        self.driver = t.HostDriver(self.model)
        self.driver.where = "capture"
        self.states = {s.fqn: s for s in self.model.states}
        self.record = Recording(self.model, self.driver, Counter())
        self.record.betas = {b.number: b.zeros.clone() for b in self.model.buckets}

    def put(self, *names: str) -> None:
        for name in names:
            uses = sum(o.state.fqn == name for o in self.record.occurrences)
            self.record.record(self.states[name], uses + 1, "r0", declared=True)


def test_a_b_a_stays_three() -> None:
    b = Bench()
    b.put("b.weight", "a.weight", "b.weight")
    assert b.record.reports(4) == [
        Report("b.weight", 1, "r0", 4), Report("a.weight", 1, "r0", 4),
        Report("b.weight", 2, "r0", 4),
    ]  # fmt: skip
    assert b.record.reports(4) is b.record.reports(4), "made once: a replay costs no list"
    assert b.record.reports(5)[0].microbatch == 5
    index = {n: s.index for n, s in b.states.items()}
    assert set(b.record.counts.weights) == {(index["b.weight"], 0, 2), (index["a.weight"], 0, 1)}


def test_buckets_leave_in_the_order_of_their_last_occurrences() -> None:
    b = Bench(bucket_mb=t.SMALL_MB)
    number = {n: s.bucket.number for n, s in b.states.items()}
    b.put("a.weight", "b.weight", "norm.weight", "a.weight")
    assert b.record.counts.buckets == (
        number["b.weight"],
        number["norm.weight"],
        number["a.weight"],
    )


def test_an_event_stands_behind_the_last_occurrence_and_at_the_end_where_none_is_known() -> None:
    b = Bench(bucket_mb=t.SMALL_MB)
    t.spy_on_reductions(b.model, b.driver)
    number = {n: s.bucket.number for n, s in b.states.items()}
    b.record.last.update({number["b.weight"]: 2})
    b.put("b.weight", "a.weight")
    assert b.record.events == {}
    b.put("b.weight")
    assert b.record.events == {number["b.weight"]: "mark 0"}
    with b.record.capturing(beside_all=False):
        pass
    assert b.record.events == {number["b.weight"]: "mark 0", number["a.weight"]: "mark 1"}
    assert b.driver.joins == 1


@pytest.mark.parametrize("complete", [True, False])
def test_a_bucket_is_reduced_inside_only_when_all_of_its_weights_are_written(
    complete: bool,
) -> None:
    b = Bench()
    names = list(b.states) if complete else list(b.states)[:-1]
    (bucket,) = b.model.buckets
    bucket.reduction = t.SpyReduction(b.driver)
    b.record.last.update({0: len(names)})
    b.record.in_graph = frozenset({0})
    b.put(*names)
    assert bucket.reduction.started == (["capture"] if complete else [])
    assert (b.record.reduced, set(b.record.events)) == (({0}, set()) if complete else (set(), {0}))
    assert b.driver.forks == int(complete)


def test_betas_say_what_was_written_before_the_graph_and_inside_it() -> None:
    """0 stores, 1 adds: outside contributions decide at each replay, inside ones at the capture."""
    b = Bench()
    (bucket,) = b.model.buckets
    static = b.record.beta(bucket)
    assert static is b.record.betas[0] and not static.any()
    b.put("a.weight")
    slot = b.states["a.weight"].member.slot
    mixed = b.record.beta(bucket)
    assert mixed.tolist() == [float(k == slot) for k in range(len(bucket.members))]
    b.put(*(n for n in b.states if n != "a.weight"))
    assert b.record.beta(bucket) is bucket.ones
    b.model.zero_grad_buffer()
    b.record.prepare()
    assert not static.any()
    bucket.filled[slot] = True
    b.record.prepare()
    assert static.tolist() == mixed.tolist()
    bucket.filled = [True] * len(bucket.filled)
    b.record.prepare()
    assert static.all()
    static.fill_(7.0)
    b.record.prepare()
    assert (static == 7).all(), "nothing is copied where the state is that of the last replay"


def test_after_a_replay_the_written_weights_are_filled_and_the_event_is_known() -> None:
    b = Bench()
    (bucket,) = b.model.buckets
    b.put("a.weight", "norm.weight")
    b.model.zero_grad_buffer()
    b.record.finished({0: "done"})
    written = {b.states[n].member.slot for n in ("a.weight", "norm.weight")}
    assert {k for k, filled in enumerate(bucket.filled) if filled} == written
    assert bucket.fence._given == ["done"]
    bucket.wait_reduce()
    assert bucket.fence._given == []


def test_a_bucket_that_was_not_announced_is_named() -> None:
    b = Bench()
    b.record.betas.clear()
    with pytest.raises(RuntimeError, match=r"bucket 0: expected one of the buckets \[\]"):
        b.record.beta(b.model.buckets[0])


def test_check_leaves_silent_weights_out_on_request() -> None:
    b = Bench()
    b.model.set_ready_hook(b.states["a.bias"].param, None)
    b.put("b.weight", "a.bias")
    b.record.check([("b.weight", 1)], "step", reported=True)
    with pytest.raises(RuntimeError, match="occurrence 1: expected nothing, recorded"):
        b.record.check([("b.weight", 1)], "step")


def test_eager_contributions_are_added_as_at_a_replay() -> None:
    b = Bench()
    state = b.states["norm.weight"]
    one = torch.ones(16)
    state.bucket.flat.fill_(5.0)
    b.record.add(state.bucket, state.member, one, 2.0)
    assert (state.bucket.view(state.member) == 2).all(), "beta 0: stores"
    b.record.add(state.bucket, state.member, one, 2.0)
    assert (state.bucket.view(state.member) == 4).all(), "the second one of the graph adds"


def test_eager_writes_are_marked_before_a_replay_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Marked behind it, their reduction would wait for all of the replay."""
    order: list[str] = []
    model = t.wrapped(t.Net())
    r = t.Replayed("regions", model)
    t.spy_on_reductions(model, r.driver)
    for seed in range(3):
        r.train(t.batch(seed))
    monkeypatch.setattr(Fence, "settle", lambda fence: order.append("settled"))
    for graph in r.driver.graphs:
        replay = graph.replay
        monkeypatch.setattr(graph, "replay", lambda f=replay: (order.append("replay"), f()))
    r.train(t.batch())
    assert order == ["replay", *["settled"] * len(model.buckets), "replay"]
    model.close()
