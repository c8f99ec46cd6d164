"""What a checkpoint of a model and its optimizer holds, under which keys.

In: a wrapped model, its optimizer. Out: a flat state dict for `flat_state`'s planners::

    model.<fqn>                    the weight: a DTensor of the whole one where it is GTP-sharded
    optimizer.<fqn>.master         fp32, flattened over the whole weight; pieces by rank
    optimizer.<fqn>.<state>        exp_avg, ...: as master; a scalar (step) once a weight
    optimizer.options              lr, betas, ... of each parameter group

Keys and shapes are those of whole weights, so gtp and dp may differ when the checkpoint is read.
Ranks along pp, tp and, for experts, ep hold other weights under the same names: there the key says
which (``model.pp1.tp0.<fqn>``), and these degrees must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import TensorStorageMetadata

from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.flat_state import FlatPiece
from gtpgraph.parallel.optimizer import DistributedOptimizer
from gtpgraph.parallel.pieces import Piece, whole_numel
from gtpgraph.parallel.process_groups import UNSET, ProcessGroups
from gtpgraph.parallel.setup import is_expert
from gtpgraph.parallel.sharding import all_weights, gtp_weights

__all__ = [
    "Scopes",
    "adopt_objects",
    "adopt_optimizer",
    "gather_keys",
    "model_state",
    "optimizer_state",
    "room",
]

OPTIONS = "optimizer.options"
# How a step is computed, not what: the run that loads decides.
_NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


class Scopes:
    """The part of a key that tells apart what ranks hold under one name."""

    def __init__(self, model: DistributedDataParallel) -> None:
        groups = model.groups
        specs = {param: info.spec for param, info in gtp_weights(model).items()}
        self._experts = {
            name
            for param, names in all_weights(model).items()
            if is_expert(param, specs.get(param))
            for name in names
        }
        self._dense = _places(groups, ("pp", "tp"))
        self._expert = _places(groups, ("pp", "tp", "ep"))

    def key(self, kind: str, fqn: str, *rest: str) -> str:
        """``kind.[place.]fqn[.rest]``."""
        place = self._expert if self.is_expert(fqn) else self._dense
        return ".".join([kind, *place, fqn, *rest])

    def is_expert(self, fqn: str) -> bool:
        """Whether a weight belongs to the experts."""
        return fqn in self._experts


def _places(groups: ProcessGroups, axes: tuple[str, ...]) -> list[str]:
    shown = [a for a in axes if getattr(groups, a) is not UNSET and groups.size(a) > 1]
    return [f"{axis}{groups.rank(axis)}" for axis in shown]


def model_state(model: DistributedDataParallel, scopes: Scopes) -> dict[str, Any]:
    """The model's state dict under checkpoint keys; tensors share the model's memory."""
    return {scopes.key("model", fqn): value for fqn, value in model.state_dict().items()}


def adopt_objects(
    model: DistributedDataParallel, scopes: Scopes, loaded: Mapping[str, Any]
) -> None:
    """Give a model what was read that is no tensor (its extra state); tensors are there already."""
    values = {fqn: loaded[scopes.key("model", fqn)] for fqn in model.state_dict()}
    objects = {fqn: value for fqn, value in values.items() if not isinstance(value, Tensor)}
    if objects:
        model.load_state_dict(objects, strict=False)


def optimizer_state(optimizer: DistributedOptimizer, scopes: Scopes) -> dict[str, Any]:
    """What this rank alone must write of the optimizer's state, and what all of them have.

    Raises:
        NotImplementedError: a state that is neither elementwise nor a scalar tensor.
    """
    found: dict[str, Any] = {OPTIONS: _options(optimizer)}
    for piece, values in _states(optimizer):
        for name, value in values.items():
            key = scopes.key("optimizer", piece.fqn, name)
            if value.dim() == 0:
                found[key] = value
            elif value.shape != piece.master.shape:
                raise NotImplementedError(
                    f"{key}: expected a state with an element for each of the weight's, or a "
                    f"scalar, got shape {tuple(value.shape)} for {tuple(piece.master.shape)}. Use "
                    "an elementwise optimizer."
                )
            elif len(mine := value.detach()[piece.share]):
                first = piece.first + piece.share.start
                found[key] = FlatPiece(mine, first, whole_numel(piece.state))
    return found


def _states(optimizer: DistributedOptimizer) -> list[tuple[Piece, dict[str, Tensor]]]:
    """Each piece of this rank with its state by name, the master first."""
    state = optimizer.torch_optimizer.state
    return [
        (
            piece,
            {"master": piece.master}
            | {n: v for n, v in state.get(piece.master, {}).items() if isinstance(v, Tensor)},
        )
        for part in optimizer.slices
        for piece in part.pieces
    ]


def _options(optimizer: DistributedOptimizer) -> dict[str, Any]:
    groups = [
        {k: v for k, v in group.items() if k not in _NOT_SAVED} for group in optimizer.param_groups
    ]
    return {"groups": groups, "skipped": optimizer.skipped}


def gather_keys(
    optimizer: DistributedOptimizer, groups: ProcessGroups, scopes: Scopes
) -> dict[str, list[str]]:
    """{weight: names of its states} over the ranks that share this rank's weights.

    A rank owns pieces of some weights, perhaps of none, and learns of the others here: over dp, and
    over expt_dp for experts under expert parallelism. A collective over those groups, no others.

    Raises:
        RuntimeError: ranks keep different states for one weight, so that a hole would be written.
    """
    mine = {piece.fqn: sorted(values) for piece, values in _states(optimizer)}
    spread = groups.ep is not UNSET and groups.size("ep") > 1
    apart = {fqn for fqn in mine if spread and scopes.is_expert(fqn)}
    found = _merged({f: n for f, n in mine.items() if f not in apart}, groups.dp)
    if spread:
        found |= _merged({f: n for f, n in mine.items() if f in apart}, groups.expt_dp)
    return found


def _merged(mine: dict[str, list[str]], group: object) -> dict[str, list[str]]:
    everyone = [mine]
    if isinstance(group, ProcessGroup):
        everyone = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    found: dict[str, list[str]] = {}
    for keys in everyone:
        for fqn, names in keys.items():
            if found.setdefault(fqn, names) != names:
                raise RuntimeError(
                    f"optimizer state of {fqn}: expected the same states on every rank that holds "
                    f"a piece of it, got {found[fqn]} and {names}. Load the optimizer's state on "
                    "all ranks, or on none."
                )
    return found


def room(
    optimizer: DistributedOptimizer, scopes: Scopes, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Tensors to read the optimizer's state into: what `saved` has for each piece."""
    found: dict[str, Any] = {OPTIONS: None}
    for part in optimizer.slices:
        for piece in part.pieces:
            start = scopes.key("optimizer", piece.fqn, "")
            names = [k for k in saved if k.startswith(start) and "." not in k[len(start) :]]
            for key in names or [f"{start}master"]:
                found[key] = _room(piece, saved.get(key))
    return found


def _room(piece: Piece, saved: Any) -> FlatPiece | Tensor:
    numel, device = whole_numel(piece.state), piece.master.device
    dtype = torch.float32
    if isinstance(saved, TensorStorageMetadata):
        dtype = saved.properties.dtype
        if not saved.size:
            return torch.zeros((), dtype=dtype)
    return FlatPiece(torch.zeros(len(piece.master), dtype=dtype, device=device), piece.first, numel)


@torch.no_grad()
def adopt_optimizer(
    optimizer: DistributedOptimizer, scopes: Scopes, loaded: Mapping[str, Any]
) -> None:
    """Put what was read into the optimizer's masters, states and options."""
    torch_optimizer = optimizer.torch_optimizer
    packed = torch_optimizer.state_dict()["param_groups"]
    place = {
        param: index
        for group, names in zip(torch_optimizer.param_groups, packed, strict=True)
        for param, index in zip(group["params"], names["params"], strict=True)
    }
    states: dict[int, dict[str, Tensor]] = {}
    for part in optimizer.slices:
        for piece in part.pieces:
            start = scopes.key("optimizer", piece.fqn, "")
            values = {
                key[len(start) :]: value.data if isinstance(value, FlatPiece) else value
                for key, value in loaded.items()
                if key.startswith(start) and "." not in key[len(start) :]
            }
            piece.master.copy_(values.pop("master"))
            if values:
                states[place[piece.master]] = values
    options = loaded[OPTIONS]
    if len(options["groups"]) == len(packed):
        for group, saved in zip(packed, options["groups"], strict=True):
            group.update(saved)
    torch_optimizer.load_state_dict({"state": states, "param_groups": packed})
    optimizer.skipped = int(options["skipped"])
