"""Capture and replay on a GPU: counts, gradients, side effects and streams (cases K09 to K27)."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gtpgraph as gg
from gtpgraph.graph.branch import CudaBranch
from gtpgraph.parallel.buckets import Bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL_MB = 0.01
DISPATCH = ("after", "event", "in_graph")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()  # its limit of recompilations counts over all tests of a process


class Net(nn.Module):
    """Two Linears (one used twice), a norm, biases; optional dropout and batch norm."""

    def __init__(self, p: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64) if batch_norm else nn.LayerNorm(64)
        self.b = nn.Linear(64, 64)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        h = F.relu(self.b(h))
        return F.relu(self.b(self.drop(h))).square().mean()


def wrapped(net: nn.Module, **kw: object) -> gg.DistributedDataParallel:
    return gg.DistributedDataParallel(gg.shard(net.cuda()), bucket_mb=SMALL_MB, **kw)


def grads(model: gg.DistributedDataParallel) -> dict[str, Tensor]:
    return {name: model.full_grad(name) for name, _ in model.named_weights()}


def reference(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    net = copy.deepcopy(net).double()
    for batch in batches:
        net(batch.double()).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], bar: float = 2e-6) -> None:
    for name, grad in want.items():
        error = (got[name].double() - grad).norm() / grad.norm().clamp_min(1e-30)
        assert error < bar, (name, float(error))


def batch(seed: int = 0, rows: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 32, generator=generator).cuda()


def whole_step(model: gg.DistributedDataParallel, run: object, **kw: object) -> object:
    def step(x: Tensor) -> Tensor:
        loss = run(x)
        loss.backward()
        return loss

    return gg.capture(step, model, **kw)


def kinds(model: gg.DistributedDataParallel, dispatch: str) -> dict[str, object]:
    """One way per call to run forward and backward: captured regions, and whole captured steps."""
    return {
        "regions": gg.compile(model, lowering="eager", replay="cuda", dispatch=dispatch),
        "step": whole_step(model, model, dispatch=dispatch),
        "compiled step": whole_step(model, gg.compile(model, lowering="eager"), dispatch=dispatch),
    }


def run(kind: str, step: object, x: Tensor) -> Tensor:
    loss = step(x)
    if kind == "regions":
        loss.backward()
    return loss


@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("kind", ["regions", "step", "compiled step"])
def test_replayed_steps_give_eager_gradients_and_reports(kind: str, dispatch: str) -> None:
    net = Net()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    model.zero_grad_buffer()
    model(batch()).backward()
    model.finish_grad_sync()
    eager = sorted((r.weight, r.use) for r in model.reports)
    step = kinds(model, dispatch)[kind]
    for seed in range(5):
        model.zero_grad_buffer()
        loss = run(kind, step, batch(seed))
        model.finish_grad_sync()
        assert_close(grads(model), reference(want_net, [batch(seed)]))
        torch.testing.assert_close(loss, want_net(batch(seed)))
        assert sorted((r.weight, r.use) for r in model.reports) == eager
    model.close()


def test_inductor_regions_replay() -> None:
    net = Net()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    step = gg.compile(model, lowering="inductor", replay="cuda")
    for seed in range(4):
        model.zero_grad_buffer()
        step(batch(seed)).backward()
        model.finish_grad_sync()
        assert_close(grads(model), reference(want_net, [batch(seed)]), 1e-5)
        assert [(r.weight, r.use) for r in model.reports] == [
            (o.weight, o.use) for o in step.plan.regions[0].occurrences
        ]
    model.close()


def test_fused_accumulates_replay_and_are_no_less_exact() -> None:
    """bf16, so that wgrad GEMMs are joined with their accumulates: one rounding fewer."""
    net = Net().bfloat16()
    want = reference(copy.deepcopy(net).cuda(), [batch().bfloat16()])
    errors = {}
    for fuse in (False, None):
        torch._dynamo.reset()
        model = wrapped(copy.deepcopy(net))
        step = gg.compile(model, lowering="inductor", replay="cuda", fuse=fuse)
        for _ in range(4):
            model.zero_grad_buffer()
            step(batch().bfloat16()).backward()
            model.finish_grad_sync()
            got = grads(model)
            assert [(r.weight, r.use) for r in model.reports] == [
                (o.weight, o.use) for o in step.plan.regions[0].occurrences
            ]
        errors[fuse] = {n: float((got[n].double() - w).norm() / w.norm()) for n, w in want.items()}
        (text,) = (r.texts["after"] for r in step.regions)
        assert ("wgrad_gemm" in text, "accumulate_many" in text) == (fuse is None,) * 2
        model.close()
    for name, error in errors[None].items():
        assert error < max(0.02, 1.2 * errors[False][name]), (name, error, errors[False][name])


def test_a_kept_loss_of_an_uncaptured_step_is_named() -> None:
    """Its autograd graph ties the parameters' accumulators to the stream that it ran on."""
    model = wrapped(Net())
    step = whole_step(model, model)
    model.zero_grad_buffer()
    kept = model(batch())
    kept.backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()
    step(batch())
    model.finish_grad_sync()
    with pytest.raises(RuntimeError, match="loss or output of an earlier uncaptured step"):
        step.prepare(batch())
    del kept
    step.prepare(batch())
    model.close()


class Layer(nn.Module):
    """A module of our own: Dynamo skips frames of torch's, and would compile nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x))


class Wide(nn.Module):
    """A Linear behind a frame of our own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.lin = nn.Linear(columns, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def test_k09_four_captured_instances_of_one_module() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 64)
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    net = Stack()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    options = {"lowering": "eager", "replay": "cuda"}
    for layer in model.module.layers:
        layer.compile(backend="gtpgraph", options=options)
    for seed in range(4):
        model.zero_grad_buffer()
        model(batch(seed)).backward()
        model.finish_grad_sync()
        assert_close(grads(model), reference(want_net, [batch(seed)]))
    assert len(model.regions) >= 1 and all(r.replay.instances for r in model.regions)
    model.close()


@pytest.mark.parametrize("kind", ["regions", "step", "compiled step"])
def test_k12_k14_backwards_without_zeroing_accumulate(kind: str) -> None:
    class Mean(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean()

    net = Mean(nn.Linear(32, 1)).cuda()  # nothing to shard: ordinary weights alone
    want_net = copy.deepcopy(net)
    model = gg.DistributedDataParallel(net)
    step = kinds(model, "event")[kind]
    for _ in range(2):  # warm-up and capture
        model.zero_grad_buffer()
        run(kind, step, batch())
        model.finish_grad_sync()
    model.zero_grad_buffer()
    with model.no_sync():
        for seed in range(4):
            run(kind, step, batch(seed))
    run(kind, step, batch(4))
    model.finish_grad_sync()
    assert_close(grads(model), reference(want_net, [batch(s) for s in range(5)]))
    model.close()


def test_k13_a_kept_input_gradient_is_not_overwritten() -> None:
    model = wrapped(Net())
    step = gg.compile(model, lowering="eager", replay="cuda")
    kept = []
    for seed in range(4):
        x = batch(seed).requires_grad_()
        model.zero_grad_buffer()
        step(x).backward()
        model.finish_grad_sync()
        kept.append((x.grad, x.grad.clone()))
    for reference_kept, value in kept:
        assert torch.equal(reference_kept, value)
    assert all(p.grad is None for p in model.parameters())
    model.close()


def test_outputs_are_valid_until_the_next_replay() -> None:
    model = wrapped(Net())
    step = whole_step(model, model)
    losses = []
    for seed in range(4):
        model.zero_grad_buffer()
        losses.append(step(batch(seed)))
        losses.append(losses[-1].clone())
        model.finish_grad_sync()
    assert not torch.equal(losses[4], losses[5])  # the reference shows the last replay
    assert torch.equal(losses[4], losses[7])
    model.close()


@pytest.mark.parametrize("body", ["eager", "compiled"])
def test_k15_capture_leaves_everything_bit_identical(body: str) -> None:
    model = wrapped(Net(p=0.3, batch_norm=True))
    step = whole_step(model, model if body == "eager" else gg.compile(model, lowering="eager"))
    model.zero_grad_buffer()
    step(batch())
    model.finish_grad_sync()
    model.scale_gradients(0.5)
    flats = [b.flat.clone() for b in model.buckets]
    buffers = [b.clone() for b in model.buffers()]
    rng = torch.cuda.get_rng_state()
    step.prepare(batch())
    assert all(torch.equal(b.flat, f) for b, f in zip(model.buckets, flats, strict=True))
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    model.zero_grad_buffer()
    step(batch())
    model.finish_grad_sync()
    model.close()


class Breaks(nn.Module):
    """A model that synchronises with the host when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 64)
        self.look = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x).square().mean()
        if self.look and float(y) > 1e9:
            y = y * 2
        return y


def test_k16_k23_a_failed_capture_leaves_the_model_usable_and_names_the_line() -> None:
    net = Breaks()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    step = whole_step(model, model)
    model.zero_grad_buffer()
    step(batch())
    model.finish_grad_sync()
    before = [b.flat.clone() for b in model.buckets]
    net.look = True
    with pytest.raises(RuntimeError, match=r"Breaks \(.*test_capture_cuda.py:\d+\)"):
        step.prepare(batch())
    assert all(torch.equal(b.flat, f) for b, f in zip(model.buckets, before, strict=True))
    model.zero_grad_buffer()
    model(batch(3)).backward()
    model.finish_grad_sync()
    assert_close(grads(model), reference(want_net, [batch(3)]))
    net.look = False
    for seed in range(3):  # and it can be captured after all
        model.zero_grad_buffer()
        step(batch(seed))
        model.finish_grad_sync()
        assert_close(grads(model), reference(want_net, [batch(seed)]))
    model.close()


@pytest.mark.parametrize("kind", ["regions", "step"])
def test_k17_dropout_draws_new_masks_at_every_replay(kind: str) -> None:
    model = wrapped(Net(p=0.5))
    step = kinds(model, "event")[kind]
    seen = []
    for _ in range(5):
        model.zero_grad_buffer()
        run(kind, step, batch())
        model.finish_grad_sync()
        seen.append(model.full_grad("b.weight"))
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    model.close()


class SlowCopy:
    """Stands for a slow network: reads the bucket long after its reduction was started."""

    def __init__(self, flat: Tensor) -> None:
        self.read = torch.zeros_like(flat)

    def start(self, flat: Tensor) -> None:
        torch.cuda._sleep(20_000_000)
        self.read.copy_(flat)

    def finish(self, flat: Tensor) -> None:
        pass


@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("kind", ["regions", "step"])
def test_k18_k19_a_slow_reduction_reads_this_steps_gradients(kind: str, dispatch: str) -> None:
    model = wrapped(Net())
    for bucket in model.buckets:
        bucket.reduction = SlowCopy(bucket.flat)
    step = kinds(model, dispatch)[kind]
    for seed in range(4):
        model.zero_grad_buffer()
        run(kind, step, batch(seed))
        model.finish_grad_sync()
        for bucket in model.buckets:
            assert torch.equal(bucket.reduction.read, bucket.flat)
    model.close()


def test_k22_reentrant_checkpoints_are_refused_and_others_work() -> None:
    class Checkpointed(Net):
        reentrant = True

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.b, self.a(x), use_reentrant=self.reentrant)
            return h.square().mean()

    for reentrant in (True, False):
        net = Checkpointed()
        net.norm = nn.Identity()
        net.reentrant = reentrant
        want_net = copy.deepcopy(net).cuda()
        model = wrapped(net)
        step = whole_step(model, model)
        x = batch()
        model.zero_grad_buffer()
        step(x)
        model.finish_grad_sync()
        model.zero_grad_buffer()
        if reentrant:
            with pytest.raises((RuntimeError, NotImplementedError), match="use_reentrant=False"):
                step(x)
        else:
            step(x)
            model.finish_grad_sync()
            assert_close(grads(model), reference(want_net, [batch()]))
        model.close()


@pytest.mark.parametrize("kind", ["regions", "step"])
def test_k24_other_shapes_capture_again_up_to_a_limit(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    if kind == "regions":
        step = gg.compile(model, lowering="eager", replay="cuda", max_captures=2, dynamic=True)
    else:
        step = whole_step(model, model, max_captures=2)
    with caplog.at_level(logging.WARNING, "gtpgraph.replay"):
        for rows in (4, 8, 12):
            for seed in range(3):
                model.zero_grad_buffer()
                run(kind, step, batch(seed, rows))
                model.finish_grad_sync()
                assert_close(grads(model), reference(want_net, [batch(seed, rows)]))
    assert sum("uncaptured" in r.message for r in caplog.records) == 1
    model.close()


def test_k26_one_layer_captured_the_other_eager_in_one_bucket() -> None:
    net = nn.Sequential(Wide(64, 32), Wide(8, 64))
    want_net = copy.deepcopy(net).cuda()
    model = gg.DistributedDataParallel(gg.shard(net.cuda()))
    assert len(model.buckets) == 1
    model.module[0].compile(backend="gtpgraph", options={"lowering": "eager", "replay": "cuda"})
    assert model.regions == []
    starts = []
    start = Bucket.start_reduce
    for seed in range(4):
        model.zero_grad_buffer()
        starts.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bucket, "start_reduce", lambda b: (starts.append(b.number), start(b)))
            model(batch(seed)).square().mean().backward()
            model.finish_grad_sync()
        assert starts == [0]
        assert sorted(r.weight for r in model.reports) == [
            "0.lin.bias",
            "0.lin.weight",
            "1.lin.bias",
            "1.lin.weight",
        ]

        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = want_net

            def forward(self, x: Tensor) -> Tensor:
                return self.net(x).square().mean()

        want = {n.removeprefix("net."): g for n, g in reference(Mean(), [batch(seed)]).items()}
        assert_close(grads(model), want)
    assert len(model.regions) == 1
    model.close()


def test_k27_a_reduction_waits_for_writers_on_every_stream() -> None:
    model = wrapped(Net())
    bucket = max(model.buckets, key=lambda b: len(b.members))
    bucket.reduction = SlowCopy(bucket.flat)
    model.zero_grad_buffer()
    side = torch.cuda.Stream()
    members = list(bucket.members)
    ones = [torch.ones(m.shape, device="cuda") for m in members]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        bucket.add(members[0], ones[0], 3.0)
    for member, one in zip(members[1:], ones[1:], strict=True):
        bucket.add(member, one, 2.0)
    bucket.start_reduce()
    bucket.wait_reduce()
    torch.cuda.synchronize()
    for member, value in zip(members, [3.0] + [2.0] * (len(members) - 1), strict=True):
        got = bucket.reduction.read[member.offset : member.offset + member.numel]
        assert torch.equal(got, torch.full_like(got, value))
    model.close()


def test_several_forwards_in_flight_have_their_own_activations() -> None:
    net = Net()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)
    step = gg.compile(model, lowering="eager", replay="cuda")
    for repeat in range(4):
        batches = [batch(10 * repeat + k) for k in range(3)]
        model.zero_grad_buffer()
        losses = [step(b) for b in batches]
        with model.no_sync():
            for loss in losses[:-1]:
                loss.backward()
        losses[-1].backward()
        model.finish_grad_sync()
        assert_close(grads(model), reference(want_net, batches))
    model.close()


class Residual(nn.Module):
    """Its residual gradients are read by wgrad GEMMs and then added to, by Inductor in place."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, 512) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(512, 256) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, (256,)))))
        return x.square().mean()


@pytest.mark.parametrize("kind", ["regions", "step", "compiled step", "inductor step"])
def test_accumulates_that_run_late_find_their_operands(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch of every accumulate is held up for some 0.2 ms, many times what it takes."""
    run_branch, slowed = CudaBranch.run, []

    def run_slowly(self: CudaBranch, launch: object, args: object) -> Tensor:
        def late(*args: object) -> Tensor:
            torch.cuda._sleep(300_000)
            slowed.append(launch)
            return launch(*args)

        return run_branch(self, late, args)

    monkeypatch.setattr(CudaBranch, "run", run_slowly)
    torch.manual_seed(0)
    net = Residual().bfloat16()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    found = {}
    for limit in (0, 3):
        torch._dynamo.reset()
        model = wrapped(copy.deepcopy(net))
        flight = {"wgrads_in_flight": limit}
        if kind == "regions":
            step = gg.compile(model, lowering="inductor", replay="cuda", **flight)
        elif kind == "step":
            step = whole_step(model, model, **flight)
        else:
            lowering = "eager" if kind == "compiled step" else "inductor"
            step = whole_step(model, gg.compile(model, lowering=lowering, **flight), **flight)
        for _ in range(4):
            model.zero_grad_buffer()
            run(kind, step, x)
            model.finish_grad_sync()
            found.setdefault(limit, []).append({n: g.clone() for n, g in grads(model).items()})
        assert bool(slowed) == bool(limit)
        model.close()
    for late, prompt in zip(found[3], found[0], strict=True):
        assert [n for n in prompt if not torch.equal(late[n], prompt[n])] == []


def test_a_captured_step_may_read_main_grads_behind_its_backward() -> None:
    net = Net()
    want_net = copy.deepcopy(net).cuda()
    model = wrapped(net)

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        return torch.stack([b.flat.square().sum() for b in model.buckets]).sum()

    call = gg.capture(step, model)
    for seed in range(4):
        model.zero_grad_buffer()
        total = call(batch(seed))
        model.finish_grad_sync()
        want = sum(g.square().sum() for g in reference(want_net, [batch(seed)]).values())
        torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=0)
    model.close()


def test_closing_one_captured_model_leaves_another_its_gradients() -> None:
    """Two models captured in turn, the first closed and its memory returned to the device."""
    nets = [Net(), Net()]
    want = [copy.deepcopy(net).cuda() for net in nets]
    models = [wrapped(net) for net in nets]
    regions = gg.compile(models[0], lowering="eager", replay="cuda")
    ways = [
        [(regions, True), (whole_step(models[0], models[0]), False)],
        [(gg.compile(models[1], lowering="eager", replay="cuda"), True),
         (whole_step(models[1], models[1]), False)],
    ]  # fmt: skip

    def step(k: int, seed: int) -> None:
        for run_it, backward in ways[k]:
            models[k].zero_grad_buffer()
            loss = run_it(batch(seed))
            if backward:
                loss.backward()
            models[k].finish_grad_sync()
            assert_close(grads(models[k]), reference(want[k], [batch(seed)]))

    for seed in range(4):
        step(0, seed)
        step(1, seed)
    models[0].close()
    ways[0].clear()
    del regions
    torch.cuda.empty_cache()
    fill = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    for seed in range(4, 10):
        step(1, seed)
    assert all(bool(f.isnan().all()) for f in fill)
    models[1].close()


def test_a_thousand_replays_are_bitwise_equal_and_take_no_memory() -> None:
    model = wrapped(Net())
    step = whole_step(model, model)
    held = batch()

    def one() -> None:
        model.zero_grad_buffer()
        step(held)
        model.finish_grad_sync()

    for _ in range(3):
        one()
    first = [b.flat.clone() for b in model.buckets]
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()
    for _ in range(1000):
        one()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == memory
    assert all(torch.equal(b.flat, f) for b, f in zip(model.buckets, first, strict=True))
    model.close()
