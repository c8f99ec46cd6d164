"""Jobs that go wrong on one rank, some that do not, and those that one rank can do alone.

A script for torchrun; rows go to FOLDER/rows.jsonl::

    multi_gpu_jobs.py FOLDER LIMIT_S DEVICE JOB ...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import harness, multi_gpu_supervisor  # noqa: E402
from bench.multi_gpu_supervisor import Job, Settings, Supervisor  # noqa: E402


def right(at: Any, folder: str) -> None:
    """A collective, an exchange through the store, and a row."""
    groups = at.groups(dp=at.world)
    at.barrier(groups)
    total = torch.ones(1)
    if at.world > 1:
        dist.all_reduce(total, group=groups.group("dp"))
    assert at.collect(at.rank) == list(range(at.world))
    at.add("right", "ours", [float(total)], "ranks_seen")


def raises(at: Any, folder: str) -> None:
    """The last rank raises while the others wait for it in a collective."""
    groups = at.groups(dp=at.world)
    at.add("raises", "ours", [1.0])
    if at.rank == at.world - 1:
        raise ValueError("this rank's own reason")
    at.barrier(groups)


def dies(at: Any, folder: str) -> None:
    """The last rank ends without a word while the others wait for its answer."""
    if at.rank == at.world - 1:
        os._exit(7)
    at.collect("there?")


def hangs(at: Any, folder: str) -> None:
    """The last rank does nothing for ever, and says as which process."""
    (Path(folder) / f"pid{at.rank}.txt").write_text(str(os.getpid()))
    while at.rank == at.world - 1:
        time.sleep(0.1)
    at.collect("there?")


TINY = {"label": "gpt-tiny", "name": "gpt-tiny", "overrides": {}}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "alone:eager": ("readiness", {"model": "mtp-tiny", "gtp": 1, "lowering": "eager"}),
    "alone:inductor": ("readiness", {"model": "moe-tiny", "gtp": 1, "lowering": "inductor"}),
    "alone:scaling": ("scaling", TINY),
}


def job(name: str, world: int, folder: str) -> Job:
    """A part of the suite on one rank, or a function of this file on all of them."""
    if name in ALONE:
        part, arguments = ALONE[name]
        return Job(name, f"bench.multi_gpu_{part}:measure", 1, arguments)
    target, ranks = ("right", 1) if name == "alone" else (name, world)
    return Job(name, f"multi_gpu_jobs:{target}", ranks, {"folder": folder})


def main() -> int:
    """Run the jobs that the command line names; 1 on rank 0 when any failed."""
    folder, limit_s, device, names = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]
    multi_gpu_supervisor.GRACE_S = 1.0
    rank, world = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    store, _, _ = next(dist.rendezvous("env://"))
    run = harness.Run("multi_gpu", "r1", {"device": "cpu"})
    settings = Settings(run, device, 2, limit_s, Path(folder) / "rows.jsonl")
    jobs = [job(name, world, folder) for name in names]
    failed = Supervisor(store, rank, world, settings).run(jobs)
    print(f"rank {rank} agrees: {failed}", flush=True)
    return int(bool(failed)) if rank == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
