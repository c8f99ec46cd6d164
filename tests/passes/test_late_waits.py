"""late_waits_pass: reductions overlap with later ones; units stay whole and in order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from gtpgraph.by_path import module_at
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY, SHARD_REDUCE
from gtpgraph.passes.late_waits import find_units, late_waits_pass
from gtpgraph.passes.lower_collectives import EXCHANGE, REDUCE_SCATTER, WAIT
from gtpgraph.passes.pipeline import rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
SHORT = {ACCUMULATE: "A", SHARD_REDUCE: "A", GRAD_READY: "R", t.MM: "mm"}
LAUNCHES = (REDUCE_SCATTER, EXCHANGE)


def backward(kinds: str, group: str) -> tuple[Any, dict[int, tuple[str, bool]]]:
    """A backward of one weight per letter: g GTP-sharded, o ordinary, s GTP and also read by
    something else; each wgrad is a mm of its own."""
    b = t.Backward()
    x = b.input(4, 4)
    grads, others = {}, []
    for k, kind in enumerate(kinds):
        x = b.call(t.MM, x, x)
        grads[k] = x if kind == "o" else b.reduce(x, group)
        if kind == "s":
            others.append(b.call(t.MUL, grads[k], 2.0))
    b.returns(grads, *others)
    return b, {k: (f"w{k}", kind != "o") for k, kind in enumerate(kinds)}


def order(graph: fx.Graph) -> str:
    """The graph's skeleton, numbered by site or launch, e.g. ``mm RS0 W0 A0 R0``."""
    launches = t.targets(graph, *LAUNCHES)
    sites = {n.args[2]: n.args[1] for n in t.targets(graph, GRAD_READY)}
    words = []
    for node in graph.nodes:
        if node.target in LAUNCHES:
            words.append(f"RS{launches.index(node)}")
        elif node.target is WAIT:
            words.append(f"W{launches.index(node.args[0])}")
        elif node.target in SHORT:
            number = {"A": sites.get(node), "R": node.args[1], "mm": ""}
            words.append(SHORT[node.target] + str(number[SHORT[node.target]]))
    return " ".join(words)


def rewritten(kinds: str, depth: int, wire: torch.dtype | None = None) -> tuple[Any, str]:
    with t.one_rank() as groups:
        b, weights = backward(kinds, groups.group_name("gtp"))
        rewrite_backward(b.gm, b.request(weights, depth=depth, wire_dtype=wire))
        b.gm.graph.lint()
    return b, order(b.graph)


def test_depth_one_waits_behind_the_next_launch() -> None:
    _, got = rewritten("ggg", 1)
    assert got == "mm RS0 mm RS1 W0 A0 R0 mm RS2 W1 A1 R1 W2 A2 R2"


def test_exchanges_over_a_16_bit_wire_are_delayed_alike() -> None:
    b, got = rewritten("gog", 1, torch.bfloat16)
    assert got == "mm RS0 mm mm RS1 W0 A0 R0 A1 R1 W1 A2 R2"
    assert len(t.targets(b.graph, EXCHANGE)) == 2


def test_depth_two() -> None:
    _, got = rewritten("gggg", 2)
    assert got == "mm RS0 mm RS1 mm RS2 W0 A0 R0 mm RS3 W1 A1 R1 W2 A2 R2 W3 A3 R3"


def test_depth_zero_changes_nothing() -> None:
    _, got = rewritten("gg", 0)
    assert got == "mm RS0 W0 A0 R0 mm RS1 W1 A1 R1"


def test_units_without_a_launch_do_not_overtake() -> None:
    """An ordinary weight behind a delayed unit waits with it; before one it stays."""
    _, got = rewritten("ogog", 1)
    assert got == "mm A0 R0 mm RS0 mm mm RS1 W0 A1 R1 A2 R2 W1 A3 R3"


def test_a_contribution_that_something_else_reads_is_not_delayed() -> None:
    b, got = rewritten("sg", 1)
    assert got == "mm RS0 W0 A0 R0 mm RS1 W1 A1 R1"
    assert t.targets(b.graph, t.MUL)


def test_reductions_without_a_unit_do_not_shorten_the_delay() -> None:
    """A reduce-scatter of the model itself is in nobody's flight count."""
    _, got = rewritten("gsg", 1)
    assert got == "mm RS0 mm RS1 W1 mm RS2 W0 A0 R0 A1 R1 W2 A2 R2"


@pytest.mark.parametrize("kinds", ["ggg", "ogog", "gsg", "oo", "g", "gogsgog"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sites_keep_their_order_and_nothing_is_lost(kinds: str, depth: int) -> None:
    b, got = rewritten(kinds, depth)
    _, plain = rewritten(kinds, 0)
    assert sorted(got.split()) == sorted(plain.split())
    for letter in ("A", "R", "RS"):
        words = [w for w in got.split() if w.rstrip("0123456789") == letter]
        assert words == [w for w in plain.split() if w.rstrip("0123456789") == letter]
    for unit in find_units(b.graph).values():
        assert all(a.next is b_ for a, b_ in pairwise(unit)), "a unit was split"


@pytest.mark.parametrize("kinds", ["ggg", "ogog", "gsg", "gogsgog"])
@pytest.mark.parametrize("depth", [1, 2])
def test_idempotent(kinds: str, depth: int) -> None:
    b, got = rewritten(kinds, depth)
    assert not late_waits_pass(b.gm, depth=depth).modified
    assert order(b.graph) == got


@pytest.mark.parametrize("kinds", ["ggg", "gogsgog"])
def test_numbers_do_not_depend_on_depth(kinds: str) -> None:
    x = torch.randn(4, 4) / 2
    results = []
    for depth in (0, 1, 3):
        with t.one_rank() as groups:
            b, weights = backward(kinds, groups.group_name("gtp"))
            rewrite_backward(b.gm, b.request(weights, depth=depth))
            results.append(t.run(b.gm, [x], 16 * len(kinds)))
    value, expected = x, []
    for _ in kinds:
        value = value @ value
        expected.append(value.flatten())
    for ran in results:
        assert torch.equal(ran.flat, torch.cat(expected))
        assert ran.sites == list(range(len(kinds)))


def test_unchanged_when_nothing_matches() -> None:
    b = t.Backward()
    x = b.input(4, 4)
    b.returns({}, b.call(t.MM, x, x))
    before, code = t.text(b.graph), b.gm.code
    assert not late_waits_pass(b.gm, depth=1).modified
    assert (t.text(b.graph), b.gm.code) == (before, code)


def test_a_merged_contribution_has_one_wait() -> None:
    """[n, n]: the wait belongs to the first of two units, the second follows it."""
    with t.one_rank() as groups:
        b = t.Backward()
        x = b.input(4, 4)
        n = b.reduce(b.call(t.MM, x, x), groups.group_name("gtp"))
        y = b.call(t.MM, x, x)
        b.returns({0: b.call(t.ADD, n, n), 1: b.reduce(y, groups.group_name("gtp"))})
        rewrite_backward(b.gm, b.request({0: ("w", True), 1: ("v", True)}, depth=1))
    got = order(b.graph).replace("mm ", "")
    assert got == "RS0 RS1 W0 A0 R0 A1 R1 W1 A2 R2"
