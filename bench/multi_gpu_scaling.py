"""Part ``scaling``: a captured step and eager FSDP2 on so many ranks, each with a batch of its own.

In: a model. Out: rows with the time of a step (forward, backward, gradients reduced; the slowest
rank's) and the memory that a rank needed, from building the model to the last step.

    ours:dp    gtp 1 x dp n: weights and main_grads whole on every rank
    ours:gtp   gtp n x dp 1: weights and main_grads in shards, as FSDP2's are
    fsdp2      torch's, eager

The jobs of a run differ in their number of ranks alone: a rank's work is the same in all of them.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

import gtpgraph as gg
from bench.multi_gpu_peers import Batch, Contender, fsdp2, gate, ours, reference
from bench.multi_gpu_rank import Rank
from bench.multi_gpu_timing import interleaved, slowest
from bench.steps import whole
from gtpgraph.gpt import GPT
from gtpgraph.models import build

CALLS = 5  # steps a sample
MIB = 1 << 20


def measure(at: Rank, label: str, name: str, overrides: dict[str, Any]) -> None:
    """Rows of one model on the job's ranks; a collective over the job.

    Args:
        label: the model's name in the case.
        name, overrides: as `gtpgraph.models.build` takes them.

    Raises:
        AssertionError: gradients are wrong.
    """
    dtype = torch.bfloat16 if at.on_gpu else torch.float32
    torch.manual_seed(0)
    net, make_batch = build(name, **overrides)
    net = net.to(dtype)  # stays on the CPU: each contender's copy counts as its memory
    batch = make_batch(0, at.rank, at.device)
    case = f"scaling:{label}:{net.config.batch}x{net.config.seq}:{at.world}"
    everyone = at.groups(dp=at.world)
    want = reference(copy.deepcopy(net).to(at.device), everyone, batch)
    made: dict[str, Contender] = {}
    wrappers: list[gg.DistributedDataParallel] = []
    memory: dict[str, dict[str, list[float]]] = {}
    for impl, make in _makers(at, net, everyone, batch, wrappers).items():
        made[impl], memory[impl] = _measured_memory(at, make)
    gate(at, made, want, torch.finfo(dtype).eps)
    times = interleaved(at, everyone, {impl: c.step for impl, c in made.items()}, CALLS)
    for impl, samples in times.items():
        at.add(case, impl, samples, dtype=str(dtype).removeprefix("torch."))
        for metric, values in memory[impl].items():
            at.add(case, impl, values, metric)
        peak = memory[impl].get("peak_bytes")
        tail = f", peak {peak[0] / MIB:,.0f} MiB a rank" if peak else ""
        middle = sorted(samples)[len(samples) // 2] / 1e3
        at.say(f"    {case} {impl:10} {middle:8.2f} ms a step{tail}")
    for wrapped in wrappers:
        wrapped.close()


def _makers(
    at: Rank,
    net: GPT,
    everyone: gg.ProcessGroups,
    batch: Batch,
    wrappers: list[gg.DistributedDataParallel],
) -> dict[str, Callable[[], Contender]]:
    """What builds and warms each contender; ours are added to `wrappers`."""

    def ours_over(gtp: int) -> Contender:
        groups = at.groups(dp=at.world // gtp, gtp=gtp)
        sharded = gg.shard(copy.deepcopy(net).to(at.device), groups)
        wrapped = gg.DistributedDataParallel(sharded, groups)
        wrappers.append(wrapped)
        compiled = gg.compile(wrapped, lowering="inductor" if at.on_gpu else "eager")
        run = whole(wrapped, compiled) if at.on_gpu else lambda *a: compiled(*a).backward()
        return ours(wrapped, run, batch).warm()

    makers: dict[str, Callable[[], Contender]] = {
        "fsdp2": lambda: fsdp2(copy.deepcopy(net).to(at.device), everyone, batch).warm(),
        "ours:dp": lambda: ours_over(1),
    }
    if at.world > 1:
        makers["ours:gtp"] = lambda: ours_over(at.world)
    return makers


def _measured_memory(
    at: Rank, make: Callable[[], Contender]
) -> tuple[Contender, dict[str, list[float]]]:
    """A contender, and the bytes that it took from its building on; nothing on the CPU.

    The building counts because a replay's own memory was allocated when it was captured.
    """
    if not at.on_gpu:
        return make(), {}
    gc.collect()
    torch.cuda.empty_cache()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    made = make()
    at.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    gc.collect()
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() - reserved
    return made, slowest(at, {"peak_bytes": [float(peak)], "reserved_bytes": [float(kept)]})
