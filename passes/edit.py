"""How passes add nodes: with a fake value, so that every later stage can propagate shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from gtpgraph.compat import tree_map_only


@dataclass(frozen=True)
class PassResult:
    """A pass's graph, whether it changed, and a line of counts for the log."""

    graph_module: fx.GraphModule
    modified: bool
    counts: dict[str, int]


def call(graph: fx.Graph, fake_mode: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the graph's insertion point, fake value included."""
    node = graph.call_function(target, args, kwargs)
    real_args, real_kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
    with fake_mode:
        node.meta["val"] = target(*real_args, **real_kwargs)
    return node


def add_placeholder(graph: fx.Graph, name: str, val: Any) -> fx.Node:
    """Append a placeholder behind the existing ones."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    if last:
        with graph.inserting_after(last[0]):
            node = graph.placeholder(name)
    else:
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(name)
    node.meta["val"] = val
    return node


_deferred: list[fx.GraphModule] = []  # modules whose code is made when `one_recompile` closes


@contextmanager
def one_recompile(gm: fx.GraphModule) -> Iterator[None]:
    """Several passes over one graph: its code is made once, at the end, not after each of them."""
    _deferred.append(gm)
    try:
        yield
    finally:
        _deferred.remove(gm)
        if gm not in _deferred:
            gm.recompile()


def finish(gm: fx.GraphModule, counts: dict[str, int]) -> PassResult:
    """Lint and recompile when anything was counted; an unmatched graph stays as it is."""
    modified = any(counts.values())
    if modified:
        gm.graph.lint()
        if gm not in _deferred:
            gm.recompile()
    return PassResult(gm, modified, counts)
