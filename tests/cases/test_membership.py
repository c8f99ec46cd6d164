"""Membership and order: which chain a weight is on, and what ranks that disagree are told."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gtpgraph
from gtpgraph import compat
from gtpgraph.by_path import module_at
from gtpgraph.models import build
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import shard
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))
pytestmark = pytest.mark.dist
SHARED = "*.shared_experts.*"


# --- K25 ------------------------------------------------------------------------------------------


def shared_expert(rank: int, world: int) -> dict[str, Any]:
    """Only the layer is captured; its shared expert is UNGRAPHED; the rest is eager."""
    torch.manual_seed(0)
    model, make_batch = build("moe-tiny", hidden=16, layers=1, seq=8, dense_layers=0)
    batches = [make_batch(0, r, "cpu") for r in range(world)]
    expected = fp64_grads(copy.deepcopy(model), batches)
    ddp = h.wrap(model, world, world, bucket_mb=0.01)
    h.step(ddp, ddp, *batches[rank])
    eager = h.counts(ddp.reports)
    h.compile_part(model.layers[0], ungraphed=[SHARED])
    for _ in range(2):
        h.step(ddp, ddp, *batches[rank])
    plan = gtpgraph.plan_of(ddp)
    (region,) = plan.regions
    return {
        "error": max_error(h.full_grads(ddp), expected),
        "eager": eager,
        "counts": h.counts(ddp.reports),
        "where": {r.weight: r.region for r in ddp.reports},
        "planned": {o.weight for o in region.occurrences},
        "excluded": {e.weight: (e.chain, e.reason) for e in region.excluded},
        "ready": dict(plan.ready_counts),
    }


def test_k25_a_shared_expert_outside_the_graph_is_finalised_eagerly(ranks2: RankPool) -> None:
    for seen in ranks2.run(shared_expert):
        assert seen["error"] <= h.SUM_ORDER_BAR
        shared = {n for n in seen["eager"] if ".shared_experts." in n}
        layer = {n for n in seen["eager"] if n.startswith("layers.0.")} - shared
        assert len(shared) == 4
        assert seen["planned"] == layer
        assert set(seen["excluded"]) == shared
        for chain, reason in seen["excluded"].values():
            assert chain == "UNGRAPHED" and "leaves the region" in reason
        assert {n for n, region in seen["where"].items() if region} == layer
        assert seen["counts"] == seen["eager"] == seen["ready"]


# --- K29 ------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers of one width, the last one optionally used again."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.layers[0](x) if self.again else x).square().mean()


def different_plans(rank: int, world: int, gtp: int, how: str) -> tuple[str, float, list[Any]]:
    model = Stack(layers=4 if rank and how == "layers" else 3)
    model.again = bool(rank) and how == "uses"
    ungraphed = ["layers.1.*"] if rank and how == "ungraphed" else []
    ddp = h.wrap(model, world, gtp, timeout_s=20.0)
    compiled = gtpgraph.compile(ddp, lowering="eager", ungraphed=ungraphed)
    start = time.monotonic()
    text = h.error_of(h.step, ddp, compiled, h.batch_of(rank))
    return text, time.monotonic() - start, list(ddp.reports)


@pytest.mark.parametrize("how", ["ungraphed", "uses", "layers"])
@pytest.mark.parametrize("gtp", [2, 1])
def test_k29_ranks_that_compile_different_plans_are_told_the_first_difference(
    ranks2: RankPool, gtp: int, how: str
) -> None:
    texts = []
    for text, seconds, reports in ranks2.run(different_plans, gtp, how, timeout_s=60):
        assert "V09" in text and "compiled different orders of collectives" in text
        assert "rank 0 has [" in text and "rank 1 has [" in text
        assert seconds < 20 and reports == []
        texts.append(text)
    assert texts[0] == texts[1]


def recompiles_alone(rank: int, world: int) -> tuple[str, float]:
    """Rank 0 compiles another order in step 2; rank 1 does not. What each is told, and when.

    The groups here time out after 12 s, as a job's own would after its own limit.
    """
    store = dist.PrefixStore("alone", compat.default_store())
    dist.destroy_process_group()
    limit = timedelta(seconds=12)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    # The default group is the gtp group here, so that its timeout is the one that counts.
    everyone, alone = dist.group.WORLD, None
    groups = ProcessGroups(
        tp=alone, pp=alone, cp=alone, dp=alone, dp_cp=alone, gtp=everyone, dp_cp_gtp=everyone,
        model=everyone,
    )  # fmt: skip
    model = Stack()
    ddp = DistributedDataParallel(shard(model, groups), groups, timeout_s=6.0)
    compiled = gtpgraph.compile(ddp, lowering="eager")
    dist.barrier()  # ranks that have just started may be seconds apart
    h.step(ddp, compiled, h.batch_of(rank))
    model.again = rank == 0
    start = time.monotonic()
    text = h.error_of(h.step, ddp, compiled, h.batch_of(rank))
    return text, time.monotonic() - start


def test_k29_a_rank_that_recompiles_alone_fails_in_time_and_the_other_does_not_hang(
    ranks2: RankPool,
) -> None:
    """Rank 0 learns from the store that nobody else came, and what changed. Rank 1 is inside the
    collective that rank 0 never joins: its group's own timeout ends that wait."""
    first, second = ranks2.run(recompiles_alone, timeout_s=60)
    text, seconds = first
    assert "V09" in text and "rank(s) [1] absent" in text and "alone compile again" in text
    assert "Against the order agreed on before" in text
    assert seconds < 12
    text, seconds = second
    assert text.startswith(("RuntimeError", "DistBackendError")) and seconds < 30, second
