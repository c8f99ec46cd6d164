"""gtpgraph: readiness as part of the captured backward graph of GTP-sharded models.

The names below are the public API; they are imported on first use, so that ``import gtpgraph`` and
reading a plan stay cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpgraph.graph.backend import CompiledModel, compile, inspect, plan_of
    from gtpgraph.graph.capture import capture
    from gtpgraph.graph.plan import HookPlan
    from gtpgraph.parallel.checkpoint import Checkpointer
    from gtpgraph.parallel.data_parallel import DistributedDataParallel
    from gtpgraph.parallel.finalize import finalize_model_grads
    from gtpgraph.parallel.fsdp import fully_shard_v1
    from gtpgraph.parallel.optimizer import DistributedOptimizer
    from gtpgraph.parallel.process_groups import ProcessGroups
    from gtpgraph.parallel.ready import Report
    from gtpgraph.parallel.sharding import materialize, shard

_HOME = {
    "Checkpointer": "gtpgraph.parallel.checkpoint",
    "CompiledModel": "gtpgraph.graph.backend",
    "DistributedDataParallel": "gtpgraph.parallel.data_parallel",
    "DistributedOptimizer": "gtpgraph.parallel.optimizer",
    "HookPlan": "gtpgraph.graph.plan",
    "ProcessGroups": "gtpgraph.parallel.process_groups",
    "Report": "gtpgraph.parallel.ready",
    "capture": "gtpgraph.graph.capture",
    "compile": "gtpgraph.graph.backend",
    "finalize_model_grads": "gtpgraph.parallel.finalize",
    "fully_shard_v1": "gtpgraph.parallel.fsdp",
    "inspect": "gtpgraph.graph.backend",
    "materialize": "gtpgraph.parallel.sharding",
    "plan_of": "gtpgraph.graph.backend",
    "shard": "gtpgraph.parallel.sharding",
}

__all__ = [
    "Checkpointer",
    "CompiledModel",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "HookPlan",
    "ProcessGroups",
    "Report",
    "capture",
    "compile",
    "finalize_model_grads",
    "fully_shard_v1",
    "inspect",
    "materialize",
    "plan_of",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gtpgraph' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
