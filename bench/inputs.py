"""Inputs of the kernel cases and the gate that each must pass before it is timed."""

from collections.abc import Callable
from typing import Any

import torch

SCALE = 0.125


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def beta(value: float) -> torch.Tensor:
    return torch.full((1,), value, device="cuda")


def gate(
    name: str, run: Callable[[torch.Tensor], Any], start: torch.Tensor, value: torch.Tensor
) -> None:
    """``run(main)`` must give ``start + SCALE * value`` within twice torch's error + a rounding."""
    main = start.clone()
    run(main)
    exact = start.double() + SCALE * value.double()
    best = start + SCALE * value.float()
    norm = exact.norm()
    error, reference = ((t.double() - exact).norm() / norm for t in (main, best))
    limit = 2 * float(reference) + torch.finfo(main.dtype).eps / 2
    if not float(error) <= limit:  # NaN must not pass
        raise AssertionError(f"{name}: error {float(error):.2e}, expected <= {limit:.2e}")
