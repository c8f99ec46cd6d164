"""V09 between ranks: those that share a group must hold one order of collectives on it.

In: a rewritten backward and its plan. Each set of ranks compares, through the store, the text of
what its members will issue on it: launches with kind, shape and dtype, and the order in which its
buckets are completed; no rank lists, names, versions or paths, so that equal work reads equal.
"""

from __future__ import annotations

from torch import Tensor, fx

from gtpgraph.graph.plan import RegionPlan
from gtpgraph.graph.verify import first_difference
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.passes.lower_symmetric import exchange_group, sent_by


def collective_order(
    wrapper: DistributedDataParallel, graph: fx.Graph, plan: RegionPlan
) -> dict[tuple[int, ...], str]:
    """By ranks: what a region's backward will issue on the groups that they form, line by line."""
    lines: dict[tuple[int, ...], list[str]] = {}
    specs = [s.spec for s in wrapper.states if s.spec is not None]
    by_group = {s.group_name: tuple(s.ranks) for s in specs if s.group_name}
    for node in graph.nodes:
        ranks = by_group.get(exchange_group(node) or "")
        if ranks is not None:  # others are the model's own, on groups that we know nothing about
            kind = str(node.target).split(".")[1]
            sent = " ".join(_shape(n.meta["val"]) for n in sent_by(node))
            lines.setdefault(ranks, []).append(f"{kind} {sent}")
    for occurrence in plan.occurrences:
        side = wrapper.buckets[occurrence.bucket].side
        if side.size > 1:
            text = f"report bucket {occurrence.bucket} ({occurrence.bytes} bytes)"
            lines.setdefault(side.ranks, []).append(text)
    return {ranks: "\n".join(text) for ranks, text in lines.items()}


def _shape(val: Tensor) -> str:
    """Shape and dtype; a symbolic size reads the same on every rank."""
    sizes = [str(s) if isinstance(s, int) else "?" for s in val.shape]
    return f"[{', '.join(sizes)}] {val.dtype}"


def agree_on_order(
    wrapper: DistributedDataParallel, region: str, graph: fx.Graph, plan: RegionPlan
) -> None:
    """Compare this region's order with every rank that shares a group with this one.

    A recompilation whose order is one that was agreed on before is not exchanged: the other ranks
    need not have recompiled.

    Raises:
        RuntimeError: with the first difference, or the ranks that did not come, on all of them.
    """
    base = region.split(".")[0]
    orders = collective_order(wrapper, graph, plan)
    for ranks in sorted(wrapper.order_exchanges):
        text = orders.get(ranks, "")
        agreed = wrapper.agreed_orders.setdefault((base, ranks), [])
        if text in agreed:
            continue
        agreed.append(text)
        name = f"{base}/{len(agreed)}"
        known = _describe(agreed)
        try:
            wrapper.order_exchanges[ranks].agree(name, text, lambda t: _judge(base, t))
        except RuntimeError as error:
            wrapper.ledger.broken = True
            raise RuntimeError(f"V09: {error}{known}") from error


def _judge(region: str, texts: object) -> str | None:
    assert isinstance(texts, dict)
    difference = first_difference(texts)
    if difference is None:
        return None
    return (
        f"region {region}: ranks {sorted(texts)} compiled different orders of collectives; "
        f"{difference}. Give every rank the same model, shapes and options."
    )


def _describe(agreed: list[str]) -> str:
    if len(agreed) < 2:
        return ""
    difference = first_difference({0: agreed[0], 1: agreed[-1]})
    return f" Against the order agreed on before (rank 0: before, rank 1: now): {difference}"
