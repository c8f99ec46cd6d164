"""Run what writes main_grads beside the main line of a graph that is being captured.

In: calls of accumulating operators (those defined with ``beside=True``) inside ``beside(branch)``.
Out: the same launches on a branch of the graph. Nothing in a backward reads a main_grad, so the
wgrad GEMMs and accumulates need not stand in the chain of kernels that computes gradients of
activations: small ones fill multiprocessors that the chain leaves idle. Outside, and in steps that
are not captured, an operator runs where it is called.

What a branched operator reads must not be overwritten before it has run. The branch holds a
reference to it for so long, which is all that FX needs, and eager code that does not write over
gradients in its own backward. A compiler that plans memory itself sees the graph alone: there
``gtpgraph::hold`` uses the operands at the point from which on they may be overwritten, and makes
the main line wait there (``hold_operands_pass``).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from torch import Tensor

Launch = Callable[..., Tensor]


class Branch(Protocol):
    """A branch of the graph that is being captured."""

    def run(self, launch: Launch, args: Sequence[Any]) -> Tensor:
        """Launch behind what the main line and the branch hold so far; returns the token."""

    def settle(self, behind: int) -> None:
        """The main line waits for all launches of the branch but the last `behind`."""


class _Current(threading.local):
    """Autograd runs backward graphs on its device threads: one branch for each."""

    branch: Branch | None = None


_current = _Current()


@contextmanager
def beside(branch: Branch | None) -> Iterator[None]:
    """Send what this thread accumulates inside the block to `branch` (None: where it is called)."""
    before, _current.branch = _current.branch, branch
    try:
        yield
    finally:
        _current.branch = before


def current_branch() -> Branch | None:
    """The branch of the block that this thread is in."""
    return _current.branch


def branching(launch: Launch) -> Launch:
    """`launch` that goes to the branch of the block in which it is called."""

    @wraps(launch)
    def run(*args: Any) -> Tensor:
        branch = _current.branch
        return launch(*args) if branch is None else branch.run(launch, args)

    return run
