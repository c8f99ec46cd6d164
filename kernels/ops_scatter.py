"""The operator of a scattered wgrad (conventions in ``ops``)."""

import torch

from gtpgraph.kernels import checks, reference
from gtpgraph.kernels.library import define, fake_token, new_token

Tensor = torch.Tensor
INDEX_DTYPES = (torch.int64, torch.int32)


def scatter_accumulate(
    flat: Tensor,
    values: Tensor,
    indices: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    rows: int,
    after: Tensor | None = None,
) -> Tensor:
    """``main = b * main + scale * dense``, ``dense[r] = sum of values[n] with indices[n] == r``.

    An embedding's wgrad (aten.embedding_dense_backward) without the dense tensor. Rows of equal
    index are summed in fp32, in an order that does not change from run to run. For few rows: each
    index is compared with each. On CUDA a bf16 main is rounded twice where b is not 0 or 1.

    Args:
        flat: the bucket's buffer; ``main`` is ``flat[offset : offset + rows * C]`` seen as
            [rows, C].
        values: [N, C], bf16, fp16 or fp32. Strided ones are copied: a compiler chooses strides
            late, and the rows are few.
        indices: int64 or int32 [N]; -rows <= indices < rows, negative ones count from
            the end. On CUDA a row whose index lies outside is left out: to check would need the
            host, and the forward's lookup with the same indices has checked.
        beta, index, offset, scale, first, after: as for ``accumulate``.

    Raises:
        IndexError: on the CPU, an index outside.
    """
    token: Tensor = torch.ops.gtpgraph.scatter_accumulate(
        flat, values, indices, beta, index, offset, scale, first, rows, after
    )
    return token


def _operand_problems(flat: Tensor, values: Tensor, indices: Tensor, rows: int) -> list[str]:
    problems = checks.wgrad_problems(flat, values, "values")
    if values.dim() != 2:
        problems.append(
            f"values: expected [N, C], got shape {tuple(values.shape)}; flatten the leading "
            "dimensions"
        )
    if indices.dtype not in INDEX_DTYPES or indices.device != flat.device:
        problems.append(
            f"indices: expected {checks.names(INDEX_DTYPES)} on {flat.device}, got "
            f"{checks.names((indices.dtype,))} on {indices.device}"
        )
    if tuple(indices.shape) != tuple(values.shape[:1]):
        problems.append(
            f"indices: expected [N] with N = {values.shape[0] if values.dim() else '?'}, got shape "
            f"{tuple(indices.shape)}"
        )
    if rows < 0:
        problems.append(f"rows: expected 0 or more, got {rows}")
    return problems


def _check(
    flat: Tensor, values: Tensor, indices: Tensor, beta: Tensor, index: int, offset: int, rows: int
) -> None:
    operands = _operand_problems(flat, values, indices, rows)
    problems = checks.flat_problems(flat, beta) + operands + checks.index_problems(beta, index)
    if not operands:
        problems += checks.range_problems(flat, offset, rows * values.shape[1])
    checks.fail("scatter_accumulate", problems)


def _scatter_accumulate_cpu(
    flat: Tensor,
    values: Tensor,
    indices: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    rows: int,
    after: Tensor | None = None,
) -> Tensor:
    _check(flat, values, indices, beta, index, offset, rows)
    outside = indices[(indices < -rows) | (indices >= rows)]
    if outside.numel():
        raise IndexError(
            f"gtpgraph::scatter_accumulate: indices: expected -{rows} <= index < {rows}, got "
            f"{outside[:4].tolist()}"
        )
    reference.scatter_accumulate(flat, values, indices, beta, index, offset, scale, first, rows)
    return new_token(flat)


def _scatter_accumulate_cuda(
    flat: Tensor,
    values: Tensor,
    indices: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    rows: int,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import scatter as kernel

    _check(flat, values, indices, beta, index, offset, rows)
    values, indices = values.contiguous(), indices.contiguous()
    return kernel.scatter_accumulate(flat, values, indices, beta, index, offset, scale, first, rows)


def _scatter_accumulate_fake(
    flat: Tensor, values: Tensor, indices: Tensor, beta: Tensor, *rest: object
) -> Tensor:
    problems = checks.flat_problems(flat, beta)
    checks.fail("scatter_accumulate", problems + checks.wgrad_problems(flat, values, "values"))
    return fake_token(flat)


define(
    "scatter_accumulate(Tensor(a!) flat, Tensor values, Tensor indices, Tensor beta, int index, "
    "int offset, float scale, bool first, int rows, Tensor? after=None) -> Tensor",
    cpu=_scatter_accumulate_cpu,
    cuda=_scatter_accumulate_cuda,
    fake=_scatter_accumulate_fake,
    beside=True,
)
