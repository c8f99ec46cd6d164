"""What can be wrong with a step's reports, as lines for one error message.

In: the ledger's counts at the end of a step. Out: one line for each region or weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gtpgraph.parallel.ready_records import RegionCalls, WeightCount


def short_weights(weights: Sequence[WeightCount], learned: Sequence[int | None]) -> list[str]:
    """Weights without a report, and those whose eager reports are not what was learned."""
    lines = []
    for weight, expected in zip(weights, learned, strict=True):
        if not weight.watched or weight.frozen:
            continue
        if not weight.reports and not weight.contributed:
            lines.append(
                f"{weight.name}: expected at least one readiness report, got none: no backward "
                "of this step reached it. Freeze it, use it, or wrap with allow_unused=True."
            )
        elif expected is not None and weight.eager != expected:
            lines.append(
                f"{weight.name}: expected {expected} eager report(s) (learned), got "
                f"{weight.eager}. Call forget_ready_counts() if the model's use has changed."
            )
    return lines


def short_regions(regions: Iterable[RegionCalls], weights: Sequence[WeightCount]) -> list[str]:
    """Regions whose forward calls were not all followed by a backward."""
    return [
        f"region {r.name}: expected {r.forwards} backward(s) for as many forward calls under "
        f"grad, got {r.backwards}; {some(weights[i].name for i in r.sites)} would wait "
        "for ever. Run forwards without a backward under torch.no_grad(), or wrap with "
        "allow_unused=True."
        for r in regions
        if r.outstanding
    ]


def disagreements(weights: Sequence[WeightCount], learned: Sequence[int | None]) -> list[str]:
    """GTP weights whose captured counts differ from those `learned` in an eager step."""
    lines = []
    for index, weight in enumerate(weights):
        declared = sum(r.synced * r.uses.get(index, 0) for r in weight.regions)
        got = declared + weight.eager
        if weight.is_gtp and declared and learned[index] not in (None, got):
            lines.append(
                f"{weight.name}: expected {learned[index]} report(s) as learned in an eager "
                f"step, got {got} from the plan (uses) and eager code together."
            )
    return lines


def some(names: Iterable[str], limit: int = 6) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
