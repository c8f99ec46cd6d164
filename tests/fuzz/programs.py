"""Random models as data: programs that build into a module, and what a run of one must show.

A program is plain data, so that hypothesis can shrink it, a kept failure can be read, and ranks can
be sent it. Its forward is generated as straight-line code: a graph break inside a loop would make
Dynamo give up on the whole frame.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.testing import fp64_grads, max_error

h = module_at(
    "gtpgraph_case_helpers", str(Path(__file__).resolve().parents[1] / "cases" / "helpers.py")
)
WIDTH = 5  # no number of ranks divides it
NUM_WEIGHTS, NUM_NORMS = 3, 2


@dataclass(frozen=True)
class Program:
    """One case.

    `steps` are (op, i, j): "linear", "twice" and "same" use weight i, "sum" weights i and j in one
    product, "norm" norm i; "eager" is "linear" outside Dynamo, "checkpoint" is "linear" i then j
    under one, "break" is a graph break. With `parts` each op is compiled by itself. `frozen` are
    weights and norms (from NUM_WEIGHTS on).
    """

    steps: tuple[tuple[str, int, int], ...]
    frozen: tuple[int, ...] = ()
    gtp: int = 1
    ranks: int = 1
    bucket_bytes: int = 1 << 20
    ungraphed: tuple[str, ...] = ()
    parts: bool = False
    coalesce: bool = False
    reshard: bool = True
    in_flight: int = 1
    microbatches: int = 1
    eager_first: bool = False
    reduce: str = "reduce_scatter"
    seed: int = 0


class SumOfTwo(nn.Module):
    def __init__(self, a: nn.Parameter, b: nn.Parameter) -> None:
        super().__init__()
        self.a, self.b = Tied(a), Tied(b)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight + 2 * self.b.weight)


class Tied(nn.Linear):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TiedTwice(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) - 0.5 * F.linear(x.tanh(), self.weight)


class TiedSame(Tied):
    """Two equal contributions: one node of the graph, after common subexpressions are merged."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 0.5 * x + F.linear(x, self.weight)


class Outside(Tied):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Checkpointed(nn.Module):
    def __init__(self, a: nn.Parameter, b: nn.Parameter) -> None:
        super().__init__()
        self.body = nn.Sequential(Tied(a), nn.Tanh(), Tied(b))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


OPS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda a, b: Tied(a),
    "twice": lambda a, b: TiedTwice(a),
    "same": lambda a, b: TiedSame(a),
    "sum": SumOfTwo,
    "eager": lambda a, b: Outside(a),
    "checkpoint": Checkpointed,
}
USES = {
    "linear": (1, 0),
    "twice": (2, 0),
    "same": (2, 0),
    "sum": (1, 1),
    "eager": (1, 0),
    "checkpoint": (1, 1),
}


def build(program: Program) -> nn.Module:
    """The model of a program; x [rows, WIDTH] -> loss. Every weight has a name, used or not."""
    torch.manual_seed(program.seed)
    model = nn.Module()
    model.pool = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_WEIGHTS))
    model.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(NUM_NORMS))
    model.head = nn.Linear(WIDTH, WIDTH)
    weights = [m.weight for m in model.pool]
    lines, ops = [], nn.ModuleList()
    for op, i, j in program.steps:
        if op == "break":
            lines.append("torch._dynamo.graph_break()")
        elif op == "norm":
            lines.append(f"x = self.norms[{i % NUM_NORMS}](x)")
        else:
            lines.append(f"x = torch.tanh(self.ops[{len(ops)}](x))")
            ops.append(OPS[op](weights[i % NUM_WEIGHTS], weights[j % NUM_WEIGHTS]))
    model.ops = ops
    for k in program.frozen:
        part = model.pool[k] if k < NUM_WEIGHTS else model.norms[k - NUM_WEIGHTS]
        part.requires_grad_(False)
    body = "\n    ".join([*lines, "return self.head(x).square().mean()"])
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def forward(self, x):\n    {body}", scope)
    model.__class__ = type("Program", (nn.Module,), {"forward": scope["forward"]})
    return model


def uses(program: Program) -> dict[str, int]:
    """Uses by weight of one forward, for the trainable GTP weights that have any."""
    found: Counter[int] = Counter()
    for op, i, j in program.steps:
        for weight, times in zip((i, j), USES.get(op, (0, 0)), strict=True):
            found[weight % NUM_WEIGHTS] += times
    named = {f"pool.{k}.weight": n for k, n in found.items() if n and k not in program.frozen}
    return {**named, "head.weight": 1}


def run(rank: int, world: int, program: Program) -> list[str]:
    """What is wrong with a program; empty when it is right. On every rank."""
    torch._dynamo.reset()
    model = build(program)
    batches = [
        [h.batch_of(r, WIDTH, rows=3, seed=m) for r in range(world)]
        for m in range(program.microbatches)
    ]
    expected = summed_grads(model, batches, torch.float64)
    single = summed_grads(model, batches, torch.float32)
    bar = h.SUM_ORDER_BAR + 2 * max_error(single, expected)
    unused = {n for n, p in model.named_parameters() if p.requires_grad} - expected.keys()
    ddp = h.wrap(
        copy.deepcopy(model), world, program.gtp,
        bucket_mb=program.bucket_bytes / 2**20, allow_unused=bool(unused), reduce=program.reduce,
    )  # fmt: skip
    mine = [microbatch[rank] for microbatch in batches]
    wrong = []
    if program.eager_first:
        train(ddp, ddp, mine)
        wrong += faults(ddp, expected, bar, program, None, "eager")
    compiled = compile_program(ddp, program)
    for k in range(2):
        train(ddp, compiled, mine)
        wrong += faults(ddp, expected, bar, program, compiled, f"compiled step {k}")
    ddp.close()
    return wrong


def summed_grads(
    model: nn.Module, batches: list[list[Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients of plain PyTorch: ranks' batches concatenated, microbatches added up."""
    total: dict[str, Tensor] = {}
    for microbatch in batches:
        for name, grad in fp64_grads(model, [(b,) for b in microbatch], dtype).items():
            total[name] = total[name] + grad if name in total else grad
    return total


def compile_program(ddp: Any, program: Program) -> Any:
    """What to call: the compiled model, or the model whose ops are compiled one by one."""
    known = {fqn for s in ddp.states for fqn in s.fqns}
    options: dict[str, Any] = {
        "lowering": "eager",
        "coalesce": program.coalesce,
        "reduces_in_flight": program.in_flight,
        "reshard_after_forward": program.reshard,
        "ungraphed": [u for u in program.ungraphed if u in known],
    }
    if not program.parts:
        return gtpgraph.compile(ddp, **options)
    for part in ddp.module.ops:
        part.compile(backend="gtpgraph", options=options)
    return ddp


def train(ddp: Any, call: Any, batches: list[Tensor]) -> None:
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        for x in batches[:-1]:
            call(x).backward()
    call(batches[-1]).backward()
    ddp.finish_grad_sync()


def faults(
    ddp: Any, expected: dict[str, Tensor], bar: float, program: Program, compiled: Any, when: str
) -> list[str]:
    """Gradients against plain PyTorch, reports against uses and the plan.

    `bar`: what a changed order of sums may cost, and twice what fp32 costs plain PyTorch itself.
    """
    wrong = []
    grads = h.full_grads(ddp)
    error = max_error({n: grads[n] for n in expected}, expected)
    if error > bar:
        wrong.append(f"{when}: gradients off by {error:.1e}")
    wrong += [
        f"{when}: {n} has no gradient in plain PyTorch, {g.abs().max():.1e} here"
        for n, g in grads.items()
        if n not in expected and g.count_nonzero()
    ]
    counts, owed = h.counts(ddp.reports), uses(program)
    for name, times in owed.items():
        got = counts.get(name, 0)
        if got != times and not (program.coalesce and compiled is not None and 1 <= got <= times):
            wrong.append(f"{when}: {name} reported {got} of {times} use(s)")
    wrong += [f"{when}: {n} reported without a gradient" for n in counts.keys() - expected.keys()]
    if compiled is not None and ddp.regions:
        wrong += plan_faults(ddp, gtpgraph.plan_of(compiled), program, when)
    return wrong


def plan_faults(ddp: Any, plan: Any, program: Program, when: str) -> list[str]:
    """Reports and plan must tell the same story, region by region in order."""
    wrong = []
    told = [t for t in h.told(ddp.reports) if t[2] is not None]
    for region in plan.regions:
        planned = [(o.weight, o.use, region.name) for o in region.occurrences] * (region.calls or 1)
        got = [t for t in told if t[2] == region.name]
        if got != planned[: len(got)] or len(got) % max(1, len(region.occurrences)):
            wrong.append(f"{when}: {region.name} reported {got}, planned {planned}")
        if program.ungraphed and {o.weight for o in region.occurrences} & set(program.ungraphed):
            wrong.append(f"{when}: an UNGRAPHED weight in {region.name}")
    counts = h.counts(ddp.reports)
    ready = {n: c for n, c in plan.ready_counts.items() if c}
    if ready != counts:
        wrong.append(f"{when}: plan owes {ready}, reports were {counts}")
    if gtpgraph.HookPlan.from_json(plan.to_json()) != plan:
        wrong.append(f"{when}: the plan does not survive JSON")
    return wrong
