"""The accumulate kernels against the oracle: every dtype pair, layout, factor and odd length."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtpgraph.kernels import checks, reference, stats

kernel = pytest.importorskip("gtpgraph.kernels.accumulate", reason="triton is not installed")

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
PAD = 8  # elements of flat before and after main, which must stay as they are
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.randn(()),
    "one": lambda: torch.randn(1),
    "odd": lambda: torch.randn(5, 37),
    "two-blocks": lambda: torch.randn(2049),
    "transposed": lambda: torch.randn(70, 65).t(),
    "transposed-wide": lambda: torch.randn(3, 129).t(),
    "experts-transposed": lambda: torch.randn(3, 9, 130).transpose(1, 2),
    "columns": lambda: torch.randn(9, 40)[:, 3:20],
    "every-second": lambda: torch.randn(4, 30)[:, ::2],
    "expanded": lambda: torch.randn(6, 1).expand(6, 7),
}


def run_both(
    wgrad: torch.Tensor, main: torch.dtype, first: bool, index: int, scale: float, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kernel's flat, oracle's flat, token); flat starts as NaN where b == 0."""
    beta = torch.tensor([0.0, 1.0, 0.5], device=wgrad.device)
    numel = wgrad.numel()
    flat = torch.randn(numel + 2 * PAD, device=wgrad.device).to(main)
    if first and index == 0:
        flat[PAD : PAD + numel] = float("nan")
    exact = flat.float()
    token = kernel.accumulate(flat, wgrad, beta, index, PAD, scale, first)
    reference.accumulate(exact, wgrad, beta, index, PAD, scale, first)
    return flat, cast(exact, main), token


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("main", checks.MAIN_DTYPES, ids=str)
@pytest.mark.parametrize("wgrad", checks.WGRAD_DTYPES, ids=str)
def test_equals_oracle(
    device: torch.device, rounded: Cast, wgrad: torch.dtype, main: torch.dtype, layout: str
) -> None:
    value = LAYOUTS[layout]()
    strided = value.to(wgrad).to(device)  # keeps strides of dense layouts
    if layout in ("columns", "every-second"):
        base = torch.randn(9, 40, device=device).to(wgrad)
        strided = base[:, 3:20] if layout == "columns" else base[:, ::2]
    for first, index in ((True, 0), (True, 1), (True, 2), (False, 0)):
        got, expected, token = run_both(strided, main, first, index, 0.25, rounded)
        assert torch.equal(got, expected), (first, index)
        assert token.tolist() == [0] and token.dtype == torch.uint8


def test_scale_that_is_no_power_of_two(
    device: torch.device, within_budget: Callable[..., None]
) -> None:
    wgrad = torch.randn(3000, device=device).bfloat16()
    flat = torch.randn(3000, device=device)
    exact = flat.double() + wgrad.double() / 3
    best = flat + wgrad.float() / 3
    beta = torch.ones(1, device=device)
    kernel.accumulate(flat, wgrad, beta, 0, 0, 1 / 3, False)
    within_budget("accumulate", flat, best, exact)


def test_stats_of_the_stored_values(device: torch.device) -> None:
    numel = 2 * stats.STATS_TILE + 100
    wgrad = torch.randn(numel, device=device).bfloat16()
    wgrad[5], wgrad[stats.STATS_TILE + 1] = float("inf"), float("nan")
    flat = torch.full((numel + 8,), float("nan"), device=device)  # what follows is not counted
    partials = stats.new_partials(numel, device)
    beta = torch.zeros(1, device=device)
    kernel.accumulate(flat, wgrad, beta, 0, 0, 0.5, True, partials)
    expected = stats.new_partials(numel, device)
    reference.write_stats(expected, flat[:numel])
    assert partials[:, 1].tolist() == [1, 1, 0]
    torch.testing.assert_close(partials, expected, equal_nan=True, rtol=1e-5, atol=0)


def test_finite_values_whose_square_overflows_are_not_flagged(device: torch.device) -> None:
    wgrad = torch.full((10,), 1e30, device=device)
    flat, partials = torch.zeros(10, device=device), stats.new_partials(10, device)
    kernel.accumulate(flat, wgrad, torch.zeros(1, device=device), 0, 0, 1.0, True, partials)
    assert partials.tolist() == [[float("inf"), 0.0]]


def test_too_many_strides_is_an_error(device: torch.device) -> None:
    wgrad = torch.randn(3, 4, 5, 6, device=device).permute(3, 2, 1, 0)
    with pytest.raises(NotImplementedError, match="4 dimensions"):
        kernel.accumulate(
            torch.zeros(360, device=device), wgrad, torch.ones(1, device=device), 0, 0, 1.0, False
        )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    offset=st.integers(0, 17),
)
def test_any_shape_and_order(
    device: torch.device, shape: list[int], order: object, offset: int
) -> None:
    permutation = list(range(len(shape)))
    order.shuffle(permutation)
    wgrad = torch.randn(shape, device=device).permute(permutation)
    flat = torch.randn(offset + wgrad.numel() + 3, device=device)
    expected, beta = flat.clone(), torch.tensor([0.5], device=device)
    kernel.accumulate(flat, wgrad, beta, 0, offset, 2.0, True)
    reference.accumulate(expected, wgrad, beta, 0, offset, 2.0, True)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 5), (5, 1), [(20, 1)]),
        ((4, 5), (1, 4), [(4, 1), (5, 4)]),
        ((2, 3, 4), (12, 4, 1), [(24, 1)]),
        ((2, 3, 4), (12, 1, 3), [(2, 12), (3, 1), (4, 3)]),
        ((6, 1, 7), (1, 9, 0), [(6, 1), (7, 0)]),
        ((1, 1), (3, 9), []),
    ],
)
def test_collapse(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    assert kernel.collapse(shape, strides) == expected
