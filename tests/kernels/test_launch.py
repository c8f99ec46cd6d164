"""The short way to launch a kernel again: taken only where the compiled kernel is the right one."""

import random
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


def specialisation(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> object:
    """What Triton compiles a kernel for, by its own function."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    names = [p.name for p in kernel.params]
    assert names[len(args) :] == list(constants), "constants follow in the order of the signature"
    return tuple(
        native_specialize_impl(
            BaseBackend, arg, False, not p.do_not_specialize, not p.do_not_specialize_on_alignment
        )
        for arg, p in zip(args, kernel.params, strict=False)
    )


def random_calls(draw: random.Random) -> None:
    """One call of each kernel that is launched the short way, on CPU tensors."""
    from gtpgraph.kernels import accumulate, many, wgrad_gemm
    from gtpgraph.kernels.gemm_table import CONFIGS, IEEE

    flat = torch.zeros(1 << 16, dtype=draw.choice([torch.float32, torch.bfloat16]))
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    numel, offset = draw.choice([1, 2, 16, 17, 64, 1000]), draw.choice([0, 1, 2, 16, 17, 64])
    index, scale, first = (
        draw.choice([0, 1, 16]),
        draw.choice([1.0, 0.5, 16.0]),
        draw.random() < 0.5,
    )
    beta, start = torch.zeros(40), draw.choice([0, 1, 8])
    wgrad = torch.zeros(2048, dtype=dtype)[start : start + numel]
    partials = torch.zeros(4, 2) if draw.random() < 0.3 else None
    accumulate.accumulate(flat, wgrad, beta, index, offset, scale, first, partials)
    count = draw.choice([1, 2, 16, 17])
    wgrads, places = [wgrad] * count, [offset + 1000 * i for i in range(count)]
    many.accumulate_many(flat, wgrads, beta, [index] * count, places, scale, [first] * count)
    # As many tiles as another number of accumulates: only the constants tell the two apart.
    many.pack(flat[: places[-1] + 1000], wgrads, places, scale)
    tokens, rows, columns = (
        draw.choice([1, 16, 17]),
        draw.choice([1, 8, 16, 17]),
        draw.choice([1, 16]),
    )
    dy, x = torch.zeros(tokens, rows, dtype=dtype), torch.zeros(tokens, columns, dtype=dtype)
    problem = wgrad_gemm.Problem(flat, dy, x, beta, index, offset, scale, first)
    wgrad_gemm.run_triton(problem, draw.choice([*CONFIGS.values(), IEEE]))


def test_calls_of_one_key_are_compiled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that leaves out what Triton specialises on would launch the wrong kernel."""
    library = pytest.importorskip("triton._C.libtriton", reason="triton is not installed")
    if not hasattr(library, "native_specialize_impl"):
        pytest.skip("this Triton has no native_specialize_impl to compare with")
    from gtpgraph.kernels import accumulate, many, wgrad_gemm

    seen: dict[object, object] = {}

    def note(
        kernel: Any, key: object, grid: object, args: Any, constants: Any, **options: int
    ) -> None:
        if module._aligned(args):
            found = specialisation(kernel, args, constants), grid, str(constants), options
            assert seen.setdefault(key, found) == found, key

    for user in (accumulate, many, wgrad_gemm):
        monkeypatch.setattr(user, "launch", note)
    draw = random.Random(0)
    for _ in range(3000):
        random_calls(draw)
    assert len(seen) > 1000
