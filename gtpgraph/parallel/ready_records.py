"""The records of the readiness ledger: reports, what regions declare, and counts of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """One readiness report: the weight's first FQN, use k (from 1), region (None: eager) and the
    backward pass of the step (from 0)."""

    weight: str
    use: int
    region: str | None
    microbatch: int


@dataclass(frozen=True)
class ReplayCounts:
    """What one replay of a graph reports: (weight, eager reports, declared reports) for each
    weight, and its buckets in the order of their last occurrences."""

    weights: tuple[tuple[int, int, int], ...]
    buckets: tuple[int, ...]


@dataclass
class RegionCalls:
    """What one region declares, and its calls since the last finished step.

    `sites` counts the occurrences of each weight (by index) in one backward; `uses` its uses, which
    differ when contributions are coalesced.
    """

    name: str
    sites: Mapping[int, int]
    uses: Mapping[int, int]
    whole_model: bool = False
    forwards: int = 0
    backwards: int = 0
    synced: int = 0  # backwards that reported, that is outside no_sync()
    calls_a_step: int | None = None  # forwards of the last finished step
    synced_a_step: int | None = None

    @property
    def outstanding(self) -> int:
        return self.forwards - self.backwards


@dataclass
class WeightCount:
    """Counts of one weight in the running step."""

    name: str
    bucket: int
    is_gtp: bool
    owed: int = 0  # occurrences of region calls that have not run backward yet
    eager: int = 0  # reports made by eager finalisations
    captured: int = 0  # reports made by regions
    gathers: int = 0  # eager gathers under grad: an upper bound of the eager part
    contributed: bool = False
    watched: bool = True  # False: its reports go elsewhere, so its bucket leaves at the end
    frozen: bool = False  # since the step began: it owes nothing, and its bucket does not wait
    regions: list[RegionCalls] = field(default_factory=list)

    @property
    def reports(self) -> int:
        return self.eager + self.captured
