"""Pin the order of accumulates and reports with a chain of tokens, as the graph now stands.

In: a backward after scheduling. Out: each accumulate takes the token of the readiness op before it.
Buckets share no data, so without this a scheduler may report bucket 2 before bucket 1 on one rank
and after it on another.
"""

from __future__ import annotations

from torch import fx

from gtpgraph.passes.edit import PassResult, finish
from gtpgraph.passes.grad_ready import ACCUMULATES, BUCKET_REDUCE, FUSED, GRAD_READY, HOLD


def unthread_tokens(graph: fx.Graph) -> None:
    """Take the chain out, for passes that move readiness ops; to be threaded again behind them."""
    for node in graph.nodes:
        if node.target in (*ACCUMULATES, *FUSED) and "after" in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "after"}


def thread_tokens_pass(gm: fx.GraphModule) -> PassResult:
    """Thread the chain; returns how many links were set. Idempotent."""
    previous: fx.Node | None = None
    links = 0
    for node in gm.graph.nodes:
        if node.target in (*ACCUMULATES, *FUSED):
            if previous is not None and node.kwargs.get("after") is not previous:
                node.kwargs = {**node.kwargs, "after": previous}
                links += 1
        if node.target in (*ACCUMULATES, *FUSED, GRAD_READY, BUCKET_REDUCE, HOLD):
            previous = node
    return finish(gm, {"tokens": links})
