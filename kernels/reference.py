"""Plain torch oracles of every kernel: what the CPU runs and what the tests compare with.

All arithmetic is in fp32 and follows the kernels' order of operations, so that a kernel whose scale
is a power of two agrees bit for bit. ``b`` is the factor of the old contents: 0 stores (the old
contents are never read, so a NaN in them cannot spread), 1 adds. Arguments are those of the
operators in ``ops`` and its siblings, where the shapes are documented.
"""

import torch

from gtpgraph.kernels.stats import STATS_TILE


def contribution_factor(beta: torch.Tensor, index: int, first: bool) -> float:
    """``beta[index]`` for a first contribution, else 1 (reads the value: CPU tensors only)."""
    return float(beta[index]) if first else 1.0


def combine_(main: torch.Tensor, value: torch.Tensor, b: float, scale: float) -> None:
    """``main = b * main + scale * value``; ``value`` fp32 of main's shape, main fp32 or bf16."""
    if b == 0.0:
        main.copy_(value * scale)
    elif main.dtype == torch.float32:
        if b != 1.0:
            main.mul_(b)
        main.add_(value, alpha=scale)
    else:  # one rounding, after the fp32 sum
        main.copy_(main.float().mul_(b).add_(value, alpha=scale))


def accumulate(
    flat: torch.Tensor,
    wgrad: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
) -> None:
    """Oracle of ``gtpgraph::accumulate``."""
    main = flat[offset : offset + wgrad.numel()].view(wgrad.shape)
    combine_(main, wgrad.float(), contribution_factor(beta, index, first), scale)


def accumulate_many(
    flat: torch.Tensor,
    wgrads: list[torch.Tensor],
    beta: torch.Tensor,
    indices: list[int],
    offsets: list[int],
    scale: float,
    first: list[bool],
) -> None:
    """Oracle of ``gtpgraph::accumulate_many``: one accumulate after the other."""
    for wgrad, index, offset, is_first in zip(wgrads, indices, offsets, first, strict=True):
        accumulate(flat, wgrad, beta, index, offset, scale, is_first)


def write_stats(partials: torch.Tensor, written: torch.Tensor) -> None:
    """Fill ``partials`` (see ``stats``) from the 1-D final values as stored."""
    values = written.float()
    padded = torch.zeros(partials.shape[0] * STATS_TILE, device=values.device)
    padded[: values.numel()] = values
    tiles = padded.view(-1, STATS_TILE)
    partials[:, 0] = tiles.square().sum(1)
    partials[:, 1] = (~tiles.isfinite()).sum(1)


def sum_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """``sum_r fp32(rows[r])`` in the order of r."""
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row.float()
    return total


def shard_reduce(
    flat: torch.Tensor,
    recv: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    valid: int,
) -> None:
    """Oracle of ``gtpgraph::shard_reduce``."""
    main = flat[offset : offset + recv.shape[1]]
    b = contribution_factor(beta, index, first)
    combine_(main[:valid], sum_rows(list(recv[:, :valid])), b, scale)
    main[valid:] = 0


def pack(flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int], scale: float) -> None:
    """Oracle of ``gtpgraph::pack``."""
    flat.zero_()
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat[offset : offset + tensor.numel()] = tensor.reshape(-1).float() * scale


def unpack(
    tensors: list[torch.Tensor], flat: torch.Tensor, offsets: list[int], scale: float
) -> None:
    """Oracle of ``gtpgraph::unpack``."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        piece = flat[offset : offset + tensor.numel()].float() * scale
        tensor.copy_(piece.view(tensor.shape))


def wgrad_gemm(
    flat: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
) -> None:
    """Oracle of ``gtpgraph::wgrad_gemm``: operands widened, the product summed in fp32."""
    numel = dy.shape[1] * x.shape[1]
    main = flat[offset : offset + numel].view(dy.shape[1], x.shape[1])
    value = dy.float().t() @ x.float()
    combine_(main, value, contribution_factor(beta, index, first), scale)


def scatter_accumulate(
    flat: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
    rows: int,
) -> None:
    """Oracle of ``gtpgraph::scatter_accumulate``: the dense gradient, summed in fp32 in order."""
    dense = torch.zeros(rows, values.shape[1], device=values.device)
    dense.index_add_(0, torch.where(indices < 0, indices + rows, indices), values.float())
    accumulate(flat, dense, beta, index, offset, scale, first)


def symm_reduce_scatter(
    flat: torch.Tensor,
    chunks: list[torch.Tensor],
    beta: torch.Tensor,
    index: int,
    offset: int,
    scale: float,
    first: bool,
) -> None:
    """Oracle of ``gtpgraph::symm_reduce_scatter``; ``chunks[r]``: rank r's piece for this rank."""
    main = flat[offset : offset + chunks[0].numel()]
    combine_(main, sum_rows(chunks), contribution_factor(beta, index, first), scale)


def symm_all_gather(out: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    """Oracle of ``gtpgraph::symm_all_gather``; ``buffers[r]`` is rank r's."""
    out.copy_(torch.cat([b.reshape(-1) for b in buffers]).float())
