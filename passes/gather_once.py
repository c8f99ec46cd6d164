"""One gather of an expert weight per forward of its module, in a graph captured by Dynamo.

In: Dynamo's graph, before AOTAutograd. Out: the same graph, in which the reads that one call of a
module makes of one 3-D weight share the first read's gather ::

    gather(w) -> [e0]   gather(w) -> [e1]        becomes      gather(w) -> [e0], [e1]

Eager code does the same (`gtpgraph.parallel.gather_once`), so both count one use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from gtpgraph.passes.edit import PassResult, finish

_GATHERS = (torch.ops.gtpgraph.gather, torch.ops.gtpgraph.gather.default)


def find_repeated_gathers(
    graph: fx.Graph, weights: Iterable[int]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(later gather, first gather) of the same weight in the same call of a module.

    `weights`: input positions. A call is told by the innermost entry of ``nn_module_stack``, whose
    key numbers repeated calls; without that metadata nothing is said to be repeated.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    chosen = {placeholders[p] for p in weights}
    first: dict[tuple[fx.Node, str], fx.Node] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op != "call_function" or node.target not in _GATHERS or not stack:
            continue
        if node.args[0] in chosen:
            known = first.setdefault((node.args[0], list(stack)[-1]), node)
            if known is not node:
                yield node, known


def gather_once_pass(gm: fx.GraphModule, *, weights: Iterable[int]) -> PassResult:
    """Merge what `find_repeated_gathers` finds. Idempotent."""
    repeated = list(find_repeated_gathers(gm.graph, weights))
    for later, first in repeated:
        later.replace_all_uses_with(first)
        gm.graph.erase_node(later)
    return finish(gm, {"merged": len(repeated)})
