"""``shard``: turn a model's large weights into GTP weights, in place.

In: any nn.Module and its ProcessGroups. Out: the same module, whose chosen weights are stored as
shards (see `shard_spec`) and gathered when a module reads them (see `shard_module`).

    find_candidates --> specs --> shards cut, one a weight --> classes swapped

With one rank in the GTP group the weights are GTP weights all the same: uses are counted by
gathers, so one process sees the plan that many will.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gtpgraph.parallel.process_groups import UNSET, ProcessGroups
from gtpgraph.parallel.shard_init import materialize
from gtpgraph.parallel.shard_module import original_type, swap_class
from gtpgraph.parallel.shard_select import Candidate, find_candidates, named_owners, unwrap
from gtpgraph.parallel.shard_spec import ShardSpec, StateMesh, WeightInfo, cut, like, specs_of
from gtpgraph.parallel.shard_state import check_state_mesh

__all__ = [
    "ShardSpec",
    "WeightInfo",
    "all_weights",
    "fqn_of",
    "gtp_weights",
    "materialize",
    "original_type",
    "shard",
    "unwrap",
]


def shard(
    model: nn.Module,
    groups: ProcessGroups | None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard the weights of ``model`` along dim 0 over its GTP group, in place.

    Sharded are the weights of nn.Linear, nn.Embedding and Hugging Face's Conv1D (whose dim 0 is
    in_features), trainable or frozen, and the 3-D weights of experts where dim 0 divides by the
    group's size; not norms, biases, or weights whose dim 0 has size 1. A tied weight is one shard
    under all its names. No communication: every rank keeps its rows of what it holds, so build the
    model from one seed on all ranks, or load a checkpoint afterwards. A model on the meta device
    stays there; see `materialize`.

    Call it after tying, initialising and ``.to(dtype)``, before an optimizer takes the parameters,
    and before data-parallel wrapping. From then on a module's sharded attribute (``linear.weight``)
    reads as the gathered weight ``[rows, *rest]``, a temporary: writing into it is lost. What
    persists is the Parameter in ``named_parameters()``, the shard ``[ceil(rows / gtp), *rest]``.

    Args:
        model: any module tree.
        groups: this model's groups. None: one process, where torch.distributed is not initialised.
        include, exclude: shell-style patterns over parameter names (``"layers.*.qkv.weight"``);
            of the weights above, only those that match include, and none that match exclude.
        mesh: the mesh on which state dicts show the shards as DTensors; default ``groups.mesh``.

    Returns:
        ``model``.

    Raises:
        ValueError: before anything is changed, once, with all that is wrong: a pattern without a
            match (and near misses), no weight to shard, a model sharded or wrapped already,
            experts that do not divide by gtp, weights that cannot be cut, an unset gtp group, a
            mesh without the gtp group.
    """
    groups = _groups_or_local(groups)
    groups.require("gtp", function="shard", option="sharding over gtp")
    sizes = groups.size("gtp"), groups.size(_axis(True, groups))
    found = find_candidates(model, _patterns(include), _patterns(exclude), *sizes)
    specs = [_spec(candidate, groups) for candidate in found]
    mesh = groups.mesh if mesh is None else mesh
    check_state_mesh(mesh, specs)

    by_module: dict[nn.Module, dict[str, ShardSpec]] = {}
    for candidate, spec in zip(found, specs, strict=True):
        new = _sharded(candidate.param, spec)
        for module, name in candidate.owners:
            module._parameters[name] = new
            by_module.setdefault(module, {})[name] = spec
    state_mesh = StateMesh(mesh)
    for module, own in by_module.items():
        swap_class(module, own, state_mesh)
    return model


def _groups_or_local(groups: ProcessGroups | None) -> ProcessGroups:
    if groups is not None:
        return groups
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "shard: expected groups=ProcessGroups(...), got None while torch.distributed is "
            "initialised. Remedy: pass ProcessGroups.from_mesh(mesh), or ProcessGroups.local() for "
            "a model of one rank"
        )
    return ProcessGroups.local()


def _patterns(patterns: Sequence[str] | None) -> Sequence[str] | None:
    # A bare string is a sequence too, of one-letter patterns.
    return [patterns] if isinstance(patterns, str) else patterns


def _axis(expert: bool, groups: ProcessGroups) -> str:
    return "expt_gtp" if expert and groups.expt_gtp is not UNSET else "gtp"


def _spec(candidate: Candidate, groups: ProcessGroups) -> ShardSpec:
    axis = _axis(candidate.expert, groups)
    size, rows = groups.size(axis), candidate.param.shape[0]
    return ShardSpec(
        rows=rows,
        shard_rows=-(-rows // size),
        shape=tuple(candidate.param.shape),
        gtp_size=size,
        gtp_rank=groups.rank(axis),
        group_name=groups.group_name(axis),
        ranks=groups.ranks(axis),
        axis=axis,
        expert=candidate.expert,
    )


def _sharded(param: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
    if spec.gtp_size == 1:
        return param  # it is its own shard, with its gradient, hooks and optimizer state
    with torch.no_grad():
        return like(param, cut(param, spec))


def gtp_weights(model: nn.Module) -> dict[nn.Parameter, WeightInfo]:
    """The GTP weights of ``model``, in module order, with all their names.

    Names are those of the model before any wrapper; a tied weight comes once, under its first.
    """
    specs = {
        param: specs_of(module)[name]
        for _, module, name, param in named_owners(model)
        if name in specs_of(module)
    }
    return {p: WeightInfo(specs[p], fqns) for p, fqns in all_weights(model).items() if p in specs}


def all_weights(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every parameter of ``model``, sharded or not, in module order, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, _, _, param in named_owners(model):
        known = names.setdefault(param, [])
        if fqn not in known:
            known.append(fqn)
    return {param: tuple(fqns) for param, fqns in names.items()}


def fqn_of(model: nn.Module, param: nn.Parameter) -> str:
    """First name of ``param`` in ``model``, as the model has it before any wrapper.

    Raises ValueError when it is none of the model's parameters.
    """
    weights = all_weights(model)
    if param not in weights:
        same = [fqns[0] for p, fqns in weights.items() if p.shape == param.shape][:3]
        raise ValueError(
            f"fqn_of: expected a parameter of {type(unwrap(model)).__name__}, got another of shape "
            f"{tuple(param.shape)}; of that shape the model has {same or 'none'}. Remedy: take it "
            "from model.parameters(), after shard()"
        )
    return weights[param][0]
