"""Memory of a step, a long run of replays, and the kernels that handle gradients.

In: models of gtpgraph.models on one GPU. Out: rows of suite ``memory``.
"""

from __future__ import annotations

import gc

import torch

import gtpgraph as gg
from bench import harness
from bench.steps import make_model, ours_step, whole
from gtpgraph.models import build


def memory(run: harness.Run) -> list[dict]:  # type: ignore[type-arg]
    """Peak memory of a step, eager, compiled and captured, each alone on the device; pool bytes."""
    rows = []
    for label in ("eager", "inductor", "regions", "step"):
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        net, tokens = make_model("gpt-124m", 8, 1024)
        model = gg.DistributedDataParallel(gg.shard(net))
        replay = "cuda" if label == "regions" else None
        forward = model if label == "eager" else gg.compile(model, replay=replay)
        captured = whole(model, forward) if label == "step" else None
        step = ours_step(
            model, lambda f=forward, c=captured, t=tokens: c(*t) if c else f(*t).backward()
        )
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        found = {
            "peak_bytes": peak,
            "held_bytes": held,
            "reserved_bytes": torch.cuda.memory_reserved(),
            "pool_bytes": pool_bytes(),
        }
        for metric, value in found.items():
            rows.append(run.row("gpt-124m:8x1024", f"ours:{label}", [value], None, {}, metric))
        print(f"memory {label:9} peak {peak >> 20} MiB, held {held >> 20} MiB, "
              f"reserved {torch.cuda.memory_reserved() >> 20} MiB, graph pools "
              f"{pool_bytes() >> 20} MiB", flush=True)  # fmt: skip
        model.close()
        del net, model, forward, captured, step
    return rows


def pool_bytes() -> int:
    """What the private memory pools of captured graphs hold of the device."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def soak(run: harness.Run, replays: int = 10_000) -> list[dict]:  # type: ignore[type-arg]
    """Ten thousand replays: memory flat, gradients of the first and the last bitwise equal."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, make_batch = build("mtp-tiny")
    batch = make_batch(0, 0, "cuda")
    model = gg.DistributedDataParallel(gg.shard(net.to("cuda")))
    torch.use_deterministic_algorithms(True, warn_only=True)
    captured = whole(model, gg.compile(model, lowering="eager"))
    step = ours_step(model, lambda: captured(*batch))
    for _ in range(3):
        step()
    first = [b.flat.clone() for b in model.buckets]
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()
    for _ in range(replays):
        step()
    torch.cuda.synchronize()
    same = all(torch.equal(b.flat, f) for b, f in zip(model.buckets, first, strict=True))
    growth = torch.cuda.memory_allocated() - memory
    torch.use_deterministic_algorithms(False)
    print(f"soak {replays} replays: gradients bitwise equal {same}, memory growth {growth} bytes")
    conditions = {"replays": replays, "bitwise_equal": same, "deterministic_algorithms": True}
    model.close()
    return [run.row("mtp-tiny", "ours:step", [growth], None, conditions, "growth_bytes")]


def gradient_kernels(run: harness.Run) -> list[dict]:  # type: ignore[type-arg]
    """Kernels that one compiled step launches for its gradients, with and without fusing."""
    from torch.profiler import ProfilerActivity, profile

    net, tokens = make_model("gpt-124m", 1, 512)
    model = gg.DistributedDataParallel(gg.shard(net))
    rows = []
    for fuse in (False, True):
        compiled = gg.compile(model, fuse=fuse)
        step = ours_step(model, lambda c=compiled: c(*tokens).backward())
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        counts: dict[str, list[float]] = {}
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found = counts.setdefault(event.name[:60], [0, 0.0])
                found[0] += 1
                found[1] += event.device_time
        total = sum(n for n, _ in counts.values())
        ours = {k: v for k, v in counts.items() if any(w in k for w in OUR_KERNELS)}
        label = "ours:fused" if fuse else "ours:unfused"
        print(f"kernels {label}: {total:.0f} in all, for gradients:")
        for name, (count, time_us) in sorted(ours.items()):
            print(f"    {count:4.0f} x {name}  {time_us:.0f} us")
        number = sum(n for n, _ in ours.values())
        rows.append(run.row("gpt-124m:1x512", label, [number], None, {"all": total}, "launches"))
    model.close()
    return rows


# What reads or writes gradients of weights: ours, cuBLAS adding in place, and an embedding's own.
OUR_KERNELS = (
    "accumulate", "many_kernel", "wgrad_gemm", "shard_reduce", "prepare_kernel", "scatter_kernel",
    "links_kernel", "badd", "embedding_dense_backward",
)  # fmt: skip
