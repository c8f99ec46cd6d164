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
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtpgraph import compat
from gtpgraph.kernels.ops import accumulate, shard_reduce
from gtpgraph.parallel.reduction import NoReduction, Reduction, choose_reduction
from gtpgraph.parallel.streams import Fence
from gtpgraph.parallel.user_buffers import UserBuffers

TAIL_FRACTION = 8  # the last bucket to be completed is this much smaller than the others
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


def add_contribution(
    flat: Tensor, wgrad: Tensor, beta: Tensor, member: Member, scale: float, first: bool
) -> None:
    """Add a contribution of the member's shape, or the sum of chunks [ranks, numel], to `flat`."""
    add = accumulate if wgrad.numel() == member.numel else shard_reduce
    add(flat, wgrad, beta, member.slot, member.offset, scale, first)


@dataclass(eq=False)
class Bucket:
    """One flat buffer [numel] of main_grads that is reduced in one collective.

    `filled[slot]` says whether the weight has a contribution in this step: the first one stores,
    later ones add, and a weight without one is zeroed before the bucket leaves. `zeros` and `ones`
    are float32 [members]: the betas of a bucket in which nothing, or everything, is filled.
    """

    number: int
    side: GroupSide
    flat: Tensor
    members: tuple[Member, ...]
    wire_dtype: torch.dtype
    reduce: str
    is_expert: bool = False
    reduced_in_graph: bool = False
    filled: list[bool] = field(init=False)
    zeros: Tensor = field(init=False)
    ones: Tensor = field(init=False)
    fence: Fence = field(init=False)
    reduction: Reduction = field(init=False)

    def __post_init__(self) -> None:
        self.filled = [False] * len(self.members)
        self.zeros = torch.zeros(len(self.members), device=self.flat.device)
        self.ones = torch.ones(len(self.members), device=self.flat.device)
        self.fence = Fence(self.flat.device)
        self.reduction = choose_reduction(
            self.side.group,
            self.share,
            wire=self.wire_dtype,
            everywhere=self.reduce == "all_reduce",
        )

    @property
    def share(self) -> slice:
        """The slice of the flat buffer that no other rank of the group has, in any mode."""
        if self.side.group is None:
            return slice(0, self.flat.numel())
        length = self.flat.numel() // self.side.size
        rank = dist.get_rank(self.side.group)
        return slice(rank * length, (rank + 1) * length)

    @property
    def own(self) -> slice:
        """The slice of the flat buffer that is final on this rank after the reduction."""
        return slice(0, self.flat.numel()) if self.reduce == "all_reduce" else self.share

    def view(self, member: Member) -> Tensor:
        """A weight's main_grad, a view of its (padded) local shape."""
        return self.flat[member.offset : member.offset + member.numel].view(member.shape)

    def add(self, member: Member, wgrad: Tensor, scale: float) -> None:
        """Finalise one eager contribution: ``main = beta * main + scale * wgrad``.

        `wgrad` has the weight's local shape, or is [ranks, numel]: chunks to be summed in fp32.
        """
        first = not self.filled[member.slot]
        add_contribution(self.flat, wgrad, self.zeros, member, scale, first)
        self.fill(member)

    def fill(self, member: Member) -> None:
        """The weight has a contribution, written on the current stream just now."""
        self.filled[member.slot] = True
        self.fence.wrote()

    def beta(self) -> Tensor:
        """float32 [members]: 0 where a region's first contribution must store, 1 where it adds."""
        if all(self.filled):
            return self.ones
        if not any(self.filled):
            return self.zeros
        return torch.tensor([float(f) for f in self.filled], device=self.flat.device)

    def start_reduce(self) -> None:
        """Zero what has no contribution and launch the bucket's reduction, a sum.

        On a GPU both happen on the communication stream, behind every write to the bucket.
        """
        if self.reduced_in_graph:
            return  # the replayed graph holds the reduction itself
        if isinstance(self.reduction, NoReduction) and all(self.filled):
            return
        with self.fence.reducing():
            for member in self.members:
                if not self.filled[member.slot]:
                    self.view(member).zero_()
            self.reduction.start(self.flat)

    def wait_reduce(self) -> None:
        """Wait for the reduction, if any; afterwards the owned slice holds the sum."""
        self.fence.join()
        self.reduction.finish(self.flat)

    def empty(self) -> None:
        """Start a step: nothing is filled."""
        self.wait_reduce()
        self.filled = [False] * len(self.members)
        self.reduced_in_graph = False

    def whole(self) -> Tensor:
        """The reduced flat buffer [numel] of all ranks; a collective unless it is here already."""
        if self.reduce == "all_reduce" or self.side.group is None:
            return self.flat
        out = torch.empty_like(self.flat)
        compat.all_gather(out, self.flat[self.own].contiguous(), group=self.side.group)
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
    buffers: UserBuffers | None = None,
) -> list[Bucket]:
    """Cut the weights, last one first, into buckets of at most about `bucket_bytes` each.

    A weight's index is its position in `weights`. Allocates one zeroed flat buffer per bucket, from
    its group's pool in `buffers`. See `cut_runs` for the sizes.
    """
    runs = cut_runs(weights, bucket_bytes)
    return [
        _build(number, key, run, weights, wire_dtype or key.grad_dtype, reduce, buffers)
        for number, (key, run) in enumerate(runs)
    ]


def cut_runs(
    weights: Sequence[tuple[nn.Parameter, BucketKey]], bucket_bytes: int
) -> list[tuple[BucketKey, list[int]]]:
    """The weights of each bucket, last parameter first, buckets in the order a backward ends them.

    The bucket that a backward completes last has nothing left to hide behind, so the ones next to
    the model's input are small: an eighth of `bucket_bytes`, then twice that, up to the whole. With
    twice, a bucket's transfer still fits into the computation of the next, smaller one when all
    transfers take half as long as the backward. A weight that is larger, or that pipeline stages
    share, has a bucket to itself.
    """
    runs: list[tuple[BucketKey, list[int]]] = []
    open_runs: dict[BucketKey, tuple[list[int], int]] = {}
    caps: dict[BucketKey, int] = {}
    for index, (param, key) in enumerate(weights):
        size = _aligned(param.numel()) * key.grad_dtype.itemsize
        if is_shared(param) or size > bucket_bytes:
            runs.append((key, [index]))
            continue
        run, held = open_runs.get(key, ([], 0))
        cap = caps.setdefault(key, bucket_bytes // TAIL_FRACTION)
        if not run or held + size > cap:
            if run:
                caps[key] = min(2 * cap, bucket_bytes)
            run, held = [], 0
            runs.append((key, run))
        run.append(index)
        open_runs[key] = (run, held + size)
    runs.sort(key=lambda r: r[1][0], reverse=True)
    return [(key, run[::-1]) for key, run in runs]


def _build(
    number: int,
    key: BucketKey,
    run: Iterable[int],
    weights: Sequence[tuple[nn.Parameter, BucketKey]],
    wire_dtype: torch.dtype,
    reduce: str,
    buffers: UserBuffers | None,
) -> Bucket:
    members, offset = [], 0
    for slot, index in enumerate(run):
        param = weights[index][0]
        members.append(Member(index, slot, offset, param.numel(), tuple(param.shape)))
        offset += _aligned(param.numel())
    step = ALIGN * key.side.size
    numel = -(-offset // step) * step
    side = key.side
    place = buffers.allocating(side.axis, side.group, key.device) if buffers else nullcontext()
    with place:
        flat = torch.zeros(numel, dtype=key.grad_dtype, device=key.device)
    return Bucket(number, key.side, flat, tuple(members), wire_dtype, reduce, key.is_expert)


def is_shared(param: nn.Parameter) -> bool:
    """Whether pipeline stages share the weight: they add up slices, so its place must be the same
    on each, which only a bucket to itself gives."""
    marks = ("shared_embedding", "shared_position_embedding")
    return any(getattr(param, mark, False) for mark in marks)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
