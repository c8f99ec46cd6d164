"""How one weight is cut over its GTP group: the record, and the cutting itself.

In: a full weight ``[rows, *rest]``. Out: this rank's shard ``[shard_rows, *rest]``, where
``shard_rows = ceil(rows / n)`` is torch's own chunk rule (so is DTensor's ``Shard(0)``), and rows
beyond the weight's last are zero:

    rows = 5, n = 4     rank 0: 0 1    rank 1: 2 3    rank 2: 4 -    rank 3: - -
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "SPECS",
    "STATE_MESH",
    "ShardSpec",
    "StateMesh",
    "WeightInfo",
    "cut",
    "like",
    "specs_of",
    "succeed",
    "successor",
]

# Names in a module's __dict__. Not on the Parameter: deepcopy drops a Parameter's attributes.
SPECS = "_gtp_specs"
STATE_MESH = "_gtp_state_mesh"


@dataclass(frozen=True)
class ShardSpec:
    """One weight's cut along dim 0 over its GTP group.

    Fields:
        rows: rows of the whole weight (its dim 0).
        shard_rows: rows of every rank's shard, padding included.
        shape: shape of the whole weight.
        gtp_size, gtp_rank: size of the group and this rank's place in it.
        group_name: torch's name of the group, "" for a group of one.
        ranks: global ranks of the group, in group order.
        axis: the field of ProcessGroups it came from, "gtp" or "expt_gtp".
        expert: whether the weight belongs to the experts of a mixture.
    """

    rows: int
    shard_rows: int
    shape: tuple[int, ...]
    gtp_size: int
    gtp_rank: int
    group_name: str
    ranks: tuple[int, ...]
    axis: str
    expert: bool = False

    @property
    def start(self) -> int:
        """First row of the whole weight in this shard (``rows`` for a shard without any)."""
        return min(self.gtp_rank * self.shard_rows, self.rows)

    @property
    def valid_rows(self) -> int:
        """Rows of this shard that are rows of the weight; the rest is padding. May be 0."""
        return min(self.start + self.shard_rows, self.rows) - self.start

    @property
    def is_stacked(self) -> bool:
        """Whether this is one weight of several experts, [experts, ...]."""
        return len(self.shape) == 3

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the shard, padding included."""
        return (self.shard_rows, *self.shape[1:])


@dataclass(frozen=True)
class WeightInfo:
    """A GTP weight of a model: its cut, and every name it goes by, the first in module order."""

    spec: ShardSpec
    fqns: tuple[str, ...]


class StateMesh:
    """The mesh on which a model's state dict shows its shards; None: a mesh of the group alone.

    A holder, for a copied model must share the mesh: meshes and groups are handles, not data.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def cut(full: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's shard ``[shard_rows, *rest]`` of ``full``: a new contiguous tensor, zero-padded.

    Raises ValueError when ``full`` is not of ``spec.shape``.
    """
    if tuple(full.shape) != spec.shape:
        raise ValueError(f"cut: expected a weight of {spec.shape}, got {tuple(full.shape)}")
    shard = full.new_empty(spec.shard_shape)
    shard[: spec.valid_rows].copy_(full.narrow(0, spec.start, spec.valid_rows))
    shard[spec.valid_rows :].zero_()
    return shard


def specs_of(module: nn.Module) -> dict[str, ShardSpec]:
    """The specs of the weights that ``module`` itself owns, by parameter name; often empty."""
    specs: dict[str, ShardSpec] = module.__dict__.get(SPECS, {})
    return specs


def like(old: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A Parameter of ``data`` with the frozen flag and the Python attributes of ``old``."""
    # nn.Parameter(data) alone would make a frozen weight trainable.
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


# Parameter -> the one put in its place where torch cannot change it (`.to_empty()` of a meta
# weight, assign=True): without it each further owner of a tied weight would get one of its own.
_successors: Any = WeakIdKeyDictionary()


def succeed(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let the other owners of ``old`` take ``new`` when they are next converted or loaded."""
    new.__dict__.update(old.__dict__)
    _successors[old] = new


def successor(param: nn.Parameter | None) -> nn.Parameter | None:
    """The newest Parameter in the place of ``param``; itself if nothing replaced it."""
    while param is not None and param in _successors:
        param = _successors[param]
    return param
