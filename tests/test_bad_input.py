"""Bad input: one clear error each, naming what was expected, what was found and the remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph.cli import main
from gtpgraph.testing import RankPool

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

def frozen():
    return net().requires_grad_(False), make_batch, square

def no_scalar():
    return net(), make_batch
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


def refused(capsys: pytest.CaptureFixture[str], *args: str, status: int = 2) -> str:
    """The one message of a command that must fail; nothing on stdout, no traceback."""
    assert main(list(args)) == status
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    marker = f"gtpgraph {args[0]}: error: "
    assert err.count(marker) == 1
    return err.partition(marker)[2]


class TestCommands:
    def test_no_trainable_weight(self, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
        text = refused(capsys, "inspect", f"{factory}:frozen")
        assert "expected at least one trainable weight, got a model with none" in text
        assert "requires_grad" in text

    def test_a_pattern_that_matches_nothing_lists_near_misses(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = refused(capsys, "inspect", "moe-tiny", "--ungraphed", "*.shared_expert.*")
        assert "'*.shared_expert.*' (near: layers.1.mlp.shared_experts.fc1" in text

    @pytest.mark.dist
    def test_an_error_on_every_rank_is_one_message(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = refused(capsys, "inspect", f"{factory}:frozen", "--ranks", "2")
        assert text.count("expected at least one trainable weight") == 1

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            (["--ranks", "4", "--gtp", "3"], r"gtp x dp = 4 (--ranks 4), got --gtp 3."),
            (["--ranks", "4", "--gtp", "2", "--dp", "4"], "got --gtp 2 x --dp 4."),
            (["--fake-world", "8", "--dp", "16"], "gtp x dp = 8 (--fake-world 8), got --dp 16."),
            (["--ranks", "0"], "--ranks: expected a positive number, got 0."),
            (["--ranks", "2", "--fake-world", "8"], "expected it alone, got --ranks 2 too"),
        ],
    )
    def test_world_size_that_is_not_the_mesh(
        self, sizes: list[str], expected: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert expected in refused(capsys, "inspect", "gpt-tiny", *sizes)

    def test_ranks_under_torchrun(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
            monkeypatch.setenv(name, value)
        text = refused(capsys, "inspect", "gpt-tiny", "--ranks", "4")
        assert "expected the 2 rank(s) that torchrun started" in text

    def test_a_truncated_plan(
        self, factory: str, plan_file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = Path(plan_file).read_text()
        Path(plan_file).write_text(text[: len(text) // 2])
        for command in (["diff", plan_file, plan_file],
                        ["inspect", f"{factory}:build", "--against", plan_file]):  # fmt: skip
            message = refused(capsys, *command)
            assert "text that stops making sense at line" in message
            assert "Is the file complete?" in message

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (
                {"schema": "gtpgraph.plan/9"},
                "expected schema 'gtpgraph.plan/1', got 'gtpgraph.plan/9'",
            ),
            ({"unused": ["0.weight"]}, "the file was edited or damaged"),
            ({"buckets": None}, "plan.json.buckets: expected "),
        ],
    )
    def test_a_plan_of_another_schema_or_edited(
        self,
        change: dict[str, Any],
        expected: str,
        plan_file: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        Path(plan_file).write_text(json.dumps(json.loads(Path(plan_file).read_text()) | change))
        assert expected in refused(capsys, "diff", plan_file, plan_file)

    def test_a_plan_that_is_not_there_or_not_text(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "none.json: expected a plan file, got: No such" in refused(
            capsys, "diff", "none.json", "none.json"
        )
        Path("binary").write_bytes(b"\xff\xfe\x00")
        assert "binary: expected a plan file" in refused(capsys, "diff", "binary", "binary")

    def test_a_plan_of_another_model(
        self, plan_file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = refused(capsys, "inspect", "gpt-tiny", "--against", plan_file)
        assert "expected a plan of model 'gpt-tiny', got one of 'mine.py:build'" in text

    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            ("mtp-tny", "did you mean 'mtp-tiny'"),
            ("nowhere.models:build", "no module named 'nowhere'"),
            ("absent.py:build", "expected a file absent.py, found none"),
            ("mine.py:biuld", "did you mean 'build'"),
            ("mine.py", "no factory named"),
            ("mine.py:no_scalar", "expected a scalar loss, got shape (4, 2)"),
        ],
    )
    def test_a_model_that_cannot_be_had(
        self, factory: str, model: str, expected: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert expected in refused(capsys, "bench", model, "--lowering", "eager")

    def test_out_that_cannot_be_written(
        self, factory: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = refused(capsys, "inspect", f"{factory}:build", "--out", "no/folder/plan.json")
        assert "no/folder/plan.json: expected a file that can be written" in text

    @pytest.mark.parametrize("args", [[], ["inspect"], ["inspect", "gpt-tiny", "--fmt"], ["fly"]])
    def test_usage(self, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(args)
        assert exit_.value.code == 2 and "usage: gtpgraph" in capsys.readouterr().err

    def test_traceback_on_request(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", "none.json", "none.json", "--traceback"]) == 2
        assert "Traceback" in capsys.readouterr().err


def untouched(model: nn.Module) -> bool:
    """Whether no wrapper has left anything on the model's weights."""
    marks = ("main_grad", "_gtp_state", "_gtp_handle")
    return not any(hasattr(p, mark) for p in model.parameters() for mark in marks)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def missing_group(rank: int, world: int) -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "gtp"))
    whole = gg.ProcessGroups.from_mesh(mesh)
    model = gg.shard(mlp(), whole)
    partial = gg.ProcessGroups(gtp=whole.gtp, dp=None)
    try:
        gg.DistributedDataParallel(model, partial)
    except ValueError as error:
        return str(error), untouched(model)
    return "", False


def no_groups(rank: int, world: int) -> tuple[str, bool]:
    model = mlp()
    try:
        gg.DistributedDataParallel(model)
    except ValueError as error:
        return str(error), untouched(model)
    return "", False


class TestLibrary:
    def test_no_trainable_weight(self) -> None:
        model = gg.shard(mlp()).requires_grad_(False)
        with pytest.raises(ValueError, match=r"expected at least one trainable weight.*Set requi"):
            gg.DistributedDataParallel(model)
        assert untouched(model)

    def test_patterns_that_match_nothing(self) -> None:
        model = mlp()
        with pytest.raises(ValueError, match=r"(?s)nothing was changed.*'0\.wieght'.*0\.weight"):
            gg.shard(model, include=["0.wieght"])
        assert type(model[0]) is nn.Linear
        wrapped = gg.DistributedDataParallel(gg.shard(model))
        with pytest.raises(ValueError, match=r"none for '\*\.wait' .*; '1\.\*' \(near"):
            gg.compile(wrapped, ungraphed=["*.wait", "1.*", "0.*"])
        assert wrapped.regions == []

    @pytest.mark.dist
    def test_a_missing_group(self, ranks2: RankPool) -> None:
        for text, clean in ranks2.run(missing_group):
            assert "DistributedDataParallel: the collection of process groups lacks" in text
            assert "dp_cp_gtp: not set (UNSET), needed by gtp > 1" in text
            assert "ProcessGroups.from_mesh" in text and clean

    @pytest.mark.dist
    def test_no_groups_under_torch_distributed(self, ranks2: RankPool) -> None:
        for text, clean in ranks2.run(no_groups):
            assert "expected groups=ProcessGroups under torch.distributed, got None" in text
            assert clean

    def test_a_plan_of_another_model(self, tmp_path: Path) -> None:
        compiled = gg.compile(gg.DistributedDataParallel(gg.shard(mlp())), lowering="eager")
        file = tmp_path / "plan.json"
        file.write_text(gg.inspect(compiled, torch.randn(4, 6)).to_json())
        assert gg.HookPlan.load(file, model="Sequential") == compiled.plan
        with pytest.raises(ValueError, match=r"expected a plan of model 'GPT', got .*'Sequential'"):
            gg.HookPlan.load(file, model="GPT")

    def test_a_weight_without_main_grad(self) -> None:
        model = mlp()
        with pytest.raises(ValueError, match=r"holds one gtpgraph.DistributedDataParallel, got 0"):
            gg.compile(model)
        compiled = torch.compile(model, backend="gtpgraph", options={"lowering": "eager"})
        with pytest.raises(Exception, match=r"(?s)expected trainable weights with main_grad.*Wrap"):
            compiled(torch.randn(4, 6))
        assert untouched(model)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_closed_between_forward_and_backward(self, compiled: bool) -> None:
        model = mlp()
        wrapped = gg.DistributedDataParallel(gg.shard(model))
        call = gg.compile(wrapped, lowering="eager") if compiled else wrapped
        wrapped.zero_grad_buffer()
        loss = call(torch.randn(4, 6)).sum()
        wrapped.close()
        with pytest.raises(RuntimeError, match=r"got a backward after close\(\).*wrap the model"):
            loss.backward()
        assert untouched(model)
        again = gg.DistributedDataParallel(model)
        again(torch.randn(4, 6)).sum().backward()
        again.finish_grad_sync()
