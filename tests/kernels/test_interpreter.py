"""Runs the kernel tests of this folder under Triton's interpreter, in a process of their own."""

import os
import pathlib
import re
import subprocess
import sys

import numpy
import pytest

HERE = pathlib.Path(__file__).parent
LOOPS = ("test_triton_gemm.py", "test_triton_scatter.py")  # with bounds known in the kernel alone
FILES = sorted(path.name for path in HERE.glob("test_triton_*.py"))


def _numpy_is_too_new(triton: str) -> bool:
    def release(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    return release(triton) < (3, 7) and release(numpy.__version__) >= (2, 4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is the interpreter run")
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str) -> None:
    triton = pytest.importorskip("triton")
    if file in LOOPS and _numpy_is_too_new(triton.__version__):
        pytest.skip("Triton 3.6's interpreter takes loop bounds from numpy before 2.4 only")
    paths = [p for p in sys.path if p]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    # "no tests ran" and "all skipped" must not pass for a run
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > 0 and "skipped" not in run.stdout, run.stdout
