"""The gradient norm, clipping, skipped steps, unused weights (K42 to K44), late gathers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel.grad_norm import GradNorm
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.testing import RankPool, fp64_grads

LIMIT_S = 30.0


def groups_of(**axes: int) -> gg.ProcessGroups:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)


def sgd(model: object, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD, model, **({"lr": 1.0} | options))


class Given(nn.Module):
    """Weights whose gradients are what the forward is given, one tensor a weight."""

    def __init__(self, *shapes: tuple[int, ...], **marks: str) -> None:
        super().__init__()
        for k, shape in enumerate(shapes):
            self.register_parameter(f"w{k}", nn.Parameter(torch.ones(shape)))
        for name, mark in marks.items():
            setattr(self.get_parameter(name), mark, mark != "allreduce")

    def forward(self, *gradients: Tensor) -> Tensor:
        """A loss with these gradients."""
        return torch.stack(
            [(w * g).sum() for w, g in zip(self.parameters(), gradients, strict=True)]
        ).sum()


def backward(model: gg.DistributedDataParallel, *gradients: Tensor) -> None:
    model.zero_grad_buffer()
    model(*gradients).backward()
    model.finish_grad_sync()


# The norm: every element once


def model_norm(rank: int, world: int, gtp: int, reduce: str, bucket_mb: float) -> float:
    groups = groups_of(dp=world // gtp, gtp=gtp)
    plain, make_batch = build("mtp-tiny", vocab=259)
    model = gg.DistributedDataParallel(
        gg.shard(plain, groups), groups, reduce=reduce, bucket_mb=bucket_mb
    )
    optimizer = sgd(model)
    model.zero_grad_buffer()
    model(*make_batch(0, rank)).backward()
    model.finish_grad_sync()
    spoil_padding(model, optimizer)
    optimizer.step()
    assert optimizer.grad_norm is not None
    return optimizer.grad_norm


def spoil_padding(model: gg.DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    """Write into every element of the owned slices that is no element of a weight."""
    for part in optimizer.slices:
        padding = torch.ones(part.bucket.flat.numel(), dtype=torch.bool)
        for member in part.bucket.members:
            place = padding[member.offset :][: member.numel].view(member.shape)
            spec = model.states[member.index].spec  # rows beyond the weight's last are padding too
            place[: member.shape[0] if spec is None else spec.valid_rows] = False
        padding = padding[part.bucket.own]
        assert not part.grad[padding].any()  # K44: it arrives as zero
        part.grad[padding] = 1e6


@pytest.mark.dist
@pytest.mark.parametrize(
    ("gtp", "reduce", "bucket_mb"),
    [(2, "reduce_scatter", 0.05), (2, "all_reduce", 0.05), (4, "reduce_scatter", 1.0)],
)
def test_norm_is_that_of_one_process_and_padding_is_no_part_of_it(
    ranks4: RankPool, gtp: int, reduce: str, bucket_mb: float
) -> None:
    torch.manual_seed(0)
    plain, make_batch = build("mtp-tiny", vocab=259)
    grads = fp64_grads(plain, [make_batch(0, rank) for rank in range(4)])
    expected = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    results = ranks4.run(model_norm, gtp, reduce, bucket_mb, timeout_s=LIMIT_S)
    assert len(set(results)) == 1  # the very same number on every rank
    assert abs(results[0] - expected) < 1e-6 * expected


def replicated_norm(rank: int, world: int) -> tuple[float, float]:
    groups = groups_of(tp=2, dp=2)
    norms = []
    for mark in ({}, {"w0": "tensor_model_parallel"}):
        model = gg.DistributedDataParallel(Given((5, 3), (4,), **mark), groups, loss="per_token")
        optimizer = sgd(model, lr=0.0)
        backward(model, torch.ones(5, 3), torch.ones(4))
        optimizer.step()
        norms.append(optimizer.grad_norm)
        model.close()
    return tuple(norms)  # type: ignore[return-value]


@pytest.mark.dist
def test_weights_replicated_over_tp_count_once(ranks4: RankPool) -> None:
    once, cut = math.sqrt(4 * 19), math.sqrt(4 * (2 * 15 + 4))  # gradients are 2: a sum over dp
    assert ranks4.run(replicated_norm, timeout_s=LIMIT_S) == [(once, cut)] * 4


def stages_norm(rank: int, world: int) -> float:
    groups = groups_of(pp=2, dp=2)
    shapes = ((6,), (3,)) if groups.rank("pp") == 0 else ((6,), (2,), (7,))
    model = gg.DistributedDataParallel(
        Given(*shapes, w0="shared_embedding"), groups, loss="per_token"
    )
    optimizer = sgd(model)
    model.zero_grad_buffer()
    model(*(torch.ones(s) for s in shapes)).backward()
    gg.finalize_model_grads(model)
    optimizer.step()
    return optimizer.grad_norm or 0.0


@pytest.mark.dist
def test_an_embedding_shared_by_stages_counts_once(ranks4: RankPool) -> None:
    expected = math.sqrt(6 * 4**2 + (3 + 2 + 7) * 2**2)
    assert ranks4.run(stages_norm, timeout_s=LIMIT_S) == [expected] * 4


def expert_norm(rank: int, world: int) -> tuple[float, list[tuple[str, tuple[int, ...]]]]:
    groups = groups_of(dp=2, ep=2)
    model = gg.DistributedDataParallel(
        Given((3, 5), (4, 4), w0="allreduce", w1="allreduce"), groups, loss="per_token"
    )
    optimizer = sgd(model)
    compiled = gg.compile(model, lowering="eager")
    ones = [torch.full((3, 5), 0.5), torch.full((4, 4), 0.5)]  # the sum over expt_dp is 1
    model.zero_grad_buffer()
    compiled(*ones).backward()
    model.finish_grad_sync()
    optimizer.step()
    shown = [(b.group.axis, tuple(b.group.ranks)) for b in compiled.plan.buckets]
    return optimizer.grad_norm or 0.0, shown


@pytest.mark.dist
def test_expert_gradients_all_ones_have_norm_sqrt_n_and_a_visible_group(ranks4: RankPool) -> None:
    """K42."""
    num_elements = 2 * (15 + 16)  # two ranks along ep, each with other experts
    for rank, (norm, shown) in enumerate(ranks4.run(expert_norm, timeout_s=LIMIT_S)):
        assert norm == math.sqrt(num_elements)
        assert shown == [("expt_dp", (rank % 2, rank % 2 + 2))]


def outside(rank: int, world: int) -> float | None:
    groups = gg.ProcessGroups.from_mesh(DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",)))
    if rank not in (1, 2):
        return None
    model = gg.DistributedDataParallel(Given((4,)), groups)
    optimizer = sgd(model)
    backward(model, torch.ones(4))
    optimizer.step()
    return optimizer.grad_norm


@pytest.mark.dist
def test_ranks_outside_the_model_are_not_asked(ranks4: RankPool) -> None:
    assert ranks4.run(outside, timeout_s=LIMIT_S) == [None, 2.0, 2.0, None]


def test_missing_groups_are_named_together() -> None:
    model = gg.DistributedDataParallel(Given((4,), w0="shared_embedding"))
    model.groups = gg.ProcessGroups(dp=None)
    with pytest.raises(ValueError) as caught:
        sgd(model)
    for name in ("grad_norm", "tp", "embd"):
        assert f"- {name}: not set (UNSET), needed by the norm of the gradients" in str(
            caught.value
        )
    assert sgd(model, skip_nonfinite=False).grad_norm is None  # nothing needs it then


# Clipping


def clipped(rank: int, world: int, clip_norm: float) -> tuple[float, dict[str, Tensor]]:
    groups = groups_of(dp=2, gtp=2)
    plain, make_batch = build("gpt-tiny")
    model = gg.DistributedDataParallel(gg.shard(plain, groups), groups, bucket_mb=0.05)
    optimizer = sgd(model, lr=0.1, clip_norm=clip_norm)
    for seed in range(2):
        optimizer.zero_grad()
        model(*make_batch(seed, rank)).backward()
        model.finish_grad_sync()
        assert optimizer.step()
    state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
             for n, t in model.state_dict().items()}  # fmt: skip
    return optimizer.grad_norm or 0.0, state


@pytest.mark.dist
@pytest.mark.parametrize("clip_norm", [0.25, 100.0])
def test_clipping_is_that_of_plain_training(ranks4: RankPool, clip_norm: float) -> None:
    torch.manual_seed(0)
    plain, make_batch = build("gpt-tiny")
    plain.double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    norm = torch.tensor(0.0)
    for seed in range(2):
        optimizer.zero_grad()
        plain(torch.cat([make_batch(seed, rank)[0] for rank in range(4)])).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        optimizer.step()
    assert (norm > clip_norm) == (clip_norm < 1)  # one case clips, the other does not
    for found, weights in ranks4.run(clipped, clip_norm, timeout_s=LIMIT_S):
        assert abs(found - float(norm)) < 1e-5 * float(norm)
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(weights[name].double(), weight.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_a_clip_norm_that_cannot_be_meant(clip_norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm: expected a positive norm"):
        sgd(gg.DistributedDataParallel(nn.Linear(2, 2)), clip_norm=clip_norm)


# Gradients that are not finite


def not_finite(rank: int, world: int, value: float) -> tuple[Any, ...]:
    groups = groups_of(dp=2, gtp=2)
    model = gg.DistributedDataParallel(Given((40,), (3,)), groups)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1, clip_norm=1.0)
    good, bad = [torch.ones(40), torch.ones(3)], [torch.ones(40), torch.ones(3)]
    if rank == 3:
        bad[1][2] = value  # one element, on one rank
    steps = []
    for gradients in (good, bad, bad, good):
        before = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(optimizer.torch_optimizer.state_dict()["state"])
        backward(model, *gradients)
        updated = optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        state_same = str(state) == str(optimizer.torch_optimizer.state_dict()["state"])
        steps.append((updated, same, state_same))
    return steps, optimizer.skipped, optimizer.state_dict()["skipped"]


@pytest.mark.dist
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(ranks4: RankPool, value: float) -> None:
    taken, left = (True, False, False), (False, True, True)
    results = ranks4.run(not_finite, value, timeout_s=LIMIT_S)
    for rank, (steps, *counts) in enumerate(results):
        assert [s[:2] for s in steps] == [t[:2] for t in (taken, left, left, taken)], rank
        assert [s[2] for s in steps[1:3]] == [True, True]
        assert counts == [2, 2]


# Weights without a site (K43)


class Half(nn.Module):
    """Of its two layers one is used, on all ranks or on rank 0 alone; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, also: bool) -> Tensor:
        """[n, 4] -> a scalar."""
        x = self.used(x)
        return (self.sometimes(x) if also else x).square().mean()


def unused(rank: int, world: int) -> list[str]:
    groups = groups_of(dp=world)
    torch.manual_seed(0)
    model = gg.DistributedDataParallel(Half(), groups, allow_unused=True, bucket_mb=1.0)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4), rank == 0).backward()
        model.finish_grad_sync()
        optimizer.step()
    after = dict(model.module.named_parameters())
    with_state = {p.fqn for s in optimizer.slices for p in s.pieces
                  if optimizer.torch_optimizer.state.get(p.master)}  # fmt: skip
    assert not any(name.startswith("never") for name in with_state)
    return [n for n in before if torch.equal(before[n], after[n])]


@pytest.mark.dist
def test_a_weight_that_no_rank_used_is_left_alone(ranks4: RankPool) -> None:
    """K43; one that a single rank used is everybody's, or the ranks would drift apart."""
    assert ranks4.run(unused, timeout_s=LIMIT_S) == [["never.weight", "never.bias"]] * 4


def test_a_weight_without_a_site_is_left_alone_when_compiled() -> None:
    model = gg.DistributedDataParallel(gg.shard(Half()), allow_unused=True)
    compiled = gg.compile(model, lowering="eager")
    optimizer = DistributedOptimizer(torch.optim.AdamW, compiled, lr=0.1, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.ones(2, 4), False).backward()
        model.finish_grad_sync()
        optimizer.step()
    after = dict(model.module.named_parameters())
    same = {n for n in before if torch.equal(before[n], after[n])}
    assert same == {f"{m}.{w}" for m in ("sometimes", "never") for w in ("weight", "bias")}
    assert "never.weight" in compiled.plan.unused


# Overlapped gathers


def overlapped(rank: int, world: int, overlap: bool, how: str) -> tuple[Any, ...]:
    groups = groups_of(dp=2, gtp=2)
    plain, make_batch = build("gpt-tiny")
    model = gg.DistributedDataParallel(gg.shard(plain, groups), groups, bucket_mb=0.05)
    run = gg.compile(model, lowering="eager") if how == "compiled" else model
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1, overlap_gather=overlap)
    losses, pending = [], []
    for seed in range(3):
        optimizer.zero_grad()
        loss = run(*make_batch(seed, rank))
        assert not optimizer._publisher.pending  # a forward reads everything
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(float(loss.detach()))
        pending.append(len(optimizer._publisher.pending))
    if how == "inference":
        with torch.no_grad():
            losses.append(float(gg.compile(model, lowering="eager")(*make_batch(9, rank))))
    state = model.state_dict()
    assert not optimizer._publisher.pending
    return losses, pending, {n: getattr(t, "_local_tensor", t).clone() for n, t in state.items()}


@pytest.mark.dist
@pytest.mark.parametrize("how", ["eager", "compiled", "inference"])
def test_overlapped_gathers_are_published_before_anything_reads(ranks4: RankPool, how: str) -> None:
    plain = ranks4.run(overlapped, False, how, timeout_s=LIMIT_S)
    late = ranks4.run(overlapped, True, how, timeout_s=LIMIT_S)
    for (losses, none, weights), (late_losses, pending, late_weights) in zip(
        plain, late, strict=True
    ):
        assert none == [0, 0, 0] and all(pending)
        assert late_losses == losses
        assert all(torch.equal(weights[n], late_weights[n]) for n in weights)


def prefetched(rank: int, world: int) -> tuple[bool, bool]:
    groups = groups_of(dp=2, gtp=2)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = gg.DistributedDataParallel(gg.shard(module, groups), groups, bucket_mb=1e-4)
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=1.0, overlap_gather=True)
    model.zero_grad_buffer()
    model(torch.ones(1, 8)).sum().backward()
    model.finish_grad_sync()
    old = module[1].weight.clone()
    optimizer.step()
    ahead = module[1].weight.clone()  # a later layer's weight, read before any forward
    still = len(optimizer._publisher.pending)
    model.publish_weights()
    return not torch.equal(old, ahead) and torch.equal(ahead, module[1].weight), still == 1


@pytest.mark.dist
def test_a_prefetching_reader_gets_the_new_weight_and_waits_for_it_alone(ranks4: RankPool) -> None:
    assert ranks4.run(prefetched, timeout_s=LIMIT_S) == [(True, True)] * 4


def test_norm_of_a_model_without_a_finite_square_in_fp32() -> None:
    model = gg.DistributedDataParallel(Given((3,)))
    optimizer = sgd(model)
    backward(model, torch.full((3,), 1e30))
    assert float(GradNorm(model, optimizer.slices)()) == pytest.approx(math.sqrt(3) * 1e30)
    assert optimizer.step()
