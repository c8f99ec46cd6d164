"""``fully_shard_v1``: torch's own FSDP2 over the process groups of one model.

In: a plain model and its ProcessGroups. Out: the model, its weights fully sharded over the data
group by ``torch.distributed.fsdp.fully_shard``, in a thin module that knows its groups::

    check everything -> size-one groups, where tp = 1 (once a job) -> meshes (dp, tp), (expt_dp, tp)
                     -> fully_shard(experts), fully_shard(units), fully_shard(model)

No barrier and no WORLD: construction communicates over the model's own groups, if at all. GTP is
refused, for both schemes shard a weight along dim 0 and gather it before use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gtpgraph.parallel.process_groups import UNSET, ProcessGroups
from gtpgraph.parallel.setup import is_expert
from gtpgraph.parallel.sharding import gtp_weights
from gtpgraph.parallel.user_buffers import UserBuffers

__all__ = ["FullyShardedModel", "fully_shard_v1", "size_one_group"]

_FUNCTION = "fully_shard_v1"
_made: list[ProcessGroup] = []  # this rank's group of size one, from the job that is running


class FullyShardedModel(nn.Module):
    """What :func:`fully_shard_v1` returns: the sharded model, its groups and its user buffers."""

    def __init__(self, module: nn.Module, groups: ProcessGroups, buffers: UserBuffers | None):
        super().__init__()
        self.module = module
        self.groups = groups
        self.user_buffers = buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, unchanged."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict (DTensors), its FQNs without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `load_state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)

    def manual_buffer_registration(self) -> list[str]:
        """Warm up the user buffers: two barriers on each group that has any, dense groups first.

        FSDP2 allocates and registers the memory itself when it first communicates; this is where
        the ranks of a group agree that it may. A collective over those groups, and no others.

        Returns:
            The axes that were warmed up, in order; none when called again.

        Raises:
            ValueError: the model was made without ``nccl_ub``.
        """
        if self.user_buffers is None:
            raise ValueError(
                "manual_buffer_registration: expected a model made with nccl_ub=True, got "
                "nccl_ub=False. Pass the option to fully_shard_v1."
            )
        return self.user_buffers.register()


def fully_shard_v1(
    model: nn.Module,
    groups: object,
    *,
    tp: int | None = None,
    gtp: int = 1,
    expert_gtp: int = 1,
    units: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    nccl_ub: bool = False,
) -> FullyShardedModel:
    """Shard `model` fully over its data-parallel group, in place, with FSDP2 as the engine.

    COLLECTIVE OVER THE JOB where a mesh needs groups of size one (tp = 1, or experts) and none were
    made yet: see `size_one_group`, which the job's other ranks must call then.

    Args:
        model: any module tree, not sharded by ``gtpgraph.shard``. Weights with
            ``allreduce = False`` belong to experts.
        groups: a ProcessGroups, or an object with attributes of those names. Required: dp (dp_cp
            where cp > 1); tp unless `tp` is 1; ep and expt_dp where the model has expert weights.
        tp: tensor-parallel degree; None: that of the collection.
        gtp, expert_gtp: the configuration's GTP degrees, which must be 1.
        units: fnmatch patterns over module names, each match one unit that is gathered as a whole;
            by default the entries of the outermost ``nn.ModuleList`` s. Experts and the rest of
            the model are units of their own.
        reshard_after_forward, mp_policy: as in torch's ``fully_shard``.
        nccl_ub: communication buffers in memory that NCCL registers; see
            `FullyShardedModel.manual_buffer_registration`.

    Raises:
        ValueError: GTP in the configuration, the collection or the model; every missing group; a
            pattern without a module. Nothing is changed, and nothing was communicated.
    """
    found = groups if isinstance(groups, ProcessGroups) else ProcessGroups.from_attributes(groups)
    experts = [p for p in model.parameters() if is_expert(p, None)]
    _refuse_gtp(model, found, gtp, expert_gtp)
    data = "dp_cp" if found.cp is not UNSET and found.size("cp") > 1 else "dp"
    _check(found, data, tp, bool(experts))
    names, expert_modules = _units(model, units), _expert_modules(model)

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dense_tp = None if tp == 1 else found.require("tp", function=_FUNCTION, option="tp")["tp"]
    dense = _mesh(found, data, dense_tp, device.type)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    sharded: list[FSDPModule] = []
    if experts:
        mesh = _mesh(found, "expt_dp", None, device.type)
        for module in expert_modules:
            unit = fully_shard(module, mesh=mesh, **options)
            # An expert has seen the tokens of its ep peers as well: the mean is over all of dp.
            unit.set_gradient_divide_factor(float(found.size(data)))
            if "nccl" not in str(dist.get_backend(mesh.get_group())):
                unit.set_force_sum_reduction_for_comms(True)  # only NCCL scales while it reduces
            sharded.append(unit)
    for module in [*(model.get_submodule(name) for name in names), model]:
        if not isinstance(module, FSDPModule):
            sharded.append(fully_shard(module, mesh=dense, **options))
    return FullyShardedModel(model, found, _buffers(found, data, sharded, device, nccl_ub, experts))


def size_one_group() -> ProcessGroup:
    """This rank's group of one rank; made once a job.

    COLLECTIVE OVER THE JOB the first time: every rank calls it, in the same order as other
    creations of groups, ranks outside the model included. Later calls communicate nothing.
    """
    if _made and _is_alive(_made[0]):
        return _made[0]
    create: Callable[..., Any] = dist.new_subgroups_by_enumeration  # torch leaves it untyped
    mine, _ = create([[r] for r in range(dist.get_world_size())], group_desc="gtpgraph_tp1")
    assert isinstance(mine, ProcessGroup)  # every rank is in one of them
    _made[:] = [mine]
    return mine


def _is_alive(group: ProcessGroup) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (KeyError, ValueError, RuntimeError):
        return False


def _refuse_gtp(model: nn.Module, groups: ProcessGroups, gtp: int, expert_gtp: int) -> None:
    found = {"gtp (configuration)": gtp, "expert_gtp (configuration)": expert_gtp}
    for name in ("gtp", "expt_gtp"):
        if getattr(groups, name) is not UNSET:
            found[f"{name} (process groups)"] = groups.size(name)
    if cut := gtp_weights(model):
        found["weights cut by shard()"] = len(cut)
        if max(info.spec.gtp_size for info in cut.values()) == 1:
            found["weights cut by shard()"] += 1  # over one rank is an error all the same
    wrong = [f"{name} = {size}" for name, size in found.items() if size != 1]
    if wrong:
        raise ValueError(
            f"{_FUNCTION}: expected gtp = 1 and expert gtp = 1, for FSDP shards every weight by "
            f"itself, dense models included; got {', '.join(wrong)}. Remedy: leave gtp at 1 and do "
            "not call shard(), or use DistributedDataParallel for a GTP model"
        )


def _check(groups: ProcessGroups, data: str, tp: int | None, experts: bool) -> None:
    """Every group that will be used, before the first of them is."""
    needed = {data: "every model" if data == "dp" else "cp > 1"}
    if tp != 1:
        needed["tp"] = "the tensor-parallel axis (tp=1 says that there is none)"
    if experts:
        needed |= {"ep": "expert weights", "expt_dp": "expert weights"}
    groups.require(*needed, function=_FUNCTION, option=needed)
    if tp is not None and tp != 1 and groups.size("tp") != tp:
        raise ValueError(
            f"{_FUNCTION}: tp: expected a group of {tp} ranks, as configured, got one of "
            f"{groups.size('tp')}. Remedy: pass the model's own collection"
        )
    if not dist.is_initialized():
        raise ValueError(
            f"{_FUNCTION}: expected torch.distributed to be initialised, which FSDP2 needs for one "
            "rank too, got no process group. Remedy: call init_process_group first"
        )


def _mesh(
    groups: ProcessGroups, axis: str, tp: ProcessGroup | None, device_type: str
) -> DeviceMesh:
    """The data axis of a mesh (dp, tp) over the collection's own groups."""
    if groups.mesh is not None and tp is not None:
        names = set(groups.mesh.mesh_dim_names or ())
        if {"dp", "tp"} <= names and groups.mesh["dp"].get_group() is getattr(groups, axis):
            return groups.mesh["dp"]  # the root that the model's own tp DTensors have
    data: ProcessGroup | None = getattr(groups, axis)
    pair = data or size_one_group(), tp or size_one_group()
    rows: list[Any] = [None] * groups.size(axis)
    mine = list(dist.get_process_group_ranks(pair[1]))
    if tp is None:
        rows = [[rank] for rank in groups.ranks(axis)]
    else:
        dist.all_gather_object(rows, mine, group=pair[0])
    mesh = DeviceMesh.from_group(list(pair), device_type, mesh=rows, mesh_dim_names=("dp", "tp"))
    return mesh["dp"]


def _units(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Names of the modules that are gathered as a whole, inner ones first."""
    names = [name for name, _ in model.named_modules() if name]
    if patterns is None:
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        outer = [n for n in lists if not any(n.startswith(f"{o}.") for o in lists)]
        found = [
            f"{n}.{child}" for n in outer for child, _ in model.get_submodule(n).named_children()
        ]
    else:
        idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
        if idle:
            raise ValueError(
                f"{_FUNCTION}: units: expected every pattern to match a module, got none for "
                f"{idle}. The modules are {names[:8]}."
            )
        found = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    return sorted(found, key=lambda name: -name.count("."))


def _expert_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that hold expert weights and nothing else."""
    pure = [
        name
        for name, module in model.named_modules()
        if (weights := list(module.parameters())) and all(is_expert(p, None) for p in weights)
    ]
    outer = [n for n in pure if not any(n.startswith(f"{o}.") or (n and not o) for o in pure)]
    held = {p for name in outer for p in model.get_submodule(name).parameters()}
    stray = [n for n, p in model.named_parameters() if is_expert(p, None) and p not in held]
    if stray:
        raise ValueError(
            f"{_FUNCTION}: expected expert weights in modules of their own, for they are sharded "
            f"over expt_dp, got {stray[:6]} beside dense ones. Remedy: put them in a submodule"
        )
    return [model.get_submodule(name) for name in outer]


def _buffers(
    groups: ProcessGroups,
    data: str,
    sharded: Sequence[FSDPModule],
    device: torch.device,
    nccl_ub: bool,
    experts: Sequence[nn.Parameter],
) -> UserBuffers | None:
    if not nccl_ub:
        return None
    buffers = UserBuffers()
    for axis in (data, "expt_dp") if experts else (data,):
        buffers.add(axis, getattr(groups, axis), device)
    if device.type == "cuda":
        for unit in sharded:
            unit.set_allocate_memory_from_process_group_for_comm(True)
    return buffers
