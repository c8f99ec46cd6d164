"""Checkpoint folders, and how the ranks tell one another that one is complete.

In: what every rank has written into ``step-N.tmp``. Out: ``step-N``, which exists only if all of it
is on disk::

    each rank   write -> store: rank r has written (its results, or an error)
    first rank  poll the store -> .metadata -> fsync -> rename -> store: done, or why not
    the others  poll for the verdict
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from gtpgraph import compat

__all__ = ["Commit", "Folders"]

_POLL_S = 0.02
_numbers: dict[tuple[int, ...], int] = {}  # checkpointers so far, by their ranks


class Folders:
    """The checkpoints in one folder; `keep` is how many complete ones stay (None: all)."""

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root = root
        self._keep = keep

    def final(self, step: int) -> Path:
        """Where the checkpoint of `step` is, if it is complete."""
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Where it is written."""
        return self.root / f"step-{step:08d}.tmp"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.root.iterdir())
        steps = (int(match[1]) for match in names if match)
        return sorted(step for step in steps if (self.final(step) / ".metadata").is_file())

    def recover(self) -> None:
        """Clear up after a job that was killed while it saved; no other may be saving here."""
        for path in sorted(self.root.glob("step-*")) if self.root.is_dir() else []:
            final = path.with_suffix("")
            if path.suffix == ".old" and not final.exists():
                path.rename(final)  # killed between two renames
            elif path.suffix in (".old", ".tmp"):
                self.discard(path)

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove a folder, if there is one."""
        if folder.exists():
            shutil.rmtree(folder)

    def publish(
        self, writer: FileSystemWriter, metadata: Any, results: list[Any], step: int
    ) -> None:
        """Complete a checkpoint that all ranks have written, and drop those that are too old."""
        writer.finish(metadata, results)
        temporary, final = self.temporary(step), self.final(step)
        _sync(temporary)
        replaced = self.root / f"{final.name}.old"
        self.discard(replaced)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _sync(self.root)
        self.discard(replaced)
        steps = self.steps()
        for old in steps[: -self._keep] if self._keep is not None else []:
            if old != step:
                self.discard(self.final(old))


def _sync(folder: Path) -> None:
    """Put a folder's entries on the disk: fsync of the files does not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Commit:
    """Agreement, off the main thread, that every rank has written; through the store alone.

    The store's client is shared with the main thread and holds a lock while it waits: so nothing
    here waits in it, it polls.
    """

    def __init__(self, ranks: Sequence[int], place: int, timeout_s: float) -> None:
        self._ranks, self._place, self._timeout_s = tuple(ranks), place, timeout_s
        count = _numbers[self._ranks] = _numbers.get(self._ranks, -1) + 1
        self._prefix = f"gtpgraph/checkpoint/{'.'.join(map(str, self._ranks))}/{count}"
        self._saves = 0

    def next(self) -> int:
        """The number of the next save, the same on all ranks."""
        self._saves += 1
        return self._saves

    def run(
        self, number: int, write: Callable[[], Any], finish: Callable[[list[Any]], None]
    ) -> None:
        """Write on this rank; on the first one `finish` with the results of all, by rank.

        Raises:
            RuntimeError: a rank failed or did not come in time; the same text on all ranks.
        """
        if len(self._ranks) == 1:
            finish([write()])
            return
        store, key = compat.default_store(), f"{self._prefix}/{number}"
        try:
            posted = (write(), "")
        except Exception as error:
            posted = (None, f"rank {self._ranks[self._place]}: {type(error).__name__}: {error}")
        store.set(f"{key}/{self._place}", base64.b64encode(pickle.dumps(posted)).decode())
        if self._place == 0:
            verdict = self._judge(store, key, finish)
            store.set(f"{key}/verdict", verdict or "ok")
        elif absent := self._await(store, [f"{key}/verdict"]):
            verdict = f"rank {self._ranks[0]} did not say within {self._timeout_s:g} s: {absent}"
        else:
            verdict = store.get(f"{key}/verdict").decode()
        if verdict not in ("", "ok"):
            raise RuntimeError(verdict)

    def _judge(self, store: dist.Store, key: str, finish: Callable[[list[Any]], None]) -> str:
        keys = [f"{key}/{place}" for place in range(len(self._ranks))]
        if absent := self._await(store, keys):
            ranks = [self._ranks[keys.index(k)] for k in absent]
            return f"expected every rank within {self._timeout_s:g} s, {ranks} did not come"
        posted = [pickle.loads(base64.b64decode(store.get(k))) for k in keys]
        if wrong := [text for _, text in posted if text]:
            return "; ".join(wrong)
        try:
            finish([results for results, _ in posted])
        except Exception as error:
            return f"rank {self._ranks[0]}: {type(error).__name__}: {error}"
        for k in keys:
            store.delete_key(k)
        return ""

    def _await(self, store: dist.Store, keys: list[str]) -> list[str]:
        """Poll until all keys are there; those that are not after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        missing = keys
        while missing := [k for k in missing if not store.check([k])]:
            if time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S)
        return []
