"""Insert an accumulate and a grad_ready at every site of the GRAPHED chain.

In: a partitioned backward and its sites. Out: the same graph plus one flat buffer and one beta
placeholder per bucket, behind each contribution the pair ::

    contribution --> accumulate(flat, contribution, beta, slot, offset, scale, first)
                 --> grad_ready(flat, site, token)

and minus the outputs that autograd would have accumulated. Contributions are tapped, never
rewired: two weights may share one, and one may feed another computation. Unreduced wgrads of the
UNGRAPHED chain become extra outputs instead (filtered is not lost). Order is the graph's own; the
tokens that pin it are threaded by `thread_tokens_pass`, after scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import gtpgraph.kernels.ops
import gtpgraph.kernels.ops_staged
import gtpgraph.kernels.readiness  # noqa: F401 - all register operators
from gtpgraph.graph.sites import WgradSite, output_leaves, output_node
from gtpgraph.passes.edit import PassResult, add_placeholder, call, finish

ACCUMULATE = torch.ops.gtpgraph.accumulate.default
# The same with the sum over ranks fused in: reads the chunks that an exchange delivered.
SHARD_REDUCE = torch.ops.gtpgraph.shard_reduce.default
# The same with the whole reduction in it, through a buffer that peers read.
STAGED_ACCUMULATE = torch.ops.gtpgraph.staged_accumulate.default
# Fused forms: the GEMM or the scatter that makes the wgrad, and many small weights of a bucket.
WGRAD_GEMM = torch.ops.gtpgraph.wgrad_gemm.default
ACCUMULATE_MANY = torch.ops.gtpgraph.accumulate_many.default
SCATTER_ACCUMULATE = torch.ops.gtpgraph.scatter_accumulate.default
FUSED = (WGRAD_GEMM, ACCUMULATE_MANY, SCATTER_ACCUMULATE)
ACCUMULATES = (ACCUMULATE, SHARD_REDUCE, STAGED_ACCUMULATE)
GRAD_READY = torch.ops.gtpgraph.grad_ready.default
BUCKET_REDUCE = torch.ops.gtpgraph.bucket_reduce.default
HOLD = torch.ops.gtpgraph.hold.default


@dataclass(frozen=True)
class Place:
    """Where a weight's main_grad lies, and the factor of its contributions."""

    bucket: int
    slot: int
    offset: int
    scale: float


@dataclass(frozen=True)
class BucketInputs:
    """Fake tensors for a bucket's placeholders: `flat` [numel], `beta` float32 [weights]."""

    flat: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Inserted:
    """What the pass did: the sites by number, the buckets in placeholder order (all flats, then
    all betas), output positions that were removed, and the sites behind the extra outputs. Staging
    placeholders of the groups `staging` follow the betas, see `lower_symmetric_pass`."""

    sites: tuple[WgradSite, ...]
    buckets: tuple[int, ...]
    removed: tuple[int, ...]
    extra: tuple[WgradSite, ...]
    staging: tuple[str, ...] = ()


def grad_ready_pass(
    gm: fx.GraphModule,
    *,
    graphed: Sequence[WgradSite],
    ungraphed: Sequence[WgradSite],
    places: Mapping[int, Place],
    buckets: Mapping[int, BucketInputs],
    fake_mode: Any,
) -> tuple[PassResult, Inserted]:
    """Insert the readiness of every site.

    Args:
        gm: the backward graph, changed in place.
        graphed: sites to finalise inside, in execution order; a site's number is its position.
        ungraphed: sites whose full wgrad leaves the region.
        places: by wrapper index of the weight.
        buckets: by bucket number, for every bucket of `graphed`.
        fake_mode: the mode that the graph's values were made in.
    """
    graph = gm.graph
    used = tuple(sorted({places[s.weight.index].bucket for s in graphed}))
    flats = {b: add_placeholder(graph, f"main_grad_{b}", buckets[b].flat) for b in used}
    betas = {b: add_placeholder(graph, f"beta_{b}", buckets[b].beta) for b in used}
    cursor: dict[fx.Node, fx.Node] = {}
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    seen: set[int] = set()
    for number, site in enumerate(graphed):
        place = places[site.weight.index]
        behind = cursor.get(site.contribution, site.contribution)
        if behind.op == "placeholder":  # a bare tangent is the gradient
            behind = cursor.get(last_input[0], last_input[0])
        with graph.inserting_before(behind.next):
            ready = _insert_site(
                graph, fake_mode, number, site, place, flats, betas, site.weight.index not in seen
            )
        seen.add(site.weight.index)
        cursor[site.contribution] = ready
        if site.contribution.op == "placeholder":
            cursor[last_input[0]] = ready
    removed = _rewrite_outputs(graph, graphed, ungraphed)
    graph.eliminate_dead_code()
    counts = {"grad_ready": len(graphed), "ungraphed": len(ungraphed)}
    return finish(gm, counts), Inserted(tuple(graphed), used, removed, tuple(ungraphed))


def _insert_site(
    graph: fx.Graph,
    fake_mode: Any,
    number: int,
    site: WgradSite,
    place: Place,
    flats: Mapping[int, fx.Node],
    betas: Mapping[int, fx.Node],
    first: bool,
) -> fx.Node:
    flat, beta = flats[place.bucket], betas[place.bucket]
    accumulate = call(
        graph, fake_mode, ACCUMULATE,
        flat, site.contribution, beta, place.slot, place.offset, place.scale, first,
    )  # fmt: skip
    ready = call(graph, fake_mode, GRAD_READY, flat, number, accumulate)
    for node in (accumulate, ready):
        node.meta["gtp_site"] = number
        node.meta["stack_trace"] = site.contribution.meta.get("stack_trace")
    return ready


def _rewrite_outputs(
    graph: fx.Graph, graphed: Sequence[WgradSite], ungraphed: Sequence[WgradSite]
) -> tuple[int, ...]:
    """Drop the finalised outputs and append the unreduced wgrads; returns what was dropped."""
    output = output_node(graph)
    leaves = output_leaves(output)
    gone = {p for s in (*graphed, *ungraphed) for p in s.outputs}
    removed = tuple(sorted(gone))
    kept = [i for i in range(len(leaves)) if i not in gone]
    extra = [unreduced(site) for site in ungraphed]
    output.args = (tuple(leaves[i] for i in kept) + tuple(extra),)  # type: ignore[assignment]
    descs = output.meta.get("desc")
    if descs is not None:
        output.meta["desc"] = [descs[i] for i in kept] + [None] * len(extra)
    return removed


def unreduced(site: WgradSite) -> fx.Node:
    """The full wgrad of an UNGRAPHED site: what its reduce would have read."""
    if not site.weight.is_gtp:
        return site.contribution
    wgrad = site.contribution.args[0]
    assert isinstance(wgrad, fx.Node)
    return wgrad
