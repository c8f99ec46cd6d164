"""Snapshot: a graph compared with its own past."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from gtpgraph.by_path import module_at
from gtpgraph.passes.snapshot import Snapshot

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))


def graph() -> Any:
    """Output 0: the gradient of input 4, a mm; output 1: the sum of it and a mul."""
    b = t.Backward()
    x = b.input(4, 4)
    mm = b.call(t.MM, x, x)
    b.returns({4: mm}, b.call(t.ADD, mm, b.call(t.MUL, x, 2.0)), x)
    return b


def drop_first(g: fx.Graph) -> None:
    output = g.output_node()
    output.args, output.meta["desc"] = (output.args[0][1:],), output.meta["desc"][1:]


def test_records_names_and_gradients() -> None:
    snapshot = Snapshot.of(graph().graph)
    assert snapshot.grads == {0: 4} and len(snapshot.outputs) == 3
    target, inputs, _ = snapshot.nodes[str(snapshot.outputs[0])]
    assert target == "aten.mm.default" and len(inputs) == 1  # both arguments are the one input


def test_an_output_may_go_and_nodes_may_come() -> None:
    b = graph()
    before = Snapshot.of(b.graph)
    drop_first(b.graph)
    with b.graph.inserting_before(b.graph.output_node()):
        b.graph.call_function(t.MUL, (b.graph.output_node().args[0][0], 3.0))
    judged = before.against(Snapshot.of(b.graph), [0])
    assert (judged.lost, judged.changed, judged.misplaced, judged.removed) == ((), (), (), (0,))


def lose(b: Any) -> None:
    add, _ = b.graph.output_node().args[0]
    (mm,) = t.targets(b.graph, t.MM)
    add.replace_input_with(mm, mm.args[0])
    b.graph.erase_node(mm)


def rename(b: Any) -> None:
    (mul,) = t.targets(b.graph, t.MUL)
    mul.args = (mul.args[0], 5.0)


def rewire(b: Any) -> None:
    add, x = b.graph.output_node().args[0]
    add.args = (x, add.args[1])


def swap(b: Any) -> None:
    output = b.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)
    output.meta["desc"].reverse()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lose, {"lost": 1, "changed": 1}),
        (rename, {"changed": 1}),
        (rewire, {"changed": 1}),
        (swap, {"misplaced": 2}),
    ],
)
def test_what_a_rewrite_must_not_do(change: Callable[[Any], None], fields: dict[str, int]) -> None:
    b = graph()
    before = Snapshot.of(b.graph)
    drop_first(b.graph)
    change(b)
    judged = before.against(Snapshot.of(b.graph), [0])
    counts = {f: len(getattr(judged, f)) for f in ("lost", "changed", "misplaced")}
    assert {f: n for f, n in counts.items() if n} == fields


def test_a_node_that_only_a_removed_output_needed_may_go() -> None:
    b = t.Backward()
    x = b.input(4, 4)
    b.returns({0: b.call(t.MM, x, x)}, b.call(t.MUL, x, x))
    before = Snapshot.of(b.graph)
    drop_first(b.graph)
    b.graph.eliminate_dead_code()
    assert before.against(Snapshot.of(b.graph), [0]).lost == ()
    assert before.against(Snapshot.of(b.graph), []).lost != ()
