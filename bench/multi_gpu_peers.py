"""Contenders for a step on several ranks: ours, and torch's wrappers on the same plain model.

In: a plain model of `gtpgraph.models` on this rank's device. Out: a `Contender` each, warm, behind
one gate: gradients within twice the plain peers' error from the same weights in a wider dtype.
SimpleFSDP is not in torch and is not run.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gtpgraph as gg
from bench.multi_gpu_rank import Rank
from bench.steps import ours_step
from gtpgraph.gpt import GPT

PEERS = ("ddp", "fsdp2")
WARM_UP = 4  # steps; a captured one replays from the second on
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Contender:
    """One implementation of a step: forward, backward, gradients reduced; no optimizer.

    Attributes:
        step: runs one on this rank's own batch; a collective.
        grad: a weight's name -> its whole gradient after a step, on every rank; a collective.
    """

    step: Callable[[], Any]
    grad: Callable[[str], Tensor]

    def warm(self) -> Contender:
        """Itself, after a few steps."""
        for _ in range(WARM_UP):
            self.step()
        return self


def ours(wrapped: gg.DistributedDataParallel, run: Callable[..., Any], batch: Batch) -> Contender:
    """`run(*batch)`, which makes forward and backward of `wrapped`, as a complete step."""
    return Contender(ours_step(wrapped, lambda: run(*batch)), wrapped.full_grad)


def ddp(net: nn.Module, groups: gg.ProcessGroups, batch: Batch) -> Contender:
    """torch's DistributedDataParallel over all ranks of `groups`, which all-reduces in net's dtype;
    the plain model on a rank alone."""
    params = dict(net.named_parameters())
    wrapped = net
    if groups.size("dp") > 1:
        wrapped = DistributedDataParallel(
            net, process_group=groups.group("dp"), gradient_as_bucket_view=True
        )
    return Contender(_plain_step(wrapped, params, batch), lambda name: _whole(params[name].grad))


def fsdp2(net: GPT, groups: gg.ProcessGroups, batch: Batch) -> Contender:
    """FSDP2, a group of parameters a layer, over all ranks of `groups`; `net` is changed. Weights
    travel in net's dtype, gradients in fp32, as ours do."""
    mesh = groups.mesh
    assert mesh is not None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (*net.layers, *net.mtp):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    params = dict(net.named_parameters())
    return Contender(_plain_step(net, params, batch), lambda name: _whole(params[name].grad))


def _plain_step(
    forward: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch
) -> Callable[[], None]:
    def step() -> None:
        for param in params.values():
            param.grad = None
        forward(*batch).backward()

    return step


def _whole(grad: Tensor | None) -> Tensor:
    assert grad is not None, "expected a gradient after a step, got None"
    if isinstance(grad, DTensor):
        full: Tensor = grad.full_tensor()
        return full
    return grad


def reference(net: nn.Module, groups: gg.ProcessGroups, batch: Batch) -> dict[str, Tensor]:
    """Gradients of `net` in the next wider dtype, by name; a collective.

    Plain data parallelism over all ranks: the mean of their batches' gradients.
    """
    dtype = next(net.parameters()).dtype
    wide = copy.deepcopy(net).to(WIDER[dtype])
    contender = ddp(wide, groups, batch)
    contender.step()
    grads = {name: contender.grad(name).clone() for name, _ in wide.named_parameters()}
    del contender, wide
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return grads


def gate(
    at: Rank, contenders: Mapping[str, Contender], want: Mapping[str, Tensor], eps: float
) -> None:
    """Each contender's gradients within twice the largest error of torch's own wrappers, before
    anything is timed; a collective.

    Args:
        contenders: by label; warm.
        want: the reference, by name.
        eps: of the models' dtype: half of it is granted for the last rounding.

    Raises:
        AssertionError: one of ours is further off.
        RuntimeError: no peer ran, so there is no yardstick.
    """
    errors: dict[str, float] = {}
    for label, contender in contenders.items():
        contender.step()
        errors[label] = max(_error(contender.grad(name), grad) for name, grad in want.items())
    known = [errors[label] for label in PEERS if label in errors]
    if not known:
        raise RuntimeError(f"gate: expected one of {PEERS} to run, got {list(contenders)}")
    bar = 2 * max(known) + eps / 2
    for label, error in errors.items():
        at.say(f"    {label:14} gradients {error:.1e} from a wider dtype (<= {bar:.1e})")
    wrong = {label: error for label, error in errors.items() if not error <= bar}
    if wrong:  # NaN is wrong too
        raise AssertionError(f"gate: expected errors of at most {bar:.1e}, got {wrong}")


def _error(grad: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((grad.to(want.dtype) - want).norm() / want.norm().clamp_min(1e-30))
