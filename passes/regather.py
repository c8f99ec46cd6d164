"""Recompute gathered weights in the backward, so that the forward need not keep them.

In: a joint graph. Out: the same graph, tagged. Matched: every gather, and the closure of forward
nodes all of whose tensor inputs derive from gathered weights::

    weight_i --gather--> full --t--> --to(bf16)--> mm(x, .)      gather, t, to are tagged; mm is not

The closure and not the gather alone: under autocast the partitioner would save the bf16 cast, which
undoes the sharding as surely as saving the weight. Tagging changes no number; the partitioner acts
on it (design: ``reshard_after_forward``, FSDP2's word).
"""

from __future__ import annotations

from torch import fx

from gtpgraph import compat
from gtpgraph.graph.sites import is_gather


def find_gathered(joint: fx.Graph) -> list[fx.Node]:
    """Forward gathers, and the nodes computed from nothing but gathered weights, in order."""
    derived: dict[fx.Node, None] = {}
    for node in joint.nodes:
        if node.op != "call_function" or compat.is_backward_node(node):
            continue
        inputs = node.all_input_nodes
        if is_gather(node) or (inputs and all(i in derived for i in inputs)):
            derived[node] = None
    return list(derived)


def regather_pass(joint: fx.Graph) -> int:
    """Tag what `find_gathered` finds; returns how many nodes were tagged. Idempotent.

    Gathers over a group of one are left out: nothing would be saved by repeating an alias.
    """
    nodes = [n for n in find_gathered(joint) if not _is_local(n)]
    for node in nodes:
        compat.tag_recompute(node)
    return len(nodes)


def _is_local(node: fx.Node) -> bool:
    while not is_gather(node):
        node = node.all_input_nodes[0]
    return node.args[2] == ""
