"""Part ``readiness``: gradients and reports of every way to run a step, on real ranks.

In: a tiny model in fp32, its layout, a lowering. Out: rows with each way's largest gradient error
and its number of reports, or one error that names every way that is wrong.

    reference   plain PyTorch in fp64 on the concatenated batch of all ranks
    eager       the wrapped model as it is
    compiled    its regions run
    regions     its regions replayed as CUDA graphs            under each dispatch
    step        the whole step replayed as one CUDA graph      under each dispatch

What must hold of each: gradients and this rank's loss near the reference's and near eager's, sorted
reports equal to eager's, and the reports of graphs in the plan's order.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gtpgraph as gg
from bench.multi_gpu_rank import Rank
from gtpgraph.gpt import GPT, GPTConfig
from gtpgraph.graph.driver import Driver
from gtpgraph.graph.replay import DISPATCH
from gtpgraph.models import build
from gtpgraph.testing import fp64_grads, max_error

SEEDS = (0, 1, 0, 1)  # of the steps: a first run, a capture and its replay, two replays
BUCKET_MB = 0.05  # several buckets, even of a tiny model
BAR = 1e-5  # largest relative error of a gradient or a loss: fp32, sums in any order
SHARED = "layers.*.mlp.shared_experts.*"  # of the MoE model, finalised by eager Python
EAGER = "ours:eager"

Batches = Mapping[int, tuple[Tensor, ...]]  # by seed


@dataclass(frozen=True)
class Way:
    """One way to run forward and backward: ``call(*batch)`` returns the loss. `compiled` holds the
    plan of its graphs, where it has any."""

    name: str
    call: Callable[..., Tensor]
    compiled: gg.CompiledModel | None = None


@dataclass
class Seen:
    """What one way did, step by step.

    Fields:
        grads: name -> whole gradient, fp32, on the CPU.
        losses: of this rank.
        reports: sorted (weight, use).
        in_order: whether the reports of graphs came as the plan says.
        early: buckets whose reduction had started when the backward was over.
    """

    grads: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reports: list[list[tuple[str, int]]] = field(default_factory=list)
    in_order: list[bool] = field(default_factory=list)
    early: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """Plain PyTorch in fp64, by seed: gradients on the concatenated batch, this rank's loss."""

    grads: dict[int, dict[str, Tensor]]
    losses: dict[int, float]


def measure(at: Rank, model: str, gtp: int, lowering: str) -> None:
    """Rows of one model in one layout under one lowering; a collective over the job.

    Raises:
        AssertionError: ways are wrong on this rank; the text names each of them.
    """
    dp = at.world // gtp
    case = f"readiness:{model}:gtp{gtp}xdp{dp}:{lowering}"
    torch.manual_seed(0)
    net, make_batch = build(model)
    reference = reference_of(net, make_batch, at.rank, at.world)
    batches = {seed: make_batch(seed, at.rank, at.device) for seed in set(SEEDS)}
    groups = at.groups(dp=dp, gtp=gtp)
    wrapped = gg.DistributedDataParallel(
        gg.shard(net.to(at.device), groups), groups, bucket_mb=BUCKET_MB
    )
    if not at.on_gpu:
        at.say("    regions and step, which replay CUDA graphs, are left out on the CPU")
    eager, wrong = Seen(), []
    for way in ways(wrapped, lowering, net.config, graphs=at.on_gpu):
        seen = run_way(way, wrapped, batches)
        if way.name == EAGER:
            eager, wrong = seen, count_problems(seen.reports[0], net.config)
        wrong += [f"{way.name}: {problem}" for problem in problems_of(seen, eager, reference)]
        _add_rows(at, case, way, seen, reference, buckets=len(wrapped.buckets))
    wrapped.close()
    if wrong:
        raise AssertionError(f"{case}, rank {at.rank}: " + "; ".join(wrong))


def reference_of(
    net: GPT, make_batch: Callable[..., tuple[Tensor, ...]], rank: int, world: int
) -> Reference:
    """The reference of `net`, which is plain and on the CPU, for one of `world` ranks."""
    plain = copy.deepcopy(net).double()
    grads, losses = {}, {}
    for seed in set(SEEDS):
        batches = [make_batch(seed, r, "cpu") for r in range(world)]
        grads[seed] = fp64_grads(net, batches)
        with torch.no_grad():
            losses[seed] = float(plain(*batches[rank]))
    return Reference(grads, losses)


def ways(
    wrapped: gg.DistributedDataParallel,
    lowering: str,
    config: GPTConfig,
    *,
    graphs: bool,
    driver: Driver | None = None,
) -> Iterator[Way]:
    """Each way when its turn comes: a way compiles or captures in its first steps.

    Args:
        wrapped: the model, which all ways share.
        lowering: of the compiled ones, as `gtpgraph.compile` takes it.
        config: the model's.
        graphs: whether to replay captured graphs too.
        driver: their runtime; None for CUDA.
    """
    torch._dynamo.config.recompile_limit = 64  # the same forward is compiled once a way
    ungraphed = [SHARED] if config.experts else []
    yield Way(EAGER, _whole(wrapped))
    compiled = gg.compile(wrapped, lowering=lowering, ungraphed=ungraphed)
    yield Way("ours:compiled", _whole(compiled), compiled)
    if not graphs:
        return
    for dispatch in DISPATCH:
        regions = gg.compile(
            wrapped, lowering=lowering, ungraphed=ungraphed,
            replay="cuda", dispatch=dispatch, driver=driver,
        )  # fmt: skip
        yield Way(f"ours:regions:{dispatch}", _whole(regions), regions)
    for dispatch in DISPATCH:
        step = gg.capture(_whole(compiled), wrapped, dispatch=dispatch, driver=driver)
        yield Way(f"ours:step:{dispatch}", step, compiled)


def _whole(forward: Callable[..., Any]) -> Callable[..., Tensor]:
    """Forward and backward of one batch; the loss."""

    def run(*batch: Any) -> Tensor:
        loss: Tensor = forward(*batch)
        loss.backward()
        return loss.detach()

    return run


def run_way(way: Way, wrapped: gg.DistributedDataParallel, batches: Batches) -> Seen:
    """The steps of one way; a collective over the model's groups.

    Raises:
        RuntimeError: the way raised; the text names it.
    """
    seen = Seen()
    try:
        for seed in SEEDS:
            wrapped.zero_grad_buffer()
            loss = way.call(*batches[seed])
            seen.early.append(sum(wrapped.ledger.dispatched))
            wrapped.finish_grad_sync()
            seen.losses.append(float(loss))
            seen.grads.append({n: wrapped.full_grad(n).cpu() for n, _ in wrapped.named_weights()})
            seen.reports.append(sorted((r.weight, r.use) for r in wrapped.reports))
            seen.in_order.append(way.compiled is None or _as_planned(wrapped, way.compiled))
    except Exception as error:
        raise RuntimeError(f"{way.name}, step {len(seen.reports) + 1} of {len(SEEDS)}") from error
    return seen


def _as_planned(wrapped: gg.DistributedDataParallel, compiled: gg.CompiledModel) -> bool:
    made = [(r.region, r.weight, r.use) for r in wrapped.reports if r.region is not None]
    plan = compiled.plan
    return made == [(r.name, o.weight, o.use) for r in plan.regions for o in r.occurrences]


def problems_of(seen: Seen, eager: Seen, reference: Reference) -> list[str]:
    """What is wrong with a way, beside eager's steps and the reference."""
    found = []
    for step, seed in enumerate(SEEDS):
        against = {
            "fp64": (reference.grads[seed], reference.losses[seed]),
            "eager": (eager.grads[step], eager.losses[step]),
        }
        for name, (grads, loss) in against.items():
            error = max_error(seen.grads[step], grads)
            off = abs(seen.losses[step] - loss) / abs(loss)
            if not error <= BAR:  # NaN must not pass
                found.append(f"step {step}: gradients {error:.1e} from {name} (<= {BAR:g})")
            if not off <= BAR:
                found.append(f"step {step}: loss {off:.1e} from {name} (<= {BAR:g})")
        if seen.reports[step] != eager.reports[step]:
            few, many = (
                sorted((Counter(a) - Counter(b)).elements())[:4]
                for a, b in (
                    (eager.reports[step], seen.reports[step]),
                    (seen.reports[step], eager.reports[step]),
                )
            )
            found.append(f"step {step}: reports lack {few} and have {many} beside eager's")
        if not seen.in_order[step]:
            found.append(f"step {step}: reports of graphs are not in the plan's order")
    return found


def count_problems(reports: list[tuple[str, int]], config: GPTConfig) -> list[str]:
    """What is wrong with eager's own counts, for the weights whose uses the model's text gives."""
    heads = 1 + config.depths
    expected = {"embed.weight": 2 * heads} if config.tied else {}
    if not config.tied:
        expected = {"embed.weight": heads, "head.weight": heads}
    if config.depths and config.repeat_layer:
        expected["mtp.0.join.weight"] = config.depths
    counts = Counter(weight for weight, _ in reports)
    got = {weight: counts[weight] for weight in expected}
    return [] if got == expected else [f"{EAGER}: expected reports {expected}, got {got}"]


def _add_rows(
    at: Rank, case: str, way: Way, seen: Seen, reference: Reference, *, buckets: int
) -> None:
    """Rows of a way and its printed line."""
    pairs = list(zip(seen.grads, SEEDS, strict=True))
    errors = [max_error(grads, reference.grads[seed]) for grads, seed in pairs]
    reports = [float(len(made)) for made in seen.reports]
    at.add(case, way.name, [max(errors)], "gradient_error", against="fp64", bar=BAR)
    at.add(case, way.name, reports, "reports")
    # The first eager step learns how often each weight reports; no bucket can leave early in it.
    early = [float(count) for count in seen.early[1:]]
    at.add(case, way.name, early, "early_buckets", buckets=buckets)
    at.say(
        f"    {way.name:22} error {max(errors):.1e}, {reports[-1]:.0f} reports a step, "
        f"{early[-1]:.0f} of {buckets} buckets left in the backward"
    )
