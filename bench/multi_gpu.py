"""Suite ``multi_gpu``: real ranks over NCCL, one GPU a rank.

    torchrun --nproc-per-node N bench/run.py multi_gpu [--only JOB] [--out FILE] [--repeats R]

In: N GPUs, two or more. Out: rows of suite ``multi_gpu``, printed and appended by rank 0:

    readiness       every way to run a step against eager and plain PyTorch in fp64
    exposed         communication that nothing hides, beside torch's data-parallel wrappers
    reduce_scatter  ways to reduce a bf16 gradient into an fp32 buffer
    scaling         step time and memory on 1, 2, ... N GPUs

Each part is several jobs (`JOB` chooses those whose names contain it), each in processes of its
own (see `bench.multi_gpu_supervisor`). ``--device cpu`` runs tiny models on gloo ranks: it
exercises this code where there is no GPU, and its rows go nowhere unless ``--out`` says where.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.multi_gpu_supervisor import Job, Settings, Supervisor
from gtpgraph.config import torchrun_world

COMMAND = "torchrun --nproc-per-node N bench/run.py multi_gpu"

# Label, built-in model, overrides.
Model = tuple[str, str, dict[str, Any]]
_MOE = {"vocab": 50304, "hidden": 1024, "layers": 8, "heads": 16, "experts": 8, "seq": 1024}
EXPOSED: tuple[Model, ...] = (
    ("gpt-1.3b", "gpt-1.3b", {"batch": 2, "seq": 2048}),
    ("mtp-124m", "mtp-124m", {"batch": 8, "seq": 1024}),
    ("moe-0.7b", "moe-tiny", _MOE),
)
SCALED: Model = ("gpt-124m", "gpt-124m", {"batch": 8, "seq": 1024})
DRY_EXPOSED: tuple[Model, ...] = tuple((n, n, {}) for n in ("gpt-tiny", "mtp-tiny", "moe-tiny"))
DRY_SCALED: Model = ("gpt-tiny", "gpt-tiny", {})


def needs(device: str) -> str | None:
    """What this process lacks to run the suite on `device` ("cuda" or "cpu"); None for nothing."""
    world = torchrun_world()
    if world is None:
        return f"multi_gpu: expected to be started by torchrun, got a plain process. Run {COMMAND}"
    if world < 2:
        return f"multi_gpu: expected 2 ranks or more, got {world}. Run {COMMAND}, N >= 2"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    devices = torch.cuda.device_count()
    if device == "cuda" and devices < ranks:
        return (
            f"multi_gpu: expected one CUDA device a rank, got {ranks} ranks here and {devices} "
            "device(s). It needs two GPUs or more; --device cpu exercises the code on gloo ranks"
        )
    return None


def layouts(world: int) -> list[tuple[int, int]]:
    """(gtp, dp) of `world` ranks: gtp 2 where it divides them, and gtp over all of them."""
    found = [(gtp, world // gtp) for gtp in (2, world) if world % gtp == 0]
    return list(dict.fromkeys(found))


def sizes(world: int) -> list[int]:
    """1, 2, 4, ... below `world`, and `world`."""
    return [*(2**k for k in range(world.bit_length()) if 2**k < world), world]


def jobs(world: int, device: str = "cuda") -> list[Job]:
    """All jobs of the suite on `world` ranks, in order; on "cpu" with tiny models."""
    dry = device == "cpu"
    scaled = _named(DRY_SCALED if dry else SCALED)
    return [
        *(
            Job(
                f"readiness:{model}:gtp{gtp}xdp{dp}:{lowering}",
                "bench.multi_gpu_readiness:measure",
                world,
                {"model": model, "gtp": gtp, "lowering": lowering},
            )
            for model in ("mtp-tiny", "moe-tiny")
            for gtp, dp in layouts(world)
            for lowering in ("eager", "inductor")
        ),
        *(
            Job(
                f"exposed:{model[0]}:gtp{gtp}xdp{world // gtp}",
                "bench.multi_gpu_exposed:measure",
                world,
                {**_named(model), "gtp": gtp},
            )
            for model in (DRY_EXPOSED if dry else EXPOSED)
            for gtp in (1, 2)
            if world % gtp == 0
        ),
        Job("reduce_scatter", "bench.multi_gpu_reduce_scatter:measure", world),
        *(
            Job(f"scaling:{ranks}", "bench.multi_gpu_scaling:measure", ranks, scaled)
            for ranks in sizes(world)
        ),
    ]


def _named(model: Model) -> dict[str, Any]:
    return dict(zip(("label", "name", "overrides"), model, strict=True))


def multi_gpu(run: harness.Run, options: argparse.Namespace) -> int:
    """Run the jobs that ``options.only`` names; returns how many failed, on rank 0.

    Args:
        run: what all rows share.
        options: ``only``, ``out`` (None: no rows are kept), ``repeats``, ``device``, ``limit``
            (seconds a job).

    Raises:
        SystemExit: status 2, with a text on stderr, when torchrun or GPUs are lacking or no job has
            that name.
    """
    rank, world = (int(os.environ.get(key, "0")) for key in ("RANK", "WORLD_SIZE"))
    problem = needs(options.device)
    every = [] if problem else jobs(world, options.device)
    chosen = [job for job in every if options.only in job.name]
    if not chosen:
        names = ", ".join(job.name for job in every)
        problem = problem or f"multi_gpu: no job has {options.only!r} in its name; jobs: {names}"
        if rank != 0:
            raise SystemExit(0)  # torchrun ends all ranks when one fails: rank 0 must have its say
        print(problem, file=sys.stderr)
        raise SystemExit(2)
    if options.device == "cpu":
        run = dataclasses.replace(run, common={**run.common, "device": "cpu"})
    store, _, _ = next(dist.rendezvous("env://"))
    settings = Settings(run, options.device, options.repeats, options.limit, options.out)
    failed = Supervisor(store, rank, world, settings).run(chosen)
    if rank == 0:
        print(f"multi_gpu: {len(chosen) - len(failed)} of {len(chosen)} jobs right")
        print("\n".join(f"    failed: {name}" for name in failed), end="\n" if failed else "")
    return len(failed) if rank == 0 else 0
