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


@dataclass(frozen=True)
class Times:
    """us a call, medians: one H200, torch 2.11.0+cu130, triton 3.6.0, bf16 operands, fp32 main.

    ``addmm`` a later contribution; the others a first one, adding (b = 1) or storing (b = 0), by
    prepare + addmm, by LARGE, by SMALL; ``taken_stores`` by what :func:`choose` takes.
    """

    addmm: float
    addmm_adds: float
    addmm_stores: float
    large_adds: float
    small_adds: float
    taken_stores: float


# by (tokens, in_features, out_features)
MEASURED: dict[tuple[int, int, int], Times] = {
    (8192, 4096, 14336): Times(1432.4, 1434.3, 1489.8, 1481.9, 2185.0, 1444.9),
    (8192, 4096, 4096): Times(411.1, 412.5, 427.3, 419.9, 559.2, 408.1),
    (4096, 1024, 4096): Times(54.0, 54.9, 59.3, 54.8, 73.1, 51.8),
    (2048, 2048, 8192): Times(123.0, 124.4, 140.8, 121.9, 149.6, 107.4),
    (4096, 768, 3072): Times(33.3, 34.4, 35.8, 47.6, 40.8, 35.7),
    (512, 768, 3072): Times(12.3, 13.5, 13.1, 14.8, 12.9, 10.1),
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
