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
    """Forward gathers over more than one process, and the nodes computed from nothing but gathered
    weights of which one at least is such, in order.

    A gather over a group of one is an alias of the weight: nothing would be saved by repeating it.
    """
    remote: dict[fx.Node, bool] = {}
    for node in joint.nodes:
        if node.op != "call_function" or compat.is_backward_node(node):
            continue
        inputs = node.all_input_nodes
        if is_gather(node):
            remote[node] = node.args[2] != ""
        elif inputs and all(i in remote for i in inputs):
            remote[node] = any(remote[i] for i in inputs)
    return [node for node, over_ranks in remote.items() if over_ranks]


def regather_pass(joint: fx.Graph) -> int:
    """Tag what `find_gathered` finds; returns how many nodes were tagged. Idempotent."""
    nodes = find_gathered(joint)
    for node in nodes:
        compat.tag_recompute(node)
    return len(nodes)
