"""lower_symmetric_pass, its operators and what `verify` makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from gtpgraph.by_path import module_at
from gtpgraph.graph.checked import Checked
from gtpgraph.graph.verify import violations
from gtpgraph.kernels import comm
from gtpgraph.kernels.ops_staged import staged_accumulate, staged_gather
from gtpgraph.passes.fuse import find_writes
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY, SHARD_REDUCE, STAGED_ACCUMULATE
from gtpgraph.passes.lower_collectives import is_launch
from gtpgraph.passes.lower_symmetric import STAGED_GATHER, is_staging, lower_symmetric_pass
from gtpgraph.passes.pipeline import rewrite_backward

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))


class Net(nn.Module):
    """A used twice (rows that 2 ranks pad), a norm, and an UNGRAPHED layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 7, bias=False)
        self.b, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.a(x).relu()))).square().mean()


def made(**options: Any) -> Any:
    x = torch.randn(4, 7)
    with t.fake_ranks(2, 2) as groups:
        return t.compiled(Net(), x, groups=groups, ungraphed=["b.weight"], **options)


@pytest.fixture(scope="module")
def functional() -> Any:
    return made()


@pytest.fixture(scope="module")
def symmetric() -> Any:
    return made(collectives="symmetric", wrap={"wire_dtype": torch.bfloat16})


def kinds(graph: fx.Graph, *wanted: object) -> int:
    return len(t.targets(graph, *wanted))


def test_every_exchange_becomes_one_op_over_one_buffer(functional: Any, symmetric: Any) -> None:
    (backward,), (forward,) = symmetric.checked, symmetric.forwards
    for graph, old in (
        (backward.graph, functional.checked[0].graph), (forward, functional.forwards[0])
    ):  # fmt: skip
        launches = [n for n in old.nodes if is_launch(n)]
        assert launches and not [n for n in graph.nodes if is_launch(n)]
        assert kinds(graph, STAGED_GATHER, STAGED_ACCUMULATE) == len(launches)
        (buffer,) = (n for n in graph.nodes if is_staging(n))
        assert list(graph.nodes)[[n.op for n in graph.nodes].index("call_function") - 1] is buffer
        assert len(buffer.users) == len(launches)
    assert kinds(backward.graph, STAGED_ACCUMULATE) == 2, "a twice; b's weight leaves unreduced"
    assert kinds(backward.graph, ACCUMULATE) == 3 and not kinds(backward.graph, SHARD_REDUCE)


def test_plan_and_writes_are_those_of_functional_collectives(
    functional: Any, symmetric: Any
) -> None:
    old, new = functional.step.plan, symmetric.step.plan
    assert len(new.regions[0].occurrences) == 5
    assert new.regions == old.regions and new.ready_counts == old.ready_counts
    was, now = (find_writes(c.checked[0].graph) for c in (functional, symmetric))
    # a functional one adds what its wait returned, a symmetric one the wgrad itself
    assert [replace(w, source="") for w in now.added] == [replace(w, source="") for w in was.added]
    assert now.reported == was.reported and now.orphans == was.orphans == ()
    assert len({w.source for w in now.added}) == 5


# -- verify ---------------------------------------------------------------------------------------


@pytest.fixture
def good(symmetric: Any) -> Iterator[Checked]:
    checked = t.copied(symmetric.checked[0])
    assert violations(checked) == []
    yield checked


def rules(checked: Checked) -> set[str]:
    return {line.partition(":")[0] for line in violations(checked)}


def accumulates(g: Checked) -> list[fx.Node]:
    return t.targets(g.graph, STAGED_ACCUMULATE)


def test_v01_a_lost_contribution(good: Checked) -> None:
    node = accumulates(good)[-1]
    ready = next(u for u in node.users if u.target is GRAD_READY)
    before = node.kwargs["after"]
    ready.replace_all_uses_with(before)
    good.graph.erase_node(ready)
    node.replace_all_uses_with(before)
    good.graph.erase_node(node)
    occurrences = [o for o in good.occurrences if o.site != ready.args[1]]
    assert {"V01"} <= rules(replace(good, occurrences=occurrences)) <= {"V01", "V05"}


def test_v01_a_contribution_taken_twice(good: Checked) -> None:
    one, two = accumulates(good)
    two.update_arg(1, one.args[1])
    assert rules(good) == {"V01"}


def test_v02_a_report_behind_another_accumulate(good: Checked) -> None:
    one, two = (next(u for u in n.users if u.target is GRAD_READY) for n in accumulates(good))
    two.update_arg(2, one.args[2])
    assert rules(good) == {"V02"}


def test_v03_another_group(good: Checked) -> None:
    for node in accumulates(good):
        node.update_arg(10, "another")
    for node in t.targets(good.graph, STAGED_GATHER):
        node.update_arg(3, "another")
    assert rules(good) == {"V03"}


def test_v03_another_place(good: Checked) -> None:
    for node in accumulates(good):
        node.update_arg(3, node.args[3] + 1)
    assert rules(good) == {"V03"}


def test_v07_one_buffer_for_two_groups(good: Checked) -> None:
    t.targets(good.graph, STAGED_GATHER)[0].update_arg(3, "another")
    assert rules(good) == {"V07"}


def test_v07_the_buffer_is_read_by_something_else(good: Checked) -> None:
    buffer = next(n for n in good.graph.nodes if is_staging(n))
    with good.graph.inserting_after(accumulates(good)[0]):
        good.graph.call_function(torch.ops.aten.clone.default, (buffer,))
    assert rules(good) == {"V07"}


# -- the pass by itself ---------------------------------------------------------------------------


def byte_buffer(b: Any, size: int = 512) -> Tensor:
    with b.mode:
        return torch.empty(size, dtype=torch.uint8)


def a_backward(group: str, ranks: int) -> Any:
    b = t.Backward()
    g = b.input(4, 4)
    b.wgrad = b.call(t.MM, g, g)
    b.reduced = b.reduce(b.wgrad, group, ranks)
    return b


def test_a_group_of_one_is_left_alone() -> None:
    b = a_backward("", 1)
    b.returns({0: b.reduced})
    request = replace(b.request({0: ("w", True)}), staging={})
    inserted, _ = rewrite_backward(b.gm, request)
    assert inserted.staging == () and kinds(b.gm.graph, ACCUMULATE) == 1
    x = torch.randn(4, 4)
    got = t.run(b.gm, [x], 16)
    assert torch.equal(got.flat, (x @ x).flatten()) and got.sites == [0]


def test_a_reduced_wgrad_that_something_else_reads_is_refused() -> None:
    with t.one_rank():
        name = dist.group.WORLD.group_name
        b = a_backward(name, 1)
        b.returns({}, b.call(t.MUL, b.reduced, b.reduced))
        with pytest.raises(NotImplementedError, match="collectives='functional'"):
            lower_symmetric_pass(
                b.gm, wire_dtype=None, staging={name: byte_buffer(b)}, fake_mode=b.mode
            )


def test_a_group_without_a_buffer_is_an_error() -> None:
    with t.one_rank():
        b = a_backward(dist.group.WORLD.group_name, 1)
        b.returns({0: b.reduced})
        with pytest.raises(ValueError, match="staging buffer for each of the groups"):
            lower_symmetric_pass(b.gm, wire_dtype=None, staging={}, fake_mode=b.mode)


# -- operators ------------------------------------------------------------------------------------


def test_operators_on_one_rank() -> None:
    with t.one_rank():
        name = dist.group.WORLD.group_name
        staging = torch.zeros(256, dtype=torch.uint8)
        shard = torch.randn(4, 3).bfloat16()
        assert torch.equal(staged_gather(staging, shard, 3, name, 1), shard[:3])
        flat, beta = torch.full((20,), float("nan")), torch.zeros(2)
        wgrad = torch.randn(3, 3).t()  # strided, and a row fewer than the shard
        args = (flat, wgrad, beta, 1, 4, 0.5, True, staging, 4, torch.bfloat16, name, 1)
        staged_accumulate(*args)
        want = torch.cat([wgrad.bfloat16().float().flatten() * 0.5, torch.zeros(3)])
        assert torch.equal(flat[4:16], want)
        assert flat[:4].isnan().all() and flat[16:].isnan().all()
        staged_accumulate(*args[:6], False, *args[7:])
        assert torch.equal(flat[4:16], 2 * want)
        for op, arguments in (
            (torch.ops.gtpgraph.staged_gather, (staging, shard, 3, name, 1)),
            (torch.ops.gtpgraph.staged_accumulate, (torch.zeros(20), *args[1:])),
        ):
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_small_or_odd_buffer_is_refused() -> None:
    shard = torch.randn(4, 4)
    for staging in (torch.zeros(63, dtype=torch.uint8), torch.zeros(64)):
        with pytest.raises(ValueError, match="bytes >= 64"):
            staged_gather(staging, shard, 4, "", 1)
    big = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="at most 2 x 1 rows"):
        staged_accumulate(
            torch.zeros(4), shard, torch.zeros(1), 0, 0, 1.0, True, big, 1, torch.float32, "", 2
        )


def exchange(rank: int, world: int) -> None:
    """Ops in a row over one buffer equal gather and reduce."""
    name = dist.group.WORLD.group_name
    staging = torch.zeros(1024, dtype=torch.uint8)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        shard = torch.randn(3, 5, generator=generator).to(dtype)
        want = comm.gather(shard, 5, name)
        assert torch.equal(staged_gather(staging, shard, 5, name, world), want)
        wgrad = torch.randn(5, 5, generator=generator)
        flat = torch.ones(15)
        staged_accumulate(
            flat, wgrad, torch.ones(1), 0, 0, 0.25, False, staging, 3, torch.float32, name, world
        )
        whole = torch.ops.gtpgraph.reduce(wgrad, 3, name).flatten()
        torch.testing.assert_close(flat, 1 + 0.25 * whole)


@pytest.mark.dist
def test_operators_equal_gather_and_reduce(ranks2: Any) -> None:
    ranks2.run(exchange)
