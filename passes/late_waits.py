"""Finalise a reduction one launch later, so that it overlaps with the next wgrad's computation.

In: a lowered backward. Out: the same nodes in another order ::

    RS_1 W_1 A_1 R_1 ... RS_2 W_2 A_2 R_2   becomes   RS_1 ... RS_2 W_1 A_1 R_1 ... W_2 A_2 R_2

A unit (wait, accumulate, grad_ready) moves as one: lint and topological sorting know nothing about
mutation and would accept a report before its accumulate. Units never overtake one another.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from torch import fx

from gtpgraph.passes.edit import PassResult, finish
from gtpgraph.passes.grad_ready import ACCUMULATES, GRAD_READY
from gtpgraph.passes.lower_collectives import EXCHANGE, REDUCE_SCATTER, WAIT

Unit = list[fx.Node]


def find_units(graph: fx.Graph) -> dict[fx.Node, Unit]:
    """[wait], accumulate, grad_ready of each site, by the first of them, in graph order.

    The wait of a reduce-scatter belongs to the first unit that reads it, and to none if anything
    but accumulates does.
    """
    units: dict[fx.Node, Unit] = {}
    claimed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target not in ACCUMULATES:
            continue
        wgrad = node.args[1]
        unit = [node, *(u for u in node.users if u.target is GRAD_READY)]
        if isinstance(wgrad, fx.Node) and wgrad not in claimed and _is_own_wait(wgrad):
            claimed.add(wgrad)
            unit.insert(0, wgrad)
        units[unit[0]] = unit
    return units


def _is_own_wait(node: fx.Node) -> bool:
    if node.target is not WAIT or any(u.target not in ACCUMULATES for u in node.users):
        return False
    launch = node.args[0]
    return isinstance(launch, fx.Node) and launch.target in (REDUCE_SCATTER, EXCHANGE)


def late_waits_pass(gm: fx.GraphModule, *, depth: int = 1) -> PassResult:
    """Let `depth` reductions be in flight before the oldest is waited for; 0 changes nothing.

    Idempotent. Reductions that something else than accumulates reads are left where they are.
    """
    if depth == 0:
        return finish(gm, {"delayed": 0})
    before = list(gm.graph.nodes)
    units = find_units(gm.graph)
    launches = {unit[0].args[0] for unit in units.values() if unit[0].target is WAIT}
    waiting: deque[Unit] = deque()
    in_flight = 0
    for node in before:
        if node in launches:
            in_flight += 1
            spot = node
            while in_flight > depth and waiting:
                unit = waiting.popleft()
                spot = _move(unit, spot)
                in_flight -= unit[0].target is WAIT
        elif node in units:
            launched = node.target is WAIT
            if waiting or (launched and in_flight <= depth):
                waiting.append(units[node])
            else:
                in_flight -= launched
        elif node.op == "output":
            for unit in waiting:
                for part in unit:
                    node.prepend(part)
    return finish(gm, {"delayed": _num_moved(before, gm.graph, units)})


def _move(unit: Unit, behind: fx.Node) -> fx.Node:
    for node in unit:
        behind.append(node)
        behind = node
    return behind


def _num_moved(before: list[fx.Node], graph: fx.Graph, units: dict[fx.Node, Unit]) -> int:
    """Units behind which stands another node than before."""
    was = {node: ahead for ahead, node in pairwise(before)}
    return sum(1 for first in units if first.prev is not was[first])
