"""Partial sums of squares and non-finite counts, left by the kernel that writes final values.

A kernel that writes n final elements fills ``partials`` fp32 [num_partials(n), 2]: row i covers the
elements [i * STATS_TILE, (i + 1) * STATS_TILE) as stored; column 0 is their sum of squares, column
1 how many of them are not finite. One row a program and no atomics: the result is deterministic.
"""

import torch

STATS_TILE = 2048


def num_partials(numel: int) -> int:
    """Rows that ``numel`` final elements fill."""
    return -(-numel // STATS_TILE)


def new_partials(numel: int, device: torch.device | str) -> torch.Tensor:
    """An uninitialised table for ``numel`` elements: fp32 [num_partials(numel), 2]."""
    return torch.empty(num_partials(numel), 2, dtype=torch.float32, device=device)


def finish(partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squares, number of non-finite elements), both float64 scalars on the device."""
    total = partials.sum(0, dtype=torch.float64)
    return total[0], total[1]


def problems(partials: torch.Tensor, numel: int, device: torch.device) -> list[str]:
    """Whether ``partials`` fits ``numel`` elements written on ``device``."""
    expected = (num_partials(numel), 2)
    if (
        tuple(partials.shape) != expected
        or partials.dtype != torch.float32
        or partials.device != device
        or not partials.is_contiguous()
    ):
        return [
            f"partials: expected contiguous float32 {expected} on {device}, got {partials.dtype} "
            f"{tuple(partials.shape)} on {partials.device}; make it with stats.new_partials"
        ]
    return []
