"""The operator of the wgrad GEMM (conventions in ``ops``)."""

import torch

from gtpgraph.kernels import checks, gemm_table, reference
from gtpgraph.kernels.library import define, fake_token, new_token

Tensor = torch.Tensor


def wgrad_gemm(
    flat: Tensor,
    dy: Tensor,
    x: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    """``main = b * main + scale * dy^T x`` summed in fp32; the wgrad itself is never written.

    Args:
        flat: the bucket's buffer; ``main`` is ``flat[offset : offset + M * N]`` seen as [M, N].
        dy: [T, M] gradient of the layer's output, T tokens, contiguous, bf16, fp16 or fp32.
        x: [T, N] the layer's input, contiguous, dy's dtype.
        beta, index, offset, scale, first, after: as for ``accumulate``.
    """
    token: Tensor = torch.ops.gtpgraph.wgrad_gemm(
        flat, dy, x, beta, index, offset, scale, first, after
    )
    return token


def _operand_problems(flat: Tensor, dy: Tensor, x: Tensor) -> list[str]:
    problems = checks.wgrad_problems(flat, dy, "dy") + checks.wgrad_problems(flat, x, "x")
    if dy.dtype != x.dtype:
        problems.append(f"x: expected dy's dtype {dy.dtype}, got {x.dtype}")
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
        problems.append(
            f"dy, x: expected [tokens, out] and [tokens, in], got {tuple(dy.shape)} and "
            f"{tuple(x.shape)}; flatten the leading dimensions"
        )
    for name, operand in (("dy", dy), ("x", x)):
        if not operand.is_contiguous():
            problems.append(
                f"{name}: expected contiguous, got strides {operand.stride()}; pass "
                f"{name}.contiguous()"
            )
    return problems


def _check(flat: Tensor, dy: Tensor, x: Tensor, beta: Tensor, index: int, offset: int) -> None:
    operands = _operand_problems(flat, dy, x)
    problems = checks.flat_problems(flat, beta) + operands + checks.index_problems(beta, index)
    if not operands:
        problems += checks.range_problems(flat, offset, dy.shape[1] * x.shape[1])
    checks.fail("wgrad_gemm", problems)


def _wgrad_gemm_cpu(
    flat: Tensor,
    dy: Tensor,
    x: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    _check(flat, dy, x, beta, index, offset)
    reference.wgrad_gemm(flat, dy, x, beta, index, offset, scale, first)
    return new_token(flat)


def _wgrad_gemm_cuda(
    flat: Tensor,
    dy: Tensor,
    x: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import wgrad_gemm as kernel

    _check(flat, dy, x, beta, index, offset)
    problem = kernel.Problem(flat, dy, x, beta, index, offset, scale, first)
    programs = kernel.multiprocessors(flat.device)
    choice = gemm_table.choose(dy, x, flat.dtype, first, programs)
    return kernel.wgrad_gemm(problem, choice)


def _wgrad_gemm_fake(flat: Tensor, dy: Tensor, x: Tensor, beta: Tensor, *rest: object) -> Tensor:
    problems = checks.flat_problems(flat, beta) + checks.wgrad_problems(flat, dy, "dy")
    checks.fail("wgrad_gemm", problems + checks.wgrad_problems(flat, x, "x"))
    return fake_token(flat)


define(
    "wgrad_gemm(Tensor(a!) flat, Tensor dy, Tensor x, Tensor beta, int index, int offset, "
    "float scale, bool first, Tensor? after=None) -> Tensor",
    cpu=_wgrad_gemm_cpu,
    cuda=_wgrad_gemm_cuda,
    fake=_wgrad_gemm_fake,
    beside=True,
)
