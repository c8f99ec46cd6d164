"""Replayed regions and steps on a host runtime: counts, gradients, limits (K09 to K26)."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.models import build

t = module_at("gtpgraph_replay_tools", str(Path(__file__).parent / "replay_tools.py"))


@pytest.mark.parametrize("dispatch", t.DISPATCH)
@pytest.mark.parametrize("kind", t.KINDS)
def test_every_step_has_eager_gradients_and_the_reports_of_the_plan(
    kind: str, dispatch: str
) -> None:
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    t.eager_step(model, t.batch())
    eager, eager_counts = sorted(t.shown(model)), len(model.reports)
    r = t.Replayed(kind, model, dispatch=dispatch)
    first = None
    for seed in range(5):
        got = r.train(t.batch(seed))
        t.assert_close(got, t.reference(want_net, [t.batch(seed)]))
        assert sorted(t.shown(model)) == eager and len(model.reports) == eager_counts
        first = first or list(model.reports)
        assert model.reports == first, "order, region and microbatch as in the step that ran"
    if kind == "regions":
        planned = [(o.weight, o.use) for o in r.call.plan.regions[0].occurrences]
        assert t.shown(model) == planned
        assert r.replays == [4, 4]
    else:
        assert r.replays == [4]
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_replays_are_bitwise_what_the_uncaptured_call_gives(kind: str) -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed(kind, model)
    first = r.train(t.batch(3))
    for seed in (0, 1, 3, 2, 3):
        got = r.train(t.batch(seed))
        if seed == 3:
            t.assert_equal(got, first)
    model.close()


@pytest.mark.parametrize("dispatch", t.DISPATCH)
@pytest.mark.parametrize("kind", t.KINDS)
def test_k12_k14_microbatches_accumulate_and_report_once(kind: str, dispatch: str) -> None:
    """K20, K21 too: nothing is added twice and no flag of an eager step decides."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed(kind, model, dispatch=dispatch)
    r.train(t.batch())
    alone = t.shown(model)
    for repeat in range(3):
        batches = [t.batch(10 * repeat + k) for k in range(4)]
        t.assert_close(r.train(*batches), t.reference(want_net, batches))
        assert t.shown(model) == alone
        assert {x.microbatch for x in model.reports} == {3}
    model.close()


def test_k12_a_scale_and_two_backwards_from_nothing() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).sum()

    model = gg.DistributedDataParallel(Scale())
    r = t.Replayed("regions", model)
    for repeat in range(3):
        x, y = t.batch(repeat), t.batch(repeat + 10)
        got = r.train(x, y)["w"]
        torch.testing.assert_close(got, x.sum(0) + y.sum(0))
    assert min(r.replays) > 0
    model.close()


def test_steps_of_both_kinds_take_turns() -> None:
    """K08: eager, captured, eager again, in any order."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("regions", model)
    for seed, replayed in enumerate((False, True, True, False, True, False, False, True)):
        got = r.train(t.batch(seed)) if replayed else t.eager_step(model, t.batch(seed))
        t.assert_close(got, t.reference(want_net, [t.batch(seed)]))
        assert len(model.reports) == 7
    model.close()


@pytest.mark.parametrize("limit", [1, 4])  # beyond the limit they run uncaptured
def test_several_forwards_in_flight_have_their_own_activations(limit: int) -> None:
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("regions", model, max_in_flight=limit)
    for repeat in range(4):
        batches = [t.batch(10 * repeat + k) for k in range(3)]
        model.zero_grad_buffer()
        losses = [r.call(b) for b in batches]
        with model.no_sync():
            losses[1].backward()  # in another order than the forwards
            losses[0].backward()
        losses[2].backward()
        model.finish_grad_sync()
        t.assert_close(t.grads(model), t.reference(want_net, batches))
    (replay,) = (x.replay for x in model.regions)
    assert [len(known) for known in replay.instances.values()] == [min(3, limit)]
    model.close()


def test_a_region_that_saves_its_inputs_alone_keeps_them_apart() -> None:
    """A Linear saves x and the weight: the copy of x in its graph must wait for the backward."""
    net = nn.Sequential(t.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    driver = t.HostDriver(model)
    model.graph_driver(lambda: driver)
    options = {"lowering": "eager", "replay": "cuda", "max_in_flight": 4}
    model.module[0].compile(backend="gtpgraph", options=options)
    for repeat in range(4):
        batches = [t.batch(10 * repeat + k) for k in range(2)]
        model.zero_grad_buffer()
        losses = [model(b).square().mean() for b in batches]
        with model.no_sync():
            losses[0].backward()
        losses[1].backward()
        model.finish_grad_sync()
        want = copy.deepcopy(want_net).double()
        for b in batches:
            want(b.double()).square().mean().backward()
        t.assert_close(t.grads(model), {n: p.grad for n, p in want.named_parameters()})
    assert len(driver.graphs) == 4 and min(g.replays for g in driver.graphs) > 1
    model.close()


def test_more_forwards_than_instances_run_uncaptured_and_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("regions", model, max_in_flight=2)
    with caplog.at_level(logging.WARNING, "gtpgraph.replay"):
        for repeat in range(3):
            batches = [t.batch(10 * repeat + k) for k in range(4)]
            model.zero_grad_buffer()
            losses = [r.call(b) for b in batches]
            with model.no_sync():
                for loss in losses[:-1]:
                    loss.backward()
            losses[-1].backward()
            model.finish_grad_sync()
            t.assert_close(t.grads(model), t.reference(want_net, batches))
    told = [x.getMessage() for x in caplog.records if "uncaptured" in x.getMessage()]
    assert len(told) == 1 and "2 forwards wait for their backward (max_in_flight)" in told[0]
    model.close()


@pytest.mark.parametrize("dispatch", ["event", "in_graph"])
@pytest.mark.parametrize("kind", ["regions", "step"])
def test_k24_new_shapes_capture_again_up_to_a_limit(
    kind: str, dispatch: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    options = {"dynamic": True} if kind == "regions" else {}
    r = t.Replayed(kind, model, max_captures=2, dispatch=dispatch, **options)
    with caplog.at_level(logging.WARNING, "gtpgraph.replay"):
        for rows in (4, 6, 12, 4):
            for seed in range(3):
                batches = [t.batch(seed, rows), t.batch(seed + 5, rows)]
                got = r.train(*batches)
                t.assert_close(got, t.reference(want_net, batches))
                assert len(model.reports) == 7
    told = [x.getMessage() for x in caplog.records if "uncaptured" in x.getMessage()]
    assert len(told) == 1 and "2 input shapes are captured (max_captures)" in told[0]
    variants = 1 + (dispatch == "in_graph")
    assert len(r.driver.graphs) == 2 * ((1 + variants) if kind == "regions" else variants)
    model.close()


def test_k09_four_captured_instances_of_one_module() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(t.Layer(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    net = Stack()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    driver = t.HostDriver(model)
    model.graph_driver(lambda: driver)  # what all regions of one wrapper share
    for layer in model.module.layers:
        layer.compile(backend="gtpgraph", options={"lowering": "eager", "replay": "cuda"})
    for seed in range(4):
        t.assert_close(t.eager_step(model, t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
        assert len(model.reports) == 16 and len({r.region for r in model.reports}) == 4
    assert (
        len(model.regions) == 4
        and len(driver.graphs) == 8
        and all(g.replays >= 2 for g in driver.graphs)
    )
    model.close()


@pytest.mark.parametrize("dispatch", t.DISPATCH)
def test_k26_one_layer_captured_the_other_eager_in_one_bucket(
    dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(t.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    want_net = copy.deepcopy(net)
    model = t.wrapped(net, bucket_mb=32)
    driver = t.HostDriver(model)
    model.graph_driver(lambda: driver)
    (bucket,) = model.buckets
    bucket.reduction = t.SpyReduction(driver)
    model.module[0].compile(
        backend="gtpgraph", options={"lowering": "eager", "replay": "cuda", "dispatch": dispatch}
    )
    for seed in range(4):
        model.zero_grad_buffer()
        with t.dispatches(monkeypatch) as seen:
            model(t.batch(seed)).square().mean().backward()
            model.finish_grad_sync()
        assert [number for number, _ in seen] == [0]
        assert sorted(r.weight for r in model.reports) == [
            "0.inner.bias", "0.inner.weight", "2.bias", "2.weight",
        ]  # fmt: skip
        want = copy.deepcopy(want_net).double()
        want(t.batch(seed).double()).square().mean().backward()
        t.assert_close(t.grads(model), {n: p.grad for n, p in want.named_parameters()})
        assert [r.region for r in model.reports if r.weight == "0.inner.weight"] == ["r0"]
    assert len(driver.graphs) == 2 and [g.replays for g in driver.graphs] == [3, 3]
    assert bucket.reduction.started == [None] * 4, "it is not the region's alone: never inside"
    model.close()


@pytest.mark.parametrize("kind", ["regions", "compiled step"])
def test_k25_ungraphed_weights_leave_the_graph_and_are_finalised_eagerly(kind: str) -> None:
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed(kind, model, ungraphed=["b.*"])
    for seed in range(5):
        batches = [t.batch(seed), t.batch(seed + 20)]
        t.assert_close(r.train(*batches), t.reference(want_net, batches))
        where = {(x.weight, x.region) for x in model.reports}
        assert where == {(n, "r0") for n in ("a.weight", "a.bias", "norm.weight", "norm.bias")} | {
            ("b.weight", None), ("b.bias", None),
        }  # fmt: skip
        assert sum(x.weight == "b.weight" for x in model.reports) == 2
    assert min(r.replays) > 1
    model.close()


class Branches(nn.Module):
    """Two regions that read the same activation, whose gradients meet outside of both. Backwards
    run in the reverse order of forwards, which `flipped` turns around."""

    flipped = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.left, self.right = t.Linear(8, 8), t.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        branches = (self.right, self.left) if self.flipped else (self.left, self.right)
        first, second = (branch(h) for branch in branches)
        return (first * second).square().mean()


@pytest.mark.parametrize("ungraphed", [[], ["left.*", "right.*"]])
def test_what_a_backward_hands_out_outlives_the_next_regions_replay(ungraphed: list[str]) -> None:
    """Gradients that autograd still adds up, and UNGRAPHED ones that the queue still holds."""
    net = Branches()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    driver = t.HostDriver(model)
    model.graph_driver(lambda: driver)
    options = {"lowering": "eager", "replay": "cuda", "ungraphed": ungraphed}
    for branch in (model.module.left, model.module.right):
        branch.compile(backend="gtpgraph", options=options)
    for seed in range(6):
        net.flipped = seed in (3, 4)  # replayed in another order than captured
        t.assert_close(t.eager_step(model, t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
    assert [g.replays for g in driver.graphs] == [5] * 4
    model.close()


@pytest.mark.parametrize("dispatch", t.DISPATCH)
@pytest.mark.parametrize("kind", t.KINDS)
def test_a_weight_whose_reports_go_nowhere_or_elsewhere(kind: str, dispatch: str) -> None:
    """A3: it accumulates, and reports to its own hook once per occurrence, or not at all."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net, bucket_mb=32)
    weights, told = dict(model.named_weights()), []
    model.set_ready_hook(weights["a.weight"], None)
    model.set_ready_hook(weights["b.weight"], lambda w, report: told.append(report))
    r = t.Replayed(kind, model, dispatch=dispatch)
    for seed in range(4):
        told.clear()
        t.assert_close(r.train(t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
        assert [x.use for x in told] == [2, 1] and {x.weight for x in told} == {"b.weight"}
        assert "a.weight" not in {x.weight for x in model.reports}
        assert [x for x in model.reports if x.weight == "b.weight"] == told
    assert min(r.replays) > 1
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_a_replay_too_many_is_found_before_it_is_launched(kind: str) -> None:
    """K03: the gradients of the first one stay as they are."""
    net = t.Net()
    model = t.wrapped(net)
    want_net = copy.deepcopy(net)
    r = t.Replayed(kind, model)
    for _ in range(3):
        r.train(t.batch())
    model.zero_grad_buffer()
    r.run(t.batch(1))
    flats = [b.flat.clone() for b in model.buckets]
    replays = sum(r.replays[1:] if kind == "regions" else r.replays)
    with pytest.raises(RuntimeError, match=r"surplus reports of .*no_sync\(\)"):
        r.run(t.batch(2))
    assert sum(r.replays[1:] if kind == "regions" else r.replays) == replays
    assert all(torch.equal(b.flat, f) for b, f in zip(model.buckets, flats, strict=True))
    for seed in range(2):
        t.assert_close(r.train(t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_k17_dropout_draws_new_masks_at_every_replay(kind: str) -> None:
    model = t.wrapped(t.Net(p=0.5))
    r = t.Replayed(kind, model)
    seen = [r.train(t.batch())["b.weight"] for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_a_moved_parameter_is_a_clear_error(kind: str) -> None:
    net = t.Net()
    model = t.wrapped(net)
    r = t.Replayed(kind, model)
    for _ in range(3):
        r.train(t.batch())
    net.norm.weight.data = net.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"replaced .*(Compile|Capture) the model again"):
        r.train(t.batch())
    model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_close_frees_the_graphs_and_later_calls_fail_clearly(kind: str) -> None:
    model = t.wrapped(t.Net())
    r = t.Replayed(kind, model)
    for _ in range(3):
        r.train(t.batch())
    count = len(r.driver.graphs)
    model.close()
    assert [g.alive for g in r.driver.graphs] == [False] * count
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"closed|after close"):
            r.run(t.batch())
    assert len(r.driver.graphs) == count, "nothing is captured after close()"
    model.close()


def test_frozen_between_steps_then_thawed() -> None:
    """A weight that needs no gradient now gets none from a graph that was captured before."""
    for kind in t.KINDS:
        net = t.Net()
        want_net = copy.deepcopy(net)
        model = t.wrapped(net)
        r = t.Replayed(kind, model)
        for frozen in (False, True, False):
            net.norm.weight.requires_grad_(not frozen)
            for seed in range(3):
                got = r.train(t.batch(seed))
                want = t.reference(want_net, [t.batch(seed)])
                if frozen:
                    want["norm.weight"] = torch.zeros(16)
                t.assert_close(got, want)
        model.close()


@pytest.mark.parametrize("kind", t.KINDS)
def test_mtp_tiny_whole(kind: str) -> None:
    """A6: a tied weight used six times, a layer replayed twice; bitwise against the first call."""
    torch.manual_seed(0)
    net, make_batch = build("mtp-tiny")
    want_net = copy.deepcopy(net).double()
    model = t.wrapped(net, bucket_mb=0.01)
    r = t.Replayed(kind, model)
    one = make_batch(0, 0, "cpu")
    model.zero_grad_buffer()
    r.run(*one)
    model.finish_grad_sync()
    first, reports = t.grads(model), list(model.reports)
    assert sum(x.weight == "embed.weight" for x in reports) == 6 and len(reports) == 45
    want_net(*one).backward()
    t.assert_close(first, {n: p.grad for n, p in want_net.named_parameters()}, 2e-6)
    for _ in range(3):
        model.zero_grad_buffer()
        r.run(*one)
        model.finish_grad_sync()
        t.assert_equal(t.grads(model), first)
        assert model.reports == reports
    assert min(r.replays) == 3
    model.close()


def test_k13_what_a_replay_hands_out_can_be_kept_or_is_documented() -> None:
    """Input gradients are the caller's; a loss is valid until the next replay of its region."""
    model = t.wrapped(t.Net())
    r = t.Replayed("regions", model)
    kept, losses = [], []
    for seed in range(4):
        x = t.batch(seed).requires_grad_()
        model.zero_grad_buffer()
        loss = r.call(x)
        losses.append((loss, loss.detach().clone()))
        loss.backward()
        model.finish_grad_sync()
        kept.append((x.grad, x.grad.clone()))
    assert all(torch.equal(a, b) for a, b in kept)
    assert not torch.equal(losses[2][0], losses[2][1])
    assert torch.equal(losses[2][0], losses[3][1])
    assert all(p.grad is None for p in model.parameters())
    model.close()


def step_on_ranks(rank: int, world: int, dispatch: str, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    groups = gg.ProcessGroups.from_mesh(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
    )
    torch.manual_seed(0)
    net = t.Net()
    want_net = copy.deepcopy(net)
    torch._dynamo.reset()
    model = gg.DistributedDataParallel(gg.shard(net, groups), groups, bucket_mb=t.SMALL_MB)
    r = t.Replayed(kind, model, dispatch=dispatch)
    for seed in range(4):
        got = r.train(t.batch(4 * seed + rank))
        whole = t.reference(want_net, [t.batch(4 * seed + k) for k in range(4)])
        t.assert_close(got, {n: g / 4 for n, g in whole.items()})
        assert len(model.reports) == 7
    assert min(r.replays) == 3
    model.close()


@pytest.mark.dist
@pytest.mark.parametrize("dispatch", ["event", "in_graph"])
@pytest.mark.parametrize("kind", ["regions", "compiled step"])
def test_a7_four_ranks(ranks4: object, kind: str, dispatch: str) -> None:
    """gtp 2 x dp 2, other data on every rank, real collectives: the mean over all of them."""
    ranks4.run(step_on_ranks, dispatch, kind)


def test_inference_is_unaffected() -> None:
    """Under no_grad the compiled forward gives what the model gives, before and after captures."""
    net = t.Net()
    want_net = copy.deepcopy(net)
    model = t.wrapped(net)
    r = t.Replayed("regions", model)
    for seed in range(3):
        with torch.no_grad():
            torch.testing.assert_close(r.call(t.batch(seed)), want_net(t.batch(seed)))
        r.train(t.batch(seed))
    model.close()
