"""Activation checkpoints around blocks that hold GTP weights: recomputation reports nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gtpgraph
from gtpgraph.by_path import module_at

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))


class Recomputed(nn.Module):
    """Blocks under non-reentrant checkpoints, around or inside what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = h.MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x.square().mean()


def test_k32_a_checkpoint_around_a_compiled_block_owes_one_backward_for_two_forwards() -> None:
    model = Recomputed()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    h.compile_part(model.block)
    for _ in range(3):
        h.step(ddp, ddp, x)
        counts = h.counts(ddp.reports)
        assert set(counts.values()) == {1, 2} and counts["block.layers.0.weight"] == 2
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR
    (region,) = gtpgraph.plan_of(ddp).regions
    assert region.calls == 2


@pytest.mark.parametrize("how", ["eager", "whole", "block"])
def test_k38_recomputation_reports_nothing(how: str) -> None:
    model = Recomputed()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    call: Any = gtpgraph.compile(ddp, lowering="eager") if how == "whole" else ddp
    if how == "block":
        h.compile_part(model.block)
    for _ in range(2):
        h.step(ddp, call, x)
        counts = h.counts(ddp.reports)
        gtp = {n: k for n, k in counts.items() if n.endswith("weight") and "norm" not in n}
        uses = {"first.weight": 1, "block.layers.0.weight": 2, "block.layers.1.weight": 2}
        assert gtp == uses
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR
