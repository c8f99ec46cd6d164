"""shard_reduce and the arithmetic of symmetric memory against the oracles."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtpgraph.kernels import checks, reference, stats

kernel = pytest.importorskip("gtpgraph.kernels.shard_reduce", reason="triton is not installed")
symmetric = pytest.importorskip("gtpgraph.kernels.symmetric", reason="triton is not installed")

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
FACTORS = ((True, 0), (True, 1), (True, 2), (False, 0))
PAD = 8


def start(numel: int, store: bool, main: torch.dtype, device: torch.device) -> torch.Tensor:
    flat = torch.randn(numel + 2 * PAD, device=device).to(main)
    if store:
        flat[PAD : PAD + numel] = float("nan")
    return flat


@pytest.mark.parametrize("numel", [0, 1, 1000, 1024, 2053])
@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 9, 64])
def test_equals_oracle(device: torch.device, rounded: Cast, ranks: int, numel: int) -> None:
    beta = torch.tensor([0.0, 1.0, 0.5], device=device)
    for wire in checks.WGRAD_DTYPES if ranks == 7 else (torch.bfloat16,):
        for main in checks.MAIN_DTYPES:
            for first, index in FACTORS if ranks == 2 else FACTORS[:1]:
                recv = torch.randn(ranks, numel, device=device).to(wire)
                flat = start(numel, first and index == 0, main, device)
                exact = flat.float()
                kernel.shard_reduce(flat, recv, beta, index, PAD, 0.125, first, numel)
                reference.shard_reduce(exact, recv, beta, index, PAD, 0.125, first, numel)
                assert torch.equal(flat, rounded(exact, main)), (wire, main, first, index)


@pytest.mark.parametrize("valid", [0, 1, 2048, 3000, 5000])
def test_padding_is_zeroed_and_left_out_of_the_stats(device: torch.device, valid: int) -> None:
    numel = 5000
    recv = torch.randn(3, numel, device=device).bfloat16()
    recv[:, valid:] = float("nan")  # what a peer left in its padding must not matter
    flat = torch.full((numel,), float("nan"), device=device)
    partials = stats.new_partials(numel, device)
    beta = torch.zeros(1, device=device)
    kernel.shard_reduce(flat, recv, beta, 0, 0, 0.5, True, valid, partials)
    expected = reference.sum_rows(list(recv)) * 0.5
    assert torch.equal(flat[:valid], expected[:valid]) and not flat[valid:].any()
    total, bad = stats.finish(partials)
    torch.testing.assert_close(float(total), float(expected[:valid].double().square().sum()))
    assert float(bad) == 0


def test_non_finite_values_are_counted(device: torch.device) -> None:
    recv = torch.ones(2, 4100, device=device).bfloat16()
    recv[0, 3], recv[1, 4099] = float("inf"), float("nan")
    flat, partials = torch.zeros(4100, device=device), stats.new_partials(4100, device)
    kernel.shard_reduce(flat, recv, torch.ones(1, device=device), 0, 0, 1.0, True, 4100, partials)
    assert partials[:, 1].tolist() == [1, 0, 1]


def test_rows_with_a_stride(device: torch.device) -> None:
    recv = torch.randn(4, 100, device=device)[:, 3:80]
    flat, expected = torch.zeros(77, device=device), torch.zeros(77, device=device)
    beta = torch.ones(1, device=device)
    kernel.shard_reduce(flat, recv, beta, 0, 0, 1.0, True, 77)
    reference.shard_reduce(expected, recv, beta, 0, 0, 1.0, True, 77)
    assert torch.equal(flat, expected)


def test_error_budget(device: torch.device, within_budget: Callable[..., None]) -> None:
    recv = torch.randn(8, 4000, device=device).bfloat16()
    flat = torch.randn(4000, device=device)
    exact = flat.double() + recv.double().sum(0) / 3
    best = flat + recv.sum(0, dtype=torch.float32) / 3
    kernel.shard_reduce(flat, recv, torch.ones(1, device=device), 0, 0, 1 / 3, False, 4000)
    within_budget("shard_reduce", flat, best, exact)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ranks=st.integers(1, 20), numel=st.integers(1, 1100), offset=st.integers(0, 9))
def test_any_ranks_and_length(device: torch.device, ranks: int, numel: int, offset: int) -> None:
    recv = torch.randn(ranks, numel, device=device).half()
    flat = torch.randn(offset + numel + 2, device=device)
    expected, beta = flat.clone(), torch.tensor([0.5], device=device)
    kernel.shard_reduce(flat, recv, beta, 0, offset, 0.25, True, numel)
    reference.shard_reduce(expected, recv, beta, 0, offset, 0.25, True, numel)
    assert torch.equal(flat, expected)


def addresses(buffers: list[torch.Tensor]) -> torch.Tensor:
    pointers = [b.data_ptr() for b in buffers]
    return torch.tensor(pointers, dtype=torch.int64, device=buffers[0].device)


@pytest.mark.parametrize("wire", checks.WGRAD_DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_symmetric_arithmetic(
    device: torch.device, rounded: Cast, ranks: int, wire: torch.dtype
) -> None:
    numel = 1100
    buffers = [torch.randn(ranks * numel, device=device).to(wire) for _ in range(ranks)]
    beta = torch.tensor([0.0, 0.5], device=device)
    for rank in (0, ranks - 1):
        flat = start(numel, True, torch.float32, device)
        expected = flat.clone()
        symmetric.launch_reduce_scatter(
            flat, addresses(buffers), wire, rank, numel, beta, 0, PAD, 0.5, True
        )
        chunks = [b[rank * numel : (rank + 1) * numel] for b in buffers]
        reference.symm_reduce_scatter(expected, chunks, beta, 0, PAD, 0.5, True)
        assert torch.equal(flat, expected)
    out = torch.empty(ranks * buffers[0].numel(), device=device)
    symmetric.launch_all_gather(out, addresses(buffers), wire, 1, buffers[0].numel())
    assert torch.equal(out, torch.cat(buffers).float())
