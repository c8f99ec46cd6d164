"""User buffers: gradient buffers in memory that NCCL allocates and registers (``nccl_ub``).

In: the data-parallel groups of a model's buffers. Out: a place to allocate each group's buffers in,
and their registration, warmed up over the group that will use them and over no other::

    allocating(group) -> buffers in the group's pool        (no communication)
    register():  for each group, in one order on all ranks:
                 barrier(group)      NCCL makes the communicator that registration needs
                 register the pool
                 barrier(group)      nobody uses a buffer that a peer has not registered yet

A rank takes part in the barriers of its own groups alone: stages with other buffers, and ranks
outside the model, are neither waited for nor synchronised. On a backend without registration (gloo)
memory is ordinary and nothing is registered; the barriers stay, so that the order of collectives is
that of the real thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gtpgraph import compat

__all__ = ["UserBuffers", "barrier"]

# The order in which groups are registered; ranks that share several must agree on it.
_ORDER = ("dp", "dp_cp", "dp_cp_gtp", "expt_dp")


def barrier(group: ProcessGroup, device: torch.device) -> None:
    """Wait for the ranks of `group`, on `device` where that is a GPU."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        dist.barrier(group=group, device_ids=[index])
    else:
        dist.barrier(group=group)


@dataclass(eq=False)
class _Pool:
    """One group's buffers: `backend` and `pool` are None where nothing can be registered."""

    axis: str
    group: ProcessGroup
    device: torch.device
    backend: Any = None
    pool: torch.cuda.MemPool | None = None
    registered: bool = False


class UserBuffers:
    """The pools of one model's buffers, one for each data-parallel group and device."""

    def __init__(self) -> None:
        self._pools: dict[tuple[ProcessGroup, torch.device], _Pool] = {}

    @contextmanager
    def allocating(
        self, axis: str, group: ProcessGroup | None, device: torch.device
    ) -> Iterator[None]:
        """Inside, CUDA tensors come from the pool of `group`, the buffers' data-parallel group.

        None is the group of one rank: nothing is sent, so memory stays ordinary.
        """
        found = None if group is None else self._pool(axis, group, device)
        if found is None or (pool := self._memory(found)) is None:
            yield
            return
        with torch.cuda.use_mem_pool(pool, device=device):
            yield

    def _pool(self, axis: str, group: ProcessGroup, device: torch.device) -> _Pool:
        key = (group, device)
        if key not in self._pools:
            self._pools[key] = _Pool(axis, group, device)
        elif self._pools[key].registered:
            raise RuntimeError(
                f"user buffers of {axis}: expected every buffer to be allocated before "
                "registration, got one more after it. Allocate first, register last."
            )
        return self._pools[key]

    @staticmethod
    def _memory(found: _Pool) -> torch.cuda.MemPool | None:
        if found.pool is None:
            found.backend = compat.nccl_backend(found.group, found.device)
            if found.backend is not None:
                found.pool = torch.cuda.MemPool(found.backend.mem_allocator)
        return found.pool

    def add(self, axis: str, group: ProcessGroup | None, device: torch.device) -> None:
        """Make a group known whose buffers torch allocates and registers by itself, as FSDP2's;
        `register` warms it up."""
        if group is not None:
            self._pool(axis, group, device)

    def register(self) -> list[str]:
        """Register what is not registered yet, with a barrier before and after, group by group.

        A collective over each group: all of its ranks call it, whatever they have allocated.

        Returns:
            The axes that were warmed up, in order.
        """
        pools = [p for p in _ordered(self._pools.values()) if not p.registered]
        for each in pools:
            barrier(each.group, each.device)
            if each.pool is not None:
                each.backend.register_mem_pool(each.pool)
            barrier(each.group, each.device)
            each.registered = True
        return [each.axis for each in pools]

    def close(self) -> None:
        """Take the registration back; local, before the groups go. Idempotent."""
        for each in self._pools.values():
            if each.pool is not None and each.registered:
                each.backend.deregister_mem_pool(each.pool)
        self._pools.clear()


def _ordered(pools: Iterable[_Pool]) -> list[_Pool]:
    return sorted(pools, key=lambda p: (_ORDER.index(p.axis), str(p.device)))
