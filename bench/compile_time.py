"""Suite ``compile``: what our passes cost of a whole compilation, by the number of layers.

The model is gpt-tiny with more layers, in one process, lowered by FX (Inductor's code generation
would only make our share smaller). A compilation is timed as a whole (Dynamo, AOTAutograd, our
passes, verification, the plan), and inside it everything that `RegionBuilder` does. Rows: metric
``time_us`` for impl ``compile`` (whole) and ``passes`` (ours), with the number of sites, nodes of
the backward and the share among the conditions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import gtpgraph as gg
from bench import harness
from gtpgraph.graph import builder
from gtpgraph.models import build

LAYERS = (10, 100, 300)
CALLBACKS = ("on_joint", "on_forward", "on_backward")


@contextmanager
def timed_passes() -> Iterator[dict[str, float]]:
    """Seconds spent in each of the builder's callbacks, while open."""
    spent = dict.fromkeys(CALLBACKS, 0.0)

    def timed(name: str) -> Any:
        method = getattr(builder.RegionBuilder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - start

        return patch.object(builder.RegionBuilder, name, call)

    with timed("on_joint"), timed("on_forward"), timed("on_backward"):
        yield spent


def measure_once(layers: int) -> tuple[float, dict[str, float], dict[str, Any]]:
    """(seconds of the whole, seconds by callback, conditions) of one compilation, CPU time."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, make_batch = build("gpt-tiny", layers=layers)
    compiled = gg.compile(gg.DistributedDataParallel(gg.shard(model)), lowering="eager")
    with timed_passes() as spent:
        start = time.process_time()
        plan = gg.inspect(compiled, *make_batch(0, 0, "cpu"))
        whole = time.process_time() - start
    (region,) = compiled.regions
    sites = len(plan.regions[0].occurrences)
    nodes = region.texts["before"].count("\n    %")
    return whole, spent, {"layers": layers, "sites": sites, "backward_nodes": nodes}


def measure(run: harness.Run, layers: tuple[int, ...] = LAYERS) -> list[dict[str, Any]]:
    """Rows of all sizes; prints a line a size."""
    rows = []
    measure_once(1)  # imports and caches
    for number in layers:
        whole, spent, conditions = measure_once(number)
        ours = sum(spent.values())
        conditions |= {"share": round(ours / whole, 4), "clock": "process_time"}
        conditions |= {f"{name}_s": round(s, 3) for name, s in spent.items()}
        case = f"gpt-tiny:{number}"
        rows.append(run.row(case, "compile", [whole * 1e6], None, conditions))
        rows.append(run.row(case, "passes", [ours * 1e6], None, conditions))
        print(
            f"{number:4} layers  {conditions['sites']:5} sites  {conditions['backward_nodes']:6} "
            f"nodes  whole {whole:7.1f} s  ours {ours:6.2f} s ({ours / whole:.1%}; "
            f"{ours / number * 1e3:.1f} ms a layer)",
            flush=True,
        )
    return rows
