"""The three ways in which readiness has been broken elsewhere, done to this library on purpose.

In: the name of a breakage. Out: the library of this process, broken until the process ends. Ranks
load this file by path, so that they break in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gtpgraph.graph import builder, region
from gtpgraph.graph.plan import GRAPHED, Occurrence


def nothing() -> None:
    """The control: the same way of running the tests, and nothing broken."""


def drop_recording() -> None:
    """A captured backward finalises and nobody records it, as when only kernels are replayed."""

    def grad_ready(self: Any, site: int) -> None:
        state = self._region.sites[site].state
        state.bucket.fill(state.member)  # the contribution itself is there

    region._Run.grad_ready = grad_ready  # type: ignore[method-assign]


def deduplicate() -> None:
    """Grouping by process group and stream keeps each weight once: [a, b, a] becomes [a, b]."""
    group = region.group_occurrences

    def grouped(occurrences: Sequence[Occurrence]) -> dict[tuple[int, str], list[Occurrence]]:
        return {
            key: list({o.weight: o for o in found}.values())
            for key, found in group(occurrences).items()
        }

    region.group_occurrences = grouped


def drop_chain_filter() -> None:
    """Every weight of a region counts as GRAPHED, whatever its chain."""

    def chains(self: Any) -> dict[int, str]:
        return {state.index: GRAPHED for state in self._states.values()}

    builder.RegionBuilder._chains = chains  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "nothing": nothing,
    "drop-recording": drop_recording,
    "deduplicate": deduplicate,
    "drop-chain-filter": drop_chain_filter,
}


def broken(rank: int, world: int, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """What a rank runs in place of `fn`."""
    BREAKAGES[name]()
    return fn(rank, world, *args)
