"""Expert weights are gathered once per forward of their module, however often it reads them.

A loop over the experts that this rank's tokens hit reads the whole 3-D weight once per hit, so
ranks with other tokens would issue other collectives: an abort on gloo, a hang on NCCL. Within one
forward the first eager read gathers, and later reads get the same tensor: one collective, one use::

    module(x) --opens a scope--> for e in hit: self.gate_up_proj[e] --> gather, cached, cached, ...

Any token goes to some expert, so every rank with a token reads each weight at least once; a rank
without any reads none, which nobody can tell in advance. Reads that are traced into a graph are
merged in the graph (`gtpgraph.graph.backend`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtpgraph import compat

_SCOPE = "_gtp_gathered"  # in a module's __dict__, while its forward runs


def call_in_scope(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``__call__`` of a module with expert weights."""
    if torch.compiler.is_compiling():
        return nn.Module.__call__(self, *args, **kwargs)
    outer = self.__dict__.get(_SCOPE)
    self.__dict__[_SCOPE] = {}
    try:
        return nn.Module.__call__(self, *args, **kwargs)
    finally:
        del self.__dict__[_SCOPE]
        if outer is not None:
            self.__dict__[_SCOPE] = outer


def gather_in_scope(
    module: nn.Module, name: str, shard: nn.Parameter, gather: Callable[[], Tensor]
) -> Tensor:
    """What ``gather()`` gives, or gave in this forward of ``module`` for the same shard and mode.

    A read under no_grad (for a dtype, say) is kept apart: it cannot be differentiated.
    """
    scope: dict[Any, tuple[nn.Parameter, Tensor]] | None = module.__dict__.get(_SCOPE)
    if scope is None:
        return gather()
    key = name, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    known = scope.get(key)
    if known is None or known[0] is not shard:
        known = scope[key] = shard, gather()
    return known[1]


def read_eagerly(getter: Callable[..., Any]) -> None:
    """Keep reads by code that Dynamo has skipped (a loop with a graph break in it) out of graphs.

    Dynamo would compile the property by itself: a region that holds a gather and nothing else, once
    per read, blind to the scope.
    """
    compat.run_eagerly(getter.__code__, callees=True)


compat.run_eagerly(call_in_scope.__code__, callees=False)
