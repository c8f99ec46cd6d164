"""Checkpoints: other degrees, whole or absent, and nobody waits who has no part in it (B3)."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gtpgraph as gg
from gtpgraph.models import build
from gtpgraph.parallel.checkpoint import Checkpointer
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.testing import RankPool

LIMIT_S = 60.0
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "no_decay": ["*norm*"]}


def groups_of(**axes: int) -> gg.ProcessGroups:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return gg.ProcessGroups.from_mesh(mesh)


def start(
    groups: gg.ProcessGroups | None,
    seed: int,
    reduce: str = "reduce_scatter",
    bucket_mb: float = 0.05,
) -> tuple[gg.DistributedDataParallel, DistributedOptimizer, Any]:
    torch.manual_seed(seed)
    # 259 rows are no multiple of any degree here: the last shards are padded.
    plain, make_batch = build("mtp-tiny", vocab=259)
    model = gg.DistributedDataParallel(
        gg.shard(plain, groups), groups, bucket_mb=bucket_mb, reduce=reduce
    )
    return model, DistributedOptimizer(torch.optim.AdamW, model, **ADAMW), make_batch


def train(model: Any, optimizer: Any, make_batch: Any, seeds: range, rank: int, dp: int) -> None:
    """Steps on 4 batches each, whatever the number of ranks: this one takes its share."""
    for seed in seeds:
        optimizer.zero_grad()
        mine = range(rank, 4, dp)
        for k, part in enumerate(mine):
            quiet = contextlib.nullcontext() if k == len(mine) - 1 else model.no_sync()
            with quiet:
                (model(*make_batch(seed, part)) / len(mine)).backward()
        model.finish_grad_sync()
        optimizer.step()


def logits(model: gg.DistributedDataParallel, make_batch: Any) -> Tensor:
    with torch.no_grad():
        return model(*make_batch(99, 0)).clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {
        n: (t.full_tensor() if isinstance(t, dist.tensor.DTensor) else t).clone()
        for n, t in state.items()
    }


def moments_of(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """{weight: exp_avg with this rank's part filled in, flattened}; the rest is zero."""
    found: dict[str, Tensor] = {}
    for part in optimizer.slices:
        for piece in part.pieces:
            numel = int(torch.tensor(piece.shape).prod())
            flat = found.setdefault(piece.fqn, torch.zeros(numel))
            value = optimizer.torch_optimizer.state[piece.master]["exp_avg"]
            flat[piece.first :][: len(value)][piece.share] = value[piece.share]
    return found


# Another degree


def save_at(rank: int, world: int, folder: str, gtp: int) -> tuple[Any, ...]:
    groups = groups_of(dp=world // gtp, gtp=gtp)
    model, optimizer, make_batch = start(groups, seed=0)
    train(model, optimizer, make_batch, range(3), rank, world)
    with Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(3, {"note": "three steps"}, wait=True)
    optimizer.param_groups[0]["lr"] = ADAMW["lr"]
    before = weights_of(model), logits(model, make_batch), moments_of(optimizer)
    train(model, optimizer, make_batch, range(3, 5), rank, world)
    return *before, weights_of(model)


def load_at(rank: int, world: int, folder: str, gtp: int, reduce: str) -> tuple[Any, ...]:
    groups = groups_of(dp=world // gtp, gtp=gtp)
    # Another seed, other buckets: nothing may come from how the model happens to start.
    model, optimizer, make_batch = start(groups, seed=1, reduce=reduce, bucket_mb=0.2)
    optimizer.param_groups[0]["lr"] = 123.0
    with Checkpointer(folder, model, optimizer) as checkpoints:
        found = checkpoints.load()
    before = weights_of(model), logits(model, make_batch), moments_of(optimizer)
    train(model, optimizer, make_batch, range(3, 5), rank, world)
    return found, *before, weights_of(model)


@pytest.fixture(scope="module")
def saved(ranks4: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks4.run(save_at, str(folder), 2, timeout_s=LIMIT_S)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("gtp", "reduce"), [(4, "reduce_scatter"), (1, "reduce_scatter"), (2, "all_reduce")]
)
def test_saved_at_gtp_2_loads_at_another_degree(
    ranks4: RankPool, saved: tuple[Path, Any], gtp: int, reduce: str
) -> None:
    folder, originals = saved
    results = ranks4.run(load_at, str(folder), gtp, reduce, timeout_s=LIMIT_S)
    weights, expected_logits, _, later = originals[0]
    moments = {n: sum(r[2].get(n, torch.zeros(1)) for r in originals) for n in originals[0][0]}
    for found, got, got_logits, _, got_later in results:
        assert found == (3, {"note": "three steps"})
        assert all(torch.equal(got[n], weights[n]) for n in weights)
        assert torch.equal(got_logits, expected_logits)
        for name, weight in later.items():  # sums over ranks in another order
            torch.testing.assert_close(got_later[name], weight, rtol=0, atol=2e-6)
    loaded = {n: sum(r[3].get(n, torch.zeros(1)) for r in results) for n in moments}
    assert all(torch.equal(loaded[n], moments[n]) for n in loaded if n in weights)


@pytest.mark.dist
def test_saved_at_gtp_2_loads_in_one_process(saved: tuple[Path, Any]) -> None:
    folder, originals = saved
    model, optimizer, make_batch = start(None, seed=1)
    with Checkpointer(folder, model, optimizer) as checkpoints:
        assert checkpoints.load() == (3, {"note": "three steps"})
    weights, expected_logits, _, later = originals[0]
    assert all(torch.equal(t, weights[n]) for n, t in weights_of(model).items())
    assert torch.equal(logits(model, make_batch), expected_logits)
    train(model, optimizer, make_batch, range(3, 5), 0, 1)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, later[name], rtol=0, atol=2e-6)


# Keys and groups (B3)


class Part(nn.Module):
    """A dense weight and an expert's; the names are the same on every rank."""

    def __init__(self, value: float, *, expert: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2, bias=False)
        if expert:
            self.expert = nn.Linear(3, 2, bias=False)
            self.expert.weight.allreduce = False  # type: ignore[attr-defined]
        for weight in self.parameters():
            nn.init.constant_(weight, value)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3] -> a scalar."""
        return sum(layer(x).square().sum() for layer in self.children())  # type: ignore[return-value]


@contextlib.contextmanager
def log_gathers() -> Iterator[list[Any]]:
    """Ranks over which objects were gathered to all, in order; WORLD shows as None."""
    seen: list[Any] = []
    original = dist.all_gather_object

    def log(values: Any, value: Any, group: Any = None) -> Any:
        seen.append(group and tuple(dist.get_process_group_ranks(group)))
        return original(values, value, group=group)

    dist.all_gather_object = log
    try:
        yield seen
    finally:
        dist.all_gather_object = original


def adam_step(model: gg.DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).backward()
    model.finish_grad_sync()
    optimizer.step()


def experts(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    groups = groups_of(dp=2, ep=2)
    place = groups.rank("ep")
    model = gg.DistributedDataParallel(Part(1.0 + place, expert=True), groups)
    with torch.no_grad():  # the dense weight is one weight; the experts are two
        model.module.dense.weight.fill_(1.0)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
    adam_step(model, optimizer)
    with Checkpointer(folder, model, optimizer) as checkpoints, log_gathers() as seen:
        checkpoints.save(1, wait=True)
    other = gg.DistributedDataParallel(Part(9.0, expert=True), groups)
    restored = DistributedOptimizer(torch.optim.AdamW, other, lr=0.1)
    with Checkpointer(folder, other, restored) as checkpoints:
        checkpoints.load()
    for each in ((model, optimizer), (other, restored)):
        adam_step(*each)
    same = all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    return seen, same, float(model.module.expert.weight[0, 0])


@pytest.mark.dist
def test_keys_are_gathered_over_dp_and_the_experts_over_expt_dp(
    ranks4: RankPool, tmp_path: Path
) -> None:
    results = ranks4.run(experts, str(tmp_path), timeout_s=LIMIT_S)
    for rank, (seen, same, _) in enumerate(results):
        assert seen == [(0, 1, 2, 3), (rank % 2, rank % 2 + 2)]
        assert same
    assert results[0][2] != results[1][2]  # two experts under one name, both restored


def one_of_two(rank: int, world: int, folder: str) -> list[Any] | None:
    """Two pipeline stages on ranks 0 and 1; ranks 2 and 3 serve no model and do nothing."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("pp", "dp"))
    groups = gg.ProcessGroups.from_mesh(mesh)
    if rank > 1:
        return None
    model = gg.DistributedDataParallel(Part(rank + 1.0, expert=False), groups)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
    adam_step(model, optimizer)
    expected = [p.detach().clone() for p in model.parameters()]
    with Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(1, wait=True)
        adam_step(model, optimizer)
        checkpoints.load()
    return [torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True)]


@pytest.mark.dist
def test_stages_with_one_name_for_two_weights_and_ranks_outside(
    ranks4: RankPool, tmp_path: Path
) -> None:
    assert ranks4.run(one_of_two, str(tmp_path), timeout_s=LIMIT_S) == [[True], [True], None, None]


def lost_state(rank: int, world: int, folder: str) -> str:
    groups = groups_of(dp=world)
    model = gg.DistributedDataParallel(nn.Linear(40, 40), groups)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
    optimizer.zero_grad()
    model(torch.ones(1, 40)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    if rank == 1:
        optimizer.torch_optimizer.state.clear()
    with Checkpointer(folder, model, optimizer) as checkpoints:
        with pytest.raises(RuntimeError) as caught:
            checkpoints.save(1)
        assert checkpoints.latest() is None
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_lost_its_state_is_found_by_the_keys(ranks2: RankPool, tmp_path: Path) -> None:
    for text in ranks2.run(lost_state, str(tmp_path), timeout_s=LIMIT_S):
        assert "optimizer state of weight: expected the same states on every rank" in text
        assert "['exp_avg', 'exp_avg_sq', 'master', 'step'] and ['master']" in text


@pytest.mark.parametrize("missing", ["model", "dp", "expt_dp"])
def test_a_missing_group_is_named(missing: str, tmp_path: Path) -> None:
    model = gg.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1)
    fields = {n: None for n in ("model", "dp", "ep", "expt_dp", "pp", "tp") if n != missing}
    model.groups = gg.ProcessGroups(**fields)
    if missing == "expt_dp":
        model.groups = SpreadExperts(**fields)
    with pytest.raises(ValueError, match=rf"Checkpointer: .*\n  - {missing}: not set \(UNSET\)"):
        Checkpointer(tmp_path, model, optimizer)


class SpreadExperts(gg.ProcessGroups):
    """Says ep = 2, in one process."""

    def size(self, name: str) -> int:
        """Number of ranks in a group."""
        return 2 if name == "ep" else super().size(name)


# On disk


def small(tmp_path: Path, keep: int | None = 2) -> tuple[Checkpointer, nn.Module]:
    module = nn.Linear(2, 2)
    model = gg.DistributedDataParallel(module)
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1)
    return Checkpointer(tmp_path, model, optimizer, keep=keep), module


def test_a_save_takes_the_state_as_it_is_and_does_not_hold_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, module = small(tmp_path)
    may_write, write = threading.Event(), FileSystemWriter.write_data
    monkeypatch.setattr(
        FileSystemWriter, "write_data", lambda *a: (may_write.wait(10), write(*a))[1]
    )
    with torch.no_grad():
        module.weight.fill_(1.0)
    checkpoints.save(1)
    with torch.no_grad():
        module.weight.fill_(2.0)  # the next step
    assert checkpoints.latest() is None  # nothing half written is taken for a checkpoint
    may_write.set()
    checkpoints.wait()
    assert checkpoints.load() == (1, None)
    assert torch.equal(module.weight, torch.ones(2, 2))


def test_a_write_that_fails_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = small(tmp_path)
    checkpoints.save(1, wait=True)

    def full(*args: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        checkpoints.save(2)
        with pytest.raises(RuntimeError, match="the last save failed: no space left"):
            checkpoints.wait()
    assert checkpoints.latest() == 1
    checkpoints.save(2, wait=True)  # what the failed one left is in nobody's way
    assert checkpoints.folders.steps() == [1, 2]


def failing(rank: int, world: int, folder: str) -> str:
    model = gg.DistributedDataParallel(nn.Linear(40, 40), groups_of(dp=world))
    if rank == 1:

        def full(*args: object) -> None:
            raise OSError("no space left")

        FileSystemWriter.write_data = full  # type: ignore[method-assign]
    with Checkpointer(folder, model) as checkpoints:
        checkpoints.save(1)
        with pytest.raises(RuntimeError) as caught:
            checkpoints.wait()
        assert checkpoints.latest() is None
    return str(caught.value)


@pytest.mark.dist
def test_one_ranks_failure_is_every_ranks(tmp_path: Path) -> None:
    with RankPool(2) as pool:  # its own ranks: one of them is broken for good
        texts = pool.run(failing, str(tmp_path), timeout_s=LIMIT_S)
    assert texts == ["Checkpointer: the last save failed: rank 1: OSError: no space left"] * 2


def test_old_checkpoints_go_and_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoints, _ = small(tmp_path, keep=2)
    (tmp_path / "step-00000009.tmp").mkdir()
    (tmp_path / "step-00000008").mkdir()  # without .metadata: not complete
    for step in (1, 2, 3):
        checkpoints.save(step, wait=True)
    assert checkpoints.folders.steps() == [2, 3]
    assert checkpoints.load() == (3, None)
    assert checkpoints.load(2) == (2, None)
    checkpoints.save(3, "again", wait=True)
    assert checkpoints.load() == (3, "again")


def test_what_does_not_fit_is_listed_and_nothing_is_read(tmp_path: Path) -> None:
    small(tmp_path)[0].save(1, wait=True)
    module = nn.Sequential(nn.Linear(3, 2))
    model = gg.DistributedDataParallel(module)
    before = module[0].weight.detach().clone()
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1)
    checkpoints = Checkpointer(tmp_path, model, optimizer)
    with pytest.raises(ValueError) as caught:
        checkpoints.load()
    for key in ("model.0.weight", "model.0.bias", "optimizer.0.weight.master"):
        assert f"{key}: not in the checkpoint" in str(caught.value)
    wider = Checkpointer(tmp_path, gg.DistributedDataParallel(nn.Linear(3, 2)))
    with pytest.raises(
        ValueError, match=re.escape("model.weight: expected (2, 3), the checkpoint")
    ):
        wider.load()
    with pytest.raises(
        ValueError, match=r"expected a complete checkpoint in .*step-00000007, found"
    ):
        wider.load(7)
    assert torch.equal(module[0].weight, before)


def test_an_empty_folder_has_nothing_to_load(tmp_path: Path) -> None:
    checkpoints, _ = small(tmp_path / "absent")
    assert checkpoints.load() is None
