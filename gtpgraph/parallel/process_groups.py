"""The process groups of one model: which ranks hold it, axis by axis.

In: a named ``DeviceMesh``, a Megatron-style object, or groups field by field. Out: one frozen
:class:`ProcessGroups` that every function serving the model asks for its groups, and nothing else:
no global grid, no WORLD.

A field is in one of three states, and they are never mixed up:

    ProcessGroup   these ranks; the caller is one of them
    None           said explicitly: the axis has size one (or nothing is shared over it here)
    UNSET          never said; using it is an error that names the function and the option

torch reads ``group=None`` as WORLD: a forgotten group silently changes the ranks that a gradient is
reduced over. UNSET makes that an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Final, NoReturn, Self, final

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gtpgraph.parallel.mesh_groups import AXES, groups_of_mesh

__all__ = ["AXES", "GROUP_NAMES", "UNSET", "ProcessGroups", "Unset"]


@final
class Unset:
    """Type of :data:`UNSET`, the state of a process group that nobody set. A singleton."""

    _instance: "Unset | None" = None

    def __new__(cls) -> "Unset":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> NoReturn:
        # `if groups.tp:` would fold "never set" into "size one", the very confusion this type ends.
        raise TypeError(
            "UNSET has no truth value: an unset process group is neither 'size one' nor WORLD. "
            "Compare with `is UNSET` or `is None`, or call ProcessGroups.require"
        )

    def __reduce__(self) -> str:
        return "UNSET"  # copies and pickles keep the identity


UNSET: Final = Unset()

Group = ProcessGroup | None | Unset

# A derived group and the groups whose sizes multiply to its own.
_FACTORS: Final[dict[str, tuple[str, ...]]] = {
    "dp_cp": ("dp", "cp"),
    "dp_cp_gtp": ("dp_cp", "gtp"),
    "tp_dp_cp": ("tp", "dp_cp"),
}


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one model on this rank.

    Construct it field by field, or with from_mesh, local or from_attributes. Each field is a group
    that the caller belongs to, None ("size one", or nothing is shared here), or UNSET.

    Fields:
        tp, pp, cp, gtp, ep: tensor-, pipeline-, context-, generalized-tensor- and expert-parallel.
        dp: ranks with other data and the same dense weights, context parallelism apart.
        dp_cp: dp x cp, over which the gradients of GTP-sharded weights are reduced.
        dp_cp_gtp: dp x cp x gtp, over which those of weights replicated over gtp are reduced.
        tp_dp_cp: tp x dp x cp, over which tokens per expert are counted.
        expt_dp, expt_gtp: dp_cp and gtp of the expert weights.
        embd, pos_embd: the stages that share a word (position) embedding.
        model: every rank that holds a part of this model.
        grad_norm: every rank that holds a distinct piece of its gradients.
        mesh: the mesh that the groups came from, if any.

    Raises:
        ValueError: a field holds something else, a destroyed group, or one without the caller.
    """

    tp: Group = UNSET
    pp: Group = UNSET
    cp: Group = UNSET
    dp: Group = UNSET
    dp_cp: Group = UNSET
    tp_dp_cp: Group = UNSET
    gtp: Group = UNSET
    dp_cp_gtp: Group = UNSET
    ep: Group = UNSET
    expt_dp: Group = UNSET
    expt_gtp: Group = UNSET
    embd: Group = UNSET
    pos_embd: Group = UNSET
    model: Group = UNSET
    grad_norm: Group = UNSET
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {problem}"
            for name in GROUP_NAMES
            if (problem := _problem(getattr(self, name))) is not None
        ]
        if problems:
            raise ValueError(
                "ProcessGroups: each field must be a process group that this rank belongs to, "
                "None (size one) or UNSET.\n"
                + _bullets(problems)
                + "\nRemedy: pass None for a group that this rank has no part in"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # groups are handles of the job, not data: a copied model uses the same ones

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Self:
        """Take the axis groups of `mesh` and create the groups derived from them.

        COLLECTIVE OVER THE JOB: it creates process groups, so every rank of the job (ranks outside
        the mesh included) must call it with the same mesh, in the same order as other creations.
        This and the fully-sharded adapter's size-one groups are the only places that create any.

        A field spans mesh axes: dp = dp x ep, dp_cp = dp x ep x cp, dp_cp_gtp adds gtp, tp_dp_cp =
        dp_cp x tp, model = grad_norm = all. An "ep" axis carries other data as well as other
        experts, so it belongs to dp; the experts' own expt_dp is dp_cp divided by ep, and expt_gtp
        is gtp. With pp > 1, embd joins the first and last stage of a pipeline and pos_embd is the
        first stage alone; a stage is a rank's place in the pp group. A group is created only if no
        other spans the same ranks, and none for one rank: that field becomes None.

        Args:
            mesh: axes named among "pp", "dp", "cp", "gtp", "tp", "ep", in any order. It may cover
                a part of the job (several models in one job); a rank outside it gets a collection
                that is UNSET throughout, so that any use is an error.

        Raises:
            ValueError: no or unknown axis names, no axis, or a slice of a larger mesh (then other
                ranks would enumerate other groups).
        """
        found = groups_of_mesh(mesh)
        return cls(mesh=mesh) if found is None else cls(mesh=mesh, **found)

    @classmethod
    def local(cls) -> Self:
        """One rank alone: every group has size one. Needs no process group."""
        alone: dict[str, Any] = dict.fromkeys(GROUP_NAMES)
        return cls(**alone)

    @classmethod
    def from_attributes(cls, groups: object) -> Self:
        """Read the fields off an object with (some of) these attributes, as Megatron's collection.

        An absent attribute stays UNSET; an attribute that is None is an explicit "size one".
        """
        found: dict[str, Any] = {name: getattr(groups, name, UNSET) for name in GROUP_NAMES}
        return cls(**found)

    def require(
        self, *names: str, function: str, option: str | Mapping[str, str]
    ) -> dict[str, ProcessGroup | None]:
        """Resolve the groups that a call will use, or name everything that is wrong with them.

        Call it before the first collective, barrier, group creation or gradient write.

        Args:
            names: fields that the call may use.
            function: the caller's name, for the error.
            option: what needs them: one text, or one per field.

        Returns:
            The group of each field, None where the axis has size one.

        Raises:
            ValueError: once, listing each field that is UNSET and each whose size disagrees with
                the axes it spans (where those are set), with the option that needs it.
        """
        self._check_names(names)
        reasons = {n: option if isinstance(option, str) else option.get(n, "") for n in names}
        problems: list[str] = []
        for name, reason in reasons.items():
            if getattr(self, name) is UNSET:
                problems.append(f"{name}: not set (UNSET), needed by {reason}")
            elif (wrong := self._size_problem(name)) is not None:
                problems.append(f"{name}: {wrong}, needed by {reason}")
        if problems:
            raise ValueError(
                f"{function}: the collection of process groups lacks what this call uses.\n"
                + _bullets(problems)
                + f"\n{self._remedy()}"
            )
        return {name: getattr(self, name) for name in names}

    def group(self, name: str) -> ProcessGroup:
        """Group `name` itself, for a collective. ValueError if UNSET, and if None."""
        if (group := self._resolved(name)) is None:
            raise ValueError(
                f"ProcessGroups.{name}: expected a group, got None (size one): torch would read it "
                "as WORLD. Remedy: issue no collective over an axis of size one"
            )
        return group

    def size(self, name: str) -> int:
        """Number of ranks in group `name`; 1 for None. ValueError if UNSET."""
        group = self._resolved(name)
        return 1 if group is None else dist.get_world_size(group)

    def rank(self, name: str) -> int:
        """This rank's place in group `name`; 0 for None. ValueError if UNSET."""
        group = self._resolved(name)
        return 0 if group is None else dist.get_rank(group)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Global ranks of group `name`, in group order. ValueError if UNSET.

        For None this rank alone, its number taken from the mesh or from any group of the
        collection, and 0 where there is neither (a model of one rank).
        """
        group = self._resolved(name)
        if group is not None:
            return tuple(dist.get_process_group_ranks(group))
        for other in (getattr(self, each) for each in GROUP_NAMES):
            if isinstance(other, ProcessGroup):
                return (dist.get_global_rank(other, dist.get_rank(other)),)
        return (0 if self.mesh is None else self.mesh.get_rank(),)

    def group_name(self, name: str) -> str:
        """torch's name of group `name`; "" for None. ValueError if UNSET."""
        group = self._resolved(name)
        return "" if group is None else str(group.group_name)

    def world(self) -> dict[str, int]:
        """{axis: ranks} of the axes that are set, for reports; dp includes the ranks along ep."""
        return {axis: self.size(axis) for axis in AXES if getattr(self, axis) is not UNSET}

    def _resolved(self, name: str) -> ProcessGroup | None:
        self._check_names([name])
        group: Group = getattr(self, name)
        if isinstance(group, Unset):
            raise ValueError(
                f"ProcessGroups.{name}: expected a group or None, got UNSET. {self._remedy()}"
            )
        return group

    def _size_problem(self, name: str) -> str | None:
        factors = _FACTORS.get(name, ())
        if not factors or any(getattr(self, factor) is UNSET for factor in factors):
            return None
        sizes = [self.size(factor) for factor in factors]
        if (got := self.size(name)) == prod(sizes):
            return None
        product = " x ".join(f"{f} ({n})" for f, n in zip(factors, sizes, strict=True))
        return f"expected {prod(sizes)} ranks = {product}, got {got}"

    def _remedy(self) -> str:
        if self.mesh is not None and self.mesh.get_coordinate() is None:
            return "Remedy: this rank lies outside the model's mesh: leave it out of the call"
        return (
            "Remedy: build the collection with ProcessGroups.from_mesh, or pass each of these "
            "groups; None says that the axis has size one (unset never does, nor means WORLD)"
        )

    @staticmethod
    def _check_names(names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in GROUP_NAMES]:
            raise ValueError(
                f"ProcessGroups: unknown group {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(GROUP_NAMES)}"
            )


GROUP_NAMES: Final = tuple(f.name for f in fields(ProcessGroups) if f.name != "mesh")


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"  - {line}" for line in lines)


def _problem(group: object) -> str | None:
    """What is wrong with a field's value, if anything."""
    if group is None or isinstance(group, Unset):
        return None
    if not isinstance(group, ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return "got torch's marker for a group that this rank does not belong to"
        return f"got {group!r} of type {type(group).__name__}"
    try:
        rank = dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return "got a group that is not registered with torch.distributed (destroyed?)"
    return None if rank >= 0 else "got a group that this rank does not belong to"
