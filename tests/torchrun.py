"""Run torchrun and have its ranks gone afterwards, whatever they do; test modules load it by path.

In: a script and its arguments. Out: exit status and everything that was printed. A run that takes
too long is ended, from the top down and only what it started: torchrun first, which ends its ranks;
these are told by the end of their store, and what they started by the end of a pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 20.0  # for torchrun to end its ranks


@dataclass(frozen=True)
class Finished:
    """`status` is None for a run that was ended here; `text` is stdout and stderr."""

    status: int | None
    text: str


def start(ranks: int, *arguments: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
    """torchrun with `ranks` ranks on this machine, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *arguments]
    with log.open("w") as file:  # a pipe would stay open as long as any rank has it
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env}, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run that `start` has started, if it still goes on."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the group that `start` made
        process.wait()


def torchrun(ranks: int, *arguments: str, log: Path, timeout_s: float, **env: str) -> Finished:
    """Run `arguments` (a script and its own) on `ranks` ranks for at most `timeout_s` seconds.

    What was printed is printed again, so that a failing test shows it.
    """
    process = start(ranks, *arguments, log=log, **env)
    status: int | None = None
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"ended after {timeout_s:g} s")
    finally:
        end(process)
    text = log.read_text(errors="replace")
    print(text)
    return Finished(status, text)
