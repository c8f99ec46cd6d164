"""Tie a compiled graph to the very weights that it was compiled for.

In: a graph captured by Dynamo, during its compilation. Out: guards. Dynamo lifts Parameters to
graph inputs and reuses a graph for any others of the same shape: the second of many equal blocks
would run the first one's backward, and its gradients and reports would go to the wrong weights. So
the identity of every wrapped weight becomes a guard. The module that holds them is guarded too,
which makes Dynamo count its limit of recompilations for each module by itself: a stack of a hundred
blocks is a hundred graphs of one compilation each. Whether a Parameter needs a gradient is guarded
as well: torch 2.11 does not, and would go on finalising a weight that has been frozen since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from gtpgraph import compat


def pin_weights(gm: fx.GraphModule, positions: Iterable[int]) -> None:
    """Guard the identity of the weights at these input positions, and of the modules they hang on,
    and `requires_grad` of every Parameter of the graph.

    Does nothing for a graph that Dynamo is not compiling right now, which has no guards.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    sources = [_compat_source(placeholders[p]) for p in positions]
    params = [n for n in placeholders if isinstance(compat.example_of(n), nn.Parameter)]
    _compat_guard(
        [s for s in sources if s is not None],
        [s for s in map(_compat_source, params) if s is not None],
    )


def _compat_source(placeholder: fx.Node) -> Any:
    """Where Dynamo read a placeholder's value from (``grapharg.source``)."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def _compat_guard(identity: list[Any], requires_grad: list[Any]) -> None:
    """Add guards to the compilation in progress.

    Stands on ``torch._dynamo.guards`` (GuardBuilder.ID_MATCH, CONSTANT_MATCH, install_guard),
    ``torch._dynamo.source`` and ``torch._guards.TracingContext``; the same on 2.11 and 2.13.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    if compat.frame_ids() is None or TracingContext.try_get() is None:
        return

    def module_identity(builder: Any, guard: Any) -> None:
        if isinstance(builder.get(guard), nn.Module):
            builder.ID_MATCH(guard)

    roots: dict[str, Any] = {}
    for source in requires_grad:
        flag = AttrSource(source, "requires_grad")
        install_guard(flag.make_guard(GuardBuilder.CONSTANT_MATCH))
    for source in identity:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        root = source
        while getattr(root, "base", None) is not None:
            root = root.base
        if root is not source:
            roots.setdefault(str(root), root)
    for root in roots.values():
        install_guard(root.make_guard(module_identity))
