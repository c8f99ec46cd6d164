"""thread_tokens_pass: one chain through all accumulates and reports, as the graph stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gtpgraph.by_path import module_at
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY
from gtpgraph.passes.pipeline import rewrite_backward
from gtpgraph.passes.thread_tokens import thread_tokens_pass

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))


def three_sites() -> Any:
    b = t.Backward()
    x = b.input(4, 4)
    grads = {k: b.call(t.MUL, x, float(k + 1)) for k in range(3)}
    b.returns(grads)
    rewrite_backward(b.gm, b.request({k: (f"w{k}", False) for k in grads}))
    return b


def chain(b: Any) -> list[Any]:
    """Nodes along the tokens, from the last back."""
    node, found = t.targets(b.graph, GRAD_READY)[-1], []
    while node is not None:
        found.append(node)
        node = node.args[2] if node.target is GRAD_READY else node.kwargs.get("after")
    return found


def test_one_chain_in_graph_order() -> None:
    b = three_sites()
    ops = t.targets(b.graph, ACCUMULATE, GRAD_READY)
    assert chain(b)[::-1] == ops and len(ops) == 6
    assert "after" not in ops[0].kwargs


def test_idempotent() -> None:
    b = three_sites()
    before = t.text(b.graph)
    assert not thread_tokens_pass(b.gm).modified
    assert t.text(b.graph) == before


def test_follows_a_new_order() -> None:
    """After a unit moved, threading again writes the new order down."""
    b = three_sites()
    accumulates = t.targets(b.graph, ACCUMULATE)
    for node in accumulates:
        node.kwargs = {}
    output, first = b.graph.output_node(), accumulates[0]
    ready = next(iter(first.users))
    output.prepend(first), output.prepend(ready)
    assert thread_tokens_pass(b.gm).counts == {"tokens": 2}
    assert chain(b)[::-1] == t.targets(b.graph, ACCUMULATE, GRAD_READY)
    assert chain(b)[0] is ready


def test_through_an_in_graph_reduction() -> None:
    b = three_sites()
    last = t.targets(b.graph, GRAD_READY)[0]
    flat = last.args[0]
    with b.graph.inserting_after(last):
        reduce = b.graph.call_function(torch.ops.gtpgraph.bucket_reduce.default, (flat, 0, last))
    assert thread_tokens_pass(b.gm).modified
    assert t.targets(b.graph, ACCUMULATE)[1].kwargs["after"] is reduce


def test_unchanged_when_nothing_matches() -> None:
    b = t.Backward()
    x = b.input(4, 4)
    b.returns({}, b.call(t.MUL, x, x))
    before, code = t.text(b.graph), b.gm.code
    assert not thread_tokens_pass(b.gm).modified
    assert (t.text(b.graph), b.gm.code) == (before, code)


def test_numbers_and_order_of_a_run() -> None:
    b = three_sites()
    x = torch.randn(4, 4)
    ran = t.run(b.gm, [x], 48)
    assert ran.sites == [0, 1, 2]
    assert torch.equal(ran.flat.view(3, 4, 4), torch.stack([x, 2 * x, 3 * x]))
