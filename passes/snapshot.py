"""A graph's nodes and edges as plain data, for comparing a graph with its own past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from gtpgraph.graph.sites import output_leaves, output_node


@dataclass(frozen=True)
class Snapshot:
    """Nodes by name as (target, input names), and the names that the graph returns.

    `lost` and `changed` are filled by `against`: nodes that a rewrite removed although something
    kept still needed them, and nodes that stand but compute something else.
    """

    nodes: Mapping[str, tuple[str, tuple[str, ...]]]
    outputs: tuple[str | None, ...]
    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph) -> Snapshot:
        """Record a graph (its output node apart)."""
        nodes = {
            n.name: (str(n.target), tuple(i.name for i in n.all_input_nodes))
            for n in graph.nodes
            if n.op != "output"
        }
        leaves = output_leaves(output_node(graph))
        return cls(nodes, tuple(n.name if isinstance(n, fx.Node) else None for n in leaves))

    def against(self, after: Snapshot, removed: Sequence[int]) -> Snapshot:
        """This snapshot, judged by a later one from which the outputs `removed` were taken.

        A node may go only if nothing but removed outputs needed it.
        """
        kept = [n for i, n in enumerate(self.outputs) if i not in removed and n is not None]
        needed, stack = set(kept), list(kept)
        while stack:
            for name in self.nodes[stack.pop()][1]:
                if name not in needed:
                    needed.add(name)
                    stack.append(name)
        lost = tuple(n for n in self.nodes if n in needed and n not in after.nodes)
        changed = tuple(
            n for n in self.nodes if n in after.nodes and after.nodes[n] != self.nodes[n]
        )
        return replace(self, lost=lost, changed=changed)
