"""A scatter into zeros with its accumulate becomes one: matches, near misses, numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.passes import fuse, fuse_scatter
from gtpgraph.passes.fuse import find_writes
from gtpgraph.passes.fuse_scatter import match_scatter
from gtpgraph.passes.grad_ready import ACCUMULATE, SCATTER_ACCUMULATE
from gtpgraph.passes.pipeline import fuse_backward, rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
aten = torch.ops.aten
PUT = aten.index_put.default
MASKED_PUT = aten._unsafe_masked_index_put_accumulate.default
CAST = torch.ops.prims.convert_element_type.default
ROWS, COLUMNS, NUMEL = 10, 6, 64


@pytest.fixture(autouse=True)
def _no_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "SMALL_NUMEL", 0)
    monkeypatch.setattr(fuse_scatter, "TIMES_AS_MANY", 1)
    monkeypatch.setattr(fuse_scatter, "LEAST_NUMEL", 0)


def zeros(b: Any, *shape: int, value: float = 0.0) -> fx.Node:
    node = b.graph.call_function(aten.full.default, (list(shape), value), {"dtype": torch.float32})
    with b.mode:
        node.meta["val"] = torch.full(shape, value)
    return node


def inputs(b: Any, *shape: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """indices [shape], values [shape, COLUMNS] and a mask [shape, 1]."""
    return (
        b.input(*shape, dtype=torch.int64),
        b.input(*shape, COLUMNS),
        b.input(*shape, 1, dtype=torch.bool),
    )


def scattered(b: Any, spelling: str, given: tuple[fx.Node, fx.Node, fx.Node]) -> fx.Node:
    at, values, mask = given
    into = zeros(b, ROWS, COLUMNS)
    if spelling == "masked":
        return b.call(MASKED_PUT, into, mask, [at], values)
    return b.call(PUT, into, [at], values, True)


def fused(b: Any, *names: str, **request: Any) -> list[Any]:
    rewrite_backward(b.gm, b.request({k: (n, False) for k, n in enumerate(names)}, numel=NUMEL,
                                     **request))  # fmt: skip
    fuse_backward(b.gm, b.mode, "r0")
    b.gm.graph.lint()
    return [n.target for n in t.targets(b.gm.graph, ACCUMULATE, SCATTER_ACCUMULATE)]


def random(*shape: int) -> list[Tensor]:
    return [torch.randint(-ROWS, ROWS, shape), torch.randn(*shape, COLUMNS),
            torch.rand(*shape, 1) < 0.7]  # fmt: skip


def dense(at: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    kept = values.double() if mask is None else values.double() * mask
    return torch.zeros(ROWS, COLUMNS, dtype=torch.float64).index_put((at,), kept, accumulate=True)


@pytest.mark.parametrize("casts", [0, 1, 2])
@pytest.mark.parametrize("shape", [(7,), (2, 4)])
@pytest.mark.parametrize("spelling", ["plain", "masked"])
def test_a_scatter_and_its_accumulate_become_one(
    spelling: str, shape: tuple[int, ...], casts: int
) -> None:
    b = t.Backward()
    node = scattered(b, spelling, inputs(b, *shape))
    for dtype in (torch.bfloat16, torch.float32)[:casts]:
        node = b.call(CAST, node, dtype)
    b.returns({0: node})
    assert fused(b, "w") == [SCATTER_ACCUMULATE]
    assert t.targets(b.gm.graph, PUT, MASKED_PUT, CAST) == []
    values = random(*shape)
    ran = t.run(b.gm, values, NUMEL)
    want = dense(values[0], values[1], values[2] if spelling == "masked" else None)
    got = ran.flat[: ROWS * COLUMNS].view(ROWS, COLUMNS).double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # casts round no more
    assert ran.sites == [0]


def near_miss(name: str, b: Any) -> tuple[fx.Node, ...]:
    count = ROWS + 1 if name == "more rows than there are" else 7
    at, values, _ = inputs(b, count)
    into = zeros(b, ROWS, COLUMNS, value=1.0 if name == "not into zeros" else 0.0)
    if name == "not into a constant":
        into = b.call(t.MUL, into, 2.0)
    if name == "values not contiguous":
        values = b.call(aten.t.default, b.input(COLUMNS, count))
    if name == "overwrites":
        return (b.call(PUT, into, [at], values, False),)
    if name == "a row for all":
        values = b.call(aten.select.int, values, 0, 0)
    if name == "elements":
        other = b.input(count, dtype=torch.int64)
        return (b.call(PUT, into, [at, other], b.input(count), True),)
    if name == "dimension 1":
        at = b.input(3, dtype=torch.int64)
        return (b.call(PUT, into, [None, at], b.input(ROWS, 3), True),)
    if name == "a mask as index":
        return (b.call(PUT, into, [b.input(ROWS, dtype=torch.bool)], b.input(1, COLUMNS), True),)
    node = b.call(PUT, into, [at], values, True)
    if name == "two users":
        return (node, b.call(t.MUL, node, 2.0))
    if name == "a cast with two users":
        cast = b.call(CAST, node, torch.bfloat16)
        return (cast, b.call(t.MUL, cast, 2.0))
    if name == "something between":
        return (b.call(t.MUL, node, 2.0),)
    return (node,)


@pytest.mark.parametrize(
    ("most", "times", "count", "fuses"),
    [(5, 1, 5, True), (5, 1, 6, False), (100, 2, 5, True), (100, 2, 6, False)],
)
def test_few_rows_into_many(
    monkeypatch: pytest.MonkeyPatch, most: int, times: int, count: int, fuses: bool
) -> None:
    monkeypatch.setattr(fuse_scatter, "MAX_ROWS", most)
    monkeypatch.setattr(fuse_scatter, "TIMES_AS_MANY", times)
    b = t.Backward()
    b.returns({0: scattered(b, "plain", inputs(b, count))})
    assert fused(b, "w") == [SCATTER_ACCUMULATE if fuses else ACCUMULATE]


@pytest.mark.parametrize(
    "name",
    [
        "more rows than there are", "values not contiguous", "not into zeros",
        "not into a constant", "overwrites",
        "a row for all", "elements", "dimension 1", "a mask as index", "two users",
        "a cast with two users", "something between",
    ],
)  # fmt: skip
def test_near_misses_stay_as_they_are(name: str) -> None:
    b = t.Backward()
    grads = near_miss(name, b)
    b.returns(dict(enumerate(grads)))
    assert fused(b, *(f"w{k}" for k in range(len(grads)))) == [ACCUMULATE] * len(grads)


def test_the_ungraphed_chain_keeps_its_dense_gradient() -> None:
    b = t.Backward()
    b.returns({0: scattered(b, "plain", inputs(b, 7))})
    assert fused(b, "w", ungraphed=(0,)) == []
    assert len(t.targets(b.gm.graph, PUT)) == 1


def test_two_uses_are_two_contributions_and_fusing_again_changes_nothing() -> None:
    b = t.Backward()
    given = inputs(b, 7), inputs(b, 5)  # placeholders come first in a graph
    nodes = [scattered(b, how, one) for how, one in zip(("masked", "plain"), given, strict=True)]
    total = b.call(t.ADD, *(b.reduce(node) for node in nodes))
    b.returns({0: total})
    rewrite_backward(b.gm, b.request({0: ("w", True)}, numel=NUMEL))
    before = find_writes(b.gm.graph)
    fuse_backward(b.gm, b.mode, "r0")
    assert [n.args[7] for n in t.targets(b.gm.graph, SCATTER_ACCUMULATE)] == [True, False]
    assert find_writes(b.gm.graph) == before, "sources are named alike, so the check compares them"
    once = str(b.gm.graph)
    fuse_backward(b.gm, b.mode, "r0")
    assert str(b.gm.graph) == once
    values = random(7) + random(5)
    ran = t.run(b.gm, values, NUMEL)
    want = dense(*values[:3]) + dense(values[3], values[4], None)
    got = ran.flat[: ROWS * COLUMNS].view(ROWS, COLUMNS).double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_small_tables_stay_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accumulate_many joins must be the same on ranks with other shapes."""
    for least, target in ((ROWS * COLUMNS, ACCUMULATE), (ROWS * COLUMNS - 1, SCATTER_ACCUMULATE)):
        monkeypatch.setattr(fuse_scatter, "LEAST_NUMEL", least)
        b = t.Backward()
        b.returns({0: scattered(b, "plain", inputs(b, 7))})
        assert fused(b, "w") == [target]


def test_indices_on_another_device_stay() -> None:
    b = t.Backward()
    at = b.input(7, dtype=torch.int64)
    nodes = [b.input(7, COLUMNS), zeros(b, ROWS, COLUMNS)]
    put = b.call(PUT, nodes[1], [at], nodes[0], True)
    accumulate = b.graph.call_function(ACCUMULATE, (nodes[1], put))
    assert match_scatter(accumulate) is not None
    with b.mode:
        at.meta["val"] = torch.empty(7, dtype=torch.int64, device="meta")
    assert match_scatter(accumulate) is None


class Lookups(nn.Module):
    """A table with a padding row, one indexed from its end, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16, padding_idx=3)
        self.table = nn.Parameter(torch.randn(48, 16))

    def forward(self, at: Tensor) -> Tensor:
        h = self.words(at) + self.table[at % 40 - 45]
        return F.cross_entropy(F.linear(h.tanh(), self.words.weight).flatten(0, 1), at.flatten())


class Strided(nn.Module):
    """Gradients of its lookups are transposed, or one element for all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(64, 8), nn.Parameter(torch.randn(64, 8))

    def forward(self, at: Tensor) -> Tensor:
        return self.words(at).t().cumsum(1).square().sum() + self.table[at].sum()


def compiled_against_fp64(net: nn.Module, at: Tensor, **options: Any) -> str:
    """Two compiled steps give the gradients of plain PyTorch in fp64; the backward's text."""
    torch._dynamo.reset()
    plain = copy.deepcopy(net).double()
    plain(at).backward()
    model = gg.DistributedDataParallel(gg.shard(net))
    step = gg.compile(model, lowering="inductor", fuse=True, **options)
    for _ in range(2):
        model.zero_grad_buffer()
        step(at).backward()
        model.finish_grad_sync()
        for name, param in plain.named_parameters():
            error = (model.full_grad(name).double() - param.grad).norm() / param.grad.norm()
            assert error < 1e-6, name
    text: str = step.regions[0].texts["after"]
    model.close()
    return text


def test_lookups_whose_gradients_are_strided() -> None:
    torch.manual_seed(0)
    compiled_against_fp64(Strided(), torch.tensor([1, 5, 5, 9]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_lookups_agree_with_fp64(dynamic: bool) -> None:
    torch.manual_seed(0)
    net = Lookups()
    at = torch.randint(64, (2, 9))
    at[0, :4] = 3
    text = compiled_against_fp64(net, at, dynamic=dynamic)
    assert text.count("target=torch.ops.gtpgraph.scatter_accumulate.default") == 2 * (not dynamic)
