"""scatter_accumulate against the oracle: runs of equal indices, tails, first or later ones."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtpgraph.kernels import checks, reference

scatter = pytest.importorskip("gtpgraph.kernels.scatter", reason="triton is not installed")

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
Check = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]
ROWS = 20


def some_indices(kind: str, num: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num)
    values = torch.randint(ROWS, (num,), generator=generator)
    if kind == "one row":
        values = torch.full((num,), 7)
    if kind == "long run":  # many times what a program reads at once, and not a multiple of it
        values[: 3 * scatter.BLOCK_N + 5] = 3
        values = values[torch.randperm(num, generator=generator)]
    if kind == "negative":
        values = values - ROWS * (torch.rand(num, generator=generator) < 0.5)
    if kind == "each once":
        values = torch.randperm(max(num, ROWS), generator=generator)[:num]
    return values.to(device)


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("main", checks.MAIN_DTYPES, ids=str)
@pytest.mark.parametrize("wgrad", checks.WGRAD_DTYPES, ids=str)
def test_dtypes_and_factors(
    device: torch.device,
    rounded: Cast,
    wgrad: torch.dtype,
    main: torch.dtype,
    first: bool,
    beta: float,
) -> None:
    """Rows once each, so that the order of sums does not matter: bit for bit."""
    num, columns, offset = 9, 37, 5
    values = torch.randn(num, columns, device=device).to(wgrad)
    indices = some_indices("each once", num, device)
    betas = torch.tensor([9.0, beta], device=device)
    flat = torch.randn(offset + ROWS * columns + 3, device=device).to(main)
    if first and beta == 0:
        flat[offset : offset + ROWS * columns] = float("nan")
    exact = flat.float()
    before = flat.clone()
    reference.scatter_accumulate(exact, values, indices, betas, 1, offset, 0.5, first, ROWS)
    scatter.scatter_accumulate(flat, values, indices, betas, 1, offset, 0.5, first, ROWS)
    assert torch.equal(flat, rounded(exact, main))
    for end in (slice(0, offset), slice(offset + ROWS * columns, None)):
        assert torch.equal(flat[end], before[end])


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("kind", ["random", "one row", "long run", "negative"])
def test_runs_of_equal_indices(
    device: torch.device, within_budget: Check, kind: str, index: torch.dtype
) -> None:
    num, columns = 300, 150
    values = torch.randn(num, columns, device=device).bfloat16()
    indices = some_indices(kind, num, device)
    beta = torch.zeros(1, device=device)
    flat = torch.full((ROWS * columns,), float("nan"), device=device)
    scatter.scatter_accumulate(flat, values, indices.to(index), beta, 0, 0, 0.5, True, ROWS)
    dense = torch.zeros(ROWS, columns, dtype=torch.float64, device=device)
    dense.index_put_((indices,), values.double(), accumulate=True)
    best = torch.zeros(ROWS, columns, device=device)
    best.index_put_((indices,), values.float(), accumulate=True)
    within_budget(kind, flat, best.flatten() * 0.5, dense.flatten() * 0.5)
    again = torch.full_like(flat, float("nan"))
    scatter.scatter_accumulate(again, values, indices.to(index), beta, 0, 0, 0.5, True, ROWS)
    assert torch.equal(flat, again)


def test_what_lies_outside_is_left_out(device: torch.device) -> None:
    values = torch.ones(4, 8, device=device)
    indices = torch.tensor([0, ROWS, -ROWS - 1, 5], device=device)
    flat = torch.zeros(8 + ROWS * 8 + 8, device=device)
    beta = torch.ones(1, device=device)
    scatter.scatter_accumulate(flat, values, indices, beta, 0, 8, 1.0, True, ROWS)
    hit = flat.view(-1, 8).sum(1).nonzero().flatten().tolist()
    assert hit == [1, 6]  # rows 0 and 5, behind the offset of one row


@pytest.mark.parametrize(("num", "columns", "rows"), [(0, 5, 4), (3, 0, 4), (0, 5, 0)])
def test_nothing_to_add(device: torch.device, num: int, columns: int, rows: int) -> None:
    flat = torch.full((rows * columns + 2,), 7.0, device=device)
    indices = torch.zeros(num, dtype=torch.int64, device=device)
    values = torch.ones(num, columns, device=device)
    scatter.scatter_accumulate(
        flat, values, indices, torch.zeros(1, device=device), 0, 0, 1.0, True, rows
    )
    assert flat.tolist() == [0.0] * (rows * columns) + [7.0] * 2


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num=st.integers(1, 60), columns=st.integers(1, 520), rows=st.integers(1, 9))
def test_any_shape(device: torch.device, num: int, columns: int, rows: int) -> None:
    values = torch.randn(num, columns, device=device).half()
    indices = torch.randint(rows, (num,), device=device)
    flat = torch.randn(rows * columns, device=device)
    exact = flat.clone()
    beta = torch.ones(1, device=device)
    scatter.scatter_accumulate(flat, values, indices, beta, 0, 0, 1.0, False, rows)
    reference.scatter_accumulate(exact, values, indices, beta, 0, 0, 1.0, False, rows)
    torch.testing.assert_close(flat, exact, rtol=1e-5, atol=1e-5)
