"""Host cost of a replayed step, by number of occurrences.

In: models that are nothing but small weights. Out: rows of suite ``host``, microseconds a report.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gtpgraph as gg
from bench import harness
from bench.steps import whole


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


def bare_replay(count: int) -> Callable[[Tensor], None]:
    """What a replay costs by itself: the same forward and backward in a bare graph, and the copy of
    its input."""
    net, held = Scales(count).cuda(), torch.ones(64, device="cuda")
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net(held).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(held).backward()

    def step(x: Tensor) -> None:
        held.copy_(x)
        graph.replay()
        _ = net  # its weights must outlive the graph

    return step


def host(run: harness.Run, repeats: int) -> list[dict]:  # type: ignore[type-arg]
    """Host time of one replayed step (zero_grad_buffer to finish_grad_sync), without the device."""
    rows = []
    for count in (10, 100, 1000):
        model = gg.DistributedDataParallel(gg.shard(Scales(count).cuda()))
        x = torch.ones(64, device="cuda")
        captured, bare = whole(model, model), bare_replay(count)
        parts: dict[str, list[float]] = {"ours:replay": [], "ours:step": [], "bare:replay": []}
        for k in range(repeats + 5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.zero_grad_buffer()
            middle = time.perf_counter()
            captured(x)
            after = time.perf_counter()
            model.finish_grad_sync()
            end = time.perf_counter()
            torch.cuda.synchronize()
            bare_begin = time.perf_counter()
            bare(x)
            bare_end = time.perf_counter()
            if k >= 5:
                parts["ours:replay"].append((after - middle) * 1e6 / count)
                parts["ours:step"].append((end - begin) * 1e6 / count)
                parts["bare:replay"].append((bare_end - bare_begin) * 1e6 / count)
        for part, samples in parts.items():
            metric = "host_us_per_occurrence"
            rows.append(run.row(f"occurrences:{count}", part, samples, None, {}, metric))
            print(
                f"host {count:5} occurrences, {part:11}: {statistics.median(samples):.2f} us each"
            )
        model.close()
    return rows
