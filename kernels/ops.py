"""The operators of the package: schema, fake and dispatch by the device of the tensors.

Importing this module registers all of them and imports torch alone; a Triton kernel is imported by
the first call on CUDA tensors. CPU tensors go to ``reference``. Here: reductions into one
main_grad; ``ops_many``: many tensors in a launch; ``ops_gemm``: the wgrad GEMM; ``ops_scatter``:
scattered rows; ``ops_symmetric``: peers' memory.

What they share. ``flat`` is a bucket's buffer (1-D contiguous, fp32 or bf16) and ``offset`` counts
its elements. A first contribution takes ``b = beta[index]``, a later one ``b = 1``; ``b == 0``
stores, and the old contents are not read. On CUDA beta is read by the kernel, so that one captured
graph serves first and later microbatches. Arithmetic is in fp32 with one rounding to flat's dtype.
Each returns a token, uint8 [1], and takes ``after``, the token of an earlier operator: together
they write an order down as a data dependency. What does not fit is a ValueError that names every
blocker at once.
"""

import torch

from gtpgraph.kernels import checks, reference, stats
from gtpgraph.kernels.library import define, fake_token, new_token
from gtpgraph.kernels.ops_gemm import wgrad_gemm
from gtpgraph.kernels.ops_many import accumulate_many, pack, unpack
from gtpgraph.kernels.ops_scatter import scatter_accumulate
from gtpgraph.kernels.ops_symmetric import symm_all_gather, symm_reduce_scatter

__all__ = [
    "accumulate", "accumulate_many", "accumulate_stats", "pack", "scatter_accumulate",
    "shard_reduce", "symm_all_gather", "symm_reduce_scatter", "unpack", "wgrad_gemm",
]  # fmt: skip

Tensor = torch.Tensor


def accumulate(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    """Add one contribution to its main_grad, in place: ``main = b * main + scale * wgrad``.

    Args:
        flat: the bucket's buffer; ``main`` is ``flat[offset : offset + wgrad.numel()]`` seen in
            wgrad's shape, row-major.
        wgrad: bf16, fp16 or fp32; contiguous or strided (a transposed GEMM output).
        beta: float32 [weights of the bucket], on flat's device.
        index: which entry of beta is this weight's.
        offset: first element of main in flat.
        scale: host factor of the contribution (1/gtp, 1/dp).
        first: take ``b = beta[index]`` instead of 1.
        after: an ordering token, otherwise ignored.

    Raises:
        NotImplementedError: on CUDA, strides that do not collapse to three dimensions.
    """
    token: Tensor = torch.ops.gtpgraph.accumulate(
        flat, wgrad, beta, index, offset, scale, first, after
    )
    return token


def accumulate_stats(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    partials: Tensor,
    after: Tensor | None = None,
) -> Tensor:
    """:func:`accumulate` of a final value: also fills ``partials`` (see ``stats``) from registers.

    Args:
        wgrad: contiguous; the rest as for :func:`accumulate`.
        partials: float32 [stats.num_partials(wgrad.numel()), 2], overwritten.
    """
    token: Tensor = torch.ops.gtpgraph.accumulate_stats(
        flat, wgrad, beta, index, offset, scale, first, partials, after
    )
    return token


def shard_reduce(
    flat: Tensor,
    recv: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    valid: int | None = None,
    partials: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """``main = b * main + scale * sum_r fp32(recv[r])``, main = ``flat[offset : offset + N]``.

    Args:
        recv: [R, N] what an all-to-all delivered, row r from rank r; bf16, fp16 or fp32, rows
            contiguous. Summed in the order of r.
        valid: elements that are not tail padding (default N). Padding is stored as zero and left
            out of ``partials``.
        partials: None, or float32 [stats.num_partials(N), 2] to fill where the values are final.
    """
    token: Tensor = torch.ops.gtpgraph.shard_reduce(
        flat, recv, beta, index, offset, scale, first, valid, partials, after
    )
    return token


def _check_accumulate(
    flat: Tensor, wgrad: Tensor, beta: Tensor, index: int, offset: int, op: str = "accumulate"
) -> None:
    if checks.fits(flat, wgrad, beta, index, offset, wgrad.numel()):
        return
    problems = checks.flat_problems(flat, beta) + checks.wgrad_problems(flat, wgrad)
    problems += checks.range_problems(flat, offset, wgrad.numel())
    checks.fail(op, problems + checks.index_problems(beta, index))


def _accumulate_cpu(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    _check_accumulate(flat, wgrad, beta, index, offset)
    reference.accumulate(flat, wgrad, beta, index, offset, scale, first)
    return new_token(flat)


def _accumulate_cuda(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import accumulate as kernel

    _check_accumulate(flat, wgrad, beta, index, offset)
    return kernel.accumulate(flat, wgrad, beta, index, offset, scale, first)


def _check_stats(flat: Tensor, wgrad: Tensor, partials: Tensor) -> None:
    problems = stats.problems(partials, wgrad.numel(), flat.device)
    if not wgrad.is_contiguous():
        problems.append(
            f"wgrad: expected contiguous, got strides {wgrad.stride()}; pass wgrad.contiguous()"
        )
    checks.fail("accumulate_stats", problems)


def _accumulate_stats_cpu(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    partials: Tensor,
    after: Tensor | None = None,
) -> Tensor:
    _check_accumulate(flat, wgrad, beta, index, offset, "accumulate_stats")
    _check_stats(flat, wgrad, partials)
    reference.accumulate(flat, wgrad, beta, index, offset, scale, first)
    reference.write_stats(partials, flat[offset : offset + wgrad.numel()])
    return new_token(flat)


def _accumulate_stats_cuda(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    partials: Tensor,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import accumulate as kernel

    _check_accumulate(flat, wgrad, beta, index, offset, "accumulate_stats")
    _check_stats(flat, wgrad, partials)
    return kernel.accumulate(flat, wgrad, beta, index, offset, scale, first, partials)


def _fake(flat: Tensor, value: Tensor, beta: Tensor, *rest: object) -> Tensor:
    """Shapes may be symbolic here: only what needs no size is checked."""
    problems = checks.flat_problems(flat, beta)
    checks.fail("fake", problems + checks.wgrad_problems(flat, value, "contribution"))
    return fake_token(flat)


def _check_shard_reduce(
    flat: Tensor,
    recv: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    valid: int,
    partials: Tensor | None,
) -> None:
    problems = checks.flat_problems(flat, beta) + checks.wgrad_problems(flat, recv, "recv")
    problems += checks.index_problems(beta, index)
    if recv.dim() != 2 or recv.shape[0] < 1 or (recv.shape[1] > 1 and recv.stride(1) != 1):
        problems.append(
            f"recv: expected [ranks, elements] with contiguous rows, got shape "
            f"{tuple(recv.shape)} with strides {recv.stride()}"
        )
        checks.fail("shard_reduce", problems)
    numel = recv.shape[1]
    problems += checks.range_problems(flat, offset, numel)
    if not 0 <= valid <= numel:
        problems.append(f"valid: expected 0 <= valid <= {numel}, got {valid}")
    if partials is not None:
        problems += stats.problems(partials, numel, flat.device)
    checks.fail("shard_reduce", problems)


def _shard_reduce_cpu(
    flat: Tensor,
    recv: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    valid: int | None = None,
    partials: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    count = recv.shape[-1] if valid is None else valid
    _check_shard_reduce(flat, recv, beta, index, offset, count, partials)
    reference.shard_reduce(flat, recv, beta, index, offset, scale, first, count)
    if partials is not None:
        reference.write_stats(partials, flat[offset : offset + recv.shape[1]])
    return new_token(flat)


def _shard_reduce_cuda(
    flat: Tensor,
    recv: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    valid: int | None = None,
    partials: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import shard_reduce as kernel

    count = recv.shape[-1] if valid is None else valid
    _check_shard_reduce(flat, recv, beta, index, offset, count, partials)
    return kernel.shard_reduce(flat, recv, beta, index, offset, scale, first, count, partials)


define(
    "accumulate(Tensor(a!) flat, Tensor wgrad, Tensor beta, int index, int offset, float scale, "
    "bool first, Tensor? after=None) -> Tensor",
    cpu=_accumulate_cpu,
    cuda=_accumulate_cuda,
    fake=_fake,
    beside=True,
)
define(
    "accumulate_stats(Tensor(a!) flat, Tensor wgrad, Tensor beta, int index, int offset, "
    "float scale, bool first, Tensor(b!) partials, Tensor? after=None) -> Tensor",
    cpu=_accumulate_stats_cpu,
    cuda=_accumulate_stats_cuda,
    fake=_fake,
)
define(
    "shard_reduce(Tensor(a!) flat, Tensor recv, Tensor beta, int index, int offset, float scale, "
    "bool first, int? valid=None, Tensor(b!)? partials=None, Tensor? after=None) -> Tensor",
    cpu=_shard_reduce_cpu,
    cuda=_shard_reduce_cuda,
    fake=_fake,
    beside=True,
)
