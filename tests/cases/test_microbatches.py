"""Several microbatches in one step: silent under no_sync, one dispatch on the last."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.testing import fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))


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
    model = h.ABA()
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
