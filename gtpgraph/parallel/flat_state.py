"""Planners of ``torch.distributed.checkpoint`` for state that lies in pieces of flattened tensors.

In: a flat state dict whose values are tensors, DTensors, picklable objects, or a `FlatPiece`: a run
of elements of a tensor that is stored as one dimension, [numel], and of which every rank holds runs
of its own. Out: plans in torch's format: what one set of ranks writes can be read by any other::

    rank 0   |-- piece --|                     save    rank 0   |---- piece ----|           load
    rank 1               |---- piece ----|    ---->    one tensor [numel] on disk          ---->
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.default_planner import (
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

__all__ = ["FlatLoadPlanner", "FlatPiece", "FlatSavePlanner"]


@dataclass(frozen=True)
class FlatPiece:
    """Elements [first, first + len(data)) of a tensor that is stored flat, [numel].

    `data` is one-dimensional and not empty; loading writes into it.
    """

    data: Tensor
    first: int
    numel: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the piece lies, in torch's words."""
        return ChunkStorageMetadata(torch.Size([self.first]), torch.Size([len(self.data)]))


def _split(state: dict[str, Any]) -> tuple[dict[str, FlatPiece], dict[str, Any]]:
    flat = {key: value for key, value in state.items() if isinstance(value, FlatPiece)}
    return flat, {key: value for key, value in state.items() if key not in flat}


class FlatSavePlanner(DefaultSavePlanner):
    """Torch's save planner, with pieces; `stage` frees the model from the write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged: dict[MetadataIndex, Any] | None = None

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        flat, rest = _split(self.state_dict)
        plan = create_default_local_save_plan(rest, self.is_coordinator)
        items = [
            WriteItem(
                index=MetadataIndex(key, torch.Size([piece.first])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.data),
                    size=torch.Size([piece.numel]),
                ),
            )
            for key, piece in flat.items()
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value behind an item."""
        found = self.state_dict.get(index.fqn)
        return found.data if isinstance(found, FlatPiece) else super().lookup_object(index)

    def stage(self, plan: SavePlan) -> None:
        """Copy to the CPU what `plan` will write: afterwards the originals may change."""
        staged: dict[MetadataIndex, Any] = {}
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, Tensor):
                data = data.detach().to("cpu", copy=True)
            staged[item.index] = data
        self._staged = staged
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """What is written for an item: the staged copy."""
        return (
            super().resolve_data(write_item)
            if self._staged is None
            else (self._staged[write_item.index])
        )


class FlatLoadPlanner(DefaultLoadPlanner):
    """Torch's load planner, with pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state to read into as it is; its tensors are real ones."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads, from wherever it was written.

        Raises:
            ValueError: a tensor has another number of elements in the checkpoint.
        """
        assert self.metadata is not None
        flat, rest = _split(self.state_dict)
        items = list(create_default_local_load_plan(rest, self.metadata, True).items)
        for key, piece in flat.items():
            saved = self.metadata.state_dict_metadata[key]
            size = saved.size if isinstance(saved, TensorStorageMetadata) else None
            if size != torch.Size([piece.numel]) or not isinstance(saved, TensorStorageMetadata):
                raise ValueError(
                    f"{key}: expected {piece.numel} elements, the checkpoint has {size}"
                )
            items += create_read_items_for_chunk_list(key, saved, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that an item is read into."""
        found = self.state_dict[index.fqn]
        if isinstance(found, FlatPiece):
            return found.data
        tensor: Tensor = super().lookup_tensor(index)
        return tensor
