"""Warm caches: what the passes did to a graph is part of its cache key."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))


def train(
    model: nn.Module, batches: list[Any], rank: int, gtp: int, **options: Any
) -> tuple[float, list[str], int]:
    """One step by Inductor: largest error, planned weights in order, cache hits."""
    torch.compiler.reset()
    world = len(batches)
    expected = fp64_grads(model, batches)
    bucket_mb = options.pop("bucket_mb", 1.0)
    ddp = h.wrap(copy.deepcopy(model), world, gtp, bucket_mb=bucket_mb)
    compiled = gtpgraph.compile(ddp, lowering="inductor", **options)
    before = counters["inductor"]["fxgraph_cache_hit"]
    h.step(ddp, compiled, *batches[rank])
    planned = [o.weight for r in compiled.plan.regions for o in r.occurrences]
    assert h.told([r for r in ddp.reports if r.region]) == h.occurrences(compiled.plan)
    hits = counters["inductor"]["fxgraph_cache_hit"] - before
    return max_error(h.full_grads(ddp), expected), planned, hits


def warm(rank: int, world: int, gtp: int) -> list[tuple[float, list[str], int]]:
    """The same graph compiled again and again with one cache: other chains, other buckets."""
    model = h.MeanSquare(h.MLP())
    batches = [(h.batch_of(r),) for r in range(world)]
    settings: list[dict[str, Any]] = [
        {},
        {"ungraphed": ["body.layers.0.*"]},
        {"bucket_mb": 1e-4},
        {},
    ]
    with fresh_cache(), inductor_config.patch(fx_graph_cache=True):
        return [train(model, batches, rank, gtp, **s) for s in settings]


def check(seen: list[tuple[float, list[str], int]]) -> None:
    plain, outside, buckets, again = seen
    assert all(error <= h.INDUCTOR_BAR for error, _, _ in seen)
    assert "body.layers.0.weight" in plain[1] and "body.layers.0.weight" not in outside[1]
    assert sorted(buckets[1]) == sorted(plain[1]) and again[1] == plain[1]
    # The forward graph is the same each time; the backward only in the last.
    assert [hits for _, _, hits in seen] == [0, 1, 1, 2]


@pytest.mark.slow
def test_k35_a_warm_cache_tells_chains_and_buckets_apart() -> None:
    check(warm(0, 1, 1))


@pytest.mark.slow
@pytest.mark.dist
def test_k35_on_two_ranks(ranks2: RankPool) -> None:
    for seen in ranks2.run(warm, 2, timeout_s=280):
        check(seen)
