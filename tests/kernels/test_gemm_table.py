"""The choice of ``wgrad_gemm`` agrees with the measurements it cites, shape by shape."""

import pytest
import torch

from gtpgraph.kernels import gemm_table

SMS = 132  # the chip of the measurements


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, columns, rows = shape
    return (
        torch.empty(tokens, rows, dtype=dtype, device="meta"),
        torch.empty(tokens, columns, dtype=dtype, device="meta"),
    )


@pytest.mark.parametrize("shape", gemm_table.MEASURED, ids=str)
def test_a_first_contribution_takes_what_was_fastest(shape: tuple[int, int, int]) -> None:
    times = gemm_table.MEASURED[shape]
    choice = gemm_table.choose(*operands(shape, torch.bfloat16), torch.float32, True, SMS)
    cublas = (times.addmm_adds + times.addmm_stores) / 2
    if choice is None:
        assert cublas <= min(times.large_adds, times.small_adds)
    else:
        adds = times.large_adds if choice is gemm_table.LARGE else times.small_adds
        assert (adds + times.taken_stores) / 2 <= 1.01 * cublas


@pytest.mark.parametrize("shape", gemm_table.MEASURED, ids=str)
def test_a_later_contribution_takes_cublas(shape: tuple[int, int, int]) -> None:
    times = gemm_table.MEASURED[shape]
    assert gemm_table.choose(*operands(shape, torch.bfloat16), torch.float32, False, SMS) is None
    assert times.addmm <= 1.01 * min(times.large_adds, times.small_adds)


def test_what_cublas_cannot_do_in_place() -> None:
    dy, x = operands((64, 8, 8), torch.bfloat16)
    assert gemm_table.choose(dy, x, torch.bfloat16, False, SMS) is gemm_table.SMALL
    dy, x = operands((64, 8, 8), torch.float32)
    assert gemm_table.choose(dy, x, torch.bfloat16, False, SMS) is gemm_table.IEEE
    assert gemm_table.choose(dy, x, torch.float32, True, SMS) is None


def test_busy() -> None:
    assert gemm_table.busy(128 * 132, 256, gemm_table.LARGE, 132) == 1.0
    assert gemm_table.busy(128 * 133, 256, gemm_table.LARGE, 132) == 133 / 264
    assert gemm_table.busy(0, 256, gemm_table.LARGE, 132) == 0.0
