"""lower_collectives_pass: gather and reduce become launch and wait, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gtpgraph.by_path import module_at
from gtpgraph.kernels import comm
from gtpgraph.passes.lower_collectives import (
    ALL_GATHER,
    EXCHANGE,
    REDUCE_SCATTER,
    WAIT,
    is_launch,
    lower_collectives_pass,
)

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
PAD = torch.ops.aten.constant_pad_nd.default
CAST = torch.ops.prims.convert_element_type.default
CLONE = torch.ops.aten.clone.default
SLICE = torch.ops.aten.slice.Tensor
SHARD_REDUCE = torch.ops.gtpgraph.shard_reduce.default
TRANSPOSE = torch.ops.aten.t.default


def lower(b: Any, wire_dtype: torch.dtype | None = None) -> Any:
    result = lower_collectives_pass(b.gm, wire_dtype=wire_dtype, fake_mode=b.mode)
    b.gm.graph.lint()
    return result


def kinds(b: Any) -> list[Any]:
    return [n.target for n in b.graph.nodes if n.op == "call_function"]


def two_sums(group: str) -> Any:
    """A gather used by a matmul, and a reduce of its wgrad; both are returned."""
    b = t.Backward()
    shard, x = b.input(6, 6), b.input(6, 6)
    full = b.call(t.GATHER, shard, 6, group)
    b.returns({}, b.call(t.MM, full, x), b.reduce(b.call(t.MM, x, full), group))
    return b


@pytest.mark.parametrize("group", ["one process", "a group"])
def test_numbers_are_those_of_the_unlowered_graph(group: str) -> None:
    with t.one_rank() as groups:
        b = two_sums(groups.group_name("gtp") if group == "a group" else "")
        inputs = torch.randn(6, 6), torch.randn(6, 6)
        expected = b.gm(*inputs)
        result = lower(b)
        assert result.modified and result.counts == {"gather": 1, "reduce": 1}
        assert not t.targets(b.graph, t.GATHER, t.REDUCE)
        assert all(torch.equal(a, e) for a, e in zip(b.gm(*inputs), expected, strict=True))
        launches = [n for n in b.graph.nodes if is_launch(n)]
        assert len(launches) == (2 if group == "a group" else 0)
        assert all([u.target for u in n.users] == [WAIT] for n in launches)


def test_a_group_of_one_leaves_nothing_behind() -> None:
    b = two_sums("")
    lower(b)
    assert kinds(b) == [t.MM, t.MM]


@pytest.mark.parametrize("rows", [6, 7, 8])
def test_rows_that_do_not_divide_are_padded_and_cut(rows: int) -> None:
    """Four ranks: 7 rows travel as 8, the padding is zero, and the weight has 7 again."""
    with t.fake_ranks(4) as groups:
        name = groups.group_name("gtp")
        b = t.Backward()
        shard, wgrad = b.input(2, 3), b.input(rows, 3)
        b.returns({}, b.call(t.GATHER, shard, rows, name), b.reduce(wgrad, name, ranks=4))
        lower(b)
    padded, cut = ([PAD], [SLICE]) if rows != 8 else ([], [])
    assert kinds(b) == [ALL_GATHER, WAIT, *cut, *padded, REDUCE_SCATTER, WAIT]
    full, part = b.graph.output_node().args[0]
    assert tuple(full.meta["val"].shape) == (rows, 3)
    assert tuple(part.meta["val"].shape) == (2, 3)
    for pad in t.targets(b.graph, PAD):
        assert torch.equal(
            pad.target(torch.ones(rows, 3), *pad.args[1:])[rows:], torch.zeros(8 - rows, 3)
        )


def test_padding_carries_the_sum_of_every_rank() -> None:
    """What a padded reduce delivers is what the operator itself delivers."""
    with t.one_rank() as groups:
        name = groups.group_name("gtp")
        wgrad = torch.randn(5, 3)
        b = t.Backward()
        b.returns({}, b.call(t.REDUCE, b.input(5, 3), 7, name))
        lower(b)
        (got,) = b.gm(wgrad)
        assert torch.equal(got, comm.pad_rows(wgrad, 7))


@pytest.mark.parametrize(
    ("wire", "read_by", "cast"),
    [
        (torch.float32, "accumulate", True),
        (torch.bfloat16, "accumulate", False),  # it has that dtype already
        (None, "accumulate", False),
        (torch.float32, "something else", False),  # which expects the dtype that it was traced with
        (torch.float32, "both", False),
    ],
)
def test_cast_to_the_wire_only_where_accumulates_read(
    wire: torch.dtype | None, read_by: str, cast: bool
) -> None:
    with t.fake_ranks(2) as groups:
        b = t.Backward()
        flat, beta = b.input(64), b.input(4)
        part = b.reduce(b.input(4, 3, dtype=torch.bfloat16), groups.group_name("gtp"), ranks=2)
        others = [b.call(t.MUL, part, 2.0)] if read_by != "accumulate" else []
        if read_by != "something else":
            b.call(torch.ops.gtpgraph.accumulate.default, flat, part, beta, 0, 0, 1.0, True)
        b.returns({}, *others)
        lower(b, wire)
    assert (CAST in kinds(b)) is cast
    (wait,) = t.targets(b.graph, WAIT)
    assert wait.meta["val"].dtype == (torch.float32 if cast else torch.bfloat16)


ACCUMULATE = torch.ops.gtpgraph.accumulate.default


@pytest.mark.parametrize(
    ("dtype", "wire", "exchanged"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
        (torch.float32, None, False),
    ],
)
def test_a_16_bit_wire_is_summed_by_who_accumulates(
    dtype: torch.dtype, wire: torch.dtype | None, exchanged: bool
) -> None:
    """Chunks are exchanged and added in fp32, twice where two accumulates read them."""
    with t.one_rank() as groups:
        b = t.Backward()
        flat, beta = b.input(64), b.input(4)
        part = b.reduce(b.input(4, 3, dtype=dtype), groups.group_name("gtp"))
        for slot, offset in ((0, 0), (1, 32)):
            b.call(ACCUMULATE, flat, part, beta, slot, offset, 0.5, True, stack_trace="here")
        b.returns({})
        lower(b, wire)
        accumulates = t.targets(b.graph, SHARD_REDUCE if exchanged else ACCUMULATE)
        assert len(accumulates) == 2
        assert [n.args[3:7] for n in accumulates] == [(0, 0, 0.5, True), (1, 32, 0.5, True)]
        assert all(n.meta["stack_trace"] == "here" for n in accumulates)
        (launch,) = (n for n in b.graph.nodes if is_launch(n))
        assert launch.target is (EXCHANGE if exchanged else REDUCE_SCATTER)
        assert launch.meta["val"].dtype == (wire or dtype)
        main, wgrad = torch.full((64,), float("nan")), torch.randn(4, 3).to(dtype)
        b.gm.recompile()
        b.gm(main, torch.zeros(4), wgrad)
    expected = wgrad.to(wire or dtype).float().flatten() * 0.5
    assert torch.equal(main[:12], expected) and torch.equal(main[32:44], expected)


def test_a_16_bit_wire_leaves_other_readers_their_reduction() -> None:
    with t.fake_ranks(2) as groups:
        b = t.Backward()
        flat, beta = b.input(64), b.input(4)
        part = b.reduce(b.input(4, 3), groups.group_name("gtp"), ranks=2)
        b.call(ACCUMULATE, flat, part, beta, 0, 0, 1.0, True)
        b.returns({}, part)
        lower(b, torch.bfloat16)
    assert len(t.targets(b.graph, REDUCE_SCATTER)) == 1
    assert not t.targets(b.graph, EXCHANGE, SHARD_REDUCE, CAST)


def test_a_strided_wgrad_travels_contiguous() -> None:
    with t.fake_ranks(2) as groups:
        b = t.Backward()
        wgrad = b.call(TRANSPOSE, b.input(3, 4))
        b.returns({}, b.reduce(wgrad, groups.group_name("gtp"), ranks=2))
        lower(b)
    (launch,) = t.targets(b.graph, REDUCE_SCATTER)
    assert launch.args[0].target is CLONE and launch.args[0].meta["val"].is_contiguous()


def test_where_a_node_came_from_is_carried_and_its_value_is_not() -> None:
    with t.fake_ranks(2) as groups:
        b = t.Backward()
        meta = {"stack_trace": "here", "seq_nr": 9, "partitioner_tag": "is_backward"}
        part = b.reduce(b.input(4, 3), groups.group_name("gtp"), ranks=2, **meta, other="x")
        b.returns({}, part)
        lower(b)
    for node in t.targets(b.graph, REDUCE_SCATTER, WAIT):
        assert {k: node.meta.get(k) for k in meta} == meta and "other" not in node.meta
        assert tuple(node.meta["val"].shape) == (2, 3)


def test_missing_metadata_is_not_invented() -> None:
    b = two_sums("")
    lower(b)
    assert all("stack_trace" not in n.meta and "seq_nr" not in n.meta for n in b.graph.nodes)


def test_every_reader_of_a_gather_gets_the_wait() -> None:
    with t.fake_ranks(2) as groups:
        b = t.Backward()
        full = b.call(t.GATHER, b.input(2, 4), 4, groups.group_name("gtp"))
        b.returns({}, b.call(t.MM, full, full), b.call(t.MUL, full, full), full)
        lower(b)
    (wait,) = t.targets(b.graph, WAIT)
    assert len(wait.users) == 3


def test_unchanged_when_nothing_matches_and_idempotent() -> None:
    b = t.Backward()
    x = b.input(4, 4)
    b.returns({}, b.call(t.MM, x, x))
    before, code = t.text(b.graph), b.gm.code
    assert not lower(b).modified
    assert (t.text(b.graph), b.gm.code) == (before, code)
    with t.one_rank() as groups:
        b = two_sums(groups.group_name("gtp"))
        lower(b)
        once = t.text(b.graph)
        assert not lower(b).modified and t.text(b.graph) == once


def test_launches_survive_dead_code_elimination_through_their_readers() -> None:
    with t.one_rank() as groups:
        b = two_sums(groups.group_name("gtp"))
        lower(b)
        before = t.text(b.graph)
        b.graph.eliminate_dead_code()
        assert t.text(b.graph) == before


@pytest.mark.parametrize("target", [ALL_GATHER, REDUCE_SCATTER, WAIT, t.MM])
def test_is_launch(target: Any) -> None:
    node = t.Backward().graph.call_function(target, ())
    assert is_launch(node) is (target in (ALL_GATHER, REDUCE_SCATTER))


def test_the_models_own_sum_is_a_launch() -> None:
    target = torch.ops._c10d_functional.all_reduce.default
    assert is_launch(t.Backward().graph.call_function(target, ()))
    assert not is_launch(t.Backward().input(1))
