"""A weight's gather and its wgrad's reduction through a staging buffer in symmetric memory.

In: a shard or a wgrad anywhere in memory, and a buffer that the peers can read. Each operator fills
the buffer and exchanges, as one, so that no scheduler can come between the two::

    staged_gather       copy shard -> staging;  out[r] = shard of rank r
    staged_accumulate   copy wgrad -> staging (cast, tail zeroed);
                        main = b * main + scale * sum_r fp32(piece of rank r)

The buffer is bytes, for all dtypes and sizes of one group: whatever uses it mutates it, so the
exchanges of a group keep their order through any compiler. When an operator's work is done every
peer has read the buffer (its second barrier), so that work enqueued after it on the same stream
may fill it again. Two streams need two buffers.
"""

import torch

from gtpgraph.kernels import checks
from gtpgraph.kernels.library import define, fake_token
from gtpgraph.kernels.ops_symmetric import symm_all_gather, symm_reduce_scatter

Tensor = torch.Tensor


def staged(op: str, staging: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first `numel` elements of a staging buffer (uint8 [bytes]) as `dtype`.

    Raises:
        ValueError: not a contiguous byte buffer, or one that is too small.
    """
    size = numel * dtype.itemsize
    if staging.dtype != torch.uint8 or staging.dim() != 1 or staging.numel() < size:
        checks.fail(
            op,
            [
                f"staging: expected uint8 [bytes], bytes >= {size} for {numel} elements of "
                f"{checks.names((dtype,))}, got {checks.names((staging.dtype,))} "
                f"{tuple(staging.shape)}"
            ],
        )
    return staging[:size].view(dtype)


def staged_gather(staging: Tensor, shard: Tensor, rows: int, group_name: str, ranks: int) -> Tensor:
    """The whole weight ``[rows, *rest]`` of ``shard`` ``[shard_rows, *rest]``, as ``gather``.

    Args:
        staging: uint8 [bytes], symmetric memory attached to the group (CUDA), rewritten.
        shard: bf16, fp16 or fp32; a multiple of `ranks` shards holds `rows` and padding.
        group_name, ranks: the process group and its size; every rank of it must call.
    """
    whole: Tensor = torch.ops.gtpgraph.staged_gather(staging, shard, rows, group_name, ranks)
    return whole


def staged_accumulate(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    staging: Tensor,
    shard_rows: int,
    wire: torch.dtype,
    group_name: str,
    ranks: int,
    after: Tensor | None = None,
) -> Tensor:
    """Add this rank's rows of the sum of every rank's ``wgrad`` ``[rows, *rest]`` to main_grad.

    Args:
        flat, beta, index, offset, scale, first, after: as for ``accumulate``; main_grad is
            ``flat[offset : offset + shard_rows * prod(rest)]``.
        staging: as for ``staged_gather``; it carries the wgrad in dtype `wire`.
        shard_rows: rows of a rank's shard, padding included.
    """
    token: Tensor = torch.ops.gtpgraph.staged_accumulate(
        flat, wgrad, beta, index, offset, scale, first,
        staging, shard_rows, wire, group_name, ranks, after,
    )  # fmt: skip
    return token


def _gather(staging: Tensor, shard: Tensor, rows: int, group_name: str, ranks: int) -> Tensor:
    piece = staged("staged_gather", staging, shard.numel(), shard.dtype)
    piece.view(shard.shape).copy_(shard)
    out = shard.new_empty((ranks * shard.shape[0], *shard.shape[1:]))
    symm_all_gather(out.view(-1), piece, group_name, ranks)
    return out.narrow(0, 0, rows)


def _accumulate(
    flat: Tensor,
    wgrad: Tensor,
    beta: Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    staging: Tensor,
    shard_rows: int,
    wire: torch.dtype,
    group_name: str,
    ranks: int,
    after: Tensor | None = None,
) -> Tensor:
    numel = wgrad.numel()
    total = ranks * shard_rows * wgrad.shape[1:].numel()
    if numel > total:
        checks.fail(
            "staged_accumulate",
            [f"wgrad: expected at most {ranks} x {shard_rows} rows, got {tuple(wgrad.shape)}"],
        )
    buffer = staged("staged_accumulate", staging, total, wire)
    buffer[:numel].view(wgrad.shape).copy_(wgrad)
    if numel < total:
        buffer[numel:].zero_()
    return symm_reduce_scatter(
        flat, buffer, beta, index, offset, scale, first, group_name, ranks, after
    )


def _fake_gather(staging: Tensor, shard: Tensor, rows: int, group_name: str, ranks: int) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


def _fake_accumulate(flat: Tensor, *rest: object) -> Tensor:
    return fake_token(flat)


define(
    "staged_gather(Tensor(a!) staging, Tensor shard, int rows, str group_name, int ranks) "
    "-> Tensor",
    cpu=_gather,
    cuda=_gather,
    fake=_fake_gather,
)
define(
    "staged_accumulate(Tensor(a!) flat, Tensor wgrad, Tensor beta, int index, int offset, "
    "float scale, bool first, Tensor(b!) staging, int shard_rows, ScalarType wire, "
    "str group_name, int ranks, Tensor? after=None) -> Tensor",
    cpu=_accumulate,
    cuda=_accumulate,
    fake=_fake_accumulate,
)
