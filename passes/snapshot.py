"""A graph's nodes and edges as plain data, for comparing a graph with its own past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from gtpgraph.graph.sites import grad_outputs, output_leaves, output_node


@dataclass(frozen=True)
class Snapshot:
    """Nodes by name as (target, input names, arguments as text), the names that the graph returns,
    and `grads`: output position -> position of the input whose gradient it is.

    The rest is filled by `against`. `removed`: output positions that a rewrite took out. `lost`:
    nodes that it removed although something kept still needed them. `changed`: nodes that stand but
    compute something else. `misplaced`: kept outputs that are not where they belong.
    """

    nodes: Mapping[str, tuple[str, tuple[str, ...], str]]
    outputs: tuple[str | None, ...]
    grads: Mapping[int, int]
    removed: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph) -> Snapshot:
        """Record a graph (its output node apart)."""
        nodes = {
            n.name: (str(n.target), tuple(i.name for i in n.all_input_nodes), f"{n.args}{n.kwargs}")
            for n in graph.nodes
            if n.op != "output"
        }
        leaves = output_leaves(output_node(graph))
        names = tuple(n.name if isinstance(n, fx.Node) else None for n in leaves)
        return cls(nodes, names, {p: source for p, source, _ in grad_outputs(graph)})

    def against(self, after: Snapshot, removed: Sequence[int]) -> Snapshot:
        """This snapshot, judged by a later one from which the outputs `removed` were taken.

        A node may go only if nothing but removed outputs needed it; the kept outputs come first, in
        their order, and outputs may be added behind them.
        """
        gone = set(removed)
        kept = [n for i, n in enumerate(self.outputs) if i not in gone]
        needed = {n for n in kept if n is not None}
        stack = list(needed)
        while stack:
            for name in self.nodes[stack.pop()][1]:
                if name not in needed:
                    needed.add(name)
                    stack.append(name)
        lost = tuple(n for n in self.nodes if n in needed and n not in after.nodes)
        changed = tuple(
            n for n in self.nodes if n in after.nodes and after.nodes[n] != self.nodes[n]
        )
        now = after.outputs[: len(kept)]
        misplaced = tuple(str(n) for k, n in enumerate(kept) if k >= len(now) or now[k] != n)
        return replace(
            self, removed=tuple(removed), lost=lost, changed=changed, misplaced=misplaced
        )
