"""Lower gather and reduce to a launch and a wait each, so that they can be scheduled apart.

In: a forward or backward graph with `gtpgraph::gather` and `gtpgraph::reduce`. Out ::

    gather(shard, rows, g)      all_gather_into_tensor(shard, n, g) -> wait_tensor -> slice to rows
    reduce(wgrad, rows, g)      pad -> cast to wire dtype -> reduce_scatter_tensor -> wait_tensor
    with a 16-bit wire          pad -> cast -> all_to_all_single -> wait_tensor; accumulates that
                                read it become shard_reduces, which sum the chunks in fp32

torch's functional collectives are used, which Inductor schedules as such. Over a group of one both
disappear: the shard is the weight, the wgrad is the contribution. The cast is made only where every
reader is an accumulate, which takes any float dtype; elsewhere the value keeps its dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gtpgraph.compat import OpOverload
from gtpgraph.graph.sites import is_gather, is_reduce
from gtpgraph.kernels.comm import group_size
from gtpgraph.passes.edit import PassResult, call, finish
from gtpgraph.passes.grad_ready import ACCUMULATE, SHARD_REDUCE

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
EXCHANGE = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default
_aten = torch.ops.aten


def is_launch(node: fx.Node) -> bool:
    """Whether a node starts a functional collective, one of ours or of the model's own."""
    target = node.target
    ours = isinstance(target, OpOverload) and target.namespace == "_c10d_functional"
    return ours and target is not WAIT


def lower_collectives_pass(
    gm: fx.GraphModule, *, wire_dtype: torch.dtype | None, fake_mode: Any
) -> PassResult:
    """Replace every gather and reduce of the graph; returns how many of each."""
    counts = {"gather": 0, "reduce": 0}
    for node in list(gm.graph.nodes):
        if not (is_gather(node) or is_reduce(node)):
            continue
        with gm.graph.inserting_before(node):
            if is_gather(node):
                new = _lower_gather(gm.graph, node, fake_mode)
            else:
                new = _lower_reduce(gm.graph, node, wire_dtype, fake_mode)
        counts["gather" if is_gather(node) else "reduce"] += 1
        node.replace_all_uses_with(new, propagate_meta=False)
        gm.graph.erase_node(node)
    return finish(gm, counts)


def _lower_gather(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> fx.Node:
    shard, rows, group = node.args
    assert isinstance(shard, fx.Node) and isinstance(group, str)
    padded: fx.Node = shard
    if group:
        launch = _like(node, call(graph, fake_mode, ALL_GATHER, shard, group_size(group), group))
        padded = _like(node, call(graph, fake_mode, WAIT, launch))
    if padded.meta["val"].shape[0] == rows:
        return padded
    return _like(node, call(graph, fake_mode, _aten.slice.Tensor, padded, 0, 0, rows))


def _lower_reduce(
    graph: fx.Graph, node: fx.Node, wire_dtype: torch.dtype | None, fake_mode: Any
) -> fx.Node:
    wgrad, shard_rows, group = node.args
    assert isinstance(wgrad, fx.Node) and isinstance(group, str) and isinstance(shard_rows, int)
    val = wgrad.meta["val"]
    size = group_size(group)
    missing = size * shard_rows - int(val.shape[0])
    if missing:
        pads = [0] * (2 * val.dim() - 1) + [missing]
        wgrad = _like(node, call(graph, fake_mode, _aten.constant_pad_nd.default, wgrad, pads, 0.0))
    if not group:
        return wgrad
    only_accumulated = all(u.target is ACCUMULATE for u in node.users)
    if wire_dtype is not None and wire_dtype != val.dtype and only_accumulated:
        cast = torch.ops.prims.convert_element_type.default
        wgrad = _like(node, call(graph, fake_mode, cast, wgrad, wire_dtype))
    if not wgrad.meta["val"].is_contiguous():
        wgrad = _like(
            node,
            call(
                graph, fake_mode, _aten.clone.default, wgrad,
                memory_format=torch.contiguous_format,
            ),
        )  # fmt: skip
    if wire_dtype is not None and wire_dtype.itemsize < 4 and only_accumulated and node.users:
        return _exchange(graph, fake_mode, node, wgrad, size, group)
    launch = _like(node, call(graph, fake_mode, REDUCE_SCATTER, wgrad, "sum", size, group))
    return _like(node, call(graph, fake_mode, WAIT, launch))


def _exchange(
    graph: fx.Graph, fake_mode: Any, node: fx.Node, wgrad: fx.Node, size: int, group: str
) -> fx.Node:
    """Send every rank its chunk and let the accumulates sum what arrives, in fp32."""
    chunks = _like(node, call(graph, fake_mode, _aten.view.default, wgrad, [size, -1]))
    ones = [1] * size
    launch = _like(node, call(graph, fake_mode, EXCHANGE, chunks, ones, ones, group))
    received = _like(node, call(graph, fake_mode, WAIT, launch))
    for user in list(node.users):
        flat, _, beta, slot, offset, scale, first = user.args
        with graph.inserting_before(user):
            fused = call(
                graph, fake_mode, SHARD_REDUCE, flat, received, beta, slot, offset, scale, first
            )
        fused.meta.update({k: v for k, v in user.meta.items() if k != "val"})
        user.replace_all_uses_with(fused)
        graph.erase_node(user)
    return received


def _like(old: fx.Node, new: fx.Node) -> fx.Node:
    """Carry where the node came from; never its value, which differs."""
    for key in ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
    return new
