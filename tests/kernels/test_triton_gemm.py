"""The wgrad GEMM kernel against fp64: odd shapes, both ways of loading, every factor.

bf16 operands are for the GPU: the interpreter's dot takes their bits for integers.
"""

import os
from collections.abc import Callable

import pytest
import torch

from gtpgraph.kernels import gemm_table

kernel = pytest.importorskip("gtpgraph.kernels.wgrad_gemm", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float16, torch.float32] + ([] if INTERPRETED else [torch.bfloat16])
SHAPES = [(40, 72, 136), (33, 37, 65), (16, 64, 8), (0, 8, 8), (200, 130, 300)]
CONFIGS = {
    "split": gemm_table.Config(32, 64, 32, warps=4, stages=2, split=True),
    "paired": gemm_table.Config(64, 32, 32, warps=4, stages=3, per_sm=2, group=2),
}
PAD = 8


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_within_the_budget_of_torch(
    device: torch.device,
    within_budget: Callable[..., None],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    config: str,
) -> None:
    tokens, rows, columns = shape
    dy = torch.randn(tokens, rows, device=device).to(dtype)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    beta = torch.tensor([0.0, 1.0, 0.5], device=device)
    for first, index in ((True, 0), (True, 2), (False, 0)):
        flat = torch.randn(rows * columns + 2 * PAD, device=device)
        main = flat[PAD:-PAD]
        old, b = main.clone(), float(beta[index]) if first else 1.0
        if b == 0:
            main.fill_(float("nan"))
        best = b * old + (dy.float().t() @ x.float()).flatten() / 3
        exact = b * old.double() + (dy.double().t() @ x.double()).flatten() / 3
        edges = flat[:PAD].clone(), flat[-PAD:].clone()
        problem = kernel.Problem(flat, dy, x, beta, index, PAD, 1 / 3, first)
        kernel.run_triton(problem, CONFIGS[config])
        within_budget("wgrad_gemm", main, best, exact)
        assert torch.equal(flat[:PAD], edges[0]) and torch.equal(flat[-PAD:], edges[1])


@pytest.mark.parametrize("b", [0.0, 0.5, 1.0])
def test_prepare(device: torch.device, b: float) -> None:
    flat = torch.randn(5000, device=device)
    if b == 0:
        flat[3:4990] = float("nan")
    expected = flat.clone()
    expected[3:4990] = 0.0 if b == 0 else expected[3:4990] * b
    beta = torch.tensor([b], device=device)
    kernel.prepare_kernel[(2,)](flat, beta, 0, 3, 4987, BLOCK=512, PROGRAMS=2)
    assert torch.equal(flat, expected)


def test_which_operands_take_descriptors(device: torch.device) -> None:
    def operand(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=torch.float16)

    assert kernel.takes_tma(operand(4, 8), operand(4, 16))
    assert not kernel.takes_tma(operand(4, 8), operand(4, 9))
    assert not kernel.takes_tma(operand(0, 8), operand(0, 8))
    assert not kernel.takes_tma(operand(4, 8), operand(33)[1:].view(4, 8))
