"""The command line as its users meet it: results, exit statuses, and every refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gtpgraph import HookPlan
from gtpgraph.cli import main

FACTORY = """
import torch
from torch import nn

def make_batch(seed, rank, device):
    generator = torch.Generator().manual_seed(97 * seed + rank)
    return (torch.randn(4, 6, generator=generator).to(device),)

def net():
    print("the factory says hello")
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

def square(y):
    return y.square().mean()

def build():
    return net(), make_batch, square

def different():
    torch.manual_seed(torch.randint(2**31, ()).item())
    model = net()
    model[1] = nn.Dropout(0.5)
    return model, make_batch, square
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`mine.py` in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FACTORY)
    yield "mine.py"
    sys.modules.pop("gtpgraph_factory_mine", None)
    torch._dynamo.reset()


@pytest.fixture
def plan_file(factory: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", f"{factory}:build", "--format", "json", "--out", "plan.json"]) == 0
    capsys.readouterr()
    return "plan.json"


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gtpgraph", *args],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def torchrun(ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), "-m", "gtpgraph", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def refused(capsys: pytest.CaptureFixture[str], *args: str, status: int = 2) -> str:
    """The one message of a command that must fail; nothing on stdout, no traceback."""
    assert main(list(args)) == status
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    marker = f"gtpgraph {args[0]}: error: "
    assert err.count(marker) == 1
    return err.partition(marker)[2]


class TestInspect:
    def test_table(self, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", f"{factory}:build"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("hook plan of mine.py:build: one process, lowering eager, hash ")
        assert "4 occurrence(s) of 4 weight(s)" in out and "mine.py" in out
        assert "hello" not in out and "hello" in err

    def test_json_is_alone_on_stdout_and_reads_back(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["inspect", f"{factory}:build", "--format", "json"]) == 0
        plan = HookPlan.from_json(capsys.readouterr().out)
        assert plan.model == "mine.py:build" and sum(plan.ready_counts.values()) == 4

    def test_out_and_against(
        self, factory: str, plan_file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert sorted(p.name for p in Path().iterdir() if p.is_file()) == ["mine.py", plan_file]
        job = ["inspect", f"{factory}:build", "--against", plan_file]
        assert main(job) == 0
        assert capsys.readouterr().out.startswith("equal: hash ")
        assert main([*job, "--ungraphed", "0.*"]) == 1
        assert "chain: 0.weight: GRAPHED -> UNGRAPHED" in capsys.readouterr().out

    def test_ungraphed_weights_are_excluded(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        args = ["inspect", f"{factory}:build", "--ungraphed", "0.*", "--ungraphed", "2.bias"]
        assert main([*args, "--format", "json"]) == 0
        (region,) = HookPlan.from_json(capsys.readouterr().out).regions
        assert {e.weight for e in region.excluded} == {"0.weight", "0.bias", "2.bias"}
        assert [o.weight for o in region.occurrences] == ["2.weight"]

    @pytest.mark.dist
    def test_tied_weight_of_mtp_on_four_ranks(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = ["inspect", "mtp-tiny", "--ranks", "4", "--gtp", "2", "--dp", "2"]
        assert main([*job, "--format", "json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["world"]["gtp"], data["world"]["dp"]) == (2, 2)
        (region,) = data["regions"]
        tied = [o for o in region["occurrences"] if o["weight"] == "embed.weight"]
        assert [o["use"] for o in tied] == [6, 5, 4, 3, 2, 1]  # 2 x (1 + depths), backward order
        assert tied[0]["aliases"] == ["head.weight"] and tied[0]["gtp"]["ranks"] == [0, 1]
        ordinary = {o["weight"] for o in region["occurrences"] if o["gtp"] is None}
        assert {"norm.weight", "layers.0.norm1.weight", "layers.0.mlp.fc1.bias"} <= ordinary

    @pytest.mark.dist
    def test_fake_world_plans_as_real_ranks_do(self, factory: str) -> None:
        job = ["inspect", f"{factory}:build", "--gtp", "2", "--format", "json"]
        real = run(*job, "--ranks", "4")
        fake = run(*job, "--fake-world", "4")
        assert (real.returncode, fake.returncode) == (0, 0), real.stderr + fake.stderr
        assert HookPlan.from_json(real.stdout).diff(HookPlan.from_json(fake.stdout)) == []

    def test_fake_world_of_1024(self) -> None:
        start = time.perf_counter()
        job = ["inspect", "mtp-tiny", "--fake-world", "1024", "--gtp", "64", "--format", "json"]
        done = run(*job)
        assert time.perf_counter() - start < 60
        assert done.returncode == 0, done.stderr
        plan = HookPlan.from_json(done.stdout)
        assert (plan.world["gtp"], plan.world["dp"]) == (64, 16)
        gtp = {o.gtp.ranks for r in plan.regions for o in r.occurrences if o.gtp is not None}
        assert gtp == {tuple(range(64))}

    @pytest.mark.dist
    def test_under_torchrun_the_environment_is_used(self, factory: str) -> None:
        done = torchrun(2, "inspect", f"{factory}:build", "--format", "json")
        assert done.returncode == 0, done.stderr
        assert HookPlan.from_json(done.stdout).world["gtp"] == 2  # and one rank alone printed


class TestCompile:
    def test_files(self, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
        job = ["compile", f"{factory}:build", "--lowering", "eager", "--out", "made/here"]
        assert main(job) == 0
        names = ["backward_0.after.txt", "backward_0.before.txt", "plan.json", "summary.txt"]
        folder = Path("made/here")
        assert sorted(p.name for p in folder.iterdir()) == names
        assert sorted(capsys.readouterr().out.split()) == [str(folder / name) for name in names]
        before, after = ((folder / f"backward_0.{w}.txt").read_text() for w in ("before", "after"))
        assert "grad_ready" not in before
        assert after.count("[target=torch.ops.gtpgraph.grad_ready.default]") == 4
        assert HookPlan.load(folder / "plan.json", model="mine.py:build").lowering == "eager"
        assert "hook plan of mine.py:build" in (folder / "summary.txt").read_text()

    def test_a_file_in_the_way(self, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
        text = refused(capsys, "compile", f"{factory}:build", "--out", "mine.py")
        assert text.startswith("--out mine.py: expected a folder, or none yet; got a file.")
        assert Path("mine.py").read_text() == FACTORY


class TestBench:
    def test_rows(self, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
        job = ["bench", f"{factory}:build", "--lowering", "eager", "--steps", "4"]
        assert main([*job, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        timed = {row["impl"]: row for row in rows if row["suite"] == "steps"}
        assert timed.keys() == {"eager", "ours:compiled"} and len({row["run"] for row in rows}) == 1
        keys = "suite case impl metric value p20 p80 n floor conditions run commit versions"
        for row in rows:
            assert row.keys() == {*keys.split(), "device", "date"} and row["metric"] == "time_us"
            assert 0 < row["p20"] <= row["value"] <= row["p80"]
        assert (
            timed["ours:compiled"]["n"] == 4
            and timed["ours:compiled"]["case"] == "mine.py:build:4x6"
        )
        assert timed["ours:compiled"]["conditions"]["gradient_difference"] <= 1e-5

    @pytest.mark.dist
    def test_table_of_one_mode_on_two_ranks(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = ["bench", f"{factory}:build", "--ranks", "2", "--dp", "2", "--modes", "eager"]
        assert main([*job, "--steps", "2"]) == 0
        out = capsys.readouterr().out
        assert "dp 2 x gtp 1" in out and "eager" in out and "ours" not in out

    def test_steps_with_other_gradients_are_not_timed(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = ["bench", f"{factory}:different", "--lowering", "eager", "--steps", "2"]
        text = refused(capsys, *job, status=1)
        assert "expected equal gradients in modes eager, compiled" in text and "dropout" in text

    @pytest.mark.dist
    @pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_under_torchrun(self, factory: str, ranks: int) -> None:
        job = ["bench", f"{factory}:build", "--modes", "eager", "--steps", "2", "--json"]
        done = torchrun(ranks, *job)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["suite"] for row in rows] == ["steps", "compile"]
        assert rows[0]["conditions"]["world"] == {"dp": 1, "gtp": ranks}

    def test_captured_needs_a_device(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = ["bench", f"{factory}:build", "--modes", "captured", "--device", "cpu"]
        assert "expected a CUDA device, got --device cpu" in refused(capsys, *job)

    @pytest.mark.parametrize("bad", [["--modes", "eager,fast"], ["--steps", "0"]])
    def test_bad_options(
        self, factory: str, bad: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = refused(capsys, "bench", f"{factory}:build", *bad)
        assert "expected --modes among eager,compiled,captured and --steps of at least 1" in text


class TestDiff:
    def test_equal_is_0_and_different_is_1(
        self, factory: str, plan_file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["diff", plan_file, plan_file]) == 0
        assert capsys.readouterr().out.startswith("equal: hash ")
        other = ["inspect", f"{factory}:build", "--format", "json", "--out", "other.json"]
        assert main([*other, "--ungraphed", "2.weight"]) == 0
        assert main(["diff", plan_file, "other.json"]) == 1
        assert "count: 2.weight: 1 -> 0" in capsys.readouterr().out


def test_help_and_usage_errors_need_no_torch() -> None:
    code = "import sys; from gtpgraph.cli import build_parser; build_parser(); "
    check = "assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code + check]).returncode == 0


def test_a_reader_that_leaves_early_is_no_error(factory: str, plan_file: str) -> None:
    command = f"{sys.executable} -m gtpgraph inspect {factory}:build | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Broken" not in done.stderr
