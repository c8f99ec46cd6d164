"""Put a model's hook plan together from its regions, its wrapper and what steps have taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

import torch

from gtpgraph.graph.plan import AxisRanks, BucketPlan, HookPlan, PlanWarning, RegionPlan
from gtpgraph.graph.region import Region
from gtpgraph.parallel.buckets import Bucket
from gtpgraph.parallel.data_parallel import DistributedDataParallel


def assemble_plan(
    wrapper: DistributedDataParallel, regions: Sequence[Region], lowering: str
) -> HookPlan:
    """The plan of `regions`, which belong to one wrapper.

    Raises:
        RuntimeError: there is no region yet.
    """
    if not regions:
        raise RuntimeError(
            "plan: expected at least one compiled region, got none. Call the compiled model under "
            "grad mode once, or gtpgraph.inspect(model, *batch)."
        )
    regions = current(regions, wrapper.ledger.last_active)
    counts = wrapper.ledger.ready_counts()
    sited = {o.weight for r in regions for o in r.plan.occurrences}
    sited |= {e.weight for r in regions for e in r.plan.excluded}
    unused = tuple(s.fqn for s in wrapper.states if s.fqn not in sited and not counts[s.fqn])
    warnings = tuple(
        PlanWarning("unused", fqn, "no region has a site for it and no eager step reported it")
        for fqn in unused
    )
    return HookPlan(
        model=type(wrapper.module).__name__,
        world=wrapper.groups.world(),
        versions=versions(),
        lowering=lowering,
        regions=tuple(_with_calls(r) for r in regions),
        buckets=tuple(_bucket(b, wrapper) for b in wrapper.buckets),
        ready_counts=counts,
        unused=unused,
        warnings=warnings,
        extra={"fused": True} if any(r.fused for r in regions) else {},
    )


def current(regions: Sequence[Region], active: frozenset[str]) -> list[Region]:
    """One compilation of each region where there are several (``r0``, ``r0.1``): those that the
    last finished step called, else the newest."""
    families: dict[str, list[Region]] = {}
    for region in regions:
        families.setdefault(region.name.split(".")[0], []).append(region)
    kept = []
    for family in families.values():
        ran = [r for r in family if r.name in active]
        kept += ran or family[-1:]
    return kept


def versions() -> dict[str, str]:
    """Versions of gtpgraph, torch and triton, where installed."""
    found: dict[str, str] = {"torch": str(torch.__version__)}
    for package in ("gtpgraph", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _with_calls(region: Region) -> RegionPlan:
    return replace(region.plan, calls=region.calls.calls_a_step)


def _bucket(bucket: Bucket, wrapper: DistributedDataParallel) -> BucketPlan:
    return BucketPlan(
        bucket=bucket.number,
        group=AxisRanks(bucket.side.axis, bucket.side.ranks),
        numel=bucket.flat.numel(),
        dtype=str(bucket.flat.dtype).removeprefix("torch."),
        wire_dtype=str(bucket.wire_dtype).removeprefix("torch."),
        weights=tuple(wrapper.states[m.index].fqn for m in bucket.members),
    )
