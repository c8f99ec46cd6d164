"""HookPlan: JSON round trip, refusals, digest and diff."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gtpgraph.by_path import module_at
from gtpgraph.graph.plan import (
    GRAPHED,
    UNGRAPHED,
    AxisRanks,
    BucketPlan,
    Excluded,
    HookPlan,
    Occurrence,
    PlanWarning,
    RegionPlan,
)

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parent / "graph_tools.py"))
GTP, DP = AxisRanks("gtp", (0, 1)), AxisRanks("dp", (0, 2))


def occurrence(site: int, weight: str, use: int = 1, uses: int = 1, **kw: Any) -> Occurrence:
    values: dict[str, Any] = {
        "aliases": (), "chain": GRAPHED, "gtp": GTP, "bucket": 0, "bytes": 64, "stream": "main",
        "event": None, "node": f"grad_ready_{site}", "source": "model.py:3",
    }  # fmt: skip
    return Occurrence(site=site, weight=weight, use=use, uses=uses, **{**values, **kw})


def plan(**changes: Any) -> HookPlan:
    occurrences = (
        occurrence(0, "a", 2, 2, aliases=("head",)),
        occurrence(1, "norm", gtp=None),
        occurrence(2, "a", 1, 2, aliases=("head",), event=0),
    )
    made = HookPlan(
        model="Net",
        world={"dp": 2, "gtp": 2},
        versions={"torch": "2"},
        lowering="eager",
        regions=(
            RegionPlan("r0", None, occurrences, (Excluded("expert", 1, UNGRAPHED, "why"),)),
            RegionPlan("r1", 2, (occurrence(0, "b", bucket=1),), ()),
        ),
        buckets=(
            BucketPlan(0, DP, 256, "float32", "bfloat16", ("a", "norm")),
            BucketPlan(1, DP, 128, "float32", "float32", ("b", "expert")),
        ),
        ready_counts={"a": 2, "norm": 1, "b": 2, "expert": 1},
        unused=("idle",),
        warnings=(PlanWarning("unused", "idle", "no site"),),
    )
    return replace(made, **changes)


def edited(change: Callable[[dict[str, Any]], Any], *, keep_hash: bool = False) -> str:
    data = json.loads(plan().to_json())
    change(data)
    if not keep_hash:
        data.pop("hash", None)
    return json.dumps(data)


class TestRoundTrip:
    def test_equal(self) -> None:
        assert HookPlan.from_json(plan().to_json()) == plan()
        assert HookPlan.from_json(plan().to_json(indent=None)).hash == plan().hash

    def test_of_a_compiled_model(self) -> None:
        with t.fake_ranks(2, 2) as groups:
            c = t.compiled(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), groups=groups)
            made = c.step.plan
        again = HookPlan.from_json(made.to_json())
        assert again == made and again.hash == made.hash and again.diff(made) == []
        assert json.loads(made.to_json())["schema"] == "gtpgraph.plan/1"

    def test_unknown_keys_are_kept_at_every_level(self) -> None:
        def add(data: dict[str, Any]) -> None:
            data["new"] = {"x": [1]}
            region = data["regions"][0]
            for record in (region, region["occurrences"][0], region["occurrences"][0]["gtp"],
                           region["excluded"][0], data["buckets"][0], data["buckets"][0]["group"],
                           data["warnings"][0]):  # fmt: skip
                record["new"] = "kept"

        text = edited(add)
        read = HookPlan.from_json(text)
        written = json.loads(read.to_json())
        assert written.pop("hash") == read.hash
        assert written == json.loads(text)
        assert HookPlan.from_json(read.to_json()) == read

    _names = st.text("abc.", min_size=1, max_size=4)

    @settings(max_examples=40, deadline=None)
    @given(
        weights=st.lists(st.tuples(_names, st.integers(1, 3), st.none() | st.integers(0, 4))),
        ranks=st.lists(st.integers(0, 2**31), max_size=4),
        counts=st.dictionaries(_names, st.integers(0, 9), max_size=4),
        model=st.text(max_size=5),
        calls=st.none() | st.integers(0, 5),
    )
    def test_any_plan(
        self,
        weights: list[tuple[str, int, int | None]],
        ranks: list[int],
        counts: dict[str, int],
        model: str,
        calls: int | None,
    ) -> None:
        axis = AxisRanks("gtp", tuple(ranks))
        listed = tuple(
            occurrence(k, w, uses, uses, event=event, gtp=axis if event else None)
            for k, (w, uses, event) in enumerate(weights)
        )
        region = RegionPlan("r", calls, listed, ())
        made = plan(regions=(region,), ready_counts=counts, model=model)
        assert HookPlan.from_json(made.to_json()) == made

    def test_reading_needs_no_torch(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(plan().to_json())
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "from gtpgraph.graph.plan import HookPlan\n"
            f"print(len(HookPlan.load({str(file)!r}).regions))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


class TestRefusals:
    @pytest.mark.parametrize("schema", ["gtpgraph.plan/2", None, 7])
    def test_schema(self, schema: object) -> None:
        with pytest.raises(ValueError, match=r"p\.json: expected schema 'gtpgraph\.plan/1', got"):
            HookPlan.from_json(edited(lambda d: d.update(schema=schema)), name="p.json")

    @pytest.mark.parametrize("text", ["[1]", "3", "null", '"plan"'])
    def test_no_object(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"expected schema .*, got '(list|int|NoneType|str)'"):
            HookPlan.from_json(text)

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
    def test_truncated(self, share: float, tmp_path: Path) -> None:
        text = plan().to_json()
        file = tmp_path / "plan.json"
        file.write_text(text[: int(len(text) * share)])
        with pytest.raises(ValueError, match=r"plan\.json: .*line \d+.*complete\?"):
            HookPlan.load(file)

    def test_edited(self) -> None:
        def change(data: dict[str, Any]) -> None:
            data["regions"][0]["occurrences"].pop()

        with pytest.raises(ValueError, match="edited or damaged"):
            HookPlan.from_json(edited(change, keep_hash=True))

    @pytest.mark.parametrize(
        ("change", "where"),
        [
            (lambda d: d.pop("buckets"), r"plan: .*missing \['buckets'\]"),
            (lambda d: d["regions"][0]["occurrences"][1].pop("use"), r"occurrences\[1\]: .*'use'"),
            (lambda d: d["buckets"].insert(0, 5), r"plan\.buckets\[0\]: "),
            (lambda d: d.update(regions={}), r"plan\.regions: expected tuple.*got \{\}"),
            (lambda d: d.update(world=[1]), r"plan\.world: expected Mapping"),
            (lambda d: d.update(model=None), r"plan\.model: expected str, got None"),
            (lambda d: d["regions"][1].update(calls="2"), r"regions\[1\]\.calls: .*got '2'"),
            (lambda d: d["regions"][0]["occurrences"][0].update(gtp=[0]), r"\.gtp: expected Axis"),
            (lambda d: d["buckets"][0].update(group=None), r"buckets\[0\]\.group: expected Axis"),
        ],
    )
    def test_keys_and_kinds(self, change: Callable[[dict[str, Any]], Any], where: str) -> None:
        with pytest.raises(ValueError, match=where):
            HookPlan.from_json(edited(change))

    def test_another_model(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(plan().to_json())
        assert HookPlan.load(file, model="Net") == plan()
        with pytest.raises(ValueError, match="expected a plan of model 'GPT', got one of 'Net'"):
            HookPlan.load(file, model="GPT")


def with_occurrence(number: int, **changes: Any) -> HookPlan:
    made = plan()
    listed = list(made.regions[0].occurrences)
    listed[number] = replace(listed[number], **changes)
    region = replace(made.regions[0], occurrences=tuple(listed))
    return replace(made, regions=(region, made.regions[1]))


class TestDigest:
    @pytest.mark.parametrize(
        "other",
        [
            plan(versions={"torch": "99"}),
            plan(model="Other"),
            plan(lowering="inductor"),
            plan(warnings=()),
            plan(extra={"fused": True}),
            with_occurrence(0, node="renamed"),
            with_occurrence(0, source="elsewhere.py:1"),
        ],
    )
    def test_ignores_names_and_versions(self, other: HookPlan) -> None:
        assert other.hash == plan().hash and plan().diff(other) == []

    def test_another_order_of_a_fused_plan_is_explained(self) -> None:
        other = replace(plan(regions=plan().regions[::-1]), extra={"fused": True})
        lines = plan().diff(other)
        assert lines[0].startswith("fused: False -> True: joined weights report behind")
        assert lines[1:] == plan().diff(replace(other, extra={}))
        assert HookPlan.from_json(other.to_json()).fused and not plan().fused
        assert ", lowering eager, fused, hash" in str(other)

    @pytest.mark.parametrize(
        "other",
        [
            with_occurrence(0, use=1),
            with_occurrence(0, event=3),
            with_occurrence(1, bytes=65),
            with_occurrence(1, bucket=1),
            with_occurrence(1, stream="side"),
            with_occurrence(0, gtp=AxisRanks("gtp", (0, 3))),
            plan(ready_counts={}),
            plan(unused=()),
            plan(world={"dp": 4}),
            plan(regions=plan().regions[::-1]),
            plan(buckets=plan().buckets[:1]),
        ],
    )
    def test_sees_what_matters(self, other: HookPlan) -> None:
        assert other.hash != plan().hash
        assert plan().diff(other), "a different digest needs a line that says why"

    def test_is_that_of_another_process(self) -> None:
        code = (
            "from gtpgraph.graph.plan import HookPlan\n"
            f"print(HookPlan.from_json({plan().to_json()!r}).hash)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == plan().hash


class TestDiff:
    def test_nothing(self) -> None:
        assert plan().diff(plan()) == []

    def test_a_lost_duplicate(self) -> None:
        made = plan()
        region = replace(made.regions[0], occurrences=made.regions[0].occurrences[:2])
        lines = made.diff(replace(made, regions=(region, made.regions[1])))
        assert "count: a: 2 -> 1" in lines
        assert "order: region r0, occurrence 2: a (use 1) -> nothing" in lines

    def test_another_chain(self) -> None:
        made = plan()
        region = replace(made.regions[0], excluded=())
        lines = made.diff(replace(made, regions=(region, made.regions[1])))
        assert lines == ["chain: expert: UNGRAPHED -> GRAPHED"]

    def test_order(self) -> None:
        made = plan()
        a, norm, again = made.regions[0].occurrences
        region = replace(made.regions[0], occurrences=(norm, a, again))
        lines = made.diff(replace(made, regions=(region, made.regions[1])))
        assert lines == ["order: region r0, occurrence 0: a (use 2) -> norm (use 1)"]

    def test_buckets_and_counts(self) -> None:
        made = plan()
        buckets = (
            replace(made.buckets[0], weights=("a",), numel=128),
            replace(made.buckets[1], weights=("b", "expert", "norm")),
        )
        lines = made.diff(
            replace(made, buckets=buckets, ready_counts={**made.ready_counts, "b": 1})
        )
        assert lines == [
            "ready count: b: 2 -> 1",
            "bucket: norm: 0 -> 1",
            "bucket 0: 256 x float32 over dp -> 128 x float32 over dp",
        ]

    def test_a_region_more(self) -> None:
        made = plan()
        lines = made.diff(replace(made, regions=made.regions[:1]))
        assert "region r1: only in A" in lines and "count: b: 1 -> 0" in lines

    def test_fields_of_one_occurrence(self) -> None:
        lines = plan().diff(with_occurrence(1, bytes=65, stream="side"))
        assert lines == [
            "region r0, occurrence 1, norm (use 1): bytes 64 -> 65",
            "region r0, occurrence 1, norm (use 1): stream main -> side",
        ]

    def test_world(self) -> None:
        assert plan().diff(plan(world={"dp": 4}))[0].startswith("world: {'dp': 2, 'gtp': 2} -> ")


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x)).square().mean()


def test_equal_work_has_an_equal_digest_before_and_after_a_step() -> None:
    """What a plan says before the first step is what it says after it."""
    x = torch.randn(2, 4)
    one = t.compiled(Square(), x)
    before = one.step.plan
    one.train(x)
    assert one.step.plan.diff(before) == []
    assert one.step.plan.ready_counts == {"a.weight": 2, "a.bias": 1}
    assert t.compiled(Square(), x).step.plan.hash == before.hash
