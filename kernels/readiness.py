"""The explicit readiness ops of a captured backward graph.

In: a bucket's flat buffer, the number of a site (or bucket) in the region that is running, and the
token of the op that must come before. Out: a new token. No op computes anything: two call the
region that is running on this thread, which knows what the number stands for::

    wgrad -> accumulate(flat, ...) -> token -> grad_ready(flat, site, token) -> token -> ...

A third op, ``hold``, marks how long the operands of accumulates must last that run on a branch of a
captured graph (``beside``); it has a use for them, and does nothing else outside a capture.

Why ``Tensor(a!) flat`` although nothing is written: a schema that mutates keeps the op through dead
code elimination, and chains it behind every accumulate of the same bucket. Why a token is returned:
readiness ops of different buckets share no data, so only a data dependency pins their order under
Inductor (control dependencies exist on newer releases only, and refuse ops that return nothing).
Why no region number: it would make equal graphs differ, and caches miss, from process to process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gtpgraph.kernels.beside import current_branch

_LIB = torch.library.Library("gtpgraph", "FRAGMENT")
_LIB.define("grad_ready(Tensor(a!) flat, int site, Tensor after) -> Tensor")
_LIB.define("bucket_reduce(Tensor(a!) flat, int bucket, Tensor after) -> Tensor")
_LIB.define("hold(Tensor(a!) flat, Tensor[] held, int behind, Tensor after) -> Tensor")


class Recorder(Protocol):
    """What a region offers to the ops of its own graph while it runs."""

    def grad_ready(self, site: int) -> None:
        """The contribution of `site` stands in main_grad."""

    def bucket_reduce(self, bucket: int) -> None:
        """All contributions of `bucket` stand in its flat buffer: start its reduction."""


class _Running(threading.local):
    """Autograd runs backward graphs on its device threads: one recorder stack for each."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_running = _Running()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Send the readiness ops that this thread runs inside the block to `recorder`."""
    _running.recorders.append(recorder)
    try:
        yield
    finally:
        _running.recorders.pop()


def _recorder(op: str, number: int) -> Recorder:
    if not _running.recorders:
        raise RuntimeError(
            f"gtpgraph::{op}({number}) ran outside a region: expected a backward graph launched by "
            "the region that it was compiled for, got a direct call. Call the compiled module and "
            "its loss's backward() instead of running the graph by itself."
        )
    return _running.recorders[-1]


def _grad_ready(flat: Tensor, site: int, after: Tensor) -> Tensor:
    _recorder("grad_ready", site).grad_ready(site)
    return token(flat)


def _bucket_reduce(flat: Tensor, bucket: int, after: Tensor) -> Tensor:
    _recorder("bucket_reduce", bucket).bucket_reduce(bucket)
    return token(flat)


def _hold(flat: Tensor, held: Sequence[Tensor], behind: int, after: Tensor) -> Tensor:
    branch = current_branch()
    if branch is not None:
        branch.settle(behind)
    return token(flat)


def token(like: Tensor) -> Tensor:
    """An ordering token: uint8, shape [1], on the device of `like`, contents meaningless."""
    return torch.empty(1, dtype=torch.uint8, device=like.device)


def _fake(flat: Tensor, number: int, after: Tensor) -> Tensor:
    return token(flat)


def _hold_fake(flat: Tensor, held: Sequence[Tensor], behind: int, after: Tensor) -> Tensor:
    return token(flat)


_LIB.impl("grad_ready", _grad_ready, "CompositeExplicitAutograd")
_LIB.impl("bucket_reduce", _bucket_reduce, "CompositeExplicitAutograd")
torch.library.register_fake("gtpgraph::grad_ready", _fake)
torch.library.register_fake("gtpgraph::bucket_reduce", _fake)
_LIB.impl("hold", _hold, "CompositeExplicitAutograd")
torch.library.register_fake("gtpgraph::hold", _hold_fake)
