"""Run a command's work on its ranks, and turn what goes wrong there into one error.

In: a `JobConfig` and a module-level function ``fn(job, *args)``. Out: its result on rank 0 (None on
the other ranks of a torchrun job). On each rank::

    process group (none for one rank) -> model from its factory -> shard -> wrap -> fn(job, *args)

What the model's own code prints goes to stderr: stdout belongs to the command's result.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph import compat
from gtpgraph.config import JobConfig
from gtpgraph.models import load_factory
from gtpgraph.ranks import RanksError, run_ranks

TIMEOUT_S = 3600.0  # a large model's compilation on few cores takes long; a hang is rare
_EXPECTED = {e.__name__: e for e in (ValueError, RuntimeError, NotImplementedError)}


@dataclass(frozen=True)
class Job:
    """One rank of a job: its wrapped model and how to feed it."""

    config: JobConfig
    rank: int
    groups: gg.ProcessGroups | None
    model: gg.DistributedDataParallel
    make_batch: Callable[..., tuple[Any, ...]]
    loss_fn: Callable[[Any], Tensor] | None

    def batch(self, seed: int) -> tuple[Any, ...]:
        """This rank's forward arguments."""
        return self.make_batch(seed, self.rank, self.config.device)

    def loss(self, run: Callable[..., Any], batch: tuple[Any, ...]) -> Tensor:
        """The scalar loss of one forward of `run`, the model or its compiled form."""
        output = run(*batch)
        loss: Tensor = output if self.loss_fn is None else self.loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"model {self.config.model!r}: expected a scalar loss, got {got}. Return it from "
                "the forward, or give the factory a third result, loss_fn(output)."
            )
        return loss

    def compile(self, *, replay: str | None = None) -> gg.CompiledModel:
        """The model compiled as the job's options say; `replay` as in :func:`gtpgraph.compile`."""
        config = self.config
        return gg.compile(
            self.model, lowering=config.lowering, ungraphed=config.ungraphed, replay=replay
        )

    def collect(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank; a collective over the model's ranks."""
        if self.groups is None or self.groups.model is None or self.config.where == "fake":
            return [value]
        values: list[Any] = [None] * self.config.ranks
        dist.all_gather_object(values, value, group=self.groups.group("model"))
        return values


def launch(config: JobConfig, fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(job, *args)`` on every rank of the job; returns rank 0's result.

    Raises:
        ValueError, RuntimeError, NotImplementedError: what the ranks raised, their text once.
    """
    if config.where != "gloo":
        return _in_process(config, fn, args)
    try:
        return run_ranks(_gloo_rank, config.ranks, config, fn, args, timeout_s=TIMEOUT_S)[0]
    except RanksError as error:
        raise _one_error(error) from error


def is_first_rank(config: JobConfig) -> bool:
    """Whether this process is the one that prints."""
    return config.where != "torchrun" or os.environ["RANK"] == "0"


def open_job(config: JobConfig, rank: int) -> Job:
    """Build, shard and wrap the model on this rank; weights from one seed on all of them."""
    groups = None
    if config.where != "here" and (config.ranks > 1 or dist.is_initialized()):
        mesh = init_device_mesh(
            config.device, (config.dp, config.gtp), mesh_dim_names=("dp", "gtp")
        )
        groups = gg.ProcessGroups.from_mesh(mesh)
    torch.manual_seed(0)
    built = load_factory(config.model)
    sharded = gg.shard(built.model.to(config.device), groups)
    model = gg.DistributedDataParallel(sharded, groups, bucket_mb=config.bucket_mb)
    return Job(config, rank, groups, model, built.make_batch, built.loss_fn)


def _gloo_rank(
    rank: int, world: int, config: JobConfig, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return _on_rank(config, rank, fn, args)


def _in_process(config: JobConfig, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if config.where == "here":
        return _on_rank(config, 0, fn, args)
    rank = 0
    if config.where == "fake":
        compat.init_fake_process_group(config.ranks)
    else:
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _join_torchrun("nccl" if config.device == "cuda" else "gloo")
        rank = int(os.environ["RANK"])
    try:
        return _on_rank(config, rank, fn, args)
    finally:
        dist.destroy_process_group()


def _join_torchrun(backend: str) -> None:
    """Initialise the job's group, apart from what an attempt before a restart has left.

    torchrun's agent may keep one store over restarts; the addresses in it are of ranks long dead.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"gtpgraph/attempt{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _on_rank(config: JobConfig, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return fn(open_job(config, rank), *args)
        except Exception as error:
            cause = _innermost(error)
            if cause is error:
                raise
            raise cause from None


def _innermost(error: BaseException) -> BaseException:
    """What a compiler's wrapper exception holds (Dynamo's has `inner_exception`), or itself."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def _one_error(error: RanksError) -> Exception:
    """The ranks' errors as one of the expected kinds; each text once, with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(error.errors.items()):
        by_text.setdefault(text, []).append(rank)
    kinds = {text.partition(": ")[0] for text in by_text if text.partition(": ")[0] in _EXPECTED}
    if not kinds:
        return error
    raised = {t: r for t, r in by_text.items() if t.partition(": ")[0] in _EXPECTED}
    texts = [text.partition(": ")[2] for text in raised]
    if len(texts) > 1:
        texts = [f"rank {r[0]}: {t}" for t, r in zip(texts, raised.values(), strict=True)]
    kind = _EXPECTED[kinds.pop()] if len(kinds) == 1 else RuntimeError
    return kind("\n".join(texts))
