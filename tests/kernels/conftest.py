"""Kernel tests run twice: on the CPU under Triton's interpreter, and on the GPU.

Triton reads TRITON_INTERPRET when it is imported, so test_interpreter.py runs the ``device`` tests
in a process of their own; in an ordinary CPU session they skip.
"""

import os
from collections.abc import Callable

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Check = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]


@pytest.fixture
def device() -> torch.device:
    """Where the Triton kernels run: the GPU, or the CPU under the interpreter."""
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("no CUDA device; test_interpreter.py runs this under Triton's interpreter")


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is NaN, so that a kernel that does not write an element is seen."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        with torch.no_grad():  # the compiler makes empty leaves that require grad
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def rounded() -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    """fp32 values as a kernel stores them. The interpreter truncates to bf16, the GPU rounds."""

    def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if INTERPRETED and dtype == torch.bfloat16:
            bits = values.contiguous().view(torch.int32) & ~0xFFFF
            return bits.view(torch.float32).to(dtype)
        return values.to(dtype)

    return cast


@pytest.fixture
def within_budget() -> Check:
    """``check(name, got, best, exact)``: got's error against fp64 is at most twice that of the best
    plain torch formulation, plus one rounding of got's dtype (relative Frobenius norms)."""

    def check(name: str, got: torch.Tensor, best: torch.Tensor, exact: torch.Tensor) -> None:
        assert exact.dtype == torch.float64
        norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
        error = float((got.double() - exact).norm() / norm)
        reference = float((best.double() - exact).norm() / norm)
        limit = 2 * reference + torch.finfo(got.dtype).eps / 2
        assert error <= limit, f"{name}: error {error:.2e} > {limit:.2e} (torch: {reference:.2e})"

    return check
