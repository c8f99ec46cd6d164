"""Tie a compiled graph to the very weights that it was compiled for.

In: a graph captured by Dynamo, during its compilation. Out: guards. Dynamo lifts Parameters to
graph inputs and reuses a graph for any others of the same shape: the second of many equal blocks
would run the first one's backward, and its gradients and reports would go to the wrong weights. So
the identity of every wrapped weight becomes a guard. The module that holds them is guarded too,
which makes Dynamo count its limit of recompilations for each module by itself: a stack of a hundred
blocks is a hundred graphs of one compilation each. Whether a Parameter needs a gradient is guarded
as well: torch 2.11 does not, and would go on finalising a weight that has been frozen since.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from gtpgraph import compat


def pin_weights(gm: fx.GraphModule, positions: Iterable[int]) -> None:
    """Guard the identity of the weights at these input positions, and of the modules they hang on,
    and `requires_grad` of every Parameter of the graph.

    Does nothing for a graph that Dynamo is not compiling right now, which has no guards.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    sources = [compat.source_of(placeholders[p]) for p in positions]
    params = [n for n in placeholders if isinstance(compat.example_of(n), nn.Parameter)]
    compat.install_guards(
        [s for s in sources if s is not None],
        [s for s in map(compat.source_of, params) if s is not None],
    )
