"""What differs between two hook plans: counts, chains, buckets, order."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtpgraph.graph.plan import HookPlan, Occurrence


def diff(a: HookPlan, b: HookPlan) -> list[str]:
    """Lines that say what differs from `a` to `b`, weight by weight; empty when they agree."""
    if a.hash == b.hash:
        return []
    lines = [f"world: {dict(a.world)} -> {dict(b.world)}"] if a.world != b.world else []
    order = _order(a, b)
    if order and a.fused != b.fused:
        lines.append(
            f"fused: {a.fused} -> {b.fused}: joined weights report behind their joint accumulate, "
            "in another order than one by one"
        )
    lines += _counts(a, b) + _buckets(a, b) + order
    return lines or [f"details: hash {a.hash} -> {b.hash}"]


def _occurrences(plan: HookPlan) -> list[Occurrence]:
    return [o for region in plan.regions for o in region.occurrences]


def _counts(a: HookPlan, b: HookPlan) -> list[str]:
    counts = [Counter(o.weight for o in _occurrences(p)) for p in (a, b)]
    outside = [{e.weight for r in p.regions for e in r.excluded} for p in (a, b)]
    lines = []
    for weight in sorted(counts[0].keys() | counts[1].keys() | outside[0] | outside[1]):
        if counts[0][weight] != counts[1][weight]:
            lines.append(f"count: {weight}: {counts[0][weight]} -> {counts[1][weight]}")
        if (weight in outside[0]) != (weight in outside[1]):
            chain = ["UNGRAPHED" if weight in o else "GRAPHED" for o in outside]
            lines.append(f"chain: {weight}: {chain[0]} -> {chain[1]}")
    for weight in sorted(a.ready_counts.keys() | b.ready_counts.keys()):
        was, now = a.ready_counts.get(weight), b.ready_counts.get(weight)
        if was != now:
            lines.append(f"ready count: {weight}: {was} -> {now}")
    return lines


def _buckets(a: HookPlan, b: HookPlan) -> list[str]:
    lines = []
    where = [{w: bk.bucket for bk in p.buckets for w in bk.weights} for p in (a, b)]
    for weight in sorted(where[0].keys() | where[1].keys()):
        if where[0].get(weight) != where[1].get(weight):
            lines.append(f"bucket: {weight}: {where[0].get(weight)} -> {where[1].get(weight)}")
    for x, y in zip_longest(a.buckets, b.buckets):
        if x is None or y is None or (x.numel, x.group, x.dtype) != (y.numel, y.group, y.dtype):
            was, now = (
                f"{k.numel} x {k.dtype} over {k.group.axis}" if k else "none" for k in (x, y)
            )
            lines.append(f"bucket {(x or y).bucket}: {was} -> {now}")
    return lines


def _fields(a: Occurrence | None, b: Occurrence | None) -> list[str]:
    """Fields of one occurrence that differ, apart from what the plan's hash leaves out."""
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(type(a or b)))  # type: ignore[arg-type]
    return [
        f"{name} {was} -> {now}"
        for name, was, now in pairs
        if was != now and name not in ("node", "source")
    ]


def _order(a: HookPlan, b: HookPlan) -> list[str]:
    lines = []
    for x, y in zip_longest(a.regions, b.regions):
        if x is None or y is None:
            lines.append(f"region {(x or y).name}: only in {'B' if x is None else 'A'}")
            continue
        pairs = zip_longest(x.occurrences, y.occurrences)
        for k, (o, p) in enumerate(pairs):
            was, now = (f"{i.weight} (use {i.use})" if i else "nothing" for i in (o, p))
            if was != now:
                lines.append(f"order: region {x.name}, occurrence {k}: {was} -> {now}")
                break
            lines += [f"region {x.name}, occurrence {k}, {was}: {line}" for line in _fields(o, p)]
    return lines
