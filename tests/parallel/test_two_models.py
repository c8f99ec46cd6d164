"""Two models in one job of 8 ranks, training at once: each as if it were alone (K40)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.testing import RankPool

LIMIT_S = 120.0
STEPS = 3
# Model -> the ranks of its (dp, gtp) mesh.
DISJOINT = {"gpt-tiny": [[0, 1], [2, 3]], "mtp-tiny": [[4, 5], [6, 7]]}
SHARING = {"gpt-tiny": [[0, 1], [2, 3]], "mtp-tiny": [[2, 4], [3, 5], [6, 7]]}


class Training:
    """One model on this rank, advanced a stage of a step at a time."""

    def __init__(self, name: str, groups: gg.ProcessGroups, grid: list[list[int]], rank: int):
        torch.manual_seed(0)
        plain, self._make_batch = build(name)
        self.model = gg.DistributedDataParallel(
            gg.shard(plain, groups), groups, bucket_mb=0.05, nccl_ub=True, timeout_s=LIMIT_S
        )
        self.optimizer = DistributedOptimizer(
            torch.optim.AdamW, self.model, lr=1e-2, clip_norm=0.5, overlap_gather=True
        )
        self._place = [r for row in grid for r in row].index(rank)
        self.norms: list[float | None] = []

    def forward(self, seed: int) -> None:
        """Zero, and run forward."""
        self.optimizer.zero_grad()
        self._loss = self.model(*self._make_batch(seed, self._place))

    def backward(self, seed: int) -> None:
        """Run backward."""
        self._loss.backward()

    def update(self, seed: int) -> None:
        """Reduce, clip, update."""
        gg.finalize_model_grads(self.model, num_tokens=None)
        self.optimizer.step()
        self.norms.append(self.optimizer.grad_norm)

    def result(self) -> tuple[dict[str, Tensor], list[float | None]]:
        """This rank's shards, and the norms."""
        state = self.model.state_dict()
        return {n: getattr(t, "_local_tensor", t).clone() for n, t in state.items()}, self.norms


def train(rank: int, world: int, grids: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Train the named models; all ranks make the groups of all of them, whoever trains what."""
    mine = {}
    for name, grid in grids.items():
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "gtp"))
        groups = gg.ProcessGroups.from_mesh(mesh)
        if name in names and mesh.get_coordinate() is not None:
            mine[name] = Training(name, groups, grid, rank)
    for seed in range(STEPS):
        for stage in (Training.forward, Training.backward, Training.update):
            for each in mine.values():  # on a rank of both models, their stages alternate
                stage(each, seed)
    return {name: each.result() for name, each in mine.items()}


@pytest.fixture(scope="module")
def ranks8() -> Any:
    with RankPool(8) as pool:
        yield pool


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grids", [DISJOINT, SHARING], ids=["disjoint", "sharing"])
def test_both_models_equal_their_solo_runs(ranks8: RankPool, grids: dict[str, Any]) -> None:
    names = list(grids)
    together = ranks8.run(train, grids, names, timeout_s=LIMIT_S)
    for name in names:
        alone = ranks8.run(train, grids, [name], timeout_s=LIMIT_S)
        members = {r for row in grids[name] for r in row}
        for rank in range(8):
            assert (name in together[rank]) == (rank in members)
            if rank in members:
                weights, norms = together[rank][name]
                solo_weights, solo_norms = alone[rank][name]
                assert norms == solo_norms and len(norms) == STEPS
                assert all(torch.equal(weights[n], solo_weights[n]) for n in solo_weights)


def one_finalises(rank: int, world: int) -> int:
    groups = [
        gg.ProcessGroups.from_mesh(DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)))
        for ranks in ([0, 1], [2, 3])
    ][rank // 2]
    plain, make_batch = build("gpt-tiny")
    model = gg.DistributedDataParallel(plain, groups, nccl_ub=True)
    model.zero_grad_buffer()
    model(*make_batch(0, rank)).backward()
    if rank < 2:
        gg.finalize_model_grads(model, num_tokens=100)
        DistributedOptimizer(torch.optim.SGD, model, lr=0.1, clip_norm=1.0).step()
    return len(model.reports)


@pytest.mark.dist
def test_one_model_finalises_and_the_other_does_not(ranks4: RankPool) -> None:
    """K40: nobody waits for the other model's ranks."""
    reports = ranks4.run(one_finalises, timeout_s=30.0)
    assert len(set(reports)) == 1 and reports[0] > 0
