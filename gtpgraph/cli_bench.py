"""``gtpgraph bench``: eager and compiled steps of one model, interleaved.

In: a job, modes, a number of steps. Out: benchmark rows (the schema of bench/results) as a table or
one JSON object a line. A step is zero_grad_buffer, forward, backward and finish_grad_sync; a sample
is the slowest rank's. Before anything is timed, the modes' gradients are compared.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtpgraph.cli_launch import Job, is_first_rank, launch
from gtpgraph.cli_progress import Bar
from gtpgraph.config import JobConfig
from gtpgraph.graph.assemble import versions
from gtpgraph.models import MODELS
from gtpgraph.report import human_bytes, table
from gtpgraph.testing import max_error

MODES = ("eager", "compiled", "captured")
IMPLS = {"eager": "eager", "compiled": "ours:compiled", "captured": "ours"}
SUITES = ("steps", "memory", "compile")
SETTLE = 2  # steps before gradients are compared: a capture replays from the third on
WARM_UP = 3  # steps of each mode that are not counted
GATE = {torch.float64: 1e-5, torch.float32: 1e-5}  # largest relative difference of a gradient
COARSE_GATE = 5e-2  # for weights of fewer bits


def run_bench(config: JobConfig, modes: str, steps: int, *, as_json: bool) -> int:
    """Time a job's steps.

    Raises:
        ValueError: an unknown mode, or one that the job's device does not have.
        RuntimeError: the modes' gradients disagree.
    """
    chosen = [m.strip() for m in modes.split(",") if m.strip()]
    if not chosen or set(chosen) - set(MODES) or steps < 1:
        raise ValueError(
            f"bench: expected --modes among {','.join(MODES)} and --steps of at least 1, got "
            f"--modes {modes!r} and --steps {steps}."
        )
    if "captured" in chosen and config.device != "cuda":
        raise ValueError(
            "bench: mode captured replays CUDA graphs: expected a CUDA device, got --device cpu. "
            "Use --modes eager,compiled."
        )
    result = launch(config, bench_on_rank, tuple(dict.fromkeys(chosen)), steps)
    if not is_first_rank(config):
        return 0
    rows = _rows(config, result)
    if as_json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(_table(config, rows, result))
    return 0


def bench_on_rank(job: Job, modes: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Samples in us by mode (the slowest rank's, step by step), and what the gate saw."""
    runs: dict[str, Callable[..., Any]] = {}
    grads: dict[str, dict[str, Tensor]] = {}
    first_us: dict[str, float] = {}
    batch = job.batch(0)
    title = f"bench {job.config.model_name}"
    total = len(modes) * (1 + WARM_UP + steps)
    with Bar(title, total, shown=job.rank == 0) as bar:
        for mode in modes:
            runs[mode] = _runner(job, mode)
            first_us[mode] = _step(job, runs[mode], batch)
            for _ in range(SETTLE):
                _step(job, runs[mode], batch)
            grads[mode] = {name: job.model.full_grad(name) for name, _ in _weights(job)}
            bar.advance()
        difference = _gate(job, grads)
        samples: dict[str, list[float]] = {mode: [] for mode in modes}
        peak: dict[str, int] = dict.fromkeys(modes, 0)
        for _ in range(WARM_UP + steps):
            for mode, run in runs.items():
                samples[mode].append(_step(job, run, batch))
                peak[mode] = max(peak[mode], _peak_bytes(job))
                bar.advance()
    slowest = {m: [max(s) for s in zip(*job.collect(v), strict=True)] for m, v in samples.items()}
    return {
        "samples": {mode: values[WARM_UP:] for mode, values in slowest.items()},
        "first_us": {mode: max(job.collect(value)) for mode, value in first_us.items()},
        "peak_bytes": {mode: max(job.collect(value)) for mode, value in peak.items()},
        "difference": difference,
        "shapes": [list(x.shape) for x in batch if isinstance(x, Tensor)],
    }


def _runner(job: Job, mode: str) -> Callable[..., Any]:
    if mode == "eager":
        return job.model
    return job.compile(replay="cuda" if mode == "captured" else None)


def _step(job: Job, run: Callable[..., Any], batch: tuple[Any, ...]) -> float:
    """One step; its time in us."""
    _wait(job)
    if job.config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    job.model.zero_grad_buffer()
    job.loss(run, batch).backward()
    job.model.finish_grad_sync()
    _wait(job)
    return (time.perf_counter() - start) * 1e6


def _wait(job: Job) -> None:
    if job.config.device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(job: Job) -> int:
    """Device memory of the last step at its peak; 0 on the CPU, where torch does not count."""
    return torch.cuda.max_memory_allocated() if job.config.device == "cuda" else 0


def _weights(job: Job) -> list[tuple[str, nn.Parameter]]:
    return list(job.model.named_weights())


def _gate(job: Job, grads: dict[str, dict[str, Tensor]]) -> float | None:
    """The largest relative difference of a gradient between the modes; None for one mode.

    Raises:
        RuntimeError: it is larger than the dtype of the weights explains.
    """
    if len(grads) < 2:
        return None
    first, *others = grads.values()
    errors = {name: max(max_error(o[name], first[name]) for o in others) for name in first}
    worst = max(errors, key=lambda name: errors[name])
    bar = max(GATE.get(param.dtype, COARSE_GATE) for _, param in _weights(job))
    if not errors[worst] <= bar:
        raise RuntimeError(
            f"bench: expected equal gradients in modes {', '.join(grads)} (within {bar:g} "
            f"relative), got {errors[worst]:.3g} for {worst}. Turn dropout off in the factory, and "
            "look at --lowering eager; times of wrong steps mean nothing."
        )
    return errors[worst]


def _rows(config: JobConfig, result: dict[str, Any]) -> list[dict[str, Any]]:
    common = {
        "conditions": {
            "world": {"dp": config.dp, "gtp": config.gtp},
            "lowering": config.lowering,
            "step": "zero_grad_buffer, forward, backward, finish_grad_sync",
            "gradient_difference": result["difference"],
            "ranks": config.where,
            "threads": torch.get_num_threads() if config.where == "here" else 1,
        },
        "run": uuid.uuid4().hex[:12],
        "commit": _commit(),
        "versions": {**versions(), "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if config.device == "cuda" else _cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    case = f"{config.model_name}:{_shape(config, result)}"
    rows = []
    for mode, samples in result["samples"].items():
        impl = IMPLS[mode]
        first, peak = [result["first_us"][mode]], result["peak_bytes"][mode]
        rows.append(_row("steps", case, impl, "time_us", samples, common))
        rows.append(_row("compile", f"first_step:{case}", impl, "time_us", first, common))
        if peak:
            rows.append(_row("memory", case, impl, "bytes", [peak], common))
    return rows


def _shape(config: JobConfig, result: dict[str, Any]) -> str:
    """One rank's batch: batch x sequence of a built-in model, else the first tensor's shape."""
    if config.model in MODELS:
        return f"{MODELS[config.model].batch}x{MODELS[config.model].seq}"
    return "x".join(map(str, result["shapes"][0])) if result["shapes"] else "-"


def _row(
    suite: str, case: str, impl: str, metric: str, samples: Sequence[float], common: dict[str, Any]
) -> dict[str, Any]:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "suite": suite,
        "case": case,
        "impl": impl,
        "metric": metric,
        "value": round(statistics.median(ordered), 3),
        "p20": round(ordered[round(0.2 * last)], 3),
        "p80": round(ordered[round(0.8 * last)], 3),
        "n": len(ordered),
        "floor": None,
        **common,
    }


def _table(config: JobConfig, rows: list[dict[str, Any]], result: dict[str, Any]) -> str:
    cells = [
        (r["suite"], r["impl"], *(_shown(r, key) for key in ("value", "p20", "p80")), r["n"])
        for r in sorted(rows, key=lambda r: SUITES.index(r["suite"]))
    ]
    head = f"{rows[0]['case']}: dp {config.dp} x gtp {config.gtp}, lowering {config.lowering}, "
    headers = ("suite", "impl", "median", "p20", "p80", "n")
    lines = [head + str(rows[0]["device"]), table(headers, cells, right="median,p20,p80,n")]
    if result["difference"] is not None:
        lines.append(f"largest relative gradient difference: {result['difference']:.2e}")
    return "\n".join(lines)


def _shown(row: dict[str, Any], key: str) -> str:
    value = float(row[key])
    return human_bytes(value) if row["metric"] == "bytes" else f"{value / 1e3:,.2f} ms"


def _commit() -> str | None:
    """The commit of the checkout that the package lies in, None outside one."""
    if "GTPGRAPH_COMMIT" in os.environ:
        return os.environ["GTPGRAPH_COMMIT"]
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    git = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return git.stdout.strip() if git.returncode == 0 else None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
