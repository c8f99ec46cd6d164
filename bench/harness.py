"""How a case is measured: correctness first, then peers interleaved in one run, as graph replays.

In: a ``Case``, whose ``make`` builds one set of inputs and a thunk per implementation. Out: rows in
the project's benchmark schema, one a (case, implementation). Every implementation is captured into
a CUDA graph that walks through all input sets once (their bytes exceed the L2 cache), so that host
overhead and cache hits stay out; a sample is one replay divided by the number of sets, and the
implementations take turns sample by sample.
"""

import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Thunk = Callable[[], Any]
L2_MULTIPLE = 256 << 20  # bytes that one walk through the input sets touches at least
MAX_SETS = 48


@dataclass(frozen=True)
class Case:
    """One line of work.

    Attributes:
        name: as in the tables.
        num_bytes: bytes that must move through device memory.
        make: seed -> {implementation: thunk}, on fresh inputs; ``limit`` is the floor's stand-in.
        check: raises unless the implementations named ``ours*`` are right; run before any timing.
        num_flops: operations, 0 where memory alone matters.
        eager: implementations that are timed as plain calls too, the host's work included; their
            rows are named ``NAME:eager``.
        conditions: what else a reader must know.
    """

    name: str
    num_bytes: int
    make: Callable[[int], dict[str, Thunk]]
    check: Callable[[], None]
    num_flops: float = 0.0
    eager: tuple[str, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)


def limits(num_bytes: int) -> dict[str, Thunk]:
    """The memory's own speed: a copy that moves ``num_bytes`` (reads half, writes half), made two
    ways, by the driver's copy and by a kernel; the faster of them in a run is the floor."""
    source = torch.randn(num_bytes // 8, device="cuda")
    target = torch.empty_like(source)
    return {
        "limit": lambda: target.copy_(source),
        "limit:kernel": lambda: torch.neg(source, out=target),
    }


def capture(thunks: list[Thunk]) -> torch.cuda.CUDAGraph:
    """One graph that runs ``thunks`` in order; each is run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for thunk in thunks:
            thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for thunk in thunks:
            thunk()
    return graph


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Samples in us, by implementation."""
    sets = max(2, min(MAX_SETS, -(-L2_MULTIPLE // case.num_bytes)))
    inputs = [case.make(seed) for seed in range(sets)]
    graphs = {name: capture([made[name] for made in inputs]) for name in inputs[0]}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    order = list(graphs.items())
    for repeat in range(repeats + 3):
        order.append(order.pop(0))  # nobody always follows the same neighbour
        for name, graph in order:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 3:  # warm-up
                samples[name].append(begin.elapsed_time(end) * 1e3 / sets)
    for name in case.eager:
        samples[f"{name}:eager"] = eager_samples([made[name] for made in inputs], repeats)
    del graphs, inputs
    gc.collect()
    torch.cuda.empty_cache()
    return samples


def eager_samples(thunks: list[Thunk], repeats: int) -> list[float]:
    """Plain calls, us each: from an idle device to the end of the work."""
    samples = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        for thunk in thunks:
            torch.cuda.synchronize()
            begin.record()
            thunk()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
    return samples


def versions() -> dict[str, str]:
    """What a reader needs to repeat a run."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = "none"
    if torch.cuda.is_available():
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "driver": driver,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is measured: GTPGRAPH_COMMIT where the tree has no history, else git's."""
    if "GTPGRAPH_COMMIT" in os.environ:
        return os.environ["GTPGRAPH_COMMIT"]
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    return git.stdout.strip() if git.returncode == 0 else "unknown"


def rounded(value: float) -> float:
    """Three decimals; below one, where a relative error would vanish, four significant digits."""
    return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")


@dataclass(frozen=True)
class Run:
    """What all rows of one interleaved run share."""

    suite: str
    run: str
    common: dict[str, Any]

    @staticmethod
    def start(suite: str) -> "Run":
        common = {
            "commit": commit(),
            "versions": versions(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        return Run(suite, uuid.uuid4().hex[:12], common)

    def rows(self, case: Case, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
        """Benchmark rows of one case; the floor is the best median of ``limit*``."""
        best = [statistics.median(s) for name, s in samples.items() if name.startswith("limit")]
        floor = min(best, default=None)
        return [self.row(case.name, name, s, floor, case.conditions) for name, s in samples.items()]

    def row(
        self,
        case: str,
        impl: str,
        samples: list[float],
        floor: float | None,
        conditions: dict[str, Any],
        metric: str = "time_us",
    ) -> dict[str, Any]:
        """One row; ``samples`` in the metric's unit."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return {
            "suite": self.suite,
            "case": case,
            "impl": impl,
            "metric": metric,
            "value": rounded(statistics.median(ordered)),
            "p20": rounded(ordered[round(0.2 * last)]),
            "p80": rounded(ordered[round(0.8 * last)]),
            "n": len(ordered),
            "floor": None if floor is None else rounded(floor),
            "conditions": conditions,
            "run": self.run,
            **self.common,
        }


def append(rows: list[dict[str, Any]], path: Path) -> None:
    """Append ``rows`` to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def print_table(case: Case, rows: list[dict[str, Any]]) -> None:
    """One line an implementation: time, spread, floor over time, rate."""
    for row in sorted(rows, key=lambda r: float(r["value"])):
        time_us = row["value"]
        rate = f"{case.num_bytes / time_us / 1e6:6.2f} TB/s"
        if case.num_flops:
            rate = f"{case.num_flops / time_us / 1e6:6.0f} TFLOP/s"
        ratio = f"{row['floor'] / time_us:6.3f}" if row["floor"] else "      "
        print(
            f"{case.name:32} {row['impl']:22} {time_us:9.1f} us "
            f"[{row['p20']:.1f}, {row['p80']:.1f}]  of limit {ratio}  {rate}",
            flush=True,
        )
