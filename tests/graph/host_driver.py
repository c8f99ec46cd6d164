"""A graph runtime for machines without a GPU: "capture" runs the work and takes its effects back,
"replay" runs it again and writes into the same outputs. What a real graph would not do, call the
readiness ops' Python, it hides: replays run under a recorder that ignores everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtpgraph.graph.recording import Recording
from gtpgraph.kernels.readiness import recording
from gtpgraph.parallel.data_parallel import DistributedDataParallel


class _Ignore:
    def grad_ready(self, site: int) -> None:
        pass

    def bucket_reduce(self, bucket: int) -> None:
        pass


class _Silent(Recording):
    def record(self, state: Any, use: int, region: str | None, *, declared: bool = True) -> None:
        self._seen.setdefault(state.bucket.number, set()).add(state.member.slot)


class HostGraph:
    def __init__(self, driver: HostDriver, work: Callable[[], Any]) -> None:
        self._driver, self._work = driver, work
        self.outputs: list[Any] = []
        self.record: Recording | None = driver.wrapper.recording
        self.replays = 0
        self.alive = True

    def replay(self) -> None:
        assert self.alive
        self.replays += 1
        for old, new in zip(self.outputs, self._driver.run(self._work, self.record), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def reset(self) -> None:
        self.alive = False


class HostDriver:
    """Keeps what a capture must not touch (main_grads, RNG state) as it was."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        self.graphs: list[HostGraph] = []

    def run(self, work: Callable[[], Any], record: Recording | None) -> list[Any]:
        if record is None:
            with recording(_Ignore()):
                return list(work())
        silent = _Silent(self.wrapper, self, record.last)
        silent.betas = record.betas
        with self.wrapper.recording_into(silent), recording(_Ignore()):
            return list(work())

    def capture(self, work: Callable[[], Any]) -> tuple[HostGraph, Any]:
        graph = HostGraph(self, work)
        flats = [b.flat.clone() for b in self.wrapper.buckets]
        with torch.random.fork_rng():
            outputs = [o.detach() if isinstance(o, Tensor) else o for o in work()]
        for bucket, flat in zip(self.wrapper.buckets, flats, strict=True):
            bucket.flat.copy_(flat)
        graph.outputs = outputs
        self.graphs.append(graph)
        return graph, outputs

    def mark(self) -> str:
        return "mark"

    def now(self) -> str:
        return "now"

    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass
