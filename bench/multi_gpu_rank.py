"""``python -m bench.multi_gpu_rank ORDER``: one rank of one job of the suite ``multi_gpu``.

In: an order (JSON, see `main`) and torchrun's environment; a pipe on stdin whose end says that
whoever started this process is gone. Out: rank 0's rows in a JSONL file and status 0, or a
traceback on stderr and status 1. A job has its processes to itself: what goes wrong in one (an
error on one rank, a hang in a collective, a broken CUDA context) ends with them.

    supervisor --order--> this process --> target(rank, **arguments) --> rows
                                             | groups of NCCL (or gloo), the store for everything
                                             | that is no measured collective
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gtpgraph as gg
from bench import harness
from bench.job import job_groups

CPU_NOTE = "gloo ranks on the CPU: the code is exercised, nothing is said about GPUs"


class Rank:
    """What a target sees of the job.

    Attributes:
        rank, world: this rank and the number of ranks of the job.
        device: where the models live: this rank's CUDA device, or the CPU.
        repeats: samples of each measurement.
        rows: benchmark rows, on rank 0.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        device: torch.device,
        repeats: int,
        run: harness.Run,
        timeout_s: float,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []
        self._run = run
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._collected = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the models live on a CUDA device."""
        return self.device.type == "cuda"

    def groups(self, **axes: int) -> gg.ProcessGroups:
        """New process groups of a mesh over the job, e.g. ``groups(dp=2, gtp=2)``; a collective."""
        return job_groups(self.device.type, **axes)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def collect(self, value: Any) -> list[Any]:
        """`value` (JSON) of every rank, by rank, on every rank; through the store, no collective.

        Raises:
            dist.DistStoreError: a rank does not come in time.
        """
        self._collected += 1
        keys = [f"collect/{self._collected}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._store.wait(keys, self._timeout)
        return [json.loads(self._store.get(key)) for key in keys]

    def attempt(self, label: str, make: Callable[[], Any]) -> Any:
        """``make()``; None on every rank when it failed on any, which rank 0 says: a peer that
        cannot run a case is named, and the case goes on without it."""
        made, problem = None, ""
        try:
            made = make()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        problems = [p for p in self.collect(problem) if p]
        if not problems:
            return made
        self.say(f"{label} did not run: {problems[0]}")
        return None

    def synchronize(self) -> None:
        """Wait until the device has done what this rank launched."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def barrier(self, groups: gg.ProcessGroups) -> None:
        """Let the ranks of a model go on together, their devices idle."""
        self.synchronize()
        group = groups.model
        if isinstance(group, dist.ProcessGroup):
            ids = [self.device.index] if self.on_gpu else None
            dist.barrier(group=group, device_ids=ids)
        self.synchronize()

    def add(
        self,
        case: str,
        impl: str,
        samples: Sequence[float],
        metric: str = "time_us",
        **conditions: Any,
    ) -> dict[str, Any] | None:
        """A row of rank 0 (None on the others); `samples` in the metric's unit."""
        if self.rank != 0:
            return None
        where = {"multicast": "off"} if self.on_gpu else {"ranks": CPU_NOTE}
        known = {"gpus": self.world if self.on_gpu else 0, **where, **conditions}
        row = self._run.row(case, impl, list(samples), None, known, metric)
        self.rows.append(row)
        return row


def _join(order: dict[str, Any]) -> Rank:
    """Become a rank of the job: its store, its default process group, its device."""
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
        is_master=False, wait_for_workers=False,
    )  # fmt: skip
    # Longer than the job may take: the supervisor's limit, which shows stacks, comes first.
    timeout_s = float(order["limit_s"]) + 60
    if order["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"{order['prefix']}/groups", store), rank=number, world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    return Rank(
        dist.PrefixStore(f"{order['prefix']}/bench", store), number, world, device=device,
        repeats=order["repeats"], run=harness.Run(**order["run"]), timeout_s=timeout_s,
    )  # fmt: skip


def _work(order: dict[str, Any]) -> None:
    """Run the order's target and write rank 0's rows."""
    at = _join(order)
    module, _, name = order["target"].partition(":")
    target = getattr(importlib.import_module(module), name)
    target(at, **order["arguments"])
    at.synchronize()
    at.collect("done")  # nobody leaves while another rank still needs its answers
    if at.rank == 0:
        harness.append(at.rows, Path(order["rows"]))


def _end_with_parent() -> None:
    """Nothing is ever sent: the end of stdin is the end of the supervisor."""
    sys.stdin.buffer.read()
    os._exit(3)


def main() -> int:
    """Carry out ``sys.argv[1]``: an object with ``target`` ("module:function"), ``arguments``,
    ``device``, ``repeats``, ``limit_s``, ``prefix`` (of keys in the store), ``run`` (the fields of
    `harness.Run`) and ``rows`` (a file)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = 0
    try:
        _work(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A communicator whose peers have failed would wait for them as the interpreter takes it down.
    os._exit(status)


if __name__ == "__main__":
    # By its name: targets import this module, and must find the same `Rank`.
    importlib.import_module("bench.multi_gpu_rank").main()
