"""The order of the passes, in one place.

In: a partitioned backward (or forward) graph and what is known of its weights. Out: the rewritten
graph and the sites in order of execution. The regather pass runs earlier, on the joint graph::

    joint:     find uses, regather
    backward:  find sites -> chains -> coalesce (an option) -> grad_ready -> lower collectives
               (symmetric: lower symmetric before it) -> late waits -> tokens
    verified, then:  fuse wgrad GEMMs -> fuse scatters -> fuse small accumulates -> tokens
               (Inductor: hold operands)
    forward:   lower collectives (symmetric: lower symmetric before it)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from gtpgraph.graph.plan import GRAPHED
from gtpgraph.graph.sites import GraphWeight, Use, find_sites
from gtpgraph.passes.coalesce import coalesce_pass
from gtpgraph.passes.edit import PassResult
from gtpgraph.passes.fuse import (
    check_fusion,
    find_writes,
    fuse_small_pass,
    fuse_wgrad_gemm_pass,
)
from gtpgraph.passes.fuse_scatter import fuse_scatter_pass
from gtpgraph.passes.grad_ready import BucketInputs, Inserted, Place, grad_ready_pass
from gtpgraph.passes.hold_operands import hold_operands_pass
from gtpgraph.passes.late_waits import late_waits_pass
from gtpgraph.passes.lower_collectives import lower_collectives_pass
from gtpgraph.passes.lower_symmetric import lower_symmetric_pass
from gtpgraph.passes.snapshot import Snapshot
from gtpgraph.passes.thread_tokens import thread_tokens_pass, unthread_tokens

log = logging.getLogger("gtpgraph.passes")


@dataclass(frozen=True)
class BackwardRequest:
    """What the passes need to know about one backward graph.

    `weights` maps input positions of the traced graph to trainable weights; `uses`, `places` and
    `chains` are keyed by a weight's index in its wrapper, `buckets` by bucket number; `depth` is
    the number of reductions in flight before the oldest is waited for; `coalesce` sums a weight's
    contributions before one reduction; `staging` are fake uint8 buffers by group where exchanges go
    through symmetric memory, None for functional collectives.
    """

    weights: Mapping[int, GraphWeight]
    uses: Mapping[int, Sequence[Use]]
    places: Mapping[int, Place]
    chains: Mapping[int, str]
    buckets: Mapping[int, BucketInputs]
    wire_dtype: torch.dtype | None
    depth: int
    fake_mode: Any
    coalesce: bool = False
    staging: Mapping[str, Tensor] | None = None


def rewrite_backward(gm: fx.GraphModule, request: BackwardRequest) -> tuple[Inserted, Snapshot]:
    """Run the backward passes on `gm`, in place; also returns what V08 compares against."""
    sites = find_sites(gm.graph, request.weights, request.uses)
    graphed = [s for s in sites if request.chains[s.weight.index] == GRAPHED]
    ungraphed = [s for s in sites if request.chains[s.weight.index] != GRAPHED]
    if request.coalesce:
        result, graphed = coalesce_pass(
            gm, sites=graphed, wire_dtype=request.wire_dtype, fake_mode=request.fake_mode
        )
        _log("coalesce", result)
    before = Snapshot.of(gm.graph)
    result, inserted = grad_ready_pass(
        gm,
        graphed=graphed,
        ungraphed=ungraphed,
        places=request.places,
        buckets=request.buckets,
        fake_mode=request.fake_mode,
    )
    _log("grad_ready", result)
    inserted_graph = Snapshot.of(gm.graph)
    groups = _lower(gm, request.wire_dtype, request.staging, request.fake_mode)
    for name, result in (
        ("late_waits", late_waits_pass(gm, depth=request.depth)),
        ("thread_tokens", thread_tokens_pass(gm)),
    ):
        _log(name, result)
    return replace(inserted, staging=groups), before.against(inserted_graph, inserted.removed)


def _lower(
    gm: fx.GraphModule,
    wire_dtype: torch.dtype | None,
    staging: Mapping[str, Tensor] | None,
    fake_mode: Any,
) -> tuple[str, ...]:
    """Lower gathers and reduces; returns the groups of the staging placeholders."""
    groups: tuple[str, ...] = ()
    if staging is not None:
        result, groups = lower_symmetric_pass(
            gm, wire_dtype=wire_dtype, staging=staging, fake_mode=fake_mode
        )
        _log("lower_symmetric", result)
    result = lower_collectives_pass(gm, wire_dtype=wire_dtype, fake_mode=fake_mode)
    _log("lower_collectives", result)
    return groups


def rewrite_forward(
    gm: fx.GraphModule, fake_mode: Any, staging: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Run the forward passes on `gm`, in place; the groups of appended staging placeholders."""
    return _lower(gm, None, staging, fake_mode)


def fuse_backward(gm: fx.GraphModule, fake_mode: Any, region: str) -> None:
    """Fuse what feeds main_grads, in place, after the graph has been verified.

    Raises:
        RuntimeError: the fused graph adds or reports anything else than it did before.
    """
    before = find_writes(gm.graph)
    unthread_tokens(gm.graph)
    for name, result in (
        ("fuse_wgrad_gemm", fuse_wgrad_gemm_pass(gm, fake_mode=fake_mode)),
        ("fuse_scatter", fuse_scatter_pass(gm, fake_mode=fake_mode)),
        ("fuse_small", fuse_small_pass(gm, fake_mode=fake_mode)),
        ("thread_tokens", thread_tokens_pass(gm)),
    ):
        _log(name, result)
    wrong = check_fusion(before, find_writes(gm.graph))
    if wrong:
        raise RuntimeError(
            f"region {region}: fusing changed the graph's contributions: {'; '.join(wrong)}. "
            "Compile with fuse=False and report the graph."
        )


def hold_operands(gm: fx.GraphModule, window: int, fake_mode: Any) -> None:
    """Let operands of accumulates last, in place: see `hold_operands_pass`."""
    _log("hold_operands", hold_operands_pass(gm, window=window, fake_mode=fake_mode))


def _log(name: str, result: PassResult) -> None:
    if result.modified:
        counts = ", ".join(f"{n} {what}" for what, n in result.counts.items())
        log.debug("%s_pass: %s", name, counts)
