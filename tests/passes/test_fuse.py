"""Fusing what feeds main_grad: matches, near misses, numbers, and the check of what was fused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from gtpgraph.by_path import module_at
from gtpgraph.models import build
from gtpgraph.passes import fuse
from gtpgraph.passes.fuse import check_fusion, find_small, find_writes, match_wgrad_gemm
from gtpgraph.passes.grad_ready import (
    ACCUMULATE,
    ACCUMULATE_MANY,
    GRAD_READY,
    WGRAD_GEMM,
    BucketInputs,
    Place,
)
from gtpgraph.passes.pipeline import fuse_backward, rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
T = torch.ops.aten.t.default
PERMUTE = torch.ops.aten.permute.default
TRANSPOSE = torch.ops.aten.transpose.int
CLONE = torch.ops.aten.clone.default
SUM = torch.ops.aten.sum.dim_IntList
BF16 = torch.bfloat16
NUMEL = 64
KINDS = {ACCUMULATE: "accumulate", WGRAD_GEMM: "gemm", ACCUMULATE_MANY: "many"}


def put(b: Any, *shape: int, dtype: torch.dtype = BF16) -> fx.Node:
    """A further input, behind those that there are."""
    inputs = [n for n in b.graph.nodes if n.op == "placeholder"]
    node: fx.Node = b.input(*shape, dtype=dtype)
    if inputs:
        inputs[-1].append(node)
    return node


def operands(b: Any, dtype: torch.dtype = BF16) -> tuple[fx.Node, fx.Node]:
    """dy [8, 4] and x [8, 6]."""
    return put(b, 8, 4, dtype=dtype), put(b, 8, 6, dtype=dtype)


def wgrad(b: Any, dy: fx.Node, x: fx.Node, flips: int = 0) -> fx.Node:
    """dy^T x [4, 6], or the same behind `flips` transposes."""
    node = b.call(t.MM, b.call(T, x), dy) if flips % 2 else b.call(t.MM, b.call(T, dy), x)
    for _ in range(flips):
        node = b.call(T, node)
    return node


def rewritten(b: Any, names: Mapping[int, str], **request: Any) -> None:
    weights = {k: (name, False) for k, name in names.items()}
    rewrite_backward(b.gm, b.request(weights, numel=NUMEL, **request))


def fused(b: Any) -> list[str]:
    """Fuse; the kinds of accumulate that are left, in order."""
    fuse_backward(b.gm, b.mode, "r0")
    b.gm.graph.lint()
    return kinds(b.gm.graph)


def kinds(graph: fx.Graph) -> list[str]:
    return [KINDS[n.target] for n in t.targets(graph, *KINDS)]


def ready(graph: fx.Graph) -> list[int]:
    return [n.args[1] for n in t.targets(graph, GRAD_READY)]


def random(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def main(ran: SimpleNamespace, k: int, *shape: int) -> Tensor:
    numel = torch.Size(shape).numel()
    flat: Tensor = ran.flat[k * NUMEL : k * NUMEL + numel]
    return flat.view(shape)


# -- the wgrad GEMM --------------------------------------------------------------------------------


@pytest.mark.parametrize("flips", [0, 1, 2, 3])
def test_a_gemm_and_its_accumulate_become_one(flips: int) -> None:
    """Transposes between them, odd or even, are seen through; the mm itself is gone."""
    b = t.Backward()
    dy, x = operands(b)
    b.returns({0: wgrad(b, dy, x, flips)})
    rewritten(b, {0: "w"})
    assert fused(b) == ["gemm"] and t.targets(b.gm.graph, t.MM, T) == []
    (node,) = t.targets(b.gm.graph, WGRAD_GEMM)
    assert (node.args[1], node.args[2]) == (dy, x) and ready(b.gm.graph) == [0]
    values = random((8, 4), (8, 6))
    ran = t.run(b.gm, values, NUMEL)
    exact = values[0].double().t() @ values[1].double()
    assert ran.sites == [0]
    torch.testing.assert_close(main(ran, 0, 4, 6).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swap", [(PERMUTE, [1, 0]), (TRANSPOSE, 0, 1), (TRANSPOSE, -1, -2)])
def test_every_spelling_of_a_transpose(swap: tuple[Any, ...]) -> None:
    b = t.Backward()
    dy, x = operands(b)
    b.returns({0: b.call(t.MM, b.call(swap[0], dy, *swap[1:]), x)})
    rewritten(b, {0: "w"})
    assert fused(b) == ["gemm"]


def near_miss(name: str, b: Any) -> dict[int, fx.Node]:
    """A graph that looks like a match and is none."""
    dy, x = operands(b, torch.float32 if name == "fp32" else BF16)
    if name == "two users":
        node = wgrad(b, dy, x)
        return {0: node, 1: b.call(t.MUL, node, 2.0)}
    if name == "a transpose with two users":
        node = wgrad(b, dy, x, 2)
        return {0: node, 1: b.call(t.MUL, node.args[0], 2.0)}
    if name == "operand not contiguous":
        wide = put(b, 6, 8)
        return {0: b.call(t.MM, b.call(T, dy), b.call(T, wide))}
    if name == "left operand no transpose":
        return {0: b.call(t.MM, put(b, 4, 8), x)}
    if name == "something between":
        return {0: b.call(t.MUL, wgrad(b, dy, x), 2.0)}
    assert name == "fp32"
    return {0: wgrad(b, dy, x)}


@pytest.mark.parametrize(
    "name",
    [
        "two users", "a transpose with two users", "operand not contiguous",
        "left operand no transpose", "something between", "fp32",
    ],
)  # fmt: skip
def test_near_misses_stay_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "SMALL_NUMEL", 0)  # the GEMM alone is looked at
    b = t.Backward()
    grads = near_miss(name, b)
    b.returns(grads)
    rewritten(b, {k: f"w{k}" for k in grads})
    before, code = t.text(b.gm.graph), b.gm.code
    assert fused(b) == ["accumulate"] * len(grads)
    assert t.text(b.gm.graph) == before and b.gm.code == code


def test_a_contribution_that_is_also_returned_is_not_fused() -> None:
    b = t.Backward()
    dy, x = operands(b)
    node = wgrad(b, dy, x)
    b.returns({0: node}, node)
    rewritten(b, {0: "w"})
    assert fused(b) == ["accumulate"]
    values = random((8, 4), (8, 6))
    ran = t.run(b.gm, values, NUMEL)
    assert torch.equal(main(ran, 0, 4, 6), ran.outputs[0].float())


def test_one_node_for_two_weights_is_not_fused() -> None:
    b = t.Backward()
    dy, x = operands(b)
    node = wgrad(b, dy, x)
    b.returns({0: node, 1: node})
    rewritten(b, {0: "w0", 1: "w1"})
    assert "gemm" not in fused(b)


def test_operands_may_have_other_users() -> None:
    """dy and x feed the rest of the backward; one x belongs to two weights."""
    b = t.Backward()
    dy, x = operands(b)
    other = put(b, 8, 4)
    b.returns({0: wgrad(b, dy, x), 1: wgrad(b, other, x)}, b.call(t.MUL, dy, 2.0), x)
    rewritten(b, {0: "w0", 1: "w1"})
    assert fused(b) == ["gemm", "gemm"]
    values = random((8, 4), (8, 6), (8, 4))
    ran = t.run(b.gm, values, 2 * NUMEL)
    assert ran.sites == [0, 1] and torch.equal(ran.outputs[0], values[0] * 2)
    for k, grad in ((0, values[0]), (1, values[2])):
        exact = grad.double().t() @ values[1].double()
        torch.testing.assert_close(main(ran, k, 4, 6).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_weight_used_twice_is_two_gemms_the_second_adds() -> None:
    b = t.Backward()
    dy, x = operands(b)
    more = operands(b)
    total = b.call(t.ADD, b.reduce(wgrad(b, dy, x)), b.reduce(wgrad(b, *more)))
    b.returns({0: total})
    rewrite_backward(b.gm, b.request({0: ("w", True)}, numel=NUMEL))
    assert fused(b) == ["gemm", "gemm"]
    assert [n.args[7] for n in t.targets(b.gm.graph, WGRAD_GEMM)] == [True, False]
    values = random((8, 4), (8, 6), (8, 4), (8, 6))
    ran = t.run(b.gm, values, NUMEL)
    exact = sum(values[k].double().t() @ values[k + 1].double() for k in (0, 2))
    torch.testing.assert_close(main(ran, 0, 4, 6).double(), exact, rtol=1e-5, atol=1e-5)


# -- small accumulates -----------------------------------------------------------------------------


def biases(b: Any, count: int, dtype: torch.dtype = BF16) -> dict[int, fx.Node]:
    """Gradients [4] of `count` biases, a matmul between them and the next."""
    grads, g = {}, put(b, 4, 4, dtype=dtype)
    for k in range(count):
        grads[k] = b.call(SUM, g, [0])
        g = b.call(t.MM, g, g)
    return grads


def biases_by_hand(g: Tensor, count: int) -> list[Tensor]:
    sums = []
    for _ in range(count):
        sums.append(g.sum(0))
        g = g @ g
    return sums


def test_small_accumulates_of_a_bucket_become_one_launch() -> None:
    """At the place of the last; reports follow it, in the order that they had."""
    b = t.Backward()
    b.returns(biases(b, 3))
    rewritten(b, {k: f"b{k}" for k in range(3)})
    assert fused(b) == ["many"] and ready(b.gm.graph) == [0, 1, 2]
    (joint,) = t.targets(b.gm.graph, ACCUMULATE_MANY)
    order = list(b.gm.graph.nodes)
    assert all(order.index(r) > order.index(joint) for r in t.targets(b.gm.graph, GRAD_READY))
    (g,) = random((4, 4))
    ran = t.run(b.gm, [g], 3 * NUMEL)
    assert ran.sites == [0, 1, 2]
    for k, want in enumerate(biases_by_hand(g, 3)):
        assert torch.equal(main(ran, k, 4), want.float())


def test_one_small_accumulate_alone_stays() -> None:
    b = t.Backward()
    b.returns(biases(b, 1))
    rewritten(b, {0: "b0"})
    before = t.text(b.gm.graph)
    assert fused(b) == ["accumulate"] and t.text(b.gm.graph) == before


def test_large_ones_and_strided_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "SMALL_NUMEL", 8)
    b = t.Backward()
    grads = biases(b, 2)
    g = put(b, 4, 4)
    strided = b.call(torch.ops.aten.select.int, put(b, 2, 4), 1, 0)
    b.returns({**grads, 2: b.call(CLONE, g), 3: strided})
    rewritten(b, {k: f"b{k}" for k in range(4)})
    assert sorted(fused(b)) == ["accumulate", "accumulate", "many"]
    (joint,) = t.targets(b.gm.graph, ACCUMULATE_MANY)
    assert sorted(joint.args[3]) == [0, 1]


def test_a_weight_that_contributes_twice_is_not_joined() -> None:
    """Members are all written at once; b1's two contributions stay one after another."""
    b = t.Backward()
    grads = biases(b, 4)
    b.returns({0: grads[0], 1: b.call(t.ADD, b.reduce(grads[1]), b.reduce(grads[2])), 2: grads[3]})
    weights = {0: ("b0", False), 1: ("b1", True), 2: ("b2", False)}
    rewrite_backward(b.gm, b.request(weights, numel=NUMEL))
    assert sorted(fused(b)) == ["accumulate", "accumulate", "many"]
    (g,) = random((4, 4))
    ran = t.run(b.gm, [g], 3 * NUMEL)
    sums = biases_by_hand(g, 4)
    wants = [sums[0].float(), sums[1].float() + sums[2].float(), sums[3].float()]
    for k, want in enumerate(wants):
        assert torch.equal(main(ran, k, 4), want), k


def test_a_store_does_not_move_behind_a_gemm_that_adds_to_the_same_weight() -> None:
    """First a contribution that is no GEMM, then one that is: both stay where they are."""
    b = t.Backward()
    g = put(b, 4, 6)
    early = b.reduce(b.call(t.MUL, g, 2.0))
    dy, x = operands(b)
    late = b.reduce(wgrad(b, dy, x))
    tail = biases(b, 2)
    b.returns({0: b.call(t.ADD, early, late), 1: tail[0], 2: tail[1]})
    weights = {0: ("w", True), 1: ("b1", False), 2: ("b2", False)}
    rewrite_backward(b.gm, b.request(weights, numel=NUMEL))
    assert fused(b) == ["accumulate", "gemm", "many"]
    values = random((4, 6), (8, 4), (8, 6), (4, 4))
    ran = t.run(b.gm, values, 3 * NUMEL)
    exact = values[0].double() * 2 + values[1].double().t() @ values[2].double()
    torch.testing.assert_close(main(ran, 0, 4, 6).double(), exact, rtol=1e-5, atol=1e-5)


def test_buckets_dtypes_and_scales_are_kept_apart() -> None:
    b = t.Backward()
    half, full = biases(b, 4), biases(b, 2, torch.float32)
    grads = {**half, 4: full[0], 5: full[1]}
    b.returns(grads)
    request = b.request({k: (f"b{k}", False) for k in grads}, numel=NUMEL)
    with b.mode:
        inputs = BucketInputs(torch.empty(NUMEL * 6), torch.empty(6))
    places = {k: Place(k % 2 if k < 4 else 0, k, k * NUMEL, 0.5 if k == 5 else 1.0) for k in grads}
    object.__setattr__(request, "places", places)
    object.__setattr__(request, "buckets", {0: inputs, 1: inputs})
    rewrite_backward(b.gm, request)
    assert sorted(fused(b)) == ["accumulate", "accumulate", "many", "many"]
    joint = {str(n.args[0]): list(n.args[3]) for n in t.targets(b.gm.graph, ACCUMULATE_MANY)}
    assert joint == {"main_grad_0": [0, 2], "main_grad_1": [1, 3]}


def test_fusing_twice_is_fusing_once() -> None:
    b = t.Backward()
    dy, x = operands(b)
    b.returns({**biases(b, 2), 2: wgrad(b, dy, x)})
    rewritten(b, {k: f"w{k}" for k in range(3)})
    assert sorted(fused(b)) == ["gemm", "many"]
    before = t.text(b.gm.graph)
    assert sorted(fused(b)) == ["gemm", "many"] and t.text(b.gm.graph) == before


def test_absent_metadata_is_no_obstacle() -> None:
    """Fused nodes carry the source of what they replace, where it is known."""
    b = t.Backward()
    dy, x = operands(b)
    b.returns({0: wgrad(b, dy, x)})
    rewritten(b, {0: "w"})
    for node in b.gm.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    assert fused(b) == ["gemm"]


# -- the check -------------------------------------------------------------------------------------


def broken(change: Any) -> list[str]:
    """What check_fusion says of a good fused graph after `change(graph)`."""
    b = t.Backward()
    dy, x = operands(b)
    grads = biases(b, 3)
    more = operands(b)
    twice = b.call(t.ADD, b.reduce(wgrad(b, dy, x)), b.reduce(wgrad(b, *more)))
    b.returns({**grads, 3: twice})
    weights = {k: (f"b{k}", False) for k in range(3)} | {3: ("w", True)}
    rewrite_backward(b.gm, b.request(weights, numel=NUMEL))
    before = find_writes(b.gm.graph)
    fuse_backward(b.gm, b.mode, "r0")
    assert check_fusion(before, find_writes(b.gm.graph)) == []
    assert kinds(b.gm.graph) == ["many", "gemm", "gemm"]
    change(b.gm.graph)
    return check_fusion(before, find_writes(b.gm.graph))


def many(graph: fx.Graph) -> fx.Node:
    (node,) = t.targets(graph, ACCUMULATE_MANY)
    return node


def drop_member(graph: fx.Graph) -> None:
    node = many(graph)
    columns = (1, 3, 4, 6)  # wgrads, slots, offsets, firsts
    node.args = tuple(list(a)[:-1] if k in columns else a for k, a in enumerate(node.args))


def change_scale(graph: fx.Graph) -> None:
    node = many(graph)
    node.args = (*node.args[:5], 2.0, *node.args[6:])


def change_first(graph: fx.Graph) -> None:
    node = many(graph)
    node.args = (*node.args[:6], [False, *list(node.args[6])[1:]])


def reorder_wgrads(graph: fx.Graph) -> None:
    node = many(graph)
    node.args = (node.args[0], list(node.args[1])[::-1], *node.args[2:])


def swap_operands(graph: fx.Graph) -> None:
    node = t.targets(graph, WGRAD_GEMM)[0]
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


def swap_gemms(graph: fx.Graph) -> None:
    first, second = t.targets(graph, WGRAD_GEMM)
    first.args, second.args = second.args, first.args


def report_elsewhere(graph: fx.Graph) -> None:
    report = t.targets(graph, GRAD_READY)[-1]
    report.args = (*report.args[:2], many(graph))


def report_nowhere(graph: fx.Graph) -> None:
    report = t.targets(graph, GRAD_READY)[0]
    report.args = (*report.args[:2], next(n for n in graph.nodes if n.op == "placeholder"))


def drop_report(graph: fx.Graph) -> None:
    report = t.targets(graph, GRAD_READY)[0]
    report.replace_all_uses_with(report.args[2])
    graph.erase_node(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_member, "contributions lost or changed"),
        (change_scale, "contributions lost or changed"),
        (change_first, "contributions lost or changed"),
        (reorder_wgrads, "contributions lost or changed"),
        (swap_operands, "contributions lost or changed"),
        (swap_gemms, "in another order: the first one stores"),
        (report_elsewhere, "reports behind another weight's accumulate"),
        (report_nowhere, "reports without an accumulate"),
        (drop_report, "some are gone"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_fusion_is_found(change: Any, message: str) -> None:
    assert any(message in line for line in broken(change)), broken(change)


def test_the_pipeline_refuses_a_broken_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    b = t.Backward()
    b.returns(biases(b, 3))
    rewritten(b, {k: f"b{k}" for k in range(3)})
    small = fuse.fuse_small_pass

    def sabotaged(gm: fx.GraphModule, **kw: Any) -> Any:
        result = small(gm, **kw)
        drop_member(gm.graph)
        return result

    monkeypatch.setattr("gtpgraph.passes.pipeline.fuse_small_pass", sabotaged)
    with pytest.raises(RuntimeError, match=r"region r0: fusing changed .*fuse=False"):
        fuse_backward(b.gm, b.mode, "r0")


def test_finders_change_nothing() -> None:
    b = t.Backward()
    dy, x = operands(b)
    b.returns({**biases(b, 2), 2: wgrad(b, dy, x)})
    rewritten(b, {k: f"w{k}" for k in range(3)})
    before = t.text(b.gm.graph)
    matched = [match_wgrad_gemm(n) for n in t.targets(b.gm.graph, ACCUMULATE)]
    assert [m for m in matched if m] == [(dy, x)]
    assert [len(group) for group in find_small(b.gm.graph)] == [3] and find_writes(b.gm.graph)
    assert t.text(b.gm.graph) == before


# -- whole models ----------------------------------------------------------------------------------


def half_precision(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """A bf16 model, its fp64 twin with the same weights, and a batch."""
    torch.manual_seed(0)
    model, make_batch = build(name)
    model = model.to(BF16)
    return model, copy.deepcopy(model).double(), make_batch(0, 0, "cpu")


def errors(grads: Mapping[str, Tensor], exact: nn.Module) -> dict[str, float]:
    return {
        n: float((grads[n].double() - p.grad).norm() / p.grad.norm())
        for n, p in exact.named_parameters()
        if p.grad is not None
    }


def test_numbers_against_fp64_and_unfused() -> None:
    """No worse than unfused plus one rounding; the same reports, in the plan's order."""
    model, exact, batch = half_precision("mtp-tiny")
    exact(*batch).backward()
    found = {}
    for fusing in (False, True):
        c = t.compiled(copy.deepcopy(model), *batch, fuse=fusing)
        for _ in range(2):
            grads = c.train(*batch)
            planned = [(o.weight, o.use) for o in c.step.plan.regions[0].occurrences]
            assert [(r.weight, r.use) for r in c.wrapper.reports] == planned
        found[fusing] = errors(grads, exact), sorted(planned)
        text = c.step.regions[0].texts["after"]
        assert ("wgrad_gemm" in text) == ("accumulate_many" in text) == fusing
    assert found[True][1] == found[False][1], "fusing moves reports, and loses none"
    for weight, error in found[True][0].items():
        assert error <= found[False][0][weight] + 2**-8, weight


class Small(nn.Module):
    """Two Linears, the second used twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.norm(self.a(x))).tanh()
        return self.b(h).square().mean()


@pytest.mark.slow
def test_inductor_runs_the_fused_plan_in_its_order() -> None:
    torch.manual_seed(0)
    model = Small().to(BF16)
    exact, x = copy.deepcopy(model).double(), torch.randn(8, 16).to(BF16)
    exact(x.double()).backward()
    plain = errors(t.compiled(copy.deepcopy(model), x).train(x), exact)
    c = t.compiled(model, x, lowering="inductor", fuse=True)
    assert "wgrad_gemm" in c.step.regions[0].texts["after"]
    for _ in range(2):
        grads = c.train(x)
        planned = [(o.weight, o.use) for o in c.step.plan.regions[0].occurrences]
        assert [(r.weight, r.use) for r in c.wrapper.reports] == planned
    for weight, error in errors(grads, exact).items():
        assert error <= 2 * plain[weight] + 2**-8, weight
