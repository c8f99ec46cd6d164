"""Triton pieces that the kernels share: the factor of the old contents, the fused update, stats.

Legend: ``b`` factor of the old contents, ``o_`` offsets, ``m_`` mask, ``p_`` pointer, ``i_``
program index. Everything is computed in fp32. A kernel module imports triton when it is imported,
so only CUDA implementations (and interpreter tests) import one.
"""

# Triton's language has no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import contextlib

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; called on the host, Triton's own takes microseconds."""
    return -(-a // b)


@triton.jit
def factor(p_beta, index, FIRST: tl.constexpr):
    """``beta[index]`` of a first contribution, else 1."""
    if FIRST:
        b = tl.load(p_beta + index)
    else:
        b = tl.full([], 1.0, tl.float32)
    return b


@triton.jit
def update(p_main, m_main, b, value, scale):
    """Store ``b * main + scale * value`` and return what was stored, as fp32.

    With b == 0 the load is masked off: no traffic, and a NaN in the old contents cannot spread.
    """
    # Widened before it is compared: the interpreter splats a scalar comparison as a float.
    live = tl.broadcast_to(b, m_main.shape) != 0.0
    old = tl.load(p_main, mask=m_main & live, other=0.0).to(tl.float32)
    new = (b * old + scale * value).to(p_main.dtype.element_ty)
    tl.store(p_main, new, mask=m_main)
    return new.to(tl.float32)


@triton.jit
def store_stats(p_partial, value):
    """``p_partial[0] = sum(value^2)``, ``p_partial[1] =`` how many are not finite.

    ``value`` is 0 outside the mask. The count is taken only where the sum is not finite, so that
    the usual tile pays for one reduction.
    """
    total = tl.sum(value * value, axis=0)
    bad = 0.0
    if (total < float("inf")) == 0:
        bad = tl.sum(tl.where(tl.abs(value) < float("inf"), 0.0, 1.0), axis=0)
    tl.store(p_partial, total)
    tl.store(p_partial + 1, bad)


_HERE = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on ``tensor``'s device (Triton launches on the current one)."""
    if tensor.is_cuda and tensor.get_device() != torch.accelerator.current_device_index():
        return torch.cuda.device(tensor.device)
    return _HERE
