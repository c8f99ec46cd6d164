"""Whole training steps (forward, backward, gradients in fp32 main_grads) beside their peers.

In: a model of gtpgraph.models in bf16 and one batch. Out: rows of the suite ``steps``. Every
implementation ends with the gradients in fp32 buffers: ours by its accumulates, the peers by one
``_foreach_copy_`` behind the backward, the fastest plain way. A sample is ten steps without a host
synchronisation inside; implementations take turns.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gtpgraph as gg
from bench import harness
from gtpgraph.models import build

Step = Callable[[], Any]
STEPS_A_SAMPLE = 10


class Plain:
    """A plain model with fp32 gradient buffers, as a user without gtpgraph would write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.mains = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]

    def step(self, forward: Callable[..., Tensor], batch: tuple[Any, ...]) -> Step:
        def run() -> None:
            forward(*batch).backward()
            torch._foreach_copy_(self.mains, [p.grad for p in self.params])
            for param in self.params:
                param.grad = None

        return run

    def bare_graph(self, forward: Callable[..., Tensor], batch: tuple[Any, ...]) -> Step:
        """The limit: the same body, and our accumulate for each weight, in one bare CUDA graph."""
        zero = torch.zeros(1, device="cuda")
        flats = {id(p): m.view(-1) for p, m in zip(self.params, self.mains, strict=True)}

        def hook(param: Tensor) -> None:
            assert param.grad is not None
            torch.ops.gtpgraph.accumulate(flats[id(param)], param.grad, zero, 0, 0, 1.0, True)
            param.grad = None

        handles = [p.register_post_accumulate_grad_hook(hook) for p in self.params]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                forward(*batch).backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(*batch).backward()
        for handle in handles:
            handle.remove()

        def replay() -> None:
            graph.replay()
            _ = self  # the graph's parameters and buffers must outlive it

        return replay


def ours_step(model: gg.DistributedDataParallel, run: Callable[[], Any]) -> Step:
    """A complete step as a user writes it."""

    def step() -> None:
        model.zero_grad_buffer()
        run()
        model.finish_grad_sync()

    return step


def whole(model: gg.DistributedDataParallel, forward: Any, **kw: Any) -> Any:
    """`forward` and its backward as one captured step."""

    def step(*batch: Any) -> Tensor:
        loss: Tensor = forward(*batch)
        loss.backward()
        return loss

    return gg.capture(step, model, **kw)


def make_model(name: str, batch: int, seq: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model, make_batch = build(name, batch=batch, seq=seq)
    return model.to("cuda", torch.bfloat16), make_batch(0, 0, "cuda")


def implementations(name: str, batch: int, seq: int) -> dict[str, Step]:
    """Every way to run the case, warm."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    net, tokens = make_model(name, batch, seq)
    wrapped = gg.DistributedDataParallel(gg.shard(copy.deepcopy(net)))
    plain = Plain(net)
    inductor = torch.compile(net)
    steps = {
        "eager": plain.step(net, tokens),
        "inductor": plain.step(inductor, tokens),
        "reduce-overhead": plain.step(torch.compile(net, mode="reduce-overhead"), tokens),
        "limit:inductor": None,
        "make_graphed_callables": None,
    }
    compiled = gg.compile(wrapped)
    regions = gg.compile(wrapped, replay="cuda")
    captured = whole(wrapped, compiled)
    unfused = whole(wrapped, gg.compile(wrapped, fuse=False))
    eager = whole(wrapped, wrapped)
    steps |= {
        "ours:eager": ours_step(wrapped, lambda: wrapped(*tokens).backward()),
        "ours:inductor": ours_step(wrapped, lambda: compiled(*tokens).backward()),
        "ours:regions": ours_step(wrapped, lambda: regions(*tokens).backward()),
        "ours:step": ours_step(wrapped, lambda: captured(*tokens)),
        "ours:step-unfused": ours_step(wrapped, lambda: unfused(*tokens)),
        "ours:step-eager": ours_step(wrapped, lambda: eager(*tokens)),
    }
    ready: dict[str, Step] = {}
    for label, step in steps.items():
        begin = time.perf_counter()
        try:
            if label == "limit:inductor":
                twin = copy.deepcopy(net)
                step = Plain(twin).bare_graph(torch.compile(twin), tokens)
            if label == "make_graphed_callables":
                twin = copy.deepcopy(net)
                step = Plain(twin).step(torch.cuda.make_graphed_callables(twin, tokens), tokens)
            assert step is not None
            for _ in range(4):
                step()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot run the case is named, not fatal
            print(f"{name}: {label} did not run: {type(error).__name__}: {str(error)[:300]}")
            continue
        print(f"{name}: {label} warm in {time.perf_counter() - begin:.1f} s", flush=True)
        ready[label] = step
    check(wrapped, plain, ready)
    return ready


def check(wrapped: gg.DistributedDataParallel, plain: Plain, ready: dict[str, Step]) -> None:
    """Correctness first: ours against plain PyTorch's eager gradients of the same bf16 model, with
    the error of Inductor's as the yardstick."""
    names = [n for n, _ in plain.model.named_parameters()]

    def peer(label: str) -> dict[str, Tensor]:
        ready[label]()
        return {n: m.clone() for n, m in zip(names, plain.mains, strict=True)}

    want = peer("eager")
    scale = {n: w.norm().clamp_min(1e-20) for n, w in want.items()}
    other = peer("inductor") if "inductor" in ready else want
    bar = max(0.02, 3 * max(float((other[n] - w).norm() / scale[n]) for n, w in want.items()))
    for label in [r for r in ready if r.startswith("ours")]:
        ready[label]()
        worst = max(float((wrapped.full_grad(n) - w).norm() / scale[n]) for n, w in want.items())
        print(f"check {label}: largest relative difference from eager {worst:.2e} (bar {bar:.2e})")
        assert worst < bar, label


def sample(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """us a step, by implementation, interleaved."""
    samples: dict[str, list[float]] = {label: [] for label in steps}
    order = list(steps.items())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        order.append(order.pop(0))
        for label, step in order:
            torch.cuda.synchronize()
            begin.record()
            for _ in range(STEPS_A_SAMPLE):
                step()
            end.record()
            end.synchronize()
            samples[label].append(begin.elapsed_time(end) * 1e3 / STEPS_A_SAMPLE)
    return samples


def measure(run: harness.Run, name: str, batch: int, seq: int, repeats: int) -> list[dict]:  # type: ignore[type-arg]
    """Rows of one case."""
    case = f"{name}:{batch}x{seq}"
    steps = implementations(name, batch, seq)
    samples = sample(steps, repeats)
    floor = statistics.median(samples["limit:inductor"]) if "limit:inductor" in samples else None
    conditions = {"dtype": "bf16", "main_grad": "fp32", "gpus": 1, "steps_a_sample": STEPS_A_SAMPLE}
    rows = [run.row(case, label, s, floor, conditions) for label, s in samples.items()]
    for row in sorted(rows, key=lambda r: float(r["value"])):
        ratio = f"{row['value'] / floor:.3f}" if floor else ""
        print(
            f"{case:20} {row['impl']:24} {row['value'] / 1e3:8.3f} ms "
            f"[{row['p20'] / 1e3:.3f}, {row['p80'] / 1e3:.3f}]  x limit {ratio}",
            flush=True,
        )
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return rows
