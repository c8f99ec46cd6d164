"""A small, complete trainer: ``gtpgraph train MODEL --steps N --checkpoint DIR [--resume]``.

In: a model's factory and options. Out: checkpoints and one line of metrics a step, in one folder::

    DIR/step-00000020/    a complete checkpoint     DIR/metrics.jsonl    a row for each step

One step, the same for an eager, a compiled and a captured model::

    zero_grad -> seed of (step, rank) -> forward, backward -> finalize_model_grads -> optimizer step

Everything that a step depends on is in the checkpoint or follows from the step's number, so a job
that was killed and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import glob
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gtpgraph as gg
from gtpgraph.cli_launch import Job, is_first_rank, launch
from gtpgraph.cli_progress import Bar
from gtpgraph.config import JobConfig
from gtpgraph.parallel.checkpoint import Checkpointer
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.parallel.pieces import whole_shape

__all__ = ["MODES", "TrainOptions", "run_train"]

MODES = ("eager", "compiled", "captured")
METRICS = "metrics.jsonl"
_MAX_RANKS = 4096  # seeds of (step, rank) differ up to this many ranks


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Fields:
        steps: the number of the last step; a resumed job counts those it has made.
        folder: of the checkpoints and the metrics.
        resume: go on from the newest checkpoint, if there is one.
        every: save every so many steps, and after the last one.
        mode: "eager", "compiled" or "captured" (the whole step as one CUDA graph).
        lr, weight_decay: AdamW's; weights of one dimension do not decay.
        clip: largest norm of the gradients, None for no limit.
        seed: number of the first batch.
    """

    steps: int
    folder: str
    resume: bool = False
    every: int = 100
    mode: str = "eager"
    lr: float = 3e-4
    weight_decay: float = 0.1
    clip: float | None = 1.0
    seed: int = 0

    def check(self, device: str) -> None:
        """Raise one ValueError that lists every option out of range."""
        bad = [
            f"--{name}: expected at least {least}, got {value}"
            for name, value, least in (
                ("steps", self.steps, 1), ("every", self.every, 1), ("seed", self.seed, 0)
            )
            if value < least
        ]  # fmt: skip
        if not (self.lr > 0 and math.isfinite(self.lr)):
            bad.append(f"--lr: expected a positive number, got {self.lr}")
        if self.clip is not None and not self.clip > 0:
            bad.append(f"--clip: expected a positive number, got {self.clip}")
        if self.mode == "captured" and device != "cuda":
            bad.append(f"--mode captured: expected --device cuda (a CUDA graph), got {device}")
        if bad:
            raise ValueError("train: " + "; ".join(bad) + ".")


@dataclass(frozen=True)
class Outcome:
    """What rank 0 says in the end; losses are means over the ranks, None without a step."""

    first: int
    last: int
    losses: tuple[float, float] | None
    skipped: int


def run_train(config: JobConfig, options: TrainOptions) -> int:
    """Train on the job's ranks and print a summary; 0 when it ran to the end."""
    options.check(config.device)
    outcome: Outcome | None = launch(config, train_on_rank, options)
    if is_first_rank(config) and outcome is not None:
        print(_summary(config, options, outcome))
    return 0


def _summary(config: JobConfig, options: TrainOptions, outcome: Outcome) -> str:
    where = f"checkpoint {Path(options.folder) / f'step-{outcome.last:08d}'}"
    if outcome.losses is None:
        return f"{config.model_name}: step {outcome.last} was reached already; {where}"
    first, last = outcome.losses
    skipped = f", {outcome.skipped} skipped (gradients not finite)" if outcome.skipped else ""
    return (
        f"{config.model_name}: steps {outcome.first + 1} to {outcome.last} ({options.mode}), loss "
        f"{first:.4f} to {last:.4f}{skipped}; {where}"
    )


def train_on_rank(job: Job, options: TrainOptions) -> Outcome:
    """The whole of it on one rank."""
    model = job.model
    flat = [glob.escape(s.fqn) for s in model.states if len(whole_shape(s)) < 2]
    optimizer = DistributedOptimizer(
        torch.optim.AdamW, model, lr=options.lr, weight_decay=options.weight_decay,
        no_decay=flat, clip_norm=options.clip, overlap_gather=True,
    )  # fmt: skip
    with Checkpointer(options.folder, model, optimizer) as checkpoints:
        first = _resume(checkpoints, options, is_first=job.rank == 0)
        step = _step_function(job, options)
        losses: list[float] = []
        with (
            _metrics(Path(options.folder), first, is_first=job.rank == 0) as write,
            Bar(
                f"train {job.config.model_name}", options.steps - first, shown=job.rank == 0
            ) as bar,
        ):
            for number in range(first, options.steps):
                row = _one_step(job, options, optimizer, step, number)
                write(row)
                losses.append(row["loss"])
                bar.advance(f"loss {row['loss']:.4f}")
                if (number + 1) % options.every == 0 or number + 1 == options.steps:
                    checkpoints.save(number + 1)
    ends = (losses[0], losses[-1]) if losses else None
    return Outcome(first, max(first, options.steps), ends, optimizer.skipped)


def _resume(checkpoints: Checkpointer, options: TrainOptions, *, is_first: bool) -> int:
    """The number of steps that are done already: those of the newest checkpoint."""
    if is_first:
        checkpoints.folders.recover()
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if options.resume or restarted:
        found = checkpoints.load()
    elif (newest := checkpoints.latest()) is not None:
        raise ValueError(
            f"train: expected a folder without checkpoints, or --resume, got {options.folder} with "
            f"one of step {newest}. Pass --resume to go on from it, or name another folder."
        )
    else:
        found = None
    return 0 if found is None else found[0]


def _step_function(job: Job, options: TrainOptions) -> Callable[..., Tensor]:
    """Forward and backward of one batch; the loss, detached."""
    run: Callable[..., Any] = job.model if options.mode == "eager" else job.compile()

    def step(*batch: Any) -> Tensor:
        loss = job.loss(run, batch)
        loss.backward()
        return loss.detach()

    return gg.capture(step, job.model) if options.mode == "captured" else step


def _one_step(
    job: Job,
    options: TrainOptions,
    optimizer: DistributedOptimizer,
    step: Callable[..., Tensor],
    number: int,
) -> dict[str, Any]:
    """Step `number` (from 0); its row of metrics."""
    start = time.perf_counter()
    seed = options.seed + number
    batch = job.batch(seed)
    optimizer.zero_grad()
    torch.manual_seed(seed * _MAX_RANKS + job.rank)  # dropout: as if nothing had been interrupted
    loss = step(*batch).float()
    gg.finalize_model_grads(job.model)
    updated = optimizer.step()
    return {
        "step": number + 1,
        "loss": _mean(job, loss),
        "grad_norm": optimizer.grad_norm,
        "lr": float(optimizer.param_groups[0]["lr"]),
        "updated": updated,
        "ms": round((time.perf_counter() - start) * 1e3, 3),
    }


def _mean(job: Job, loss: Tensor) -> float:
    """The mean over the ranks of the model."""
    total = loss.double().clone()
    group = job.model.groups.model
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(total, group=group)
    return float(total) / job.config.ranks


@contextmanager
def _metrics(
    folder: Path, first: int, *, is_first: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that appends a row on rank 0; rows of steps to be made again are dropped."""
    if not is_first:
        yield lambda row: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / METRICS
    old = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in old if _step_of(line) <= first]
    path.write_text("".join(f"{line}\n" for line in kept))
    with path.open("a") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        yield write


def _step_of(line: str) -> float:
    """The step of a row; infinite for one that a killed job has left half written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
