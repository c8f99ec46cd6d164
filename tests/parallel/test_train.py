"""``gtpgraph train``: metrics, resuming, and a rank that is killed (under torchrun)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gtpgraph as gg
from gtpgraph.cli import main
from gtpgraph.config import JobConfig
from gtpgraph.models import load_factory
from gtpgraph.parallel.checkpoint import Checkpointer
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.train import TrainOptions

# A model with dropout, so that random numbers have to be right after a restart too. Asked for the
# batch of step 17, rank 1 kills itself, once.
FACTORY = """
import os, signal
from pathlib import Path
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.2)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        x = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

def make_batch(seed, rank, device="cpu"):
    flag = os.environ.get("KILL_FLAG")
    if flag and seed == 16 and rank == 1 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    start = torch.randint(50, (2, 1), generator=draw)
    return (((start + torch.arange(9)) % 50).to(device),)  # the next token is the next number

def build():
    return Model(), make_batch
"""
OPTIONS = ("--lr", "0.01")


@pytest.fixture
def factory(tmp_path: Path) -> str:
    file = tmp_path / "factory.py"
    file.write_text(FACTORY)
    return f"{file}:build"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(factory: str, folder: Path, *more: str) -> int:
    return main(["train", factory, "--checkpoint", str(folder), *OPTIONS, *more])


def final_state(factory: str, folder: Path) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of the newest checkpoint, in one process."""
    model = gg.DistributedDataParallel(gg.shard(load_factory(factory).model))
    optimizer = DistributedOptimizer(torch.optim.AdamW, model)
    found = Checkpointer(folder, model, optimizer).load()
    assert found is not None and found[0] == 30
    state = {f"model.{n}": t.clone() for n, t in model.state_dict().items()}
    for part in optimizer.slices:
        for piece in part.pieces:
            state[f"master.{piece.fqn}"] = piece.master.detach().clone()
            for name, value in optimizer.torch_optimizer.state[piece.master].items():
                state[f"{name}.{piece.fqn}"] = value
    return state


def test_metrics_checkpoints_and_resuming(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(factory, whole, "--steps", "30", "--every", "10") == 0
    text = capsys.readouterr().out
    assert text.startswith("factory.py:build: steps 1 to 30 (eager), loss ")
    assert text.rstrip().endswith(f"checkpoint {whole / 'step-00000030'}")
    assert run(factory, halves, "--steps", "13", "--every", "10") == 0
    # Cut off in the middle of a row, and past the step that will be resumed from.
    with (halves / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "loss": 0.0}\n{"step": 15, "lo')
    (halves / "step-00000014.tmp").mkdir()
    assert run(factory, halves, "--steps", "30", "--every", "10", "--resume") == 0
    assert "steps 14 to 30" in capsys.readouterr().out
    for key in ("step", "loss", "grad_norm", "lr", "updated"):
        assert [r[key] for r in rows(halves)] == [r[key] for r in rows(whole)]
    assert [r["step"] for r in rows(whole)] == list(range(1, 31))
    assert rows(whole)[-1]["loss"] < rows(whole)[0]["loss"]
    names = sorted(p.name for p in halves.iterdir())
    assert names == ["metrics.jsonl", "step-00000020", "step-00000030"]
    expected = final_state(factory, whole)
    assert all(torch.equal(t, expected[n]) for n, t in final_state(factory, halves).items())
    assert run(factory, whole, "--steps", "30", "--resume") == 0
    assert "step 30 was reached already" in capsys.readouterr().out


def test_compiled_training_is_eager_training(factory: str, tmp_path: Path) -> None:
    for mode in ("eager", "compiled"):
        options = ("--steps", "4", "--mode", mode, "--lowering", "eager")
        assert run(factory, tmp_path / mode, *options) == 0
    eager, compiled = rows(tmp_path / "eager"), rows(tmp_path / "compiled")
    for a, b in zip(eager, compiled, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)


def test_an_old_folder_is_not_overwritten(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(factory, tmp_path / "out", "--steps", "1") == 0
    assert run(factory, tmp_path / "out", "--steps", "2") == 2
    assert "expected a folder without checkpoints, or --resume" in capsys.readouterr().err


def test_options_out_of_range_are_listed_together() -> None:
    options = TrainOptions(0, "x", every=0, seed=-1, lr=0.0, clip=-1.0, mode="captured")
    with pytest.raises(ValueError) as caught:
        options.check("cpu")
    for name in ("--steps", "--every", "--seed", "--lr", "--clip", "--mode captured"):
        assert name in str(caught.value)
    assert JobConfig("m").device == "cpu"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_changes_nothing_in_the_end(factory: str, tmp_path: Path) -> None:
    """4 ranks, gtp 2, 30 steps; rank 1 dies at step 17, torchrun starts all of them again."""
    whole, killed, flag = tmp_path / "whole", tmp_path / "killed", tmp_path / "flag"
    options = ["--gtp", "2", "--steps", "30", "--every", "5"]
    assert run(factory, whole, "--ranks", "4", *options) == 0
    console = Path(sys.executable).with_name("gtpgraph")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "--max-restarts", "1", "--monitor-interval", "0.1", "--no-python", str(console),
        "train", factory, "--checkpoint", str(killed), *OPTIONS, *options,
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "KILL_FLAG": str(flag)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert flag.exists() and "exitcode: -9) local_rank: 1" in done.stderr
    assert "steps 16 to 30" in done.stdout, done.stdout  # from the checkpoint of step 15
    assert [r["loss"] for r in rows(killed)] == [r["loss"] for r in rows(whole)]
    expected, found = final_state(factory, whole), final_state(factory, killed)
    assert found.keys() == expected.keys() and len(found) > 20
    assert all(torch.equal(t, expected[n]) for n, t in found.items())
