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
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))


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


# --- K01, K02 -------------------------------------------------------------------------------------


def test_k01_a_weight_used_twice_reports_twice_and_its_bucket_leaves() -> None:
    model = h.ABA()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    watch = h.Departures(ddp)
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        h.step(ddp, call, x)
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert sorted(number for number, _, _ in watch.take()) == [0, 1]
        assert max_error(h.full_grads(ddp), fp64_grads(plain, [(x,)])) <= h.SUM_ORDER_BAR


def test_k02_order_and_multiplicity_survive_the_grouping() -> None:
    from gtpgraph.graph.chains import group_occurrences

    ddp = h.wrap(h.ABA(), bucket_mb=1.0)
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
    ddp = h.wrap(h.ABA(), bucket_mb=1.0)
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
    ddp = h.wrap(h.ABA(), bucket_mb=1.0)
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


def three_heads(rank: int, world: int, gtp: int) -> list[tuple[float, dict[str, int], int]]:
    """(largest error, reports, storages of the eager contributions), eager then compiled."""
    torch.manual_seed(0)
    model, batches = Heads(), [(h.batch_of(r),) for r in range(world)]
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, gtp)
    kept: list[Tensor] = []
    push = ddp.eager.push

    def pushed(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        kept.append(ddp.eager._pending[-1].result)  # kept alive: its memory is not used again

    ddp.eager.push = pushed
    out = []
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        kept.clear()
        h.step(ddp, call, *batches[rank])
        error = max_error(h.full_grads(ddp), expected)
        out.append((error, h.counts(ddp.reports), len({t.data_ptr() for t in kept})))
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
        assert eager[2] == 3, "contributions in flight share storage"


# --- K06, K07, K08 --------------------------------------------------------------------------------


def test_k06_a_warm_up_step_of_another_shape_leaves_declared_counts_alone() -> None:
    model = h.ABA()
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
        assert max_error(h.full_grads(ddp), fp64_grads(plain, [(x,)])) <= h.SUM_ORDER_BAR
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
        assert max_error(h.full_grads(ddp), fp64_grads(plain, [(x,)])) <= h.SUM_ORDER_BAR
    captured = h.counts(ddp.reports)
    assert captured["block.layers.0.weight"] == eager["block.layers.0.weight"] == 2
    # An ordinary weight reports once per region backward, and once per backward in eager.
    assert (eager["block.layers.0.bias"], captured["block.layers.0.bias"]) == (1, 2)
    assert all(inside for _, _, inside in watch.left)


def test_k08_eager_captured_eager_again_skips_nothing() -> None:
    model = h.ABA()
    plain = copy.deepcopy(model)
    ddp = h.wrap(model, bucket_mb=1.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    for seed, call in enumerate((ddp, compiled, compiled, ddp, compiled, ddp)):
        x = h.batch_of(0, seed=seed)
        h.step(ddp, call, x)
        assert h.counts(ddp.reports) == {"a.weight": 2, "b.weight": 1}
        assert {r.region for r in ddp.reports} == {None if call is ddp else "r0"}
        assert max_error(h.full_grads(ddp), fp64_grads(plain, [(x,)])) <= h.SUM_ORDER_BAR
