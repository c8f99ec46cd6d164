"""The short way to launch a kernel again: taken only where the compiled kernel is the right one."""

from typing import Any

import pytest
import torch

from gtpgraph.kernels import launch as module


class Compiled:
    """What Triton's first launch returns."""

    packed_metadata = ()

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._calls.append(("short", (grid, *args)))


class Kernel:
    """A jitted function that notes through which way it was launched."""

    def __init__(self, compiled: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Compiled | None:
            self.calls.append(("binder", (grid, *args, *options.items())))
            return Compiled(self.calls) if self._compiled else None

        return run


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", {})


def run(kernel: Kernel, key: object, *tensors: torch.Tensor) -> str:
    module.launch(kernel, key, (2, 1, 1), (*tensors, 7), {"FIRST": True}, num_warps=4)
    return kernel.calls[-1][0]


def test_the_second_launch_of_a_key_gets_the_same_arguments() -> None:
    kernel, x, y = Kernel(), torch.zeros(8), torch.zeros(8)
    assert [run(kernel, "a", t) for t in (x, y, x)] == ["binder", "short", "short"]
    _, (grid, tensor, number, first) = kernel.calls[1]
    assert (grid, number, first) == ((2, 1, 1), 7, True) and tensor is y


def test_another_key_and_another_alignment_go_through_triton() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    run(kernel, "a", x)
    assert run(kernel, "b", x) == "binder"
    assert run(kernel, "a", x[1:]) == "binder", "the compiled kernel expects aligned addresses"
    assert run(kernel, "c", x[1:]) == "binder"
    assert run(kernel, "c", x) == "binder", "and what was compiled for others is not kept"
    assert run(kernel, "c", x) == "short"


def test_the_interpreter_compiles_nothing() -> None:
    kernel, x = Kernel(compiled=False), torch.zeros(8)
    assert [run(kernel, "a", x) for _ in range(2)] == ["binder", "binder"]


def test_the_number_of_kept_kernels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    kernel, x = Kernel(), torch.zeros(8)
    for key in range(5):
        run(kernel, key, x)
        assert len(module._compiled) <= 2
    assert run(kernel, 4, x) == "short"
