"""coalesce_pass: one sum, one reduction and one report for a weight of several uses."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.graph.sites import find_sites
from gtpgraph.graph.verify import violations
from gtpgraph.passes.coalesce import coalesce_pass, find_coalescible
from gtpgraph.passes.lower_collectives import REDUCE_SCATTER
from gtpgraph.testing import RankPool, fp64_grads, max_error

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
h = module_at("gtpgraph_case_helpers", str(Path(__file__).parents[1] / "cases" / "helpers.py"))


class Tied(nn.Module):
    """`head` is used three times, one of them through its alias; `norm` twice, `once` once."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tail, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.tail.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.head(self.norm(self.once(x))))
        return self.tail(torch.tanh(self.head(self.norm(x)))).square().mean()


class SameTwice(nn.Module):
    """x @ W.T + b + x @ W.T: two equal contributions, which may be one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8, bias=False)
        self.b = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w(x) + self.b + self.w(x)).square().mean()


class TestPass:
    def rewritten(self, model: nn.Module) -> Any:
        return t.compiled(model, h.batch_of(0), coalesce=True)

    @pytest.mark.parametrize("kind, uses", [(Tied, 3), (SameTwice, 2)])
    def test_one_occurrence_for_all_uses(self, kind: type[nn.Module], uses: int) -> None:
        model = kind()
        plain = copy.deepcopy(model)
        got = t.compiled(model, h.batch_of(0), coalesce=True)
        plan = got.step.plan
        shared = [o for o in plan.regions[0].occurrences if o.uses > 1]
        assert [(o.use, o.uses, o.extra) for o in shared] == [(1, uses, {"coalesced": uses})]
        assert plan.ready_counts[shared[0].weight] == 1
        assert gtpgraph.HookPlan.from_json(plan.to_json()) == plan
        grads = got.train(h.batch_of(0))
        assert max_error(grads, fp64_grads(plain, [(h.batch_of(0),)])) <= h.SUM_ORDER_BAR
        assert h.told(got.wrapper.reports) == h.occurrences(plan)

    def test_without_a_second_use_the_graph_is_unchanged(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        graphs = []
        for coalesce in (False, True):
            got = t.compiled(h.MeanSquare(copy.deepcopy(model)), h.batch_of(0), coalesce=coalesce)
            graphs.append(got.step.regions[0].texts["after"])
        assert graphs[0] == graphs[1]

    def test_idempotent_and_ordinary_sites_stay(self) -> None:
        with t.one_rank() as groups:
            b = t.Backward()
            x = b.input(4, 4)
            name = groups.group_name("gtp")
            one, two = (b.reduce(b.call(t.MM, x, x), name) for _ in range(2))
            b.returns({0: b.call(t.ADD, one, two), 1: b.call(t.MM, x, x)})
            weights = {0: ("w", True), 1: ("norm", False)}
            request = b.request(weights)
            sites = find_sites(b.graph, request.weights, request.uses)
            kw = {"wire_dtype": torch.float32, "fake_mode": request.fake_mode}
            result, merged = coalesce_pass(b.gm, sites=sites, **kw)
            assert result.counts == {"coalesced": 2, "reduces": 1}
            assert [s.weight.fqn for s in merged] == ["w", "norm"]
            again, same = coalesce_pass(b.gm, sites=merged, **kw)
            assert not again.modified and same == merged and not find_coalescible(merged)

    def test_bf16_contributions_are_summed_in_the_wires_dtype(self) -> None:
        with t.one_rank() as groups:
            got = t.compiled(
                Tied().bfloat16(), h.batch_of(0).bfloat16(), groups=groups, coalesce=True
            )
        launches = t.targets(got.checked[0].graph, REDUCE_SCATTER)
        adds = [n for n in got.checked[0].graph.nodes if n.target is t.ADD and is_sum(n)]
        assert len(launches) == 2 and len(adds) == 2
        assert {n.meta["val"].dtype for n in adds} == {torch.float32}


def is_sum(node: Any) -> bool:
    """Whether a node is one of the sums of the tied weight's wgrads."""
    return tuple(node.meta["val"].shape) == (8, 8)


class TestVerify:
    """Broken on purpose: exactly V01 says so."""

    def broken(self) -> tuple[Any, Any]:
        got = t.compiled(Tied(), h.batch_of(0), coalesce=True)
        checked = t.copied(got.checked[0])
        assert violations(checked) == []
        adds = [n for n in checked.graph.nodes if n.target is t.ADD and is_sum(n)]
        return checked, adds[-1]

    def test_a_contribution_left_out_of_the_sum(self) -> None:
        checked, add = self.broken()
        add.replace_all_uses_with(add.args[1])
        found = violations(checked)
        assert len(found) == 1 and found[0].startswith("V01: head.weight: expected the wgrads")

    def test_a_contribution_summed_twice(self) -> None:
        checked, add = self.broken()
        add.args = (add.args[0], add.args[0])
        assert [f[:4] for f in violations(checked)] == ["V01:"]

    def test_a_graph_that_was_not_coalesced(self) -> None:
        got = t.compiled(Tied(), h.batch_of(0))
        found = violations(replace(t.copied(got.checked[0]), coalesced=True))
        assert {f[:4] for f in found} == {"V01:", "V05:"}


def run_coalesced(rank: int, world: int, gtp: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    batches = [h.batch_of(r) for r in range(world)]
    expected = fp64_grads(model, [(b,) for b in batches])
    ddp = h.wrap(model, world, gtp)
    h.step(ddp, ddp, batches[rank])  # learns three reports a step: uses, not occurrences
    compiled = gtpgraph.compile(ddp, lowering="eager", coalesce=True)
    for _ in range(2):
        h.step(ddp, compiled, batches[rank])
    graph = compiled.regions[0].texts
    name = "reduce_scatter_tensor.default]"
    return {
        "error": max_error(h.full_grads(ddp), expected),
        "counts": h.counts(ddp.reports),
        "reduces": graph["after"].count(name),
    }


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 1])
def test_on_two_ranks_one_reduction_a_weight(ranks2: RankPool, gtp: int) -> None:
    for got in ranks2.run(run_coalesced, gtp):
        assert got["error"] <= h.SUM_ORDER_BAR
        assert got["counts"]["head.weight"] == got["counts"]["once.weight"] == 1
        assert got["reduces"] == (2 if gtp == 2 else 0)
