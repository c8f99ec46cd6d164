"""What the interpreter does not see: kernels compile for a Hopper GPU, on a machine without one."""

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
scatter = pytest.importorskip("gtpgraph.kernels.scatter", reason="triton is not installed")

INT, TABLES = "i32", {"p_count": "*i32", "p_link": "*i32"}
KERNELS = {
    "links_kernel": (
        {"p_indices": "*i64", **TABLES, "N": INT, "ROWS": INT},
        {"BN": scatter.LINK_ROWS, "BM": scatter.LINK_OTHERS},
    ),
    "scatter_kernel": (
        {"p_flat": "*fp32", "p_values": "*bf16", "p_indices": "*i64", **TABLES, "offset": INT,
         "scale": "fp32", "N": INT, "C": INT, "ROWS": INT},
        {"BN": scatter.BLOCK_N, "BC": scatter.BLOCK_C},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_scatter_kernels(name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(scatter, name)
    types, sizes = KERNELS[name]
    signature = {**types, **dict.fromkeys(sizes, "constexpr")}
    constants = {(kernel.arg_names.index(n),): value for n, value in sizes.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(made.asm["cubin"]) > 0
