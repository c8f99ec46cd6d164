"""The wgrad GEMM beside its peers: ``mm`` (the limit), ``mm+add_``, ``addmm`` in place.

Shapes are tokens x in_features x out_features. With ``configs`` every way that ``gemm_table``
chooses between is measured too.
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.harness import Case, Thunk
from bench.inputs import SCALE, beta, randn
from gtpgraph.kernels import gemm_table, ops

SHAPES = (
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (4096, 768, 3072),
    (512, 768, 3072),
    (4096, 1024, 4096),
    (2048, 2048, 8192),
)


def gemm_impls(
    flat: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, configs: bool
) -> dict[str, Thunk]:
    from gtpgraph.kernels import wgrad_gemm as kernel

    main = flat.view(dy.shape[1], x.shape[1])
    one, zero, dtype = beta(1.0), beta(0.0), torch.float32
    dtype_out = torch.ops.aten.addmm.dtype_out
    impls: dict[str, Thunk] = {
        "ours": lambda: ops.wgrad_gemm(flat, dy, x, one, 0, 0, SCALE, False),
        "ours:first-adds": lambda: ops.wgrad_gemm(flat, dy, x, one, 0, 0, SCALE, True),
        "ours:first-stores": lambda: ops.wgrad_gemm(flat, dy, x, zero, 0, 0, SCALE, True),
        "mm+add_": lambda: main.add_(torch.mm(dy.t(), x), alpha=SCALE),
        "addmm": lambda: dtype_out(main, dy.t(), x, dtype, beta=1.0, alpha=SCALE, out=main),
        "limit": lambda: torch.mm(dy.t(), x),
    }
    if configs:  # what the choice of gemm_table is made from
        for label, b in (("adds", one), ("stores", zero)):
            first = kernel.Problem(flat, dy, x, b, 0, 0, SCALE, True)
            impls[f"addmm:first-{label}"] = lambda first=first: kernel.run_addmm(first)
        for name, config in gemm_table.CONFIGS.items():
            for first in (False, True):
                problem = kernel.Problem(flat, dy, x, one, 0, 0, SCALE, first)
                impls[f"triton-{name}{':first' if first else ''}"] = (
                    lambda problem=problem, config=config: kernel.run_triton(problem, config)
                )
    return impls


def wgrad_gemm(tokens: int, columns: int, rows: int, configs: bool) -> Case:
    def make(seed: int) -> dict[str, Thunk]:
        torch.manual_seed(seed)
        dy = randn(tokens, rows, dtype=torch.bfloat16)
        x = randn(tokens, columns, dtype=torch.bfloat16)
        return gemm_impls(randn(rows * columns), dy, x, configs)

    def check() -> None:
        from gtpgraph.kernels import wgrad_gemm as kernel

        dy = randn(tokens, rows, dtype=torch.bfloat16)
        x = randn(tokens, columns, dtype=torch.bfloat16)
        value = torch.mm(dy.double().t(), x.double()).flatten()
        ways: dict[str, Callable[[torch.Tensor], Any]] = {
            "ours": lambda m: ops.wgrad_gemm(m, dy, x, beta(1.0), 0, 0, SCALE, False),
            "first": lambda m: ops.wgrad_gemm(m, dy, x, beta(1.0), 0, 0, SCALE, True),
        }
        for name, config in gemm_table.CONFIGS.items() if configs else ():
            ways[name] = lambda m, config=config: kernel.run_triton(
                kernel.Problem(m, dy, x, beta(1.0), 0, 0, SCALE, True), config
            )
        start = randn(rows * columns)
        plain = start.clone().view(rows, columns)
        torch.ops.aten.addmm.dtype_out(
            plain, dy.t(), x, torch.float32, beta=1.0, alpha=SCALE, out=plain
        )
        exact = start.double() + SCALE * value
        limit = 2 * float((plain.flatten().double() - exact).norm() / exact.norm()) + 2**-24
        for name, run in ways.items():
            main = start.clone()
            run(main)
            error = float((main.double() - exact).norm() / exact.norm())
            if not error <= limit:
                raise AssertionError(f"wgrad_gemm {name}: {error:.2e}, expected <= {limit:.2e}")

    name = f"wgrad_gemm:{tokens}x{columns}x{rows}"
    num_bytes = 2 * tokens * (rows + columns) + 8 * rows * columns
    flops = 2.0 * tokens * rows * columns
    return Case(
        name, num_bytes, make, check, flops, conditions={"operands": "bf16", "main": "fp32"}
    )
