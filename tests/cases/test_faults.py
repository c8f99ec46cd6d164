"""Faults: each is an error that names what is wrong, on every rank; the next step is clean."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at

h = module_at("gtpgraph_case_helpers", str(Path(__file__).with_name("helpers.py")))
BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


class Fails(torch.autograd.Function):
    """Identity whose backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.armed:
            raise ArithmeticError("in the middle of a backward")
        return grad


class Breakable(nn.Module):
    """Two blocks with something between that can fail in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = h.MLP(), h.MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Fails.apply(self.first(x))).square().mean()


def wrapped(model: nn.Module, compiled: bool, **options: Any) -> tuple[Any, Any]:
    ddp = h.wrap(model, **options)
    return ddp, gtpgraph.compile(ddp, lowering="eager") if compiled else ddp


@BOTH
def test_a_backward_after_close_is_an_error(compiled: bool) -> None:
    ddp, call = wrapped(h.MeanSquare(h.MLP()), compiled)
    h.step(ddp, call, h.batch_of(0))
    ddp.zero_grad_buffer()
    loss = call(h.batch_of(0))
    ddp.close()
    text = h.error_of(loss.backward)
    assert text.startswith("RuntimeError") and "got a backward after close()" in text
    for method in (ddp.finish_grad_sync, ddp.zero_grad_buffer):
        assert "got a closed one" in h.error_of(method)
    ddp.close()
    assert not any(hasattr(w, "main_grad") for w in ddp.module.parameters())


class ClosesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, close: list[Any]) -> Tensor:
        ctx.close = close
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for close in ctx.close:
            close()
        return grad, None


def test_a_wrapper_closed_in_the_middle_of_a_backward_is_an_error() -> None:
    """The blocks are compiled, what lies between them is eager."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = h.MLP(), h.MLP()
            self.close: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            y = ClosesInBackward.apply(self.first(x), self.close)
            return self.second(y).square().mean()

    model = Model()
    ddp = h.wrap(model)
    h.compile_part(model.first), h.compile_part(model.second)
    h.step(ddp, ddp, h.batch_of(0))
    model.close.append(ddp.close)
    ddp.zero_grad_buffer()
    text = h.error_of(h.backward, ddp, ddp, h.batch_of(0))
    assert "got a backward after close()" in text


@BOTH
def test_finish_twice_and_a_backward_after_finish(compiled: bool) -> None:
    model = h.MeanSquare(h.MLP())
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp, call = wrapped(model, compiled)
    h.step(ddp, call, x)
    before = h.full_grads(ddp)
    ddp.finish_grad_sync()  # nothing is left to do, and nothing is learned from it
    assert all(torch.equal(g, before[n]) for n, g in h.full_grads(ddp).items())
    text = h.error_of(h.backward, ddp, call, x)
    assert "zero_grad_buffer() before the next backward" in text
    for again in (call, ddp, call):
        h.step(ddp, again, x)
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


@BOTH
def test_an_abandoned_forward_is_an_error_and_the_next_step_is_clean(compiled: bool) -> None:
    """Captured: the region waits for a backward that never comes. Eager code has nothing to wait
    for: a gather alone owes nothing until its step has been learned."""
    model = h.MeanSquare(h.MLP())
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp, call = wrapped(model, compiled)
    h.step(ddp, call, x)
    ddp.zero_grad_buffer()
    call(x)  # under grad, and no backward
    if compiled:
        h.backward(ddp, call, x)
        text = h.error_of(ddp.finish_grad_sync)
        assert "expected 2 backward(s)" in text and "got 1" in text and "no_grad" in text
        assert "body.layers.0.weight" in text
    else:
        text = h.error_of(ddp.finish_grad_sync)
        assert "body.layers.0.weight: expected at least one readiness report, got none" in text
    for _ in range(2):
        h.step(ddp, call, x)
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR
    with torch.no_grad():
        call(x)
    h.step(ddp, call, x)


@BOTH
def test_allow_unused_settles_an_abandoned_forward(compiled: bool) -> None:
    model = h.MeanSquare(h.MLP())
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp, call = wrapped(model, compiled, allow_unused=True)
    h.step(ddp, call, x)
    ddp.zero_grad_buffer()
    call(x)
    h.backward(ddp, call, x)
    ddp.finish_grad_sync()
    assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "blocks compiled"])
def test_an_exception_in_a_backward_leaves_a_clean_next_step(compiled: bool) -> None:
    model = Breakable()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    h.step(ddp, ddp, x)
    if compiled:
        h.compile_part(model.first), h.compile_part(model.second)
        h.step(ddp, ddp, x)
    counts = h.counts(ddp.reports)
    Fails.armed = True
    try:
        ddp.zero_grad_buffer()
        assert "ArithmeticError" in h.error_of(h.backward, ddp, ddp, x)
        text = h.error_of(ddp.finish_grad_sync)
        assert "first.layers.0.weight" in text
    finally:
        Fails.armed = False
    for _ in range(2):
        h.step(ddp, ddp, x)
        assert h.counts(ddp.reports) == counts
        assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "blocks compiled"])
def test_a_failed_backward_without_finish_leaves_a_clean_next_step(compiled: bool) -> None:
    """A loop that catches the exception and goes on with the next batch."""
    model = Breakable()
    plain, x = copy.deepcopy(model), h.batch_of(0)
    ddp = h.wrap(model, bucket_mb=1e-4)
    if compiled:
        h.compile_part(model.first), h.compile_part(model.second)
    h.step(ddp, ddp, x)
    Fails.armed = True
    try:
        ddp.zero_grad_buffer()
        assert "ArithmeticError" in h.error_of(h.backward, ddp, ddp, x)
    finally:
        Fails.armed = False
    h.step(ddp, ddp, x)
    assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR
