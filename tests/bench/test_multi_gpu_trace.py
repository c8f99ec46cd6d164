"""Exposed communication of made-up intervals and traces."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import multi_gpu_trace
from bench.multi_gpu_trace import (
    Exposure,
    Interval,
    Kernel,
    after_barrier,
    exposure,
    kernels_of,
    length,
    uncovered,
    union,
)


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(1, 1), (3, 2)], []),  # empty ones
        ([(4, 6), (0, 2)], [(0, 2), (4, 6)]),
        ([(0, 2), (2, 3)], [(0, 3)]),  # they touch
        ([(0, 9), (1, 2), (8, 10), (3, 4)], [(0, 10)]),  # one inside another, several streams
    ],
)
def test_union(intervals: list[Interval], merged: list[Interval]) -> None:
    assert union(intervals) == merged
    assert length(intervals) == sum(end - start for start, end in merged)


@pytest.mark.parametrize(
    ("communication", "compute", "left"),
    [
        ([(0, 10)], [], 10),  # nothing runs beside it
        ([(2, 8)], [(0, 10)], 0),  # hidden
        ([(0, 10)], [(2, 4), (6, 7)], 7),  # compute inside it
        ([(0, 4)], [(2, 9)], 2),  # hidden at its end
        ([(5, 9)], [(2, 6)], 3),  # hidden at its start
        ([(0, 4), (2, 6)], [(5, 6)], 5),  # two collectives at once count once
        ([(0, 2), (4, 6)], [(2, 4)], 4),  # compute between them hides nothing
        ([], [(0, 5)], 0),
    ],
)
def test_uncovered(communication: list[Interval], compute: list[Interval], left: float) -> None:
    assert uncovered(communication, compute) == left


def test_uncovered_is_what_counting_points_says() -> None:
    dice = random.Random(0)
    for _ in range(200):
        both = [
            [(a, a + dice.randrange(6)) for a in dice.choices(range(40), k=dice.randrange(8))]
            for _ in range(2)
        ]
        points = [{p for a, b in side for p in range(a, b)} for side in both]
        assert uncovered(*both) == len(points[0] - points[1])


def test_exposure_tells_communication_from_compute_by_name() -> None:
    kernels = [
        Kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", 0, 6),
        Kernel("ampere_bf16_gemm", 1, 3),
        Kernel("_accumulate_kernel", 2, 4),
        Kernel("ncclDevKernel_AllGather_RING_LL", 8, 9),
    ]
    assert exposure(kernels) == Exposure(communication=7, exposed=4, compute=3)
    assert exposure([]) == Exposure(0, 0, 0)


def test_what_the_barrier_ran_beside_is_left_out() -> None:
    barrier = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 5)
    before, own = Kernel("fill", 1, 2), Kernel("gemm", 6, 8)
    later = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7, 9)
    assert after_barrier([own, later, barrier, before]) == [own, later]
    with pytest.raises(ValueError, match="expected a barrier's NCCL kernel, got 1 others"):
        after_barrier([own])


def test_a_chrome_trace_gives_its_kernels_alone() -> None:
    def event(cat: str | None, name: str, ph: str = "X") -> dict[str, Any]:
        return {"ph": ph, "cat": cat, "name": name, "ts": 10.5, "dur": 2.25, "args": {"stream": 7}}

    trace = {
        "traceEvents": [
            event("kernel", "gemm"),
            event("gpu_memcpy", "Memcpy DtoD"),
            event("gpu_user_annotation", "FSDP::all_gather"),  # spans other kernels
            event("cuda_runtime", "cudaGraphLaunch"),
            event("kernel", "flow", ph="s"),
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    }
    assert kernels_of(trace) == [Kernel("gemm", 10.5, 12.75)]


def test_a_traced_step_starts_behind_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    barrier = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 5)
    step = [Kernel("gemm", 6, 8), Kernel("ncclDevKernel_AllGather_RING_LL", 7, 10)]
    ran = [barrier, *step]

    def profiled(work: Any, wait: Any) -> list[Kernel]:
        work()
        wait()
        return ran

    monkeypatch.setattr(multi_gpu_trace, "profiled", profiled)
    hooks = [lambda name=name: calls.append(name) for name in ("step", "barrier", "wait")]
    assert multi_gpu_trace.traced(*hooks) == Exposure(communication=3, exposed=2, compute=2)
    assert calls == ["barrier", "step", "wait"]
    for missing in step:
        ran = [k for k in (barrier, *step) if k is not missing]
        with pytest.raises(ValueError, match="expected a step's compute and communication"):
            multi_gpu_trace.traced(*hooks)
