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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtpgraph.kernels.comm import HANDLE_ATTRIBUTE
from gtpgraph.parallel.eager import EagerQueue, GradHandle
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.readiness import AutogradHook
from gtpgraph.parallel.ready import ReadyLedger, Report
from gtpgraph.parallel.reduction_symmetric import reduce_symmetrically
from gtpgraph.parallel.regather import regather_in_backward
from gtpgraph.parallel.setup import WrapperOptions, build_states, frozen_weights, resolve_groups
from gtpgraph.parallel.staging import Staging, weight_staging
from gtpgraph.parallel.status import Exchange
from gtpgraph.parallel.steps import Steps
from gtpgraph.parallel.user_buffers import UserBuffers
from gtpgraph.parallel.weights import STATE_ATTRIBUTE, WeightState

if TYPE_CHECKING:
    from gtpgraph.graph.driver import Driver
    from gtpgraph.graph.recording import Recording
    from gtpgraph.graph.region import Region


class DistributedDataParallel(Steps):
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
            AutogradHook(self, state)
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
