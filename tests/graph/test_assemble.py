"""Which compilations of a region a plan shows."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import gtpgraph as gg
from gtpgraph.graph.assemble import current


def test_the_plan_shows_what_ran_last_else_the_newest() -> None:
    regions = [SimpleNamespace(name=n) for n in ("r0", "r0.1", "r1")]
    assert [r.name for r in current(regions, frozenset())] == ["r0.1", "r1"]  # type: ignore[arg-type]
    ran = current(regions, frozenset({"r0"}))  # type: ignore[arg-type]
    assert [r.name for r in ran] == ["r0", "r1"]


def test_a_recompiled_region_appears_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).square().mean()

    torch._dynamo.reset()  # sizes that other tests made dynamic would need no second compilation
    model = gg.DistributedDataParallel(gg.shard(Net()))
    step = gg.compile(model, lowering="eager")
    for rows in (3, 5):  # the second size compiles the region again
        model.zero_grad_buffer()
        step(torch.randn(rows, 4)).backward()
        model.finish_grad_sync()
    assert len(step.regions) == 2
    assert [r.name for r in step.plan.regions] == ["r0.1"]
    assert step.plan.ready_counts == {"lin.weight": 1, "lin.bias": 1}
