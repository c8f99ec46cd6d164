"""Let what accumulates read last until they have run, in graphs whose compiler plans memory.

In: a backward whose accumulates a captured graph may run on a branch (``kernels.beside``). Out: the
same graph with a ``hold`` of the operands of every `window` accumulates, `window` accumulates
later, and of the last ones at the end::

    acc 1, acc 2, acc 3, acc 4, hold(operands of 1 and 2; all but 2 have run), acc 5, acc 6, ...

Without it a compiler would write over the operands as soon as the accumulate has been launched, in
place or for another tensor of that size, and no reference to a tensor tells it not to.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gtpgraph.passes.edit import PassResult, call, finish
from gtpgraph.passes.grad_ready import (
    ACCUMULATE,
    ACCUMULATE_MANY,
    GRAD_READY,
    HOLD,
    SCATTER_ACCUMULATE,
    SHARD_REDUCE,
    WGRAD_GEMM,
)
from gtpgraph.passes.thread_tokens import thread_tokens_pass, unthread_tokens

BRANCHING = (ACCUMULATE, ACCUMULATE_MANY, SCATTER_ACCUMULATE, SHARD_REDUCE, WGRAD_GEMM)
TO_THE_END = 1 << 30  # more accumulates than any graph has: the main line does not wait


def operands(node: fx.Node) -> list[fx.Node]:
    """What an accumulate reads besides main_grad, betas and tokens."""
    flat, beta, after = node.args[0], _beta(node), node.kwargs.get("after")
    return [n for n in node.all_input_nodes if n not in (flat, beta, after)]


def _beta(node: fx.Node) -> object:
    return node.args[3 if node.target in (SCATTER_ACCUMULATE, WGRAD_GEMM) else 2]


def hold_operands_pass(gm: fx.GraphModule, *, window: int, fake_mode: Any) -> PassResult:
    """Insert the holds and thread the tokens again. Idempotent.

    Args:
        window: how many accumulates may be launched behind one before the main line waits for it;
            operands last for up to twice as many.
    """
    graph = gm.graph
    nodes = [n for n in graph.nodes if n.target in BRANCHING]
    if not nodes or any(n.target is HOLD for n in graph.nodes):
        return finish(gm, {"held": 0})
    unthread_tokens(graph)
    groups = [nodes[i : i + window] for i in range(0, len(nodes), window)]
    end = next(n for n in reversed(graph.nodes) if n.op == "output")
    for k, group in enumerate(groups):
        full = k + 2 < len(groups)
        place = groups[k + 2][0] if full else end
        _insert(gm, fake_mode, group, place, window if full else TO_THE_END)
    thread_tokens_pass(gm)
    return finish(gm, {"held": len(nodes)})


def _insert(
    gm: fx.GraphModule, fake_mode: Any, group: list[fx.Node], place: fx.Node, behind: int
) -> None:
    held = list(dict.fromkeys(n for node in group for n in operands(node)))
    chain = (*BRANCHING, GRAD_READY, HOLD)
    before = next(n for n in _backwards(place) if n.target in chain)
    with gm.graph.inserting_before(place):
        call(gm.graph, fake_mode, HOLD, group[0].args[0], held, behind, before)


def _backwards(node: fx.Node) -> Any:
    while True:
        node = node.prev
        yield node
