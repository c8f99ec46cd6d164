"""User buffers: who waits for whom while gradient buffers are registered (B1, K41)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gtpgraph as gg
from gtpgraph import compat
from gtpgraph.parallel import user_buffers
from gtpgraph.parallel.user_buffers import UserBuffers
from gtpgraph.testing import RankPool

CPU = torch.device("cpu")
LIMIT_S = 20.0  # a hang is a failure after this; a run takes about a second


class Stage(nn.Module):
    """A dense layer, and on some stages an expert."""

    def __init__(self, *, expert: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        if expert:
            self.expert = nn.Linear(4, 4)
            for weight in self.expert.parameters():
                weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 4] -> a scalar."""
        for layer in self.children():
            x = layer(x)
        return x.square().sum()


@contextlib.contextmanager
def barriers() -> Iterator[list[tuple[Any, ...]]]:
    """The ranks of every barrier that is made inside, in order."""
    seen: list[tuple[Any, ...]] = []
    original = dist.barrier

    def spy(group: Any = None, **options: Any) -> Any:
        # The default group has a rank list too; None is how WORLD is asked for.
        seen.append(("WORLD",) if group is None else tuple(dist.get_process_group_ranks(group)))
        return original(group=group, **options)

    dist.barrier = spy
    try:
        yield seen
    finally:
        dist.barrier = original


def groups_of(**axes: int) -> gg.ProcessGroups:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)


def stages(rank: int, world: int) -> list[tuple[int, ...]]:
    groups = groups_of(pp=2, dp=1, ep=2)
    with barriers() as seen:
        model = gg.DistributedDataParallel(
            Stage(expert=groups.rank("pp") == 0), groups, nccl_ub=True, timeout_s=LIMIT_S
        )
    model.zero_grad_buffer()
    model(torch.ones(1, 4)).backward()
    return seen


@pytest.mark.dist
def test_stages_with_different_buffers_wait_for_their_own_peers_alone(ranks4: RankPool) -> None:
    """K41: a stage without experts has fewer buffers; expt_dp has one rank here, so no barrier."""
    assert ranks4.run(stages, timeout_s=LIMIT_S) == [
        [(0, 1), (0, 1)], [(0, 1), (0, 1)], [(2, 3), (2, 3)], [(2, 3), (2, 3)]
    ]  # fmt: skip


def experts(rank: int, world: int, expert_stages: int) -> list[tuple[int, ...]]:
    groups = groups_of(pp=2, dp=2)
    has_expert = groups.rank("pp") < expert_stages
    with barriers() as seen:
        buffers = UserBuffers()
        buffers.add("dp_cp", groups.group("dp_cp"), CPU)
        if has_expert:
            mine = [dist.new_group(r) for r in ([0, 1], [2, 3])][groups.rank("pp")]
            buffers.add("expt_dp", mine, CPU)
        else:
            for ranks in ([0, 1], [2, 3]):
                dist.new_group(ranks)
        buffers.register()
    return seen


@pytest.mark.dist
def test_every_buffer_group_has_its_two_barriers_in_one_order(ranks4: RankPool) -> None:
    seen = ranks4.run(experts, 1, timeout_s=LIMIT_S)
    assert seen == [[(0, 1)] * 4, [(0, 1)] * 4, [(2, 3)] * 2, [(2, 3)] * 2]


def outsiders(rank: int, world: int) -> list[tuple[int, ...]] | None:
    groups = gg.ProcessGroups.from_mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    if rank > 1:
        return None  # it serves no model, and nobody waits for it
    with barriers() as seen:
        gg.DistributedDataParallel(Stage(expert=False), groups, nccl_ub=True)
    return seen


@pytest.mark.dist
def test_ranks_outside_the_model_are_not_waited_for(ranks4: RankPool) -> None:
    assert ranks4.run(outsiders, timeout_s=LIMIT_S) == [[(0, 1)] * 2] * 2 + [None] * 2


def manual(rank: int, world: int) -> tuple[Any, ...]:
    groups = groups_of(dp=world)
    with barriers() as seen:
        model = gg.DistributedDataParallel(Stage(expert=False), groups, nccl_ub="manual")
        before = len(seen)
        first, again = model.manual_buffer_registration(), model.manual_buffer_registration()
    return before, first, again, len(seen)


@pytest.mark.dist
def test_manual_registration_is_once_and_when_asked(ranks4: RankPool) -> None:
    assert ranks4.run(manual) == [(0, ["dp_cp"], [], 2)] * 4


def test_the_order_of_groups_does_not_depend_on_who_allocated_first() -> None:
    class Group:
        """Stands for a process group: a key."""

    seen: list[object] = []
    dense, experts_ = Group(), Group()
    buffers = UserBuffers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_buffers, "barrier", lambda group, device: seen.append(group))
        patch.setattr(compat, "nccl_backend", lambda group, device: None)
        buffers.add("expt_dp", experts_, CPU)  # type: ignore[arg-type]
        buffers.add("dp_cp", dense, CPU)  # type: ignore[arg-type]
        assert buffers.register() == ["dp_cp", "expt_dp"]
    assert seen == [dense, dense, experts_, experts_]


def test_what_registration_does_on_nccl() -> None:
    """The order of calls, on a stand-in backend: barrier, register, barrier; undone by close."""
    calls: list[str] = []

    class Backend:
        def register_mem_pool(self, pool: object) -> None:
            calls.append(f"register {pool}")

        def deregister_mem_pool(self, pool: object) -> None:
            calls.append(f"deregister {pool}")

    buffers = UserBuffers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_buffers, "barrier", lambda group, device: calls.append("barrier"))
        patch.setattr(compat, "nccl_backend", lambda group, device: None)
        buffers.add("dp", object(), CPU)  # type: ignore[arg-type]
        (pool,) = buffers._pools.values()
        pool.backend, pool.pool = Backend(), "pool"  # type: ignore[assignment]
        buffers.register()
        buffers.close()
    assert calls == ["barrier", "register pool", "barrier", "deregister pool"]


def test_one_process_registers_nothing_and_refusals() -> None:
    model = gg.DistributedDataParallel(Stage(expert=False), nccl_ub=True)
    assert model.manual_buffer_registration() == []
    model.close()
    plain = gg.DistributedDataParallel(Stage(expert=False))
    with pytest.raises(ValueError, match=r"made with nccl_ub=True or nccl_ub='manual', got"):
        plain.manual_buffer_registration()
    with pytest.raises(ValueError, match=r"nccl_ub: expected one of .*got 'later'"):
        gg.DistributedDataParallel(Stage(expert=False), nccl_ub="later")
