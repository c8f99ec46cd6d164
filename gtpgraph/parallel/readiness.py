"""How a contribution becomes a report: the part of the data-parallel wrapper that backwards call.

In: contributions from the eager chain, from regions and from replayed graphs. Out: main_grads that
hold them and, outside no_sync(), one report each to the weight's hook; the wrapper's own counts
them in the ledger, which starts a bucket's reduction when its counts are met.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gtpgraph import compat
from gtpgraph.parallel.buckets import Bucket
from gtpgraph.parallel.eager import EagerQueue
from gtpgraph.parallel.ready import ReadyLedger, Report
from gtpgraph.parallel.staging import Staging
from gtpgraph.parallel.weights import STATE_ATTRIBUTE, WeightState

if TYPE_CHECKING:
    from gtpgraph.graph.recording import Recording

ReadyHook = Callable[[nn.Parameter, Report], None]
# What every step sets, none of it a parameter, buffer or module: nn.Module's own way to set an
# attribute would look for these, six times a step.
_PLAIN = frozenset(
    ("_sync", "_finished", "_declared", "_microbatch", "recording", "reports", "bucket_reports")
)


class Readiness(nn.Module):
    """State and methods of the wrapper that a running backward needs."""

    states: list[WeightState]
    buckets: list[Bucket]
    ledger: ReadyLedger
    eager: EagerQueue
    reports: list[Report]
    recording: Recording | None
    _sync: bool
    _closed: bool
    _finished: bool
    _declared: bool
    _microbatch: int
    _backwards: list[int]
    _foreign_hooks: set[int]
    _reader_hooks: list[Callable[[], None]]
    _region_staging: Staging | None

    def __setattr__(self, name: str, value: Any) -> None:
        """As of nn.Module, quicker for what is set in every step."""
        if name in _PLAIN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def set_ready_hook(self, weight: nn.Parameter, hook: ReadyHook | None) -> None:
        """Send the reports of `weight` to `hook(weight, report)`, or nowhere (None).

        The wrapper's own hook counts reports and starts buckets; without it the weight still
        accumulates, is not checked, and its bucket is reduced at the end of the step.

        Raises:
            ValueError: the weight is not one of this wrapper's.
        """
        state = self._state_of(weight)
        state.ready_hook = hook
        foreign = {state.index} if hook != self._mark_ready else set()
        self._foreign_hooks = self._foreign_hooks - {state.index} | foreign
        self.ledger.watch(state.index, hook == self._mark_ready)

    @property
    def foreign_buckets(self) -> frozenset[int]:
        """Buckets with a weight whose reports go elsewhere: they leave at the end of a step."""
        return frozenset(self.states[i].bucket.number for i in self._foreign_hooks)

    @contextmanager
    def numbering_uses(self) -> Iterator[None]:
        """Inside, a weight's eager uses are numbered from 1, whatever the step has run before."""
        gathers = [state.gathers for state in self.states]
        for state in self.states:
            state.gathers = 0
        try:
            yield
        finally:
            for state, count in zip(self.states, gathers, strict=True):
                state.gathers += count

    def _mark_ready(self, weight: nn.Parameter, report: Report) -> None:
        state: WeightState = getattr(weight, STATE_ATTRIBUTE)
        self.ledger.report(state.index, captured=self._declared)

    def report(self, state: WeightState, use: int, region: str | None, *, declared: bool) -> None:
        """A contribution was finalised: tell the weight's hook, outside no_sync(), once.

        `region` is where it was finalised (None: eager Python); `declared` whether a region's
        forward call had announced it, which holds for the UNGRAPHED chain too.
        """
        if not self._sync or state.ready_hook is None:
            return
        report = Report(state.fqn, use, region, self._microbatch)
        self.reports.append(report)
        if state.index not in self._foreign_hooks:
            self.ledger.report(state.index, captured=declared)
            return
        self._declared = declared
        state.ready_hook(state.param, report)

    def finalise_eager(
        self, state: WeightState, result: Tensor, use: int, *, declared: bool
    ) -> None:
        """Add a reduced contribution from outside a graph to main_grad, then report it.

        `declared`: it left a region (the UNGRAPHED chain), whose forward call has announced it.
        """
        if self.recording is not None:
            self.recording.add(state.bucket, state.member, result, state.scale)
            self.recording.record(state, use, None, declared=declared)
            return
        if declared:
            self.ledger.settle(state.index)
        else:
            self.ledger.settle_eager(state.index, sync=self._sync)
        state.bucket.add(state.member, result, state.scale)
        self.report(state, use, None, declared=declared)

    @property
    def finished(self) -> bool:
        """Whether the step's gradients are reduced (from finish_grad_sync to zero_grad_buffer)."""
        return self._finished

    @property
    def sync(self) -> bool:
        """Whether the running backward reports (False under `no_sync`)."""
        return self._sync

    def enter_backward(self) -> None:
        """Called by whatever contributes, before it does; the first in a backward sets its end.

        Raises:
            RuntimeError: the wrapper is closed, or the step is finished and not started anew.
        """
        if self.recording is None:
            self._check_contributing()
        current = compat.backward_id()
        if current is None or current in self._backwards:
            return
        if self._backwards and self.recording is not None:
            raise NotImplementedError(
                "capture: expected one backward, got one inside another (a reentrant activation "
                "checkpoint). Use checkpoint(..., use_reentrant=False)."
            )
        self._microbatch += self.recording is None and not self._backwards
        self._backwards.append(current)
        compat.after_backward(lambda: self._end_backward(current))

    def _check_contributing(self) -> None:
        if self._closed:
            raise RuntimeError(
                "DistributedDataParallel: expected an open wrapper, got a backward after close(). "
                "Its main_grads are gone: wrap the model again."
            )
        if self._finished:
            self.ledger.broken = True  # the forward that this backward belongs to is lost
            raise RuntimeError(
                "DistributedDataParallel: expected zero_grad_buffer() before the next backward, "
                "got a backward after finish_grad_sync(): main_grads hold reduced gradients."
            )

    @contextmanager
    def recording_into(self, record: Recording) -> Iterator[None]:
        """While a graph is captured: finalisations go to `record`, and nothing else changes."""
        self.publish_weights()  # a wait or a copy must not become part of the graph
        gathers = [state.gathers for state in self.states]
        for state in self.states:
            state.gathers = 0
        self.recording = record
        try:
            with compat.refuse_reentrant_checkpoints("capture"):
                yield
        finally:
            self.recording = None
            self.eager.forget()
            self._backwards.clear()
            for state, count in zip(self.states, gathers, strict=True):
                state.gathers = count

    def enter_replay(self, record: Recording) -> None:
        """Before a whole step is replayed: a backward is about to contribute.

        Raises:
            RuntimeError: as `enter_backward`; or a bucket of the graph has left already.
        """
        self._check_contributing()
        self.publish_weights()
        self.enter_staging()
        self._microbatch += 1
        self.ledger.enter_replay(record.counts, record.calls, sync=self._sync)

    def report_replay(self, record: Recording) -> None:
        """A captured graph was launched: make its reports, in the order recorded."""
        if not self._sync:
            for occurrence in record.occurrences:
                self.ledger.settle(occurrence.state.index, declared=occurrence.declared)
            return
        if not self._foreign_hooks:
            self.reports.extend(record.reports(self._microbatch))
            self.ledger.report_replay(record.counts)
            self._check_reduced(record)
            return
        for occurrence, report in zip(
            record.occurrences, record.reports(self._microbatch), strict=True
        ):
            state = occurrence.state
            self.ledger.settle(state.index, declared=occurrence.declared)
            if state.ready_hook is not None:
                self.reports.append(report)
                self._declared = occurrence.declared
                state.ready_hook(state.param, report)
        self._check_reduced(record)

    def _check_reduced(self, record: Recording) -> None:
        early = [b for b in record.reduced if not self.ledger.dispatched[b]]
        if early:
            self.ledger.broken = True
            raise RuntimeError(
                f"buckets {early}: expected all of their reports from one captured graph, which "
                "reduces them, got a step in which others are owed too. Capture with "
                "dispatch='event', or run steps of one kind."
            )

    def _end_backward(self, ended: int) -> None:
        if ended in self._backwards:
            self._backwards.remove(ended)
        if not self._backwards:
            self.eager.drain()

    def add_reader_hook(self, hook: Callable[[], None]) -> None:
        """Call `hook` before anything reads several weights at once; see `publish_weights`."""
        self._reader_hooks.append(hook)

    def publish_weights(self) -> None:
        """Finish weight updates that are still on their way (an optimizer's overlapped gathers).

        Called before a compiled or captured forward, a state dict and `close`; call it before you
        read shards (`named_parameters`) yourself.
        """
        for hook in self._reader_hooks:
            hook()

    def enter_staging(self) -> None:
        """Before work that uses the regions' staging buffers: behind the last, on any stream."""
        if self._region_staging is not None:
            self._region_staging.enter()

    def _state_of(self, weight: nn.Parameter) -> WeightState:
        state: WeightState | None = getattr(weight, STATE_ATTRIBUTE, None)
        if state is None or state.wrapper() is not self:
            raise ValueError(
                f"expected a trainable weight of this wrapper, got a {type(weight).__name__} of "
                f"shape {tuple(weight.shape)} without main_grad. Wrap the model that holds it."
            )
        return state


class AutogradHook:
    """Takes what autograd accumulated for one weight; fires with `.grad` None too (ignored)."""

    def __init__(self, wrapper: Readiness, state: WeightState) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._state = state

    def __call__(self, param: Tensor) -> None:
        wrapper, state = self._wrapper(), self._state
        grad, param.grad = param.grad, None
        if grad is None or wrapper is None:
            return
        if state.spec is not None:
            raise RuntimeError(
                f"{state.fqn}: expected gradients through its gather alone, got one for the shard "
                "itself: the model reads the Parameter (parameters(), _parameters) in its forward. "
                "Read it as the module's attribute, or exclude it from shard()."
            )
        wrapper.enter_backward()
        wrapper.finalise_eager(state, grad, 1, declared=False)
