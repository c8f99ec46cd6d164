"""What tests and checks are written with: ranks on this machine, gradients to compare with.

In: a plain model and its batches, or a function to run on several ranks.
Out: gradients of plain PyTorch, relative errors, results by rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtpgraph.ranks import RankPool, RanksError, run_ranks

__all__ = ["RankPool", "RanksError", "fp64_grads", "max_error", "run_ranks"]

Tensors = Tensor | Mapping[str, Tensor]


def max_error(actual: Tensors, expected: Tensors) -> float:
    """Largest absolute difference over the largest absolute expected value.

    Tensors of equal shape, any dtype, compared in float64; for mappings the largest over the
    keys, which must agree. Infinite where either side is not finite and they are not identical;
    the absolute difference where the expected tensor is all zero.
    """
    if isinstance(actual, Mapping) or isinstance(expected, Mapping):
        if not (isinstance(actual, Mapping) and isinstance(expected, Mapping)):
            raise ValueError("max_error: expected two tensors or two mappings, got one of each")
        if actual.keys() != expected.keys():
            odd = sorted(actual.keys() ^ expected.keys())
            raise ValueError(f"max_error: expected equal keys, these are on one side only: {odd}")
        return max((max_error(actual[k], expected[k]) for k in actual), default=0.0)
    if actual.shape != expected.shape:
        raise ValueError(
            f"max_error: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    a, b = actual.detach().cpu().double(), expected.detach().cpu().double()
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    difference = float((a - b).abs().max())
    scale = float(b.abs().max()) or 1.0
    error = difference / scale
    return error if math.isfinite(error) and math.isfinite(scale) else math.inf


def fp64_grads(
    model: nn.Module,
    batches: Sequence[tuple[Any, ...]],
    dtype: torch.dtype = torch.float64,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradients of plain unsharded PyTorch on the concatenated batch.

    Args:
        model: a plain module; a copy of it is used, in ``dtype``. Its forward returns the loss,
            a mean over dim 0 of its tensors, unless ``loss_fn(output)`` makes it.
        batches: forward arguments, one tuple a rank: tensors are concatenated along dim 0
            (floating ones in ``dtype``), other values are taken from the first tuple.

    Returns:
        First FQN of every weight that has a gradient -> gradient, ``dtype``, the weight's shape.
    """
    plain = copy.deepcopy(model).to(dtype)
    plain.zero_grad(set_to_none=True)
    output = plain(*(_joined(column, dtype) for column in zip(*batches, strict=True)))
    (output if loss_fn is None else loss_fn(output)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _joined(column: Sequence[Any], dtype: torch.dtype) -> Any:
    """One forward argument of all ranks: tensors along dim 0, other values as on the first."""
    if not isinstance(column[0], Tensor):
        return column[0]
    whole = torch.cat(list(column))
    return whole.to(dtype) if whole.is_floating_point() else whole
