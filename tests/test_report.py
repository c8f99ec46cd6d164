"""Plans as text: everything that is in them, at 120 columns."""

from __future__ import annotations

import pytest

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
from gtpgraph.report import WIDTH, human_bytes, plan_table, rank_list, shorten

LONG = "decoder.layers.47.self_attention.query_key_value_projection.weight"


def occurrence(site: int, weight: str, use: int, uses: int, **changes: object) -> Occurrence:
    values: dict[str, object] = {
        "site": site,
        "weight": weight,
        "aliases": ("head.weight",) if weight == "embed.weight" else (),
        "use": use,
        "uses": uses,
        "chain": GRAPHED,
        "gtp": AxisRanks("gtp", (0, 1)),
        "bucket": 3,
        "bytes": 32768,
        "stream": "main",
        "event": None,
        "node": f"grad_ready_{site}",
        "source": "/very/long/path/to/somebody/elses/checkout/model.py:123",
    }
    return Occurrence(**{**values, **changes})  # type: ignore[arg-type]


def plan(**changes: object) -> HookPlan:
    occurrences = (
        occurrence(0, "embed.weight", 2, 2),
        occurrence(1, LONG, 1, 1, gtp=None, bytes=128),
        occurrence(2, "embed.weight", 1, 2, event=3),
    )
    excluded = (Excluded("shared.weight", 1, UNGRAPHED, "its chain is UNGRAPHED"),)
    values: dict[str, object] = {
        "model": "GPT",
        "world": {"dp": 2, "gtp": 2, "tp": 1},
        "versions": {"torch": "2.13.0"},
        "lowering": "eager",
        "regions": (RegionPlan("r0", None, occurrences, excluded),),
        "buckets": (
            BucketPlan(3, AxisRanks("dp_cp", (0, 2)), 1792, "float32", "bfloat16",
                       ("embed.weight", LONG, "shared.weight")),
        ),
        "ready_counts": {"embed.weight": 2, LONG: 1, "shared.weight": 1},
        "unused": ("old.weight",),
        "warnings": (PlanWarning("unused", "old.weight", "no region has a site for it"),),
    }  # fmt: skip
    return HookPlan(**{**values, **changes})  # type: ignore[arg-type]


def cells(text: str, start: str) -> list[str]:
    """The words of the one line that starts with `start`."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [start]]
    return line.split()


def test_header_names_model_world_lowering_and_hash() -> None:
    first = plan_table(plan()).splitlines()[0]
    assert first == f"hook plan of GPT: dp 2 x gtp 2, lowering eager, hash {plan().hash}"
    assert "one process" in plan_table(plan(world={"dp": 1}))


def test_occurrences_in_order_with_everything_about_them() -> None:
    text = plan_table(plan())
    region = text.split("\n\n")[1]
    assert (
        "region r0 (1 of 1, calls a step not known yet): 3 occurrence(s) of 2 weight(s)" in region
    )
    assert cells(region, "0")[:10] == ("0 0 embed.weight 2/2 GRAPHED 0,1 3 32.0 KiB -".split())
    row = cells(region, "2")
    assert row[2:8] == ["embed.weight", "1/2", "GRAPHED", "0,1", "3", "32.0"]
    assert row[9:11] == ["bucket", "3"] and row[-1].endswith("/model.py:123")
    assert cells(region, "1")[5] == "-"  # an ordinary weight has no gtp ranks
    assert [line.split()[0] for line in region.splitlines()[3:6]] == ["0", "1", "2"]
    assert "tied: embed.weight = head.weight" in region


def test_what_is_left_out_and_what_is_owed() -> None:
    text = plan_table(plan())
    assert "excluded from region r0" in text
    assert cells(text, "shared.weight")[:3] == ["shared.weight", "1", "UNGRAPHED"]
    assert "ready counts: 4 report(s) a step" in text
    assert cells(text, "3")[:7] == ["3", "dp_cp", "0,2", "1,792", "float32", "bfloat16", "3"]
    assert "unused (no site): old.weight" in text
    assert "unused: old.weight: no region has a site for it" in text


def test_empty_parts_are_left_out() -> None:
    bare = plan(unused=(), warnings=(), regions=(RegionPlan("r0", 2, (), ()),))
    text = plan_table(bare)
    assert "2 call(s) a step): 0 occurrence(s)" in text
    assert not any(word in text for word in ("unused", "warnings", "excluded", "tied"))


def test_lines_fit_a_terminal() -> None:
    assert max(map(len, plan_table(plan()).splitlines())) <= WIDTH


def test_str_of_a_plan_is_its_table() -> None:
    assert str(plan()) == plan_table(plan())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**41, "2048.0 GiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"),
        ((0, 2), "0,2"),
        ((4, 5, 6, 7), "4-7"),
        (tuple(range(0, 1024, 64)), "0-960 by 64"),
        ((0, 1, 5, 6), "0,1,5,6"),
        ((0, 1, 2, 3, 4, 5, 9, 11), "0,1,2,3,4,5,.. (8)"),
    ],
)
def test_rank_list(ranks: tuple[int, ...], text: str) -> None:
    assert rank_list(ranks) == text


def test_shorten() -> None:
    assert shorten("abc", 5) == "abc"
    assert shorten("abcdefghij", 7) == "ab..hij"
    assert shorten("abcdefghij", 7, keep_end=True) == "..fghij"
