"""Chains, and the grouping of occurrences for dispatch, which keeps order and multiplicity."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpgraph.graph.chains import chain_of, check_patterns, group_occurrences
from gtpgraph.graph.plan import GRAPHED, UNGRAPHED, Excluded, Occurrence, RegionPlan
from gtpgraph.graph.region import declare_calls


def occurrence(site: int, weight: str, bucket: int = 0, stream: str = "main") -> Occurrence:
    return Occurrence(
        site, weight, (), 1, 1, GRAPHED, None, bucket, 4, stream, None, f"n{site}", ""
    )


@pytest.mark.parametrize(
    ("fqns", "patterns", "chain"),
    [
        (("layers.0.mlp.up",), (), GRAPHED),
        (("layers.0.mlp.up",), ("*.mlp.*",), UNGRAPHED),
        (("layers.0.mlp.up",), ("*.MLP.*", "layers.1.*"), GRAPHED),
        (("embed.weight", "head.weight"), ("head.*",), UNGRAPHED),  # any alias decides
        (("a[0].weight",), ("a[[]0].weight",), UNGRAPHED),
    ],
)
def test_chain_of(fqns: tuple[str, ...], patterns: tuple[str, ...], chain: str) -> None:
    assert chain_of(fqns, patterns) == chain


def test_idle_patterns_are_listed_with_near_misses() -> None:
    names = ["layers.0.mlp.shared_experts.up", "embed.weight"]
    check_patterns(["*.shared_experts.*", "embed.weight"], names)
    check_patterns([], names)
    with pytest.raises(ValueError) as error:
        check_patterns(["embd.weight", "*.shared_expert.*", "embed.*"], names)
    text = str(error.value)
    assert "'embd.weight' (near: embed.weight" in text and "'*.shared_expert.*'" in text
    assert "'embed.*'" not in text


def test_k02_grouping_keeps_order_and_duplicates() -> None:
    """[a, b, a] stays three: a wrapper that hears of two waits for ever."""
    listed = [occurrence(0, "a"), occurrence(1, "b"), occurrence(2, "a")]
    assert group_occurrences(listed) == {(0, "main"): listed}


def test_k02_by_group_and_stream() -> None:
    listed = [
        occurrence(0, "a", bucket=0),
        occurrence(1, "b", bucket=1),
        occurrence(2, "a", bucket=0, stream="side"),
        occurrence(3, "a", bucket=0),
        occurrence(4, "b", bucket=1),
    ]
    grouped = group_occurrences(listed)
    assert list(grouped) == [(0, "main"), (1, "main"), (0, "side")]
    assert [o.site for o in grouped[0, "main"]] == [0, 3]
    assert [o.site for o in grouped[1, "main"]] == [1, 4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from("mn"))))
def test_k02_grouping_loses_adds_and_reorders_nothing(drawn: list[tuple[str, int, str]]) -> None:
    listed = [occurrence(k, w, b, s) for k, (w, b, s) in enumerate(drawn)]
    grouped = group_occurrences(listed)
    assert sorted((o for group in grouped.values() for o in group), key=lambda o: o.site) == listed
    for (bucket, stream), group in grouped.items():
        assert group == [o for o in listed if (o.bucket, o.stream) == (bucket, stream)]


class _State:
    def __init__(self, index: int) -> None:
        self.index = index


def test_k02_what_a_region_owes_counts_duplicates_and_the_other_chain() -> None:
    listed = (occurrence(0, "a"), occurrence(1, "b"), occurrence(2, "a"))
    excluded = (Excluded("c", 1, UNGRAPHED, ""), Excluded("c", 2, UNGRAPHED, ""))
    states = {name: _State(k) for k, name in enumerate("abc")}
    plan = RegionPlan("r0", None, listed, excluded)
    calls = declare_calls(plan, states, {0: 2, 1: 1, 2: 2})  # type: ignore[arg-type]
    assert Counter(calls.sites) == Counter({0: 2, 1: 1, 2: 2})
    assert calls.name == "r0" and calls.outstanding == 0
