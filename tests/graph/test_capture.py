"""gtpgraph.capture on a host runtime: dispatch, side effects (K15, K16), refusals, shapes."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.parallel.streams import Fence

t = module_at("gtpgraph_replay_tools", str(Path(__file__).parent / "replay_tools.py"))


# -- dispatch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", t.KINDS)
def test_event_each_reduction_waits_for_its_own_buckets_event(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reductions start in the order of completion, each behind one event, recorded mid-graph."""
    model = t.wrapped(t.Net())
    r = t.Replayed(kind, model, dispatch="event")
    t.spy_on_reductions(model, r.driver)
    for seed in range(3):
        with t.dispatches(monkeypatch) as seen:
            r.train(t.batch(seed))
    assert len(seen) == len(model.buckets) > 3
    assert [events for _, events in seen] == [[m] for m in r.driver.marks]
    assert r.driver.nows == 0
    # complete when its last weight is: the order of the last reports
    last = {model._bucket_of[x.weight]: k for k, x in enumerate(model.reports)}
    assert [number for number, _ in seen] == sorted(last, key=last.__getitem__)
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_after_each_reduction_waits_for_the_end_of_the_replay(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed(kind, model, dispatch="after")
    t.spy_on_reductions(model, r.driver)
    for seed in range(3):
        with t.dispatches(monkeypatch) as seen:
            r.train(t.batch(seed))
    assert [events for _, events in seen] == [["now 2"]] * len(model.buckets)
    model.close()


@pytest.mark.parametrize("dispatch", ["after", "event"])
@pytest.mark.parametrize("kind", t.KINDS)
def test_a_bucket_of_one_rank_has_no_event_and_waits_for_the_replays_stream(
    kind: str, dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event in a graph costs GPU time, and nothing would wait for it."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed(kind, model, dispatch=dispatch)
    wrote: list[None] = []
    monkeypatch.setattr(Fence, "wrote", lambda fence: wrote.append(None))
    for seed in range(3):
        wrote.clear()
        with t.dispatches(monkeypatch) as seen:
            t.assert_close(r.train(t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
        assert seen == [(number, []) for number, _ in seen] and len(seen) == len(model.buckets)
    assert r.driver.marks == []
    assert len(wrote) == len(model.buckets), "once each, when the replay was launched"
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_in_graph_each_reduction_runs_once_inside_and_not_again(kind: str) -> None:
    """And reads the bucket when its contributions are complete. Under no_sync none runs."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed(kind, model, dispatch="in_graph")
    spies = [t.SpyReduction(r.driver) for _ in model.buckets]
    for bucket, spy in zip(model.buckets, spies, strict=True):
        bucket.reduction = spy
    r.train(t.batch())
    assert [s.started for s in spies] == [[None]] * len(spies)
    for seed in range(3):
        for spy in spies:
            spy.started.clear()
        r.train(t.batch(seed))
        inside = ["capture", "replay"] if seed == 0 else ["replay"]
        assert [s.started for s in spies] == [inside] * len(spies)
        for bucket, spy in zip(model.buckets, spies, strict=True):
            assert torch.equal(spy.flats[-1], bucket.flat)
    batches = [t.batch(k) for k in range(3)]
    for _ in range(2):
        for spy in spies:
            spy.started.clear()
        t.assert_close(r.train(*batches), t.reference(want_net, batches))
        assert [s.started for s in spies] == [["replay"]] * len(spies)
    assert r.driver.forks == len(spies) and r.driver.joins >= 1
    model.close()


def test_in_graph_reductions_refuse_a_step_in_which_others_contribute_too() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model, dispatch="in_graph")
    for _ in range(2):
        r.train(t.batch())
    model.zero_grad_buffer()
    loss = model(t.batch())  # its backward is still to come
    with model.no_sync():
        loss.backward()
    r.run(t.batch())  # under no_sync it owes nothing: fine
    model.finish_grad_sync()
    model.zero_grad_buffer()
    model.ledger.forget()
    model.ledger.overlap = False  # nothing leaves early, so the graph's reductions come too soon
    with pytest.raises(RuntimeError, match=r"buckets \[.*dispatch='event'"):
        r.run(t.batch())
    model.close()


def test_options_out_of_range_are_one_error() -> None:
    model = t.wrapped(t.Net())
    with pytest.raises(ValueError, match=r"dispatch: expected one of .*'later'; max_captures"):
        gg.capture(lambda x: x, model, dispatch="later", max_captures=0, driver=t.HostDriver(model))
    with pytest.raises(ValueError, match=r"gtpgraph.capture: expected a model on one CUDA device"):
        gg.capture(lambda x: x, model)
    with pytest.raises(ValueError, match=r"holds one gtpgraph\.DistributedDataParallel, got 0"):
        gg.capture(lambda x: x, nn.Linear(2, 2))


# -- side effects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["step", "compiled step"])
def test_k15_prepare_leaves_everything_bit_identical(kind: str) -> None:
    model = t.wrapped(t.Net(p=0.3, batch_norm=True))
    r = t.Replayed(kind, model)
    r.train(t.batch())
    model.scale_gradients(0.5)
    kept = [b.flat for b in model.buckets] + list(model.buffers())
    saved = [k.clone() for k in kept]
    rng, filled = torch.get_rng_state(), [list(b.filled) for b in model.buckets]
    counts, reports = model.ledger.ready_counts(), list(model.reports)
    r.call.prepare(t.batch())
    r.call.prepare(t.batch(1))  # the same shapes: harmless
    assert len(r.driver.graphs) == 1 and r.replays == [0]
    assert all(torch.equal(k, s) for k, s in zip(kept, saved, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert [b.filled for b in model.buckets] == filled
    assert model.ledger.ready_counts() == counts and model.reports == reports
    r.train(t.batch())
    assert r.replays == [1]
    model.close()


def test_prepare_before_any_step_says_what_to_do() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    with pytest.raises(RuntimeError, match=r"expected one synchronised step .*Call the step once"):
        r.call.prepare(t.batch())


@pytest.mark.parametrize("part", ["forward", "middle", "end"])
@pytest.mark.parametrize("kind", t.KINDS)
def test_k16_an_exception_in_the_middle_of_a_capture(kind: str, part: str) -> None:
    """Gradients and generator as before; the next steps are right, eager and captured."""
    net = t.Net(p=0.2)
    model = t.wrapped(net)
    trial = t.Replayed(kind, model)
    trial.train(t.batch())
    trial.train(t.batch())
    last = trial.driver.num_operations - 1
    r = t.Replayed(kind, model)
    r.train(t.batch())
    before = [b.flat.clone() for b in model.buckets]
    rng = torch.get_rng_state()
    r.driver.fail_at = {"forward": 1, "middle": last // 2, "end": last}[part]
    if kind == "regions":
        model.zero_grad_buffer()
        if part == "forward":
            with pytest.raises(RuntimeError, match=r"r0\S* forward: .*the capture breaks at"):
                r.call(t.batch())
        else:
            r.driver.fail_at = None
            loss = r.call(t.batch())
            before, rng = [b.flat.clone() for b in model.buckets], torch.get_rng_state()
            r.driver.fail_at = last // 2 if part == "middle" else last
            with pytest.raises(RuntimeError, match=r"r0\S* backward: .*the capture breaks at"):
                loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"captured step: .*the capture breaks at"):
            r.call.prepare(t.batch())
    assert model.recording is None
    assert all(torch.equal(b.flat, f) for b, f in zip(model.buckets, before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    net.eval()  # without dropout the reference is known
    torch._dynamo.reset()
    want = t.reference(net_of(model), [t.batch(3)])
    t.assert_close(t.eager_step(model, t.batch(3)), want)
    for _ in range(2):
        fresh = t.Replayed(kind, model)
        for _ in range(3):
            t.assert_close(fresh.train(t.batch(3)), want)
    model.close()


def net_of(model: gg.DistributedDataParallel) -> nn.Module:
    """A plain copy of the wrapped model."""
    net = t.Net()
    net.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    return net.eval()


# -- refusals --------------------------------------------------------------------------------------


def test_an_input_that_needs_a_gradient_is_refused_at_every_call() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    for _ in range(3):
        model.zero_grad_buffer()
        with pytest.raises(NotImplementedError, match=r"requires_grad at positions \[0\]"):
            r.run(t.batch().requires_grad_())
        r.run(t.batch())
        model.finish_grad_sync()
    model.close()


class Peeks(nn.Module):
    """Looks at a value on the host, where told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 16)
        self.look = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x).square().mean()
        return y * 2 if self.look and float(y.detach()) > 1e9 else y


def test_k23_a_host_synchronisation_names_module_and_line() -> None:
    net = Peeks()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("step", model)
    r.train(t.batch())
    net.look = True
    with pytest.raises(
        RuntimeError, match=r"Peeks \(\S*test_capture.py:\d+\).*leave the module that does it out"
    ):
        r.call.prepare(t.batch())
    for seed in range(3):  # the model itself is as usable as ever
        want = t.reference(want_net, [t.batch(seed)])
        t.assert_close(t.eager_step(model, t.batch(seed)), want)
    model.close()


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: dependency created on uncaptured work in another stream",
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
    ],
)
def test_a_kept_loss_is_named_where_cuda_reports_another_stream(said: str) -> None:
    """pytorch 137483; what a GPU makes of it is in tests/gpu."""
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    r.train(t.batch())

    def capture(work: Any, *, lasting: bool) -> Any:
        raise RuntimeError(said)

    r.driver.capture = capture
    model.zero_grad_buffer()
    with pytest.raises(RuntimeError, match=f"{said}.*loss or output of an earlier uncaptured step"):
        r.call(t.batch())
    model.close()


def test_a_failed_capture_keeps_nothing_alive() -> None:
    """The loss of the broken step would tie the parameters' accumulators to the old stream."""
    model = t.wrapped(t.Net())
    losses: list[Any] = []

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        losses.append(weakref.ref(loss))
        loss.backward()
        return loss

    driver = t.HostDriver(model)
    call = gg.capture(step, model, driver=driver)
    model.zero_grad_buffer()
    call(t.batch())
    model.finish_grad_sync()
    driver.fail_at = 20
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="the capture breaks at operation 20"):
            call.prepare(t.batch())
        assert [ref() for ref in losses] == [None, None]
    finally:
        gc.enable()
    model.close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_k22_reentrant_checkpoints_are_refused_and_others_work(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h: Any = checkpoint(self.b, self.a(x), use_reentrant=reentrant)
            return h.square().mean()

    net = Checkpointed()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("step", model)
    r.train(t.batch())
    if reentrant:
        with pytest.raises((RuntimeError, NotImplementedError), match="use_reentrant=False"):
            r.call.prepare(t.batch())
    for seed in range(3):
        got = t.eager_step(model, t.batch(seed)) if reentrant else r.train(t.batch(seed))
        t.assert_close(got, t.reference(want_net, [t.batch(seed)]))
    model.close()


def test_a_closed_step_is_not_captured_again() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    for _ in range(3):
        r.train(t.batch())
    r.call.close()
    r.call.close()
    assert [g.alive for g in r.driver.graphs] == [False]
    with pytest.raises(RuntimeError, match=r"got a call after close\(\)\. Capture it again"):
        r.run(t.batch())
    model.close()


# -- shapes and arguments --------------------------------------------------------------------------


def test_dtypes_and_plain_values_are_told_apart() -> None:
    """1, 1.0 and True are equal and hash alike; a float tensor is no double tensor."""

    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 16)

        def forward(self, x: Tensor, k: Any) -> Tensor:
            y = self.net(x.float())
            return (y * (3 if isinstance(k, bool) else k)).square().mean()

    net = Power()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("step", model)
    calls = [(t.batch(), 1), (t.batch(), True), (t.batch().double(), 1), (t.batch(), 2)] * 3
    for x, k in calls:
        model.zero_grad_buffer()
        loss = r.run(x, k)
        model.finish_grad_sync()
        want_net.zero_grad()
        want = want_net(x, k)
        want.backward()
        assert torch.equal(loss, want.detach())
        t.assert_close(t.grads(model), {n: p.grad for n, p in want_net.named_parameters()})
    assert r.replays == [2] * 4
    model.close()


def test_the_no_sync_variant_of_a_shape_is_no_further_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model, dispatch="in_graph", max_captures=1)
    with caplog.at_level(logging.WARNING, "gtpgraph.replay"):
        for _ in range(3):
            r.train(t.batch())
        for _ in range(3):
            r.train(t.batch(), t.batch())
    assert r.replays == [5, 3] and not caplog.records
    model.close()


def test_a_first_step_of_microbatches_numbers_its_uses_as_replays_do() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    for _ in range(3):
        r.train(t.batch(0), t.batch(1), t.batch(2))
        assert [x.use for x in model.reports if x.weight == "b.weight"] == [2, 1]
    assert r.replays == [6], "the first step warms up, its last call alone reports"
    model.close()


def test_outputs_are_valid_until_the_next_replay() -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed("step", model)
    losses, values = [], []
    for seed in range(4):
        model.zero_grad_buffer()
        losses.append(r.run(t.batch(seed)))
        values.append(losses[-1].clone())
        model.finish_grad_sync()
    assert torch.equal(losses[0], values[0]), "the first call's result is its own"
    assert all(torch.equal(loss, values[3]) for loss in losses[1:])
    model.close()


def test_outputs_outlive_replays_of_other_shapes() -> None:
    """Graphs of other shapes may use the memory that a result was computed in."""
    net = t.Net()
    model = t.wrapped(net)
    r = t.Replayed("step", model)
    for repeat in range(3):
        results = []
        for rows in (4, 6, 4):  # the one captured later first, then the one captured before
            model.zero_grad_buffer()
            results.append(r.run(t.batch(repeat, rows=rows)))
            model.finish_grad_sync()
        torch.testing.assert_close(results[1], net(t.batch(repeat, rows=6)).detach())
    assert len(r.replays) == 2 and min(r.replays) > 1
    model.close()


def test_several_results_come_back_as_a_tuple() -> None:
    net = t.Net()
    model = t.wrapped(net)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x)
        loss.backward()
        return loss, x.sum()

    captured = gg.capture(step, model, driver=t.HostDriver(model))
    for seed in range(3):
        model.zero_grad_buffer()
        loss, total = captured(t.batch(seed))
        model.finish_grad_sync()
        torch.testing.assert_close(total, t.batch(seed).sum())
        assert not loss.requires_grad
    model.close()


def test_the_readmes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of its section on graph replay, with the host runtime in the place of CUDA's."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", readme, flags=re.DOTALL)
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    driver = t.HostDriver(model)
    for module in ("backend", "capture"):
        monkeypatch.setattr(f"gtpgraph.graph.{module}.cuda_driver", lambda *_: driver)
    compiled = gg.compile
    monkeypatch.setattr(gg, "compile", lambda *a, **k: compiled(*a, lowering="eager", **k))
    names: dict[str, Any] = {"gg": gg, "model": model}
    exec(code, names)
    for run in (lambda x: names["step"](x).backward(), names["whole"]):
        for seed in range(3):
            model.zero_grad_buffer()
            run(t.batch(seed))
            model.finish_grad_sync()
            t.assert_close(t.grads(model), t.reference(want_net, [t.batch(seed)]))
    assert [g.replays for g in driver.graphs] == [2, 2, 2]
    model.close()
