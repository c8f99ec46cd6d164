"""A step of the data-parallel wrapper: its start, its end, and agreement with the other ranks.

In: a ledger full of counts. Out: every bucket reduced and waited for, or one error with one text on
every rank of the model, and no collective left half begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gtpgraph.parallel.readiness import Readiness
from gtpgraph.parallel.status import Exchange, StepFault, side_key


class Steps(Readiness):
    """State and methods of the wrapper around a training step."""

    allow_unused: bool
    exchange: Exchange | None
    bucket_reports: Counter[int]
    _stuck: str
    _bucket_of: dict[str, int]
    _frozen: list[tuple[str, nn.Parameter]]

    def zero_grad_buffer(self) -> None:
        """Start a step: main_grads count as empty, and no memory is touched.

        Weights whose requires_grad is False now owe nothing in the step: their main_grads end as
        zeros and the optimizer leaves them alone. Set it alike on all ranks, between steps.

        Raises:
            RuntimeError: the wrapper is closed, a fault left reductions that never end, or a weight
                that was frozen when the model was wrapped is trainable now.
        """
        self.check_open("zero_grad_buffer")
        if self._stuck:
            raise RuntimeError(
                "zero_grad_buffer: expected reductions that every rank has launched, got some that "
                "others of the group never will, after this fault: "
                f"{self._stuck}\nStart the job again from its last checkpoint."
            )
        self._check_still_frozen()
        # A step that was begun and never finished: forwards of it have no backward to come.
        self.ledger.broken |= not self._finished and self._microbatch >= 0
        self.eager.discard()
        for bucket in self.buckets:
            bucket.empty()
        for state in self.states:
            state.param.grad = None
        self.ledger.start_step(s.index for s in self.states if not s.param.requires_grad)
        self.reports = []
        self._finished, self._microbatch = False, -1
        self._backwards.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The same as `zero_grad_buffer`; `.grad` of an owned weight is always None."""
        self.zero_grad_buffer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to main_grad and report nothing (all but the last microbatch).

        Wrappers inside this one are silent too.
        """
        wrappers = [m for m in self.modules() if isinstance(m, Steps)]
        before = [w._sync for w in wrappers]
        for wrapper in wrappers:
            wrapper._sync = False
        try:
            yield
        finally:
            for wrapper, sync in zip(wrappers, before, strict=True):
                wrapper._sync = sync

    def finish_grad_sync(self) -> None:
        """Reduce what is left, wait for every bucket, and check the step's reports.

        Afterwards `main_grad` is final in the slice that this rank owns, or everywhere with
        reduce="all_reduce". The ranks exchange their status through the store before anyone waits.
        A second call in one step does nothing.

        Raises:
            RuntimeError: a weight reported too seldom, captured and eager counts disagree, or
                another rank failed; the same text on every rank.
        """
        self.check_open("finish_grad_sync")
        if self._finished:
            return
        self.eager.drain()
        self.check_ranks(self.ledger.faults(allow_unused=self.allow_unused))
        for bucket in self.buckets:
            self.ledger.dispatch(bucket.number)
        for bucket in self.buckets:
            bucket.wait_reduce()
        self.bucket_reports = Counter(self._bucket_of[r.weight] for r in self.reports)
        self.ledger.close_step()
        for state in self.states:
            state.gathers = 0
        self._finished = True

    def check_ranks(self, faults: list[str]) -> None:
        """Raise RuntimeError on all ranks of the model if any has a fault."""
        self.ledger.broken = True  # until this returns
        if self.exchange is not None:
            try:
                self.exchange.step_status(faults, self._left())
            except StepFault as fault:
                self._match_reductions(fault)
                raise
            except RuntimeError as error:  # a rank did not come: what it misses cannot be known
                self._stuck = str(error) if self._left() else ""
                raise
        elif faults:
            lines = "".join(f"\n  {line}" for line in faults)
            raise RuntimeError(f"the step's reports are not what is owed:{lines}")
        self.ledger.broken = False

    def _left(self) -> dict[str, list[int]]:
        """Reductions launched over groups in this step: by side, bucket numbers in order."""
        left: dict[str, list[int]] = {}
        for number in self.ledger.left:
            side = self.buckets[number].side
            if side.size > 1:
                left.setdefault(side_key(side.ranks), []).append(number)
        return left

    def _match_reductions(self, fault: StepFault) -> None:
        """After a fault that all ranks know of: launch what others launched, and wait for it, so
        that no collective is left half begun (its result is discarded)."""
        if fault.missing is None:
            self._stuck = str(fault)
            return
        mine = {side_key(b.side.ranks) for b in self.buckets}
        for side in sorted(mine & fault.missing.keys()):
            for number in fault.missing[side]:
                self.ledger.dispatch(number)
        for bucket in self.buckets:
            bucket.wait_reduce()

    def forget_ready_counts(self) -> None:
        """Learn eager ready counts anew in the next synchronised step."""
        self.ledger.forget()

    def _check_still_frozen(self) -> None:
        thawed = [fqn for fqn, param in self._frozen if param.requires_grad]
        if thawed:
            raise RuntimeError(
                f"DistributedDataParallel: expected weights that were frozen when the model was "
                f"wrapped to stay so, got requires_grad=True for {thawed[:6]}, which have no "
                "main_grad. Wrap the model with them trainable, and freeze them afterwards: a "
                "wrapped weight may be frozen and thawed between steps."
            )

    def check_open(self, method: str) -> None:
        """Raise RuntimeError when the wrapper is closed."""
        if self._closed:
            raise RuntimeError(
                f"DistributedDataParallel.{method}: expected an open wrapper, got a closed one. "
                "Wrap the model again."
            )
