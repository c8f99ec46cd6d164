"""Run a function on several gloo ranks of this machine.

In: a module-level function ``fn(rank, world, *args)`` and picklable arguments.
Out: the list of its results, by rank; or a `RanksError` that shows every rank's traceback
or Python stack. A rank that hangs is a failure at the time limit, never a wait without end.

    parent --(call number, pickled fn and args)--> pipe of each rank
    rank:  fresh gloo group on a prefix of one TCPStore --> fn --> pickled result --> pipe
    parent: first failure or time limit --> SIGUSR1 (stack into a file) --> kill --> RanksError
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gtpgraph import by_path

GRACE_S = 2.0  # after one rank failed, how long the others may still report their own failure
STARTUP_S = 120.0  # starting a rank is dominated by importing torch


class RanksError(RuntimeError):
    """A call failed on at least one rank.

    ``errors``: rank -> ``"TypeName: message"``, or a text that starts with ``hung`` or ``died``;
    ``details``: rank -> its traceback or dumped Python stacks.
    """

    def __init__(self, title: str, errors: dict[int, str], details: dict[int, str]) -> None:
        self.errors = errors
        self.details = details
        parts = [f"--- rank {r}: {errors[r]}\n{details.get(r, '')}" for r in sorted(errors)]
        super().__init__("\n".join([title, *parts]))


def _rank_main(rank: int, world: int, port: int, pipe: Connection, stack_file: str) -> None:
    """Serve calls until the pipe closes (also when the parent dies)."""
    with open(stack_file, "w") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        pipe.send_bytes(b"")
        while True:
            try:
                call, timeout_s, payload = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            # If the parent is gone, nobody else ends a hung rank.
            faulthandler.dump_traceback_later(timeout_s + 60, exit=True, file=stacks)
            reply = _serve(rank, world, dist.PrefixStore(f"call{call}", store), timeout_s, payload)
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.flush()  # a killed process loses what it has buffered
            pipe.send_bytes(reply)


def _serve(rank: int, world: int, store: dist.Store, timeout_s: float, payload: bytes) -> bytes:
    """Run one call in a fresh default group; the reply is (ok, result or (error, traceback))."""
    try:
        # The last call's groups go only now, when every rank has finished that call.
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        timeout = timedelta(seconds=timeout_s + 30)  # the parent's watchdog comes first
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        torch.manual_seed(0)
        fn, args = by_path.loads(payload)
        return pickle.dumps((True, by_path.dumps(fn(rank, world, *args))))
    except BaseException as error:  # SystemExit and pytest's outcomes are failures here too
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps((False, (text, traceback.format_exc())))


class RankPool:
    """``world`` long-lived gloo ranks; each call gets fresh groups and a fresh store prefix.

    The ranks run with one torch thread. A call that fails or hangs ends them; the next one starts
    new ones. Use it as a context manager, or call `close`.
    """

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"RankPool: expected world >= 1, got {world}")
        self.world = world
        self._calls = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._dir = Path()
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live ranks, by rank; empty when none are started."""
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def close(self) -> None:
        """Kill the ranks that this pool started, by process id; may be called twice."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        if self._ranks:
            shutil.rmtree(self._dir, ignore_errors=True)
        self._ranks, self._store = [], None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call ``fn(rank, world, *args)`` on every rank; returns the results by rank.

        Args:
            fn: a module-level function; results and ``args`` must be picklable.
            timeout_s: seconds after which the call counts as hung.

        Raises:
            RanksError: a rank raised, died or hung; the ranks are ended.
            ValueError: ``fn`` or an argument is defined inside a function.
        """
        payload = by_path.dumps((fn, args))
        if not self._ranks:
            self._start()
        self._calls += 1
        try:
            for _, pipe in self._ranks:
                with contextlib.suppress(OSError):  # a rank that died is reported by _collect
                    pipe.send_bytes(pickle.dumps((self._calls, timeout_s, payload)))
            name = getattr(fn, "__name__", repr(fn))
            replies = self._collect(f"{name} on {self.world} ranks", timeout_s)
            return [by_path.loads(reply) for reply in replies]
        except BaseException:  # KeyboardInterrupt too: the ranks are in an unknown state
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Port 0: the system picks a free port while the server already listens on it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._dir = Path(tempfile.mkdtemp(prefix="gtpgraph-ranks-"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            fixed = (rank, self.world, self._store.port, theirs, str(self._dir / f"{rank}.txt"))
            process = context.Process(target=_rank_main, args=fixed, daemon=True)
            process.start()
            theirs.close()  # so that a dead rank reads as end of file here
            self._ranks.append((process, ours))
        try:
            self._collect(f"starting {self.world} ranks", STARTUP_S)
        except BaseException:
            self.close()
            raise

    def _collect(self, title: str, timeout_s: float) -> list[bytes]:
        """Wait for one reply of each rank; an empty reply says that the rank has started."""
        pending = set(range(self.world))
        replies: dict[int, bytes] = {}
        errors: dict[int, str] = {}
        details: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait([self._ranks[rank][1] for rank in pending], left)
            for rank in [rank for rank in pending if self._ranks[rank][1] in ready]:
                pending.remove(rank)
                ok, value = self._reply(rank)
                if ok:
                    replies[rank] = value
                    continue
                errors[rank], details[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not pending and not errors:
            return [replies[rank] for rank in range(self.world)]
        why = "failed" if errors else f"not finished after {timeout_s:g} s"
        for rank, stack in self._interrupt(sorted(pending)).items():
            errors[rank], details[rank] = "hung (its Python stacks, innermost first)", stack
        raise RanksError(f"{title}: {why}", errors, details)

    def _reply(self, rank: int) -> tuple[bool, Any]:
        """Read what a rank sent: (True, pickled result) or (False, (error, traceback))."""
        process, pipe = self._ranks[rank]
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            process.join(1)
            return False, (f"died with exit code {process.exitcode}", self._stack(rank))
        ok, value = pickle.loads(data) if data else (True, b"")
        return ok, value

    def _interrupt(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask running ranks for their Python stacks (written by a signal handler in C)."""
        for rank in ranks:
            pid = self._ranks[rank][0].pid
            if pid is not None and (self._dir / f"{rank}.txt").exists():
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(self._stack(rank) for rank in ranks):
            time.sleep(0.02)
        time.sleep(0.1)  # the last of several threads may still be being written
        return {rank: self._stack(rank) for rank in ranks}

    def _stack(self, rank: int) -> str:
        file = self._dir / f"{rank}.txt"
        return file.read_text(errors="replace") if file.exists() else ""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Start ``world`` gloo ranks, run ``fn(rank, world, *args)`` on each, end them.

    Returns the results by rank. Errors and limits as in `RankPool.run`.
    """
    with RankPool(world) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)
