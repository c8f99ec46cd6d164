"""Faults on one rank: the same error on all of them within the timeout, and never a hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error, run_ranks

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))
BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
pytestmark = pytest.mark.dist


def one_rank_is_short(rank: int, world: int, gtp: int, compiled: bool) -> dict[str, Any]:
    """In step 2 the last rank makes no backward, while the others' buckets leave in theirs."""
    torch.manual_seed(0)
    model, batches = h.MeanSquare(h.MLP()), [(h.batch_of(r),) for r in range(world)]
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, gtp, timeout_s=10.0, bucket_mb=1e-4)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    h.step(ddp, call, *batches[rank])
    ddp.zero_grad_buffer()
    start = time.monotonic()
    if rank < world - 1:
        h.backward(ddp, call, *batches[rank])
    out: dict[str, Any] = {"early": len(ddp.ledger.left), "text": h.error_of(ddp.finish_grad_sync)}
    out["seconds"] = time.monotonic() - start
    out["errors"] = []
    for _ in range(2):
        h.step(ddp, call, *batches[rank])
        out["errors"].append(max_error(h.full_grads(ddp), expected))
    return out


@BOTH
def test_a_fault_on_one_rank_is_the_same_error_on_all_and_the_next_step_is_right(
    ranks2: RankPool, compiled: bool
) -> None:
    """What some ranks had launched is matched by the others before anyone goes on."""
    first, second = ranks2.run(one_rank_is_short, 1, compiled, timeout_s=40)
    assert first["early"] > 0 and second["early"] == 0
    assert first["text"] == second["text"]
    assert "rank 1: body.layers.0.weight: expected at least one readiness report" in first["text"]
    assert "rank 0:" not in first["text"]
    for seen in (first, second):
        assert seen["seconds"] < 10
        assert all(error <= h.SUM_ORDER_BAR for error in seen["errors"])


class SkipsLast(nn.Module):
    """Three layers; the last one is used only where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        for layer in self.layers if whole else self.layers[:2]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def uses_differ_by_rank(rank: int, world: int) -> list[float]:
    """allow_unused: rank 1 never reaches the last layer, whose bucket is the first one."""
    torch.manual_seed(0)
    model = SkipsLast()
    grads = [fp64_grads(model, [(h.batch_of(r), r == 0)]) for r in range(world)]
    mean = {n: sum(g.get(n, torch.zeros(())) for g in grads) / world for n in grads[0]}
    ddp = h.wrap(model, world, 1, bucket_mb=1e-4, allow_unused=True, timeout_s=10.0)
    errors = []
    for _ in range(3):
        h.step(ddp, ddp, h.batch_of(rank), rank == 0)
        errors.append(max_error(h.full_grads(ddp), mean))
    return errors


def test_allow_unused_holds_when_the_ranks_use_different_weights(ranks2: RankPool) -> None:
    for errors in ranks2.run(uses_differ_by_rank, timeout_s=40):
        assert all(error <= h.SUM_ORDER_BAR for error in errors), errors


def uses_differ_unannounced(rank: int, world: int) -> list[str]:
    """Without allow_unused: what the end of the step, and the start of the next, say."""
    ddp = h.wrap(SkipsLast(), world, 1, bucket_mb=1e-4, timeout_s=10.0)
    x = h.batch_of(rank)
    h.step(ddp, ddp, x, True)
    texts = [h.error_of(h.step, ddp, ddp, x, rank == 0), h.error_of(ddp.zero_grad_buffer)]
    ddp.close()
    return texts


def test_reductions_in_different_orders_are_an_error_and_never_a_hang() -> None:
    """The ranks have launched what can never match: said at once, and again instead of a hang."""
    first, second = run_ranks(uses_differ_unannounced, 2, timeout_s=40)
    assert first == second
    assert "rank 1: layers.2.weight" in first[0] and "rank 0:" not in first[0]
    assert "expected reductions that every rank has launched" in first[1]
    assert "checkpoint" in first[1] and "layers.2.weight" in first[1]


def one_rank_skips_finish(rank: int, world: int) -> str:
    ddp = h.wrap(h.MeanSquare(h.MLP()), world, world, timeout_s=2.0)
    ddp.zero_grad_buffer()
    h.backward(ddp, ddp, h.batch_of(rank))
    return h.error_of(ddp.finish_grad_sync) if rank == 0 else ""


def test_a_rank_that_does_not_come_is_named(ranks2: RankPool) -> None:
    text, _ = ranks2.run(one_rank_skips_finish, timeout_s=40)
    assert "rank(s) [1] did not come" in text and "within 2 s" in text


def a_fault_then_a_clean_step(rank: int, world: int, compiled: bool) -> float:
    """gtp 2: rank 0 alone has an exception after its backward; both start the next step anew."""
    torch.manual_seed(0)
    model, batches = h.MeanSquare(h.MLP()), [(h.batch_of(r),) for r in range(world)]
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, world, timeout_s=10.0)
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    h.step(ddp, call, *batches[rank])
    ddp.zero_grad_buffer()
    h.backward(ddp, call, *batches[rank])
    text = h.error_of(ddp.check_ranks, ["out of data"] if rank == 0 else [])
    assert "rank 0: out of data" in text
    h.step(ddp, call, *batches[rank])
    return max_error(h.full_grads(ddp), expected)


@BOTH
def test_after_a_fault_the_next_step_is_right_on_all_ranks(
    ranks2: RankPool, compiled: bool
) -> None:
    assert all(e <= h.SUM_ORDER_BAR for e in ranks2.run(a_fault_then_a_clean_step, compiled))
