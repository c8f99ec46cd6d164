"""Factories: what is found by name, module and file, and what is refused with which words."""

from pathlib import Path

import pytest
from torch import nn

from gtpgraph.models import GPT, load_factory

FACTORY = """
import torch
def make_batch(seed, rank, device):
    return (torch.ones(2, 3, device=device),)
def build():
    return torch.nn.Linear(3, 1), make_batch
def with_loss():
    return torch.nn.Linear(3, 1), make_batch, lambda y: y.mean()
def wrong():
    return [1, 2], 3
def not_a_tuple():
    return torch.nn.Linear(3, 1)
def needs(x):
    return x
value = 3
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> str:
    file = tmp_path / f"mine_{tmp_path.name}.py"
    file.write_text(FACTORY)
    return str(file)


class TestLoadFactory:
    def test_built_in_name_with_overrides(self) -> None:
        built = load_factory("mtp-tiny", depths=1)
        assert isinstance(built.model, GPT) and built.model.config.depths == 1
        assert built.loss_fn is None

    def test_file(self, factory_file: str) -> None:
        model, make_batch, loss_fn = load_factory(f"{factory_file}:build")
        assert isinstance(model, nn.Linear) and loss_fn is None
        assert model(*make_batch(0, 0, "cpu")).shape == (2, 1)
        built = load_factory(f"{factory_file}:with_loss")
        assert built.loss_fn is not None
        assert built.loss_fn(built.model(*built.make_batch(0, 0, "cpu"))).shape == ()

    def test_module(self, factory_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
        file = Path(factory_file)
        monkeypatch.syspath_prepend(str(file.parent))
        assert isinstance(load_factory(f"{file.stem}:build").model, nn.Linear)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("biuld", r"found no such name; did you mean 'build'\? Known: "),
            ("value", r"expected 'value' to be a function .* found a int"),
            ("wrong", r"model: expected an nn.Module, got a list; make_batch: expected a function"),
            ("not_a_tuple", r"expected \(model, make_batch\) .* got a Linear"),
            ("needs", r"the factory raised TypeError: .* it is called without arguments"),
        ],
    )
    def test_bad_factories(self, factory_file: str, name: str, expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            load_factory(f"{factory_file}:{name}")

    def test_what_cannot_be_imported(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"expected a file gone.py, found none in "):
            load_factory("gone.py:build")
        with pytest.raises(ValueError, match=r"no module named 'no_such_mod'; install it, run"):
            load_factory("no_such_mod.sub:build")
        with pytest.raises(ValueError, match=r"no factory named; expected 'package.module:fac"):
            load_factory("package.module")
        needs = tmp_path / "needs_missing.py"
        needs.write_text("import no_such_dependency.x\n")
        with pytest.raises(ValueError, match=r"install no_such_dependency, which it imports"):
            load_factory(f"{needs}:build")
        broken = tmp_path / "broken_syntax.py"
        broken.write_text("def build(:\n")
        with pytest.raises(ValueError, match=r"importing .*broken_syntax.py raised SyntaxError"):
            load_factory(f"{broken}:build")

    def test_overrides_are_for_built_in_models(self, factory_file: str) -> None:
        with pytest.raises(ValueError, match=r"depths can be set on built-in models alone"):
            load_factory(f"{factory_file}:build", depths=2)
