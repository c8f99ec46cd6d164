"""``python bench/run.py SUITE [--out FILE] [--only CASE]``: measure a suite, print and append rows.

A suite is a function (Run, options) -> number of failed cases in SUITES; its rows go to
bench/results/SUITE.jsonl. ``multi_gpu`` needs torchrun and two GPUs or more.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: for bench.*, and gtpgraph in a bare checkout

from bench import harness  # noqa: E402

Rows = list[dict[str, Any]]


def kernels(run: harness.Run, options: argparse.Namespace) -> int:
    """Kernels beside their peers; returns how many cases failed."""
    from bench import kernels as suite
    from bench import symmetric

    failed = 0
    for make in suite.cases(options.configs):
        try:
            case = make()
            if options.only and options.only not in case.name:
                continue
            case.check()
            rows = run.rows(case, harness.measure(case, options.repeats))
        except Exception:  # one broken case must not cost the others their run
            traceback.print_exc()
            failed += 1
            continue
        harness.append(rows, options.out)
        harness.print_table(case, rows)
    if not options.only or options.only in symmetric.NAME:
        harness.append(symmetric.measure(run, options.repeats), options.out)
    return failed


CASES = (("gpt-124m", 1, 512), ("gpt-124m", 8, 1024), ("gpt-1.3b", 2, 2048))


def steps(run: harness.Run, options: argparse.Namespace) -> int:
    """Whole steps beside their peers."""
    from bench import steps as suite

    for name, batch, seq in CASES:
        if not options.only or options.only in f"{name}:{batch}x{seq}":
            harness.append(suite.measure(run, name, batch, seq, options.repeats), options.out)
    return 0


def overlap(run: harness.Run, options: argparse.Namespace) -> int:
    """What each dispatch exposes of the transfers."""
    from bench import overlap as suite

    harness.append(suite.overlap(run, options.repeats), options.out)
    return 0


def host(run: harness.Run, options: argparse.Namespace) -> int:
    """Host cost of a replayed step."""
    from bench import host as suite

    harness.append(suite.host(run, options.repeats), options.out)
    return 0


def memory(run: harness.Run, options: argparse.Namespace) -> int:
    """Peak memory, ten thousand replays, and the kernels that handle gradients."""
    from bench import memory as suite

    for part in (suite.memory, suite.soak, suite.gradient_kernels):
        if options.only in part.__name__:
            harness.append(part(run), options.out)
    return 0


def compile_time(run: harness.Run, options: argparse.Namespace) -> int:
    """Our passes' share of a compilation; on the CPU too."""
    from bench import compile_time as suite

    harness.append(suite.measure(run), options.out)
    return 0


def multi_gpu(run: harness.Run, options: argparse.Namespace) -> int:
    """Real ranks over NCCL, under torchrun; returns how many jobs failed."""
    from bench import multi_gpu as suite

    return suite.multi_gpu(run, options)


SUITES: dict[str, Callable[[harness.Run, argparse.Namespace], int]] = {
    "kernels": kernels,
    "steps": steps,
    "overlap": overlap,
    "host": host,
    "compile": compile_time,
    "memory": memory,
    "multi_gpu": multi_gpu,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, help="default bench/results/SUITE.jsonl")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--configs", action="store_true", help="also every GEMM configuration")
    only = parser.add_argument_group("multi_gpu alone")
    only.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    only.add_argument("--limit", type=float, default=600.0, help="seconds a job (600)")
    options = parser.parse_args()
    if options.device == "cpu" and options.suite != "multi_gpu":
        parser.error("--device cpu: expected suite multi_gpu, the only one that has it")
    if options.out is None and options.device == "cuda":
        options.out = ROOT / "bench" / "results" / f"{options.suite}.jsonl"
    return 1 if SUITES[options.suite](harness.Run.start(options.suite), options) else 0


if __name__ == "__main__":
    sys.exit(main())
