"""Where the operators of the package are defined: one torch library, one helper.

A schema, its CPU oracle, its CUDA launcher and its fake come in; a registered operator goes out.
The device of the tensors alone picks the implementation; no environment variable does.
"""

from collections.abc import Callable
from typing import Any

import torch

from gtpgraph.kernels.beside import branching

# FRAGMENT, because other modules of the package define operators in the same namespace. Kept in a
# module global: an operator disappears with its Library object.
LIBRARY = torch.library.Library("gtpgraph", "FRAGMENT")

Impl = Callable[..., Any]


def define(schema: str, *, cpu: Impl, cuda: Impl, fake: Impl, beside: bool = False) -> None:
    """Define ``gtpgraph::<schema>``; ``cuda`` imports its kernel module when it is first called.

    `beside`: what it writes nothing else in a backward reads, so that a capture may launch it on a
    branch.
    """
    name = schema.partition("(")[0]
    if beside:
        cpu, cuda = branching(cpu), branching(cuda)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"gtpgraph::{name}", fake, lib=LIBRARY)


def new_token(like: torch.Tensor) -> torch.Tensor:
    """An ordering token: uint8 [1] on ``like``'s device.

    Mutating operators return one so that an order between them can be written as a data
    dependency; its value means nothing.
    """
    return like.new_zeros(1, dtype=torch.uint8)


def fake_token(like: torch.Tensor) -> torch.Tensor:
    """The fake of :func:`new_token`."""
    return like.new_empty(1, dtype=torch.uint8)
