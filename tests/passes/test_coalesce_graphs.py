"""coalesce_pass on graphs built by hand: where the sum stands, its dtype, and its near misses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpgraph.by_path import module_at
from gtpgraph.graph.sites import find_sites
from gtpgraph.passes.coalesce import coalesce_pass
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY
from gtpgraph.passes.lower_collectives import REDUCE_SCATTER
from gtpgraph.passes.pipeline import rewrite_backward
from gtpgraph.testing import max_error

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parents[1] / "graph" / "graph_tools.py"))
CAST = torch.ops.prims.convert_element_type.default


def coalesce(b: Any, request: Any) -> Any:
    sites = find_sites(b.graph, request.weights, request.uses)
    result = coalesce_pass(
        b.gm, sites=sites, wire_dtype=request.wire_dtype, fake_mode=request.fake_mode
    )
    b.graph.lint()
    return (*result, sites)


def three_uses(dtype: torch.dtype = torch.float32) -> Any:
    """w used three times, v once, an ordinary weight once."""
    b = t.Backward()
    x = b.input(4, 4, dtype=dtype)
    wgrads = [b.call(t.MUL, x, float(k + 1)) for k in range(3)]
    parts = [b.reduce(w, seq_nr=k) for k, w in enumerate(wgrads)]
    total = b.call(t.ADD, b.call(t.ADD, parts[0], parts[1]), parts[2])
    b.returns({0: total, 1: b.reduce(b.call(t.MM, x, x)), 2: b.call(t.MUL, x, 9.0)})
    return b, {0: ("w", True), 1: ("v", True), 2: ("norm", False)}


def test_one_sum_where_the_last_one_stood() -> None:
    b, weights = three_uses()
    result, kept, sites = coalesce(b, b.request(weights))
    assert result.counts == {"coalesced": 3, "reduces": 1}
    assert [(s.weight.fqn, s.summed) for s in kept] == [("w", 3), ("v", 1), ("norm", 1)]
    assert kept[1:] == sites[3:]
    order = list(b.graph.nodes)
    last = sites[2].contribution
    assert order.index(kept[0].contribution) == order.index(last) - 1


def test_numbers_reports_and_reductions() -> None:
    with t.one_rank() as groups:
        for flag, launches in ((False, 4), (True, 2)):
            b, weights = three_uses()
            name = groups.group_name("gtp")
            for node in t.targets(b.graph, t.REDUCE):
                node.args = (*node.args[:2], name)
            request = b.request(weights, depth=1)
            request = replace(request, coalesce=flag)
            inserted, snapshot = rewrite_backward(b.gm, request)
            assert snapshot.lost == snapshot.changed == snapshot.misplaced == ()
            assert len(t.targets(b.graph, REDUCE_SCATTER)) == launches
            assert len(t.targets(b.graph, ACCUMULATE, GRAD_READY)) == 2 * (3 if flag else 5)
            x = torch.randn(4, 4)
            ran = t.run(b.gm, [x], 48)
            assert ran.sites == list(range(len(inserted.sites)))
            expected = torch.stack([x * 6, x @ x, x * 9])
            assert max_error(ran.flat.view(3, 4, 4), expected) <= 1e-6


def test_merged_contributions_are_summed_twice() -> None:
    b = t.Backward()
    x = b.input(4, 4)
    n = b.reduce(b.call(t.MM, x, x))
    b.returns({0: b.call(t.ADD, n, n), 1: n})
    request = b.request({0: ("w1", True), 1: ("w2", True)})
    request = replace(request, coalesce=True)
    rewrite_backward(b.gm, request)
    x = torch.randn(4, 4)
    ran = t.run(b.gm, [x], 32)
    assert ran.sites == [0, 1]
    assert torch.equal(ran.flat.view(2, 4, 4), torch.stack([2 * (x @ x), x @ x]))


@pytest.mark.parametrize(
    ("dtype", "wire", "casts"),
    [
        (torch.bfloat16, torch.float32, 3),
        (torch.bfloat16, torch.bfloat16, 0),
        (torch.bfloat16, None, 0),
        (torch.float32, torch.bfloat16, 0),
    ],
)
def test_summed_in_the_wider_of_both_dtypes(
    dtype: torch.dtype, wire: torch.dtype | None, casts: int
) -> None:
    b, weights = three_uses(dtype)
    _, kept, _ = coalesce(b, b.request(weights, wire_dtype=wire))
    assert len(t.targets(b.graph, CAST)) == casts
    wide = torch.promote_types(dtype, wire or dtype)
    assert kept[0].contribution.meta["val"].dtype == wide


def test_a_contribution_that_feeds_another_computation_stays() -> None:
    """w1 + 2 * w2: the sum is a tap, the old reduce keeps its other reader."""
    b = t.Backward()
    x = b.input(4, 4)
    one, two = b.reduce(b.call(t.MM, x, x)), b.reduce(b.call(t.MUL, x, x))
    b.returns({0: b.call(t.ADD, one, two)}, b.call(t.MUL, one, 2.0))
    request = b.request({0: ("w", True)})
    request = replace(request, coalesce=True)
    rewrite_backward(b.gm, request)
    x = torch.randn(4, 4)
    ran = t.run(b.gm, [x], 16)
    assert torch.equal(ran.outputs[0], 2 * (x @ x))
    assert max_error(ran.flat.view(4, 4), x @ x + x * x) <= 1e-6


def test_near_misses_and_no_match_leave_the_graph_alone() -> None:
    """One use; an ordinary weight with a sum of its own; nothing at all."""
    b = t.Backward()
    x = b.input(4, 4)
    b.returns({0: b.reduce(x), 1: b.call(t.ADD, b.call(t.MUL, x, x), x)})
    before, code = t.text(b.graph), b.gm.code
    result, kept, sites = coalesce(b, b.request({0: ("w", True), 1: ("bias", False)}))
    assert not result.modified and kept == sites
    assert (t.text(b.graph), b.gm.code) == (before, code)


def test_idempotent_for_the_sites_it_returns() -> None:
    b, weights = three_uses()
    request = b.request(weights)
    _, kept, _ = coalesce(b, request)
    before = t.text(b.graph)
    result, again = coalesce_pass(b.gm, sites=kept, wire_dtype=None, fake_mode=b.mode)
    assert not result.modified and again == kept and t.text(b.graph) == before
