"""The branch of a captured graph on which accumulates run.

In: launches from the backward that is being captured. Out: the same launches on a side stream, each
behind what the main line held when it was called::

    main   ..dy1..dy2.......dy3......wait 1....dy4....wait 2 ...        wait (end of the backward)
    side      \\-> wgrad 1 -> \\-> wgrad 2 -> \\-> wgrad 3 -> ...

The main line waits for a launch only before memory that it reads may be used again: when `limit`
later ones have been launched. Until then the branch holds references to all that it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gtpgraph import compat


class CudaBranch:
    """A branch from the stream `main`, which is being captured, to the stream `side`."""

    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream, limit: int) -> None:
        self._main, self._side, self._limit = main, side, limit
        self._pending: deque[tuple[torch.cuda.Event, object]] = deque()
        self._backward: int | None = None  # at whose end the main line will wait

    def run(self, launch: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
        """Launch on the side stream; returns the token."""
        here = torch.cuda.current_stream(self._main.device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            token = launch(*args)
        if here != self._main:
            # What accumulates a parameter's gradient may have a stream of its own, with memory of
            # its own, that autograd joins when it is done.
            here.wait_stream(self._side)
            return token
        self._pending.append((self._side.record_event(), (args, token)))
        self.settle(self._limit)
        backward = compat.backward_id()
        if backward is not None and backward != self._backward:
            # Behind the backward a captured step may read main_grads as eager code does.
            self._backward = backward
            compat.after_backward(lambda: self.settle(0))
        return token

    def settle(self, behind: int) -> None:
        """The main line waits for all launches but the last `behind`."""
        event = None
        while len(self._pending) > behind:
            event, _ = self._pending.popleft()
        if event is not None:
            self._main.wait_event(event)
