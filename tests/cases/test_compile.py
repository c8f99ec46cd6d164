"""What the compile path must get right: shared nodes, partial backwards, order, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))
LOWERINGS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


# --- K30, K31 -------------------------------------------------------------------------------------


class Sum(nn.Module):
    """linear(x, w1 + w2): two weights share one gradient node."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(6, 5, bias=False) for _ in range(2))
        self.factor = 2 if twice else 1

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.a.weight + self.factor * self.b.weight)
        return (y * y.detach().cos()).square().mean()


class DoubleSum(Sum):
    """w1 + 2 * w2: one weight's gradient is the input of the other's."""

    def __init__(self) -> None:
        super().__init__(twice=True)


class BareTangent(nn.Module):
    """x + g as a region of its own: the gradient of g is the region's tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.g


class AroundBareTangent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.add = BareTangent()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.add(self.up(x))).square().sum(1).mean()


class OneWeightTwice(nn.Module):
    """x @ W.T + b + x @ W.T"""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w.weight.T + self.w.bias + x @ self.w.weight.T
        return y.square().mean()


def gradients(rank: int, world: int, gtp: int, kind: type[nn.Module]) -> list[Any]:
    """(eager, compiled) as (largest error, reports by weight)."""
    torch.manual_seed(0)
    model = kind()
    # With x + g the rows of x are those of g: every rank gets as many.
    batches = [(h.batch_of(r, width=6),) for r in range(world)]
    expected = [fp64_grads(model, [b]) for b in batches]
    mean = {n: sum(e[n] for e in expected) / world for n in expected[0]}
    ddp = h.wrap(model, world, gtp)
    out = []
    for compiled in (False, True):
        call: Callable[..., Any] = ddp
        if compiled and kind is AroundBareTangent:
            h.compile_part(model.add)
        elif compiled:
            call = gtpgraph.compile(ddp, lowering="eager", fullgraph=True)
        for _ in range(2):
            h.step(ddp, call, *batches[rank])
            out.append((max_error(h.full_grads(ddp), mean), h.counts(ddp.reports)))
    return out


SHARED_NODES = [
    (Sum, {"a.weight": 1, "b.weight": 1}),
    (DoubleSum, {"a.weight": 1, "b.weight": 1}),
    (AroundBareTangent, {"up.weight": 1, "up.bias": 1, "add.g": 1}),
]


@pytest.mark.parametrize("kind, counts", SHARED_NODES, ids=lambda v: getattr(v, "__name__", ""))
def test_k30_weights_that_share_a_gradient_node_are_exact(
    kind: type[nn.Module], counts: dict[str, int]
) -> None:
    for error, got in gradients(0, 1, 1, kind):
        assert error <= h.SUM_ORDER_BAR and got == counts


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 1])
@pytest.mark.parametrize("kind, counts", SHARED_NODES, ids=lambda v: getattr(v, "__name__", ""))
def test_k30_on_two_ranks(
    ranks2: RankPool, kind: type[nn.Module], counts: dict[str, int], gtp: int
) -> None:
    for steps in ranks2.run(gradients, gtp, kind):
        for error, got in steps:
            assert error <= h.SUM_ORDER_BAR and got == counts


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 1])
def test_k31_one_weight_in_two_terms_has_two_contributions(ranks2: RankPool, gtp: int) -> None:
    for steps in ranks2.run(gradients, gtp, OneWeightTwice):
        for error, got in steps:
            assert error <= h.SUM_ORDER_BAR and got == {"w.weight": 2, "w.bias": 1}


# --- K32, K33 -------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


def first_output(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().mean()


def test_k32_a_loss_on_one_of_two_outputs_leaves_no_bucket_hanging() -> None:
    """Eager: the other weight gets nothing, which is an error by default. Captured: the region
    delivers zeros for it, and reports them."""
    x = h.batch_of(0)
    ddp = h.wrap(TwoOutputs(), bucket_mb=1e-4)
    text = h.error_of(h.step, ddp, ddp, x, loss_fn=first_output)
    assert "two.weight" in text and "two.bias" in text and "one." not in text
    model = TwoOutputs()
    expected = fp64_grads(model, [(x,)], loss_fn=first_output)
    for allow_unused in (False, True):
        ddp = h.wrap(copy.deepcopy(model), bucket_mb=1e-4, allow_unused=allow_unused)
        watch = h.Departures(ddp)
        for call in (gtpgraph.compile(ddp, lowering="eager"), *([ddp] if allow_unused else [])):
            h.step(ddp, call, x, loss_fn=first_output)
            assert sorted(b for b, _, _ in watch.take()) == list(range(len(ddp.buckets)))
            grads = h.full_grads(ddp)
            assert not grads["two.weight"].any() and not grads["two.bias"].any()
            assert max_error({n: grads[n] for n in expected}, expected) <= h.SUM_ORDER_BAR


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_k33_a_partial_backward_in_eager_finalises_what_it_reaches() -> None:
    """``autograd.grad(loss, [w])`` returns no gradient for an owned weight: it is finalised into
    main_grad. In eager code only what lies on the way to `w` is finalised (here: w alone), and the
    end of the step names the others."""
    ddp = h.wrap(ThreeLayers(), bucket_mb=1.0)
    weights = dict(ddp.named_weights())
    ddp.zero_grad_buffer()
    loss = ddp(h.batch_of(0))
    got = torch.autograd.grad(loss, [weights["layers.2.weight"]], allow_unused=True)
    assert got == (None,)
    assert h.counts(ddp.reports) == {"layers.2.weight": 1}
    text = h.error_of(ddp.finish_grad_sync)
    assert "layers.0.weight" in text and "layers.1.weight" in text
    assert "layers.2.weight" not in text


def test_k33_a_partial_backward_of_a_region_finalises_all_its_sites() -> None:
    """Through a captured region the same call runs the whole backward graph: every site of the
    region is finalised and reported, and the step is a complete one."""
    model = ThreeLayers()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    weights = dict(ddp.named_weights())
    ddp.zero_grad_buffer()
    loss = compiled(x)
    got = torch.autograd.grad(loss, [weights["layers.2.weight"]], allow_unused=True)
    assert got == (None,)
    assert h.told(ddp.reports) == h.occurrences(compiled.plan)
    ddp.finish_grad_sync()
    assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


# --- K34 ------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Names of the matrix products, launches and readiness ops that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("mm", "addmm", "grad_ready"):
            self.ran.append("ready" if name == "grad_ready" else "mm")
        return func(*args, **(kwargs or {}))


def run_order(rank: int, world: int, lowering: str) -> list[str]:
    torch.manual_seed(0)
    model = h.MeanSquare(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))))
    ddp = h.wrap(model, world, world)
    compiled = gtpgraph.compile(ddp, lowering=lowering)
    h.step(ddp, compiled, h.batch_of(rank, width=16))
    ddp.zero_grad_buffer()
    loss = compiled(h.batch_of(rank, width=16))
    with Ops() as ops:
        loss.backward()
    ddp.finish_grad_sync()
    return ops.ran


@pytest.mark.dist
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_k34_reports_are_interleaved_with_the_compute(ranks2: RankPool, lowering: str) -> None:
    """Four layers: 4 wgrads and 3 dgrads. A layer's reduction is launched behind both products of
    its backward, and its report comes behind the next layer's launch."""
    for ran in ranks2.run(run_order, lowering, timeout_s=280):
        products = [ran[:i].count("mm") for i, op in enumerate(ran) if op == "ready"]
        assert ran.count("mm") == 7 and products == [4, 6, 7, 7], ran
