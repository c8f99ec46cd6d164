"""regather_pass: the backward gathers each weight that it reads, and none is saved whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from gtpgraph.by_path import module_at
from gtpgraph.graph.sites import output_leaves
from gtpgraph.passes.lower_collectives import ALL_GATHER
from gtpgraph.passes.regather import find_gathered, regather_pass
from gtpgraph.testing import max_error

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
H = 24  # no activation has H x H elements: 3 rows a batch


class Net(nn.Module):
    """Three square layers, the last tied to the first; the backward reads all of them."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

    def block(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x).relu()).relu())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mode == "autocast"):
            if self.mode == "checkpoint":
                h = checkpoint(self.block, x.sin(), use_reentrant=False)
            else:
                h = self.block(x.sin())
        return h.float().square().mean()


def saved_whole(forward: fx.Graph) -> list[str]:
    """Outputs of a forward graph that are as large as a gathered weight."""
    (output,) = (n for n in forward.nodes if n.op == "output")
    nodes = [n for n in output_leaves(output) if isinstance(n, fx.Node)]
    values = [(n, n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    return [n.name for n, v in values if v.numel() >= H * H]


def gathers(graph: fx.Graph) -> set[str]:
    """Inputs of the graph that are gathered in it."""
    return {str(n.args[0]) for n in t.targets(graph, ALL_GATHER)}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's whole pipeline, but graphs run by FX instead of its last stage."""
    from gtpgraph import compat
    from gtpgraph.graph.lower import run_by_fx

    monkeypatch.setattr(compat, "inductor_inner", lambda gm, inputs, **kw: run_by_fx(gm))
    yield


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("mode", ["plain", "autocast", "checkpoint"])
@pytest.mark.usefixtures("no_kernels")
class TestCompiled:
    def test_gathered_again(self, lowering: str, mode: str) -> None:
        with t.fake_ranks(4) as groups:
            c = t.compiled(Net(mode), torch.randn(3, H), groups=groups, lowering=lowering)
        (forward,), (checked,) = c.forwards, c.checked
        assert saved_whole(forward) == []
        assert len(gathers(checked.graph)) == 2
        reads = [o.weight for o in checked.occurrences]
        assert reads.count("a.weight") == 2 and reads.count("b.weight") == 1

    def test_kept(self, lowering: str, mode: str) -> None:
        """reshard_after_forward=False: saved whole, and gathered in the forward alone. Inside a
        checkpoint the checkpoint's own rule decides: everything is computed again."""
        with t.fake_ranks(4) as groups:
            x = torch.randn(3, H)
            c = t.compiled(
                Net(mode), x, groups=groups, lowering=lowering, reshard_after_forward=False
            )
        (forward,), (checked,) = c.forwards, c.checked
        if mode != "checkpoint":
            assert saved_whole(forward) != []
            assert gathers(checked.graph) == set()
        assert len(checked.occurrences) == 3

    def test_numbers(self, lowering: str, mode: str) -> None:
        """Gathered again or kept, gradients are bitwise equal, and those of plain PyTorch."""
        model, x = Net(mode), torch.randn(3, H)
        plain = copy.deepcopy(model)
        plain(x).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        found = []
        for reshard in (True, False):
            with t.one_rank() as groups:
                c = t.compiled(
                    copy.deepcopy(model), x, groups=groups, lowering=lowering,
                    reshard_after_forward=reshard,
                )  # fmt: skip
                found.append(c.train(x))
        bar = 1e-2 if mode == "autocast" else 1e-6  # two bf16 roundings where CSE merged a cast
        assert max_error(found[0], expected) <= bar
        assert all(torch.equal(found[0][n], found[1][n]) for n in expected)


class DropConnect(nn.Module):
    """Random numbers drawn from a weight alone: drawn again, they would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, nn.functional.dropout(self.a.weight, 0.5)).tanh()
        return self.b(h).square().mean()


def test_random_numbers_are_not_drawn_again() -> None:
    model, x = DropConnect(), torch.randn(3, H)
    plain = copy.deepcopy(model)
    with t.one_rank() as groups:
        c = t.compiled(model, x, groups=groups)
        torch.manual_seed(3)
        grads = c.train(x)
    torch.manual_seed(3)
    plain(x).backward()
    assert torch.equal(grads["a.weight"] == 0, plain.a.weight.grad == 0)
    assert max_error(grads, {n: p.grad for n, p in plain.named_parameters()}) <= 1e-6


class TestFinder:
    def joint(self, groups: tuple[str, str]) -> tuple[Any, list[fx.Node]]:
        """Two gathers; their transpose, cast, sum and product with an activation."""
        b = t.Backward()
        w, v, x = b.input(4, 4), b.input(4, 4), b.input(4, 4)
        one, two = (b.call(t.GATHER, s, 4, g) for s, g in zip((w, v), groups, strict=True))
        turned = b.call(torch.ops.aten.t.default, one)
        cast = b.call(torch.ops.prims.convert_element_type.default, turned, torch.bfloat16)
        both = b.call(t.ADD, two, one)
        mixed = b.call(t.MM, x, both)
        b.returns({}, mixed)
        return b, [one, two, turned, cast, both, mixed]

    def test_the_closure_of_weights_and_not_one_node_more(self) -> None:
        b, nodes = self.joint(("g", "g"))
        assert set(find_gathered(b.graph)) == set(nodes[:-1])

    def test_nothing_over_a_group_of_one(self) -> None:
        b, _ = self.joint(("", ""))
        before = t.text(b.graph)
        assert find_gathered(b.graph) == [] and regather_pass(b.graph) == 0
        assert t.text(b.graph) == before
        assert not any("recompute" in n.meta for n in b.graph.nodes)

    @pytest.mark.parametrize("remote", [0, 1])
    def test_a_sum_of_a_local_and_a_gathered_weight_is_gathered(self, remote: int) -> None:
        b, (one, two, turned, cast, both, _) = self.joint(("g", "") if remote == 0 else ("", "g"))
        expected = {one, turned, cast, both} if remote == 0 else {two, both}
        assert set(find_gathered(b.graph)) == expected

    def test_backward_nodes_are_left_alone(self) -> None:
        b, nodes = self.joint(("g", "g"))
        nodes[2].meta["partitioner_tag"] = "is_backward"
        assert set(find_gathered(b.graph)) == {nodes[0], nodes[1], nodes[4]}

    def test_idempotent_and_numbers_unchanged(self) -> None:
        b, _ = self.joint(("g", "g"))
        before = t.text(b.graph)
        assert regather_pass(b.graph) == regather_pass(b.graph) == 5
        assert t.text(b.graph) == before

    def test_a_checkpoints_own_region_number_is_kept(self) -> None:
        b, nodes = self.joint(("g", "g"))
        nodes[0].meta["ac_graph_id"] = 7
        regather_pass(b.graph)
        assert nodes[0].meta["ac_graph_id"] == 7


def test_one_process_saves_its_own_weights() -> None:
    """Nothing to gather: what is saved is a view of the parameter itself."""
    c = t.compiled(Net(), torch.randn(3, H))
    (forward,) = c.forwards
    by_name = {n.name: n for n in forward.nodes}
    for node in map(by_name.__getitem__, saved_whole(forward)):
        while node.op != "placeholder":
            assert node.target in (torch.ops.aten.t.default, torch.ops.aten.detach.default)
            node = node.args[0]
