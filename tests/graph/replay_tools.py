"""A small model, its references and the ways to replay it; test modules load this by path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.parallel.buckets import Bucket

host = module_at("gtpgraph_host_driver", str(Path(__file__).parent / "host_driver.py"))
HostDriver = host.HostDriver
SMALL_MB = 0.0001  # a bucket for each weight, or nearly
KINDS = ("regions", "step", "compiled step")
DISPATCH = ("after", "event", "in_graph")


class Net(nn.Module):
    """A Linear, a norm, and a Linear used twice: seven contributions of six weights."""

    def __init__(self, p: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.b = nn.Linear(16, 16)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.b(self.norm(self.a(x))))
        return F.relu(self.b(self.drop(h))).square().mean()


class Linear(nn.Module):
    """A Linear in a class of its own: Dynamo skips the frames of torch's modules, so that
    ``nn.Linear.compile()`` would run eagerly."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Layer(Linear):
    """The same behind a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.LayerNorm(inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


def batch(seed: int = 0, rows: int = 4, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def wrapped(net: nn.Module, **kw: Any) -> gg.DistributedDataParallel:
    torch._dynamo.reset()  # its limit of recompilations counts over all tests of a process
    kw.setdefault("bucket_mb", SMALL_MB)
    return gg.DistributedDataParallel(gg.shard(net), **kw)


def grads(model: gg.DistributedDataParallel) -> dict[str, Tensor]:
    return {name: model.full_grad(name) for name, _ in model.named_weights()}


def reference(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of plain PyTorch in fp64, summed over `batches`."""
    plain = copy.deepcopy(net).double()
    for one in batches:
        plain(one.double()).backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], bar: float = 1e-6) -> None:
    assert want and want.keys() <= got.keys()
    for name, grad in want.items():
        error = (got[name].double() - grad).norm() / grad.norm().clamp_min(1e-30)
        assert error < bar, (name, float(error))


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


class Replayed:
    """A wrapped model and one way to replay it: `run` is forward and backward, `train` a step."""

    def __init__(self, kind: str, model: gg.DistributedDataParallel, **kw: Any) -> None:
        self.kind, self.model = kind, model
        self.driver = HostDriver(model)
        options = {k: kw.pop(k) for k in ("ungraphed", "dynamic", "coalesce") if k in kw}
        if kind == "regions":
            self.call: Callable[..., Tensor] = gg.compile(
                model, lowering="eager", replay="cuda", driver=self.driver, **options, **kw
            )
            return
        body = model if kind == "step" else gg.compile(model, lowering="eager", **options)

        def step(*args: Any) -> Tensor:
            loss: Tensor = body(*args)
            loss.backward()
            return loss

        self.call = gg.capture(step, model, driver=self.driver, **kw)

    def run(self, *args: Any) -> Tensor:
        loss = self.call(*args)
        if self.kind == "regions":
            loss.backward()
        return loss

    def train(self, *batches: Tensor) -> dict[str, Tensor]:
        """One synchronised step over microbatches; the whole gradients by name."""
        self.model.zero_grad_buffer()
        with self.model.no_sync():
            for one in batches[:-1]:
                self.run(one)
        self.run(batches[-1])
        self.model.finish_grad_sync()
        return grads(self.model)

    @property
    def replays(self) -> list[int]:
        return [graph.replays for graph in self.driver.graphs]


def eager_step(model: gg.DistributedDataParallel, *batches: Tensor) -> dict[str, Tensor]:
    """The same step without any graph."""
    model.zero_grad_buffer()
    with model.no_sync():
        for one in batches[:-1]:
            model(one).backward()
    model(batches[-1]).backward()
    model.finish_grad_sync()
    return grads(model)


def shown(model: gg.DistributedDataParallel) -> list[tuple[str, int]]:
    return [(r.weight, r.use) for r in model.reports]


class SpyReduction:
    """A bucket's reduction that notes from where it was started, and takes the sum of one rank."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.started: list[str | None] = []
        self.flats: list[Tensor] = []

    def start(self, flat: Tensor) -> None:
        self.started.append(self._driver.where)
        self.flats.append(flat.clone())

    def finish(self, flat: Tensor) -> None:
        pass


def spy_on_reductions(model: gg.DistributedDataParallel, driver: Any) -> None:
    """Give every bucket something to reduce: a group of one needs no event."""
    for bucket in model.buckets:
        bucket.reduction = SpyReduction(driver)


@contextmanager
def dispatches(monkeypatch: Any) -> Iterator[list[tuple[int, list[Any]]]]:
    """(bucket, events that its reduction waits for) of every dispatch in the block, in order."""
    seen: list[tuple[int, list[Any]]] = []
    start = Bucket.start_reduce

    def spy(bucket: Bucket) -> None:
        seen.append((bucket.number, list(bucket.fence._given)))
        start(bucket)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "start_reduce", spy)
        yield seen
