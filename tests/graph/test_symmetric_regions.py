"""Regions and buckets that exchange through symmetric memory: gradients, reports, replays.

On a CPU the operators move their buffers with an ordinary collective; all else is as on a GPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.models import build
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.reduction_symmetric import SymmetricReduction
from gtpgraph.testing import RankPool, fp64_grads, max_error

host = module_at("gtpgraph_host_driver", str(Path(__file__).parent / "host_driver.py"))
DISPATCH = ("after", "event", "in_graph")
BAR, WIRE_BAR = 1e-6, 2e-2  # fp32 where sums change order; bf16 on the wire


class Net(nn.Module):
    """A used twice (rows that ranks pad), a norm, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(10, 10), nn.Linear(10, 6), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.a(x).relu()))).square().mean()


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * seed + rank))


def wrapped(model: nn.Module, world: int, gtp: int, **kw: Any) -> gg.DistributedDataParallel:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    groups = ProcessGroups.from_mesh(mesh)
    kw = {"collectives": "symmetric", "bucket_mb": 0.05, **kw}
    return gg.DistributedDataParallel(gg.shard(model, groups), groups, **kw)


def step(model: gg.DistributedDataParallel, call: Any, *inputs: Any) -> dict[str, Tensor]:
    model.zero_grad_buffer()
    call(*inputs).backward()
    model.finish_grad_sync()
    return {name: model.full_grad(name) for name, _ in model.named_weights()}


def uses(records: Any) -> list[tuple[str, int]]:
    return [(r.weight, r.use) for r in records]


def mtp_replays(rank: int, world: int, gtp: int) -> None:
    """A7 on a host runtime: eager, then captured regions, of one MTP model."""
    torch.manual_seed(0)
    net, make_batch = build("mtp-tiny", layers=1)
    want = fp64_grads(copy.deepcopy(net), [make_batch(0, r, "cpu") for r in range(world)])
    model = wrapped(net, world, gtp)
    assert any(isinstance(b.reduction, SymmetricReduction) for b in model.buckets)
    inputs = make_batch(0, rank, "cpu")
    assert max_error(step(model, model, *inputs), want) < BAR
    eager = Counter(uses(model.reports))
    driver = host.HostDriver(model)
    call = gg.compile(
        model, lowering="eager", collectives="symmetric",
        replay="cuda", dispatch="in_graph", driver=driver,
    )  # fmt: skip
    first: dict[str, Tensor] = {}
    for _ in range(4):
        got = step(model, call, *inputs)
        assert max_error(got, want) < BAR
        first = first or got
        assert all(torch.equal(got[name], first[name]) for name in first)
        planned = [o for r in call.plan.regions for o in r.occurrences]
        assert uses(model.reports) == uses(planned)
        assert Counter(uses(model.reports)) == eager
    assert max(eager.values()) == 1 and max(Counter(w for w, _ in eager).values()) > 2
    assert [g.replays for g in driver.graphs] == [3, 3] and driver.forks == len(model.buckets)
    model.close()


def small_replays(rank: int, world: int, gtp: int, dispatch: str) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    model = wrapped(net, world, gtp, bucket_mb=0.0004)
    driver = host.HostDriver(model)
    call = gg.compile(
        model, lowering="eager", collectives="symmetric",
        replay="cuda", dispatch=dispatch, driver=driver,
    )  # fmt: skip
    for seed in range(4):
        want = fp64_grads(plain, [(batch(seed, r),) for r in range(world)])
        assert max_error(step(model, call, batch(seed, rank)), want) < BAR
        assert uses(model.reports) == uses(call.plan.regions[0].occurrences)
    assert len(model.buckets) > 2 and [g.replays for g in driver.graphs] == [3, 3]
    model.zero_grad_buffer()  # microbatches: only the last one reports
    with model.no_sync():
        call(batch(7, rank)).backward()
    call(batch(8, rank)).backward()
    model.finish_grad_sync()
    halves = [fp64_grads(plain, [(batch(s, r),) for r in range(world)]) for s in (7, 8)]
    want = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert max_error({n: model.full_grad(n) for n, _ in model.named_weights()}, want) < BAR
    model.close()


def options_agree(rank: int, world: int, gtp: int) -> None:
    """Both kinds of collectives: one plan, one result, for each option that changes the wire.

    Fusing joins the accumulates of delivered sums too, which symmetric regions do not have: it
    moves other reports, so that plans are compared without it.
    """
    for wrap, how in (
        ({}, {}),
        ({"wire_dtype": torch.bfloat16}, {"coalesce": True}),
        ({"reduce": "all_reduce"}, {"fuse": True}),
    ):
        results, plans = [], []
        for collectives in ("functional", "symmetric"):
            torch.manual_seed(0)
            model = wrapped(Net(), world, gtp, **wrap, collectives=collectives)
            call = gg.compile(model, lowering="eager", collectives=collectives, **how)
            results.append(step(model, call, batch(0, rank)))
            plans.append(call.plan.hash)
            if "reduce" in wrap:  # the sum is here, without a collective
                shared = [b for b in model.buckets if b.side.group is not None]
                assert shared and all(b.whole() is b.flat for b in shared)
            model.close()
        assert plans[0] == plans[1] or "fuse" in how
        bar = WIRE_BAR if "wire_dtype" in wrap else BAR
        assert max_error(results[1], results[0]) < bar
        want = fp64_grads(_net(), [(batch(0, r),) for r in range(world)])
        assert max_error(results[1], want) < bar


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def captured_step(rank: int, world: int, gtp: int) -> None:
    """A whole step over compiled regions; evaluation without gradients in between."""
    plain, model = _net(), wrapped(_net(), world, gtp)
    call = gg.compile(model, lowering="eager", collectives="symmetric")

    def train(x: Tensor) -> Tensor:
        loss = call(x)
        loss.backward()
        return loss

    driver = host.HostDriver(model)
    run = gg.capture(train, model, dispatch="event", driver=driver)
    for seed in range(3):
        want = fp64_grads(plain, [(batch(seed, r),) for r in range(world)])
        model.zero_grad_buffer()
        run(batch(seed, rank))
        model.finish_grad_sync()
        assert max_error({n: model.full_grad(n) for n, _ in model.named_weights()}, want) < BAR
        with torch.no_grad():
            torch.testing.assert_close(call(batch(9, rank)), plain(batch(9, rank)))
    assert [g.replays for g in driver.graphs] == [2]
    model.close()


def frozen_weights_gather_too(rank: int, world: int, gtp: int) -> None:
    net = _net()
    net.a.weight.requires_grad_(False)
    plain = copy.deepcopy(net)
    model = wrapped(net, world, gtp)
    call = gg.compile(model, lowering="eager", collectives="symmetric")
    got = step(model, call, batch(0, rank))
    assert max_error(got, fp64_grads(plain, [(batch(0, r),) for r in range(world)])) < BAR
    model.close()


def inductor_steps(rank: int, world: int, gtp: int) -> None:
    plain, model = _net(), wrapped(_net(), world, gtp)
    call = gg.compile(model, lowering="inductor", collectives="symmetric")
    for seed in range(2):
        want = fp64_grads(plain, [(batch(seed, r),) for r in range(world)])
        assert max_error(step(model, call, batch(seed, rank)), want) < 1e-5
        assert uses(model.reports) == uses(call.plan.regions[0].occurrences)
    model.close()


def bad_options(rank: int, world: int) -> None:
    model = wrapped(_net(), world, world)
    with pytest.raises(ValueError, match="collectives: expected one of"):
        gg.compile(model, collectives="nccl")
    model.close()
    for bad in ({"collectives": "nccl"}, {"nccl_ub": "manual"}):
        with pytest.raises(ValueError, match="collectives"):
            wrapped(_net(), world, world, **bad)
    double = wrapped(_net().double(), world, world)
    call = gg.compile(double, collectives="symmetric")
    with pytest.raises(Exception, match=r"a\.weight: float64"):
        call(batch(0, rank).double())


TOPOLOGIES = [(2, 2), (4, 4), (4, 2)]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("world", "gtp"), TOPOLOGIES)
def test_mtp_captured_regions_report_and_add_what_eager_does(
    world: int, gtp: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"ranks{world}").run(mtp_replays, gtp)


@pytest.mark.dist
@pytest.mark.parametrize("dispatch", DISPATCH)
def test_replays_under_each_dispatch(ranks4: RankPool, dispatch: str) -> None:
    ranks4.run(small_replays, 2, dispatch)


@pytest.mark.dist
@pytest.mark.parametrize(
    "job", [options_agree, captured_step, frozen_weights_gather_too], ids=lambda j: j.__name__
)
def test_gtp_2_dp_2(ranks4: RankPool, job: Any) -> None:
    ranks4.run(job, 2)


@pytest.mark.dist
@pytest.mark.slow
def test_inductor(ranks2: RankPool) -> None:
    ranks2.run(inductor_steps, 2, timeout_s=280.0)


@pytest.mark.dist
def test_options_are_checked(ranks2: RankPool) -> None:
    ranks2.run(bad_options)


def test_one_process_exchanges_nothing() -> None:
    plain, net = _net(), _net()
    model = gg.DistributedDataParallel(gg.shard(net), collectives="symmetric")
    call = gg.compile(model, lowering="eager", collectives="symmetric")
    got = step(model, call, batch(0, 0))
    assert max_error(got, fp64_grads(plain, [(batch(0, 0),)])) < BAR
    assert model.staging_buffers() == []
    model.close()
