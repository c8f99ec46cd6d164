"""Captured work with the arguments that it reads: made once, fed before every replay.

In: a callable that launches work, and its arguments. Out: a graph over static inputs and outputs;
arguments that a graph may read where they lie (parameters, saved activations) are not copied. What
cannot be captured is an error that names the module and line of the model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gtpgraph import compat
from gtpgraph.graph.driver import Driver, Graph
from gtpgraph.graph.sites import is_library_file, shown_path

OTHER_STREAM = ("uncaptured work in another stream", "legacy stream depend on a capturing")
# pytorch 137483: what accumulates a parameter's gradient remembers the stream of the autograd graph
# that made it, for as long as any loss or output of that graph lives.
KEPT_LOSS = (
    " Or a loss or output of an earlier uncaptured step is still referenced, and with it autograd "
    "nodes that are tied to its stream: delete it, or keep it detached."
)


@dataclass(eq=False)
class Captured:
    """One captured graph with the arguments it reads. `dynamic` are positions copied in; `lasting`
    says whether its outputs outlive replays of other graphs."""

    graph: Graph
    inputs: list[Any]
    outputs: list[Any]
    dynamic: tuple[int, ...]
    pointers: list[int]
    lasting: bool

    def feed(self, args: list[Any]) -> None:
        """Copy the dynamic inputs in.

        Raises:
            RuntimeError: a parameter or saved activation is not where it was captured.
        """
        for position in self.dynamic:
            self.inputs[position].copy_(args[position])
        here = [a.data_ptr() if isinstance(a, Tensor) else 0 for a in args]
        for position in self.dynamic:
            here[position] = self.pointers[position]
        if here != self.pointers:
            moved = [i for i, (a, b) in enumerate(zip(here, self.pointers, strict=True)) if a != b]
            raise RuntimeError(
                f"captured graph: expected inputs {moved[:8]} where they were captured, got other "
                "addresses: a parameter or buffer was replaced (.to(), load with assign=True, "
                "swapped data). Compile the model again after such a change."
            )


def capture_call(
    driver: Driver,
    compiled: Any,
    args: list[Any],
    static: set[int],
    what: str,
    *,
    lasting: bool,
    scope: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Captured:
    """Capture ``compiled(args)``; arguments outside `static` (addresses) get buffers of their own.

    `lasting`: whether its results outlive replays of other graphs (see `Driver.capture`); `scope`
    is entered around the call, inside the capture.

    Raises:
        RuntimeError: the work cannot be captured; names the node and line where known.
    """
    dynamic = tuple(
        i for i, a in enumerate(args) if isinstance(a, Tensor) and a.data_ptr() not in static
    )
    inputs = [a.detach().clone() if i in dynamic else a for i, a in enumerate(args)]

    def work() -> list[Any]:
        with scope():
            results = list(run_traced(compiled, list(inputs)))
        # without their autograd history, whose accumulators would stay tied to the capture's stream
        return [r.detach() if isinstance(r, Tensor) and r.requires_grad else r for r in results]

    is_lasting = lasting or driver.is_first
    try:
        graph, outputs = driver.capture(work, lasting=lasting)
    except Exception as error:
        raise RuntimeError(_refusal(error, what)) from error
    pointers = [a.data_ptr() if isinstance(a, Tensor) else 0 for a in inputs]
    return Captured(graph, inputs, outputs, dynamic, pointers, is_lasting)


def _refusal(error: BaseException, what: str) -> str:
    """Why a capture failed. (Its own function, for the traceback holds `capture_call`'s frame: a
    local that refers to the error there would keep the failed step's tensors and autograd nodes
    until the garbage collector runs.)"""
    while error.__context__ is not None:  # ending a capture that failed raises a second time
        error = error.__context__
    hint = KEPT_LOSS if any(text in str(error) for text in OTHER_STREAM) else ""
    return (
        f"{what}: expected work that a CUDA graph can hold, got {type(error).__name__} at "
        f"{where_of(error)}: {error}. Host synchronisation (.item(), printing, boolean masks) "
        "and allocation on other streams cannot be captured: leave the module that does it out "
        f"of the region (torch.compiler.disable), or compile without replay='cuda'.{hint}"
    )


def where_of(error: BaseException) -> str:
    """``module (file:line)`` of the model's code that raised: the innermost frame outside torch and
    this package, and the class of the module whose method it is."""
    place = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_library_file(file):
            owner = frame.f_locals.get("self")
            name = f"{type(owner).__name__} " if isinstance(owner, nn.Module) else ""
            place = f"{name}({shown_path(file)}:{line})"
    return place


def run_traced(compiled: Any, args: list[Any]) -> Any:
    """Run a lowered graph; one that FX runs goes node by node, so that an error names its node."""
    module = getattr(compiled, "graph_module", None)
    if isinstance(module, fx.GraphModule):
        with torch.no_grad():
            return fx.Interpreter(module).run(*args)
    return compat.call_boxed(compiled, args)
