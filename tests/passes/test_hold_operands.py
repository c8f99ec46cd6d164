"""Operands of accumulates last: what is held, where, and how long."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from gtpgraph.by_path import module_at
from gtpgraph.passes.fuse import find_writes
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY, HOLD, WGRAD_GEMM
from gtpgraph.passes.hold_operands import BRANCHING, TO_THE_END, hold_operands_pass, operands
from gtpgraph.passes.pipeline import fuse_backward, rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
T = torch.ops.aten.t.default
NUMEL = 64


def graph_of(count: int, *, fused: bool = False) -> Any:
    """A backward with `count` wgrads dy^T x, each of a weight of its own."""
    b = t.Backward()
    inputs = [b.input(8, 4, dtype=torch.bfloat16) for _ in range(2 * count)]
    grads = [
        b.call(t.MM, b.call(T, dy), x) for dy, x in zip(inputs[:count], inputs[count:], strict=True)
    ]
    b.returns(dict(enumerate(grads)))
    weights = {k: (f"w{k}", False) for k in range(count)}
    rewrite_backward(b.gm, b.request(weights, numel=NUMEL))
    if fused:
        fuse_backward(b.gm, b.mode, "r0")
    return b


def accumulates(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in BRANCHING]


def holds(graph: fx.Graph) -> list[fx.Node]:
    return t.targets(graph, HOLD)


def held_until(graph: fx.Graph) -> list[int | None]:
    """For each accumulate, how many others are launched before its operands are given up (None:
    they last to the end)."""
    order = {n: k for k, n in enumerate(graph.nodes)}
    nodes = accumulates(graph)
    found: list[int | None] = []
    for k, node in enumerate(nodes):
        (hold,) = [h for h in holds(graph) if set(operands(node)) <= set(h.args[1])]
        launched = sum(order[n] < order[hold] for n in nodes)
        assert launched > k, "held before it is launched"
        behind = hold.args[2]
        assert behind == TO_THE_END or launched - behind > k, "given up before it is waited for"
        found.append(None if behind == TO_THE_END else launched - k - 1)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_operands_last_for_the_window_and_at_most_twice_that(window: int, fused: bool) -> None:
    b = graph_of(9, fused=fused)
    assert {n.target for n in accumulates(b.gm.graph)} == {WGRAD_GEMM if fused else ACCUMULATE}
    result = hold_operands_pass(b.gm, window=window, fake_mode=b.mode)
    b.gm.graph.lint()
    assert result.modified and result.counts == {"held": 9}
    until = held_until(b.gm.graph)
    given_up = [k for k in until if k is not None]
    assert until == given_up + [None] * (len(until) - len(given_up))
    assert all(window <= k < 2 * window for k in given_up)
    assert len(until) - len(given_up) <= 2 * window


@pytest.mark.parametrize("fused", [False, True])
def test_order_reports_and_contributions_stay(fused: bool) -> None:
    b = graph_of(5, fused=fused)
    before = find_writes(b.gm.graph)
    sites = [n.args[1] for n in t.targets(b.gm.graph, GRAD_READY)]
    hold_operands_pass(b.gm, window=1, fake_mode=b.mode)
    after = find_writes(b.gm.graph)
    assert [w.place for w in after.added] == [w.place for w in before.added]
    assert (after.reported, after.orphans) == (before.reported, before.orphans)
    assert [n.args[1] for n in t.targets(b.gm.graph, GRAD_READY)] == sites
    chain = [n for n in b.gm.graph.nodes if n.target in (*BRANCHING, GRAD_READY, HOLD)]
    for previous, node in pairwise(chain):
        token = node.kwargs["after"] if node.target in BRANCHING else node.args[-1]
        assert token is previous


def test_twice_is_once() -> None:
    b = graph_of(5)
    hold_operands_pass(b.gm, window=2, fake_mode=b.mode)
    once = str(b.gm.graph)
    assert not hold_operands_pass(b.gm, window=2, fake_mode=b.mode).modified
    assert str(b.gm.graph) == once


def test_a_graph_without_accumulates_stays_as_it_is() -> None:
    b = t.Backward()
    b.returns({}, b.call(T, b.input(8, 4)))
    before = str(b.gm.graph)
    assert not hold_operands_pass(b.gm, window=2, fake_mode=b.mode).modified
    assert str(b.gm.graph) == before


def test_fewer_than_two_windows_last_to_the_end() -> None:
    b = graph_of(3)
    hold_operands_pass(b.gm, window=4, fake_mode=b.mode)
    assert held_until(b.gm.graph) == [None] * 3
    (hold,) = holds(b.gm.graph)
    assert list(b.gm.graph.nodes)[-2] is hold
