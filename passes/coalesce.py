"""Sum the contributions of a weight inside a region, so that one reduction and one report suffice.

In: a partitioned backward and its GRAPHED sites. Out: the same graph with, for every GTP weight of
several sites, one sum and one reduce behind its last contribution ::

    reduce(wgrad_1)  reduce(wgrad_2)  reduce(wgrad_3)        becomes
    wgrad_1 -+- wgrad_2 -+- wgrad_3 --> reduce               one site, where the third one stood

The sum is made before the reduction, in full size, in the wider of the wgrads' and the wire's
dtype: fewer collectives for more memory, since a full gradient lives from the first use to the
last. The old reduces lose their readers when grad-ready is inserted; nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import gtpgraph.kernels.comm  # noqa: F401 - registers the operator
from gtpgraph.graph.sites import WgradSite, is_reduce
from gtpgraph.passes.edit import PassResult, call, finish

_ADD = torch.ops.aten.add.Tensor
_CAST = torch.ops.prims.convert_element_type.default
_REDUCE = torch.ops.gtpgraph.reduce.default


def find_coalescible(sites: Sequence[WgradSite]) -> dict[int, list[WgradSite]]:
    """Sites by weight (wrapper index), for GTP weights of two sites or more, in their order."""
    found: dict[int, list[WgradSite]] = {}
    for site in sites:
        if site.weight.is_gtp and is_reduce(site.contribution):
            found.setdefault(site.weight.index, []).append(site)
    return {index: group for index, group in found.items() if len(group) > 1}


def coalesce_pass(
    gm: fx.GraphModule,
    *,
    sites: Sequence[WgradSite],
    wire_dtype: torch.dtype | None,
    fake_mode: Any,
) -> tuple[PassResult, list[WgradSite]]:
    """Sum what `find_coalescible` finds; returns the sites as they are then, in order.

    Idempotent, for the sites that it returns. Numbers change by the order of a sum at most.
    """
    groups = find_coalescible(sites)
    kept = []
    for site in sites:
        group = groups.get(site.weight.index)
        if group is None:
            kept.append(site)
        elif site is group[-1]:
            node = _sum_and_reduce(gm.graph, group, wire_dtype, fake_mode)
            kept.append(replace(site, contribution=node, summed=len(group)))
    counts = {"coalesced": sum(map(len, groups.values())), "reduces": len(groups)}
    return finish(gm, counts), kept


def _sum_and_reduce(
    graph: fx.Graph, group: Sequence[WgradSite], wire_dtype: torch.dtype | None, fake_mode: Any
) -> fx.Node:
    total: fx.Node | None = None
    for site in group:
        old = site.contribution
        with graph.inserting_before(old):
            wgrad = _widened(graph, old, wire_dtype, fake_mode)
            total = wgrad if total is None else call(graph, fake_mode, _ADD, total, wgrad)
            _place(total, old)
    old = group[-1].contribution
    with graph.inserting_before(old):
        node = call(graph, fake_mode, _REDUCE, total, *old.args[1:])
    _place(node, old)
    return node


def _widened(
    graph: fx.Graph, reduce: fx.Node, wire_dtype: torch.dtype | None, fake_mode: Any
) -> fx.Node:
    wgrad = reduce.args[0]
    assert isinstance(wgrad, fx.Node)
    dtype = wgrad.meta["val"].dtype
    wide = dtype if wire_dtype is None else torch.promote_types(dtype, wire_dtype)
    return wgrad if wide == dtype else call(graph, fake_mode, _CAST, wgrad, wide)


def _place(new: fx.Node, old: fx.Node) -> None:
    for key in ("stack_trace", "nn_module_stack", "partitioner_tag", "seq_nr"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])
