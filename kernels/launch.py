"""Launch a Triton kernel again without its argument binder.

In: a kernel, its arguments, a key that fixes what Triton specialises on (for NVIDIA GPUs).
Out: a launch.
Binding and specialising the arguments costs the host several times what the launch itself costs,
which is what an uncaptured step of many small weights spends its time on. The first launch of a key
goes through Triton and returns the compiled kernel; later ones call that, as Triton's tutorial on
fused softmax does. Only calls whose tensors are all aligned take the short way.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

ALIGNMENT = 16  # bytes: what Triton specialises addresses on
_MAX_KEPT = 8192

_compiled: dict[Hashable, Callable[..., None]] = {}


def launch(
    kernel: Any,
    key: Hashable,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    **options: int,
) -> None:
    """Launch ``kernel[grid](*args, **constants, **options)`` on the current device and stream.

    Args:
        key: equal only for calls of this kernel on one device that agree on the dtypes of the
            tensors, on every integer of `args` (but those the kernel does not specialise), on
            `constants` and on `options`.
        args: what comes before the constants in the kernel's signature.
        constants: its constexpr arguments, in the order of the signature.
        options: num_warps and the like.
    """
    run = _compiled.get(key)
    if run is not None and _aligned(args):
        run(*args, *constants.values())
        return
    compiled = kernel[grid](*args, **constants, **options)
    if run is None and hasattr(compiled, "packed_metadata") and _aligned(args):
        if len(_compiled) >= _MAX_KEPT:  # plans come and go; dropping all is rare and harmless
            _compiled.clear()
        _compiled[key] = compiled[grid]


def _aligned(args: tuple[Any, ...]) -> bool:
    bits = 0
    for arg in args:
        if isinstance(arg, torch.Tensor):
            bits |= arg.data_ptr()
    return bits % ALIGNMENT == 0
