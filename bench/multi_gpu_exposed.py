"""Part ``exposed``: what each dispatch leaves unhidden of a step's communication.

In: a model, its layout on the ranks. Out: rows with exposed and total communication (from traces of
single steps, see `bench.multi_gpu_trace`) and the time of a step, of ours under each dispatch and
of torch's wrappers over all ranks on the same plain model. A value is the largest of the ranks'.

All run the same eager kernels in the same dtype; ours are replayed from one captured graph. On the
wire: ours reduce-scatters gradients in fp32, and with gtp > 1 gathers weights in the model's dtype;
DDP all-reduces gradients in the model's dtype; FSDP2 gathers weights in it, twice a step, and
reduce-scatters gradients in fp32. SimpleFSDP is not in torch and is not run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gtpgraph as gg
from bench.multi_gpu_peers import Batch, Contender, ddp, fsdp2, gate, ours, reference
from bench.multi_gpu_rank import Rank
from bench.multi_gpu_timing import interleaved, slowest
from bench.multi_gpu_trace import traced
from bench.steps import whole
from gtpgraph.gpt import GPT
from gtpgraph.graph.replay import DISPATCH
from gtpgraph.models import build

CALLS = 2  # steps a sample
MAX_TRACES = 10  # a trace takes seconds


def measure(at: Rank, label: str, name: str, overrides: dict[str, Any], gtp: int) -> None:
    """Rows of one model in one layout; a collective over the job.

    Args:
        label: the model's name in the case.
        name, overrides: as `gtpgraph.models.build` takes them.
        gtp: size of that axis; the rest is dp.

    Raises:
        AssertionError: gradients are wrong. ValueError: a trace holds no communication.
    """
    dtype = torch.bfloat16 if at.on_gpu else torch.float32
    torch.manual_seed(0)
    net, make_batch = build(name, **overrides)
    net = net.to(at.device, dtype)
    batch = make_batch(0, at.rank, at.device)
    dp = at.world // gtp
    case = f"exposed:{label}:{net.config.batch}x{net.config.seq}:gtp{gtp}xdp{dp}"
    everyone = at.groups(dp=at.world)
    want = reference(net, everyone, batch)
    sharded, groups = copy.deepcopy(net), at.groups(dp=dp, gtp=gtp)
    wrapped = gg.DistributedDataParallel(gg.shard(sharded, groups), groups)
    contenders = _ours(at, wrapped, batch) | _peers(at, net, everyone, batch)
    gate(at, contenders, want, torch.finfo(dtype).eps)
    del want
    conditions: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."), "gtp": gtp, "dp": dp,
        "simple_fsdp": "not run: not in torch",
    }  # fmt: skip
    steps = {label: contender.step for label, contender in contenders.items()}
    times = interleaved(at, everyone, steps, CALLS)
    traces = _traces(at, everyone, steps)
    for impl, samples in times.items():
        at.add(case, impl, samples, **conditions)
        for metric, values in traces.get(impl, {}).items():
            at.add(case, impl, values, metric, **conditions)
        at.say(_line(case, impl, samples, traces.get(impl)))
    wrapped.close()


def _ours(at: Rank, wrapped: gg.DistributedDataParallel, batch: Batch) -> dict[str, Contender]:
    """A captured step under each dispatch; the compiled one, uncaptured, on the CPU."""
    compiled = gg.compile(wrapped, lowering="eager")
    if at.on_gpu:
        runs: dict[str, Callable[..., Any]] = {
            f"ours:{d}": whole(wrapped, compiled, dispatch=d) for d in DISPATCH
        }
    else:
        at.say("    captured steps and traces are left out on the CPU")
        runs = {"ours:compiled": lambda *args: compiled(*args).backward()}
    return {label: ours(wrapped, run, batch).warm() for label, run in runs.items()}


def _peers(at: Rank, net: GPT, everyone: gg.ProcessGroups, batch: Batch) -> dict[str, Contender]:
    """Those of torch's wrappers that can run the model, on copies of it."""
    makers: dict[str, Callable[..., Contender]] = {"ddp": ddp, "fsdp2": fsdp2}
    found = {}
    for label, make in makers.items():
        made = at.attempt(label, partial(_on_a_copy, make, net, everyone, batch))
        if made is not None:
            found[label] = made
    return found


def _on_a_copy(
    make: Callable[..., Contender], net: GPT, everyone: gg.ProcessGroups, batch: Batch
) -> Contender:
    return make(copy.deepcopy(net), everyone, batch).warm()


def _traces(
    at: Rank, everyone: gg.ProcessGroups, steps: dict[str, Callable[[], Any]]
) -> dict[str, dict[str, list[float]]]:
    """Samples in us by implementation and metric; none on the CPU, which has no kernels."""
    if not at.on_gpu:
        return {}
    found: dict[str, dict[str, list[float]]] = {}
    seen: dict[str, list[Any]] = {label: [] for label in steps}
    for _ in range(min(at.repeats, MAX_TRACES)):
        for label, step in steps.items():
            seen[label].append(traced(step, lambda: at.barrier(everyone), at.synchronize))
    for label, samples in seen.items():
        own = {
            "exposed_us": [s.exposed for s in samples],
            "communication_us": [s.communication for s in samples],
            "compute_us": [s.compute for s in samples],
        }
        found[label] = slowest(at, own)
    return found


def _line(case: str, impl: str, samples: list[float], traces: dict[str, list[float]] | None) -> str:
    middle = sorted(samples)[len(samples) // 2] / 1e3
    text = f"    {case} {impl:14} {middle:8.2f} ms a step"
    if traces is not None:
        exposed, total = (
            sorted(traces[k])[len(traces[k]) // 2] / 1e3 for k in ("exposed_us", "communication_us")
        )
        text += f", exposed {exposed:.2f} of {total:.2f} ms of communication"
    return text
