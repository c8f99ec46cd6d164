"""16-bit wires with fp32 sums, in the bucket's reduction and in that of a GTP weight."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel import reduction
from gtpgraph.testing import RankPool

Errors = dict[str, float]


def _groups() -> gg.ProcessGroups:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
    return gg.ProcessGroups.from_mesh(mesh)


def _narrow_wire(rank: int, world: int, compiled: bool) -> tuple[Errors, Errors, int, str]:
    """Errors of ours and of a bf16 all-reduce of plain gradients, both against fp64; how often the
    bucket path called shard_reduce; the region's graph."""
    torch.manual_seed(0)
    model, make_batch = build("gpt-tiny")
    batches = [make_batch(0, r, "cpu") for r in range(world)]
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    for batch in batches:
        (exact(*batch) / world).backward()
    (plain(*batches[rank]) / world).backward()
    wire: Errors = {}
    for (name, p), q in zip(exact.named_parameters(), plain.parameters(), strict=True):
        sent = q.grad.to(torch.bfloat16)
        dist.all_reduce(sent, group=_groups().model)
        wire[name] = float((sent.double() - p.grad).norm() / p.grad.norm())
    calls = 0
    original = reduction.shard_reduce

    def counted(*args: object, **kw: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kw)

    reduction.shard_reduce = counted  # type: ignore[assignment]
    try:
        groups = _groups()
        wrapped = gg.DistributedDataParallel(
            gg.shard(model, groups), groups, wire_dtype=torch.bfloat16, bucket_mb=0.05
        )
        run = gg.compile(wrapped, lowering="eager") if compiled else wrapped
        wrapped.zero_grad_buffer()
        run(*batches[rank]).backward()
        wrapped.finish_grad_sync()
    finally:
        reduction.shard_reduce = original
    ours = {
        name: float((wrapped.full_grad(name).double() - p.grad).norm() / p.grad.norm())
        for name, p in exact.named_parameters()
    }
    graph = wrapped.regions[0].texts["after"] if compiled else ""
    assert calls == len(wrapped.buckets)
    return ours, wire, calls, graph


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [False, True])
def test_the_bucket_path_calls_shard_reduce_and_keeps_the_error_of_its_wire(
    ranks4: RankPool, compiled: bool
) -> None:
    for ours, wire, calls, graph in ranks4.run(_narrow_wire, compiled):
        assert calls > 1
        for name, error in ours.items():
            assert error <= 2 * wire[name] + 1e-7, name
        if compiled:
            assert "shard_reduce" in graph and "reduce_scatter" not in graph


def test_an_fp32_wire_is_reduced_in_place() -> None:
    made = reduction.choose_reduction(None, slice(0, 4), wire=torch.float32, everywhere=False)
    assert isinstance(made, reduction.NoReduction)
