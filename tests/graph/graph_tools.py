"""Graphs to test with: compiled from small models and kept, or built node by node.

Test modules load this file with ``gtpgraph.by_path.module_at`` under one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph.compat import tree_map_only
from gtpgraph.graph import builder
from gtpgraph.graph.backend import CompiledModel, compile
from gtpgraph.graph.checked import Checked
from gtpgraph.graph.sites import GraphWeight, Use
from gtpgraph.kernels.readiness import recording
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import shard
from gtpgraph.passes.grad_ready import BucketInputs, Place
from gtpgraph.passes.pipeline import BackwardRequest

__all__ = ["nullcontext"]
GATHER = torch.ops.gtpgraph.gather.default
REDUCE = torch.ops.gtpgraph.reduce.default
ADD = torch.ops.aten.add.Tensor
MUL = torch.ops.aten.mul.Tensor
MM = torch.ops.aten.mm.default


# -- processes ------------------------------------------------------------------------------------


@contextmanager
def fake_ranks(gtp: int, dp: int = 1) -> Iterator[ProcessGroups]:
    """dp x gtp ranks of which this process is rank 0 and the others do not exist.

    Collectives move nothing: good for structure, useless for numbers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gtp * dp)
    try:
        mesh = init_device_mesh("cpu", (dp, gtp), mesh_dim_names=("dp", "gtp"))
        yield ProcessGroups.from_mesh(mesh)
    finally:
        dist.destroy_process_group()


@contextmanager
def one_rank() -> Iterator[ProcessGroups]:
    """A gtp group of one real process: every collective is issued and its numbers are right."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ProcessGroups(dp=None, gtp=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


# -- compiled -------------------------------------------------------------------------------------


@dataclass
class Compiled:
    """A compiled model and the graphs that its compilation rewrote, in order of compilation."""

    wrapper: DistributedDataParallel
    step: CompiledModel
    checked: list[Checked] = field(default_factory=list)
    forwards: list[fx.Graph] = field(default_factory=list)
    joints: list[fx.Graph] = field(default_factory=list)

    def train(self, *batch: Any) -> dict[str, Tensor]:
        """One synchronised step; the whole gradients by name."""
        self.wrapper.zero_grad_buffer()
        self.step(*batch).backward()
        self.wrapper.finish_grad_sync()
        return {name: self.wrapper.full_grad(name) for name, _ in self.wrapper.named_weights()}


def compiled(
    model: nn.Module, *batch: Any, groups: ProcessGroups | None = None,
    wrap: Mapping[str, Any] | None = None, **options: Any,
) -> Compiled:  # fmt: skip
    """Shard, wrap, compile and run one forward."""
    torch._dynamo.reset()  # all models share one forward: few compiles are kept
    wrapper = DistributedDataParallel(shard(model, groups), groups, **(wrap or {}))
    options.setdefault("lowering", "eager")
    result = Compiled(wrapper, compile(wrapper, **options))
    verify, forward = builder.verify, builder.RegionBuilder.on_forward
    joint = builder.RegionBuilder.on_joint

    def spy_verify(checked: Checked, region: str) -> None:
        result.checked.append(checked)
        verify(checked, region)

    def spy_forward(self: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        forward(self, gm, inputs)
        result.forwards.append(gm.graph)

    def spy_joint(self: Any, graph: fx.Graph) -> None:
        joint(self, graph)
        result.joints.append(graph)

    with (
        patch.object(builder, "verify", spy_verify),
        patch.object(builder.RegionBuilder, "on_forward", spy_forward),
        patch.object(builder.RegionBuilder, "on_joint", spy_joint),
    ):
        result.step(*batch)
    for region in result.step.regions:
        wrapper.ledger.forget_forward(region.calls)
    return result


def copied(checked: Checked) -> Checked:
    """The same, with a graph of its own that a test may break."""
    graph = fx.Graph()
    old = checked.graph
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(old, mapping)
    output = graph.output(result)
    output.meta = dict(next(iter(reversed(old.nodes))).meta)
    return replace(checked, graph=graph)


def targets(graph: fx.Graph, *wanted: object) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in wanted]


def text(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as data: what two equal graphs share, apart from node identities."""
    return [(n.op, str(n.target), n.name, str(n.args), str(n.kwargs)) for n in graph.nodes]


# -- built by hand --------------------------------------------------------------------------------


class Backward:
    """A backward graph, node by node.

    >>> b = Backward(); g = b.input(4, 4); w = b.reduce(b.call(MM, g, g), seq_nr=7)
    >>> b.returns({0: w}); request = b.request({0: ("w", True)})
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.gm: fx.GraphModule = fx.GraphModule({}, self.graph)
        self.graph = self.gm.graph

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"tangents_{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(*shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        real = tree_map_only(fx.Node, lambda n: n.meta["val"], args)
        with self.mode:
            node.meta["val"] = target(*real)
        node.meta.update(meta)
        return node

    def reduce(self, wgrad: fx.Node, group: str = "", ranks: int = 1, **meta: Any) -> fx.Node:
        rows = -(-wgrad.meta["val"].shape[0] // ranks)
        return self.call(REDUCE, wgrad, rows, group, **meta)

    def returns(self, grads: Mapping[int, fx.Node | None], *others: fx.Node) -> None:
        """Output: the gradients of the inputs by position, then other values, without a desc."""
        output = self.graph.output((*grads.values(), *others))
        descs = [GradAOTOutput(grad_of=PlainAOTInput(idx=k)) for k in grads]
        output.meta["desc"] = [*descs, *[None] * len(others)]
        self.gm.recompile()

    def request(
        self, weights: Mapping[int, tuple[str, bool]], *, depth: int = 0,
        uses: Mapping[int, Sequence[Use]] | None = None, ungraphed: Sequence[int] = (),
        numel: int = 16, wire_dtype: torch.dtype | None = None,
    ) -> BackwardRequest:  # fmt: skip
        """All weights in bucket 0, `numel` elements each; the wrapper's index is the position."""
        count = max(weights) + 1
        with self.mode:
            inputs = BucketInputs(torch.empty(numel * count), torch.empty(count))
        return BackwardRequest(
            {p: GraphWeight(p, fqn, gtp) for p, (fqn, gtp) in weights.items()},
            uses or {},
            {p: Place(0, p, p * numel, 1.0) for p in weights},
            {p: "UNGRAPHED" if p in ungraphed else "GRAPHED" for p in weights},
            {0: inputs}, wire_dtype, depth, self.mode,
        )  # fmt: skip


class Reports:
    """A recorder: the sites in the order in which their grad_ready ops ran."""

    def __init__(self) -> None:
        self.sites: list[int] = []

    def grad_ready(self, site: int) -> None:
        self.sites.append(site)

    def bucket_reduce(self, bucket: int) -> None:
        self.sites.append(-1 - bucket)


def run(gm: fx.GraphModule, inputs: Sequence[Tensor], numel: int) -> SimpleNamespace:
    """Run a rewritten graph with one bucket of `numel` elements, full of NaN before: what it
    returns (`outputs`), the bucket after it (`flat`), and its reports (`sites`)."""
    names = [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]
    flat, reports = torch.full((numel,), float("nan")), Reports()
    extra = [flat] if "main_grad_0" in names else []
    extra += [torch.zeros(64)] if "beta_0" in names else []
    gm.recompile()
    with recording(reports):
        outputs = gm(*inputs, *extra)
    return SimpleNamespace(outputs=outputs, flat=flat, sites=reports.sites)
