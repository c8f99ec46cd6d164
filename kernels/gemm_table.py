"""Which way ``wgrad_gemm`` takes for which shape, and the measurements that say so.

Torch-only data. ``None`` stands for cuBLAS (``aten.addmm.dtype_out`` in place), a Config for the
Triton kernel. ``MEASURED`` holds the times that the rule in :func:`choose` follows from; they are
medians of graph replays with rotated inputs on the conditions below (``bench/run.py kernels
--configs`` measures them again).
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
    flatten: bool = True  # one loop over tiles and tokens: loads of the next tile start early


LARGE = Config(128, 256, 64, warps=8, stages=3, split=True)
PAIRED = Config(128, 128, 64, warps=4, stages=3, per_sm=2, split=True, flatten=False)
SMALL = Config(64, 128, 64, warps=4, stages=3, per_sm=3, split=True, flatten=False)
IEEE = Config(32, 32, 32, warps=4, stages=2, per_sm=2)  # fp32 operands
CONFIGS = {"large": LARGE, "paired": PAIRED, "small": SMALL}

CONDITIONS = "one H200, torch 2.11.0+cu130, triton 3.6.0, bf16 operands, fp32 main, us"
# (tokens, in, out): addmm, first-adds and first-stores by prepare + addmm, LARGE, SMALL
MEASURED: dict[tuple[int, int, int], tuple[float, float, float, float, float]] = {
    (8192, 4096, 14336): (1303.5, 1349.8, 1393.0, 1370.8, 2466.0),
    (8192, 4096, 4096): (382.0, 389.9, 404.7, 393.6, 561.6),
    (4096, 1024, 4096): (50.3, 52.9, 57.1, 52.3, 71.8),
    (2048, 2048, 8192): (119.4, 122.8, 138.6, 119.4, 150.1),
    (4096, 768, 3072): (33.0, 34.9, 35.9, 47.9, 42.0),
    (512, 768, 3072): (11.9, 14.1, 13.2, 14.8, 12.7),
}
FULL_WAVES = 0.9  # share of the chip that LARGE must keep busy: 0.97 wins or ties, 0.55 loses
FEW_TOKENS = 1024  # up to here main's traffic outweighs the product, and one launch beats two


def busy(num_m: int, num_n: int, config: Config, multiprocessors: int) -> float:
    """Share of program slots that have a tile, over all waves of tiles; 0 where there is none."""
    tiles = -(-num_m // config.bm) * -(-num_n // config.bn)
    slots = multiprocessors * config.per_sm
    return tiles / (-(-tiles // slots) * slots) if tiles else 0.0


def choose(
    dy: torch.Tensor, x: torch.Tensor, main: torch.dtype, first: bool, multiprocessors: int
) -> Config | None:
    """The way for dy [T, M], x [T, N] into a main of dtype ``main``; None is cuBLAS.

    A later contribution goes to cuBLAS everywhere: the Triton kernel was never faster beyond noise.
    A first one would need two launches there (its factor is on the device), so Triton takes it
    where its tiles fill the chip, or where tokens are few.
    """
    full = busy(dy.shape[1], x.shape[1], LARGE, multiprocessors) >= FULL_WAVES
    if main != torch.float32:  # cuBLAS accumulates in place into fp32 only
        if dy.dtype == torch.float32:
            return IEEE
        return LARGE if full else SMALL
    if not first or dy.dtype == torch.float32:
        return None
    if full:
        return LARGE
    return SMALL if dy.shape[0] <= FEW_TOKENS else None
