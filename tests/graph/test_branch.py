"""Accumulates on a branch of a captured graph; the host runtime runs them as late as it may."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.kernels.beside import beside

t = module_at("gtpgraph_replay_tools", str(Path(__file__).parent / "replay_tools.py"))


class Residual(nn.Module):
    """Its residual gradients are read by wgrad GEMMs and then added to."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, (32,)))))
        return x.square().mean()


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
@pytest.mark.parametrize("kind", t.KINDS)
def test_gradients_with_late_accumulates(kind: str, limit: int) -> None:
    """Every accumulate is on the branch, and what it reads is there when it runs."""
    model = t.wrapped(t.Net())
    want_net = copy.deepcopy(net_of(model))
    r = t.Replayed(kind, model, wgrads_in_flight=limit)
    for seed in range(4):
        t.assert_close(r.train(t.batch(seed)), t.reference(want_net, [t.batch(seed)]))
    assert r.driver.branched == (7 if limit else 0)
    model.close()


def test_inductors_memory_lasts_as_long_as_the_accumulates_need_it() -> None:
    torch.manual_seed(0)
    model = t.wrapped(Residual().bfloat16(), bucket_mb=32)
    driver = t.HostDriver(model)
    call = gg.compile(
        model, lowering="inductor", fuse=True, replay="cuda", driver=driver, wgrads_in_flight=2
    )
    x = torch.randn(32, 32).bfloat16()
    found = []
    for _ in range(3):
        model.zero_grad_buffer()
        call(x).backward()
        model.finish_grad_sync()
        found.append({n: g.clone() for n, g in t.grads(model).items()})
    assert driver.branched == 13  # 12 GEMMs, and all biases in one launch
    t.assert_equal(found[1], found[0])  # the first step ran uncaptured, every op in its place
    t.assert_equal(found[2], found[0])
    model.close()


class Shared(nn.Module):
    """One weight used in a compiled layer and eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = t.Linear(8, 8)
        self.eager = nn.Linear(8, 8)

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return F.linear(self.eager(x), self.layer.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.layer(self.outside(x).tanh())).square().mean()


@pytest.mark.parametrize("lasts", [True, False])
def test_a_region_in_the_main_line_writes_behind_eager_accumulates(
    lasts: bool,
) -> None:
    """Contributions of one weight, some on the branch: the first one in backward order stores."""
    model = t.wrapped(Shared())
    want_net = copy.deepcopy(net_of(model))
    driver = t.HostDriver(model)
    body = gg.compile(model, lowering="eager")

    def step(x: Tensor) -> Tensor:
        loss: Tensor = body(x)
        loss.backward()
        for region in body.regions:
            region.lasts = lasts
        return loss

    call = gg.capture(step, model, driver=driver, wgrads_in_flight=100)
    for seed in range(3):
        model.zero_grad_buffer()
        call(t.batch(seed))
        model.finish_grad_sync()
        t.assert_close(t.grads(model), t.reference(want_net, [t.batch(seed)]))
    everything = len(model.reports)
    inside = sum(r.region is not None for r in model.reports)
    assert inside > 0 and driver.branched == (everything if lasts else everything - inside)
    model.close()


def test_no_branch_where_exchanges_write_main_grads_in_the_main_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = t.wrapped(t.Net())
    monkeypatch.setattr(model, "staging_buffers", lambda: [torch.empty(1, dtype=torch.uint8)])
    r = t.Replayed("step", model)
    for seed in range(2):
        r.train(t.batch(seed))
    assert r.driver.branched == 0
    model.close()


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_regions_compiled_without_a_branch_stay_in_the_main_line(lowering: str) -> None:
    model = t.wrapped(t.Net())
    body = gg.compile(model, lowering=lowering, wgrads_in_flight=0)
    driver = t.HostDriver(model)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = body(x)
        loss.backward()
        return loss

    call = gg.capture(step, model, driver=driver)
    for _ in range(2):
        model.zero_grad_buffer()
        call(t.batch())
        model.finish_grad_sync()
    assert not body.regions[0].lasts and driver.branched == 0
    model.close()


def test_blocks_nest_and_an_exception_leaves_them() -> None:
    calls: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, launch: Any, args: Any) -> Tensor:
            calls.append(self.name)
            result: Tensor = launch(*args)
            return result

        def settle(self, behind: int) -> None:
            calls.append(f"{self.name} {behind}")

    flat, beta = torch.zeros(4), torch.zeros(1)

    def accumulate() -> None:
        torch.ops.gtpgraph.accumulate(flat, torch.ones(4), beta, 0, 0, 1.0, False)

    with beside(Noted("a")):
        accumulate()
        with pytest.raises(ZeroDivisionError), beside(None):
            accumulate()
            raise ZeroDivisionError
        torch.ops.gtpgraph.hold(flat, [flat], 2, torch.zeros(1, dtype=torch.uint8))
    accumulate()
    assert calls == ["a", "a 2"] and flat.tolist() == [3.0] * 4


@pytest.mark.parametrize("kind", t.KINDS)
def test_what_a_captured_reduction_accumulates_stays_with_it(kind: str) -> None:
    """On the branch, every later accumulate would wait for the network."""
    model = t.wrapped(t.Net())
    one = torch.ones(1)

    class Adds:
        def start(self, flat: Tensor) -> None:
            torch.ops.gtpgraph.accumulate(flat, torch.zeros_like(flat), one, 0, 0, 1.0, False)

        def finish(self, flat: Tensor) -> None:
            self.start(flat)

    for bucket in model.buckets:
        bucket.reduction = Adds()
    r = t.Replayed(kind, model, dispatch="in_graph")
    for seed in range(3):
        r.train(t.batch(seed))
    assert r.driver.branched == 7 and r.driver.forks > 0
    model.close()


def test_inductors_code_gives_no_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that it makes of operands are in no hold: the allocator must see them."""
    from torch._inductor import compile_fx, config

    seen = []
    inner = compile_fx.compile_fx_inner

    def spy(*args: Any, **kw: Any) -> Any:
        seen.append((bool(kw.get("is_backward")), config.allow_buffer_reuse))
        return inner(*args, **kw)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    for limit in (0, 2):
        model = t.wrapped(t.Net())
        gg.compile(model, lowering="inductor", wgrads_in_flight=limit)(t.batch()).backward()
        model.close()
    assert [reuse for backward, reuse in seen if backward] == [True, False]


@pytest.mark.parametrize("function", ["compile", "capture"])
def test_a_negative_limit_is_refused(function: str) -> None:
    model = t.wrapped(t.Net())
    with pytest.raises(ValueError, match="wgrads_in_flight: expected 0 or more, got -1"):
        if function == "compile":
            gg.compile(model, wgrads_in_flight=-1)
        else:
            gg.capture(lambda x: x, model, driver=t.HostDriver(model), wgrads_in_flight=-1)
    model.close()


def net_of(model: gg.DistributedDataParallel) -> nn.Module:
    net: nn.Module = model.module
    return net
