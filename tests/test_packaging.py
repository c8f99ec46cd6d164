"""What is installed: gtpgraph with passes and kernels inside it, and no top-level ones."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = [
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "gtpgraph",
    "passes",
    "kernels",
    "tests",
    "bench",
]
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def build(kind: str, source: Path, out: Path) -> Path:
    """Build with the installed setuptools; ``kind`` is ``wheel`` or ``sdist``."""
    run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=source)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: building in place would leave build/ behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    return {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}


def test_the_links_are_relative() -> None:
    for name in ("passes", "kernels"):
        assert os.readlink(ROOT / "gtpgraph" / name) == f"../{name}"


def test_wheel_holds_gtpgraph_alone_and_every_module_of_it(wheel: Path) -> None:
    names = names_in(wheel)
    assert {name.partition("/")[0] for name in names} == {"gtpgraph"}
    base = ROOT / "gtpgraph"
    files = [f"gtpgraph/{file.relative_to(base)}" for file in base.rglob("*.py")]
    for name in ("passes", "kernels"):
        found = (ROOT / name).rglob("*.py")
        files += [f"gtpgraph/{name}/{file.relative_to(ROOT / name)}" for file in found]
    assert "gtpgraph/passes/__init__.py" in names
    assert {*files, "gtpgraph/py.typed"} <= names


def test_wheel_from_sdist_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    (tmp_path / "out").mkdir()
    assert names_in(build("wheel", unpacked, tmp_path / "out")) == names_in(wheel)


def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies come from this environment; on PYTHONPATH its editable install is not seen.
    others = {"PYTHONPATH": sysconfig.get_path("purelib")}
    code = "import gtpgraph.passes as p, gtpgraph.kernels as k; print(p.__file__, k.__file__)"
    printed = run(venv / "bin/python", "-c", code, cwd=tmp_path, **others).stdout.split()
    assert all(Path(file).is_relative_to(venv) for file in printed), printed
    helped = run(venv / "bin/gtpgraph", "--help", cwd=tmp_path, **others).stdout
    assert "inspect" in helped
    for bare in ("kernels", "passes"):
        code = f"import importlib.util as u; print(u.find_spec({bare!r}))"
        assert run(venv / "bin/python", "-c", code, cwd=tmp_path).stdout == "None\n"


@pytest.mark.parametrize("name", ["kernels", "passes"])
def test_bare_import_is_refused(name: str) -> None:
    code = f"import {name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"'{name}' was imported by its bare name; expected 'gtpgraph.{name}'" in done.stderr


def test_torch_compile_finds_the_backend() -> None:
    (backend,) = entry_points(group="torch_dynamo_backends", name="gtpgraph")
    assert callable(backend.load())


PRIVATE = re.compile(r"(^|[.])_(?!_)\w+")
# Operators, whose namespace is public and named with a leading underscore.
ALLOWED = re.compile(r"^torch[.](ops[.]|_foreach_\w+$)")


def private_names(source: str) -> list[str]:
    """Names below torch with a part that starts with an underscore, imported or spelled out,
    whatever a file calls the module."""
    tree = ast.parse(source)
    known = {"dist": "torch.distributed"}  # by convention, where a function imports it
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found += names.values()
            known |= {k: v for k, v in names.items() if v.startswith("torch")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            found.append(f"{known.get(head, head)}.{rest}")
    torch_names = [n for n in found if re.match(r"torch[.][\w.]+$", n)]
    return [n for n in torch_names if PRIVATE.search(n) and not ALLOWED.search(n)]


def test_private_torch_names_are_in_compat_alone() -> None:
    for source, expected in (
        ("from torch._dynamo.guards import x", ["torch._dynamo.guards.x"]),
        ("y = torch._C._a(1)", ["torch._C._a", "torch._C"]),
        ("y = torch._C.Graph", ["torch._C.Graph", "torch._C"]),
        ("from torch import _C", ["torch._C"]),
        ("import torch.fx as g\ny = g._x", ["torch.fx._x"]),
        ("from torch import fx\ny = fx._x", ["torch.fx._x"]),
        ("y = dist._x", ["torch.distributed._x"]),
        ("z = torch.ops._c10d_functional.wait_tensor", []),
        ("z = self._x", []),
    ):
        assert sorted(private_names(source)) == sorted(expected), source
    folders = [ROOT / name for name in ("gtpgraph", "passes", "kernels")]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    assert len(files) > 80
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if path.name != "compat.py" and (names := private_names(path.read_text()))
    }
    assert found == {}
