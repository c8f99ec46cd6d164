"""The two lowerings of a region, which differ in their last stage alone.

In: a graph captured by Dynamo, its fake inputs, and a `RegionBuilder`. Out: a callable.

    "eager"      AOTAutograd, min-cut partition, graphs run node by node by FX: the bit-exact oracle
    "inductor"   the whole Inductor pipeline, its reorderings off, our passes before its last stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from gtpgraph import compat
from gtpgraph.graph.builder import RegionBuilder
from gtpgraph.graph.sites import output_node

Lowered = Callable[..., Any]


def lower_eager(gm: fx.GraphModule, inputs: Sequence[Any], builder: RegionBuilder) -> Lowered:
    """Compile a region whose graphs FX runs in node order."""

    def inference(graph: fx.GraphModule, fakes: Sequence[Any]) -> Lowered:
        builder.on_forward(graph, fakes)
        return _Forward(builder, run_by_fx(graph))

    def forward(graph: fx.GraphModule, fakes: Sequence[Any]) -> Lowered:
        builder.on_forward(graph, fakes)
        return _Forward(builder, run_by_fx(graph))

    def backward(graph: fx.GraphModule, fakes: Sequence[Any]) -> Lowered:
        region, _ = builder.on_backward(graph, fakes)
        return region.wrap_backward(run_by_fx(graph))

    with compat.eager_backward_compile():
        return compat.aot_compile(
            gm, inputs, fw=forward, bw=backward, inference=inference, on_joint=builder.on_joint
        )


def lower_inductor(gm: fx.GraphModule, inputs: Sequence[Any], builder: RegionBuilder) -> Lowered:
    """Compile a region whose graphs Inductor turns into kernels, in the graph's order."""

    def inner(graph: fx.GraphModule, fakes: Sequence[Any], **kw: Any) -> Any:
        if kw.get("is_backward"):
            region, extra = builder.on_backward(graph, fakes)
            compat.mark_visible_outputs(output_node(graph.graph))
            lasts = builder.holds_operands
            compiled = compat.inductor_inner(graph, [*fakes, *extra], reuse=not lasts, **kw)
            return region.wrap_backward(compiled)
        builder.on_forward(graph, fakes)
        extended = [*fakes, *builder.forward_fakes]
        return _Forward(builder, compat.inductor_inner(graph, extended, **kw))

    with compat.eager_backward_compile():
        return compat.inductor_compile(
            gm, inputs, inner=inner, on_joint=builder.on_joint, identity=builder.options.identity
        )


LOWERINGS: dict[str, Callable[[fx.GraphModule, Sequence[Any], RegionBuilder], Lowered]] = {
    "eager": lower_eager,
    "inductor": lower_inductor,
}


class _Forward:
    """A lowered forward; its region is known only once the backward has been compiled too."""

    _boxed_call = True  # takes its arguments in one list

    def __init__(self, builder: RegionBuilder, compiled: Any) -> None:
        self._builder = builder
        self._compiled = compiled
        self._wrapped: Lowered | None = None
        self._staging = builder.forward_staging

    def __call__(self, args: list[Any]) -> Any:
        self._builder.wrapper.publish_weights()  # the graph may gather ahead of any module's turn
        if self._staging:
            self._builder.wrapper.enter_staging()
            args.extend(self._staging)
        if self._wrapped is None:
            region = self._builder.region
            if region is None:  # nothing of this graph needs a gradient
                return compat.call_boxed(self._compiled, args)
            self._wrapped = region.wrap_forward(self._compiled)
        return self._wrapped(args)


def run_by_fx(graph: fx.GraphModule) -> Lowered:
    """Run a graph node by node, in order; a capture finds the nodes through `graph_module`."""

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return graph(*values)

    run.graph_module = graph  # type: ignore[attr-defined]
    return compat.boxed(run)
