"""The eager chain: reduce a contribution asynchronously, finalise it one step later, report it.

In: full wgrads from `gtpgraph::gather`'s backward (GTP weights), gradients from autograd's
accumulator (ordinary weights), and wgrads that leave a captured region (the UNGRAPHED chain).
Out: main_grad contributions and readiness reports; nothing is returned to autograd::

    wgrad i   : launch reduce i, then wait + accumulate + report i-1
    end of backward : wait + accumulate + report the last

One step of delay hides a reduction behind the computation of the next wgrad, and holds at most two
unreduced wgrads. Each contribution keeps its own storage: three heads that share a weight may all
be in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gtpgraph.kernels.comm import exchange_launch, pad_rows, reduce_launch

if TYPE_CHECKING:
    from gtpgraph.parallel.data_parallel import DistributedDataParallel
    from gtpgraph.parallel.weights import WeightState

EAGER_DEPTH = 1  # contributions in flight before the oldest is finalised


@dataclass(frozen=True)
class Pending:
    """A launched reduction: `result` is valid after `work` is waited for: [shard_rows, *rest],
    or the chunks [ranks, shard numel] of an exchange.

    `declared`: the contribution left a region, whose forward call has announced it.
    """

    state: WeightState
    use: int
    result: Tensor
    work: dist.Work | None
    declared: bool


class GradHandle:
    """What `gtpgraph::gather` calls for one GTP weight of a wrapped model (`_gtp_handle`)."""

    def __init__(self, wrapper: DistributedDataParallel, state: WeightState) -> None:
        self._wrapper = wrapper
        self._state = state

    def on_gather(self) -> int:
        """Number, from 1, of this gather among the weight's differentiated ones of the step."""
        self._state.gathers += 1
        if self._wrapper.recording is None:
            self._wrapper.ledger.gathered(self._state.index)
        return self._state.gathers

    def contribute(self, wgrad: Tensor, use: int) -> None:
        """Take the full wgrad of one use; it is reduced, finalised and reported from here on."""
        self._wrapper.enter_backward()
        self._wrapper.eager.push(self._state, wgrad, use, declared=False)


class EagerQueue:
    """Contributions of one wrapper that are being reduced, oldest first."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._pending: deque[Pending] = deque()

    def push(self, state: WeightState, wgrad: Tensor, use: int, *, declared: bool) -> None:
        """Launch the reduction of one use's wgrad (full size) and finalise older ones."""
        if torch.is_grad_enabled() and wgrad.requires_grad:
            raise NotImplementedError(
                f"{state.fqn}: expected a first-order backward, got create_graph=True; a "
                "finalised gradient leaves autograd, so it cannot be differentiated again."
            )
        result, work = launch(state, wgrad)
        self._pending.append(Pending(state, use, result, work, declared))
        while len(self._pending) > EAGER_DEPTH:
            self._finalise(self._pending.popleft())

    def drain(self) -> None:
        """Finalise everything that is left; called at the end of a backward."""
        while self._pending:
            self._finalise(self._pending.popleft())

    def forget(self) -> None:
        """Drop what an interrupted capture left: its work was never launched."""
        self._pending.clear()

    def discard(self) -> None:
        """Wait for and forget what a failed backward left behind."""
        while self._pending:
            pending = self._pending.popleft()
            if pending.work is not None:
                pending.work.wait()

    def _finalise(self, pending: Pending) -> None:
        if pending.work is not None:
            pending.work.wait()
        self._wrapper.finalise_eager(
            pending.state, pending.result, pending.use, declared=pending.declared
        )


def is_exchange(state: WeightState) -> bool:
    """Whether the reduction arrives as chunks of all ranks: a 16-bit wire, with fp32 sums."""
    sharded = state.spec is not None and bool(state.spec.group_name)
    return sharded and state.gtp_wire_dtype.itemsize < 4


def launch(state: WeightState, wgrad: Tensor) -> tuple[Tensor, dist.Work | None]:
    """Start a wgrad's GTP reduction, in the wire dtype; an ordinary weight's needs none."""
    if state.spec is None:
        return wgrad.detach(), None
    if not state.spec.group_name:
        return pad_rows(wgrad.detach(), state.spec.shard_rows), None
    wire = wgrad.to(state.gtp_wire_dtype)
    if is_exchange(state):
        return exchange_launch(wire, state.spec.shard_rows, state.spec.group_name)
    return reduce_launch(wire, state.spec.shard_rows, state.spec.group_name)
