"""Symmetric memory on one GPU: two and four ranks, captured and not, against gloo's result."""

import pytest
import torch
import torch.distributed as dist

from gtpgraph.kernels import ops
from gtpgraph.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
NUMEL = 5003 * 8  # a rank; rows of 16 bytes, no multiple of a block


def fill(rank: int, round_: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(numel, generator=generator).bfloat16()


def exchange(rank: int, ranks: int) -> None:
    from torch.distributed import _symmetric_memory

    from gtpgraph.kernels import symmetric

    torch.cuda.set_device(0)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    buffer = _symmetric_memory.empty(ranks * NUMEL, dtype=torch.bfloat16, device="cuda:0")
    flat = torch.full((NUMEL + 8,), float("nan"), device="cuda")
    out = torch.empty(ranks * ranks * NUMEL, device="cuda")
    beta = torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="attach"):
        ops.symm_reduce_scatter(flat, buffer, beta, 0, 8, 0.5, True, name, ranks)
    symmetric.attach(buffer, name)

    def step() -> None:
        token = ops.symm_reduce_scatter(flat, buffer, beta, 0, 8, 0.5, True, name, ranks)
        ops.symm_all_gather(out, buffer, name, ranks, token)

    def check(round_: int) -> None:
        host = fill(rank, round_, ranks * NUMEL)
        expected, zero = torch.empty(NUMEL), torch.zeros(1)
        ops.symm_reduce_scatter(expected, host, zero, 0, 0, 0.5, True, name, ranks)  # gloo
        torch.cuda.synchronize()
        assert torch.equal(flat[8:].cpu(), expected) and flat[:8].isnan().all()
        assert torch.equal(
            out.cpu(), torch.cat([fill(r, round_, ranks * NUMEL) for r in range(ranks)]).float()
        )

    buffer.copy_(fill(rank, 0, ranks * NUMEL))
    step()
    check(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in (1, 2, 3):  # no host barrier: the operator's own make refilling safe
        buffer.copy_(fill(rank, round_, ranks * NUMEL))
        graph.replay()
        check(round_)
    symmetric.detach(buffer, name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_and_uncaptured_equal_gloo(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with RankPool(ranks) as pool:
        pool.run(exchange)
