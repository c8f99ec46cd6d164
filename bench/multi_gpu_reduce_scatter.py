"""Part ``reduce_scatter``: ways to reduce a bf16 gradient over a group into an fp32 buffer.

In: a contribution in bf16 on every rank, ``[ranks * N]``, and ``main`` ``[N]`` in fp32 on each.
Out: rows with time and error of ``main = scale * sum over the ranks of their piece``:

    nccl:bf16           reduce_scatter in bf16 (sums are rounded at every hop), then our accumulate
    nccl:fp32           cast, reduce_scatter in fp32 (twice the bytes), then our accumulate
    ours:all_to_all     all_to_all in bf16, then our shard_reduce, which sums in fp32
    ours:symmetric      copy into symmetric memory, then our kernel over the peers' buffers
    ours:symmetric_in   the same with the contribution already there

A case is named by the bytes of the whole contribution. Calls are eager: the host's work, which
decides the smallest sizes, is part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.multi_gpu_rank import Rank
from bench.multi_gpu_timing import interleaved, slowest
from gtpgraph import compat
from gtpgraph.kernels import ops, symmetric

SCALE = 0.125
MIB = 1 << 20
SIZES = tuple(k * MIB for k in (1, 4, 16, 64, 256, 1024))
DRY_SIZES = (MIB // 16, MIB)  # on the CPU
ALIGNED = 8  # elements: pieces are rows of 16 bytes
BYTES_A_SAMPLE, MAX_CALLS = 256 * MIB, 20

# Largest norm of the difference over the norm. fp32 sums of bf16 values round in fp32 alone; sums
# in bf16 round to 8 bits at each of `ranks - 1` hops.
FP32_BAR = 1e-6


@dataclass(frozen=True)
class Buffers:
    """One size's tensors on this rank: the contribution, the result, a zero for beta, and the
    contribution's place in symmetric memory (on the CPU an ordinary tensor)."""

    send: Tensor
    main: Tensor
    zero: Tensor
    shared: Tensor


def measure(at: Rank) -> None:
    """Rows of every size; a collective over the job.

    Raises:
        AssertionError: a result is further from fp64 than its arithmetic explains.
    """
    groups = at.groups(dp=at.world)
    group = groups.group("dp")
    for num_bytes in SIZES if at.on_gpu else DRY_SIZES:
        case = f"reduce_scatter:{num_bytes / MIB:g}MiB"
        piece = num_bytes // 2 // at.world // ALIGNED * ALIGNED
        buffers = _buffers(at, group, piece)
        calls = variants(at, group, buffers)
        errors = check(at, case, calls, buffers)
        count = max(1, min(MAX_CALLS, BYTES_A_SAMPLE // num_bytes))
        times = interleaved(at, groups, calls, count)
        _add_rows(at, case, times, errors, calls_a_sample=count, numel=piece * at.world)
        if at.on_gpu:
            symmetric.detach(buffers.shared, group.group_name)
        del buffers, calls


def _buffers(at: Rank, group: dist.ProcessGroup, piece: int) -> Buffers:
    """Filled buffers of one size, `piece` elements a rank; a collective where memory is shared."""
    send = contribution(at, at.rank, piece)
    shared = torch.empty_like(send)
    if at.on_gpu:
        raw = symmetric.allocate(send.numel() * send.element_size(), at.device)
        symmetric.attach(raw, group.group_name)
        shared = raw.view(send.dtype)
    shared.copy_(send)
    main = torch.full((piece,), float("nan"), device=at.device)
    return Buffers(send, main, torch.zeros(1, device=at.device), shared)


def contribution(at: Rank, rank: int, piece: int) -> Tensor:
    """What `rank` contributes, bf16 [ranks * piece], the same on whichever rank it is made."""
    generator = torch.Generator(device=at.device).manual_seed(rank)
    numel = at.world * piece
    return torch.randn(numel, generator=generator, device=at.device, dtype=torch.bfloat16)


def variants(at: Rank, group: dist.ProcessGroup, buffers: Buffers) -> dict[str, Callable[[], Any]]:
    """Every way, as a thunk that fills ``buffers.main``; each is a collective over `group`."""
    send, main, zero, shared = buffers.send, buffers.main, buffers.zero, buffers.shared
    narrow, wide = torch.empty_like(main, dtype=send.dtype), torch.empty_like(main)
    received = torch.empty_like(send)

    def nccl_bf16() -> None:
        compat.reduce_scatter(narrow, send, group=group)
        ops.accumulate(main, narrow, zero, 0, 0, SCALE, True)

    def nccl_fp32() -> None:
        compat.reduce_scatter(wide, send.float(), group=group)
        ops.accumulate(main, wide, zero, 0, 0, SCALE, True)

    def all_to_all() -> None:
        dist.all_to_all_single(received, send, group=group)
        ops.shard_reduce(main, received.view(at.world, -1), zero, 0, 0, SCALE, True)

    def symmetric_in() -> None:
        name = group.group_name
        ops.symm_reduce_scatter(main, shared, zero, 0, 0, SCALE, True, name, at.world)

    def symmetric_copied() -> None:
        shared.copy_(send)
        symmetric_in()

    return {
        "nccl:bf16": nccl_bf16,
        "nccl:fp32": nccl_fp32,
        "ours:all_to_all": all_to_all,
        "ours:symmetric": symmetric_copied,
        "ours:symmetric_in": symmetric_in,
    }


def check(
    at: Rank, case: str, calls: dict[str, Callable[[], Any]], buffers: Buffers
) -> dict[str, float]:
    """The largest error of the ranks by variant, each from fp64.

    Raises:
        AssertionError: an error above its bar, on any rank.
    """
    exact = expected(at, buffers.main.numel())
    norm = exact.norm()
    own: dict[str, list[float]] = {}
    for impl, call in calls.items():
        buffers.main.fill_(float("nan"))
        call()
        own[impl] = [float((buffers.main.double() - exact).norm() / norm)]
    errors = {impl: found[0] for impl, found in slowest(at, own).items()}
    narrow_bar = torch.finfo(torch.bfloat16).eps * at.world / 2
    bars = {impl: narrow_bar if impl == "nccl:bf16" else FP32_BAR for impl in errors}
    # NaN must not pass; the largest of the ranks' could hide it, so this rank's own counts too.
    wrong = [i for i, bar in bars.items() if not (errors[i] <= bar and own[i][0] <= bar)]
    if wrong:
        raise AssertionError(
            f"{case}: expected errors of at most {FP32_BAR:g} from fp64 (nccl:bf16 "
            f"{narrow_bar:.1e}), got { ({impl: errors[impl] for impl in wrong}) }"
        )
    return errors


def expected(at: Rank, piece: int) -> Tensor:
    """This rank's piece of the scaled sum, fp64 [piece]."""
    total = torch.zeros(piece, dtype=torch.float64, device=at.device)
    for rank in range(at.world):
        total += contribution(at, rank, piece)[at.rank * piece : (at.rank + 1) * piece]
    return total * SCALE


def _add_rows(
    at: Rank, case: str, times: dict[str, list[float]], errors: dict[str, float], **conditions: Any
) -> None:
    for impl, samples in times.items():
        at.add(case, impl, samples, calls="eager", **conditions)
        at.add(case, impl, [errors[impl]], "error", against="fp64")
        middle = sorted(samples)[len(samples) // 2]
        at.say(f"    {case:24} {impl:18} {middle:10.1f} us, error {errors[impl]:.1e} from fp64")
