"""Times of several implementations on several ranks: interleaved, begun together, the slowest's.

In: a thunk an implementation, the same ones on every rank. Out: samples in us by implementation, of
each the largest of the ranks, for a step has ended when the last rank has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import gtpgraph as gg
from bench.multi_gpu_rank import Rank

Thunk = Callable[[], Any]
WARM_UP = 2  # rounds that are not counted


def slowest(at: Rank, samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Sample by sample the largest of the ranks; each rank has the same labels and counts."""
    everyone = at.collect(dict(samples))
    return {
        label: [max(column) for column in zip(*(one[label] for one in everyone), strict=True)]
        for label in samples
    }


def interleaved(
    at: Rank, groups: gg.ProcessGroups, thunks: Mapping[str, Thunk], calls: int
) -> dict[str, list[float]]:
    """us a call by implementation, ``at.repeats`` samples of `calls` calls each, in turns.

    A collective over ``groups.model``, whose ranks begin each sample together, devices idle.
    """
    samples: dict[str, list[float]] = {label: [] for label in thunks}
    order = list(thunks.items())
    for repeat in range(at.repeats + WARM_UP):
        order.append(order.pop(0))  # nobody always follows the same neighbour
        for label, thunk in order:
            at.barrier(groups)
            time_us = _time_us(at, thunk, calls)
            if repeat >= WARM_UP:
                samples[label].append(time_us / calls)
    return slowest(at, samples)


def _time_us(at: Rank, thunk: Thunk, calls: int) -> float:
    """From an idle device to the end of the work of `calls` calls."""
    if not at.on_gpu:
        start = time.perf_counter()
        for _ in range(calls):
            thunk()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        thunk()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
