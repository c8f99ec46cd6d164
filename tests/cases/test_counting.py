"""Counting and multiplicity: how often a weight reports, and what happens when it is not right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))


class ABA(nn.Module):
    """a, then b, then a again; or only a and b."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)
        self.again = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return (self.a(y) if self.again else y).square().mean()


class Heads(nn.Module):
    """Three heads share one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width, bias=i > 0) for i in range(3))
        for head in self.heads[1:]:
            head.weight = self.heads[0].weight

    def forward(self, x: Tensor) -> Tensor:
        outs = [torch.tanh(head(x * (i + 1))) for i, head in enumerate(self.heads)]
        return torch.stack(outs).square().mean()


class Twice(nn.Module):
    """One block called twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # so that both inputs of the block require a gradient
        self.block = h.MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.block(self.block(x) + x).square().mean()


class WithSpare(nn.Module):
    """A layer that is defined and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


def error_on(ddp: DistributedDataParallel, plain: nn.Module, batches: list[Any]) -> float:
    return max_error(h.full_grads(ddp), fp64_grads(plain, batches))


# --- K01, K02 -------------------------------------------------------------------------------------


def test_k01_a_weight_used_twice_reports_twice_and_its_bucket_leaves() -> None:
    model = ABA()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        h.step(ddp, call, x)
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert sorted(number for number, _, _ in watch.take()) == [0, 1]
        assert error_on(ddp, plain, [(x,)]) <= h.SUM_ORDER_BAR


def test_k02_order_and_multiplicity_survive_the_grouping() -> None:
    from gtpgraph.graph.chains import group_occurrences

    ddp = h.wrap(ABA(), bucket_mb=1.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    h.step(ddp, compiled, h.batch_of(0))
    uses = [("a.weight", 2), ("b.weight", 1), ("a.weight", 1)]
    (region,) = compiled.plan.regions
    assert [(o.weight, o.use) for o in region.occurrences] == uses
    (group,) = group_occurrences(region.occurrences).values()
    assert [(o.weight, o.use) for o in group] == uses
    assert [(r.weight, r.use) for r in ddp.reports] == uses
    assert dict(compiled.plan.ready_counts) == {"a.weight": 2, "b.weight": 1}


# --- K03 ------------------------------------------------------------------------------------------


@functorch_config.patch(donated_buffer=False)
def test_k03_a_surplus_region_backward_is_refused_before_it_is_launched() -> None:
    """torch's own donated buffers refuse retain_graph in a compiled backward first, unless off."""
    ddp = h.wrap(ABA(), bucket_mb=1.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    ddp.zero_grad_buffer()
    loss = compiled(h.batch_of(0))
    loss.backward(retain_graph=True)
    before = {n: w.main_grad.clone() for n, w in ddp.named_weights()}
    reports = list(ddp.reports)
    text = h.error_of(loss.backward)
    assert text.startswith("RuntimeError: region r0: expected 1 backward(s)")
    assert "a.weight" in text and "b.weight" in text and "no_sync" in text
    assert ddp.reports == reports
    assert all(torch.equal(w.main_grad, before[n]) for n, w in ddp.named_weights())


@pytest.mark.parametrize("learned", [False, True])
def test_k03_an_eager_surplus_is_refused_before_the_second_accumulate(learned: bool) -> None:
    """Known from an earlier step or, in the first one, from how often the weight was gathered."""
    ddp = h.wrap(ABA(), bucket_mb=1.0)
    x = h.batch_of(0)
    if learned:
        h.step(ddp, ddp, x)
    ddp.zero_grad_buffer()
    loss = ddp(x)
    loss.backward(retain_graph=True)
    before = {n: w.main_grad.clone() for n, w in ddp.named_weights()}
    reports = list(ddp.reports)
    text = h.error_of(loss.backward)
    assert "a.weight: expected 2 eager finalisation(s)" in text and "got one more" in text
    assert ddp.reports == reports
    assert all(torch.equal(w.main_grad, before[n]) for n, w in ddp.named_weights())


# --- K04 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_k04_an_unused_weight_is_named_in_the_plan_and_in_the_error(compiled: bool) -> None:
    ddp = h.wrap(WithSpare())
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    text = h.error_of(h.step, ddp, call, h.batch_of(0))
    assert "spare.weight" in text and "spare.bias" in text and "allow_unused=True" in text
    assert "used.weight" not in text.replace("spare", "")
    if compiled:
        assert call.plan.unused == ("spare.weight", "spare.bias")
        assert {w.weight for w in call.plan.warnings} == {"spare.weight", "spare.bias"}


@pytest.mark.parametrize("compiled", [False, True])
def test_k04_allow_unused_dispatches_the_bucket_with_zeros(compiled: bool) -> None:
    model = WithSpare()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, allow_unused=True)
    for bucket in ddp.buckets:
        bucket.flat.fill_(float("nan"))  # an earlier step's leftovers
    watch = h.Departures(ddp)
    h.step(ddp, gtpgraph.compile(ddp, lowering="eager") if compiled else ddp, x)
    assert [number for number, _, _ in watch.left] == list(range(len(ddp.buckets)))
    grads = h.full_grads(ddp)
    assert not grads["spare.weight"].any() and not grads["spare.bias"].any()
    expected = fp64_grads(plain, [(x,)])
    assert max_error({n: grads[n] for n in expected}, expected) <= h.SUM_ORDER_BAR


# --- K05 ------------------------------------------------------------------------------------------


def three_heads(rank: int, world: int, gtp: int) -> list[tuple[float, dict[str, int], set[int]]]:
    torch.manual_seed(0)
    model, batches = Heads(), [(h.batch_of(r),) for r in range(world)]
    plain = copy.deepcopy(model)
    ddp = h.wrap(model, world, gtp)
    storages: set[int] = set()
    push = ddp.eager.push

    def pushed(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        storages.update(id(p.result.untyped_storage()) for p in ddp.eager._pending)
        kept.extend(p.result for p in ddp.eager._pending)

    kept: list[Tensor] = []
    ddp.eager.push = pushed
    out = []
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        storages.clear(), kept.clear()
        h.step(ddp, call, *batches[rank])
        pointers = {t.data_ptr() for t in kept}
        out.append((error_on(ddp, plain, batches), h.counts(ddp.reports), pointers))
    return out


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [1, 2])
def test_k05_three_heads_on_one_weight_are_summed_each_in_its_own_storage(
    ranks2: RankPool, gtp: int
) -> None:
    for eager, compiled in ranks2.run(three_heads, gtp):
        for error, counts, _ in (eager, compiled):
            assert error <= h.SUM_ORDER_BAR
            assert counts["heads.0.weight"] == 3
        assert len(eager[2]) == 3, "contributions in flight share storage"


# --- K06, K07, K08 --------------------------------------------------------------------------------


def test_k06_a_warm_up_step_of_another_shape_leaves_declared_counts_alone() -> None:
    model = ABA()
    plain = copy.deepcopy(model)
    ddp = h.wrap(model, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    h.step(ddp, ddp, h.batch_of(0))
    compiled = gtpgraph.compile(ddp, lowering="eager")
    for rows in (2, 4, 3):
        x = h.batch_of(0, rows=rows)
        watch.take()
        h.step(ddp, compiled, x)
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert all(inside for _, _, inside in watch.left)
        assert error_on(ddp, plain, [(x,)]) <= h.SUM_ORDER_BAR
    assert dict(compiled.plan.ready_counts) == {"a.weight": 2, "b.weight": 1}


def test_k07_a_compiled_block_called_twice_has_two_occurrences_a_site() -> None:
    model = Twice()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    h.step(ddp, ddp, x)
    eager = h.counts(ddp.reports)
    h.compile_part(model.block)
    for _ in range(2):
        watch.take()
        h.step(ddp, ddp, x)
        plan = gtpgraph.plan_of(ddp)
        (region,) = plan.regions
        assert region.calls == 2
        captured = [r for r in ddp.reports if r.region]
        assert h.told(captured) == h.occurrences(plan)
        sites = h.counts(region.occurrences)
        assert h.counts(captured) == {n: 2 * k for n, k in sites.items()}
        assert dict(plan.ready_counts) == h.counts(ddp.reports)
        assert error_on(ddp, plain, [(x,)]) <= h.SUM_ORDER_BAR
    captured = h.counts(ddp.reports)
    assert captured["block.layers.0.weight"] == eager["block.layers.0.weight"] == 2
    # An ordinary weight reports once per region backward, and once per backward in eager.
    assert (eager["block.layers.0.bias"], captured["block.layers.0.bias"]) == (1, 2)
    assert all(inside for _, _, inside in watch.left)


def test_k08_eager_captured_eager_again_skips_nothing() -> None:
    model = ABA()
    plain = copy.deepcopy(model)
    ddp = h.wrap(model, bucket_mb=1.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    for seed, call in enumerate((ddp, compiled, compiled, ddp, compiled, ddp)):
        x = h.batch_of(0, seed=seed)
        h.step(ddp, call, x)
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert {r.region for r in ddp.reports} == {None if call is ddp else "r0"}
        assert error_on(ddp, plain, [(x,)]) <= h.SUM_ORDER_BAR


# --- K10, K11 -------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)).square().mean()


def test_k10_a_wrapper_inside_another_is_silent_under_the_outer_no_sync() -> None:
    model = Outer(h.MLP())
    plain = copy.deepcopy(model)
    inner = h.wrap(model.inner)
    model.inner = nn.Identity()
    outer = h.wrap(model)
    model.inner = inner
    xs = [h.batch_of(0, seed=s) for s in range(2)]
    for ddp in (inner, outer):
        ddp.zero_grad_buffer()
    with outer.no_sync():
        outer(xs[0]).backward()
    assert inner.reports == [] and outer.reports == []
    assert inner.sync and outer.sync
    outer(xs[1]).backward()
    for ddp in (inner, outer):
        ddp.finish_grad_sync()
        assert set(h.counts(ddp.reports).values()) == {1}
    expected = [fp64_grads(plain, [(x,)]) for x in xs]
    total = {n: expected[0][n] + expected[1][n] for n in expected[0]}
    grads = {f"inner.{n}": g for n, g in h.full_grads(inner).items()} | h.full_grads(outer)
    assert max_error(grads, total) <= h.SUM_ORDER_BAR


def test_k10_a_weight_has_one_wrapper() -> None:
    inner = h.wrap(h.MLP())
    text = h.error_of(DistributedDataParallel, Outer(inner))
    assert text.startswith("ValueError") and "no wrapper owns" in text and "layers.0" in text


@pytest.mark.parametrize("compiled", [False, True])
def test_k11_accumulation_over_two_microbatches_dispatches_once_on_the_last(
    compiled: bool,
) -> None:
    model = ABA()
    plain = copy.deepcopy(model)
    ddp = h.wrap(model, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    h.step(ddp, call, h.batch_of(0))  # the eager counts are learned here
    for start in (1, 3):
        xs = [h.batch_of(0, seed=start + s) for s in range(2)]
        watch.take()
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            h.backward(ddp, call, xs[0])
        assert ddp.reports == [] and watch.left == []
        h.backward(ddp, call, xs[1])
        assert sorted(b for b, _, _ in watch.left) == [0, 1]
        ddp.finish_grad_sync()
        assert len(watch.left) == 2
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert {r.microbatch for r in ddp.reports} == {1}
        expected = [fp64_grads(plain, [(x,)]) for x in xs]
        total = {n: expected[0][n] + expected[1][n] for n in expected[0]}
        assert max_error(h.full_grads(ddp), total) <= h.SUM_ORDER_BAR
