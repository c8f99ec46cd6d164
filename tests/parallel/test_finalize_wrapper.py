"""finalize_model_grads on DistributedDataParallel itself: slices, buckets, shards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.finalize import finalize_model_grads
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import shard
from gtpgraph.testing import RankPool, fp64_grads, max_error

VOCAB, WIDTH, NUM_OTHER = 50, 8, 300


def _groups(**axes: int) -> ProcessGroups:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return ProcessGroups.from_mesh(mesh)


class Stage(nn.Module):
    """A shared embedding and a weight of this stage's own, in an order that depends on it."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        embedding = nn.Parameter(torch.zeros(VOCAB, WIDTH))
        embedding.shared_embedding = True  # type: ignore[attr-defined]
        # In one bucket with `other` the rows that a rank owns would differ between the stages.
        for name in ("embedding", "other") if stage == 0 else ("other", "embedding"):
            weight = embedding if name == "embedding" else nn.Parameter(torch.zeros(NUM_OTHER))
            self.register_parameter(name, weight)

    def forward(self, gradient: Tensor) -> Tensor:
        """A loss whose gradient by the embedding is `gradient` [VOCAB, WIDTH]."""
        weights = dict(self.named_parameters())
        return (weights["embedding"] * gradient).sum() + weights["other"].sum()


def _gradient_of(stage: int, dp_rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * stage + dp_rank)
    return torch.randint(-8, 8, (VOCAB, WIDTH), generator=draw).float()  # exact in any order


def _stages(rank: int, world: int, reduce: str) -> tuple[Tensor, Tensor]:
    groups = _groups(pp=2, dp=2)
    stage, dp_rank = groups.rank("pp"), groups.rank("dp")
    model = DistributedDataParallel(Stage(stage), groups, loss="per_token", reduce=reduce)
    model.zero_grad_buffer()
    model(_gradient_of(stage, dp_rank)).backward()
    finalize_model_grads(model, [48, 16][dp_rank] if stage == 1 else 0)
    return model.full_grad("embedding"), model.full_grad("other")


@pytest.mark.dist
@pytest.mark.parametrize("reduce", ["reduce_scatter", "all_reduce"])
def test_a_shared_embedding_is_final_in_the_slices_of_both_stages(
    ranks4: RankPool, reduce: str
) -> None:
    parts = [_gradient_of(stage, dp_rank) for stage in (0, 1) for dp_rank in (0, 1)]
    expected = torch.stack(parts).sum(0)
    for embedding, other in ranks4.run(_stages, reduce, timeout_s=30):
        assert torch.equal(embedding, expected / 64)
        assert torch.equal(other, torch.full((NUM_OTHER,), 2 / 64))


class Tokens(nn.Module):
    """A sum over tokens; the reference divides it by their number."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 7)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=draw))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [tokens, WIDTH] -> the sum of the tokens' losses."""
        outputs: Tensor = self.linear(self.norm(inputs))
        return outputs.square().sum()


NUM_TOKENS = [40, 24, 33, 31]


def _batch(data_rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(20 + data_rank)
    return torch.randn(NUM_TOKENS[data_rank], WIDTH, generator=draw)


def _tokens(rank: int, world: int, axes: dict[str, int]) -> dict[str, Tensor]:
    groups = _groups(**axes)
    model = DistributedDataParallel(shard(Tokens(), groups), groups, loss="per_token")
    model.zero_grad_buffer()
    model(_batch(rank)).backward()
    finalize_model_grads(model, NUM_TOKENS[rank])
    return {name: model.full_grad(name) for name, _ in model.named_weights()}


@pytest.mark.dist
@pytest.mark.parametrize("axes", [{"dp": 2, "gtp": 2}, {"gtp": 4}], ids=["dp2_gtp2", "gtp4"])
def test_a_loss_per_token_equals_one_process(ranks4: RankPool, axes: dict[str, int]) -> None:
    whole: Any = [(torch.cat([_batch(r) for r in range(4)]),)]
    expected = {n: g / sum(NUM_TOKENS) for n, g in fp64_grads(Tokens(), whole).items()}
    for result in ranks4.run(_tokens, axes, timeout_s=30):
        # fp32 sums of 128 tokens; gtp peers left out would be off by a factor of gtp.
        assert max_error(result, expected) < 1e-6
