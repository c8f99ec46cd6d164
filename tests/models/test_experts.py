"""Experts whose use depends on a rank's tokens: equal collectives on all ranks, or a refusal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at(
    "gtpgraph_case_helpers", str(Path(__file__).resolve().parents[1] / "cases" / "helpers.py")
)
EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    """Two stacked weights [experts, width, width], read once per expert: all of them (`every`) in
    a loop that a graph can hold, or those that were hit in one that it cannot."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.every = every

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if self.every:
            for e in range(EXPERTS):
                y = torch.tanh(F.linear(x, self.up[e]))
                out = out + F.linear(y, self.down[e]) * (choice == e).unsqueeze(1)
            return out
        for hit in choice.unique():
            (rows,) = torch.where(choice == hit)
            y = torch.tanh(F.linear(x[rows], self.up[hit]))
            out = out.index_add(0, rows, F.linear(y, self.down[hit]))
        return out


class MoE(nn.Module):
    def __init__(self, every: bool = False) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(WIDTH, WIDTH), Experts(every)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        y = torch.tanh(self.before(x))
        return self.after(y + self.experts(y, choice)).square().mean()


class Listed(nn.Module):
    """Experts as modules of their own, called when they are hit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == e)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return out.square().mean()


def batches_of(world: int) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 hits one expert, rank 1 three of them, others all."""
    choices = [[2, 2, 2, 2, 2, 2], [0, 1, 3, 0, 1, 3], [0, 1, 2, 3, 0, 1]]
    return [
        (h.batch_of(r, rows=6, width=WIDTH), torch.tensor(choices[min(r, 2)])) for r in range(world)
    ]


def run(rank: int, world: int, every: bool, compiled: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = MoE(every)
    batches = batches_of(world)
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, world)
    h.step(ddp, ddp, *batches[rank])  # learns the counts that the plan's uses must agree with
    call = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    for _ in range(2):
        h.step(ddp, call, *batches[rank])
    return {
        "error": max_error(h.full_grads(ddp), expected),
        "counts": h.counts(ddp.reports),
        "regional": {r.weight for r in ddp.reports if r.region},
    }


@pytest.mark.dist
@pytest.mark.parametrize("every", [False, True], ids=["those hit", "all"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_stacked_experts_are_gathered_once(ranks2: RankPool, every: bool, compiled: bool) -> None:
    for got in ranks2.run(run, every, compiled):
        assert got["error"] <= h.SUM_ORDER_BAR
        assert set(got["counts"].values()) == {1}
        assert ("experts.up" in got["regional"]) == (compiled and every)
        assert ("after.weight" in got["regional"]) == compiled


def test_a_read_for_the_dtype_is_no_use() -> None:
    class Asks(Experts):
        def forward(self, x: Tensor, choice: Tensor) -> Tensor:
            with torch.no_grad():
                x = x.to(self.up.dtype)
            return super().forward(x, choice)

    model = MoE()
    model.experts.__class__ = Asks
    plain, ddp = copy.deepcopy(model), h.wrap(model)
    batch = batches_of(2)[1]
    h.step(ddp, ddp, *batch)
    assert h.error_from_plain(ddp, plain, *batch) <= h.SUM_ORDER_BAR
    assert set(h.counts(ddp.reports).values()) == {1}


def test_an_exception_in_the_forward_closes_its_scope() -> None:
    ddp = h.wrap(MoE())
    x, choice = batches_of(2)[1]
    assert h.error_of(ddp, x, choice.float()[:1].expand(6, 6)) != ""
    ddp.zero_grad_buffer()
    before = ddp.module.experts.up
    assert before is not ddp.module.experts.up  # outside a forward nothing is kept


def run_listed(rank: int, world: int, gtp: int) -> list[str]:
    torch.manual_seed(0)
    ddp = h.wrap(Listed(), world, gtp, allow_unused=True)
    call = gtpgraph.compile(ddp, lowering="eager")
    x, choice = h.batch_of(0, rows=6, width=WIDTH), torch.tensor([0, 1, 2, 3, 0, 1])
    try:
        h.step(ddp, call, x, choice)
    except Exception as error:
        return [str(error)]
    return [r.weight for r in ddp.reports]


@pytest.mark.dist
def test_experts_called_when_hit_are_refused_before_ranks_part(ranks2: RankPool) -> None:
    for (text,) in ranks2.run(run_listed, 2):
        assert "experts.0.weight" in text and "exclude=" in text
    for reports in ranks2.run(run_listed, 1):  # no group to hang on: nothing to refuse
        assert len(reports) == 8
