"""Fuse what feeds main_grad: the wgrad GEMM with its accumulate, small accumulates with each other.

In: a scheduled backward. Out: fewer launches and fewer bytes, the same reports. Matched::

    mm(t(dy), x) [-> t -> t] -> accumulate(main)        becomes   wgrad_gemm(main, dy, x)
    scattered rows -> accumulate(main)              (`fuse_scatter`)
    accumulate(a) ... accumulate(b) ... accumulate(c)   becomes   ... ... accumulate_many(a, b, c)

The GEMM is fused only over a group of one: elsewhere a reduction stands between. Only small weights
of one bucket are joined, at the place of the last one, and none that contributes twice: all members
are written at once. Their reports follow the joint accumulate, in the order that they had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gtpgraph.passes.edit import PassResult, call, finish
from gtpgraph.passes.fuse_scatter import match_scatter, scatter_source
from gtpgraph.passes.grad_ready import (
    ACCUMULATE,
    ACCUMULATE_MANY,
    GRAD_READY,
    SCATTER_ACCUMULATE,
    SHARD_REDUCE,
    STAGED_ACCUMULATE,
    WGRAD_GEMM,
)

_aten = torch.ops.aten
SMALL_NUMEL = 1 << 16  # elements: below it a launch costs more than the bytes it moves
HALF = (torch.bfloat16, torch.float16)


def _untransposed(node: fx.Node) -> fx.Node | None:
    """What `node` is the 2-D transpose of, or None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    swaps = node.target is _aten.t.default
    swaps |= node.target is _aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    swaps |= node.target is _aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-2, -1})
    return source if swaps else None


def match_wgrad_gemm(accumulate: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(dy [T, out], x [T, in]) when an accumulate adds ``dy^T x`` that nothing else reads."""
    node, flipped, reader = accumulate.args[1], False, accumulate
    while isinstance(node, fx.Node) and list(node.users) == [reader]:
        source = _untransposed(node)
        if source is None:
            break
        node, reader, flipped = source, node, not flipped
    if not isinstance(node, fx.Node) or node.target is not _aten.mm.default:
        return None
    a, b = node.args
    if list(node.users) != [reader] or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    inner = _untransposed(a)
    if inner is None:
        return None
    dy, x = (b, inner) if flipped else (inner, b)
    fits = all(v.meta["val"].is_contiguous() and v.meta["val"].dtype in HALF for v in (dy, x))
    return (dy, x) if fits else None


def fuse_wgrad_gemm_pass(gm: fx.GraphModule, *, fake_mode: Any) -> PassResult:
    """Replace each matched GEMM and accumulate by one `wgrad_gemm`."""
    fused = 0
    for node in [n for n in gm.graph.nodes if n.target is ACCUMULATE]:
        operands = match_wgrad_gemm(node)
        if operands is None:
            continue
        flat, _, *rest = node.args
        with gm.graph.inserting_before(node):
            new = call(gm.graph, fake_mode, WGRAD_GEMM, flat, operands[0], operands[1], *rest)
        _take_over(new, node)
        fused += 1
    if fused:
        gm.graph.eliminate_dead_code()
    return finish(gm, {"wgrad_gemm": fused})


def find_small(graph: fx.Graph) -> list[list[fx.Node]]:
    """Accumulates that can be one launch: small, one bucket, dtype and scale, a weight each."""
    found = [n for n in graph.nodes if n.target is ACCUMULATE]
    # of either kind: an accumulate that stores must not move behind a fused GEMM that adds
    times = Counter(w.place for n in graph.nodes for w in _members(n))
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in found:
        val = node.args[1].meta["val"]
        if (
            times[_members(node)[0].place] == 1
            and val.is_contiguous()
            and isinstance(val.numel(), int)
            and val.numel() <= SMALL_NUMEL
        ):
            groups.setdefault((node.args[0], val.dtype, node.args[5]), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def fuse_small_pass(gm: fx.GraphModule, *, fake_mode: Any) -> PassResult:
    """Join small accumulates of a bucket into one `accumulate_many` at the place of the last."""
    joined = 0
    for group in find_small(gm.graph):
        last = group[-1]
        columns = list(zip(*(n.args[:7] for n in group), strict=True))
        flat, wgrads, beta, slots, offsets, scales, firsts = columns
        with gm.graph.inserting_after(last):
            new = call(
                gm.graph, fake_mode, ACCUMULATE_MANY,
                flat[0], list(wgrads), beta[0], list(slots), list(offsets), scales[0], list(firsts),
            )  # fmt: skip
        behind = new
        for node in group:
            for ready in [u for u in node.users if u.target is GRAD_READY]:
                behind.append(ready)
                behind = ready
            _take_over(new, node)
        joined += len(group)
    return finish(gm, {"accumulate_many": joined})


Place = tuple[str, int]  # of a main_grad: the flat buffer's node and the offset


@dataclass(frozen=True)
class Write:
    """One contribution: from which node (or ``dy^T x``), and how it is added."""

    source: str
    flat: str
    slot: int
    offset: int
    scale: float
    first: bool

    @property
    def place(self) -> Place:
        return self.flat, self.offset


@dataclass(frozen=True)
class Writes:
    """What a graph adds to main_grads, in order, and for each site the places that stood when its
    report was made; `orphans` are reports without one."""

    added: tuple[Write, ...]
    reported: Mapping[int, frozenset[Place]]
    orphans: tuple[int, ...]


def find_writes(graph: fx.Graph) -> Writes:
    """Read the accumulates of a graph, fused ones member by member."""
    added: list[Write] = []
    places: dict[fx.Node, frozenset[Place]] = {}
    reported, orphans = {}, []
    for node in graph.nodes:
        members = _members(node)
        if members:
            added += members
            places[node] = frozenset(member.place for member in members)
        elif node.target is GRAD_READY:
            site, behind = int(node.args[1]), node.args[2]
            if behind in places:
                reported[site] = places[behind]
            else:
                orphans.append(site)
    return Writes(tuple(added), reported, tuple(orphans))


def _members(node: fx.Node) -> list[Write]:
    if node.target is ACCUMULATE_MANY:
        flat, wgrads, _, slots, offsets, scale, firsts = node.args[:7]
        columns = (wgrads, slots, offsets, firsts)
        rows: Any = zip(*columns, strict=True)  # type: ignore[arg-type]
        return [Write(str(w), str(flat), s, o, scale, f) for w, s, o, f in rows]  # type: ignore[arg-type]
    pairs = (WGRAD_GEMM, SCATTER_ACCUMULATE)  # of operands, where the others have one
    if node.target not in (ACCUMULATE, SHARD_REDUCE, STAGED_ACCUMULATE, *pairs):
        return []
    skip = 4 if node.target in pairs else 3
    row: Any = node.args[skip : skip + 4]  # slot, offset, scale, first
    return [Write(_source(node), str(node.args[0]), *row)]


def _source(node: fx.Node) -> str:
    """What an accumulate adds, named alike before and after its GEMM or scatter is fused."""
    scatter = match_scatter(node) if node.target is ACCUMULATE else None
    if scatter is not None:
        return str(scatter)
    if node.target is SCATTER_ACCUMULATE:
        return scatter_source(node)
    gemm = node.args[1:3] if node.target is WGRAD_GEMM else None
    if node.target is ACCUMULATE:
        gemm = match_wgrad_gemm(node)
    return f"{gemm[0]}^T {gemm[1]}" if gemm else str(node.args[1])


def check_fusion(before: Writes, after: Writes) -> list[str]:
    """What fusing changed beyond the number of launches: nothing, in a correct graph."""
    wrong = []
    if Counter(before.added) != Counter(after.added):
        lost = Counter(before.added) - Counter(after.added)
        wrong.append(f"contributions lost or changed: {sorted(map(str, lost))[:4]}")
    elif _by_place(before) != _by_place(after):
        wrong.append("contributions of one weight in another order: the first one stores")
    if after.orphans or before.reported.keys() != after.reported.keys():
        wrong.append(f"reports without an accumulate: {after.orphans or 'some are gone'}")
    for site, place in before.reported.items():
        if not place <= after.reported.get(site, place):
            wrong.append(f"site {site} reports behind another weight's accumulate")
    return wrong


def _by_place(writes: Writes) -> dict[Place, list[Write]]:
    order: dict[Place, list[Write]] = {}
    for write in writes.added:
        order.setdefault(write.place, []).append(write)
    return order


def _take_over(new: fx.Node, old: fx.Node) -> None:
    new.meta.update({k: v for k, v in old.meta.items() if k not in ("val", "gtp_site")})
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
