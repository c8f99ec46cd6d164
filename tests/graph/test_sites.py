"""Finders: uses of a joint graph, contributions and sites of a backward graph."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from gtpgraph.by_path import module_at
from gtpgraph.graph.sites import (
    GraphWeight,
    Use,
    contributions,
    find_sites,
    find_uses,
    grad_outputs,
    is_reduce,
    source_of,
    wgrad_names,
)

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parent / "graph_tools.py"))
W = GraphWeight(0, "w", True)


def sites(b, weights, uses=None):
    return find_sites(b.graph, weights, uses or {})


class TestContributions:
    def test_right_to_left_through_casts(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        r = [b.reduce(b.call(t.MUL, g, g)) for _ in range(3)]
        cast = b.call(torch.ops.prims.convert_element_type.default, r[1], torch.float32)
        root = b.call(t.ADD, b.call(t.ADD, r[0], cast), r[2])
        assert contributions(root, is_reduce) == [r[2], r[1], r[0]]

    def test_equal_leaves_are_kept_twice(self) -> None:
        b = t.Backward()
        n = b.reduce(b.input(4, 4))
        assert contributions(b.call(t.ADD, n, n), is_reduce) == [n, n]

    def test_four_hundred_uses_do_not_recurse(self) -> None:
        b = t.Backward()
        n = root = b.reduce(b.input(2, 2))
        for _ in range(5000):
            root = b.graph.call_function(t.ADD, (root, n))
        assert len(contributions(root, is_reduce)) == 5001

    @pytest.mark.parametrize("kind", ["alpha", "scalar", "mul"])
    def test_what_is_no_plain_sum_is_a_leaf(self, kind: str) -> None:
        b = t.Backward()
        n = b.reduce(b.input(4, 4))
        if kind == "alpha":
            node = b.graph.call_function(t.ADD, (n, n), {"alpha": 2})
        else:
            node = b.graph.call_function(
                *((t.ADD, (n, 1.0)) if kind == "scalar" else (t.MUL, (n, n)))
            )
        assert contributions(node, is_reduce) == [node]


class TestFindSites:
    def test_in_order_of_computation_with_uses_by_seq_nr(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        late = b.reduce(b.call(t.MM, g, g), seq_nr=20)
        early = b.reduce(b.call(t.MUL, g, g), seq_nr=10)
        b.returns({0: b.call(t.ADD, late, early)})
        uses = {0: (Use(1, 10, "m.py:1"), Use(2, 20, "m.py:2"))}
        found = sites(b, {0: W}, uses)
        assert [(s.contribution, s.use, s.uses, s.source) for s in found] == [
            (late, 2, 2, "m.py:2"),
            (early, 1, 2, "m.py:1"),
        ]
        assert all(s.outputs == (0,) for s in found)

    def test_missing_seq_nr_counts_from_the_last_use_back(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        first, second = b.reduce(b.call(t.MM, g, g)), b.reduce(b.call(t.MUL, g, g))
        b.returns({0: b.call(t.ADD, first, second)})
        found = sites(b, {0: W}, {0: (Use(1, None, "a"), Use(2, None, "b"))})
        assert {s.use for s in found} == {1, 2} and all(s.uses == 2 for s in found)

    def test_missing_uses_are_numbered_all_the_same(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        b.returns({0: b.call(t.ADD, b.reduce(g), b.reduce(b.call(t.MUL, g, g)))})
        assert sorted(s.use for s in sites(b, {0: W})) == [1, 2]

    def test_merged_contributions_stay_two_sites(self) -> None:
        b = t.Backward()
        n = b.reduce(b.input(4, 4), seq_nr=5)
        b.returns({0: b.call(t.ADD, n, n)})
        found = sites(b, {0: W}, {0: (Use(1, 5, ""), Use(2, 6, ""))})
        assert [(s.contribution, s.use) for s in found] == [(n, 2), (n, 1)]

    def test_two_weights_share_one_node(self) -> None:
        b = t.Backward()
        n = b.reduce(b.input(4, 4))
        b.returns({0: n, 1: n})
        found = sites(b, {0: W, 1: GraphWeight(1, "v", True)})
        assert [(s.weight.fqn, s.contribution) for s in found] == [("w", n), ("v", n)]

    def test_ordinary_weight_is_one_site_whatever_its_tree(self) -> None:
        b = t.Backward()
        g = b.input(4)
        total = b.call(t.ADD, b.call(t.MUL, g, g), g)
        b.returns({0: total})
        (site,) = sites(b, {0: GraphWeight(0, "bias", False)})
        assert (site.contribution, site.use, site.uses) == (total, 1, 1)

    def test_none_no_desc_and_other_inputs_have_no_site(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        b.returns({0: None, 3: g}, g)
        assert sites(b, {0: W}) == []
        del b.graph.output_node().meta["desc"]
        assert sites(b, {0: W, 3: GraphWeight(3, "x", True)}) == []

    def test_shard_differentiated_itself_is_refused_by_name(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        b.returns({0: b.call(t.ADD, b.reduce(g), g), 1: b.call(t.MUL, g, g)})
        weights = {0: W, 1: GraphWeight(1, "other.weight", True)}
        with pytest.raises(NotImplementedError, match=r"(?s)w: .*other\.weight: "):
            sites(b, weights)

    def test_names_of_unreduced_wgrads(self) -> None:
        b = t.Backward()
        g = b.input(4, 4)
        mm = b.call(t.MM, g, g)
        b.returns({0: b.call(t.ADD, b.reduce(mm), b.reduce(g)), 1: mm, 2: None})
        weights = {0: W, 1: GraphWeight(1, "bias", False), 2: GraphWeight(2, "idle", True)}
        assert wgrad_names(b.graph, weights) == {0: (g.name, mm.name), 1: (mm.name,)}


class TestFindUses:
    def joint(self, answered: tuple[int, ...], gathers: tuple[int | None, ...]) -> fx.Graph:
        b = t.Backward()
        w = b.input(4, 4)
        for seq_nr in gathers:
            b.call(t.GATHER, w, 4, "", **({} if seq_nr is None else {"seq_nr": seq_nr}))
        for seq_nr in answered:
            b.reduce(w, seq_nr=seq_nr)
        b.returns({0: w})
        return b.graph

    def test_only_answered_gathers_count(self) -> None:
        uses = find_uses(self.joint((3, 1), (1, 2, 3)), {0: W})
        assert [(u.number, u.seq_nr) for u in uses[0]] == [(1, 1), (2, 3)]

    def test_without_metadata_every_gather_is_a_candidate(self) -> None:
        assert len(find_uses(self.joint((), (None, None)), {0: W})[0]) == 2

    def test_ordinary_and_unknown_inputs_have_none(self) -> None:
        graph = self.joint((1,), (1,))
        assert find_uses(graph, {0: GraphWeight(0, "norm", False)}) == {}
        assert find_uses(graph, {5: W}) == {}


class Nets:
    """Small models by name; x [3, 4] -> scalar."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean()

    class Loop(Base):
        def net(self, x: Tensor) -> Tensor:
            for _ in range(400):
                x = self.a(x)
            return self.b(x)

    class Peek(Base):
        """Reads under no_grad before, between and after the uses that count."""

        def net(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.a(x)
            x = self.a(x + shift)
            with torch.no_grad():
                shift = self.a.weight.sum() + self.b(x)
            return self.b(self.a(x + shift)) + self.a.weight.detach().mean()

    class Twice(Base):
        def net(self, x: Tensor) -> Tensor:
            return self.a(self.b(x)) + self.a(self.b(x))

    class Constant(Base):
        """A constant tensor becomes an input of the graph, before or behind the weights."""

        def net(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]))

    class Functional(Base):
        """One weight through two arguments: captured once, or twice and merged."""

        def net(self, x: Tensor) -> Tensor:
            return both(x, self.a.weight, self.a.weight) + self.b(x)

    class Idle(Base):
        def net(self, x: Tensor) -> Tensor:
            self.b(x)
            return self.a(x)


def both(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return (x @ u) @ v


@pytest.mark.parametrize("ranks", ["one process", "a group"])
@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("Peek", {"a.weight": 2, "b.weight": 1}),
        ("Twice", {"a.weight": 2, "b.weight": 2}),
        ("Constant", {"a.weight": 1, "b.weight": 1}),
        ("Functional", {"a.weight": 2, "b.weight": 1}),
        ("Idle", {"a.weight": 1}),
    ],
)
def test_uses_of_small_models(name: str, uses: dict[str, int], ranks: str) -> None:
    """Every use is one site, numbered 1..n; gradients are those of plain PyTorch."""
    model, x = getattr(Nets, name)(), torch.randn(3, 4)
    if name == "Idle":
        model.b.requires_grad_(False)
    plain = copy.deepcopy(model).double()
    plain(x.double()).backward()
    with t.one_rank() if ranks == "a group" else nullcontext() as groups:
        c = t.compiled(model, x, groups=groups)
        grads = c.train(x)
        occurrences = c.step.plan.regions[0].occurrences
    found: dict[str, list[int]] = {}
    for o in occurrences:
        found.setdefault(o.weight, []).append(o.use)
        assert o.uses == uses[o.weight]
    assert {w: sorted(n) for w, n in found.items()} == {
        w: list(range(1, n + 1)) for w, n in uses.items()
    }
    here = Path(__file__).name
    assert all(here in o.source or "torch" not in o.source for o in occurrences)
    for weight in uses:
        reference = dict(plain.named_parameters())[weight].grad
        assert (grads[weight] - reference).abs().max() <= 1e-6 * reference.abs().max()


@pytest.mark.slow
def test_a_loop_of_four_hundred_uses() -> None:
    model, x = Nets.Loop(), torch.randn(3, 4)
    with torch.no_grad():
        model.a.weight.copy_(torch.linalg.qr(model.a.weight).Q)
    c = t.compiled(model, x)
    numbers = [o.use for o in c.step.plan.regions[0].occurrences if o.weight == "a.weight"]
    assert numbers == list(range(400, 0, -1))


def test_sources_name_the_line_of_the_use() -> None:
    c = t.compiled(Nets.Peek(), torch.randn(3, 4))
    lines = Path(__file__).read_text().splitlines()
    for o in c.step.plan.regions[0].occurrences:
        line = lines[int(o.source.rpartition(":")[2]) - 1]
        assert f"self.{o.weight[0]}(" in line, (o.weight, o.use, line)
        assert not line.strip().startswith("shift"), "the read under no_grad is not the use"


def test_source_of_a_node_without_a_trace_is_empty() -> None:
    node = t.Backward().input(2)
    assert source_of(node) == ""
    node.meta["stack_trace"] = 'File "/x/model.py", line 7, in forward\n    y = f(x)\n'
    assert source_of(node) == "/x/model.py:7"


def test_every_gradient_of_a_real_backward_is_listed_once() -> None:
    c = t.compiled(Nets.Twice(), torch.randn(3, 4))
    (joint,) = c.joints
    positions = [source for _, source, _ in grad_outputs(joint)]
    assert len(positions) == len(set(positions)) == 2
