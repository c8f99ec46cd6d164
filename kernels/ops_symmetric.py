"""Operators over peers' buffers in symmetric memory (conventions in ``ops``).

On CUDA the buffer must have been attached (``symmetric.attach``, a collective) on every rank. On
CPU there is no such memory: the buffers travel by an ordinary collective of the same group, and the
arithmetic is the oracle's.
"""

import torch

from gtpgraph.kernels import checks, reference
from gtpgraph.kernels.library import define, fake_token, new_token

Tensor = torch.Tensor


def symm_reduce_scatter(
    flat: Tensor,
    buffer: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    group_name: str,
    ranks: int,
    after: Tensor | None = None,
) -> Tensor:
    """``main = b * main + scale * sum_r fp32(chunk of rank r)``, main ``flat[offset : offset+N]``.

    Args:
        buffer: this rank's contribution, ranks * N elements in symmetric memory, contiguous; piece
            r goes to rank r. It may be filled again by work enqueued after this.
        group_name: name of the process group; every rank of it must call.
        ranks: size of the group.
        flat, beta, index, offset, scale, first, after: as for ``accumulate``.

    Raises:
        RuntimeError: on CUDA, the buffer has not been attached.
    """
    token: Tensor = torch.ops.gtpgraph.symm_reduce_scatter(
        flat, buffer, beta, index, offset, scale, first, group_name, ranks, after
    )
    return token


def symm_all_gather(
    out: Tensor, buffer: Tensor, group_name: str, ranks: int, after: Tensor | None = None
) -> Tensor:
    """``out[r * N : (r + 1) * N] = buffer of rank r``, cast to out's dtype.

    Args:
        out: contiguous, ranks * N elements, bf16, fp16 or fp32.
        buffer: this rank's piece, N elements in symmetric memory, contiguous.
        group_name, ranks: the process group and its size; every rank of it must call.
    """
    token: Tensor = torch.ops.gtpgraph.symm_all_gather(out, buffer, group_name, ranks, after)
    return token


def _check_scatter(
    flat: Tensor, buffer: Tensor, beta: Tensor, index: int, offset: int, ranks: int
) -> None:
    problems = checks.flat_problems(flat, beta) + checks.index_problems(beta, index)
    problems += checks.wgrad_problems(flat, buffer, "buffer")
    if not buffer.is_contiguous() or ranks < 1 or buffer.numel() % max(ranks, 1):
        problems.append(
            f"buffer: expected contiguous with a multiple of {ranks} (ranks) elements, got "
            f"{buffer.numel()} with strides {buffer.stride()}; pad it"
        )
    else:
        problems += checks.range_problems(flat, offset, buffer.numel() // ranks)
    checks.fail("symm_reduce_scatter", problems)


def _check_gather(out: Tensor, buffer: Tensor, ranks: int) -> None:
    problems = checks.wgrad_problems(buffer, out, "out")
    problems += checks.wgrad_problems(out, buffer, "buffer")
    if not out.is_contiguous() or not buffer.is_contiguous():
        problems.append("out, buffer: expected contiguous")
    if out.numel() != ranks * buffer.numel():
        problems.append(
            f"out: expected {ranks} (ranks) * {buffer.numel()} elements, got {out.numel()}"
        )
    checks.fail("symm_all_gather", problems)


def _reduce_scatter_cpu(
    flat: Tensor,
    buffer: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    group_name: str,
    ranks: int,
    after: Tensor | None = None,
) -> Tensor:
    _check_scatter(flat, buffer, beta, index, offset, ranks)
    functional = torch.ops._c10d_functional
    split = [buffer.numel() // ranks] * ranks
    pieces = functional.wait_tensor(
        functional.all_to_all_single(buffer.reshape(-1), split, split, group_name)
    )
    chunks = list(pieces.view(ranks, -1))
    reference.symm_reduce_scatter(flat, chunks, beta, index, offset, scale, first)
    return new_token(flat)


def _reduce_scatter_cuda(
    flat: Tensor,
    buffer: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    group_name: str,
    ranks: int,
    after: Tensor | None = None,
) -> Tensor:
    from gtpgraph.kernels import symmetric

    _check_scatter(flat, buffer, beta, index, offset, ranks)
    return symmetric.reduce_scatter(
        flat, buffer, beta, index, offset, scale, first, group_name, ranks
    )


def _all_gather_cpu(
    out: Tensor, buffer: Tensor, group_name: str, ranks: int, after: Tensor | None = None
) -> Tensor:
    _check_gather(out, buffer, ranks)
    functional = torch.ops._c10d_functional
    full = functional.wait_tensor(
        functional.all_gather_into_tensor(buffer.reshape(-1), ranks, group_name)
    )
    reference.symm_all_gather(out.view(-1), list(full.view(ranks, -1)))
    return new_token(out)


def _all_gather_cuda(
    out: Tensor, buffer: Tensor, group_name: str, ranks: int, after: Tensor | None = None
) -> Tensor:
    from gtpgraph.kernels import symmetric

    _check_gather(out, buffer, ranks)
    symmetric.all_gather(out, buffer, group_name, ranks)
    return torch.empty(1, dtype=torch.uint8, device=out.device)


def _fake(written: Tensor, *rest: object) -> Tensor:
    return fake_token(written)


define(
    "symm_reduce_scatter(Tensor(a!) flat, Tensor buffer, Tensor beta, int index, int offset, "
    "float scale, bool first, str group_name, int ranks, Tensor? after=None) -> Tensor",
    cpu=_reduce_scatter_cpu,
    cuda=_reduce_scatter_cuda,
    fake=_fake,
)
define(
    "symm_all_gather(Tensor(a!) out, Tensor buffer, str group_name, int ranks, "
    "Tensor? after=None) -> Tensor",
    cpu=_all_gather_cpu,
    cuda=_all_gather_cuda,
    fake=_fake,
)
