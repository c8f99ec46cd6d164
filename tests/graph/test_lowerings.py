"""Both lowerings: what ran is the plan, in its order; awkward inputs; compile caches."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.graph import lower
from gtpgraph.graph.options import CompileOptions
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY
from gtpgraph.testing import max_error

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parent / "graph_tools.py"))
BARS = {"eager": 1e-6, "inductor": 1e-5}


class FourLinears(nn.Module):
    """Four layers and a norm, the last layer used twice. Two run in another order than they are
    registered in, so that the occurrences of two buckets alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for k in (0, 2, 1, 3):
            x = self.layers[k](x).tanh()
        return self.layers[3](self.norm(x)).square().mean()


def reference(model: nn.Module, *batch: Any) -> dict[str, Tensor]:
    """Gradients of plain PyTorch."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(*batch).backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


def ran_is_planned(c: Any) -> None:
    """The last step's reports are the plan's occurrences, region by region, in order."""
    ran = [(r.weight, r.use, r.region) for r in c.wrapper.reports if r.region is not None]
    planned = [(o.weight, o.use, r.name) for r in c.step.plan.regions for o in r.occurrences]
    assert ran == planned
    assert Counter(r.weight for r in c.wrapper.reports) == Counter(c.step.plan.ready_counts)


def interleaved(words: str) -> None:
    """R is a report, m a matmul: reports stand between the matmuls, not all behind them."""
    between = [part.count("m") for part in words.split("R")]
    assert sum(n > 0 for n in between) >= 4, words
    assert words.count("R", 0, words.rindex("m")) >= 4, words


def alternations(buckets: list[int]) -> int:
    return sum(a != b for a, b in pairwise(buckets))


@pytest.mark.slow
def test_k34_reports_between_the_compute_in_inductors_code() -> None:
    """Four Linears: not all reports at the end; two buckets keep one order; nothing is dropped."""
    from torch._inductor.utils import run_and_get_code

    model, x = FourLinears(), torch.randn(4, 16)
    expected = reference(model, x)
    with torch._inductor.config.patch(fx_graph_cache=False):  # a hit generates no code
        c, codes = run_and_get_code(
            lambda: t.compiled(model, x, lowering="inductor", wrap={"bucket_mb": 0.0026})
        )
    (backward,) = (code for code in codes if "gtpgraph.accumulate" in code)
    calls = re.findall(r"(?:= torch\.ops\.gtpgraph|extern_kernels)\.(\w+)[.(]", backward)
    words = "".join({"grad_ready": "R", "accumulate": "A", "mm": "m"}.get(c, "") for c in calls)
    occurrences = c.step.plan.regions[0].occurrences
    assert words.replace("m", "") == "AR" * 7 and len(occurrences) == 7
    interleaved(words)
    assert alternations([o.bucket for o in occurrences]) >= 3
    sites = [int(s) for s in re.findall(r"grad_ready\.default\(\w+, (\d+),", backward)]
    assert sites == [o.site for o in occurrences]
    for _ in range(2):
        assert max_error(c.train(x), expected) <= BARS["inductor"]
        ran_is_planned(c)


def test_k34_under_fx() -> None:
    model, x = FourLinears(), torch.randn(4, 16)
    expected = reference(model, x)
    c = t.compiled(model, x, wrap={"bucket_mb": 0.0026})
    graph = c.checked[0].graph
    words = "".join(
        {GRAD_READY: "R", t.MM: "m"}[n.target] for n in t.targets(graph, GRAD_READY, t.MM)
    )
    interleaved(words)
    assert alternations([o.bucket for o in c.step.plan.regions[0].occurrences]) >= 3
    assert max_error(c.train(x), expected) <= BARS["eager"]
    ran_is_planned(c)


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        ("drop", r"expected the 7 occurrence\(s\) of its plan, got 6"),
        ("swap", r"first difference at occurrence 0: expected"),
        ("repeat", r"expected the 7 occurrence\(s\) of its plan, got 8"),
    ],
)
def test_a_lowering_that_moves_or_drops_reports_is_found(
    sabotage: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_(graph: fx.Graph) -> None:
        ready = t.targets(graph, GRAD_READY)
        if sabotage == "drop":
            ready[0].replace_all_uses_with(ready[0].args[2])
            graph.erase_node(ready[0])
        elif sabotage == "repeat":
            with graph.inserting_after(ready[0]):
                graph.call_function(GRAD_READY, ready[0].args)
        else:
            first, second = ready[0].args, ready[1].args
            ready[0].args = (first[0], second[1], first[2])
            ready[1].args = (second[0], first[1], second[2])

    plain = lower.run_by_fx

    def run_by_fx(gm: fx.GraphModule) -> Any:
        if t.targets(gm.graph, ACCUMULATE):
            break_(gm.graph)
            gm.recompile()
        return plain(gm)

    monkeypatch.setattr(lower, "run_by_fx", run_by_fx)
    x = torch.randn(4, 16)
    c = t.compiled(FourLinears(), x)
    with pytest.raises(RuntimeError, match=message):
        c.train(x)


# -- awkward inputs --------------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)


class SymbolicBatch(Base):
    """The batch size itself enters the arithmetic, so that a SymInt is saved for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)).flatten() * x.shape[0]
        return (self.b(h.view(x.shape[0], 8)).sum(0) / x.shape[0]).square().sum()


class SharedNode(Base):
    """w1 + w2 and w1 + 2 * w2; one gradient is a bare tangent of another."""

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.a.weight + self.b.weight)
        h = nn.functional.linear(h, self.a.weight + 2 * self.b.weight)
        return (h + self.norm.weight + self.norm.bias + self.a.bias).square().mean()


class WeightAsInput(Base):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.b(self.norm(self.a(x))) * scale).square().mean()


class SameInputTwice(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.a(x) * self.b(self.norm(y))).square().mean()


class Buffers(Base):
    """A batch norm: buffers among the inputs, changed by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.norm(h + self.bn(h))).square().mean()


class Identical(Base):
    """b(h) + b(h): equal subexpressions, two contributions that are one node."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        return (self.b(h) + self.b(h)).square().mean()


class UnusedOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        return h.cos().mean() + 0.0 * self.b(h).sum()


@pytest.mark.parametrize("group", ["one process", "a group"])
@pytest.mark.parametrize("ungraphed", [(), ("b.*", "norm.bias")])
@pytest.mark.parametrize(
    "net",
    [
        SymbolicBatch,
        SharedNode,
        WeightAsInput,
        SameInputTwice,
        Buffers,
        Identical,
        UnusedOutput,
    ],
)
def test_awkward_models(net: type[Base], ungraphed: tuple[str, ...], group: str) -> None:
    """Gradients of plain PyTorch, and reports as planned, on two batches of different size."""
    model = net()
    batches = []
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        extra = {WeightAsInput: (torch.randn(8),), SameInputTwice: (x,)}.get(net, ())
        batches.append((x, *extra))
    with t.one_rank() if group == "a group" else t.nullcontext() as groups:
        plain = copy.deepcopy(model)
        c = t.compiled(
            model, *batches[0], groups=groups, ungraphed=ungraphed,
            dynamic=True if net is SymbolicBatch else None,
        )  # fmt: skip
        for batch in batches:
            grads = c.train(*batch)
            assert max_error(grads, reference(plain, *batch)) <= BARS["eager"]
        regions = [r.plan for r in c.step.regions]
        assert len(regions) == (1 if net is SymbolicBatch else 2)
        assert [r.name for r in c.step.plan.regions] == [regions[-1].name]  # what ran last
        outside = {r.weight for r in c.wrapper.reports if r.region is None}
        assert outside == ({"b.weight", "norm.bias"} if ungraphed else set())
        for region in regions:
            assert {e.weight for e in region.excluded} == outside


def test_a_weight_that_is_an_argument_too() -> None:
    """The same Parameter through the module and through the call: one site, the whole gradient."""
    model, x = WeightAsInput(), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    plain(x, plain.norm.weight).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    c = t.compiled(model, x, model.norm.weight)
    assert max_error(c.train(x, model.norm.weight), expected) <= BARS["eager"]
    assert [o.weight for o in c.step.plan.regions[0].occurrences].count("norm.weight") == 1


def test_frozen_weights_have_no_site() -> None:
    model, x = Base(), torch.randn(3, 8)
    model.b.requires_grad_(False)
    model.forward = lambda x: model.b(model.norm(model.a(x))).square().mean()  # type: ignore
    c = t.compiled(model, x)
    assert {o.weight for o in c.step.plan.regions[0].occurrences} == {
        "a.weight", "a.bias", "norm.weight", "norm.bias",
    }  # fmt: skip


# -- caches ----------------------------------------------------------------------------------------

CACHED = """
import json, sys, torch
from torch import nn
import gtpgraph as gg
from gtpgraph.by_path import module_at
t = module_at("gtpgraph_graph_tools", sys.argv[1])
ungraphed = json.loads(sys.argv[2])
torch.manual_seed(0)
one, two = nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)
model = nn.Sequential(one, nn.Tanh(), two)
class Mean(nn.Module):
    def __init__(self): super().__init__(); self.net = model
    def forward(self, x): return self.net(x).square().mean()
x = torch.randn(4, 8)
plain = Mean()(x); plain.backward()
expected = {"net." + n: p.grad for n, p in model.named_parameters()}
for p in model.parameters(): p.grad = None
c = t.compiled(Mean(), x, lowering="inductor", ungraphed=ungraphed)
grads = c.train(x)
from torch._dynamo.utils import counters
print(json.dumps({
    "hit": counters["inductor"]["fxgraph_cache_hit"],
    "miss": counters["inductor"]["fxgraph_cache_miss"],
    "error": max(float((grads[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()),
    "graphed": [r.weight for r in c.wrapper.reports if r.region is not None],
    "eager": [r.weight for r in c.wrapper.reports if r.region is None],
}))
"""


@pytest.mark.slow
def test_k35_a_warm_cache_keeps_chain_filters_apart(tmp_path: Path) -> None:
    """Fresh processes, one cache: the same model with another filter is compiled anew and reports
    by its own plan; with the same filter it is served from the cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    def run(*ungraphed: str) -> dict[str, Any]:
        tools = str(Path(__file__).parent / "graph_tools.py")
        command = [sys.executable, "-c", CACHED, tools, json.dumps(ungraphed)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["error"] <= BARS["inductor"]
        return found

    first, filtered, again = run(), run("net.2.*"), run()
    assert first["miss"] == 2 and first["graphed"] == ["net.2.weight", "net.0.weight"]
    assert filtered["miss"] >= 1
    assert (filtered["graphed"], filtered["eager"]) == (["net.0.weight"], ["net.2.weight"])
    assert again["hit"] == 2 and again["miss"] == 0
    assert (again["graphed"], again["eager"]) == (first["graphed"], [])


@pytest.mark.parametrize(
    ("fuse", "lowering", "device", "expected"),
    [
        (None, "inductor", "cuda", True),
        (None, "inductor", "cpu", False),
        (None, "eager", "cuda", False),  # the oracle keeps eager's bits
        (True, "eager", "cpu", True),
        (False, "inductor", "cuda", False),
    ],
)
def test_where_accumulates_are_fused(
    fuse: bool | None, lowering: str, device: str, expected: bool
) -> None:
    options = CompileOptions(lowering=lowering, fuse=fuse)
    assert options.fuses(torch.device(device)) is expected


def test_inductor_is_told_of_our_operators(caplog: pytest.LogCaptureFixture) -> None:
    """Where it finds them by itself, torch 2.11 formats a whole chain of tokens for its log."""
    from torch._inductor.lowering import lowerings

    for op in [op for op in lowerings if getattr(op, "namespace", None) == "gtpgraph"]:
        del lowerings[op]
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model = gg.DistributedDataParallel(gg.shard(net))
    compiled = gg.compile(model, lowering="inductor", fuse=True)
    with caplog.at_level(logging.INFO, "torch._inductor.graph"):
        compiled(torch.randn(4, 8)).sum().backward()
    found = [r.getMessage() for r in caplog.records if "implicit fallback" in r.getMessage()]
    assert not any("gtpgraph" in message for message in found)
    assert any(getattr(op, "namespace", None) == "gtpgraph" for op in lowerings)
    assert compiled.plan.fused
    model.close()
