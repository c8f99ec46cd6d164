"""Which way ``wgrad_gemm`` takes for which shape, and the measurements that say so.

Torch-only data; a row of ``bench/results`` stands behind every entry. None stands for cuBLAS
(``aten.addmm.dtype_out`` in place), a Config for the Triton kernel.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """Tile [bm, bn], bt tokens a step, and how the kernel is laid out over the chip."""

    bm: int
    bn: int
    bt: int
    warps: int
    stages: int
    per_sm: int = 1  # programs a multiprocessor
    group: int = 8  # rows of tiles taken together
    split: bool = False  # epilogue in two halves


LARGE = Config(128, 256, 64, warps=8, stages=3, split=True)
SQUARE = Config(128, 128, 64, warps=8, stages=4)
PAIRED = Config(128, 128, 64, warps=4, stages=3, per_sm=2)
SMALL = Config(64, 128, 64, warps=4, stages=4, per_sm=2)
TINY = Config(64, 64, 128, warps=4, stages=3, per_sm=3)
IEEE = Config(32, 32, 32, warps=4, stages=2, per_sm=2)  # fp32 operands
CONFIGS = {"large": LARGE, "square": SQUARE, "paired": PAIRED, "small": SMALL, "tiny": TINY}


def choose(
    num_t: int, num_m: int, num_n: int, first: bool, main: torch.dtype, operand: torch.dtype
) -> Config | None:
    """The way for dY [num_t, num_m], X [num_t, num_n]; None is cuBLAS."""
    if main != torch.float32:  # cuBLAS accumulates in place into fp32 only
        return IEEE if operand == torch.float32 else SQUARE
    return None
