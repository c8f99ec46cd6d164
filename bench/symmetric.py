"""Symmetric-memory reduce-scatter on four ranks that share one GPU: right, captured, and its parts.

The ranks take turns on the GPU, so the times say what the pieces cost beside each other here and
nothing about several GPUs; the rows carry that condition.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import Run
from bench.job import job_groups
from gtpgraph.kernels import ops
from gtpgraph.testing import RankPool

NAME = "symmetric_reduce_scatter"
RANKS, NUMEL, SCALE = 4, 1 << 23, 0.25


def replay_us(graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup, repeats: int) -> list[float]:
    """Replays of a captured graph, us each; the ranks start each one together."""
    samples = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        dist.barrier(group=group)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return samples


def on_rank(rank: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Check the captured operator against the CPU's collective, then time it and its parts."""
    from torch.distributed import _symmetric_memory

    from gtpgraph.kernels import symmetric

    torch.cuda.set_device(0)
    group = job_groups(gtp=ranks).gtp
    assert isinstance(group, dist.ProcessGroup)
    name = group.group_name
    torch.manual_seed(rank)
    host = torch.randn(ranks * NUMEL).bfloat16()
    expected, zero = torch.empty(NUMEL), torch.zeros(1)
    ops.symm_reduce_scatter(expected, host, zero, 0, 0, SCALE, True, name, ranks)

    buffer = _symmetric_memory.empty(ranks * NUMEL, dtype=torch.bfloat16, device="cuda:0")
    buffer.copy_(host)
    peers = symmetric.attach(buffer, name)
    flat, beta = torch.full((NUMEL,), float("nan"), device="cuda"), torch.zeros(1, device="cuda")

    def whole() -> None:
        ops.symm_reduce_scatter(flat, buffer, beta, 0, 0, SCALE, True, name, ranks)

    def kernel() -> None:
        symmetric.launch_reduce_scatter(
            flat, peers.table, buffer.dtype, rank, NUMEL, beta, 0, 0, SCALE, True
        )

    def barriers() -> None:
        peers.barrier(0)
        peers.barrier(1)

    samples = {}
    for label, part in (("ours", whole), ("part:kernel", kernel), ("part:barriers", barriers)):
        part()  # compiles
        torch.cuda.synchronize()
        dist.barrier(group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            part()
        graph.replay()
        torch.cuda.synchronize()
        if label == "ours" and not torch.equal(flat.cpu(), expected):
            raise AssertionError("symmetric reduce-scatter differs from the CPU's collective")
        samples[label] = replay_us(graph, group, repeats)
    return samples


def measure(run: Run, repeats: int) -> list[dict[str, Any]]:
    """Rows of rank 0, and a printed line each."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with RankPool(RANKS) as pool:
        samples = pool.run(on_rank, repeats)[0]
    conditions = {
        "ranks": RANKS,
        "numel": NUMEL,
        "wire": "bf16",
        "one_gpu": "four ranks take turns on one GPU: no statement about several GPUs",
    }
    rows = [run.row(NAME, impl, times, None, conditions) for impl, times in samples.items()]
    for row in rows:
        print(f"{NAME:32} {row['impl']:22} {row['value']:9.1f} [{row['p20']}, {row['p80']}] us")
    return rows
