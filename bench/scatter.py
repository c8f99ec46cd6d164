"""The scattered wgrad of an embedding beside the dense one.

In: rows of a gradient and their indices, uniformly drawn. Out: a case of the suite ``kernels``.
"""

from __future__ import annotations

import torch

from bench.harness import Case, Thunk, limits
from bench.inputs import SCALE, beta, gate, randn
from gtpgraph.kernels import ops


def scatter_accumulate(num: int = 8192, columns: int = 768, rows: int = 50257) -> Case:
    """`num` bf16 rows into a main_grad [rows, columns] that others have written before."""

    @torch.compile
    def inductor(main: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> None:
        dense = torch.ops.aten.embedding_dense_backward(values, at, rows, -1, False)
        main.add_(dense, alpha=SCALE)

    one = beta(1.0)
    hit = round(rows * (1 - (1 - 1 / rows) ** num))  # expected distinct indices
    num_bytes = 2 * num * columns + 8 * hit * columns

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        values = randn(num, columns, dtype=torch.bfloat16)
        return values, torch.randint(rows, (num,), device="cuda")

    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        flat, (values, at) = randn(rows * columns), inputs()
        main = flat.view(rows, columns)

        def plain() -> None:
            dense = torch.ops.aten.embedding_dense_backward(values, at, rows, -1, False)
            main.add_(dense, alpha=SCALE)

        return {
            "ours": lambda: ops.scatter_accumulate(flat, values, at, one, 0, 0, SCALE, False, rows),
            "torch": plain,
            "index_add_": lambda: main.index_add_(0, at, values.float(), alpha=SCALE),
            "inductor": lambda: inductor(main, values, at),
            **limits(num_bytes),
        }

    def check() -> None:
        flat, (values, at) = randn(rows * columns), inputs()
        dense = torch.zeros(rows, columns, dtype=torch.float64, device="cuda")
        dense.index_add_(0, at, values.double())
        gate(
            "scatter_accumulate",
            lambda m: ops.scatter_accumulate(m, values, at, one, 0, 0, SCALE, True, rows),
            flat,
            dense.flatten(),
        )

    work = {"rows": f"{num} x {columns}, bf16, into {rows} x {columns}", "indices": "uniform"}
    return Case("scatter_accumulate", num_bytes, make, check, conditions=work)
