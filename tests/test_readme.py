"""What the README tells a reader to run, run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gtpgraph as gg
from gtpgraph.cli import build_parser
from gtpgraph.models import build
from gtpgraph.testing import RankPool

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


QUICKSTART, ON_RANKS, BACKEND = blocks("python")


def run_script(code: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(tmp_path: Path) -> None:
    out = run_script(QUICKSTART, tmp_path)
    losses = [float(x) for x in re.findall(r"^loss ([\d.]+), 45 reports$", out, flags=re.MULTILINE)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "hook plan of GPT: one process, lowering eager" in out
    assert "ready counts: 45 report(s) a step" in out


def test_backend_script_of_ten_lines(tmp_path: Path) -> None:
    assert len([line for line in BACKEND.splitlines() if line]) <= 10
    assert "hook plan of GPT: one process, lowering eager" in run_script(BACKEND, tmp_path)


def on_ranks(rank: int, world: int, code: str) -> tuple[dict[str, int], int]:
    torch.manual_seed(0)
    model, make_batch = build("mtp-tiny")
    names = {"gg": gg, "model": model}
    exec(code, names)
    wrapped = names["model"]
    assert isinstance(wrapped, gg.DistributedDataParallel)
    wrapped(*make_batch(0, rank)).backward()
    wrapped.finish_grad_sync()
    return wrapped.groups.world(), len(wrapped.reports)


@pytest.mark.dist
def test_the_lines_for_several_ranks(ranks4: RankPool) -> None:
    for world, reports in ranks4.run(on_ranks, ON_RANKS):
        assert (world["dp"], world["gtp"], reports) == (2, 2, 45)


def test_commands_parse() -> None:
    commands = [
        shlex.split(line)[1:]
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("gtpgraph ")
    ]
    shown = {command[0] for command in commands}
    assert shown == {"inspect", "diff", "compile", "bench", "train", "demo"}
    for command in commands:
        assert callable(build_parser().parse_args(command).run)


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text()
    for target in re.findall(r"make (\S+)", " ".join(blocks("sh"))):
        assert f"\n{target}:" in makefile
