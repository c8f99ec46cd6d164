"""What each dispatch leaves exposed of the buckets' transfers.

In: a captured step whose buckets are sent to pinned memory by a copy engine, which stands for the
network. Out: rows of suite ``overlap``: the step's time with transfers less that without.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import gtpgraph as gg
from bench import harness
from bench.steps import Step, make_model, ours_step, sample, whole


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


def transfer_times(model: gg.DistributedDataParallel, repeats: int = 5) -> list[float]:
    """us of each bucket's transfer on an idle device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for bucket in model.buckets:
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin.record()
            bucket.reduction.start(bucket.flat)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        times.append(statistics.median(samples))
    return times


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
    """Exposed transfer time under each dispatch; transfers take about half as long as the backward,
    and what they take is measured."""
    net, tokens = make_model("gpt-124m", 8, 1024)
    wrapped = gg.DistributedDataParallel(gg.shard(net), bucket_mb=80)  # 8 buckets
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
    num_bytes = int(bandwidth() * backward_us * 1e-6 / 2)
    with transfers(wrapped, num_bytes):
        own = transfer_times(wrapped)
        busy = sample(steps(), repeats)
    conditions = {
        "buckets": len(wrapped.buckets), "transfer_us": round(sum(own), 1), "gpus": 1,
        "network": "stand-in: copy engine to pinned memory", "step_alone_us": round(alone, 1),
        "last_bucket_us": round(own[-1], 1),
    }  # fmt: skip
    rows = []
    for label in dispatches:
        exposed = [b - statistics.median(quiet[label]) for b in busy[label]]
        case = "gpt-124m:8x1024"
        rows.append(run.row(case, f"ours:{label}", exposed, None, conditions, "exposed_us"))
        rows.append(run.row(case, f"ours:{label}", busy[label], None, conditions))
        median = statistics.median(exposed)
        print(f"overlap {label:9} exposed {median:8.1f} us = {median / sum(own):6.1%} of "
              f"{sum(own):.1f} us of transfers ({len(own)} buckets, the last takes "
              f"{own[-1]:.1f} us)", flush=True)  # fmt: skip
    wrapped.close()
    return rows
