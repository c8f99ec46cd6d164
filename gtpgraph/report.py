"""A hook plan, and other records, as text for a terminal of 120 columns.

In: a `HookPlan`. Out: lines. Long names are shortened in the middle, long paths at the front; JSON
(`HookPlan.to_json`) has them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from gtpgraph.graph.plan import BucketPlan, HookPlan, Occurrence, RegionPlan

WIDTH = 120  # columns
_WEIGHT_WIDTH = 34
_SOURCE_WIDTH = 22
_COLUMNS = (
    "#",
    "site",
    "weight",
    "use",
    "chain",
    "gtp ranks",
    "bucket",
    "bytes",
    "event",
    "source",
)
_RANKS_SHOWN = 6  # of a list without a pattern


def plan_table(plan: HookPlan) -> str:
    """Everything that a plan says, at most 120 columns wide where names allow it."""
    parts = [_header(plan)]
    parts += [_region(region, k, len(plan.regions)) for k, region in enumerate(plan.regions)]
    parts.append(_buckets(plan.buckets))
    parts.append(_ready_counts(plan))
    if plan.unused:
        parts.append("unused (no site): " + ", ".join(plan.unused))
    if plan.warnings:
        lines = [f"  {w.code}: {w.weight}: {w.text}" for w in plan.warnings]
        parts.append("\n".join(["warnings", *lines]))
    return "\n\n".join(parts)


def human_bytes(count: float) -> str:
    """A number of bytes with three digits or so: ``512 B``, ``32.0 KiB``, ``1.5 GiB``."""
    units = iter(("KiB", "MiB", "GiB"))
    unit = "B"
    while count >= 1024 and (larger := next(units, None)) is not None:
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks in brief: ``0-3``, ``0,2``, ``0-1008 by 16``."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    shown = ",".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown + (f",.. ({len(ranks)})" if len(ranks) > _RANKS_SHOWN else "")


def shorten(text: str, width: int, *, keep_end: bool = False) -> str:
    """`text` in `width` characters: its middle left out, or with `keep_end` its beginning."""
    if len(text) <= width:
        return text
    if keep_end:
        return ".." + text[2 - width :]
    head = (width - 2) // 2
    return text[:head] + ".." + text[head + 2 - width :]


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: str = "") -> str:
    """A plain table; `right` names the headers (comma separated) that are aligned right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    # As rows, for tabulate makes columns two wider than their headers.
    cells.insert(1, ["-" * max(map(len, column)) for column in zip(*cells, strict=True)])
    aligned = set(right.split(","))
    align = ["right" if header in aligned else "left" for header in headers]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def world_text(world: Mapping[str, int]) -> str:
    """``dp 2 x gtp 2``: the axes that are larger than one."""
    axes = [f"{axis} {size}" for axis, size in world.items() if size > 1]
    return " x ".join(axes) or "one process"


def _header(plan: HookPlan) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    fused = ", fused" if plan.fused else ""
    return (
        f"hook plan of {plan.model}: {world_text(plan.world)}, lowering {plan.lowering}{fused}, "
        f"hash {plan.hash}\n{versions}"
    )


def _region(region: RegionPlan, number: int, total: int) -> str:
    calls = (
        "calls a step not known yet" if region.calls is None else f"{region.calls} call(s) a step"
    )
    occurrences = region.occurrences
    title = (
        f"region {region.name} ({number + 1} of {total}, {calls}): {len(occurrences)} "
        f"occurrence(s) of {len({o.weight for o in occurrences})} weight(s), in order of execution"
    )
    lines = [title]
    if occurrences:
        rows = [_occurrence(k, o) for k, o in enumerate(occurrences)]
        lines.append(table(_COLUMNS, rows, right="#,site,use,bucket,bytes"))
    lines += _aliases(occurrences)
    if region.excluded:
        lines.append(f"excluded from region {region.name}")
        cells = [
            (shorten(e.weight, _WEIGHT_WIDTH), e.use, e.chain, shorten(e.reason, 60))
            for e in region.excluded
        ]
        lines.append(table(("weight", "use", "chain", "reason"), cells, right="use"))
    return "\n".join(lines)


def _occurrence(number: int, o: Occurrence) -> tuple[Any, ...]:
    return (
        number,
        o.site,
        shorten(o.weight, _WEIGHT_WIDTH),
        f"{o.use}/{o.uses}",
        o.chain,
        rank_list(o.gtp.ranks) if o.gtp is not None else "-",
        o.bucket,
        human_bytes(o.bytes),
        "-" if o.event is None else f"bucket {o.event}",
        shorten(o.source, _SOURCE_WIDTH, keep_end=True),
    )


def _aliases(occurrences: Sequence[Occurrence]) -> list[str]:
    tied = {o.weight: o.aliases for o in occurrences if o.aliases}
    return [f"tied: {weight} = {' = '.join(aliases)}" for weight, aliases in tied.items()]


def _buckets(buckets: Sequence[BucketPlan]) -> str:
    rows = [
        (
            b.bucket,
            f"{b.group.axis} {rank_list(b.group.ranks)}",
            f"{b.numel:,}",
            b.dtype,
            b.wire_dtype,
            len(b.weights),
            _some(b.weights, 62),
        )
        for b in buckets
    ]
    headers = ("bucket", "reduced over", "elements", "dtype", "wire", "weights", "")
    return "buckets\n" + table(headers, rows, right="bucket,elements,weights")


def _ready_counts(plan: HookPlan) -> str:
    """Counts grouped by their number: most weights of a model owe the same."""
    by_count: dict[int, list[str]] = {}
    for weight, count in plan.ready_counts.items():
        by_count.setdefault(count, []).append(weight)
    total = sum(plan.ready_counts.values())
    rows = [
        (count, len(weights), _some(weights, 92))
        for count, weights in sorted(by_count.items(), reverse=True)
    ]
    title = f"ready counts: {total} report(s) a step"
    return title + "\n" + table(("reports", "weights", ""), rows, right="reports,weights")


def _some(names: Sequence[str], width: int) -> str:
    """As many names as fit, and how many more there are."""
    for shown in range(len(names), 0, -1):
        more = f" and {len(names) - shown} more" if shown < len(names) else ""
        text = ", ".join(names[:shown]) + more
        if len(text) <= width:
            return text
    return shorten(names[0], width - 14) + f" and {len(names) - 1} more" if names else ""
