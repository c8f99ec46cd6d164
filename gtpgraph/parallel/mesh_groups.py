"""From a named device mesh to the process groups of one model: the creation of groups.

In: a ``DeviceMesh`` with axes among AXES. Out: {field of ProcessGroups: this rank's group, or None
for one rank}. Creating a group is collective over the job, so what is created, and in which order,
depends on the mesh alone and never on the caller's place in it.

    axis sizes -> span of a field = its axes of size > 1 -> none:    None
                                                            one:     the mesh's own group
                                                            several: one new group per span
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gtpgraph import compat

__all__ = ["AXES", "groups_of_mesh"]

# Mesh axes, in the order in which world() reports them.
AXES: Final = ("pp", "dp", "cp", "gtp", "tp", "ep")

# The mesh axes that each field spans. Along "ep" the ranks hold different experts but see different
# data too, so for every dense weight "ep" is one more data-parallel axis.
_SPANS: Final[dict[str, tuple[str, ...]]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp", "ep"),
    "dp_cp": ("dp", "ep", "cp"),
    "tp_dp_cp": ("dp", "ep", "cp", "tp"),
    "gtp": ("gtp",),
    "dp_cp_gtp": ("dp", "ep", "cp", "gtp"),
    "ep": ("ep",),
    "expt_dp": ("dp", "cp"),
    "expt_gtp": ("gtp",),
    "model": AXES,
    "grad_norm": AXES,
}


def groups_of_mesh(mesh: DeviceMesh) -> dict[str, ProcessGroup | None] | None:
    """The caller's groups; None if it lies outside the mesh. Collective over the job.

    Raises:
        ValueError: axes without names or with unknown ones, or a slice of a larger mesh.
    """
    sizes = _mesh_sizes(mesh)
    member = mesh.get_coordinate() is not None
    by_span: dict[frozenset[str], ProcessGroup | None] = {frozenset(): None}
    found: dict[str, ProcessGroup | None] = {}
    for name, axes in _SPANS.items():
        span = frozenset(axis for axis in axes if sizes.get(axis, 1) > 1)
        if span not in by_span:
            by_span[span] = _span_group(mesh, span, member, name)
        found[name] = by_span[span]
    found["embd"] = _embedding_group(mesh, sizes, by_span)
    found["pos_embd"] = None  # the first stage alone: one rank of each pipeline
    return found if member else None


def _mesh_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Check the mesh; return {axis: size}."""
    names = mesh.mesh_dim_names
    known = ", ".join(map(repr, AXES))
    if not names:
        raise ValueError(f"ProcessGroups.from_mesh: the mesh's axes have no names; use {known}")
    if unknown := [name for name in names if name not in AXES]:
        raise ValueError(
            f"ProcessGroups.from_mesh: unknown mesh axis {', '.join(map(repr, unknown))}; "
            f"known: {known}. Remedy: name the axes of init_device_mesh among these"
        )
    root = compat.root_mesh(mesh)
    if root.mesh.numel() != mesh.mesh.numel():
        raise ValueError(
            f"ProcessGroups.from_mesh: expected a whole mesh, got the slice {names} "
            f"({mesh.mesh.numel()} ranks) of {root.mesh_dim_names} ({root.mesh.numel()} ranks): "
            "ranks of other slices would create other groups. Remedy: pass the whole mesh"
        )
    return dict(zip(names, mesh.mesh.shape, strict=True))


def _lines(mesh: DeviceMesh, span: Iterable[str]) -> list[list[int]]:
    """The mesh's ranks cut into the groups that span the given axes, each in group order."""
    names = mesh.mesh_dim_names or ()
    inner = [i for i, name in enumerate(names) if name in set(span)]
    outer = [i for i in range(len(names)) if i not in inner]
    ranks: torch.Tensor = mesh.mesh.permute(*outer, *inner)
    flat = ranks.reshape(-1, prod(mesh.mesh.shape[i] for i in inner))
    return [sorted(line) for line in flat.tolist()]


def _create(lines: list[list[int]], desc: str) -> ProcessGroup | None:
    """Create one group per line, on every rank of the job; return the caller's, if it has one."""
    create: Callable[..., Any] = dist.new_subgroups_by_enumeration  # torch leaves it untyped
    mine, _ = create(lines, group_desc=desc)
    return mine if isinstance(mine, ProcessGroup) else None


def _span_group(
    mesh: DeviceMesh, span: frozenset[str], member: bool, name: str
) -> ProcessGroup | None:
    """The caller's group over the given axes: the mesh's own for one axis, else a new one."""
    if len(span) == 1:
        return mesh.get_group(next(iter(span))) if member else None
    return _create(_lines(mesh, span), f"gtpgraph_{name}")


def _embedding_group(
    mesh: DeviceMesh,
    sizes: Mapping[str, int],
    by_span: Mapping[frozenset[str], ProcessGroup | None],
) -> ProcessGroup | None:
    """First and last stage of the caller's pipeline; None on the stages between and without pp."""
    if sizes.get("pp", 1) == 1:
        return None
    if sizes["pp"] == 2:
        return by_span[frozenset({"pp"})]
    return _create([[line[0], line[-1]] for line in _lines(mesh, {"pp"})], "gtpgraph_embd")
