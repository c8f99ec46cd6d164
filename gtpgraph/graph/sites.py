"""Finders: the uses of a joint graph, and the sites of its backward graph. They never mutate.

The chain that is matched, for a weight whose gather has use k::

    joint, forward    weight_i (placeholder) --gather--> ...                      seq_nr s
    joint, backward   ... wgrad --reduce--> contribution  [--cast-->] [--add-->]  seq_nr s
                                                 output, desc GradAOTOutput(PlainAOTInput(i))

Weights are found through the output's descriptors, never by name. The leaves of the tree of adds
under an output are the contributions: a list and not a set, for common subexpressions may have
merged two equal ones, and both still count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from gtpgraph import compat

_aten = torch.ops.aten
_CASTS = {
    _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    _aten.detach.default,
    _aten.alias.default,
}
_PACKAGE = str(Path(__file__).resolve().parents[1])
_MODELS = str(Path(_PACKAGE) / "gpt.py")  # the built-in models' code is a model's, not machinery
_TORCH = str(Path(torch.__file__).resolve().parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class GraphWeight:
    """A trainable weight among a graph's inputs: its index in the wrapper, and its kind."""

    index: int
    fqn: str
    is_gtp: bool


@dataclass(frozen=True)
class Use:
    """Use `number` (from 1) of a weight, in forward order; `seq_nr` ties it to its reduce."""

    number: int
    seq_nr: int | None
    source: str


@dataclass(frozen=True)
class WgradSite:
    """Where one contribution becomes available in a backward graph.

    `contribution` is the node of the reduced wgrad (an ordinary weight: of its gradient); `outputs`
    are the positions among the graph's outputs through which autograd would get it; `summed` is how
    many contributions were added up before the reduction (coalesced).
    """

    weight: GraphWeight
    contribution: fx.Node
    use: int
    uses: int
    source: str
    outputs: tuple[int, ...]
    summed: int = 1


def is_gather(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.gtpgraph.gather.default


def is_reduce(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.gtpgraph.reduce.default


def find_uses(joint: fx.Graph, weights: Mapping[int, GraphWeight]) -> dict[int, tuple[Use, ...]]:
    """Differentiated uses of each GTP weight (key: wrapper index), from a joint graph.

    `weights` maps input positions to weights. A gather counts when a reduce answers it (equal
    `seq_nr`); without `seq_nr` metadata, as many of the last gathers count as there are leaves.
    """
    answered = {n.meta.get("seq_nr") for n in joint.nodes if is_reduce(n)} - {None}
    gathers: dict[int, list[fx.Node]] = {}
    for position, placeholder in _inputs(joint):
        weight = weights.get(position)
        if weight is not None and weight.is_gtp:
            found = [n for n in placeholder.users if is_gather(n)]
            gathers.setdefault(weight.index, []).extend(found)
    order = {node: i for i, node in enumerate(joint.nodes)}
    uses = {}
    for index, nodes in gathers.items():
        nodes.sort(key=order.__getitem__)
        live = [n for n in nodes if n.meta.get("seq_nr") in answered] if answered else nodes
        uses[index] = tuple(
            Use(k, n.meta.get("seq_nr"), source_of(n)) for k, n in enumerate(live, start=1)
        )
    return uses


def _inputs(graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """(input position, placeholder) by descriptor, or by order where there is none."""
    for order, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        desc = node.meta.get("desc")
        position = order if desc is None else compat.input_position(desc)
        if position is not None:
            yield position, node


def grad_outputs(graph: fx.Graph) -> Iterator[tuple[int, int, fx.Node]]:
    """(output position, input position, node) of every gradient that the graph returns."""
    output = output_node(graph)
    leaves = output_leaves(output)
    descs = output.meta.get("desc") or [None] * len(leaves)
    for position, (node, desc) in enumerate(zip(leaves, descs, strict=True)):
        source = compat.grad_of_input(desc)
        if source is not None and isinstance(node, fx.Node):
            yield position, source, node


def wgrad_names(
    backward: fx.Graph, weights: Mapping[int, GraphWeight]
) -> dict[int, tuple[str, ...]]:
    """Input position -> names of the nodes that hold its weight's unreduced wgrads, as `verify`
    needs them: one for each contribution, before anything was inserted."""
    names = {}
    for _, source, node in grad_outputs(backward):
        weight = weights.get(source)
        if weight is not None:
            leaves = contributions(node, is_reduce) if weight.is_gtp else [node]
            names[source] = tuple(str(leaf.args[0] if is_reduce(leaf) else leaf) for leaf in leaves)
    return names


def output_node(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return node


def output_leaves(output: fx.Node) -> list[object]:
    leaves = output.args[0]
    return list(leaves) if isinstance(leaves, (tuple, list)) else [leaves]


def contributions(root: fx.Node, is_leaf: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Leaves of the tree of gradient additions above `root`, right to left, duplicates kept.

    Iterative: a loop of hundreds of uses makes a tree that deep. Casts between additions and the
    leaves are looked through.
    """
    leaves, stack = [], [root]
    while stack:
        node = stack.pop()
        if is_leaf(node):
            leaves.append(node)
        elif node.target in _CASTS:
            stack.append(node.args[0])  # type: ignore[arg-type]
        elif _is_plain_add(node):
            stack.extend(node.args)  # type: ignore[arg-type]
        else:
            leaves.append(node)
    return leaves


def _is_plain_add(node: fx.Node) -> bool:
    """a + b of two tensors; ``add(a, b, alpha=2)`` is not a sum of contributions."""
    tensors = all(isinstance(a, fx.Node) for a in node.args)
    return node.target is _aten.add.Tensor and tensors and not node.kwargs


def find_sites(
    backward: fx.Graph,
    weights: Mapping[int, GraphWeight],
    uses: Mapping[int, Sequence[Use]],
) -> list[WgradSite]:
    """Every site of a backward graph, in the order in which its contributions are computed.

    Args:
        backward: the partitioned backward, before anything of ours was inserted.
        weights: trainable weights by input position of the traced graph.
        uses: what `find_uses` found in the joint graph.

    Raises:
        NotImplementedError: a GTP weight's gradient does not come from its gather alone; every
            such weight is listed.
    """
    sites, blockers = [], []
    for position, source, node in grad_outputs(backward):
        weight = weights.get(source)
        if weight is None:
            continue
        if not weight.is_gtp:
            sites.append(WgradSite(weight, node, 1, 1, source_of(node), (position,)))
            continue
        leaves = contributions(node, is_reduce)
        strange = [leaf for leaf in leaves if not is_reduce(leaf)]
        if strange:
            blockers.append(f"{weight.fqn}: node {strange[0]} ({source_of(strange[0])})")
        known = list(uses.get(weight.index, ()))
        for leaf, use in zip(leaves, _match_uses(leaves, known), strict=True):
            sites.append(WgradSite(weight, leaf, use.number, len(leaves), use.source, (position,)))
    if blockers:
        raise NotImplementedError(
            "GTP weights are used outside their gather (the shard itself is differentiated): "
            + "; ".join(blockers)
            + ". Read them as module attributes, or exclude them from shard()."
        )
    order = {n: i for i, n in enumerate(backward.nodes)}
    return sorted(sites, key=lambda s: (order[s.contribution], s.weight.index, -s.use))


def _match_uses(leaves: Sequence[fx.Node], uses: list[Use]) -> list[Use]:
    """The use behind each leaf: by `seq_nr`, and what that leaves open from the last use back."""
    matched: list[Use | None] = []
    for leaf in leaves:
        same = [u for u in uses if u.seq_nr is not None and u.seq_nr == leaf.meta.get("seq_nr")]
        matched.append(same[0] if same else None)
        if same:
            uses.remove(same[0])
    rest = sorted(uses, key=lambda u: u.number)
    return [
        use or (rest.pop() if rest else Use(k + 1, None, source_of(leaf)))
        for k, (use, leaf) in enumerate(zip(matched, leaves, strict=True))
    ]


def source_of(node: fx.Node) -> str:
    """``file:line`` of the model's code behind a node: the innermost frame outside torch and us.

    Relative to the working directory where it lies below it; "" without a stack trace.
    """
    frames = [
        (m["file"], m["line"]) for m in _FRAME.finditer(str(node.meta.get("stack_trace") or ""))
    ]
    outside = [f for f in frames if f[0] == _MODELS or not f[0].startswith(_PACKAGE + os.sep)]
    user = [f for f in outside if not f[0].startswith(_TORCH + os.sep)] or outside
    if not user:
        return ""
    file, line = user[-1]
    return f"{shown_path(file)}:{line}"


def is_library_file(file: str) -> bool:
    """Whether a source file is torch's or ours rather than the model's."""
    ours = file.startswith(_PACKAGE + os.sep) and file != _MODELS
    return ours or file.startswith(_TORCH + os.sep)


def shown_path(file: str) -> str:
    """A path as messages show it: relative to the working directory where it lies below it."""
    below = os.path.relpath(file)
    return file if below.startswith("..") else below
