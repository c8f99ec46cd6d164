"""How a shard looks from outside: a DTensor of the whole weight in state dicts, and back.

In and out: the padded local shard ``[shard_rows, *rest]``. Shown: a DTensor of the weight's true
shape, ``Shard(0)`` along gtp, without the padding, on the caller's mesh (on a mesh of the GTP
group where there is none; a plain tensor where there is not even a group). So a distributed
checkpoint of one gtp degree loads at any other.

    save   shard --cut padding--> DTensor        (shares the shard's memory)
    load   DTensor of any layout | whole tensor --this rank's rows, zero padding--> shard
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtpgraph.kernels.comm import HANDLE_ATTRIBUTE, pad_rows, resolve_group
from gtpgraph.parallel.shard_spec import (
    STATE_MESH,
    ShardSpec,
    StateMesh,
    cut,
    like,
    specs_of,
    succeed,
    successor,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_state_mesh", "localise", "show_whole", "whole_dtensor"]

# Axes along which the ranks hold different weights under one name, whatever gtp does. They are
# sliced away: calling such a weight replicated over them would be false.
_OTHER_WEIGHTS = frozenset({"tp", "pp"})
_group_meshes: Any = weakref.WeakKeyDictionary()  # ProcessGroup -> {device type: DeviceMesh}


def _group_axis(mesh: DeviceMesh, spec: ShardSpec) -> int | None:
    """Which dim of the mesh is the GTP group of ``spec``; None if none is."""
    for dim in range(mesh.ndim):
        if spec.group_name and mesh.get_group(dim).group_name == spec.group_name:
            return dim
    names = mesh.mesh_dim_names or ()
    if not spec.group_name and "gtp" in names and mesh.size(names.index("gtp")) == 1:
        return names.index("gtp")
    return None


def check_state_mesh(mesh: DeviceMesh | None, specs: Sequence[ShardSpec]) -> None:
    """Raise ValueError when the GTP group of a spec is not an axis of ``mesh``."""
    wrong = {
        spec.axis: spec.ranks
        for spec in specs
        if mesh is not None and spec.group_name and _group_axis(mesh, spec) is None
    }
    if wrong:
        raise ValueError(
            f"shard: the mesh {mesh} has no axis that is the group "
            + ", ".join(f"{axis} (ranks {list(ranks)})" for axis, ranks in wrong.items())
            + ". Remedy: pass the mesh that the groups were made from, or none"
        )


def _group_mesh(spec: ShardSpec, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    group = resolve_group(spec.group_name)
    meshes: dict[str, DeviceMesh] = _group_meshes.setdefault(group, {})
    if device_type not in meshes:
        meshes[device_type] = DeviceMesh.from_group(group, device_type, mesh_dim_names=("gtp",))
    return meshes[device_type]


def _layout(
    spec: ShardSpec, mesh: DeviceMesh | None, device: torch.device
) -> tuple[DeviceMesh, tuple[Any, ...]] | None:
    """(mesh, placements) of the weight's DTensor; None for a plain tensor."""
    from torch.distributed.tensor import Replicate, Shard

    if mesh is None:
        if not spec.group_name:
            return None
        device_type = "cpu" if device.type == "meta" else device.type
        return _group_mesh(spec, device_type), (Shard(0),)
    names = mesh.mesh_dim_names or ()
    dropped = _OTHER_WEIGHTS | {"ep"} if spec.expert else _OTHER_WEIGHTS
    kept = tuple(name for name in names if name not in dropped)
    if not kept and names:
        return None
    if len(kept) < len(names):
        mesh = mesh[kept]
    axis = _group_axis(mesh, spec)
    return mesh, tuple(Shard(0) if dim == axis else Replicate() for dim in range(mesh.ndim))


def whole_dtensor(shard: Tensor, spec: ShardSpec, mesh: DeviceMesh | None) -> Tensor:
    """``shard`` as the whole weight: a DTensor of ``spec.shape`` that shares its memory.

    ``shard`` is ``[shard_rows, *rest]``, the parameter or anything of its layout (main_grad, an
    optimizer state). Without a mesh and a group it is the whole weight already, and returned.
    """
    from torch.distributed.tensor import DTensor

    layout = _layout(spec, mesh, shard.device)
    if layout is None:
        return shard
    stride = torch.empty(spec.shape, device="meta").stride()
    local = shard.narrow(0, 0, spec.valid_rows)
    # run_check would compare the ranks through a collective that one of them may not have reached.
    whole: Tensor = DTensor.from_local(
        local,
        device_mesh=layout[0],
        placements=layout[1],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=stride,
    )
    return whole


def show_whole(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """In a state dict that ``module`` has just been saved to, show its shards as whole weights."""
    mesh: StateMesh = module.__dict__[STATE_MESH]
    for name, spec in specs_of(module).items():
        if (key := prefix + name) in destination:
            destination[key] = whole_dtensor(destination[key], spec, mesh.mesh)


def to_shard(value: Any, spec: ShardSpec, mesh: DeviceMesh | None, key: str) -> Tensor:
    """This rank's padded shard ``[shard_rows, *rest]`` of ``value``.

    ``value`` is the whole weight, as a DTensor of any mesh and layout (another layout than ours
    is gathered, a collective over its mesh) or as a plain tensor.

    Raises:
        ValueError: it is neither, or of another shape; names key, expected and found.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(value, Tensor) or tuple(value.shape) != spec.shape:
        raise ValueError(_wrong_value(value, spec, key))
    if isinstance(value, DTensor):
        local = value.to_local()
        layout = _layout(spec, mesh, local.device)
        if layout is not None and value.device_mesh == layout[0] and value.placements == layout[1]:
            return pad_rows(local, spec.shard_rows)
        value = value.full_tensor()
    return cut(value, spec)


def _wrong_value(value: Any, spec: ShardSpec, key: str) -> str:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    found = type(value).__name__ if shape is None else f"{type(value).__name__} of {shape}"
    why = ""
    if shape in (spec.shard_shape, (spec.valid_rows, *spec.shape[1:])):
        why = ", which looks like one rank's shard: it does not say whose rows it holds"
    return (
        f"{key}: expected the whole weight, a DTensor or tensor of {spec.shape} (here cut over "
        f"{spec.gtp_size} ranks), found a {found}{why}. Remedy: save state_dict(), whose entries "
        "are DTensors of the whole weight"
    )


def localise(
    module: nn.Module,
    name: str,
    state_dict: dict[str, Any],
    key: str,
    assign: bool,
    problems: list[str],
) -> None:
    """Put this rank's shard at ``key`` of a state dict that is being loaded into ``module``.

    What cannot be loaded is added to ``problems``, and ``key`` then keeps the current value.
    """
    mesh: StateMesh = module.__dict__[STATE_MESH]
    param = module._parameters[name]
    assert param is not None  # a swapped module refuses to give its shard away
    try:
        if assign and hasattr(param, HANDLE_ATTRIBUTE):
            raise ValueError(
                f"{key}: assign=True would replace a weight that a data-parallel wrapper owns; "
                "expected assign=False after wrapping"
            )
        with torch.no_grad():
            shard = to_shard(state_dict[key], specs_of(module)[name], mesh.mesh, key)
    except ValueError as error:
        problems.append(str(error))
        state_dict[key] = param
        return
    state_dict[key] = _assign(module, name, param, shard) if assign else shard


def _assign(module: nn.Module, name: str, param: nn.Parameter, shard: Tensor) -> nn.Parameter:
    """Replace the shard of ``module``, as ``load_state_dict(assign=True)`` is about to ask for."""
    new = successor(param)
    if new is param or new is None:
        new = like(param, shard)
        succeed(param, new)
    module._parameters[name] = new
    return new
