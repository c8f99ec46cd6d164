"""``gtpgraph compile``: what a compilation made of a model, as files to read and compare.

In: a job and a folder. Out: ``plan.json``, ``summary.txt``, and for region K in order
``backward_K.before.txt`` and ``backward_K.after.txt``, its backward graph before and after our
passes. Files are written when everything has been compiled.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import gtpgraph as gg
from gtpgraph.cli_inspect import write_file
from gtpgraph.cli_launch import Job, is_first_rank, launch
from gtpgraph.cli_progress import Bar
from gtpgraph.config import JobConfig
from gtpgraph.graph.plan import HookPlan


@dataclass(frozen=True)
class Compiled:
    """One rank's result: the plan as JSON, (before, after) of each region, seconds it took."""

    plan: str
    graphs: tuple[tuple[str, str], ...]
    compile_s: float


def run_compile(config: JobConfig, out: str) -> int:
    """Compile a job's model and write the files of rank 0 to folder `out`."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {out}: expected a folder, or none yet; got a file.")
    result = launch(config, compile_on_rank)
    if not is_first_rank(config):
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: expected a folder, got: {error.strerror}.") from error
    for name, text in _files(result).items():
        write_file(folder / name, text)
        print(folder / name)
    return 0


def compile_on_rank(job: Job) -> Compiled:
    """Compile on this rank, forward and backward; no step is run."""
    with Bar(f"compile {job.config.model_name}", 1, shown=job.rank == 0) as bar:
        start = time.perf_counter()
        compiled = job.compile()
        plan = gg.inspect(compiled, *job.batch(0))
        seconds = time.perf_counter() - start
        bar.advance()
    graphs = tuple((r.texts["before"], r.texts["after"]) for r in compiled.regions)
    return Compiled(replace(plan, model=job.config.model_name).to_json(), graphs, seconds)


def _files(result: Compiled) -> dict[str, str]:
    plan = HookPlan.from_json(result.plan)
    files = {}
    for k, (before, after) in enumerate(result.graphs):
        files[f"backward_{k}.before.txt"] = before.rstrip() + "\n"
        files[f"backward_{k}.after.txt"] = after.rstrip() + "\n"
    files["plan.json"] = plan.to_json() + "\n"
    lines = [f"compiled in {result.compile_s:.1f} s on Python {sys.version.split()[0]}"]
    for k, (before, after) in enumerate(result.graphs):
        counts = [text.count("\n    %") for text in (before, after)]
        lines.append(
            f"backward_{k}: region {plan.regions[k].name}, {counts[0]} -> {counts[1]} nodes"
        )
    files["summary.txt"] = "\n".join(lines) + f"\n\n{plan}\n"
    return files
