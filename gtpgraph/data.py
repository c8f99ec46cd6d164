"""Real text without a download: the Python standard library's own source files as byte tokens.

In: a seed, a rank, a shape. Out: int64 tokens below 256, a different piece for each (seed, rank).
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MAX_RANKS = 4096  # pieces of (seed, rank) and (seed + 1, rank') differ up to this many ranks


@cache
def _corpus() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < 1_000_000:
        raise RuntimeError(
            f"byte tokens: expected the Python standard library's sources in {folder}, found "
            f"{len(text)} bytes of *.py; use a Python installed with its sources, or a factory "
            "with its own make_batch."
        )
    return text


def byte_tokens(seed: int, rank: int, num_tokens: int) -> Tensor:
    """One piece of source text, int64 [num_tokens], values 0 to 255.

    Pieces of different (seed, rank) start at different places (until all of the about 5 million
    places are used); the same arguments give the same piece on one Python version.

    Raises:
        ValueError: a negative seed, a rank outside 0 to 4095, or more tokens than there are.
        RuntimeError: the standard library is installed without its sources.
    """
    text = _corpus()
    span = len(text) - num_tokens
    if seed < 0 or not 0 <= rank < MAX_RANKS or not 0 < num_tokens < len(text):
        raise ValueError(
            f"byte_tokens: expected seed >= 0, 0 <= rank < {MAX_RANKS} and 0 < num_tokens < "
            f"{len(text)}, got {seed=}, {rank=}, {num_tokens=}"
        )
    # A stride without a common divisor visits every start once before it repeats one.
    stride = span * 5 // 8
    while math.gcd(stride, span) != 1:
        stride += 1
    start = (seed * MAX_RANKS + rank) * stride % span
    piece = bytearray(text[start : start + num_tokens])
    return torch.frombuffer(piece, dtype=torch.uint8).to(torch.int64)


@dataclass(frozen=True)
class ByteBatches:
    """``make_batch`` of the built-in models: called with (seed, rank, device), gives (tokens,).

    ``tokens``: int64 [batch, length] on ``device``; inputs and targets are both cut from it.
    """

    batch: int
    length: int

    def __call__(
        self, seed: int, rank: int = 0, device: torch.device | str = "cpu"
    ) -> tuple[Tensor]:
        tokens = byte_tokens(seed, rank, self.batch * self.length)
        return (tokens.view(self.batch, self.length).to(device),)
