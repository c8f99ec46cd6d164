"""Finalise a reduction one launch later, so that it overlaps with the next wgrad's computation.

In: a lowered backward. Out: the same nodes in another order ::

    RS_1 W_1 A_1 R_1 ... RS_2 W_2 A_2 R_2   becomes   RS_1 ... RS_2 W_1 A_1 R_1 ... W_2 A_2 R_2

A unit (wait, accumulate, grad_ready) moves as one: lint and topological sorting know nothing about
mutation and would accept a report before its accumulate. Units never overtake one another.
"""

from __future__ import annotations

from collections import deque

from torch import fx

from gtpgraph.passes.edit import PassResult, finish
from gtpgraph.passes.grad_ready import ACCUMULATE, GRAD_READY
from gtpgraph.passes.lower_collectives import REDUCE_SCATTER, WAIT

Unit = list[fx.Node]


def find_units(graph: fx.Graph) -> dict[fx.Node, Unit]:
    """[wait], accumulate, grad_ready of each site, by its accumulate, in graph order.

    The wait belongs to the first unit that reads it, and to none if anything but accumulates does.
    """
    units: dict[fx.Node, Unit] = {}
    claimed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is not ACCUMULATE:
            continue
        wgrad = node.args[1]
        ready = [u for u in node.users if u.target is GRAD_READY]
        unit = [node, *ready]
        if (
            isinstance(wgrad, fx.Node)
            and wgrad.target is WAIT
            and wgrad not in claimed
            and all(u.target is ACCUMULATE for u in wgrad.users)
        ):
            claimed.add(wgrad)
            unit.insert(0, wgrad)
        units[node] = unit
    return units


def late_waits_pass(gm: fx.GraphModule, *, depth: int = 1) -> PassResult:
    """Let `depth` reductions be in flight before the oldest is waited for; 0 changes nothing."""
    if depth == 0:
        return finish(gm, {"delayed": 0})
    units = find_units(gm.graph)
    movable = {n for unit in units.values() for n in unit}
    waiting: deque[Unit] = deque()
    in_flight = moved = 0
    for node in list(gm.graph.nodes):
        if node.target is REDUCE_SCATTER:
            in_flight += 1
            spot = node
            while in_flight > depth and waiting:
                unit = waiting.popleft()
                spot = _move(unit, spot)
                in_flight -= unit[0].target is WAIT
        elif node in units:
            unit = units[node]
            if waiting or unit[0].target is WAIT:
                waiting.append(unit)
                moved += 1
        elif node.op == "output":
            for unit in waiting:
                for part in unit:
                    node.prepend(part)
    assert movable or not moved
    return finish(gm, {"delayed": moved})


def _move(unit: Unit, behind: fx.Node) -> fx.Node:
    for node in unit:
        behind.append(node)
        behind = node
    return behind
