"""The fully-sharded adapter: FSDP2's gradients, and no group but the model's own (B2, B6, B7)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel.fsdp import fully_shard_v1, size_one_group
from gtpgraph.testing import RankPool, fp64_grads, max_error

LIMIT_S = 30.0


def groups_of(**axes: int) -> gg.ProcessGroups:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)


@contextlib.contextmanager
def log_calls() -> Iterator[list[tuple[str, Any]]]:
    """Barriers with their ranks, and creations with theirs, in order; WORLD shows as None."""
    seen: list[tuple[str, Any]] = []
    barrier, create = dist.barrier, dist.new_subgroups_by_enumeration
    new_group = dist.new_group

    def log_barrier(group: Any = None, **options: Any) -> Any:
        seen.append(("barrier", group and tuple(dist.get_process_group_ranks(group))))
        return barrier(group=group, **options)

    def log_create(ranks: Any, **options: Any) -> Any:
        seen.append(("create", ranks))
        return create(ranks, **options)

    def log_new(*args: Any, **options: Any) -> Any:
        seen.append(("new_group", args))
        return new_group(*args, **options)

    patched = {"barrier": log_barrier, "new_group": log_new}
    patched["new_subgroups_by_enumeration"] = log_create
    for name, function in patched.items():
        setattr(dist, name, function)
    try:
        yield seen
    finally:
        dist.barrier, dist.new_group = barrier, new_group
        dist.new_subgroups_by_enumeration = create


class Moe(nn.Module):
    """A dense layer and one expert a rank; `route` says whose tokens an expert gets."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.expert = nn.Linear(4, 4, bias=False)
        self.expert.weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] -> the mean of this rank's tokens, a scalar."""
        return self.expert(torch.tanh(self.dense(x))).square().mean()


# Gradients


def gradients(rank: int, world: int) -> dict[str, Tensor]:
    model, make_batch = build("gpt-tiny")
    wrapped = fully_shard_v1(model, groups_of(dp=world), nccl_ub=True)
    wrapped.manual_buffer_registration()
    wrapped(*make_batch(0, rank)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.dist
def test_gradients_are_those_of_one_process(ranks4: RankPool) -> None:
    torch.manual_seed(0)
    model, make_batch = build("gpt-tiny")
    expected = fp64_grads(model, [make_batch(0, rank) for rank in range(4)])
    for result in ranks4.run(gradients, timeout_s=LIMIT_S):
        assert max_error(result, expected) < 2e-6


def expert_gradients(rank: int, world: int) -> tuple[Tensor, Tensor]:
    groups = groups_of(dp=2, ep=2)
    model = Moe()
    wrapped = fully_shard_v1(model, groups)
    wrapped(torch.full((3, 4), float(rank + 1))).backward()
    dense, expert = model.dense.weight.grad, model.expert.weight.grad
    return dense.full_tensor(), expert.full_tensor()  # type: ignore[union-attr]


@pytest.mark.dist
def test_an_experts_gradient_is_summed_over_expt_dp_and_averaged_over_dp(ranks4: RankPool) -> None:
    torch.manual_seed(0)
    model = Moe().double()
    dense, expert = [], []
    for rank in range(4):
        model.zero_grad()
        model(torch.full((3, 4), rank + 1.0, dtype=torch.float64)).backward()
        dense.append(model.dense.weight.grad.clone())
        expert.append(model.expert.weight.grad.clone())
    results = ranks4.run(expert_gradients, timeout_s=LIMIT_S)
    for rank, (got_dense, got_expert) in enumerate(results):
        assert max_error(got_dense, torch.stack(dense).mean(0)) < 1e-6
        peers = (rank % 2, rank % 2 + 2)  # the ranks with the same experts
        assert max_error(got_expert, (expert[peers[0]] + expert[peers[1]]) / 4) < 1e-6


# Groups and barriers


def construct(rank: int, world: int) -> list[list[tuple[str, Any]]]:
    groups = groups_of(dp=2, ep=2)
    logs = []
    for model in (Moe(), nn.Linear(4, 4)):
        with log_calls() as seen:
            wrapped = fully_shard_v1(model, groups, nccl_ub=True)
        logs.append(seen)
        with log_calls() as seen:
            assert wrapped.manual_buffer_registration() == (
                ["dp", "expt_dp"] if isinstance(model, Moe) else ["dp"]
            )
            assert wrapped.manual_buffer_registration() == []
        logs.append(seen)
    return logs


@pytest.mark.dist
def test_no_barrier_at_construction_and_size_one_groups_once(ranks4: RankPool) -> None:
    one = ("create", [[0], [1], [2], [3]])
    for rank, (moe, moe_ub, dense, dense_ub) in enumerate(ranks4.run(construct, timeout_s=LIMIT_S)):
        # new_subgroups_by_enumeration makes its groups with new_group, of one rank each.
        assert [c for c in moe if c[0] != "new_group"] == [one]
        assert dense == []  # the first model's group serves the second
        everyone, same_experts = ("barrier", (0, 1, 2, 3)), ("barrier", (rank % 2, rank % 2 + 2))
        assert moe_ub == [everyone] * 2 + [same_experts] * 2
        assert dense_ub == [everyone] * 2


def tensor_parallel(rank: int, world: int) -> tuple[Any, ...]:
    groups = groups_of(dp=2, tp=2)
    model = nn.Linear(4, 4)
    with log_calls() as seen:
        wrapped = fully_shard_v1(model, groups, tp=2)
    wrapped(torch.full((1, 4), rank + 1.0)).sum().backward()
    gradient = model.weight.grad.full_tensor()  # type: ignore[union-attr]
    return seen, gradient, model.weight.device_mesh.mesh.tolist()  # type: ignore[union-attr]


@pytest.mark.dist
def test_with_a_tp_group_no_group_is_made(ranks4: RankPool) -> None:
    for rank, (seen, gradient, ranks) in enumerate(ranks4.run(tensor_parallel, timeout_s=LIMIT_S)):
        assert seen == []
        assert ranks == [rank % 2, rank % 2 + 2]
        assert torch.equal(gradient, torch.full((4, 4), rank % 2 + 2.0))  # mean over dp alone


def part_of_the_job(rank: int, world: int) -> float | None:
    groups = gg.ProcessGroups.from_mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    if rank > 1:
        size_one_group()  # the one thing that is collective over the job
        return None
    model = nn.Linear(4, 1)
    wrapped = fully_shard_v1(model, groups, nccl_ub=True)
    wrapped.manual_buffer_registration()
    wrapped(torch.full((1, 4), rank + 1.0)).sum().backward()
    return float(model.weight.grad.full_tensor().mean())  # type: ignore[union-attr]


@pytest.mark.dist
def test_ranks_outside_the_model_are_not_waited_for(ranks4: RankPool) -> None:
    assert ranks4.run(part_of_the_job, timeout_s=LIMIT_S) == [1.5, 1.5, None, None]


# Refusals


def refuse(rank: int, world: int) -> list[str]:
    groups = groups_of(dp=2, gtp=2)
    found = []

    def attempt(model: nn.Module, collection: object, **options: Any) -> None:
        with log_calls() as seen, pytest.raises(ValueError) as caught:
            fully_shard_v1(model, collection, **options)
        assert seen == []
        assert not any(isinstance(p, dist.tensor.DTensor) for p in model.parameters())
        found.append(str(caught.value))

    fields = {"dp": groups.dp, "tp": None}
    attempt(nn.Linear(2, 2), groups)
    attempt(nn.Linear(2, 2), gg.ProcessGroups(**fields), gtp=2)
    attempt(nn.Linear(2, 2), gg.ProcessGroups(**fields), expert_gtp=4)
    attempt(nn.Linear(2, 2), gg.ProcessGroups(**fields, expt_gtp=groups.gtp))
    attempt(gg.shard(nn.Linear(2, 2), gg.ProcessGroups.local()), gg.ProcessGroups(**fields))
    attempt(Moe(), gg.ProcessGroups())
    attempt(nn.Linear(2, 2), gg.ProcessGroups(tp=None))
    attempt(nn.Linear(2, 2), gg.ProcessGroups(**fields), tp=2)
    attempt(nn.Linear(2, 2), gg.ProcessGroups(**fields), units=["*.block"])
    mixed = nn.Linear(4, 4)
    mixed.weight.allreduce = False  # type: ignore[attr-defined]
    attempt(mixed, gg.ProcessGroups(**fields, ep=None, expt_dp=None))
    return found


REFUSALS = [
    r"expected gtp = 1 and expert gtp = 1, .*dense models included; "
    r"got gtp \(process groups\) = 2, expt_gtp \(process groups\) = 2\. Remedy",
    r"got gtp \(configuration\) = 2\. Remedy",
    r"got expert_gtp \(configuration\) = 4\. Remedy",
    r"got expt_gtp \(process groups\) = 2\. Remedy",
    r"got weights cut by shard\(\) = 2\. Remedy",
    r"- dp: not set \(UNSET\), needed by every model\n.*- tp: not set .*tp=1 says that there "
    r"is none.*\n.*- ep: not set .*expert weights\n.*- expt_dp: not set .*expert weights",
    r"- dp: not set \(UNSET\), needed by every model\nRemedy",
    r"tp: expected a group of 2 ranks, as configured, got one of 1",
    r"units: expected every pattern to match a module, got none for \['\*\.block'\]",
    r"expected expert weights in modules of their own.*got \['weight'\] beside dense ones",
]


@pytest.mark.dist
def test_refusals_come_before_anything_is_communicated_or_changed(ranks4: RankPool) -> None:
    texts = ranks4.run(refuse, timeout_s=LIMIT_S)[0]
    assert len(texts) == len(REFUSALS)
    for text, pattern in zip(texts, REFUSALS, strict=True):
        assert text.startswith("fully_shard_v1: ")
        assert re.search(pattern, text), text


def test_one_process_needs_torch_distributed_too() -> None:
    with pytest.raises(ValueError, match=r"expected torch\.distributed to be initialised"):
        fully_shard_v1(nn.Linear(2, 2), gg.ProcessGroups.local())


def test_registration_of_a_model_without_user_buffers_is_refused() -> None:
    from gtpgraph.parallel.fsdp import FullyShardedModel

    model = FullyShardedModel(nn.Linear(2, 2), gg.ProcessGroups.local(), None)
    with pytest.raises(ValueError, match="expected a model made with nccl_ub=True"):
        model.manual_buffer_registration()
