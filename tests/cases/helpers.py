"""What the readiness tests and the cases share: wrapping, stepping, counting, watching buckets.

Test modules and ranks load this file with ``gtpgraph.by_path.module_at`` under one name. Everything
here runs inside a rank, or in the test process as the only rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph import compat
from gtpgraph.graph.plan import HookPlan
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import shard
from gtpgraph.testing import fp64_grads, max_error

SUM_ORDER_BAR = 1e-6  # fp32, eager Python or graphs run by FX, where a sum changes order
INDUCTOR_BAR = 1e-5
BARS = {None: SUM_ORDER_BAR, "eager": SUM_ORDER_BAR, "inductor": INDUCTOR_BAR}
Call = Callable[..., Any]


def groups_of(world: int, gtp: int = 1) -> ProcessGroups | None:
    """dp x gtp groups of all ranks (collective); None for a process alone."""
    if world == 1:
        return None
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    return ProcessGroups.from_mesh(mesh)


def wrap(model: nn.Module, world: int = 1, gtp: int = 1, **options: Any) -> DistributedDataParallel:
    """Shard and wrap; collective."""
    groups = groups_of(world, gtp)
    return DistributedDataParallel(shard(model, groups), groups, **options)


def backward(ddp: nn.Module, call: Call, *batch: Any, loss_fn: Call | None = None) -> Tensor:
    """Forward and backward of one microbatch; the loss."""
    out = call(*batch)
    loss: Tensor = out if loss_fn is None else loss_fn(out)
    loss.backward()
    return loss.detach()


def step(
    ddp: DistributedDataParallel, call: Call, *batch: Any, loss_fn: Call | None = None
) -> Tensor:
    """One whole synchronised step; the loss."""
    ddp.zero_grad_buffer()
    loss = backward(ddp, call, *batch, loss_fn=loss_fn)
    ddp.finish_grad_sync()
    return loss


def compile_part(part: nn.Module, **options: Any) -> None:
    """Compile a submodule in place, FX lowering; its names stay."""
    part.compile(backend="gtpgraph", options={"lowering": "eager", **options})


def full_grads(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """First FQN -> whole gradient, float32; collective."""
    return {name: ddp.full_grad(name) for name, _ in ddp.named_weights()}


def error_from_plain(
    ddp: DistributedDataParallel, plain: nn.Module, *batch: Any, loss_fn: Call | None = None
) -> float:
    """Largest relative difference from plain PyTorch in the model's own precision."""
    expected = fp64_grads(plain, [batch], torch.float32, loss_fn)
    return max_error(full_grads(ddp), expected)


def counts(reports: Iterable[Any]) -> dict[str, int]:
    """Reports, or a plan's occurrences, by weight."""
    return dict(Counter(r.weight for r in reports))


def occurrences(plan: HookPlan) -> list[tuple[str, int, str]]:
    """(weight, use, region) of all regions, in order; each region as often as it is called."""
    return [
        (o.weight, o.use, r.name)
        for r in plan.regions
        for _ in range(r.calls or 1)
        for o in r.occurrences
    ]


def told(reports: Sequence[Any]) -> list[tuple[str, int, str | None]]:
    """(weight, use, region) of reports, in order."""
    return [(r.weight, r.use, r.region) for r in reports]


class Departures:
    """When each bucket left: (bucket, reports made by then, inside a backward?), in order."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.left: list[tuple[int, int, bool]] = []
        self._ddp = ddp
        for bucket in ddp.buckets:
            self._watch(bucket)

    def _watch(self, bucket: Any) -> None:
        start = bucket.start_reduce

        def started(*args: Any, **kwargs: Any) -> Any:
            inside = compat.backward_id() is not None
            self.left.append((bucket.number, len(self._ddp.reports), inside))
            return start(*args, **kwargs)

        bucket.start_reduce = started

    def take(self) -> list[tuple[int, int, bool]]:
        """What was seen since the last call."""
        left, self.left = self.left, []
        return left


def error_of(fn: Call, *args: Any, **kwargs: Any) -> str:
    """``TypeName: message`` of what `fn` raises; a call that succeeds is a failure here."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"expected {fn} to raise, it returned")


class MLP(nn.Module):
    """A norm, then linear layers with tanh: x [N, width] -> [N, width]."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ABA(nn.Module):
    """a, then b, then a again; or only a and b."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)
        self.again = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return (self.a(y) if self.again else y).square().mean()


class MeanSquare(nn.Module):
    """A body and the loss that the body's output has: mean over dim 0 of its squares."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.body(*args)
        return out.square().mean()


def batch_of(rank: int, width: int = 8, rows: int = 4, seed: int = 0) -> Tensor:
    """Different data on every rank, float32 [rows, width]."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, width, generator=generator)
