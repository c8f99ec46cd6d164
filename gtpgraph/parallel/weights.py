"""The run-time record of one trainable weight of a wrapped model.

The data-parallel wrapper owns one `WeightState` per weight, in parameter order; passes, regions and
the eager chain all refer to it by `index`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gtpgraph.parallel.buckets import Bucket, Member
from gtpgraph.parallel.ready import Report
from gtpgraph.parallel.sharding import ShardSpec

if TYPE_CHECKING:
    from gtpgraph.parallel.data_parallel import DistributedDataParallel

STATE_ATTRIBUTE = "_gtp_state"


@dataclass(eq=False)
class WeightState:
    """One weight: where its gradient lives and what to do when it is ready.

    `scale` multiplies every contribution (1 / (dp x cp x gtp) for a mean loss); `gtp_wire_dtype` is
    the dtype of the reduction over the GTP group; `gathers` counts this step's eager gathers.
    """

    index: int
    param: nn.Parameter
    fqns: tuple[str, ...]
    spec: ShardSpec | None
    bucket: Bucket
    member: Member
    scale: float
    gtp_wire_dtype: torch.dtype
    wrapper: weakref.ref[DistributedDataParallel]
    ready_hook: Callable[[nn.Parameter, Report], None] | None = None
    gathers: int = 0

    @property
    def fqn(self) -> str:
        return self.fqns[0]


def state_of(param: nn.Parameter) -> WeightState | None:
    """The state that a wrapper gave to `param`, or None when nothing wraps it."""
    state: WeightState | None = getattr(param, STATE_ATTRIBUTE, None)
    return state
