"""Jobs of several ranks, each isolated: an error, a hang or a crash in one costs only that one.

In: a list of `Job`, the same on every rank of torchrun. Out: the names of those that failed, the
same on every rank; the rows of the others, appended on rank 0. Each rank of torchrun runs a
`Supervisor`, which starts one process a job and runs nothing on a GPU itself:

    supervisor of rank r --starts--> rank r of job k          store: k/failed, k/end/r
                         --watches-> it, and whether another rank has failed
                         --ends----> it, at the time limit or soon after another's failure
    all: read every rank's end, agree on the job's outcome, go on with job k + 1
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench import harness

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1
GRACE_S = 5.0  # after one rank failed, how long the others may still report their own failure
STACKS_S = 1.0  # for a signal handler to write them
TAIL = 6000  # characters of a failed rank's output that are shown
ENVIRONMENT = {
    # NVLink multicast stays off: on a machine whose GPUs others share it can take all of them down.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # A profiler that is taken down and set up again has crashed beside CUDA graphs.
    "TEARDOWN_CUPTI": "0",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        name: as it is printed and chosen by ``--only``.
        target: "module:function", called as ``function(rank, **arguments)`` on each of its ranks
            (see `bench.multi_gpu_rank.Rank`).
        ranks: the first so many ranks of torchrun take part; the others wait.
        arguments: of the function, as JSON holds them.
    """

    name: str
    target: str
    ranks: int
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all jobs of a run share.

    Attributes:
        run: what all rows share.
        device: "cuda" or "cpu".
        repeats: samples of each measurement.
        limit_s: longest time of one job, in seconds.
        out: JSONL file that the rows of right jobs are appended to; None for none.
    """

    run: harness.Run
    device: str
    repeats: int
    limit_s: float
    out: Path | None


class Supervisor:
    """One rank of torchrun. `store` is the job's, `rank` and `world` torchrun's."""

    def __init__(self, store: dist.Store, rank: int, world: int, settings: Settings) -> None:
        self.rank, self.world, self.settings = rank, world, settings
        # torchrun may keep one store over restarts, with the keys of the attempt before.
        self._prefix = f"multi_gpu/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(f"{self._prefix}/supervisor", store)
        self._patience = timedelta(seconds=settings.limit_s + 120)

    def run(self, jobs: Sequence[Job]) -> list[str]:
        """Run the jobs one after the other.

        Returns:
            The names of those that failed on any rank.

        Raises:
            dist.DistStoreError: another supervisor is gone.
        """
        failed = []
        for number, job in enumerate(jobs):
            self._say(f"== {job.name}: {job.ranks} rank(s)")
            with tempfile.TemporaryDirectory(prefix="gtpgraph-multi-gpu-") as folder:
                if self.rank < job.ranks:
                    self._post(number, self._attempt(number, job, Path(folder)))
                ends = self._ends(number, job)
                bad = {r: end for r, end in enumerate(ends) if end["why"]}
                if bad:
                    failed.append(job.name)
                    self._say(_story(job, bad))
                elif self.rank == 0 and self.settings.out is not None:
                    self._keep(Path(folder))
        self._leave()
        return failed

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    # -- one process -----------------------------------------------------------------------------

    def _attempt(self, number: int, job: Job, folder: Path) -> dict[str, str]:
        """This rank's part of a job: why it failed ("" where it did not) and its last words."""
        log = folder / "log.txt"
        with log.open("w") as file:
            child = self._start(number, job, folder, file)
            try:
                why = self._watch(number, child)
            finally:
                child.kill()  # harmless when it has ended by itself
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
        if why:
            self._store.add(f"{number}/failed", 1)
        return {"why": why, "tail": log.read_text(errors="replace")[-TAIL:] if why else ""}

    def _start(self, number: int, job: Job, folder: Path, log: Any) -> subprocess.Popen[bytes]:
        settings = self.settings
        order = {
            "target": job.target, "arguments": job.arguments, "device": settings.device,
            "repeats": settings.repeats, "limit_s": settings.limit_s,
            "prefix": f"{self._prefix}/job/{number}", "run": dataclasses.asdict(settings.run),
            "rows": str(folder / "rows.jsonl"),
        }  # fmt: skip
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        env |= {"RANK": str(self.rank), "WORLD_SIZE": str(job.ranks)}
        return subprocess.Popen(
            [sys.executable, "-m", "bench.multi_gpu_rank", json.dumps(order)],
            stdin=subprocess.PIPE,  # its end tells the process that this one is gone
            stdout=None if self.rank == 0 else log,
            stderr=log,
            env=env,
        )

    def _watch(self, number: int, child: subprocess.Popen[bytes]) -> str:
        """Wait for a process; why it counts as failed, or ""."""
        deadline = time.monotonic() + self.settings.limit_s
        stop = None  # when to end it because of another rank
        while (status := child.poll()) is None:
            now = time.monotonic()
            if now > deadline:
                child.send_signal(signal.SIGUSR1)
                time.sleep(STACKS_S)
                return f"not finished after {self.settings.limit_s:g} s (its stacks are below)"
            if stop is None and self._store.add(f"{number}/failed", 0) > 0:
                stop = now + GRACE_S
            if stop is not None and now > stop:
                return "ended, because another rank failed"
            time.sleep(POLL_S)
        return "" if status == 0 else f"exit status {status}"

    # -- agreement -------------------------------------------------------------------------------

    def _post(self, number: int, end: dict[str, str]) -> None:
        self._store.set(f"{number}/end/{self.rank}", json.dumps(end))

    def _ends(self, number: int, job: Job) -> list[dict[str, str]]:
        """How the job ended on each of its ranks; the same on every rank of torchrun."""
        keys = [f"{number}/end/{rank}" for rank in range(job.ranks)]
        self._store.wait(keys, self._patience)
        return [json.loads(self._store.get(key)) for key in keys]

    def _keep(self, folder: Path) -> None:
        """Append what rank 0 of a right job wrote."""
        assert self.settings.out is not None
        lines = (folder / "rows.jsonl").read_text().splitlines()
        harness.append([json.loads(line) for line in lines], self.settings.out)

    def _leave(self) -> None:
        """Rank 0 goes last: the store may live in its process."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"left/{rank}" for rank in range(self.world)], self._patience)


def _story(job: Job, bad: dict[int, dict[str, str]]) -> str:
    """What went wrong: a line a rank, then the output of those that failed by themselves."""
    lines = [f"FAILED {job.name}"]
    lines += [f"    rank {rank}: {end['why']}" for rank, end in bad.items()]
    for rank, end in bad.items():
        if not end["why"].startswith("ended"):
            lines.append(f"--- rank {rank}\n{end['tail']}")
    return "\n".join(lines)
