"""The data-parallel wrapper: main_grad buckets, readiness reports, and their reduction.

In: a (sharded) model and its process groups. Out: persistent main_grads, one reduction per bucket
that starts the moment the bucket's reports are in, and a check at the end of every step that the
reports are exactly those that are owed. One step::

    zero_grad_buffer() -> forward -> backward (contributions, reports, reductions start)
                       -> finish_grad_sync() (late buckets, status of all ranks, wait)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtpgraph import compat
from gtpgraph.kernels.comm import HANDLE_ATTRIBUTE
from gtpgraph.parallel.eager import EagerQueue, GradHandle
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.ready import ReadyLedger, Report
from gtpgraph.parallel.reduction_symmetric import reduce_symmetrically
from gtpgraph.parallel.regather import regather_in_backward
from gtpgraph.parallel.setup import WrapperOptions, build_states, frozen_weights, resolve_groups
from gtpgraph.parallel.staging import Staging, weight_staging
from gtpgraph.parallel.status import Exchange, StepFault, side_key
from gtpgraph.parallel.user_buffers import UserBuffers
from gtpgraph.parallel.weights import STATE_ATTRIBUTE, WeightState

if TYPE_CHECKING:
    from gtpgraph.graph.driver import Driver
    from gtpgraph.graph.recording import Recording
    from gtpgraph.graph.region import Region

ReadyHook = Callable[[nn.Parameter, Report], None]


class DistributedDataParallel(nn.Module):
    """Own the gradients of a model's trainable weights, and reduce them bucket by bucket.

    Args:
        module: the model, after :func:`gtpgraph.shard`. Its weights get `main_grad`.
        groups: its process groups; None means one process, and is refused under torch.distributed.
        bucket_mb: size of a bucket's buffer in MiB; a larger weight has a bucket to itself.
        grad_dtype: dtype of main_grad: torch.float32 or torch.bfloat16.
        wire_dtype: dtype on the wire of both reductions; None for grad_dtype.
        reduce: "reduce_scatter" (a rank ends up with its slice of a bucket) or "all_reduce".
        overlap: start a bucket's reduction when its reports are in; False: at the end.
        allow_unused: settle what no backward delivered with zeros instead of raising; ranks may
            then differ in what they use. Buckets leave in the order of their numbers.
        loss: "mean" (gradients are means over dp x cp x gtp) or "per_token" (sums).
        reshard_after_forward: in eager forwards, gather weights again in the backward rather than
            keep them (compiled regions have an option of the same name).
        nccl_ub: buckets in memory that NCCL allocates and registers; False, True (registered here,
            with a barrier before and after on each bucket's own group) or "manual".
        collectives: how buckets are reduced: "functional" through their process groups, or
            "symmetric" with kernels over symmetric memory of one machine's GPUs, which a CUDA graph
            can hold (making the wrapper is then a collective over each of the groups).
        timeout_s: how long a rank waits for the status of the others, in seconds.

    Raises:
        ValueError: no trainable weight, a group missing, an option out of range; nothing changed.
    """

    _gtp_is_wrapper = True  # names below it are those of the wrapped model

    def __init__(
        self,
        module: nn.Module,
        groups: ProcessGroups | None = None,
        *,
        bucket_mb: float = 32.0,
        grad_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype | None = None,
        reduce: str = "reduce_scatter",
        overlap: bool = True,
        allow_unused: bool = False,
        loss: str = "mean",
        reshard_after_forward: bool = True,
        nccl_ub: bool | str = False,
        collectives: str = "functional",
        timeout_s: float = 60.0,
    ) -> None:
        options = WrapperOptions(
            bucket_mb, grad_dtype, wire_dtype, reduce, loss, nccl_ub, collectives
        )
        options.check()
        resolved = resolve_groups(groups)
        super().__init__()
        self.module = module
        self.groups = resolved
        self.options = options
        self.allow_unused = allow_unused
        self.user_buffers = UserBuffers() if nccl_ub else None
        self.states, self.buckets = build_states(
            module, resolved, options, weakref.ref(self), self.user_buffers
        )
        self._bucket_staging: list[Staging] = []
        if collectives == "symmetric":
            self._bucket_staging = reduce_symmetrically(self.buckets)
        self._region_staging: Staging | None = None
        self.ledger = ReadyLedger(
            [(s.fqn, s.bucket.number, s.spec is not None) for s in self.states],
            len(self.buckets),
            lambda number: self.buckets[number].start_reduce(),
        )
        self.ledger.overlap = overlap
        # Ranks may use different weights then; their reductions must still match one another.
        self.ledger.ordered = allow_unused
        self.exchange = self._make_exchange(timeout_s)
        self.eager = EagerQueue(self)
        sharded = any(s.spec is not None and s.spec.group_name for s in self.states)
        self._reshard = reshard_after_forward and sharded
        self.reports: list[Report] = []
        self.bucket_reports: Counter[int] = Counter()  # of the last finished step
        self._frozen = frozen_weights(module)
        self._bucket_of = {s.fqn: s.bucket.number for s in self.states}
        self.regions: list[Region] = []
        self.order_exchanges = self._make_order_exchanges(timeout_s)
        self.agreed_orders: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self._frames: dict[int | None, list[str]] = {}
        self._sync, self._closed, self._finished = True, False, False
        self._stuck = ""  # the fault after which reductions of other ranks were never matched
        self._backwards: list[int] = []  # running ones, an outer before those inside it
        self._microbatch = -1
        self._declared = False
        self._foreign_hooks: set[int] = set()  # weights whose reports go elsewhere
        self.recording: Recording | None = None
        self._driver: Driver | None = None
        self.captured_shapes: Counter[str] = Counter()  # by region
        self._closers: list[Callable[[], None]] = []
        self._reader_hooks: list[Callable[[], None]] = []
        self._hooks = [self._attach(state) for state in self.states]
        if nccl_ub is True:
            self.manual_buffer_registration()

    def _make_exchange(self, timeout_s: float) -> Exchange | None:
        group = self.groups.model
        if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
            return None
        if dist.get_backend(group) == "fake":
            return None  # one process stands for all: nobody would answer
        ranks = self.groups.ranks("model")
        return Exchange(ranks, ranks[self.groups.rank("model")], timeout_s=timeout_s)

    def _make_order_exchanges(self, timeout_s: float) -> dict[tuple[int, ...], Exchange]:
        """One exchange for each set of ranks that shares a group of this wrapper, sorted."""
        if self.exchange is None:
            return {}
        sets = {b.side.ranks for b in self.buckets} | {
            tuple(s.spec.ranks) for s in self.states if s.spec is not None
        }
        rank = self.exchange.rank
        return {r: Exchange(r, rank, timeout_s=timeout_s) for r in sorted(sets) if len(r) > 1}

    def name_region(self, frame: tuple[int, int] | None) -> str:
        """``r0``, ``r1``, ... by frame in order of compilation; ``r0.1`` compiles it again."""
        names = self._frames.setdefault(frame[0] if frame else None, [])
        first = names[0] if names else f"r{sum(map(bool, self._frames.values()))}"
        names.append(first if not names else f"{first}.{len(names)}")
        return names[-1]

    def add_region(self, region: Region) -> None:
        """Make a compiled region known: its calls are owed from now on."""
        self.regions.append(region)
        self.ledger.declare(region.calls)

    def _attach(self, state: WeightState) -> torch.utils.hooks.RemovableHandle:
        param = state.param
        state.ready_hook = self._mark_ready
        setattr(param, STATE_ATTRIBUTE, state)
        param.main_grad = state.bucket.view(state.member)  # type: ignore[attr-defined]
        if state.spec is not None:
            setattr(param, HANDLE_ATTRIBUTE, GradHandle(self, state))
        param.grad = None
        handle: torch.utils.hooks.RemovableHandle = param.register_post_accumulate_grad_hook(
            _AutogradHook(self, state)
        )
        return handle

    # -- the module -----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward; in eager mode gathered weights are not kept for backward."""
        if torch.compiler.is_compiling() or not self._reshard:
            return self.module(*args, **kwargs)
        with regather_in_backward():
            return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's state dict: its FQNs have no prefix."""
        self.publish_weights()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's `load_state_dict`."""
        self.publish_weights()
        return self.module.load_state_dict(*args, **kwargs)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(first FQN, weight) of every weight that the wrapper owns, in parameter order."""
        return ((s.fqn, s.param) for s in self.states)

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

    # -- readiness ------------------------------------------------------------------------------

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
        if self._sync and state.ready_hook is not None:
            report = Report(state.fqn, use, region, self._microbatch)
            self.reports.append(report)
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

    # -- steps ----------------------------------------------------------------------------------

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
        wrappers = [m for m in self.modules() if isinstance(m, DistributedDataParallel)]
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

    # -- gradients ------------------------------------------------------------------------------

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the final gradients that this rank owns by `factor` (a scalar)."""
        for bucket in self.buckets:
            bucket.flat[bucket.own].mul_(factor)

    def full_grad(self, fqn: str) -> Tensor:
        """The whole gradient of a whole weight, unpadded, in grad_dtype, on every rank.

        A collective over the weight's data-parallel and GTP groups, for tests and tools.

        Raises:
            ValueError: no owned weight is called `fqn`.
        """
        state = next((s for s in self.states if fqn in s.fqns), None)
        if state is None:
            known = [s.fqn for s in self.states]
            raise ValueError(f"full_grad: expected one of {known}, got {fqn!r}.")
        member = state.member
        flat = state.bucket.whole()[member.offset : member.offset + member.numel]
        local = flat.view(member.shape)
        if state.spec is None:
            return local.clone()
        full: Tensor = torch.ops.gtpgraph.gather(local, state.spec.rows, state.spec.group_name)
        return full.clone()

    def manual_buffer_registration(self) -> list[str]:
        """Register the buckets' memory with NCCL, where ``nccl_ub="manual"`` has left it to the
        caller: at a moment that suits all ranks of each bucket's data-parallel group.

        A collective over those groups, and no others; harmless when done already.

        Returns:
            The axes of the groups that were registered, in order.

        Raises:
            ValueError: the wrapper was made without nccl_ub.
        """
        if self.user_buffers is None:
            raise ValueError(
                "DistributedDataParallel.manual_buffer_registration: expected a wrapper made with "
                "nccl_ub=True or nccl_ub='manual', got nccl_ub=False. Pass the option."
            )
        return self.user_buffers.register()

    def graph_driver(self, make: Callable[[], Driver]) -> Driver:
        """The one graph runtime (and memory pool) of this model's captured regions."""
        if self._driver is None:
            self._driver = make()
        return self._driver

    def region_staging(self) -> Staging:
        """The buffers through which compiled regions gather and reduce GTP weights; the first call
        is a collective over each GTP group (see `weight_staging`)."""
        if self._region_staging is None:
            self._region_staging = weight_staging(self.module, self.options.gtp_wire_dtype)
        return self._region_staging

    def staging_buffers(self) -> list[Tensor]:
        """The buffers of `region_staging` that exist, uint8 [bytes] each."""
        staging = self._region_staging
        return [] if staging is None else [staging[g] for g in staging.groups]

    def enter_staging(self) -> None:
        """Before work that uses the regions' staging buffers: behind the last, on any stream."""
        if self._region_staging is not None:
            self._region_staging.enter()

    def add_closer(self, closer: Callable[[], None]) -> None:
        """Call `closer` when the wrapper is closed: captured graphs go before groups do."""
        self._closers.append(closer)

    def close(self) -> None:
        """Detach from the model: hooks, handles and main_grads are removed. Idempotent."""
        if self._closed:
            return
        self.eager.discard()
        self.publish_weights()
        for closer in self._closers:
            closer()
        for bucket in () if self._stuck else self.buckets:
            bucket.wait_reduce()
        for staging in (*self._bucket_staging, self._region_staging):
            if staging is not None:
                staging.close(stuck=bool(self._stuck))
        for handle, state in zip(self._hooks, self.states, strict=True):
            handle.remove()
            for name in (STATE_ATTRIBUTE, HANDLE_ATTRIBUTE, "main_grad"):
                if hasattr(state.param, name):
                    delattr(state.param, name)
        if self.user_buffers is not None:
            self.user_buffers.close()
        self._closed = True

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

    def _state_of(self, weight: nn.Parameter) -> WeightState:
        state: WeightState | None = getattr(weight, STATE_ATTRIBUTE, None)
        if state is None or state.wrapper() is not self:
            raise ValueError(
                f"expected a trainable weight of this wrapper, got a {type(weight).__name__} of "
                f"shape {tuple(weight.shape)} without main_grad. Wrap the model that holds it."
            )
        return state


class _AutogradHook:
    """Takes what autograd accumulated for one weight; fires with `.grad` None too (ignored)."""

    def __init__(self, wrapper: DistributedDataParallel, state: WeightState) -> None:
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
