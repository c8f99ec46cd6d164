"""The operators as others call them: values, errors, opcheck, torch.compile; CPU and GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gtpgraph.kernels import ops, reference, stats

NAN = float("nan")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Case = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def cases(device: torch.device) -> dict[str, Case]:
    """One valid call of every operator that needs no process group."""
    flat = torch.randn(64, device=device)
    beta = torch.tensor([0.0, 1.0, 0.5], device=device)
    wgrad = torch.randn(4, 8, device=device).bfloat16()
    recv = torch.randn(2, 32, device=device).bfloat16()
    dy = torch.randn(16, 4, device=device).bfloat16()
    x = torch.randn(16, 8, device=device).bfloat16()
    table = torch.zeros(1, 2, device=device)
    outs = [torch.zeros(3, device=device), torch.zeros(2, 2, device=device)]
    many = [wgrad, wgrad[:2].clone()]
    rows, at = torch.randn(5, 8, device=device), torch.tensor([3, 0, 3, -1, 1], device=device)
    op = torch.ops.gtpgraph
    return {
        "accumulate": (op.accumulate.default, (flat, wgrad, beta, 2, 8, 0.5, True)),
        "accumulate_strided": (op.accumulate.default, (flat, wgrad.t(), beta, 2, 8, 0.5, False)),
        "accumulate_stats": (
            op.accumulate_stats.default,
            (flat, wgrad, beta, 2, 8, 0.5, True, table),
        ),
        "accumulate_many": (
            op.accumulate_many.default,
            (flat, many, beta, [0, 1], [0, 40], 0.5, [True, False]),
        ),
        "shard_reduce": (op.shard_reduce.default, (flat, recv, beta, 2, 8, 0.5, True)),
        "shard_reduce_stats": (
            op.shard_reduce.default,
            (flat, recv, beta, 2, 8, 0.5, True, 30, table),
        ),
        "pack": (op.pack.default, (flat, many, [3, 40], 0.5)),
        "unpack": (op.unpack.default, (outs, flat, [5, 20], 2.0)),
        "scatter_accumulate": (
            op.scatter_accumulate.default,
            (flat, rows, at, beta, 2, 8, 0.5, True, 4),
        ),
        "wgrad_gemm": (op.wgrad_gemm.default, (flat, dy, x, beta, 2, 8, 0.5, True)),
        "wgrad_gemm_add": (op.wgrad_gemm.default, (flat, dy, x, beta, 2, 8, 0.5, False)),
    }


NAMES = sorted(cases(torch.device("cpu")))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(place: torch.device, name: str) -> None:
    op, args = cases(place)[name]
    if place.type == "cuda" and name.startswith(("wgrad_gemm", "scatter")):
        # Its token is not filled, so comparing outputs would compare uninitialised bytes.
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    else:
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(place: torch.device, name: str) -> None:
    op, args = cases(place)[name]
    op(*args)  # what the CUDA path keeps per plan exists before the comparison
    eager, compiled = clone(args), clone(args)
    op(*eager)
    torch.compiler.reset()  # every case compiles the same lambda
    backend = "inductor" if place.type == "cuda" else "aot_eager"
    torch.compile(lambda *a: op(*a), backend=backend, fullgraph=True)(*compiled)
    for a, b in zip(leaves(eager), leaves(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def clone(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).copy_(value)
        return [copy(v) for v in value] if isinstance(value, list) else value

    return tuple(copy(a) for a in args)


def leaves(args: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [v for a in args for v in (a if isinstance(a, list) else [a])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def test_first_stores_over_nan_and_later_adds(place: torch.device) -> None:
    flat = torch.full((20,), NAN, device=place)
    beta = torch.zeros(2, device=place)
    wgrad = torch.randn(3, 4, device=place).bfloat16()
    token = ops.accumulate(flat, wgrad, beta, 1, 5, 0.5, True)
    assert torch.equal(flat[5:17].view(3, 4), wgrad.float() * 0.5)
    assert flat[:5].isnan().all() and flat[17:].isnan().all()
    ops.accumulate(flat, wgrad, beta, 1, 5, 0.25, False, token)
    assert torch.equal(flat[5:17].view(3, 4), wgrad.float() * 0.75)


def test_adding_is_bitwise_torch_add(place: torch.device) -> None:
    wgrad = torch.randn(50, 30, device=place).bfloat16().t()
    flat = torch.randn(1500, device=place)
    expected = flat.clone().view(30, 50).add_(wgrad.float(), alpha=0.25)
    ops.accumulate(flat, wgrad, torch.ones(1, device=place), 0, 0, 0.25, False)
    assert torch.equal(flat.view(30, 50), expected)


def test_token_orders_and_keeps_nothing_alive(place: torch.device) -> None:
    op, args = cases(place)["accumulate"]
    token = op(*args)
    assert token.shape == (1,) and token.dtype == torch.uint8 and token.device.type == place.type
    assert int(token) == 0


def test_survives_dead_code_elimination(place: torch.device) -> None:
    def step(flat: torch.Tensor, wgrad: torch.Tensor, beta: torch.Tensor) -> None:
        token = ops.accumulate(flat, wgrad, beta, 0, 0, 1.0, True)
        ops.accumulate(flat, wgrad, beta, 0, 0, 1.0, False, token)

    flat, beta = torch.full((8,), NAN, device=place), torch.zeros(1, device=place)
    wgrad = torch.randn(8, device=place)
    torch.compile(step, backend="aot_eager", fullgraph=True)(flat, wgrad, beta)
    assert torch.equal(flat, wgrad * 2)


def test_all_blockers_in_one_message(place: torch.device) -> None:
    flat = torch.zeros(10, device=place, dtype=torch.float16)
    wgrad = torch.zeros(3, 4, device=place, dtype=torch.float64)
    beta = torch.zeros(2, device=place, dtype=torch.float64)
    with pytest.raises(ValueError) as error:
        ops.accumulate(flat, wgrad, beta, 2, 5, 1.0, True)
    text = str(error.value)
    for part in ("flat: expected float32 or bfloat16, got float16", "beta: expected a 1-D float32"):
        assert part in text
    assert "wgrad: expected bfloat16 or float16 or float32, got float64" in text
    assert "[5, 17) lies outside the buffer of 10" in text
    assert "index: expected 0 <= index < 2" in text


@pytest.mark.parametrize(
    ("name", "position", "value", "match"),
    [
        ("accumulate", 4, -1, "outside the buffer"),
        ("accumulate_stats", 1, torch.zeros(8, 4).bfloat16().t(), "expected contiguous"),
        ("accumulate_stats", 7, torch.zeros(2, 2), r"float32 \(1, 2\)"),
        ("accumulate_many", 4, [0, 8], "tensors 0 and 1 overlap at element 8"),
        ("accumulate_many", 3, [0], "indices: expected 2 entries"),
        ("accumulate_many", 1, [torch.zeros(4), torch.zeros(4).half()], "expected one dtype"),
        ("accumulate_many", 1, [torch.zeros(4, 2).t(), torch.zeros(4)], "tensor 0: expected cont"),
        ("shard_reduce", 1, torch.zeros(32), r"expected \[ranks, elements\]"),
        ("shard_reduce_stats", 7, 33, "valid: expected 0 <= valid <= 32"),
        ("pack", 2, [40, 3], "expected ascending"),
        ("unpack", 2, [63, 63], "outside the buffer"),
        ("scatter_accumulate", 1, torch.zeros(40), r"values: expected \[N, C\]"),
        ("scatter_accumulate", 2, torch.zeros(5), "indices: expected int64 or int32"),
        ("scatter_accumulate", 2, torch.zeros(4, dtype=torch.int64), r"\[N\] with N = 5"),
        ("scatter_accumulate", 8, 9, "outside the buffer"),
        ("scatter_accumulate", 8, -1, "rows: expected 0 or more, got -1"),
        ("wgrad_gemm", 2, torch.zeros(15, 8).bfloat16(), "flatten the leading"),
        ("wgrad_gemm", 2, torch.zeros(16, 8), "expected dy's dtype"),
        ("wgrad_gemm", 1, torch.zeros(4, 16).bfloat16().t(), "pass dy.contiguous"),
    ],
)
def test_errors(place: torch.device, name: str, position: int, value: Any, match: str) -> None:
    op, args = cases(place)[name]
    values = list(args)
    values[position] = (
        [v.to(place) if isinstance(v, torch.Tensor) else v for v in value]
        if isinstance(value, list)
        else value.to(place)
        if isinstance(value, torch.Tensor)
        else value
    )
    with pytest.raises(ValueError, match=match):
        op(*values)


def test_all_blockers_of_a_scatter_in_one_message(place: torch.device) -> None:
    flat, beta = torch.zeros(10, device=place).half(), torch.zeros(2, device=place)
    values, indices = torch.zeros(4, 3, device=place).double().t(), torch.zeros(5, device=place)
    with pytest.raises(ValueError) as error:
        ops.scatter_accumulate(flat, values, indices, beta, 2, 0, 1.0, True, -1)
    for part in ("flat: expected float32 or", "values: expected bfloat16 or",
                 "indices: expected int64 or int32", "[N] with N = 3", "rows: expected 0 or more",
                 "index: expected 0 <= index < 2"):  # fmt: skip
        assert part in str(error.value)


def test_strided_rows_are_scattered_as_they_are(place: torch.device) -> None:
    op, args = cases(place)["scatter_accumulate"]
    want, got = clone(args), list(clone(args))
    got[1] = got[1].t().contiguous().t()
    got[2] = torch.stack([got[2], got[2]], -1)[:, 0]
    assert not got[1].is_contiguous() and not got[2].is_contiguous()
    op(*want)
    op(*got)
    assert torch.equal(want[0], got[0])


@pytest.mark.parametrize("outside", [4, -5])
def test_an_index_outside_is_an_error_on_the_cpu(outside: int) -> None:
    op, args = cases(torch.device("cpu"))["scatter_accumulate"]
    args[2][1] = outside
    before = args[0].clone()
    with pytest.raises(IndexError, match=rf"expected -4 <= index < 4, got \[{outside}\]"):
        op(*args)
    assert torch.equal(args[0], before)


@pytest.mark.parametrize("name", ["accumulate_many", "pack", "unpack"])
def test_a_layout_that_passed_is_still_checked_for_its_tensors(
    place: torch.device, name: str
) -> None:
    op, args = cases(place)[name]
    op(*args)
    position = 0 if name == "unpack" else 1
    tensors = list(args[position])
    strided = torch.stack([tensors[0], tensors[0]], -1)[..., 0]
    for wrong, match in (
        (tensors[0].double(), "expected bfloat16 or float16 or float32"),
        (strided, "expected contiguous"),
    ):
        values = list(args)
        values[position] = [wrong, *tensors[1:]]
        with pytest.raises(ValueError, match=match):
            op(*values)


def test_stats_feed_clipping_without_another_pass(place: torch.device) -> None:
    recv = torch.randn(2, 5000, device=place)
    flat, beta = torch.empty(5000, device=place), torch.zeros(1, device=place)
    partials = stats.new_partials(5000, place)
    ops.shard_reduce(flat, recv, beta, 0, 0, 0.5, True, 4990, partials)
    total, bad_count = stats.finish(partials)
    torch.testing.assert_close(total, flat[:4990].double().square().sum(), rtol=1e-6, atol=0)
    assert float(bad_count) == 0


@pytest.fixture
def group() -> Iterator[str]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group.group_name
    finally:
        dist.destroy_process_group()


def test_symmetric_ops_on_one_rank(group: str) -> None:
    flat, beta = torch.full((12,), NAN), torch.zeros(1)
    buffer = torch.randn(8).bfloat16()
    op = torch.ops.gtpgraph
    ops.symm_reduce_scatter(flat, buffer, beta, 0, 2, 0.5, True, group, 1)
    assert torch.equal(flat[2:10], buffer.float() * 0.5)
    out = torch.empty(8)
    ops.symm_all_gather(out, buffer, group, 1)
    assert torch.equal(out, buffer.float())
    flat.zero_()
    checks = ("test_schema", "test_faketensor")
    args = (flat, buffer, beta, 0, 2, 0.5, True, group, 1)
    torch.library.opcheck(op.symm_reduce_scatter.default, args, test_utils=checks)
    torch.library.opcheck(op.symm_all_gather.default, (out, buffer, group, 1), test_utils=checks)
    with pytest.raises(ValueError, match="multiple of 3"):
        ops.symm_reduce_scatter(flat, buffer, beta, 0, 2, 0.5, True, group, 3)
    with pytest.raises(ValueError, match="expected 1"):
        ops.symm_all_gather(torch.empty(9), buffer, group, 1)


def exchange(rank: int, ranks: int) -> None:
    """On every rank: reduce-scatter and all-gather against what all ranks' seeds give."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    buffers = [
        torch.randn(ranks * 10, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    flat, beta = torch.full((10,), NAN), torch.zeros(1)
    ops.symm_reduce_scatter(flat, buffers[rank], beta, 0, 0, 0.5, True, name, ranks)
    chunks = [b[rank * 10 : (rank + 1) * 10] for b in buffers]
    assert torch.equal(flat, reference.sum_rows(chunks) * 0.5)
    out = torch.empty(ranks * ranks * 10)
    ops.symm_all_gather(out, buffers[rank], name, ranks)
    assert torch.equal(out, torch.cat(buffers))


@pytest.mark.dist
def test_symmetric_ops_on_two_ranks(ranks2: Any) -> None:
    ranks2.run(exchange)
