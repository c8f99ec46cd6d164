"""The norm of a model's gradients: every element once, over the ranks of this model alone.

In: the reduced gradients in the slices that the ranks own. Out: one number, alike on all ranks::

    sum of squares of this rank's pieces --all-reduce over grad_norm--> square root

A slice lies on one rank of its bucket's data-parallel group, so weights replicated over dp, cp and
gtp count once, and padding belongs to no piece. What is replicated over another axis is counted on
the first rank of it: over tp a weight without the mark ``tensor_model_parallel = True``, over the
pipeline a shared embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.pieces import MasterSlice, Piece
from gtpgraph.parallel.process_groups import UNSET, ProcessGroups

__all__ = ["GradNorm", "used_weights"]

_FUNCTION = "DistributedOptimizer"
_SHARED = {"shared_embedding": "embd", "shared_position_embedding": "pos_embd"}


class GradNorm:
    """Computes the norm of one model's gradients.

    Args:
        model: the wrapper.
        slices: this rank's slices of its buckets.

    Raises:
        ValueError: grad_norm, tp, or the group of a shared embedding is missing: all of them named.
    """

    def __init__(self, model: DistributedDataParallel, slices: Sequence[MasterSlice]) -> None:
        self._norm_group = _resolve(model)["grad_norm"]
        self._device = model.buckets[0].flat.device
        self._counted = [
            (part, [p for p in part.pieces if _counts(p.state.param, model.groups)])
            for part in slices
        ]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The 2-norm, a float64 scalar; not finite where any gradient is not. A collective over
        grad_norm."""
        parts = [
            part.grad[piece.start : piece.stop][piece.share]
            for part, pieces in self._counted
            for piece in pieces
        ]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if parts:
            total = torch.stack(_norms(parts)).square().sum()
        if self._norm_group is not None:
            dist.all_reduce(total, group=self._norm_group)
        return total.sqrt()

    @property
    def pieces(self) -> list[Piece]:
        """What this rank contributes."""
        return [piece for _, pieces in self._counted for piece in pieces]


def _norms(parts: list[Tensor]) -> list[Tensor]:
    # fp64 sums: neither the order nor the number of ranks shows in what is kept of them.
    return [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]


def _resolve(model: DistributedDataParallel) -> dict[str, ProcessGroup | None]:
    groups = model.groups
    needed = {"grad_norm": "the norm of the gradients (clip_norm, skip_nonfinite)"}
    if groups.grad_norm is UNSET or groups.size("grad_norm") > 1:
        needed["tp"] = "the norm of the gradients (weights replicated over tp count once)"
        for mark, name in _SHARED.items():
            if any(getattr(s.param, mark, False) for s in model.states):
                needed[name] = f"the norm of the gradients (a weight is marked {mark})"
    return groups.require(*needed, function=_FUNCTION, option=needed)


def _counts(param: nn.Parameter, groups: ProcessGroups) -> bool:
    """Whether this rank is the one that counts its copy of the weight."""
    for mark, name in _SHARED.items():
        if getattr(param, mark, False) and getattr(groups, name) is not UNSET:
            if groups.rank(name) > 0:
                return False
    if groups.tp is UNSET or groups.size("tp") == 1:
        return True
    return bool(getattr(param, "tensor_model_parallel", False)) or groups.rank("tp") == 0


@torch.no_grad()
def used_weights(model: DistributedDataParallel) -> set[int]:
    """Indices of the weights that have a contribution of this step on any rank of their group.

    One small collective over each of the buckets' data-parallel groups; none without
    `allow_unused`, where a weight without a contribution is an error of the step.
    """
    used = {m.index for b in model.buckets for m in b.members if b.filled[m.slot]}
    if not model.allow_unused:
        return used | {s.index for s in model.states}
    by_group: dict[ProcessGroup, list[int]] = {}
    for bucket in model.buckets:
        if bucket.side.group is not None:
            by_group.setdefault(bucket.side.group, []).extend(m.index for m in bucket.members)
    for group, indices in by_group.items():
        flags = torch.tensor([int(i in used) for i in indices], dtype=torch.int32)
        flags = flags.to(model.buckets[0].flat.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        used |= {i for i, flag in zip(indices, flags.tolist(), strict=True) if flag}
    return used
