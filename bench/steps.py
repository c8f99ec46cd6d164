"""Whole training steps (forward, backward, gradients in fp32 main_grads) beside their peers.

In: a model of gtpgraph.models in bf16 and one batch. Out: rows of the suites ``steps``, ``overlap``
and ``host``. Every implementation ends with the gradients in fp32 buffers: ours by
its accumulates, the peers by one ``_foreach_copy_`` behind the backward, the fastest plain way. A
sample is ten steps without a host synchronisation inside; implementations take turns.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    eager = whole(wrapped, wrapped)
    steps |= {
        "ours:eager": ours_step(wrapped, lambda: wrapped(*tokens).backward()),
        "ours:inductor": ours_step(wrapped, lambda: compiled(*tokens).backward()),
        "ours:regions": ours_step(wrapped, lambda: regions(*tokens).backward()),
        "ours:step": ours_step(wrapped, lambda: captured(*tokens)),
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


class PacedTransfer:
    """Stands for the network: copies of a bucket to pinned memory, as many bytes as fit `us`."""

    def __init__(self, flat: Tensor, num_bytes: int) -> None:
        self._pinned = torch.empty(num_bytes // 4, pin_memory=True)
        self._source = torch.zeros(num_bytes // 4, device=flat.device)

    def start(self, flat: Tensor) -> None:
        self._pinned.copy_(self._source, non_blocking=True)

    def finish(self, flat: Tensor) -> None:
        pass


@contextmanager
def transfers(model: gg.DistributedDataParallel, num_bytes: int) -> Iterator[None]:
    """Let every bucket's reduction be a paced transfer of its share of `num_bytes`."""
    before = [b.reduction for b in model.buckets]
    total = sum(b.flat.numel() for b in model.buckets)
    for bucket in model.buckets:
        share = num_bytes * bucket.flat.numel() // total // 4 * 4
        bucket.reduction = PacedTransfer(bucket.flat, share)
    yield
    for bucket, reduction in zip(model.buckets, before, strict=True):
        bucket.reduction = reduction


def bandwidth() -> float:
    """Bytes a second to pinned memory."""
    pinned = torch.empty(32 << 20, pin_memory=True)
    source = torch.zeros(32 << 20, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        pinned.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return pinned.numel() * 4 / (begin.elapsed_time(end) * 1e-3)


def overlap(run: harness.Run, repeats: int) -> list[dict]:  # type: ignore[type-arg]
    """Exposed transfer time under each dispatch; transfers take half as long as the backward."""
    net, tokens = make_model("gpt-124m", 8, 1024)
    wrapped = gg.DistributedDataParallel(gg.shard(net), bucket_mb=64)  # 8 buckets
    dispatches = ("after", "event", "in_graph")
    compiled = gg.compile(wrapped, lowering="eager")

    def steps() -> dict[str, Step]:
        made = {d: whole(wrapped, compiled, dispatch=d) for d in dispatches}
        steps = {d: ours_step(wrapped, lambda s=s: s(*tokens)) for d, s in made.items()}
        for step in steps.values():
            for _ in range(4):
                step()
        return steps

    quiet = sample(steps(), repeats)
    alone = statistics.median(quiet["event"])
    backward_us = alone * 2 / 3
    count = len(wrapped.buckets)
    num_bytes = int(bandwidth() * backward_us * 1e-6 / 2)
    sizes = [b.flat.numel() for b in wrapped.buckets]
    own = backward_us / 2 * sizes[-1] / sum(sizes)
    conditions = {
        "buckets": count, "transfer_us": round(backward_us / 2, 1), "gpus": 1,
        "network": "stand-in: copy engine to pinned memory", "step_alone_us": round(alone, 1),
        "last_bucket_us": round(own, 1),
    }  # fmt: skip
    with transfers(wrapped, num_bytes):
        busy = sample(steps(), repeats)
    rows = []
    for label in dispatches:
        exposed = [b - statistics.median(quiet[label]) for b in busy[label]]
        case = "gpt-124m:8x1024"
        rows.append(run.row(case, f"ours:{label}", exposed, None, conditions, "exposed_us"))
        rows.append(run.row(case, f"ours:{label}", busy[label], None, conditions))
        share = statistics.median(exposed) / (backward_us / 2)
        print(f"overlap {label:9} exposed {statistics.median(exposed):8.1f} us = {share:6.1%} of "
              f"{backward_us / 2:.1f} us of transfers ({count} buckets, the last takes "
            f"{own:.1f} us)", flush=True)  # fmt: skip
    wrapped.close()
    return rows


class Scales(nn.Module):
    """`count` one-element-wide weights: nothing but occurrences."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.last = nn.Linear(64, 64)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for scale in self.scales:
            total = total + x * scale
        return self.last(total).sum()


def host(run: harness.Run, repeats: int) -> list[dict]:  # type: ignore[type-arg]
    """Host time of one replayed step (zero_grad_buffer to finish_grad_sync), without the device."""
    rows = []
    for count in (10, 100, 1000):
        model = gg.DistributedDataParallel(gg.shard(Scales(count).cuda()))
        x = torch.ones(64, device="cuda")
        captured = whole(model, model)
        parts: dict[str, list[float]] = {"replay": [], "step": []}
        for k in range(repeats + 5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.zero_grad_buffer()
            middle = time.perf_counter()
            captured(x)
            after = time.perf_counter()
            model.finish_grad_sync()
            end = time.perf_counter()
            if k >= 5:
                parts["replay"].append((after - middle) * 1e6 / count)
                parts["step"].append((end - begin) * 1e6 / count)
        for part, samples in parts.items():
            metric = "host_us_per_occurrence"
            rows.append(run.row(f"occurrences:{count}", f"ours:{part}", samples, None, {}, metric))
            print(f"host {count:5} occurrences, {part:6}: {statistics.median(samples):.2f} us each")
        model.close()
    return rows
