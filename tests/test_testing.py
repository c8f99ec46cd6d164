"""Ranks on this machine (results, errors, hangs) and the helpers that compare gradients."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtpgraph import compat
from gtpgraph.testing import RankPool, RanksError, fp64_grads, max_error, run_ranks

SCRIPT = """
import os
from gtpgraph.testing import RankPool

def pid(rank, world):
    return os.getpid()

if __name__ == "__main__":
    print(*RankPool(2).run(pid), flush=True)
    os._exit(3)  # no clean-up
"""


@dataclass
class Item:
    """A class of this test module: it must survive the way to a rank and back."""

    value: Tensor


def summed(rank: int, world: int, item: Item) -> Item:
    total = item.value * (rank + 1)
    dist.all_reduce(total)
    return Item(total)


def facts(rank: int, world: int) -> tuple[int, int, int, int, int]:
    return rank, dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid()


def store_key(rank: int, world: int) -> int:
    dist.new_group([0])
    return int(compat.default_store().add("calls", 1))


def raises_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the weight")
    dist.barrier()


def raises_on_all(rank: int, world: int) -> None:
    raise ValueError(f"from {rank}")


def hangs_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def returns_a_lambda(rank: int, world: int) -> object:
    return lambda: rank


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.dist
class TestRanks:
    def test_results_come_back_by_rank(self, ranks2: RankPool) -> None:
        results = ranks2.run(summed, Item(torch.tensor([1.0, 2.0])))
        assert [r.value.tolist() for r in results] == [[3.0, 6.0], [3.0, 6.0]]
        assert all(type(r) is Item for r in results)

    def test_ranks_have_a_group_and_one_thread_and_stay_alive(self, ranks2: RankPool) -> None:
        first, second = ranks2.run(facts), ranks2.run(facts)
        assert [f[:4] for f in first] == [(0, 0, 2, 1), (1, 1, 2, 1)]
        assert first == second
        assert [f[4] for f in first] == ranks2.pids

    def test_each_call_has_fresh_store_keys(self, ranks2: RankPool) -> None:
        assert sorted(ranks2.run(store_key)) == [1, 2]
        assert sorted(ranks2.run(store_key)) == [1, 2]

    def test_an_error_on_one_rank_shows_all_and_the_pool_recovers(self, ranks2: RankPool) -> None:
        ranks2.run(facts)
        pids = ranks2.pids
        start = time.monotonic()
        with pytest.raises(RanksError, match="raises_on_one on 2 ranks: failed") as caught:
            ranks2.run(raises_on_one)
        assert time.monotonic() - start < 20
        assert caught.value.errors[1] == "KeyError: 'the weight'"
        assert caught.value.errors[0].startswith("hung")
        assert "in raises_on_one" in caught.value.details[0]  # where the innocent rank waits
        assert 'raise KeyError("the weight")' in str(caught.value)
        assert not any(is_running(pid) for pid in pids)
        assert [f[0] for f in ranks2.run(facts)] == [0, 1]

    def test_errors_of_all_ranks_are_collected(self, ranks2: RankPool) -> None:
        with pytest.raises(RanksError) as caught:
            ranks2.run(raises_on_all)
        assert caught.value.errors == {0: "ValueError: from 0", 1: "ValueError: from 1"}

    def test_a_hang_ends_at_the_limit_with_every_stack(self, ranks2: RankPool) -> None:
        ranks2.run(facts)
        pids = ranks2.pids
        start = time.monotonic()
        with pytest.raises(RanksError, match="not finished after 1 s") as caught:
            ranks2.run(hangs_on_one, timeout_s=1)
        assert time.monotonic() - start < 20
        assert sorted(caught.value.errors) == [0, 1]
        assert all("in hangs_on_one" in text for text in caught.value.details.values())
        assert not any(is_running(pid) for pid in pids)

    def test_a_dead_rank_is_an_error(self, ranks2: RankPool) -> None:
        with pytest.raises(RanksError) as caught:
            ranks2.run(dies_on_one)
        assert caught.value.errors[1] == "died with exit code -9"

    def test_local_functions_are_refused_and_the_ranks_stay(self, ranks2: RankPool) -> None:
        ranks2.run(facts)
        pids = ranks2.pids
        with pytest.raises(ValueError, match="expected a module-level function"):
            ranks2.run(lambda rank, world: None)
        assert ranks2.pids == pids
        with pytest.raises(RanksError, match="expected a module-level function"):
            ranks2.run(returns_a_lambda)

    def test_a_rank_that_died_between_calls_is_an_error(self, ranks2: RankPool) -> None:
        ranks2.run(facts)
        os.kill(ranks2.pids[0], signal.SIGKILL)
        with pytest.raises(RanksError) as caught:
            ranks2.run(facts)
        assert caught.value.errors[0] == "died with exit code -9"

    def test_ranks_of_a_script_end_with_it(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 3, done.stderr
        pids = [int(pid) for pid in done.stdout.split()]
        deadline = time.monotonic() + 20
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [is_running(pid) for pid in pids] == [False, False]

    def test_run_ranks_leaves_no_process(self) -> None:
        results = run_ranks(facts, 1)
        assert results[0][:3] == (0, 0, 1)
        assert not is_running(results[0][4])


def test_world_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected world >= 1, got 0"):
        RankPool(0)


class TestMaxError:
    def test_is_relative_to_the_largest_expected_value(self) -> None:
        expected = torch.tensor([100.0, 1.0])
        assert max_error(expected + torch.tensor([0.0, 1.0]), expected) == pytest.approx(0.01)

    def test_is_absolute_where_all_is_zero(self) -> None:
        assert max_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_is_infinite_for_what_is_not_finite(self, bad: float) -> None:
        assert max_error(torch.tensor([bad, 1.0]), torch.ones(2)) == math.inf
        assert max_error(torch.ones(2), torch.tensor([bad, 1.0])) == math.inf

    def test_takes_the_largest_over_a_mapping(self) -> None:
        one = {"a": torch.ones(1), "b": torch.ones(1)}
        assert max_error(one, {"a": torch.ones(1), "b": torch.full((1,), 2.0)}) == 0.5
        assert max_error(one, one) == 0.0

    def test_refuses_what_cannot_be_compared(self) -> None:
        with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(1,\)"):
            max_error(torch.ones(1), torch.ones(2))
        with pytest.raises(ValueError, match=r"one side only: \['b'\]"):
            max_error({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
        with pytest.raises(ValueError, match="one of each"):
            max_error({"a": torch.ones(1)}, torch.ones(1))


class TestFp64Grads:
    def test_equal_hand_made_gradients_of_the_concatenated_batch(self) -> None:
        model = nn.Linear(3, 1, bias=False)
        unused = nn.Parameter(torch.zeros(1))
        model.register_parameter("unused", unused)
        batches = [(torch.randn(2, 3),), (torch.randn(2, 3),)]
        grads = fp64_grads(model, batches, loss_fn=lambda y: y.mean())
        expected = torch.cat([b[0] for b in batches]).double().mean(0, keepdim=True)
        assert grads.keys() == {"weight"}
        assert grads["weight"].dtype == torch.float64
        assert max_error(grads["weight"], expected) < 1e-15

    def test_leaves_the_model_as_it_was(self) -> None:
        model = nn.Linear(3, 1)
        before = model.weight.detach().clone()
        fp64_grads(model, [(torch.randn(2, 3),)], torch.float32, loss_fn=lambda y: y.mean())
        assert model.weight.grad is None
        assert model.weight.dtype == torch.float32
        assert torch.equal(model.weight, before)
