"""The rules that every compiled backward graph must satisfy, as named data.

In: a rewritten graph and what was expected of it, taken from the joint graph and the wrapper, not
from the passes' own marks. Out: violations; `verify` raises with all of them. Each rule has a test
that breaks a good graph and sees exactly that rule fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gtpgraph import compat
from gtpgraph.graph.plan import GRAPHED, Occurrence
from gtpgraph.graph.sites import output_node
from gtpgraph.passes.grad_ready import ACCUMULATE, BUCKET_REDUCE, GRAD_READY, Place
from gtpgraph.passes.lower_collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from gtpgraph.passes.snapshot import Snapshot

_LOOK_THROUGH = {
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.slice.Tensor,
}


@dataclass(frozen=True)
class Expected:
    """One weight as the joint graph and the wrapper know it.

    `contributions` are those the joint graph adds up; `group` is the name of the GTP group ("" for
    none); `position` is its place among the traced graph's inputs.
    """

    fqn: str
    position: int
    contributions: int
    chain: str
    group: str
    place: Place


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
        for weight in self.weights:
            named = isinstance(flat, fx.Node) and flat.target == f"main_grad_{weight.place.bucket}"
            if named and weight.place.offset == offset:
                return weight
        return None

    def nodes(self, *targets: object) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]


def _v01(g: Checked) -> Iterator[str]:
    found = Counter(w.fqn for n in g.nodes(ACCUMULATE) if (w := g.weight_at(n)))
    for weight in g.weights:
        if weight.chain != GRAPHED:
            continue
        expected = min(weight.contributions, 1) if g.coalesced else weight.contributions
        if found[weight.fqn] != expected:
            yield f"{weight.fqn}: expected {expected} accumulate(s), got {found[weight.fqn]}"
    returned = {compat.grad_of_input(d) for d in output_node(g.graph).meta.get("desc") or ()}
    for weight in g.weights:
        if weight.position in returned:
            yield f"{weight.fqn}: its gradient is also returned to autograd"


def _v02(g: Checked) -> Iterator[str]:
    for node in g.nodes(ACCUMULATE):
        ready = [u for u in node.users if u.target is GRAD_READY]
        if len(ready) != 1 or ready[0].args[0] is not node.args[0]:
            yield f"{node}: expected one grad_ready on its token and buffer, got {ready}"
    for node in g.nodes(GRAD_READY):
        before = node.args[2]
        if not (isinstance(before, fx.Node) and before.target is ACCUMULATE):
            yield f"{node}: expected the token of its accumulate, got {before}"


def _reduction_of(node: object) -> tuple[str, fx.Node | None]:
    while isinstance(node, fx.Node) and node.target in _LOOK_THROUGH:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is WAIT:
        launch = node.args[0]
        if isinstance(launch, fx.Node) and launch.target is REDUCE_SCATTER:
            return str(launch.args[3]), launch
    return "", None


def _v03(g: Checked) -> Iterator[str]:
    for node in g.nodes(ACCUMULATE):
        weight = g.weight_at(node)
        if weight is None:
            yield f"{node}: writes {node.args[0]} at {node.args[4]}, no weight's main_grad"
            continue
        group, _ = _reduction_of(node.args[1])
        if group != weight.group:
            yield f"{weight.fqn}: expected a reduction over group {weight.group!r}, got {group!r}"


def _v04(g: Checked) -> Iterator[str]:
    outside = [w for w in g.weights if w.chain != GRAPHED]
    names = {w.fqn for w in outside}
    for occurrence in g.occurrences:
        if occurrence.chain != GRAPHED or occurrence.weight in names:
            yield f"{occurrence.weight}: UNGRAPHED, but occurrence {occurrence.site} of the plan"
    for node in g.nodes(ACCUMULATE):
        weight = g.weight_at(node)
        if weight is not None and weight.chain != GRAPHED:
            yield f"{weight.fqn}: UNGRAPHED, but accumulated at {node}"
    owed = sum(w.contributions for w in outside)
    if g.extra_outputs != owed:
        yield f"expected {owed} UNGRAPHED wgrad(s) to leave the region, got {g.extra_outputs}"


def _v05(g: Checked) -> Iterator[str]:
    counts = Counter(o.weight for o in g.occurrences)
    for weight in g.weights:
        expected = weight.contributions if weight.chain == GRAPHED else 0
        expected = min(expected, 1) if g.coalesced else expected
        if counts[weight.fqn] != expected and weight.chain == GRAPHED:
            yield f"{weight.fqn}: expected {expected} occurrence(s) in the plan, got " + str(
                counts[weight.fqn]
            )


def _v06(g: Checked) -> Iterator[str]:
    order = {n: i for i, n in enumerate(g.graph.nodes)}
    for node in g.nodes(BUCKET_REDUCE):
        late = [u for u in node.args[0].users if order[u] > order[node]]  # type: ignore[union-attr]
        if late:
            yield f"{node}: {late[0]} touches {node.args[0]} after its reduction has begun"


def _v07(g: Checked) -> Iterator[str]:
    for node in g.nodes(REDUCE_SCATTER, ALL_GATHER):
        others = [u for u in node.users if u.target is not WAIT]
        if len(node.users) != 1 or others:
            yield f"{node}: expected one wait as its only reader, got {list(node.users)}"
    for node in g.nodes(WAIT):
        launch = node.args[0]
        if not (isinstance(launch, fx.Node) and launch.target in (REDUCE_SCATTER, ALL_GATHER)):
            yield f"{node}: waits for {launch}, which launches nothing"


def _v08(g: Checked) -> Iterator[str]:
    if g.inserting is not None:
        for name in g.inserting.lost:
            yield f"inserting grad_ready removed {name}, which a kept output needs"
        for name in g.inserting.changed:
            yield f"inserting grad_ready changed {name}"


def _v09(g: Checked) -> Iterator[str]:
    difference = first_difference(g.peers)
    if difference:
        yield difference


def first_difference(orders: Mapping[int, str]) -> str | None:
    """Where the collective orders of two ranks part, or None when all are equal."""
    ranks = sorted(orders)
    for rank in ranks[1:]:
        a, b = orders[ranks[0]].splitlines(), orders[rank].splitlines()
        if a == b:
            continue
        k = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        k = min(len(a), len(b)) if k is None else k
        was, now = (lines[k] if k < len(lines) else "nothing" for lines in (a, b))
        return f"step {k} of the order: rank {ranks[0]} has [{was}], rank {rank} has [{now}]"
    return None


@dataclass(frozen=True)
class Rule:
    """A named rule: `check` yields one line for each violation."""

    name: str
    holds: str
    check: Callable[[Checked], Iterator[str]]


RULES = (
    Rule("V01", "every contribution reaches one accumulate and is not also returned", _v01),
    Rule("V02", "each accumulate is followed by one grad_ready that depends on it", _v02),
    Rule("V03", "a wgrad is reduced over its weight's own group, into its own bucket", _v03),
    Rule("V04", "UNGRAPHED contributions leave the region and its plan", _v04),
    Rule("V05", "occurrences of a weight are its uses", _v05),
    Rule("V06", "a bucket is reduced after all its occurrences, and not touched again", _v06),
    Rule("V07", "every launch has one wait before its first use", _v07),
    Rule("V08", "inserting adds nodes and removes only finalised outputs", _v08),
    Rule("V09", "ranks that share a group hold one order of collectives on it", _v09),
)


def violations(checked: Checked) -> list[str]:
    """Every violation as ``V0n: what``, in the order of the rules."""
    return [f"{rule.name}: {line}" for rule in RULES for line in rule.check(checked)]


def verify(checked: Checked, region: str) -> None:
    """Raise RuntimeError with every violation of a region's backward graph."""
    found = violations(checked)
    if found:
        raise RuntimeError(
            f"region {region}: the rewritten backward breaks {len(found)} rule(s):\n  "
            + "\n  ".join(found)
            + "\nThis is a fault of gtpgraph or of a pass run after it; run with lowering='eager' "
            "and report the graph (`gtpgraph compile MODEL --out DIR`)."
        )
