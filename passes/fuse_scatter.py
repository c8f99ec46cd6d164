"""Fuse what scatters rows into a zero tensor, an embedding's wgrad, with the accumulate behind it.

In: a scheduled backward. Out: no dense gradient. Matched, with one index tensor for dimension 0::

    index_put(zeros, [i], v, accumulate=True) [-> cast] -> accumulate(main)
    _unsafe_masked_index_put_accumulate(zeros, mask, [i], v) [-> cast] -> accumulate(main)

        becomes   [where(mask, v, 0) ->] view [N, C] -> scatter_accumulate(main, v, view(i))

The dense gradient of a vocabulary costs two writes and two reads of its size, whatever the number
of tokens. It is fused where few rows are scattered into many, for the kernel compares each with
each. (Without its links it took 24 us for 512 rows into 50257 x 768 on an H200, where the dense way
takes some 180, but 358 us for 8192 rows, more than that.) Small tables and symbolic sizes stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gtpgraph.passes.edit import PassResult, call, finish
from gtpgraph.passes.grad_ready import ACCUMULATE, SCATTER_ACCUMULATE

_aten = torch.ops.aten
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
MAX_ROWS, TIMES_AS_MANY = 2048, 8  # scattered rows, and those that they go into, at least
# Smaller ones are left to accumulate_many: what is joined there, and so the order of reports, must
# not depend on how many rows this rank scatters. For the same reason symbolic sizes are left alone.
LEAST_NUMEL = 1 << 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Scatter:
    """``main[indices] += values`` for the rows under `mask` (None: all): values [*shape, *dims], of
    `row` elements in dims, indices [*shape], mask [*shape, 1, ...]."""

    values: fx.Node
    indices: fx.Node
    mask: fx.Node | None
    row: int

    def __str__(self) -> str:
        return f"{self.values} at {self.indices} where {self.mask}"


def match_scatter(accumulate: fx.Node) -> Scatter | None:
    """What an accumulate scatters, when nothing else reads the dense tensor."""
    node: Any = accumulate.args[1]
    reader = accumulate
    while isinstance(node, fx.Node) and node.target in _CASTS and list(node.users) == [reader]:
        node, reader = node.args[0], node
    if not isinstance(node, fx.Node) or list(node.users) != [reader]:
        return None
    found = _operands(node)
    if found is None:
        return None
    zeros, mask, indices, values = found
    index, value, dense = (n.meta["val"] for n in (indices, values, zeros))
    sizes = (*index.shape, *dense.shape)
    if not _is_zero(zeros) or not all(isinstance(size, int) for size in sizes):
        return None
    others = [n.meta["val"] for n in (indices, mask, zeros) if n is not None]
    fits = (
        tuple(value.shape) == (*index.shape, *dense.shape[1:])
        and value.dtype in _FLOATS
        and index.dtype in (torch.int64, torch.int32)
        and (mask is None or mask.meta["val"].dtype == torch.bool)
        and value.is_contiguous()
        and index.is_contiguous()
        and all(other.device == value.device for other in others)
        and _pays(index.numel(), dense)
    )
    return Scatter(values, indices, mask, math.prod(dense.shape[1:])) if fits else None


def _pays(count: int, dense: torch.Tensor) -> bool:
    few = count <= MAX_ROWS and count * TIMES_AS_MANY <= dense.shape[0]
    return few and dense.numel() > LEAST_NUMEL


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node, fx.Node] | None:
    """(destination, mask, indices, values) of an accumulating scatter along dimension 0."""
    args: tuple[Any, ...] = node.args
    if node.target is _aten.index_put.default and args[3:4] == (True,):
        into, index, values, mask = args[0], args[1], args[2], None
    elif node.target is _aten._unsafe_masked_index_put_accumulate.default:
        into, mask, index, values = args[:4]
    else:
        return None
    nodes = (into, values, *index, *(() if mask is None else (mask,)))
    if len(index) != 1 or not all(isinstance(n, fx.Node) for n in nodes):
        return None
    return into, mask, index[0], values


def _is_zero(node: fx.Node) -> bool:
    return node.target is _aten.full.default and bool(node.args[1] == 0)


def fuse_scatter_pass(gm: fx.GraphModule, *, fake_mode: Any) -> PassResult:
    """Replace each matched scatter and accumulate by one `scatter_accumulate`."""
    fused = 0
    for node in [n for n in gm.graph.nodes if n.target is ACCUMULATE]:
        found = match_scatter(node)
        if found is None:
            continue
        flat, _, *rest = node.args
        dense: Any = node.args[1]
        rows = dense.meta["val"].shape[0]
        with gm.graph.inserting_before(node):
            values, indices = _flattened(gm.graph, fake_mode, found)
            new = call(
                gm.graph, fake_mode, SCATTER_ACCUMULATE, flat, values, indices, *rest[:5], rows
            )
        new.meta.update({k: v for k, v in node.meta.items() if k not in ("val", "gtp_site")})
        new.meta["gtp_masked"] = found.mask is not None
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        fused += 1
    if fused:
        gm.graph.eliminate_dead_code()
    return finish(gm, {"scatter_accumulate": fused})


def _flattened(graph: fx.Graph, fake_mode: Any, found: Scatter) -> tuple[fx.Node, fx.Node]:
    """values [N, C] without the rows that the mask leaves out, and indices [N]."""
    values, indices = found.values, found.indices
    if found.mask is not None:
        like = values.meta["val"]
        zero = call(graph, fake_mode, _aten.full.default, [], 0.0, dtype=like.dtype,
                    device=like.device)  # fmt: skip
        values = call(graph, fake_mode, _aten.where.self, found.mask, values, zero)
    shaped = call(graph, fake_mode, _aten.reshape.default, values, [-1, found.row])
    return shaped, call(graph, fake_mode, _aten.reshape.default, indices, [-1])


def scatter_source(node: fx.Node) -> str:
    """What a `scatter_accumulate` adds, named as `match_scatter` names it before it was fused."""
    shaped, indices = node.args[1], node.args[2]
    assert isinstance(shaped, fx.Node) and isinstance(indices, fx.Node)
    values, mask = shaped.args[0], None
    if node.meta["gtp_masked"]:  # else a `where` is the model's
        assert isinstance(values, fx.Node)
        mask, values = values.args[0], values.args[1]
    return f"{values} at {indices.args[0]} where {mask}"
