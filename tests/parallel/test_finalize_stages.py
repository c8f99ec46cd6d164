"""finalize_model_grads on pipeline stages split by hand, against one fp64 process (K39).

A two-stage model with one embedding shared by both ends, in float64:

    stage 0: embed tokens -> scale (a norm's weight) -> linear
    stage 1: scale -> linear -> logits through the embedding -> cross entropy

Over tp the sequence is split outside the linears (sequence parallelism): embedding and scales see
half of the tokens each, the linears' rows are split. Over gtp every rank has its own tokens, and
the linears are stored in row shards that are gathered and whose gradients are reduced.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph.parallel.finalize import finalize_model_grads
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.testing import RankPool

VOCAB, WIDTH = 12, 8
F64 = torch.float64
UNIT = 1e-13  # 1000 terms of fp64 rounding error 1.1e-16 each, relative to the largest gradient


def weights_of(stage: int) -> dict[str, Tensor]:
    """Whole weights of one stage; the embedding is the same on both."""
    draw = torch.Generator().manual_seed(7)
    embedding = torch.randn(VOCAB, WIDTH, generator=draw, dtype=F64)
    scales = torch.rand(2, WIDTH, generator=draw, dtype=F64) + 0.5
    linears = torch.randn(2, WIDTH, WIDTH, generator=draw, dtype=F64)
    return {"embedding": embedding, "scale": scales[stage], "linear": linears[stage]}


def tokens_of(data_rank: int, num: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [num] of one data rank."""
    draw = torch.Generator().manual_seed(100 + data_rank)
    return (
        torch.randint(VOCAB, (num,), generator=draw),
        torch.randint(VOCAB, (num,), generator=draw),
    )


def reference(nums: list[int], per_token: bool) -> dict[str, Tensor]:
    """Single-process gradients: of the mean over all tokens, or the mean of the ranks' means."""
    plain = {f"{k}{s}": v for s in (0, 1) for k, v in weights_of(s).items() if k != "embedding"}
    plain["embedding"] = weights_of(0)["embedding"]
    leaves = {name: value.clone().requires_grad_() for name, value in plain.items()}
    loss = torch.zeros((), dtype=F64)
    for data_rank, num in enumerate(nums):
        inputs, targets = tokens_of(data_rank, num)
        hidden = torch.tanh((leaves["embedding"][inputs] * leaves["scale0"]) @ leaves["linear0"].T)
        hidden = torch.tanh((hidden * leaves["scale1"]) @ leaves["linear1"].T)
        total = F.cross_entropy(hidden @ leaves["embedding"].T, targets, reduction="sum")
        loss = loss + total / (sum(nums) if per_token else num * len(nums))
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along dim 0; backward sums over the ranks and returns this rank's rows."""
    gathered: Tensor = GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        place = dist.get_rank(ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[place], None


class ToyStage:
    """One stage on this rank; has what finalize_model_grads asks of a wrapped model."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.stage = groups.rank("pp")
        self.calls: list[str] = []
        self.factors: list[float] = []
        axis = "tp" if groups.size("tp") > 1 else "gtp"
        self.rows = getattr(groups, axis)  # the group that the linear's rows are split over
        whole = weights_of(self.stage)
        whole["linear"] = whole["linear"].chunk(groups.size(axis))[groups.rank(axis)]
        self.weights = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
        self.embedding.shared_embedding = True  # type: ignore[attr-defined]
        for name in ("embedding", "scale"):
            self.weights[name].sequence_parallel = groups.tp is not None  # type: ignore[attr-defined]

    @property
    def embedding(self) -> nn.Parameter:
        return self.weights["embedding"]

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.weights.items()

    def finish_grad_sync(self) -> None:
        """Reduce ordinary weights over dp x cp x gtp: a sum, as for a loss per token."""
        self.calls.append("finish_grad_sync")
        for name, weight in self.weights.items():
            assert weight.grad is not None
            weight.main_grad = weight.grad.clone()  # type: ignore[attr-defined]
            group = self.groups.dp_cp_gtp
            if name != "linear" and isinstance(group, dist.ProcessGroup):
                dist.all_reduce(weight.main_grad, group=group)  # type: ignore[attr-defined]

    def scale_gradients(self, factor: float | Tensor) -> None:
        self.calls.append("scale_gradients")
        self.factors.append(float(factor))
        for weight in self.weights.values():
            weight.main_grad.mul_(factor)  # type: ignore[attr-defined]

    def block(self, hidden: Tensor) -> Tensor:
        """[tokens of this rank, WIDTH] -> the same shape."""
        hidden = hidden * self.weights["scale"]
        if self.groups.tp is None:
            linear = gather_rows(self.weights["linear"], self.rows)
            return torch.tanh(hidden @ linear.T)
        whole = gather_rows(hidden, self.rows)  # the sequence, for this rank's rows
        columns = torch.tanh(whole @ self.weights["linear"].T)
        rows = gather_rows(columns.T.contiguous(), self.rows).T  # [tokens, WIDTH]
        # Each tp rank goes on with its own part of the sequence: gather_rows's backward adds up.
        return rows.chunk(self.groups.size("tp"))[self.groups.rank("tp")]

    def step(self, data_rank: int, num: int, per_token: bool, scale: float) -> None:
        """Forward and backward of the stage; activations travel over pp by point to point."""
        inputs, targets = tokens_of(data_rank, num)
        tp, place = self.groups.size("tp"), self.groups.rank("tp")
        inputs, targets = inputs.chunk(tp)[place], targets.chunk(tp)[place]
        first, last = self.groups.ranks("pp")
        pp = self.groups.pp
        assert isinstance(pp, dist.ProcessGroup)
        if self.stage == 0:
            hidden = self.block(self.embedding[inputs])
            dist.send(hidden.detach().contiguous(), last, group=pp)
            grad = torch.empty(hidden.shape, dtype=F64)
            dist.recv(grad, last, group=pp)
            hidden.backward(grad)
            return
        received = torch.empty(inputs.numel(), WIDTH, dtype=F64)
        dist.recv(received, first, group=pp)
        received.requires_grad_()
        logits = self.block(received) @ self.embedding.T
        loss = F.cross_entropy(logits, targets, reduction="sum")
        (loss if per_token else loss * scale / num).backward()
        assert received.grad is not None
        dist.send(received.grad, first, group=pp)

    def errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """Largest relative error of each main_grad of this rank."""
        place = dist.get_rank(self.rows)
        found = {}
        for name, weight in self.weights.items():
            want = expected["embedding" if name == "embedding" else f"{name}{self.stage}"]
            if name == "linear":
                want = want.chunk(dist.get_world_size(self.rows))[place]
            got: Tensor = weight.main_grad  # type: ignore[attr-defined]
            found[name] = float((got - want).abs().max() / want.abs().max())
        return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _spy_on_groups() -> list[tuple[str, tuple[int, ...]]]:
    """Record each collective's global ranks from here on; the default group is an error."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def spied(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, group: Any = None, **kw: Any) -> Any:
            assert group is not None and group is not dist.group.WORLD, f"{name} on WORLD"
            seen.append((name, tuple(dist.get_process_group_ranks(group))))
            return collective(*args, group=group, **kw)

        return call

    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, spied(name))
    return seen


def _train(
    axes: dict[str, int], nums: list[int], per_token: bool
) -> tuple[dict[str, float], list[float], list[tuple[str, tuple[int, ...]]]]:
    groups = ProcessGroups.from_mesh(
        init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    )
    model = ToyStage(groups)
    data_rank = groups.rank("dp_cp_gtp")
    # A mean loss: each contribution is pre-scaled so that the sum over the ranks is their mean.
    model.step(data_rank, nums[data_rank], per_token, scale=1 / len(nums))
    originals = (dist.all_reduce, dist.broadcast)
    seen = _spy_on_groups()
    try:
        # Only the last stage knows the tokens.
        mine = nums[data_rank] if model.stage == 1 else 0
        finalize_model_grads(model, torch.tensor(mine) if per_token else None)
    finally:
        dist.all_reduce, dist.broadcast = originals
    return model.errors(reference(nums, per_token)), model.factors, seen


def _train_rank(rank: int, world: int, *args: Any) -> Any:
    return _train(*args)


@pytest.mark.dist
@pytest.mark.parametrize("per_token", [True, False], ids=["per_token", "mean"])
@pytest.mark.parametrize(
    ("axes", "nums"),
    [({"pp": 2, "tp": 2}, [1000]), ({"pp": 2, "gtp": 2}, [600, 400])],
    ids=["tp2_pp2", "gtp2_pp2"],
)
def test_K39_scale_and_gradients_equal_one_process(
    ranks: RankPool, axes: dict[str, int], nums: list[int], per_token: bool
) -> None:
    for rank, (errors, factors, seen) in enumerate(
        ranks.run(_train_rank, axes, nums, per_token, timeout_s=30)
    ):
        # TP2 x PP2: WORLD would have counted 4000. GTP2: one rank's tokens would give 1/600.
        assert factors == ([1 / 1000] if per_token else []), rank
        assert max(errors.values()) < UNIT, (rank, errors)
        assert ("broadcast" in {name for name, _ in seen}) == per_token
        assert all(rank in members and len(members) == 2 for _, members in seen)
