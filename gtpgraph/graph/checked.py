"""What `verify` looks at: a rewritten backward, what was expected of it, and walks over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from gtpgraph.graph.plan import Occurrence
from gtpgraph.passes.grad_ready import STAGED_ACCUMULATE, Place
from gtpgraph.passes.lower_collectives import EXCHANGE, REDUCE_SCATTER, WAIT, is_launch
from gtpgraph.passes.lower_symmetric import exchange_group
from gtpgraph.passes.snapshot import Snapshot

_ADD = torch.ops.aten.add.Tensor
_LOOK_THROUGH = {
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.slice.Tensor,
}


@dataclass(frozen=True)
class Expected:
    """One weight as the joint graph and the wrapper know it.

    `contributions` are those the joint graph adds up; `group` is the name of the GTP group ("" for
    none); `position` is its place among the traced graph's inputs; `wgrads` are the names that its
    unreduced contributions had in the backward graph before any pass.
    """

    fqn: str
    position: int
    contributions: int
    chain: str
    group: str
    place: Place
    wgrads: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A graph to verify: `occurrences` is its plan, `extra_outputs` how many unreduced wgrads leave
    it, `peers` the collective order of each rank where that is known, `coalesced` whether uses were
    summed before one reduction."""

    graph: fx.Graph
    weights: Sequence[Expected]
    occurrences: Sequence[Occurrence]
    extra_outputs: int
    inserting: Snapshot | None = None
    peers: Mapping[int, str] = field(default_factory=dict)
    coalesced: bool = False

    def weight_at(self, accumulate: fx.Node) -> Expected | None:
        """The weight whose main_grad an accumulate writes, by flat buffer and offset."""
        flat, offset = accumulate.args[0], accumulate.args[4]
        name = flat.target if isinstance(flat, fx.Node) else None
        return self._by_place.get((name, offset))

    @cached_property
    def _by_place(self) -> dict[tuple[object, object], Expected]:
        return {(f"main_grad_{w.place.bucket}", w.place.offset): w for w in self.weights}

    def nodes(self, *targets: object) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]


def wgrad_behind(node: object, names: Sequence[str]) -> str:
    """Name of the wgrad that a contribution was reduced from: back through pads, casts, copies and
    the collective, until one of `names`."""
    while isinstance(node, fx.Node) and node.name not in names and node.args:
        node = node.args[0]
    return str(node)


def summed_wgrads(node: object, names: Sequence[str]) -> list[str]:
    """Names of the wgrads that a coalesced contribution was summed from, duplicates kept."""
    found, stack = [], [node]
    while stack:
        node = stack.pop()
        if isinstance(node, fx.Node) and node.name not in names and node.target is _ADD:
            stack.extend(node.args)
        elif isinstance(node, fx.Node) and node.name not in names and node.args:
            stack.append(node.args[0])
        else:
            found.append(str(node))
    return found


def reduced_over(accumulate: fx.Node) -> str:
    """Names of the groups that what an accumulate adds was reduced over, "" for none."""
    own = exchange_group(accumulate) if accumulate.target is STAGED_ACCUMULATE else None
    return " and ".join(g for g in (group_of(accumulate.args[1]), own) if g)


def group_of(node: object) -> str:
    """Name of the group that a contribution was reduced over before it, "" for none."""
    while isinstance(node, fx.Node) and node.target in _LOOK_THROUGH:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is WAIT:
        launch = node.args[0]
        if isinstance(launch, fx.Node) and launch.target in (REDUCE_SCATTER, EXCHANGE):
            return str(launch.args[3])
    return ""


def is_main_grad(node: fx.Node) -> bool:
    """Whether a node is the placeholder of a bucket's flat buffer."""
    return node.op == "placeholder" and str(node.target).startswith("main_grad_")


def last_read(reader: fx.Node, order: Mapping[fx.Node, int]) -> int:
    """When a reader is done: a launch reads until its wait."""
    waits = [u for u in reader.users if u.target is WAIT] if is_launch(reader) else []
    return max(order[n] for n in (reader, *waits))


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that an operator's schema says it writes."""
    schema = getattr(node.target, "_schema", None)
    for value, argument in zip(node.args, schema.arguments if schema else (), strict=False):
        alias = argument.alias_info
        if alias is not None and alias.is_write and isinstance(value, fx.Node):
            yield value
