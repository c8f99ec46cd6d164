"""Lower gather and reduce to kernels over peers' buffers, which a CUDA graph can hold.

In: a forward graph with `gtpgraph::gather`, or a backward with `gtpgraph::reduce` and accumulates.
Out: the same graph plus one staging placeholder for each group that it uses, and ::

    gather(shard, rows, g)                        staged_gather(staging, shard, rows, g)
    reduce(wgrad, rows, g) -> accumulate(main)    staged_accumulate(main, wgrad, staging, g)

Each op fills the staging buffer and exchanges by itself, so nothing is launched and waited for. All
ops of a group mutate one placeholder, which keeps their order, and with it that of the ranks, under
Inductor. What goes over a group of one is left to `lower_collectives_pass`, where it disappears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

import gtpgraph.kernels.ops_staged  # noqa: F401 - registers the operators
from gtpgraph.graph.sites import is_gather, is_reduce
from gtpgraph.kernels.comm import group_size
from gtpgraph.passes.edit import PassResult, add_placeholder, call, finish
from gtpgraph.passes.grad_ready import ACCUMULATE, STAGED_ACCUMULATE
from gtpgraph.passes.lower_collectives import is_launch

STAGED_GATHER = torch.ops.gtpgraph.staged_gather.default
STAGED = (STAGED_GATHER, STAGED_ACCUMULATE)
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


def is_staging(node: fx.Node) -> bool:
    """Whether a node is the placeholder of a staging buffer."""
    return node.op == "placeholder" and str(node.target).startswith("staging_")


def exchange_group(node: fx.Node) -> str | None:
    """Name of the group that a node sends something over, None for one that sends nothing."""
    if is_launch(node):
        return str(node.args[-1])
    if node.target is STAGED_GATHER:
        return str(node.args[3])
    return str(node.args[10]) if node.target is STAGED_ACCUMULATE else None


def sent_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node with an `exchange_group` sends; buffers of ours apart."""
    return (
        [a for a in node.args[1:2] if isinstance(a, fx.Node)]
        if node.target in STAGED
        else (node.all_input_nodes)
    )


def lower_symmetric_pass(
    gm: fx.GraphModule,
    *,
    wire_dtype: torch.dtype | None,
    staging: Mapping[str, Tensor],
    fake_mode: Any,
) -> tuple[PassResult, tuple[str, ...]]:
    """Replace every gather and reduce over several ranks, in place.

    Args:
        gm: a graph whose GRAPHED contributions are accumulated already.
        wire_dtype: dtype in the staging buffer of a wgrad; None for the wgrad's own.
        staging: fake uint8 [bytes] by group name.
        fake_mode: the mode that the graph's values were made in.

    Returns:
        How many of each were replaced, and the groups of the placeholders that were appended.

    Raises:
        NotImplementedError: something else than an accumulate reads a reduced wgrad.
        ValueError: a group without a buffer.
    """
    graph = gm.graph
    found = [n for n in graph.nodes if (is_gather(n) or is_reduce(n)) and n.args[2]]
    groups = tuple(dict.fromkeys(str(n.args[2]) for n in found))
    _check(found, groups, staging)
    places = {g: add_placeholder(graph, f"staging_{k}", staging[g]) for k, g in enumerate(groups)}
    counts = {"gather": 0, "reduce": 0}
    for node in found:
        staged = places[str(node.args[2])]
        if is_gather(node):
            _gather(graph, node, staged, fake_mode)
        else:
            _accumulate(graph, node, staged, wire_dtype, fake_mode)
        counts["gather" if is_gather(node) else "reduce"] += 1
        graph.erase_node(node)
    return finish(gm, counts), groups


def _check(found: list[fx.Node], groups: tuple[str, ...], staging: Mapping[str, Tensor]) -> None:
    missing = [g for g in groups if g not in staging]
    if missing:
        raise ValueError(
            f"lower_symmetric_pass: expected a staging buffer for each of the groups {groups}, got "
            f"none for {missing}. Gather GTP weights of the wrapped model alone, or use "
            "collectives='functional'."
        )
    read = [
        f"{node} ({user})"
        for node in found
        if is_reduce(node)
        for user in node.users
        if user.target is not ACCUMULATE
    ]
    if read:
        raise NotImplementedError(
            "collectives='symmetric': expected reduced wgrads that main_grads alone take, got "
            f"others that read {', '.join(read[:6])}. Use collectives='functional'."
        )


def _gather(graph: fx.Graph, node: fx.Node, staging: fx.Node, fake_mode: Any) -> None:
    shard, rows, group = node.args
    ranks = group_size(str(group))
    with graph.inserting_before(node):
        new = call(graph, fake_mode, STAGED_GATHER, staging, shard, rows, group, ranks)
    new.meta.update({k: node.meta[k] for k in _ORIGIN if k in node.meta})
    node.replace_all_uses_with(new, propagate_meta=False)


def _accumulate(
    graph: fx.Graph,
    node: fx.Node,
    staging: fx.Node,
    wire_dtype: torch.dtype | None,
    fake_mode: Any,
) -> None:
    wgrad, shard_rows, group = node.args
    assert isinstance(wgrad, fx.Node)
    wire = wire_dtype or wgrad.meta["val"].dtype
    for user in list(node.users):
        flat, _, *rest = user.args
        with graph.inserting_before(user):
            new = call(
                graph, fake_mode, STAGED_ACCUMULATE, flat, wgrad, *rest,
                staging, shard_rows, wire, group, group_size(str(group)),
            )  # fmt: skip
        new.meta.update({k: v for k, v in user.meta.items() if k != "val"})
        user.replace_all_uses_with(new)
        graph.erase_node(user)
