"""Set-up of the data-parallel wrapper: which weight reduces over which group, in which bucket.

In: a model, its groups and the wrapper's options. Out: `WeightState` records and buckets. All of
it is resolved and checked before the first buffer is allocated.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from gtpgraph.parallel.buckets import Bucket, BucketKey, GroupSide, build_buckets
from gtpgraph.parallel.process_groups import UNSET, ProcessGroups
from gtpgraph.parallel.sharding import ShardSpec, all_weights, gtp_weights
from gtpgraph.parallel.staging import COLLECTIVES
from gtpgraph.parallel.user_buffers import UserBuffers
from gtpgraph.parallel.weights import WeightState, state_of

if TYPE_CHECKING:
    from gtpgraph.parallel.data_parallel import DistributedDataParallel

FUNCTION = "DistributedDataParallel"


@dataclass(frozen=True)
class WrapperOptions:
    """Options of the wrapper that shape its buffers; see `DistributedDataParallel`."""

    bucket_mb: float
    grad_dtype: torch.dtype
    wire_dtype: torch.dtype | None
    reduce: str
    loss: str
    nccl_ub: bool | str = False
    collectives: str = "functional"

    def check(self) -> None:
        """Raise one ValueError that lists every option out of range."""
        floats = (torch.float32, torch.bfloat16)
        allowed: list[tuple[str, object, tuple[object, ...]]] = [
            ("grad_dtype", self.grad_dtype, floats),
            ("wire_dtype", self.wire_dtype, (None, *floats)),
            ("reduce", self.reduce, ("reduce_scatter", "all_reduce")),
            ("loss", self.loss, ("mean", "per_token")),
            ("nccl_ub", self.nccl_ub, (False, True, "manual")),
            ("collectives", self.collectives, COLLECTIVES),
        ]
        bad = [
            f"{name}: expected one of {known}, got {value!r}"
            for name, value, known in allowed
            if value not in known
        ]
        if self.nccl_ub and self.collectives == "symmetric":
            bad.append("nccl_ub: expected False with collectives='symmetric', which has no NCCL")
        if not self.bucket_mb > 0:
            bad.append(f"bucket_mb: expected a positive number of MiB, got {self.bucket_mb!r}")
        if bad:
            raise ValueError(f"{FUNCTION}: " + "; ".join(bad) + ".")

    @property
    def gtp_wire_dtype(self) -> torch.dtype:
        return self.wire_dtype or self.grad_dtype


def resolve_groups(groups: ProcessGroups | None) -> ProcessGroups:
    """The collection given, or that of one process; never WORLD."""
    if groups is not None:
        return groups
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            f"{FUNCTION}: expected groups=ProcessGroups under torch.distributed, got None, which "
            "means one process. Pass ProcessGroups.from_mesh(mesh)."
        )
    return ProcessGroups.local()


def build_states(
    module: nn.Module,
    groups: ProcessGroups,
    options: WrapperOptions,
    wrapper: weakref.ref[DistributedDataParallel],
    buffers: UserBuffers | None = None,
) -> tuple[list[WeightState], list[Bucket]]:
    """One state per trainable weight in parameter order, and the buckets they live in."""
    specs = {param: info.spec for param, info in gtp_weights(module).items()}
    owned = [(p, fqns) for p, fqns in all_weights(module).items() if p.requires_grad]
    _check_owned(owned, len(specs))
    keys = _bucket_keys(owned, specs, groups, options)
    buckets = build_buckets(
        [(param, key) for (param, _), key in zip(owned, keys, strict=True)],
        bucket_bytes=int(options.bucket_mb * 2**20),
        wire_dtype=options.wire_dtype,
        reduce=options.reduce,
        buffers=buffers,
    )
    places = {m.index: (bucket, m) for bucket in buckets for m in bucket.members}
    scale = 1.0 / _replicas(groups) if options.loss == "mean" else 1.0
    states = [
        WeightState(
            index, param, fqns, specs.get(param), *places[index], scale,
            options.gtp_wire_dtype, wrapper,
        )
        for index, (param, fqns) in enumerate(owned)
    ]  # fmt: skip
    return states, buckets


def frozen_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(first FQN, weight) of every weight that needs no gradient."""
    return [(fqns[0], p) for p, fqns in all_weights(module).items() if not p.requires_grad]


def _check_owned(owned: list[tuple[nn.Parameter, tuple[str, ...]]], num_gtp: int) -> None:
    if not owned:
        raise ValueError(
            f"{FUNCTION}: expected at least one trainable weight, got a model with none "
            f"({num_gtp} GTP weights, all frozen). Set requires_grad before wrapping."
        )
    taken = [fqns[0] for param, fqns in owned if state_of(param) is not None]
    if taken:
        raise ValueError(
            f"{FUNCTION}: expected weights that no wrapper owns, got {taken[:6]}, which have a "
            "main_grad already. close() the other wrapper first."
        )
    meta = [fqns[0] for param, fqns in owned if param.is_meta]
    if meta:
        raise ValueError(
            f"{FUNCTION}: expected materialised weights, got {meta[:6]} on the meta device. "
            "Call gtpgraph.materialize(model, device) first."
        )


def _replicas(groups: ProcessGroups) -> int:
    """Ranks over which a mean loss averages: dp x cp x gtp."""
    data = groups.size("dp_cp") if groups.dp_cp is not UNSET else groups.size("dp")
    return data * (groups.size("gtp") if groups.gtp is not UNSET else 1)


def is_expert(param: nn.Parameter, spec: ShardSpec | None) -> bool:
    """Whether a weight is an expert's: its shard says so, or Megatron's `allreduce = False`."""
    return getattr(param, "allreduce", True) is False or (spec is not None and spec.expert)


def _bucket_keys(
    owned: list[tuple[nn.Parameter, tuple[str, ...]]],
    specs: dict[nn.Parameter, ShardSpec],
    groups: ProcessGroups,
    options: WrapperOptions,
) -> list[BucketKey]:
    gtp = groups.size("gtp") if groups.gtp is not UNSET else 1
    axes = [_axis(param, specs.get(param), groups, gtp) for param, _ in owned]
    reasons = {
        "dp": "every model",
        "dp_cp": "cp > 1",
        "dp_cp_gtp": "gtp > 1 and weights replicated over gtp",
        "expt_dp": "expert weights",
    }
    groups.require(*dict.fromkeys(("dp", *axes)), function=FUNCTION, option=reasons)
    sides = {axis: _side(groups, axis) for axis in dict.fromkeys(axes)}
    return [
        BucketKey(sides[axis], is_expert(param, specs.get(param)), options.grad_dtype, param.device)
        for (param, _), axis in zip(owned, axes, strict=True)
    ]


def _axis(param: nn.Parameter, spec: ShardSpec | None, groups: ProcessGroups, gtp: int) -> str:
    if is_expert(param, spec):
        spread = groups.ep is not UNSET and groups.size("ep") > 1
        if spec is None and gtp > 1 and spread:
            raise NotImplementedError(
                f"{FUNCTION}: an expert weight of shape {tuple(param.shape)} that is replicated "
                "over gtp > 1 would reduce over expt_dp x gtp, for which there is no group. "
                "Shard it, or use gtp = 1 with expert parallelism."
            )
        if spec is not None or gtp == 1:
            return "expt_dp"
    if spec is None and gtp > 1:
        return "dp_cp_gtp"
    no_cp = groups.cp is UNSET or groups.size("cp") == 1
    return "dp" if groups.dp_cp is UNSET and no_cp else "dp_cp"


def _side(groups: ProcessGroups, axis: str) -> GroupSide:
    if groups.size(axis) == 1:
        return GroupSide(axis, None, groups.ranks(axis))
    group = getattr(groups, axis)
    assert isinstance(group, dist.ProcessGroup)
    return GroupSide(axis, group, groups.ranks(axis))
