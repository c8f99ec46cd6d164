"""How much of the communication on a GPU nothing hides, from a trace of its kernels.

In: torch.profiler's chrome trace of one step. Out: microseconds::

    communication  |-----------|      |----|          union of NCCL's kernels
    compute     |-----|    |-------|                  union of all other kernels
    exposed            |--|         |-|----|  ->      communication without compute

NCCL's kernels wait for their peers inside, so what a slower rank costs counts as communication.
Copies and memsets are neither: they hide nothing, and they are not exchanged between ranks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]  # (start, end)


@dataclass(frozen=True)
class Kernel:
    """One kernel's run on this rank's GPU; `start` and `end` in us of the trace's clock."""

    name: str
    start: float
    end: float

    @property
    def communicates(self) -> bool:
        """Whether it is one of NCCL's."""
        return "nccl" in self.name.lower()


@dataclass(frozen=True)
class Exposure:
    """us of one step on one rank: NCCL kernels running, without any other kernel, and others."""

    communication: float
    exposed: float
    compute: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of the union of `intervals`."""
    return sum(end - start for start, end in union(intervals))


def uncovered(intervals: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """Length of the union of `intervals` outside the union of `cover`."""
    both = [*intervals, *(covering := list(cover))]
    return length(both) - length(covering)


def exposure(kernels: Sequence[Kernel]) -> Exposure:
    """What of a step's communication nothing hides."""
    communication = [(k.start, k.end) for k in kernels if k.communicates]
    compute = [(k.start, k.end) for k in kernels if not k.communicates]
    return Exposure(length(communication), uncovered(communication, compute), length(compute))


def after_barrier(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels that start when the first NCCL kernel, the barrier, has ended.

    Raises:
        ValueError: no NCCL kernel.
    """
    ends = [k.end for k in sorted(kernels, key=lambda k: k.start) if k.communicates]
    if not ends:
        raise ValueError(f"trace: expected a barrier's NCCL kernel, got {len(kernels)} others")
    return [k for k in kernels if k.start >= ends[0]]


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a chrome trace (its times are in us); annotations and copies are left out."""
    return [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") == "kernel"
    ]


def profiled(work: Callable[[], Any], wait: Callable[[], None]) -> list[Kernel]:
    """The kernels that ran on this rank's GPU from the start of `work` to the end of `wait`."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        return kernels_of(json.loads(file.read_text()))


def traced(
    step: Callable[[], Any], barrier: Callable[[], None], wait: Callable[[], None]
) -> Exposure:
    """Profile one step on this rank's GPU; a collective over the ranks of `barrier`.

    Args:
        step: launches one step.
        barrier: lets the ranks go on together, through NCCL, their devices idle.
        wait: returns when this rank's device is idle.

    Raises:
        ValueError: the trace has no kernels of the step, or none of its communication.
    """

    def work() -> None:
        barrier()  # profilers start at different times on the ranks: the step starts behind this
        step()

    found = exposure(after_barrier(profiled(work, wait)))
    if not found.communication or not found.compute:
        raise ValueError(f"trace: expected a step's compute and communication, got {found}")
    return found
