"""Chains (who finalises a weight) and the grouping of occurrences for dispatch.

GRAPHED: finalised inside a region. UNGRAPHED: the full wgrad leaves the region and is finalised by
eager Python. The chain is a property of the weight, chosen by patterns over its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from gtpgraph.graph.plan import GRAPHED, UNGRAPHED, Occurrence


def chain_of(fqns: Iterable[str], ungraphed: Sequence[str]) -> str:
    """The chain of a weight with these names: UNGRAPHED when any name matches any pattern."""
    hit = any(fnmatchcase(fqn, pattern) for fqn in fqns for pattern in ungraphed)
    return UNGRAPHED if hit else GRAPHED


def check_patterns(ungraphed: Sequence[str], names: Sequence[str]) -> None:
    """Raise one ValueError that lists every pattern without a weight, with near misses."""
    idle = [p for p in ungraphed if not any(fnmatchcase(n, p) for n in names)]
    if not idle:
        return
    hints = []
    for pattern in idle:
        near = _near(pattern, names)
        hints.append(f"{pattern!r} (near: {', '.join(near) if near else 'nothing'})")
    raise ValueError(
        "ungraphed: expected every pattern to match a trainable weight, got none for "
        + "; ".join(hints)
        + ". Patterns are those of fnmatch over names as in model.named_parameters()."
    )


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names that the pattern may have meant, by the words between dots and stars."""
    words = [w for w in re.split(r"[.*?]+", pattern) if w]

    def score(name: str) -> float:
        parts = name.split(".")
        ratios = (max(SequenceMatcher(None, w, p).ratio() for p in parts) for w in words)
        return sum(r for r in ratios if r >= 0.6)

    return sorted((n for n in names if score(n)), key=score, reverse=True)[:3]


def group_occurrences(
    occurrences: Sequence[Occurrence],
) -> dict[tuple[int, str], list[Occurrence]]:
    """Occurrences by (bucket, stream): what each reduction waits for, in order of execution.

    A bucket stands for the process group it reduces over. Duplicates are kept: a weight that is
    finalised three times owes three reports, and a wrapper that hears of one waits for ever.
    """
    grouped: dict[tuple[int, str], list[Occurrence]] = {}
    for occurrence in occurrences:
        grouped.setdefault((occurrence.bucket, occurrence.stream), []).append(occurrence)
    return grouped
