"""What a job of the command line is: which model, on which ranks, compiled how.

In: options as the user gave them, and the environment. Out: a frozen, picklable `JobConfig` whose
numbers fit together; everything that is wrong is one ValueError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOWERINGS = ("eager", "inductor")


@dataclass(frozen=True)
class JobConfig:
    """One job. `ranks` == `gtp` x `dp`.

    Fields:
        model: a built-in name, ``package.module:factory`` or ``file.py:factory``.
        where: "here" (this process), "gloo" (ranks started on this machine), "torchrun" (this
            process is one of them) or "fake" (this process stands for all).
        lowering, ungraphed: as in :func:`gtpgraph.compile`.
        bucket_mb: bucket size in MiB.
        device: "cpu" or "cuda".
    """

    model: str
    where: str = "here"
    ranks: int = 1
    gtp: int = 1
    dp: int = 1
    lowering: str = "inductor"
    ungraphed: tuple[str, ...] = ()
    bucket_mb: float = 32.0
    device: str = "cpu"

    @property
    def model_name(self) -> str:
        """The model as a plan names it: a factory's file without its folder."""
        where, colon, factory = self.model.rpartition(":")
        return f"{Path(where).name}:{factory}" if colon and where.endswith(".py") else self.model


def torchrun_world(environ: Mapping[str, str] | None = None) -> int | None:
    """The number of ranks that torchrun (or the like) started, None without one."""
    environ = os.environ if environ is None else environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    return int(environ["WORLD_SIZE"])


def make_config(
    model: str,
    *,
    ranks: int | None = None,
    gtp: int | None = None,
    dp: int | None = None,
    fake_world: int | None = None,
    lowering: str = "inductor",
    ungraphed: Sequence[str] = (),
    bucket_mb: float = 32.0,
    device: str | None = None,
    cuda: bool = False,
) -> JobConfig:
    """Resolve options to a job.

    Unset sizes follow from the set ones; with the number of ranks alone all of them are gtp ranks.
    `cuda` says whether there is a CUDA device, which is the default device where it can be used.

    Raises:
        ValueError: sizes that do not multiply to the number of ranks, or options that exclude each
            other; all of them in one message.
    """
    started = torchrun_world()
    problems = [
        f"--{name.replace('_', '-')}: expected a positive number, got {value}"
        for name, value in (("ranks", ranks), ("gtp", gtp), ("dp", dp), ("fake_world", fake_world))
        if value is not None and value < 1
    ]
    if fake_world is not None and ranks is not None:
        problems.append(f"--fake-world {fake_world}: expected it alone, got --ranks {ranks} too")
    if started is not None and fake_world is None and ranks not in (None, started):
        problems.append(
            f"--ranks {ranks}: expected the {started} rank(s) that torchrun started; leave it out"
        )
    if problems:
        raise ValueError("; ".join(problems) + ".")
    world, source = _world(fake_world, ranks, started)
    total, gtp, dp = _sizes(world, source, gtp, dp)
    where = _where(total, fake_world, started)
    chosen = device or ("cuda" if cuda and where in ("here", "torchrun") else "cpu")
    if chosen == "cuda" and where not in ("here", "torchrun"):
        raise ValueError(
            "--device cuda: expected one rank or torchrun, got ranks started here, which talk "
            "through gloo on the CPU. Use torchrun --nproc-per-node N --no-python gtpgraph ..."
        )
    return JobConfig(
        model, where, total, gtp, dp, lowering, tuple(ungraphed), bucket_mb, chosen
    )  # fmt: skip


def _world(
    fake_world: int | None, ranks: int | None, started: int | None
) -> tuple[int | None, str]:
    if fake_world is not None:
        return fake_world, f"--fake-world {fake_world}"
    if started is not None:
        return started, f"{started} rank(s) of torchrun"
    return ranks, f"--ranks {ranks}"


def _sizes(world: int | None, source: str, gtp: int | None, dp: int | None) -> tuple[int, int, int]:
    """(ranks, gtp, dp), with what is unset filled in."""
    if world is None:
        gtp, dp = gtp or 1, dp or 1
        return gtp * dp, gtp, dp
    given = " x ".join(f"--{n} {s}" for n, s in (("gtp", gtp), ("dp", dp)) if s is not None)
    if gtp is None:
        gtp = world // dp if dp else world
    if dp is None:
        dp = world // gtp
    if gtp * dp != world:
        raise ValueError(
            f"world size: expected gtp x dp = {world} ({source}), got {given}. Choose sizes that "
            f"multiply to {world}; one that is left out follows from the other."
        )
    return world, gtp, dp


def _where(total: int, fake_world: int | None, started: int | None) -> str:
    if fake_world is not None:
        return "fake"
    if started is not None:
        return "torchrun"
    return "here" if total == 1 else "gloo"
