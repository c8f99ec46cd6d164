"""Which elements of which weights a rank updates: its slice of each bucket, cut into pieces.

In: a wrapper's buckets. Out: for each bucket one fp32 buffer of the length of the owned slice, and
in it one `Piece` per weight, where the slice holds elements of it::

    bucket   | w0 ......... | pad | w1 ....... | pad |        own = [a, b)
                      a ^~~~~~~~~~~~~~~~~~~~^ b
    pieces              w0[k:]         w1[:m]                 padding belongs to no piece

A GTP shard is a run of rows of the whole weight, so a piece of it is a run of the whole weight's
elements in row-major order: that is how a checkpoint names it, whatever gtp and dp are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from gtpgraph.parallel.buckets import Bucket
from gtpgraph.parallel.weights import WeightState

__all__ = ["MasterSlice", "Piece", "master_slice", "whole_numel", "whole_shape"]


@dataclass(frozen=True)
class Piece:
    """A weight's part of this rank's slice of a bucket, in elements.

    Fields:
        state: the weight.
        start, stop: its place in the owned slice.
        master: the fp32 Parameter [stop - start], a view of the slice's master copy.
        first: the piece's first element in the whole weight, flattened.
        share: the part of the piece, relative to it, that no other rank of the bucket's group has.
    """

    state: WeightState
    start: int
    stop: int
    master: nn.Parameter
    first: int
    share: slice

    @property
    def fqn(self) -> str:
        return self.state.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return whole_shape(self.state)


@dataclass(frozen=True)
class MasterSlice:
    """The fp32 master copy [numel of the owned slice] of one bucket's weights, and its pieces."""

    bucket: Bucket
    flat: Tensor
    pieces: tuple[Piece, ...]

    @property
    def grad(self) -> Tensor:
        """The bucket's reduced gradients in the owned slice, in grad_dtype."""
        return self.bucket.flat[self.bucket.own]


def whole_shape(state: WeightState) -> tuple[int, ...]:
    """Shape of the whole weight, all shards together."""
    return state.member.shape if state.spec is None else state.spec.shape


def _valid_numel(state: WeightState) -> int:
    """Elements of the local weight that are not rows of padding."""
    if state.spec is None:
        return state.member.numel
    return state.spec.valid_rows * prod(state.spec.shape[1:])


def master_slice(bucket: Bucket, states: list[WeightState]) -> MasterSlice:
    """Allocate the master copy of the slice of `bucket` that this rank owns, and cut it."""
    own, share = bucket.own, bucket.share
    flat = torch.zeros(own.stop - own.start, dtype=torch.float32, device=bucket.flat.device)
    pieces = []
    for member in bucket.members:
        state = states[member.index]
        start = max(member.offset, own.start)
        stop = min(member.offset + _valid_numel(state), own.stop)
        if start >= stop:
            continue
        before = 0 if state.spec is None else state.spec.start * prod(state.spec.shape[1:])
        low, high = max(start, share.start) - start, min(stop, share.stop) - start
        master = nn.Parameter(flat[start - own.start : stop - own.start])
        pieces.append(
            Piece(
                state, start - own.start, stop - own.start, master,
                before + start - member.offset, slice(low, max(low, high)),
            )
        )  # fmt: skip
    return MasterSlice(bucket, flat, tuple(pieces))


def whole_numel(state: WeightState) -> int:
    """Elements of the whole weight."""
    return prod(whole_shape(state))
