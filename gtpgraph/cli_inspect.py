"""``gtpgraph inspect`` and ``gtpgraph diff``: plans on screen, in files, and compared.

In: a job, or two plan files. Out: a table or JSON on stdout or in a file; status 1 on a difference.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from gtpgraph.cli_launch import Job, is_first_rank, launch
from gtpgraph.cli_progress import Bar
from gtpgraph.config import JobConfig
from gtpgraph.graph.plan import HookPlan

NAMES_SHOWN = 40  # lines of difference on screen


def run_inspect(config: JobConfig, form: str, out: str | None, against: str | None) -> int:
    """Print or write a job's plan; with `against`, compare it with a plan file (status 1)."""
    # Read before anything is built: a bad file should not cost a compilation.
    other = None if against is None else read_plan(against, model=config.model_name)
    text = launch(config, plan_on_rank)
    if not is_first_rank(config):
        return 0
    plan = HookPlan.from_json(text)
    shown = plan.to_json() if form == "json" else str(plan)
    if out is not None:
        write_file(Path(out), shown + "\n")
        print(f"wrote {out}", file=sys.stderr)
    elif other is None or form == "json":
        print(shown)
    if other is None:
        return 0
    return _print_difference(other, plan, to=sys.stderr if form == "json" else sys.stdout)


def run_diff(a: str, b: str) -> int:
    """Print how plan file `b` differs from `a`; 0 when equal, 1 when different."""
    return _print_difference(read_plan(a), read_plan(b), to=sys.stdout)


def plan_on_rank(job: Job) -> str:
    """This rank's plan as JSON, under the model's name on the command line."""
    import gtpgraph as gg

    with Bar(f"inspect {job.config.model_name}", 1, shown=job.rank == 0) as bar:
        plan = gg.inspect(job.compile(), *job.batch(0))
        bar.advance()
    return replace(plan, model=job.config.model_name).to_json()


def read_plan(path: str, *, model: str | None = None) -> HookPlan:
    """A plan file.

    Raises:
        ValueError: there is none, or it is truncated, of another schema or of another model.
    """
    try:
        return HookPlan.load(path, model=model)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ValueError(
            f"{path}: expected a plan file, got: {reason}. Write one with `gtpgraph inspect MODEL "
            "--format json --out FILE`."
        ) from error


def write_file(path: Path, text: str) -> None:
    """Write a whole file or none: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"{path}: expected a file that can be written, got: {error.strerror}."
        ) from error


def _print_difference(a: HookPlan, b: HookPlan, *, to: object) -> int:
    lines = a.diff(b)
    if not lines:
        print(f"equal: hash {a.hash}", file=to)  # type: ignore[call-overload]
        return 0
    more = [f".. and {len(lines) - NAMES_SHOWN} more"] if len(lines) > NAMES_SHOWN else []
    print("\n".join(lines[:NAMES_SHOWN] + more), file=to)  # type: ignore[call-overload]
    return 1
