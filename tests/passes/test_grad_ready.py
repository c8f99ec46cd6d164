"""grad_ready_pass in the pipeline: what is inserted, kept and removed; numbers and order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gtpgraph.by_path import module_at
from gtpgraph.graph.sites import Use
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY
from gtpgraph.passes.pipeline import rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
NUMEL = 64


def rewrite(b: Any, weights: Mapping[int, tuple[str, bool]], **request: Any) -> Any:
    inserted, snapshot = rewrite_backward(b.gm, b.request(weights, numel=NUMEL, **request))
    assert snapshot.lost == snapshot.changed == snapshot.misplaced == ()
    b.gm.graph.lint()
    return inserted


def run(b: Any, count: int, *inputs: Tensor) -> Any:
    ran = t.run(b.gm, inputs, NUMEL * count)
    shape = inputs[0].shape
    ran.main = [ran.flat[k * NUMEL : k * NUMEL + shape.numel()].view(shape) for k in range(count)]
    return ran


def test_every_contribution_is_accumulated_then_reported() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    first, second = b.call(t.MM, g, g), b.call(t.MUL, g, g)
    b.returns({0: b.call(t.ADD, b.reduce(first, seq_nr=2), b.reduce(second, seq_nr=1))}, first)
    uses = {0: (Use(1, 1, "m.py:1"), Use(2, 2, "m.py:2"))}
    inserted = rewrite(b, {0: ("w", True)}, uses=uses)
    assert [(s.use, s.uses) for s in inserted.sites] == [(2, 2), (1, 2)]
    assert (inserted.removed, inserted.buckets, inserted.extra) == ((0,), (0,), ())
    order = [n.target for n in b.graph.nodes if n.target in (ACCUMULATE, GRAD_READY)]
    assert order == [ACCUMULATE, GRAD_READY] * 2
    assert [n.args[6] for n in t.targets(b.graph, ACCUMULATE)] == [True, False]
    x = torch.randn(8, 8)
    ran = run(b, 1, x)
    assert ran.sites == [0, 1] and torch.equal(ran.outputs[0], x @ x)
    assert torch.equal(ran.main[0], x @ x + x * x)


def test_a_graph_without_sites_stays_as_it_is() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({5: b.call(t.MUL, g, g)}, g)
    before, code = t.text(b.graph), b.gm.code
    inserted = rewrite(b, {0: ("w", True), 1: ("bias", False)})
    assert t.text(b.graph) == before and b.gm.code == code
    assert inserted == type(inserted)((), (), (), ())


def test_twice_is_once() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({0: b.reduce(b.call(t.MM, g, g)), 1: b.call(t.MUL, g, g)}, g)
    weights = {0: ("w", True), 1: ("v", False)}
    rewrite(b, weights)
    before = t.text(b.graph)
    assert rewrite(b, weights).sites == ()
    assert t.text(b.graph) == before


def test_two_weights_share_one_grad_node() -> None:
    """linear(x, w1 + w2): a tap each on the one node, never a rewiring."""
    b = t.Backward()
    g = b.input(8, 8)
    shared = b.call(t.MM, g, g)
    b.returns({0: shared, 1: shared})
    inserted = rewrite(b, {0: ("w1", False), 1: ("w2", False)})
    assert [s.weight.fqn for s in inserted.sites] == ["w1", "w2"]
    x = torch.randn(8, 8)
    ran = run(b, 2, x)
    assert ran.sites == [0, 1]
    assert torch.equal(ran.main[0], x @ x) and torch.equal(ran.main[1], x @ x)


def test_a_grad_that_feeds_another_computation() -> None:
    """w1 + 2 * w2: the second gradient is computed from the first, which is an output too."""
    b = t.Backward()
    g = b.input(8, 8)
    first = b.reduce(b.call(t.MM, g, g))
    b.returns({0: first, 1: b.call(t.MUL, first, 2.0)}, first)
    rewrite(b, {0: ("w1", True), 1: ("w2", False)})
    x = torch.randn(8, 8)
    ran = run(b, 2, x)
    assert torch.equal(ran.main[0], x @ x) and torch.equal(ran.main[1], 2 * (x @ x))
    assert torch.equal(ran.outputs[0], x @ x)


@pytest.mark.parametrize("gtp", [False, True])
def test_a_bare_tangent_is_the_gradient(gtp: bool) -> None:
    """x + g: the contribution is a placeholder (or its reduce); two weights take the same one."""
    b = t.Backward()
    g, other = b.input(8, 8), b.input(8, 8)
    grad = b.reduce(g) if gtp else g
    b.returns({0: grad, 1: grad, 2: other})
    weights = {0: ("w1", gtp), 1: ("w2", gtp), 2: ("w3", False)}
    inserted = rewrite(b, weights)
    placeholders = [n.op == "placeholder" for n in b.graph.nodes]
    assert placeholders == sorted(placeholders, reverse=True), "inserted before an input"
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    ran = run(b, 3, x, y)
    by_site = [s.weight.fqn for s in inserted.sites]
    assert sorted(by_site) == ["w1", "w2", "w3"] and ran.sites == [0, 1, 2]
    assert all(torch.equal(ran.main[k], v) for k, v in enumerate((x, x, y)))


def test_merged_contributions_are_added_twice() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    n = b.reduce(b.call(t.MM, g, g))
    b.returns({0: b.call(t.ADD, n, n)})
    rewrite(b, {0: ("w", True)})
    x = torch.randn(8, 8)
    ran = run(b, 1, x)
    assert ran.sites == [0, 1] and torch.equal(ran.main[0], 2 * (x @ x))
    assert [n.args[6] for n in t.targets(b.graph, ACCUMULATE)] == [True, False]


def test_one_contribution_in_the_trees_of_two_weights() -> None:
    """Two equal GTP weights of one sum: merging left one reduce for both, twice for one of them."""
    b = t.Backward()
    g = b.input(8, 8)
    n = b.reduce(b.call(t.MM, g, g))
    b.returns({0: b.call(t.ADD, n, n), 1: n})
    inserted = rewrite(b, {0: ("w1", True), 1: ("w2", True)})
    x = torch.randn(8, 8)
    ran = run(b, 2, x)
    assert [s.weight.fqn for s in inserted.sites] == ["w1", "w1", "w2"]
    assert torch.equal(ran.main[0], 2 * (x @ x)) and torch.equal(ran.main[1], x @ x)


def test_hundreds_of_uses() -> None:
    b = t.Backward()
    g = b.input(2, 2)
    leaves = [b.reduce(b.call(t.MUL, g, float(k)), seq_nr=k) for k in range(400)]
    root = leaves[0]
    for leaf in leaves[1:]:
        root = b.call(t.ADD, root, leaf)
    b.returns({0: root})
    uses = {0: tuple(Use(k + 1, k, "") for k in range(400))}
    inserted = rewrite(b, {0: ("w", True)}, uses=uses)
    assert [s.use for s in inserted.sites] == list(range(1, 401))
    ran = run(b, 1, torch.ones(2, 2))
    assert ran.sites == list(range(400))
    assert torch.equal(ran.main[0], torch.full((2, 2), float(sum(range(400)))))


def test_ungraphed_wgrads_leave_unreduced_and_are_not_accumulated() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    wgrad = b.call(t.MM, g, g)
    both = b.call(t.ADD, b.reduce(wgrad), b.reduce(b.call(t.MUL, g, g)))
    b.returns({0: both, 1: b.call(t.MUL, g, 3.0), 2: b.call(t.MUL, g, 5.0)}, g)
    weights = {0: ("expert", True), 1: ("expert.bias", False), 2: ("bias", False)}
    inserted = rewrite(b, weights, ungraphed=(0, 1))
    assert [s.weight.fqn for s in inserted.sites] == ["bias"]
    assert sorted(s.weight.fqn for s in inserted.extra) == ["expert", "expert", "expert.bias"]
    assert inserted.removed == (0, 1, 2)
    assert not t.targets(b.graph, t.REDUCE), "its reduction is the eager chain's"
    x = torch.randn(8, 8)
    ran = run(b, 3, x)
    assert torch.equal(ran.outputs[0], x) and len(ran.outputs) == 4
    left = list(zip((s.weight.fqn for s in inserted.extra), ran.outputs[1:], strict=True))
    for name, value in (("expert", x @ x), ("expert", x * x), ("expert.bias", 3 * x)):
        assert sum(n == name and torch.equal(v, value) for n, v in left) == 1
    assert torch.equal(ran.main[2], 5 * x) and ran.flat[: 2 * NUMEL].isnan().all()


def test_desc_follows_the_outputs() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({0: b.call(t.MUL, g, g), 7: b.call(t.MM, g, g), 3: None, 1: g}, g)
    rewrite(b, {0: ("w", False), 1: ("v", False)}, ungraphed=(1,))
    output = b.graph.output_node()
    positions = [None if d is None else d.grad_of.idx for d in output.meta["desc"]]
    assert positions == [7, 3, None, None] and len(output.args[0]) == 4


@pytest.mark.parametrize("missing", ["stack_trace", "seq_nr", "nn_module_stack"])
def test_missing_metadata_costs_no_site(missing: str) -> None:
    b = t.Backward()
    g = b.input(8, 8)
    meta = {"stack_trace": 'File "/m.py", line 3, in f\n', "seq_nr": 4, "nn_module_stack": {}}
    del meta[missing]
    b.returns({0: b.reduce(b.call(t.MM, g, g), **meta)})
    inserted = rewrite(b, {0: ("w", True)}, uses={0: (Use(1, 4, "m.py:3"),)})
    assert [(s.use, s.source) for s in inserted.sites] == [(1, "m.py:3")]
    (accumulate,) = t.targets(b.graph, ACCUMULATE)
    assert accumulate.meta["stack_trace"] == meta.get("stack_trace")


def test_without_desc_nothing_is_a_gradient() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({0: b.call(t.MM, g, g)})
    del b.graph.output_node().meta["desc"]
    before = t.text(b.graph)
    assert rewrite(b, {0: ("w", False)}).sites == ()
    assert t.text(b.graph) == before


def test_inserted_ops_survive_dead_code_elimination() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({0: b.reduce(b.call(t.MM, g, g))})
    rewrite(b, {0: ("w", True)})
    assert b.graph.output_node().args == ((),)
    b.graph.eliminate_dead_code()
    b.gm.recompile()
    assert len(t.targets(b.graph, ACCUMULATE, GRAD_READY)) == 2
    x = torch.randn(8, 8)
    assert torch.equal(run(b, 1, x).main[0], x @ x)


def test_every_inserted_node_has_a_fake_value() -> None:
    b = t.Backward()
    g = b.input(8, 8)
    b.returns({0: b.reduce(b.call(t.MM, g, g))})
    rewrite(b, {0: ("w", True)})
    assert all("val" in n.meta for n in b.graph.nodes if n.op != "output")
    (ready,) = t.targets(b.graph, GRAD_READY)
    assert ready.meta["val"].dtype == torch.uint8 and tuple(ready.meta["val"].shape) == (1,)
