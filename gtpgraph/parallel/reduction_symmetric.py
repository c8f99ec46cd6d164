"""A bucket's reduction through symmetric memory: kernels only, so a CUDA graph can hold it.

In: a flat buffer whose contributions stand. Out: the sum over the group, summed in fp32 in the
order of the ranks, in the slice that this rank owns (or everywhere)::

    flat --cast--> staging     every rank sums its piece of all of them into flat[own]
    (everywhere)   flat[own] --> staging --> all-gather into flat

Reductions on the communication stream share one staging buffer a group, and those inside captured
graphs another: the two may run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gtpgraph.kernels.ops_staged import staged
from gtpgraph.kernels.ops_symmetric import symm_all_gather, symm_reduce_scatter
from gtpgraph.parallel.staging import Staging, one_device, padded_bytes

if TYPE_CHECKING:
    from gtpgraph.parallel.buckets import Bucket


class SymmetricReduction:
    """Stage, exchange and sum with the kernels of `gtpgraph.kernels.symmetric`.

    On a GPU everything is launched by `start` and `finish` has nothing to do. On a CPU, where the
    exchange would hold up its caller until all ranks have come, `finish` does it. `store` is
    float32 [1 or more] on the buffer's device, 0: the beta with which the sum replaces what stood.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        own: slice,
        wire: torch.dtype,
        *,
        everywhere: bool,
        store: Tensor,
        outside: Staging,
        captured: Staging,
    ) -> None:
        self._name: str = group.group_name
        self._ranks = group.size()
        self._own = own
        self._wire = wire
        self._everywhere = everywhere
        self._outside = outside
        self._captured = captured
        self._store = store
        self._waiting = False

    def start(self, flat: Tensor) -> None:
        """Launch on the current stream; `flat` [numel] holds every contribution."""
        if flat.is_cuda:
            self._exchange(flat)
        else:
            self._waiting = True

    def finish(self, flat: Tensor) -> None:
        """On a CPU: exchange now, if `start` was called."""
        if self._waiting:
            self._exchange(flat)
        self._waiting = False

    def _exchange(self, flat: Tensor) -> None:
        capturing = flat.is_cuda and torch.cuda.is_current_stream_capturing()
        staging = (self._captured if capturing else self._outside)[self._name]
        buffer = staged("SymmetricReduction", staging, flat.numel(), self._wire)
        buffer.copy_(flat)
        start, ranks, store = self._own.start, self._ranks, self._store
        symm_reduce_scatter(flat, buffer, store, 0, start, 1.0, True, self._name, ranks)
        if self._everywhere:
            own = flat[self._own]
            piece = staged("SymmetricReduction", staging, own.numel(), flat.dtype)
            piece.copy_(own)
            symm_all_gather(flat, piece, self._name, ranks)


def reduce_symmetrically(buckets: Sequence[Bucket]) -> list[Staging]:
    """Give every bucket that is reduced over several ranks a `SymmetricReduction`.

    A collective over each of their groups, in the order of its first bucket.

    Returns:
        The staging buffers, to be closed after the graphs that use them.

    Raises:
        ValueError: the buckets lie on several devices.
    """
    sizes: dict[str, int] = {}
    for bucket in buckets:
        if bucket.side.group is not None:
            name: str = bucket.side.group.group_name
            size = padded_bytes(bucket.flat.numel(), bucket.wire_dtype, bucket.flat.dtype)
            sizes[name] = max(sizes.get(name, 0), size)
    device = one_device(b.flat for b in buckets)
    outside, captured = Staging(sizes, device), Staging(sizes, device)
    for bucket in buckets:
        if bucket.side.group is not None:
            bucket.reduction = SymmetricReduction(
                bucket.side.group, bucket.share, bucket.wire_dtype,
                everywhere=bucket.reduce == "all_reduce", store=bucket.zeros,
                outside=outside, captured=captured,
            )  # fmt: skip
    return [outside, captured]
