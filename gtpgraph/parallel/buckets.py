"""Buckets: flat main_grad buffers, and their reduction over a data-parallel group.

In: the trainable weights of a model with the group each one reduces over. Out: `Bucket` objects in
reverse parameter order (the order in which a backward finishes them), each one flat buffer whose
views are the weights' main_grads. Layout of one bucket, in elements::

    | w0 | pad | w1 | pad | ... | tail |      every weight starts on ALIGN; the whole is a multiple
    |<- rank 0 ->|<- rank 1 ->| ...           of ALIGN x ranks, so that every slice is aligned too

Padding is zero when it is made and never written, so it stays zero in every collective and norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtpgraph import compat
from gtpgraph.kernels.ops import accumulate

ALIGN = 64  # elements: 256 bytes of fp32, the widest vector access and NCCL's alignment


@dataclass(frozen=True)
class GroupSide:
    """One data-parallel group as a bucket needs it; `group` None is the group of one process."""

    axis: str
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Member:
    """A weight's place: `slot` in its bucket, `offset` and `numel` in elements of the flat."""

    index: int
    slot: int
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class Bucket:
    """One flat buffer [numel] of main_grads that is reduced in one collective.

    `filled[slot]` says whether the weight has a contribution in this step: the first one stores,
    later ones add, and a weight without one is zeroed before the bucket leaves.
    """

    number: int
    side: GroupSide
    flat: Tensor
    members: tuple[Member, ...]
    wire_dtype: torch.dtype
    reduce: str
    is_expert: bool = False
    filled: list[bool] = field(default_factory=list)
    _work: dist.Work | None = None
    _wire: Tensor | None = None
    _keep: Tensor | None = None
    zeros: Tensor = field(init=False)
    ones: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.filled = [False] * len(self.members)
        self.zeros = torch.zeros(len(self.members), device=self.flat.device)
        self.ones = torch.ones(len(self.members), device=self.flat.device)

    @property
    def own(self) -> slice:
        """The slice of the flat buffer that this rank owns after the reduction."""
        if self.reduce == "all_reduce" or self.side.size == 1:
            return slice(0, self.flat.numel())
        length = self.flat.numel() // self.side.size
        rank = dist.get_rank(self.side.group)
        return slice(rank * length, (rank + 1) * length)

    def view(self, member: Member) -> Tensor:
        """A weight's main_grad, a view of its (padded) local shape."""
        return self.flat[member.offset : member.offset + member.numel].view(member.shape)

    def add(self, member: Member, wgrad: Tensor, scale: float) -> None:
        """Finalise one eager contribution: ``main = beta * main + scale * wgrad``."""
        first = not self.filled[member.slot]
        accumulate(self.flat, wgrad, self.zeros, member.slot, member.offset, scale, first)
        self.filled[member.slot] = True

    def beta(self) -> Tensor:
        """float32 [members]: 0 where a region's first contribution must store, 1 where it adds."""
        if all(self.filled):
            return self.ones
        if not any(self.filled):
            return self.zeros
        return torch.tensor([float(f) for f in self.filled], device=self.flat.device)

    def start_reduce(self) -> None:
        """Zero what has no contribution and launch the bucket's reduction, a sum."""
        for member in self.members:
            if not self.filled[member.slot]:
                self.view(member).zero_()
        if self.side.size == 1:
            return
        cast = self.wire_dtype != self.flat.dtype
        send = self.flat.to(self.wire_dtype) if cast else self.flat
        group = self.side.group
        if self.reduce == "all_reduce":
            self._work = dist.all_reduce(send, group=group, async_op=True)
            self._wire = send if cast else None
            return
        out = send.new_empty(send.numel() // self.side.size) if cast else send[self.own]
        self._work = compat.reduce_scatter(out, send, group=group, async_op=True)
        self._wire = out if cast else None
        self._keep = send  # the collective reads it until the wait

    def wait_reduce(self) -> None:
        """Wait for the reduction; afterwards the owned slice holds the sum."""
        if self._work is not None:
            self._work.wait()
        if self._wire is not None:
            self.flat[self.own].copy_(self._wire)
        self._work = self._wire = self._keep = None

    def whole(self) -> Tensor:
        """The reduced flat buffer [numel] of all ranks; a collective unless it is here already."""
        if self.reduce == "all_reduce" or self.side.size == 1:
            return self.flat
        out = torch.empty_like(self.flat)
        own = self.flat[self.own].contiguous()
        compat.all_gather(out, own, group=self.side.group)
        return out


@dataclass(frozen=True)
class BucketKey:
    """Weights share a bucket only when all of these agree."""

    side: GroupSide
    is_expert: bool
    grad_dtype: torch.dtype
    device: torch.device


def build_buckets(
    weights: Sequence[tuple[nn.Parameter, BucketKey]],
    *,
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
    reduce: str,
) -> list[Bucket]:
    """Cut the weights, last one first, into buckets of about `bucket_bytes` each.

    A weight's index is its position in `weights`. A weight larger than `bucket_bytes` has a bucket
    to itself. Allocates one zeroed flat buffer per bucket.
    """
    open_runs: dict[BucketKey, list[int]] = {}
    runs: list[tuple[BucketKey, list[int]]] = []
    for index in reversed(range(len(weights))):
        param, key = weights[index]
        run = open_runs.get(key)
        itemsize = key.grad_dtype.itemsize
        held = sum(_aligned(weights[i][0].numel()) for i in run) * itemsize if run else 0
        if run is None or held + param.numel() * itemsize > bucket_bytes:
            run = open_runs[key] = []
            runs.append((key, run))
        run.append(index)
    return [
        _build(number, key, run, weights, wire_dtype or key.grad_dtype, reduce)
        for number, (key, run) in enumerate(runs)
    ]


def _build(
    number: int,
    key: BucketKey,
    run: Iterable[int],
    weights: Sequence[tuple[nn.Parameter, BucketKey]],
    wire_dtype: torch.dtype,
    reduce: str,
) -> Bucket:
    members, offset = [], 0
    for slot, index in enumerate(run):
        param = weights[index][0]
        members.append(Member(index, slot, offset, param.numel(), tuple(param.shape)))
        offset += _aligned(param.numel())
    step = ALIGN * key.side.size
    numel = -(-offset // step) * step
    flat = torch.zeros(numel, dtype=key.grad_dtype, device=key.device)
    return Bucket(number, key.side, flat, tuple(members), wire_dtype, reduce, key.is_expert)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
