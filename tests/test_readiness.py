"""Readiness under graph replay: reports, counts, gradients and departures, layout by layout.

One journey a layout is run once and looked at by many tests: eager steps, compiled steps, an eager
step again, with different data on every rank. What is compared: gradients with plain PyTorch in
fp64 on the concatenated batch, reports with the plan, captured counts with eager ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.models import build
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).parent / "cases" / "helpers.py"))

SMALL = {"hidden": 16, "layers": 1, "seq": 8}
MOE = {"dense_layers": 0, **SMALL}  # the only layer holds the experts
SHARED = "layers.*.mlp.shared_experts.*"


@dataclass(frozen=True)
class Layout:
    """A model on `world` ranks, gtp x (world / gtp), under one lowering."""

    name: str
    model: str
    overrides: tuple[tuple[str, Any], ...]
    world: int
    gtp: int
    lowering: str = "eager"
    ungraphed: tuple[str, ...] = ()


@dataclass
class Seen:
    """One step of one rank."""

    error: float
    grads: dict[str, Tensor]
    reports: list[Any]
    left: list[tuple[int, int, bool]]


@dataclass
class Journey:
    """All steps of one rank, and the plan that the compiled ones have."""

    plan: Any = None
    inspected: Any = None
    num_buckets: int = 0
    reference: list[str] = field(default_factory=list)
    steps: dict[str, Seen] = field(default_factory=dict)


def travel(rank: int, world: int, layout: Layout) -> Journey:
    """eager, eager again, compiled, compiled again, eager once more."""
    torch.manual_seed(0)
    model, make_batch = build(layout.model, **dict(layout.overrides))
    batches = [make_batch(0, r, "cpu") for r in range(world)]
    expected = fp64_grads(copy.deepcopy(model), batches)
    ddp = h.wrap(model, world, layout.gtp, bucket_mb=0.01)
    watch = h.Departures(ddp)
    out = Journey(num_buckets=len(ddp.buckets), reference=sorted(expected))

    def go(name: str, call: Any) -> None:
        h.step(ddp, call, *batches[rank])
        left = watch.take()
        grads = h.full_grads(ddp)
        out.steps[name] = Seen(max_error(grads, expected), grads, list(ddp.reports), left)

    go("eager", ddp)
    go("eager again", ddp)
    compiled = gtpgraph.compile(ddp, lowering=layout.lowering, ungraphed=layout.ungraphed)
    for name in ("compiled", "compiled again"):
        go(name, compiled)
    out.plan = compiled.plan
    go("eager once more", ddp)
    return out


def travel_first(rank: int, world: int, layout: Layout) -> Journey:
    """Compiled from the first step on: nothing was learned from an eager one."""
    torch.manual_seed(0)
    model, make_batch = build(layout.model, **dict(layout.overrides))
    batches = [make_batch(0, r, "cpu") for r in range(world)]
    expected = fp64_grads(copy.deepcopy(model), batches)
    ddp = h.wrap(model, world, layout.gtp, bucket_mb=0.01)
    watch = h.Departures(ddp)
    compiled = gtpgraph.compile(ddp, lowering=layout.lowering, ungraphed=layout.ungraphed)
    out = Journey(num_buckets=len(ddp.buckets))
    out.inspected = gtpgraph.inspect(compiled, *batches[rank])
    h.step(ddp, compiled, *batches[rank])
    left = watch.take()
    grads = h.full_grads(ddp)
    out.plan = compiled.plan
    out.steps["compiled"] = Seen(max_error(grads, expected), grads, list(ddp.reports), left)
    return out


def items(**kw: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(kw.items()))


MTP_22 = Layout("mtp gtp2 x dp2", "mtp-tiny", items(layers=1, seq=16), 4, 2)
MOE_22 = Layout("moe gtp2 x dp2", "moe-tiny", items(**MOE), 4, 2, ungraphed=(SHARED,))
LAYOUTS = [
    MTP_22,
    MOE_22,
    Layout("mtp gtp4 x dp1", "mtp-tiny", items(**SMALL), 4, 4),
    Layout("moe gtp1 x dp4", "moe-tiny", items(**MOE), 4, 1),
    Layout("mtp gtp1 x dp2", "mtp-tiny", items(**SMALL, tied=False), 2, 1),
    Layout("mtp alone", "mtp-tiny", items(**SMALL), 1, 1),
    Layout("moe alone", "moe-tiny", items(**MOE), 1, 1, ungraphed=(SHARED,)),
]
FULL = [
    Layout(f"full {m} {low}", f"{m}-tiny", (), 4, 2, low, ung)
    for m, ung in (("mtp", ()), ("moe", (SHARED,)))
    for low in ("eager", "inductor")
]
SLOW = [pytest.param(layout, marks=pytest.mark.slow, id=layout.name) for layout in FULL]
ALL = [pytest.param(layout, id=layout.name) for layout in LAYOUTS] + SLOW
EVERY = pytest.mark.parametrize("layout", ALL)
pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield


@pytest.fixture(scope="module")
def journeys(ranks2: RankPool, ranks4: RankPool) -> Any:
    """layout -> the journeys of all its ranks, each travelled once."""

    @cache
    def of(layout: Layout, first: bool = False) -> list[Journey]:
        fn, pools = travel_first if first else travel, {2: ranks2, 4: ranks4}
        if layout.world == 1:
            return [fn(0, 1, layout)]
        journeys: list[Journey] = pools[layout.world].run(fn, layout, timeout_s=280)
        return journeys

    return of


def steps_of(journeys: list[Journey]) -> Iterator[tuple[str, Journey, Seen]]:
    for rank, journey in enumerate(journeys):
        for name, seen in journey.steps.items():
            yield f"rank {rank}, {name}", journey, seen


# --- gradients ------------------------------------------------------------------------------------


@EVERY
def test_gradients_are_those_of_plain_pytorch_on_the_concatenated_batch(
    journeys: Any, layout: Layout
) -> None:
    for where, journey, seen in steps_of(journeys(layout)):
        bar = h.BARS[layout.lowering if "compiled" in where else None]
        assert sorted(seen.grads) == journey.reference
        assert seen.error <= bar, f"{where}: largest relative error {seen.error:.2e} > {bar}"


@pytest.mark.parametrize("layout", [p for p in ALL if p.values[0].lowering == "eager"])
def test_graphs_run_by_fx_equal_eager_bitwise(journeys: Any, layout: Layout) -> None:
    for journey in journeys(layout):
        eager, compiled = (journey.steps[s].grads for s in ("eager", "compiled"))
        differ = {n: max_error(compiled[n], g) for n, g in eager.items()}
        assert not any(differ.values()), {n: e for n, e in differ.items() if e}


@EVERY
def test_steps_repeat_bitwise(journeys: Any, layout: Layout) -> None:
    """Embeddings under Inductor excepted: their backward adds atomically."""
    for journey in journeys(layout):
        grads = {name: seen.grads for name, seen in journey.steps.items()}
        for a, b in (
            ("eager", "eager again"),
            ("eager", "eager once more"),
            ("compiled", "compiled again"),
        ):
            atomic = layout.lowering == "inductor" and a == "compiled"
            names = [n for n in grads[a] if not (atomic and n.startswith("embed"))]
            assert [n for n in names if not torch.equal(grads[a][n], grads[b][n])] == [], (a, b)


# --- reports --------------------------------------------------------------------------------------


@EVERY
def test_reports_are_the_plans_occurrences_in_order(journeys: Any, layout: Layout) -> None:
    for where, journey, seen in steps_of(journeys(layout)):
        if "compiled" not in where:
            continue
        captured = [r for r in seen.reports if r.region is not None]
        assert h.told(captured) == h.occurrences(journey.plan), where
        assert len(captured) > 0


@EVERY
def test_captured_ready_counts_equal_the_eager_ones(journeys: Any, layout: Layout) -> None:
    """GTP weights report once per use; ordinary ones once a region backward, so once here."""
    for journey in journeys(layout):
        eager = h.counts(journey.steps["eager"].reports)
        for step in ("compiled", "compiled again", "eager once more"):
            assert h.counts(journey.steps[step].reports) == eager, step
        assert dict(journey.plan.ready_counts) == eager


@pytest.mark.parametrize("layout", [p for p in ALL if "mtp" in p.values[0].model])
def test_mtp_counts(journeys: Any, layout: Layout) -> None:
    """Depths 2: embedding and head three times each, the repeated layer twice."""
    heads = {"head.weight": 3, "embed.weight": 3}
    if dict(layout.overrides).get("tied", True):
        heads = {"embed.weight": 6}
    for where, journey, seen in steps_of(journeys(layout)):
        got = h.counts(seen.reports)
        assert {n: got[n] for n in heads} == heads, where
        gtp = {o.weight for r in journey.plan.regions for o in r.occurrences if o.gtp}
        repeated = {got[n] for n in gtp if n.startswith("mtp.0.")}
        assert repeated == {2}, where


# --- buckets --------------------------------------------------------------------------------------


@EVERY
def test_every_bucket_leaves_once_and_one_before_the_backward_ends(
    journeys: Any, layout: Layout
) -> None:
    for where, journey, seen in steps_of(journeys(layout)):
        assert sorted(b for b, _, _ in seen.left) == list(range(journey.num_buckets)), where
        if where.endswith(", eager"):
            continue  # the counts of ordinary weights are learned here
        _, reports, inside = seen.left[0]
        assert inside and reports < len(seen.reports), (where, seen.left, len(seen.reports))
        assert all(inside for _, _, inside in seen.left), (where, seen.left)


FIRST = [
    Layout("first mtp gtp2 x dp2", "mtp-tiny", items(**SMALL), 4, 2),
    Layout("first moe alone", "moe-tiny", items(**MOE), 1, 1),
]


@pytest.mark.parametrize("layout", [pytest.param(x, id=x.name) for x in FIRST])
def test_the_first_compiled_step_overlaps_without_learning(journeys: Any, layout: Layout) -> None:
    for journey in journeys(layout, first=True):
        seen = journey.steps["compiled"]
        assert seen.error <= h.SUM_ORDER_BAR
        _, reports, inside = seen.left[0]
        assert inside and reports < len(seen.reports), seen.left
        assert h.told(seen.reports) == h.occurrences(journey.plan)
        assert journey.inspected.hash == journey.plan.hash


# --- the UNGRAPHED chain --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [p for p in ALL if p.values[0].ungraphed])
def test_ungraphed_weights_are_finalised_eagerly_and_not_in_the_plan(
    journeys: Any, layout: Layout
) -> None:
    for journey in journeys(layout):
        planned = {o.weight for r in journey.plan.regions for o in r.occurrences}
        excluded = {(e.weight, e.chain) for r in journey.plan.regions for e in r.excluded}
        shared = {n for n in journey.reference if ".shared_experts." in n}
        assert shared and not shared & planned
        assert excluded == {(n, "UNGRAPHED") for n in shared}
        for step in ("compiled", "compiled again"):
            reports = journey.steps[step].reports
            outside = [r.weight for r in reports if r.region is None]
            assert sorted(outside) == sorted(shared)
            assert not shared & {r.weight for r in reports if r.region is not None}
            assert all(journey.plan.ready_counts[n] == 1 for n in shared)
