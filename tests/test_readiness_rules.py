"""Rules of readiness, one small model each: hooks, counts that disagree, sharing, no_sync."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).parent / "cases" / "helpers.py"))
BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield


class Net(nn.Module):
    """Two layers and a norm; the first layer optionally used once more."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.a(x))
        return self.b(self.norm(x)).square().mean()


# --- set_ready_hook -------------------------------------------------------------------------------


@BOTH
def test_a_ready_hook_is_called_exactly_once_for_each_finalisation(compiled: bool) -> None:
    model = Net(uses=3)
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    told: list[tuple[str, int]] = []
    weights = dict(ddp.named_weights())
    for weight in weights.values():
        ddp.set_ready_hook(weight, lambda w, report: told.append((report.weight, report.use)))
    h.step(ddp, call, x)
    assert told == [(r.weight, r.use) for r in ddp.reports]
    assert h.counts(ddp.reports)["a.weight"] == 3 and h.counts(ddp.reports)["b.weight"] == 1
    # The contribution stands in main_grad when the hook is called.
    seen: list[bool] = []
    b = weights["b.weight"]
    ddp.set_ready_hook(b, lambda w, report: seen.append(bool(w.main_grad.any())))
    h.step(ddp, call, x)
    assert seen == [True]
    assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


@BOTH
def test_without_a_ready_hook_a_weight_accumulates_silently(compiled: bool) -> None:
    model = Net(uses=2)
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    weights = dict(ddp.named_weights())
    ddp.set_ready_hook(weights["a.weight"], None)
    for _ in range(2):
        h.step(ddp, call, x)
        counts = h.counts(ddp.reports)
        assert "a.weight" not in counts and set(counts) == set(weights) - {"a.weight"}
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


@BOTH
def test_the_wrappers_own_hook_can_be_put_back(compiled: bool) -> None:
    ddp = h.wrap(Net(), bucket_mb=1e-4)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    watch = h.Departures(ddp)
    weight = dict(ddp.named_weights())["b.weight"]
    h.step(ddp, call, h.batch_of(0))
    own = ddp.states[[s.fqn for s in ddp.states].index("b.weight")].ready_hook
    for hook, inside in ((None, False), (own, True)):
        ddp.set_ready_hook(weight, hook)
        watch.take()
        h.step(ddp, call, h.batch_of(0))
        number = next(s.bucket.number for s in ddp.states if s.param is weight)
        assert [i for n, _, i in watch.left if n == number] == [inside]


def test_a_weight_without_main_grad_is_an_error() -> None:
    ddp = h.wrap(Net())
    text = h.error_of(ddp.set_ready_hook, nn.Parameter(torch.zeros(3)), None)
    assert text.startswith("ValueError") and "without main_grad" in text
    unwrapped = torch.compile(Net(), backend="gtpgraph", options={"lowering": "eager"})
    text = h.error_of(unwrapped, h.batch_of(0))
    assert "expected trainable weights with main_grad" in text and "(8, 8)" in text
    assert "DistributedDataParallel" in text


# --- counts that disagree -------------------------------------------------------------------------


def test_learned_and_declared_counts_that_disagree_are_an_error_that_lists_the_weights() -> None:
    model = Net(uses=2)
    ddp = h.wrap(model)
    h.step(ddp, ddp, h.batch_of(0))
    model.uses = 1  # what is captured uses `a` once
    compiled = gtpgraph.compile(ddp, lowering="eager")
    text = h.error_of(h.step, ddp, compiled, h.batch_of(0))
    assert "a.weight: expected 2 report(s) as learned in an eager step, got 1" in text
    assert "b.weight" not in text and "a.bias" not in text
    ddp.forget_ready_counts()
    h.step(ddp, compiled, h.batch_of(0))
    assert h.counts(ddp.reports)["a.weight"] == 1


def test_an_eager_step_that_changes_its_counts_is_an_error() -> None:
    model = Net(uses=2)
    ddp = h.wrap(model)
    h.step(ddp, ddp, h.batch_of(0))
    model.uses = 1
    text = h.error_of(h.step, ddp, ddp, h.batch_of(0))
    assert "a.weight: expected 2 eager report(s) (learned), got 1" in text
    model.uses = 3
    text = h.error_of(h.step, ddp, ddp, h.batch_of(0))
    assert "a.weight: expected 2 eager finalisation(s)" in text and "got one more" in text


# --- weights that are shared ----------------------------------------------------------------------


class ThreeWay(nn.Module):
    """As T5: encoder embedding, decoder embedding and output layer are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.mix = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.decode.weight = self.head.weight = self.encode.weight

    def forward(self, tokens: Tensor) -> Tensor:
        both = torch.cat((self.encode(tokens), self.decode(tokens.flip(1))), dim=-1)
        logits = self.head(torch.tanh(self.mix(both)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Looped(nn.Module):
    """A block called five times in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(5):
            x = x + self.block(x)
        return x.square().sum(-1).mean()


SHARED = [
    (ThreeWay, {"encode.weight": 3, "mix.weight": 1}),
    (Tied, {"embed.weight": 2}),
    (Looped, {"embed.weight": 1, "block.0.weight": 5}),
]


def shared(rank: int, world: int, kind: type[nn.Module], gtp: int) -> list[Any]:
    torch.manual_seed(0)
    batches = [
        (torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(r)),)
        for r in range(world)
    ]
    model = kind()
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, gtp, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    out = []
    for call in (ddp, compiled, compiled):
        watch.take()
        h.step(ddp, call, *batches[rank])
        error = max_error(h.full_grads(ddp), expected)
        out.append((error, h.counts(ddp.reports), len(watch.left) == len(ddp.buckets)))
    gtp_weights = {o.weight for r in compiled.plan.regions for o in r.occurrences if o.gtp}
    return [out, gtp_weights, dict(compiled.plan.ready_counts)]


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 1])
@pytest.mark.parametrize("kind, uses", SHARED, ids=lambda v: getattr(v, "__name__", ""))
def test_shared_and_repeated_weights_report_once_per_use(
    ranks2: RankPool, kind: type[nn.Module], uses: dict[str, int], gtp: int
) -> None:
    for steps, gtp_weights, ready in ranks2.run(shared, kind, gtp):
        assert gtp_weights == set(uses)
        assert {n: ready[n] for n in uses} == uses
        for error, counts, all_left in steps:
            assert error <= h.SUM_ORDER_BAR and all_left
            assert {n: counts[n] for n in uses} == uses


# --- no_sync --------------------------------------------------------------------------------------


def under_no_sync(rank: int, world: int, gtp: int, ungraphed: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(uses=2)
    batches = [[(h.batch_of(r, seed=s),) for r in range(world)] for s in range(3)]
    micro = [fp64_grads(model, b) for b in batches]
    total = {n: sum(m[n] for m in micro) for n in micro[0]}
    ddp = h.wrap(model, world, gtp, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    compiled = gtpgraph.compile(ddp, lowering="eager", ungraphed=ungraphed)
    out: dict[str, Any] = {"silent": [], "errors": [], "counts": [], "left": [], "micro": []}
    h.step(ddp, ddp, *batches[0][rank])
    h.step(ddp, compiled, *batches[0][rank])
    for call in (ddp, compiled):
        watch.take()
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            for batch in batches[:2]:
                h.backward(ddp, call, *batch[rank])
        out["silent"].append((list(ddp.reports), list(watch.left)))
        h.backward(ddp, call, *batches[2][rank])
        ddp.finish_grad_sync()
        out["left"].append((len(watch.left), len(ddp.buckets)))
        out["errors"].append(max_error(h.full_grads(ddp), total))
        out["counts"].append(h.counts(ddp.reports))
        out["micro"].append({r.microbatch for r in ddp.reports})
    return out


@pytest.mark.dist
@pytest.mark.parametrize("ungraphed", [[], ["a.*"]], ids=["graphed", "a UNGRAPHED"])
@pytest.mark.parametrize("gtp", [2, 1])
def test_no_sync_reports_nothing_and_the_last_microbatch_everything(
    ranks2: RankPool, gtp: int, ungraphed: list[str]
) -> None:
    for seen in ranks2.run(under_no_sync, gtp, ungraphed):
        assert seen["silent"] == [([], [])] * 2
        assert all(left == buckets for left, buckets in seen["left"])
        assert all(error <= h.SUM_ORDER_BAR for error in seen["errors"]), seen["errors"]
        eager, compiled = seen["counts"]
        assert eager == compiled and eager["a.weight"] == 2
        assert seen["micro"] == [{2}, {2}]
