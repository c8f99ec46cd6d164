"""The rules that every compiled backward graph must satisfy, as named data.

In: a rewritten graph and what was expected of it, taken from the joint graph and the wrapper, not
from the passes' own marks. Out: violations; `verify` raises with all of them. Each rule has a test
that breaks a good graph and sees exactly that rule fail.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from gtpgraph import compat
from gtpgraph.graph.checked import (
    Checked,
    Expected,
    is_main_grad,
    last_read,
    reduced_over,
    summed_wgrads,
    wgrad_behind,
    written_by,
)
from gtpgraph.graph.plan import GRAPHED
from gtpgraph.graph.sites import output_node
from gtpgraph.passes.grad_ready import ACCUMULATES, BUCKET_REDUCE, GRAD_READY
from gtpgraph.passes.lower_collectives import ALL_GATHER, EXCHANGE, REDUCE_SCATTER, WAIT, is_launch
from gtpgraph.passes.lower_symmetric import STAGED, exchange_group, is_staging

_OURS = (*ACCUMULATES, GRAD_READY, BUCKET_REDUCE)


def _v01(g: Checked) -> Iterator[str]:
    found: dict[str, list[fx.Node]] = {}
    for node in g.nodes(*ACCUMULATES):
        weight = g.weight_at(node)
        if weight is not None:
            found.setdefault(weight.fqn, []).append(node)
    for weight in g.weights:
        if weight.chain == GRAPHED:
            yield from _accumulated_once(weight, found.get(weight.fqn, []), g.coalesced)
    returned = {compat.grad_of_input(d) for d in output_node(g.graph).meta.get("desc") or ()}
    for weight in g.weights:
        if weight.position in returned:
            yield f"{weight.fqn}: its gradient is also returned to autograd"


def _accumulated_once(
    weight: Expected, accumulates: Sequence[fx.Node], coalesced: bool
) -> Iterator[str]:
    expected = min(weight.contributions, 1) if coalesced else weight.contributions
    if len(accumulates) != expected:
        yield f"{weight.fqn}: expected {expected} accumulate(s), got {len(accumulates)}"
    else:
        behind = summed_wgrads if coalesced else _one_wgrad
        got = [name for n in accumulates for name in behind(n.args[1], weight.wgrads)]
        if sorted(got) != sorted(weight.wgrads):
            yield f"{weight.fqn}: expected the wgrads {sorted(weight.wgrads)}, got {sorted(got)}"
    for k, node in enumerate(accumulates):
        if node.args[6] is not (k == 0):
            yield (
                f"{node}: expected first={k == 0} at contribution {k} of {weight.fqn}: a first "
                "one stores, a later one must add"
            )


def _one_wgrad(node: object, names: Sequence[str]) -> list[str]:
    return [wgrad_behind(node, names)]


def _v02(g: Checked) -> Iterator[str]:
    weights = {o.site: o.weight for o in g.occurrences}
    for node in g.nodes(*ACCUMULATES):
        ready = [u for u in node.users if u.target is GRAD_READY]
        if len(ready) != 1 or ready[0].args[0] is not node.args[0]:
            yield f"{node}: expected one grad_ready on its token and buffer, got {ready}"
            continue
        weight, said = g.weight_at(node), weights.get(int(str(ready[0].args[1])))
        if weight is not None and said is not None and said != weight.fqn:
            yield f"{node}: expected a grad_ready of {weight.fqn}, got {ready[0]} of {said}"
    for node in g.nodes(GRAD_READY):
        before = node.args[2]
        if not (isinstance(before, fx.Node) and before.target in ACCUMULATES):
            yield f"{node}: expected the token of its accumulate, got {before}"


def _v03(g: Checked) -> Iterator[str]:
    for node in g.nodes(*ACCUMULATES):
        weight = g.weight_at(node)
        if weight is None:
            yield f"{node}: writes {node.args[0]} at {node.args[4]}, no weight's main_grad"
            continue
        group, place = reduced_over(node), weight.place
        if group != weight.group:
            yield f"{weight.fqn}: expected a reduction over group {weight.group!r}, got {group!r}"
        beta = getattr(node.args[2], "target", None)
        expected = (f"beta_{place.bucket}", place.slot, place.scale)
        if (beta, node.args[3], node.args[5]) != expected:
            got = (beta, node.args[3], node.args[5])
            yield f"{weight.fqn}: expected (beta, slot, scale) {expected}, got {got}"


def _v04(g: Checked) -> Iterator[str]:
    outside = [w for w in g.weights if w.chain != GRAPHED]
    names = {w.fqn for w in outside}
    for occurrence in g.occurrences:
        if occurrence.chain != GRAPHED or occurrence.weight in names:
            yield f"{occurrence.weight}: UNGRAPHED, but occurrence {occurrence.site} of the plan"
    for node in g.nodes(*ACCUMULATES):
        weight = g.weight_at(node)
        if weight is not None and weight.chain != GRAPHED:
            yield f"{weight.fqn}: UNGRAPHED, but accumulated at {node}"
    owed = sum({w.fqn: w.contributions for w in outside}.values())
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
        flat = node.args[0]
        assert isinstance(flat, fx.Node)
        if flat.target != f"main_grad_{node.args[1]}":
            yield f"{node}: expected main_grad_{node.args[1]}, got {flat}"
        late = [u for u in flat.users if order[u] > order[node]]
        if late:
            yield f"{node}: {late[0]} touches {flat} after its reduction has begun"
    for flat in (n for n in g.graph.nodes if is_main_grad(n)):
        for user in flat.users:
            if user.target not in _OURS:
                yield f"{user}: touches {flat}, which accumulates, reports and reductions alone may"


def _v07(g: Checked) -> Iterator[str]:
    order = {n: i for i, n in enumerate(g.graph.nodes)}
    for node in (n for n in g.graph.nodes if is_launch(n)):
        parts = [u for u in node.users if u.target is operator.getitem] or [node]
        readers = [u for part in parts for u in part.users]
        ours = node.target in (REDUCE_SCATTER, EXCHANGE, ALL_GATHER)
        if any(u.target is not WAIT for u in readers) or (ours and len(readers) != 1):
            yield f"{node}: expected one wait as its only reader, got {readers}"
    for node in g.nodes(WAIT):
        launch = node.args[0]
        if isinstance(launch, fx.Node) and launch.target is operator.getitem:
            launch = launch.args[0]
        if not (isinstance(launch, fx.Node) and is_launch(launch)):
            yield f"{node}: waits for {launch}, which launches nothing"
    for node in g.graph.nodes:
        for buffer in (b for b in written_by(node) if not (is_main_grad(b) or is_staging(b))):
            late = [u for u in buffer.users if u is not node and last_read(u, order) > order[node]]
            if late:
                yield f"{node}: rewrites {buffer}, which {late[0]} still reads"
    for buffer in (n for n in g.graph.nodes if is_staging(n)):
        yield from _staged_alone(buffer)


def _staged_alone(buffer: fx.Node) -> Iterator[str]:
    """A staging buffer is filled and exchanged by one op at a time, over one group."""
    groups = {exchange_group(u) for u in buffer.users if u.target in STAGED}
    if len(groups) > 1:
        yield f"{buffer}: expected exchanges over one group, got {sorted(map(str, groups))}"
    for user in buffer.users:
        if user.target not in STAGED or buffer not in written_by(user):
            yield f"{user}: touches {buffer}, which gathers and accumulates through it alone may"


def _v08(g: Checked) -> Iterator[str]:
    if g.inserting is None:
        return
    positions = {w.position for w in g.weights}
    expected = {p for p, source in g.inserting.grads.items() if source in positions}
    for position in sorted(expected ^ set(g.inserting.removed)):
        what = "kept, though finalised" if position in expected else "removed, not a weight's"
        yield f"inserting grad_ready: output {position} was {what}"
    for name in g.inserting.lost:
        yield f"inserting grad_ready removed {name}, which a kept output needs"
    for name in g.inserting.changed:
        yield f"inserting grad_ready changed {name}"
    for name in g.inserting.misplaced:
        yield f"inserting grad_ready moved the output {name}"


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
    Rule("V07", "every launch has one wait before its first use, a staging buffer one group", _v07),
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
