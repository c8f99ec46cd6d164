"""From sites of a rewritten graph to the region's part of the hook plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from gtpgraph.graph.plan import (
    GRAPHED,
    UNGRAPHED,
    AxisRanks,
    Excluded,
    Occurrence,
    RegionPlan,
)
from gtpgraph.graph.sites import WgradSite
from gtpgraph.parallel.weights import WeightState
from gtpgraph.passes.grad_ready import GRAD_READY, Inserted

MAIN_STREAM = "main"


def region_plan(
    name: str, graph: fx.Graph, inserted: Inserted, states: Sequence[WeightState]
) -> RegionPlan:
    """Occurrences in the order in which the graph's grad_ready ops stand, duplicates kept."""
    ready = [n for n in graph.nodes if n.target is GRAD_READY]
    in_order = [(n, int(n.args[1]), inserted.sites[int(n.args[1])]) for n in ready]
    completes = _completing([site for _, _, site in in_order], states)
    occurrences = tuple(
        _occurrence(number, site, node.name, completes.get(k), states[site.weight.index])
        for k, (node, number, site) in enumerate(in_order)
    )
    excluded = tuple(
        Excluded(
            site.weight.fqn, site.use, UNGRAPHED,
            "its chain is UNGRAPHED: the full wgrad leaves the region and is finalised eagerly",
        )
        for site in inserted.extra
    )  # fmt: skip
    return RegionPlan(name, None, occurrences, excluded)


def _completing(sites: Sequence[WgradSite], states: Sequence[WeightState]) -> dict[int, int]:
    """Occurrence number -> bucket that it completes, for buckets that lie wholly in the region."""
    last = {states[s.weight.index].bucket.number: k for k, s in enumerate(sites)}
    here = {s.weight.index for s in sites}
    whole = {
        states[i].bucket.number
        for i in here
        if all(m.index in here for m in states[i].bucket.members)
    }
    return {k: bucket for bucket, k in last.items() if bucket in whole}


def _occurrence(
    number: int, site: WgradSite, node: str, event: int | None, state: WeightState
) -> Occurrence:
    spec = state.spec
    return Occurrence(
        site=number,
        weight=state.fqn,
        aliases=state.fqns[1:],
        use=site.use,
        uses=site.uses,
        chain=GRAPHED,
        gtp=AxisRanks(spec.axis, tuple(spec.ranks)) if spec is not None else None,
        bucket=state.bucket.number,
        bytes=state.member.numel * state.bucket.flat.element_size(),
        stream=MAIN_STREAM,
        event=event,
        node=node,
        source=site.source,
        extra={"coalesced": site.summed} if site.summed > 1 else {},
    )
