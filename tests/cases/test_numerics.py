"""Precision and padding: what must not be rounded, and what must stay zero."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))
pytestmark = pytest.mark.dist
BF16 = torch.bfloat16


# --- K36 ------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """bf16 layers around an fp32 one and an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=BF16)
        self.norm = nn.LayerNorm(16)
        self.mid = nn.Linear(16, 16)
        self.down = nn.Linear(16, 8, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mid(self.norm(self.up(x.to(self.up.bias.dtype)).to(self.norm.bias.dtype)))
        return self.down(torch.tanh(y).to(self.down.bias.dtype)).square().mean()


def mixed(rank: int, world: int, gtp: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batches = Mixed(), [(h.batch_of(r),) for r in range(world)]
    exact = [fp64_grads(model, [b]) for b in batches]
    exact_mean = {n: sum(e[n] for e in exact) / world for n in exact[0]}
    plain = copy.deepcopy(model)
    for batch in batches:  # plain PyTorch keeps bf16 gradients of bf16 weights
        (plain(*batch) / world).backward()
    own = {n: max_error(p.grad, exact_mean[n]) for n, p in plain.named_parameters()}
    ddp = h.wrap(model, world, gtp, bucket_mb=1.0)
    out: dict[str, Any] = {"own": own, "errors": [], "buckets": []}
    out["buckets"] = [(b.flat.dtype, len(b.members)) for b in ddp.buckets]
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        h.step(ddp, call, *batches[rank])
        grads = h.full_grads(ddp)
        assert {g.dtype for g in grads.values()} == {torch.float32}
        assert {w.main_grad.dtype for _, w in ddp.named_weights()} == {torch.float32}
        out["errors"].append({n: max_error(g, exact_mean[n]) for n, g in grads.items()})
    return out


@pytest.mark.parametrize("gtp", [2, 1])
def test_k36_bf16_and_fp32_weights_share_an_fp32_bucket(ranks2: RankPool, gtp: int) -> None:
    """Cast before bucketing: within twice the error of plain PyTorch against fp64."""
    for seen in ranks2.run(mixed, gtp):
        assert {dtype for dtype, _ in seen["buckets"]} == {torch.float32}
        assert max(members for _, members in seen["buckets"]) >= 3
        for errors in seen["errors"]:
            for name, error in errors.items():
                assert error <= 2 * seen["own"][name], (name, error, seen["own"][name])


# --- K37 ------------------------------------------------------------------------------------------


class Dot(nn.Module):
    """Loss x . w for a bf16 w [2, 4] and one row of x a rank: the wgrad is x itself, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 2, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x.to(BF16)).float().sum()


NUM_SMALL = 200
SMALL = 2.0**-10  # lost against 1.0 in bf16, which has 8 bits


def small_addends(rank: int, world: int, gtp: int, compiled: bool) -> list[float]:
    """One microbatch of 1.0, then 200 of 2**-10; main_grad is looked at after the last."""
    ddp = h.wrap(Dot(), world, gtp)
    call: Any = gtpgraph.compile(ddp, lowering="eager") if compiled else ddp
    one, small = torch.ones(1, 4), torch.full((1, 4), SMALL)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        h.backward(ddp, call, one)
        for _ in range(NUM_SMALL - 1):
            h.backward(ddp, call, small)
    h.backward(ddp, call, small)
    ddp.finish_grad_sync()
    values: list[float] = ddp.full_grad("w.weight").unique().tolist()
    return values


@pytest.mark.parametrize("gtp", [2, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_k37_many_small_addends_are_not_rounded_away(
    ranks2: RankPool, compiled: bool, gtp: int
) -> None:
    for values in ranks2.run(small_addends, gtp, compiled):
        assert values == [1.0 + NUM_SMALL * SMALL]


def one_small_rank(rank: int, world: int, gtp: int, wire: torch.dtype | None) -> list[Any]:
    """Rank 0 contributes 1.0, rank 1 2**-10: the mean keeps both unless the wire is bf16."""
    ddp = h.wrap(Dot(), world, gtp, wire_dtype=wire)
    x = torch.full((1, 4), SMALL if rank else 1.0)
    out = []
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        h.step(ddp, call, x)
        out.append(ddp.full_grad("w.weight").unique().tolist())
    return out


@pytest.mark.parametrize("gtp", [2, 1])
def test_k37_the_sum_over_ranks_keeps_fp32_when_asked(ranks2: RankPool, gtp: int) -> None:
    for steps in ranks2.run(one_small_rank, gtp, None):
        assert steps == [[(1.0 + SMALL) / 2]] * 2


# --- K44 ------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Rows that divide by nothing: 7 and 5, and 2 rows for 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.embed(tokens)))).square().sum(-1).mean()


def padding(rank: int, world: int, gtp: int, reduce: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Odd()
    batches = [(torch.tensor([[0, 3, 6, r % 7]]),) for r in range(world)]
    expected = fp64_grads(model, batches)
    ddp = h.wrap(model, world, gtp, bucket_mb=1.0, reduce=reduce)
    sent: list[tuple[bool, float]] = []
    for bucket in ddp.buckets:
        start = bucket.start_reduce

        def started(bucket: Any = bucket, start: Any = start) -> None:
            pad = torch.ones_like(bucket.flat, dtype=torch.bool)
            for member in bucket.members:
                state = ddp.states[member.index]
                rows = member.shape[0]
                if state.spec is not None:
                    rows = max(0, min(rows, state.spec.rows - state.spec.gtp_rank * rows))
                width = member.numel // member.shape[0]
                pad[member.offset : member.offset + rows * width] = False
            sent.append((bool(pad.any()), float(bucket.flat[pad].abs().sum())))
            start()

        bucket.start_reduce = started
    out: dict[str, Any] = {"errors": [], "norms": []}
    for call in (ddp, gtpgraph.compile(ddp, lowering="eager")):
        h.step(ddp, call, *batches[rank])
        out["errors"].append(max_error(h.full_grads(ddp), expected))
        norm = sum(float(b.whole().double().square().sum()) for b in ddp.buckets)
        out["norms"].append(norm)  # of this rank's gtp slice of every weight, padding included
    out["sent"] = sent
    out["gtp_norm"] = sum(
        float(g.square().sum()) for n, g in expected.items() if n.endswith(".weight")
    )
    out["other"] = sum(float(g.square().sum()) for n, g in expected.items() if "bias" in n)
    return out


@pytest.mark.parametrize("reduce", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("gtp", [4, 2, 1])
def test_k44_padding_is_zero_in_every_collective_and_in_the_norm(
    ranks4: RankPool, gtp: int, reduce: str
) -> None:
    seen = ranks4.run(padding, gtp, reduce)
    for rank in seen:
        assert all(error <= h.SUM_ORDER_BAR for error in rank["errors"])
        assert any(has for has, _ in rank["sent"])
        assert all(total == 0.0 for _, total in rank["sent"]), rank["sent"]
    for step in range(2):
        # Every weight is on gtp ranks once, ordinary ones on all of them.
        total = sum(seen[r]["norms"][step] for r in range(gtp)) - gtp * seen[0]["other"]
        assert abs(total - seen[0]["gtp_norm"]) <= h.SUM_ORDER_BAR * seen[0]["gtp_norm"]
