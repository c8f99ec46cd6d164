"""The optimizer: the weights that plain torch would have, on every rank, whatever a rank owns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.testing import RankPool, max_error

# A large eps: where a gradient is all rounding, Adam's quotient would turn it into whole steps.
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every weight whole, gathered by its module's attribute."""
    found = {}
    with torch.no_grad():
        for name, _ in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            found[name] = getattr(model.get_submodule(owner), attribute).detach().clone()
    return found


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def step(model: gg.DistributedDataParallel, optimizer: DistributedOptimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    model.finish_grad_sync()
    optimizer.step()


def train_sharded(rank: int, world: int, gtp: int, reduce: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    groups = gg.ProcessGroups.from_mesh(mesh)
    torch.manual_seed(0)
    plain, make_batch = build("mtp-tiny")
    model = gg.DistributedDataParallel(
        gg.shard(plain, groups), groups, bucket_mb=0.05, reduce=reduce
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, no_decay=["*norm*"], **ADAMW)
    for seed in range(3):
        optimizer.zero_grad()
        model(*make_batch(seed, rank)).backward()
        model.finish_grad_sync()
        optimizer.step()
    return weights_of(plain)


def train_plain(world: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, make_batch = build("mtp-tiny")
    model.double()
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    for seed in range(3):
        optimizer.zero_grad()
        batches = [make_batch(seed, rank)[0] for rank in range(world)]
        model(torch.cat(batches)).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("gtp", "reduce"), [(2, "reduce_scatter"), (2, "all_reduce"), (1, "reduce_scatter")]
)
def test_weights_are_those_of_plain_training(ranks4: RankPool, gtp: int, reduce: str) -> None:
    results = ranks4.run(train_sharded, gtp, reduce)
    expected = train_plain(4)
    assert max_error(results[0], expected) < 1e-5
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in expected)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.Adam, {"lr": 1e-2, "fused": False}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_any_elementwise_optimizer_of_torch(cls: Any, options: dict[str, Any]) -> None:
    plain = mlp()
    model = gg.DistributedDataParallel(gg.shard(copy.deepcopy(plain)))
    optimizer, reference = (
        DistributedOptimizer(cls, model, **options),
        cls(plain.parameters(), **options),
    )
    for _ in range(3):
        x = torch.randn(4, 6)
        step(model, optimizer, x)
        reference.zero_grad()
        plain(x).square().mean().backward()
        reference.step()
    assert max_error(weights_of(model.module), dict(plain.named_parameters())) < 1e-6


def test_fused_is_the_default_and_can_be_declined() -> None:
    model = gg.DistributedDataParallel(gg.shard(mlp()))
    assert DistributedOptimizer(torch.optim.AdamW, model).param_groups[0]["fused"] is True
    declined = DistributedOptimizer(torch.optim.AdamW, model, foreach=False)
    assert not declined.param_groups[0]["fused"]


def test_masters_keep_what_bf16_weights_round_away() -> None:
    plain = nn.Sequential(nn.Linear(4, 4, bias=False)).bfloat16()
    with torch.no_grad():
        plain[0].weight.fill_(1.0)
    model = gg.DistributedDataParallel(gg.shard(plain))
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=2e-4)
    x = torch.eye(4, dtype=torch.bfloat16)
    for _ in range(10):  # every step moves a weight by 2e-4, far below bf16's step of 4e-3 at 1
        optimizer.zero_grad()
        model(x).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
    master = optimizer.slices[0].pieces[0].master
    assert master.dtype == torch.float32
    torch.testing.assert_close(master.detach(), torch.full_like(master, 0.998))
    assert torch.equal(plain[0].weight, master.detach().view(4, 4).bfloat16())


def own_padding(rank: int, world: int) -> tuple[int, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    groups = gg.ProcessGroups.from_mesh(mesh)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    model = gg.DistributedDataParallel(plain, groups)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
    step(model, optimizer, torch.full((1, 3), float(rank)))
    return sum(len(s.pieces) for s in optimizer.slices), weights_of(plain)


@pytest.mark.dist
def test_a_rank_may_own_padding_alone(ranks4: RankPool) -> None:
    results = ranks4.run(own_padding)
    assert 0 in [pieces for pieces, _ in results]
    torch.manual_seed(0)
    before = weights_of(nn.Linear(3, 2))
    for _, weights in results:
        assert all(torch.equal(weights[n], results[0][1][n]) for n in weights)
        assert not torch.equal(weights["weight"], before["weight"])


class TestState:
    def test_restored_run_continues_bit_for_bit(self) -> None:
        batches = [torch.randn(4, 6) for _ in range(4)]

        def start() -> tuple[gg.DistributedDataParallel, DistributedOptimizer]:
            model = gg.DistributedDataParallel(gg.shard(mlp()))
            return model, DistributedOptimizer(torch.optim.AdamW, model, lr=1e-2)

        model, optimizer = start()
        for x in batches[:2]:
            step(model, optimizer, x)
        saved = copy.deepcopy(optimizer.state_dict())
        for x in batches[2:]:
            step(model, optimizer, x)
        other, restored = start()
        restored.load_state_dict(saved)
        for x in batches[2:]:
            step(other, restored, x)
        expected = weights_of(model.module)
        assert all(torch.equal(w, expected[n]) for n, w in weights_of(other.module).items())

    def test_another_layout_is_refused_and_nothing_changes(self) -> None:
        small = DistributedOptimizer(
            torch.optim.SGD, gg.DistributedDataParallel(nn.Linear(2, 2)), lr=0.1
        )
        model = gg.DistributedDataParallel(gg.shard(mlp()))
        optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1)
        before = weights_of(model.module)
        with pytest.raises(
            ValueError, match=r"expected the state of 4 piece\(s\).*of 2.*bucket_mb"
        ):
            optimizer.load_state_dict(small.state_dict())
        with pytest.raises(ValueError, match=r"expected a state of format .*got None"):
            optimizer.load_state_dict({})
        assert all(torch.equal(w, before[n]) for n, w in weights_of(model.module).items())

    def test_reload_weights_takes_the_model_as_it_is(self) -> None:
        model = gg.DistributedDataParallel(mlp())
        optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.0)
        with torch.no_grad():
            model.module[0].bias.fill_(7.0)
        optimizer.reload_weights()
        step(model, optimizer, torch.randn(4, 6))
        assert torch.equal(model.module[0].bias, torch.full((10,), 7.0))


class TestRefusals:
    def test_step_without_final_gradients(self) -> None:
        model = gg.DistributedDataParallel(gg.shard(mlp()))
        optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=1.0)
        before = weights_of(model.module)
        model(torch.randn(4, 6)).sum().backward()
        with pytest.raises(RuntimeError, match=r"without finish_grad_sync\(\)"):
            optimizer.step()
        assert all(torch.equal(w, before[n]) for n, w in weights_of(model.module).items())

    @pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
    def test_optimizers_that_need_whole_weights(self, name: str) -> None:
        model = gg.DistributedDataParallel(mlp())
        with pytest.raises(NotImplementedError, match=f"elementwise optimizer, got {name}"):
            DistributedOptimizer(getattr(torch.optim, name), model)

    def test_a_model_without_a_wrapper(self) -> None:
        with pytest.raises(ValueError, match=r"holds one gtpgraph.DistributedDataParallel, got 0"):
            DistributedOptimizer(torch.optim.SGD, mlp(), lr=0.1)

    def test_a_pattern_without_a_weight(self) -> None:
        model = gg.DistributedDataParallel(mlp())
        with pytest.raises(ValueError, match=r"no_decay: .*got none for \['\*nrom\*'\]"):
            DistributedOptimizer(torch.optim.SGD, model, no_decay=["*nrom*", "*bias"], lr=0.1)


def test_process_group_is_not_needed() -> None:
    assert not dist.is_initialized()
    compiled = gg.compile(gg.DistributedDataParallel(gg.shard(mlp())), lowering="eager")
    optimizer = DistributedOptimizer(torch.optim.SGD, compiled, lr=0.1)
    assert optimizer.model is compiled.wrapper
