"""accumulate_many, pack and unpack against the oracles: mixed shapes, alignment, gaps, empties."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtpgraph.kernels import checks, reference, tables

many = pytest.importorskip("gtpgraph.kernels.many", reason="triton is not installed")
unpacking = pytest.importorskip("gtpgraph.kernels.unpack", reason="triton is not installed")

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
SIZES = (37, 8, 0, 5000, 1, 4096, 4100)


def layout(sizes: tuple[int, ...] | list[int], gap: int) -> tuple[list[int], int]:
    """(offsets, elements of flat) with ``gap`` elements before and after every tensor."""
    offsets, end = [], gap
    for size in sizes:
        offsets.append(end)
        end += size + gap
    return offsets, end


@pytest.mark.parametrize("gap", [0, 3, 8])
@pytest.mark.parametrize("main", checks.MAIN_DTYPES, ids=str)
@pytest.mark.parametrize("wgrad", checks.WGRAD_DTYPES, ids=str)
def test_accumulate_many(
    device: torch.device, rounded: Cast, wgrad: torch.dtype, main: torch.dtype, gap: int
) -> None:
    offsets, end = layout(SIZES, gap)
    values = [torch.randn(n, device=device).to(wgrad) for n in SIZES]
    beta = torch.tensor([0.0, 1.0, 0.5], device=device)
    indices = [0, 1, 2, 0, 1, 2, 0]
    first = [True, True, True, True, False, True, False]
    flat = torch.randn(end, device=device).to(main)
    for i in (0, 3):  # b == 0
        flat[offsets[i] : offsets[i] + SIZES[i]] = float("nan")
    exact = flat.float()
    reference.accumulate_many(exact, values, beta, indices, offsets, 0.5, first)
    token = many.accumulate_many(flat, values, beta, indices, offsets, 0.5, first)
    assert torch.equal(flat, rounded(exact, main)) and token.tolist() == [0]


@pytest.mark.parametrize("gap", [0, 3, 8])
@pytest.mark.parametrize("source", checks.WGRAD_DTYPES, ids=str)
def test_pack_zeroes_the_gaps_and_unpack_reverses_it(
    device: torch.device, rounded: Cast, source: torch.dtype, gap: int
) -> None:
    offsets, end = layout(SIZES, gap)
    values = [torch.randn(n, device=device).to(source) for n in SIZES]
    for wire in checks.WGRAD_DTYPES:
        flat = torch.empty(end, dtype=wire, device=device)
        many.pack(flat, values, offsets, 0.5)
        exact = torch.empty(end, device=device)
        reference.pack(exact, values, offsets, 0.5)
        assert torch.equal(flat, rounded(exact, wire))
        back = [torch.empty(n, device=device) for n in SIZES]
        unpacking.unpack(back, flat, offsets, 2.0)
        for piece, offset in zip(back, offsets, strict=True):
            assert torch.equal(piece, 2 * flat[offset : offset + piece.numel()].float())


def test_nothing_to_do(device: torch.device) -> None:
    flat = torch.full((5,), 7.0, device=device)
    beta = torch.ones(1, device=device)
    assert many.accumulate_many(flat, [], beta, [], [], 1.0, []).tolist() == [0]
    assert flat.tolist() == [7.0] * 5
    assert unpacking.unpack([], flat, [], 1.0).tolist() == [0]
    many.pack(flat, [], [], 1.0)  # all of flat is a gap
    assert flat.tolist() == [0.0] * 5


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=6),
    gap=st.integers(0, 20),
    shift=st.integers(0, 9),
)
def test_any_sizes_and_alignment(
    device: torch.device, sizes: list[int], gap: int, shift: int
) -> None:
    offsets, end = layout(sizes, gap)
    values = [torch.randn(n + shift, device=device).half()[shift:] for n in sizes]
    flat = torch.empty(end, device=device)
    expected = torch.empty(end, device=device)
    many.pack(flat, values, offsets, 1.0)
    reference.pack(expected, values, offsets, 1.0)
    assert torch.equal(flat, expected)


def test_tile_records_cover_every_element_once() -> None:
    segments = (
        tables.Segment(0, 0, 5),
        tables.Segment(5, 2 * tables.TILE + 1, 2 * tables.TILE + 4, index=3),
        tables.Segment(9000, 7, 7, index=4, first=False),
    )
    rows = tables.tile_records(segments)
    assert [row[0] for row in rows] == [0, 1, 1, 1, 2]
    assert [row[1] for row in rows] == [0, 0, tables.TILE, 2 * tables.TILE, 0]
    assert [row[5] for row in rows] == [0, 3, 3, 3, -1]
