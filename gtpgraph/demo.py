"""The main job: a multi-token-prediction model, trained eager and compiled, with checks.

In: nothing but this package and the Python standard library's source files (the text that is
learned). Out: the hook plan, both runs' losses side by side, and a list of checks; status 1 if any
fails. 4 gloo ranks (gtp 2 x dp 2), tied embedding, 2 depths, fused AdamW, on each rank::

    gradients at equal weights: eager | compiled | unsharded fp64 on the concatenated batch
    then, from the same start on the same batches: 20 steps eager | 20 steps compiled
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import gtpgraph as gg
from gtpgraph.cli_launch import Job, launch, open_job
from gtpgraph.cli_progress import Bar
from gtpgraph.config import JobConfig
from gtpgraph.graph.plan import HookPlan
from gtpgraph.models import load_factory
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.report import table
from gtpgraph.testing import fp64_grads, max_error

CONFIG = JobConfig("mtp-tiny", where="gloo", ranks=4, gtp=2, dp=2, bucket_mb=0.05)
LEARNING_RATE = 3e-3
LOSS_EVERY = 4  # steps between two lines of losses

# Largest relative differences. FX runs the same kernels as eager, but autograd may add a weight's
# contributions in another order; Inductor's kernels sum in an order of their own.
BARS = {"eager": 1e-6, "inductor": 1e-5}
REFERENCE_BAR = 1e-5  # fp32 against fp64
LOSS_BAR = 1e-3  # 20 steps let rounding grow


@dataclass
class Outcome:
    """What rank 0 found; gradients' differences are (largest relative, weight)."""

    plan: str
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    wrong_steps: dict[str, list[int]] = field(default_factory=dict)
    early: dict[str, tuple[int, int]] = field(default_factory=dict)
    differences: dict[str, tuple[float, str]] = field(default_factory=dict)
    compile_s: float = 0.0


def run_demo(*, lowering: str = "inductor", steps: int = 20) -> int:
    """Run the main job and print it; 0 when every check holds, else 1."""
    if steps < 1:
        raise ValueError(f"demo: expected --steps of at least 1, got {steps}.")
    config = replace(CONFIG, lowering=lowering)
    print(
        f"{config.model}: {config.ranks} gloo ranks, gtp {config.gtp} x dp {config.dp}, "
        f"another piece of text on each rank, AdamW, lowering {lowering}",
        flush=True,
    )
    outcome: Outcome = launch(config, demo_on_rank, steps)
    print(f"\n{HookPlan.from_json(outcome.plan)}\n")
    print(_losses(outcome))
    checks = _checks(outcome, BARS[lowering])
    print("\n" + table(("check", "found", "expected", ""), [(*c[:3], _word(c[3])) for c in checks]))
    failed = [name for name, _, _, holds in checks if not holds]
    if failed:
        print(f"gtpgraph demo: {len(failed)} check(s) failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def demo_on_rank(job: Job, steps: int) -> Outcome:
    """The whole job on one rank; results that need all ranks are the same everywhere."""
    other = open_job(job.config, job.rank)  # the same model again: one for each run
    compiled = other.compile()
    with Bar("compile", 2 + 2 * steps, shown=job.rank == 0) as bar:
        start = time.perf_counter()
        plan = gg.inspect(compiled, *other.batch(0))
        outcome = Outcome(replace(plan, model=job.config.model_name).to_json())
        outcome.compile_s = time.perf_counter() - start
        bar.advance("gradients")
        _compare_gradients(job, other, compiled, plan, outcome)
        bar.advance()
        for name, run, at in (("eager", job.model, job), ("compiled", compiled, other)):
            _train(name, run, at, plan, outcome, steps, bar)
    return outcome


def _compare_gradients(
    job: Job, other: Job, compiled: gg.CompiledModel, plan: HookPlan, outcome: Outcome
) -> None:
    """Gradients of one step at equal weights: eager, compiled, and plain unsharded PyTorch."""
    _backward(job, job.model, job.batch(0))  # teaches the wrapper how often each weight reports
    eager = _gradients("eager", job, job.model, outcome)
    captured = _gradients("compiled", other, compiled, outcome)
    torch.manual_seed(0)
    built = load_factory(job.config.model)
    batches = [built.make_batch(0, rank, "cpu") for rank in range(job.config.ranks)]
    plain = fp64_grads(built.model, batches)
    outcome.differences = {
        "compiled against eager": _worst(captured, eager),
        "eager against unsharded fp64": _worst(eager, plain),
        "compiled against unsharded fp64": _worst(captured, plain),
    }


def _gradients(name: str, job: Job, run: Callable[..., Any], outcome: Outcome) -> dict[str, Tensor]:
    model = job.model
    model.zero_grad_buffer()
    job.loss(run, job.batch(0)).backward()
    outcome.early[name] = sum(model.ledger.dispatched), len(model.buckets)
    model.finish_grad_sync()
    return {fqn: model.full_grad(fqn) for fqn, _ in model.named_weights()}


def _backward(job: Job, run: Callable[..., Any], batch: tuple[Any, ...]) -> float:
    """One synchronised step up to its gradients; this rank's loss."""
    job.model.zero_grad_buffer()
    loss = job.loss(run, batch)
    loss.backward()
    job.model.finish_grad_sync()
    return loss.item()


def _train(
    name: str,
    run: Callable[..., Any],
    job: Job,
    plan: HookPlan,
    outcome: Outcome,
    steps: int,
    bar: Bar,
) -> None:
    """Train for some steps; losses are means over the ranks."""
    optimizer = DistributedOptimizer(
        torch.optim.AdamW, job.model, lr=LEARNING_RATE, no_decay=["*norm*", "*.bias"]
    )
    losses, wrong = [], []
    start = time.perf_counter()
    for step in range(steps):
        losses.append(_backward(job, run, job.batch(1 + step)))
        optimizer.step()
        if not reports_fit(name, job.model, plan):
            wrong.append(step)
        bar.advance(f"train {name}")
    outcome.seconds[name] = time.perf_counter() - start
    everyone = job.collect((losses, wrong))
    columns = zip(*(rank_losses for rank_losses, _ in everyone), strict=True)
    outcome.losses[name] = [sum(column) / len(column) for column in columns]
    outcome.wrong_steps[name] = sorted({step for _, steps in everyone for step in steps})


def reports_fit(name: str, model: gg.DistributedDataParallel, plan: HookPlan) -> bool:
    """Whether the last step's reports are the plan's: compiled in its order, eager in number."""
    counts = Counter(report.weight for report in model.reports)
    if counts != Counter(dict(plan.ready_counts)):
        return False
    if name == "eager":
        return all(report.region is None for report in model.reports)
    planned = [(r.name, o.weight, o.use) for r in plan.regions for o in r.occurrences]
    return [(r.region, r.weight, r.use) for r in model.reports if r.region] == planned


def _worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a weight's gradient, and that weight."""
    if actual.keys() != expected.keys():
        return float("inf"), ", ".join(sorted(actual.keys() ^ expected.keys()))
    return max((max_error(actual[fqn], expected[fqn]), fqn) for fqn in expected)


_Check = tuple[str, str, str, bool]


def _checks(outcome: Outcome, bar: float) -> list[_Check]:
    checks: list[_Check] = []
    for pair, (difference, weight) in outcome.differences.items():
        limit = bar if pair == "compiled against eager" else REFERENCE_BAR
        found = f"{difference:.1e} ({weight})"
        checks.append((f"gradients, {pair}", found, f"<= {limit:.0e}", difference <= limit))
    for name, wrong in outcome.wrong_steps.items():
        steps = len(outcome.losses[name])
        found = f"{steps - len(wrong)} of {steps} steps"
        checks.append((f"reports equal the plan, {name}", found, f"{steps}", not wrong))
    for name, (left, total) in outcome.early.items():
        found = f"{left} of {total} buckets"
        checks.append((f"reductions started in the backward, {name}", found, f"{total}",
                       left == total))  # fmt: skip
    eager, compiled = outcome.losses["eager"], outcome.losses["compiled"]
    gap = max(abs(a - b) / abs(a) for a, b in zip(eager, compiled, strict=True))
    checks.append(("losses, compiled against eager", f"{gap:.1e}", f"<= {LOSS_BAR:.0e}",
                   gap <= LOSS_BAR))  # fmt: skip
    learned = all(losses[-1] < losses[0] for losses in (eager, compiled)) or len(eager) == 1
    checks.append(("loss went down", f"{eager[0]:.3f} to {eager[-1]:.3f}", "less", learned))
    return checks


def _losses(outcome: Outcome) -> str:
    eager, compiled = outcome.losses["eager"], outcome.losses["compiled"]
    last = len(eager) - 1
    rows = [
        (step + 1, f"{eager[step]:.6f}", f"{compiled[step]:.6f}")
        for step in range(len(eager))
        if step % LOSS_EVERY == 0 or step == last
    ]
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
    return (
        table(("step", "loss eager", "loss compiled"), rows, right="step,loss eager,loss compiled")
        + f"\ncompiled once in {outcome.compile_s:.1f} s; {len(eager)} steps: {times}"
    )


def _word(holds: bool) -> str:
    return "ok" if holds else "FAILED"
