"""Eager reshard-after-forward: autograd saves how to gather a weight, not the gathered weight.

In: tensors that autograd saves during an eager forward. Out: the same values in the backward. Left
alone, autograd keeps every gathered weight from its use to its backward, which undoes the sharding.
A gathered weight or a view of it (``weight.t()``) is replaced by (shard, geometry) and gathered
once more when its backward asks for it. Casts are values of their own and are kept (autocast).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpgraph.kernels.comm import GATHERED_ATTRIBUTE


@dataclass(frozen=True)
class Regather:
    """How to make a saved view of a gathered weight again: the gather's arguments, and the view's
    size, stride and offset (elements)."""

    shard: Tensor
    rows: int
    group_name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def again(self) -> Tensor:
        """Gather, and view. A collective over the weight's GTP group, in backward order."""
        with torch.no_grad():
            full: Tensor = torch.ops.gtpgraph.gather(
                self.shard.detach(), self.rows, self.group_name
            )
        return full.as_strided(self.size, self.stride, self.offset)


def _pack(tensor: Tensor) -> Tensor | Regather:
    source = tensor if tensor._base is None else tensor._base
    gathered = getattr(source, GATHERED_ATTRIBUTE, None)
    if gathered is None or tensor.dtype != source.dtype:
        return tensor
    shard, rows, group_name = gathered
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    return Regather(shard, rows, group_name, size, stride, int(tensor.storage_offset()))


def _unpack(saved: Tensor | Regather) -> Tensor:
    return saved.again() if isinstance(saved, Regather) else saved


def regather_in_backward() -> AbstractContextManager[None]:
    """Inside, autograd saves recipes for gathered weights. For eager forwards only."""
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    return hooks
