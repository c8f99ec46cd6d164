"""finalize_model_grads: the groups it may use, the token scale, and the shared gradients."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gtpgraph.parallel.finalize import finalize_model_grads
from gtpgraph.parallel.process_groups import UNSET, ProcessGroups
from gtpgraph.testing import RankPool


class Recorder(nn.Module):
    """A model that only remembers what was done to it."""

    def __init__(self, groups: ProcessGroups, *weights: nn.Parameter) -> None:
        super().__init__()
        self.groups = groups
        self.calls: list[str] = []
        self.factor: float | None = None
        self.weights = nn.ParameterList(weights)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.weights.named_parameters()

    def finish_grad_sync(self) -> None:
        self.calls.append("finish_grad_sync")

    def scale_gradients(self, factor: float | Tensor) -> None:
        self.calls.append("scale_gradients")
        self.factor = float(factor)


def weight(*, grad: Tensor | None = None, **marks: bool) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(4 if grad is None else grad.numel()))
    if grad is not None:
        made.main_grad = grad  # type: ignore[attr-defined]
    for mark, value in marks.items():
        setattr(made, mark, value)
    return made


def with_router(model: Recorder, bias: Tensor, counts: Tensor) -> Recorder:
    """Add a module that has what a router has."""
    router = nn.Module()
    router.register_buffer("expert_bias", bias)
    router.register_buffer("local_tokens_per_expert", counts)
    model.add_module(f"router{len(list(model.children()))}", router)
    return model


@pytest.fixture
def fake_pipeline() -> Iterator[ProcessGroups]:
    """Rank 0 of a fake job: pp 2, dp 2, gtp 2, tp 2."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    names = ("pp", "dp", "gtp", "tp")
    yield ProcessGroups.from_mesh(init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names))
    dist.destroy_process_group()


# Missing groups: every one is found before anything is done


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("tp", {}, "tp: not set (UNSET), needed by every call"),
    ("pp", {}, "pp: not set (UNSET), needed by every call"),
    ("embd", {}, "embd: not set (UNSET), needed by pp > 1"),
    (
        "dp_cp_gtp",
        {"num_tokens": 5},
        "dp_cp_gtp: not set (UNSET), needed by num_tokens with gtp = 2",
    ),
    ("tp_dp_cp", {"expert_bias": True}, "tp_dp_cp: not set (UNSET), needed by expert_bias"),
]


@pytest.mark.parametrize(("field", "options", "text"), CASES, ids=[c[0] for c in CASES])
def test_a_missing_group_is_named_before_anything_happens(
    fake_pipeline: ProcessGroups, field: str, options: dict[str, Any], text: str
) -> None:
    without: Any = {field: UNSET}
    model = Recorder(dataclasses.replace(fake_pipeline, **without))
    with pytest.raises(ValueError) as error:
        finalize_model_grads(model, **options)
    assert str(error.value).startswith("finalize_model_grads: ")
    assert text in str(error.value)
    assert str(error.value).count("\n  - ") == 1
    assert model.calls == []
    # The same collection serves a call whose options do not use the group.
    if options:
        finalize_model_grads(model)
        assert model.calls == ["finish_grad_sync"]


def test_all_missing_groups_are_in_one_message() -> None:
    model = Recorder(ProcessGroups(dp_cp_gtp=None))
    with pytest.raises(ValueError) as error:
        finalize_model_grads(model, 5, expert_bias=True)
    missing = [line[4:].split(":")[0] for line in str(error.value).splitlines() if "  - " in line]
    assert sorted(missing) == ["embd", "gtp", "pp", "tp", "tp_dp_cp"]
    assert "needed by num_tokens (it decides between" in str(error.value)
    assert "dp_cp_gtp) and expert_bias" in str(error.value)
    assert model.calls == []


def test_dp_cp_is_the_group_without_gtp(fake_pipeline: ProcessGroups) -> None:
    groups = ProcessGroups(tp=None, pp=None, gtp=None)
    with pytest.raises(ValueError, match=r"dp_cp: not set \(UNSET\), needed by num_tokens\n"):
        finalize_model_grads(Recorder(groups), 5)
    finalize_model_grads(Recorder(groups))


def test_pos_embd_is_needed_where_a_weight_is_marked(fake_pipeline: ProcessGroups) -> None:
    groups = dataclasses.replace(fake_pipeline, pos_embd=UNSET)
    marked = weight(grad=torch.zeros(4), shared_position_embedding=True)
    with pytest.raises(ValueError, match=r"pos_embd: not set.*marked shared_position_embedding"):
        finalize_model_grads(Recorder(groups, marked))
    finalize_model_grads(Recorder(groups))


def test_an_unset_gtp_is_never_size_one_when_something_speaks_of_gtp() -> None:
    with pytest.raises(ValueError, match=r"gtp: not set.*decides between dp_cp and dp_cp_gtp"):
        finalize_model_grads(Recorder(ProcessGroups(tp=None, pp=None, dp_cp_gtp=None)), 5)
    plain = Recorder(ProcessGroups(tp=None, pp=None, dp_cp=None))
    finalize_model_grads(plain, 5)
    assert plain.factor == 1 / 5


def test_the_given_collection_replaces_the_models_own(fake_pipeline: ProcessGroups) -> None:
    model = Recorder(fake_pipeline)
    with pytest.raises(ValueError, match="tp: not set"):
        finalize_model_grads(model, groups=ProcessGroups(pp=None))
    with pytest.raises(ValueError, match=r"dp_cp_gtp: not set.*num_tokens with gtp = 2"):
        finalize_model_grads(model, 5, groups=ProcessGroups(tp=None, pp=None, dp_cp=None))
    with pytest.raises(ValueError, match=r"gtp: expected 2 ranks.*got 1 in the given collection"):
        finalize_model_grads(model, 5, groups=ProcessGroups.local())
    assert model.calls == []
    finalize_model_grads(model, groups=SimpleNamespace(tp=None, pp=None))  # type: ignore[arg-type]
    assert model.calls == ["finish_grad_sync"]


def test_contradictions_and_bad_values_are_errors(fake_pipeline: ProcessGroups) -> None:
    shared = Recorder(
        dataclasses.replace(fake_pipeline, embd=None),
        weight(grad=torch.zeros(4), shared_embedding=True),
    )
    with pytest.raises(ValueError, match=r"embd: expected the group .* got None"):
        finalize_model_grads(shared)
    with pytest.raises(ValueError, match="num_tokens: expected at least 0, got -1"):
        finalize_model_grads(Recorder(ProcessGroups.local()), -1)
    bare: Any = SimpleNamespace(named_weights=list, groups=None)
    with pytest.raises(ValueError, match="expected a collection of process groups, got none"):
        finalize_model_grads(bare)
    bare.groups = ProcessGroups.local()
    with pytest.raises(ValueError, match=r"expert_bias: expected an nn.Module"):
        finalize_model_grads(bare, expert_bias=True)


# One rank


def test_one_rank_needs_no_process_group() -> None:
    model = Recorder(ProcessGroups.local(), weight(grad=torch.ones(4), sequence_parallel=True))
    tokens = torch.tensor(250)
    finalize_model_grads(model, tokens)
    assert model.calls == ["finish_grad_sync", "scale_gradients"]
    assert model.factor == 1 / 250
    assert tokens == 250  # the caller's count is not overwritten
    finalize_model_grads(model, 0)
    assert model.factor == 1.0  # no tokens, nothing to divide by


def test_expert_bias_moves_towards_the_mean_load() -> None:
    bias, counts = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 2.0])
    model = with_router(Recorder(ProcessGroups.local()), bias, counts)
    finalize_model_grads(model, expert_bias=True, expert_bias_rate=0.5)
    assert bias.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert counts.tolist() == [0.0] * 4
    finalize_model_grads(model)
    assert bias.tolist() == [0.5, 0.0, -0.5, 0.0]

    def own_rule(bias: Tensor, tokens: Tensor) -> None:
        bias.copy_(tokens + 9)

    counts.fill_(2)
    finalize_model_grads(model, expert_bias=own_rule)
    assert bias.tolist() == [11.0] * 4


# Four ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _experts(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
    model = Recorder(ProcessGroups.from_mesh(mesh))
    for counts in (torch.tensor([rank, 0.0]), torch.ones(3)):
        with_router(model, torch.zeros(len(counts)), counts)
    totals: list[float] = []
    finalize_model_grads(model, expert_bias=lambda _, total: totals.extend(total.tolist()))
    return totals


@pytest.mark.dist
def test_tokens_per_expert_are_summed_over_data_and_gtp(ranks: RankPool) -> None:
    assert ranks.run(_experts, timeout_s=30) == [[6.0, 0.0, 4.0, 4.0, 4.0]] * 4


def _shared(rank: int, world: int, sizes: list[list[int]]) -> list[list[float]]:
    """Stage `rank` shares embeddings of the given sizes, filled with rank + 1."""
    groups = ProcessGroups.from_mesh(init_device_mesh("cpu", (world,), mesh_dim_names=("pp",)))
    made = [torch.full((size,), rank + 1.0) for size in sizes[rank]]
    model = Recorder(groups, *(weight(grad=g, shared_embedding=True) for g in made))
    finalize_model_grads(model)
    return [grad.tolist() for grad in made]


@pytest.mark.dist
def test_embeddings_are_summed_over_the_first_and_last_stage(ranks: RankPool) -> None:
    both = ranks.run(_shared, [[3, 2], [], [], [3, 2]], timeout_s=30)
    assert both == [[[5.0] * 3, [5.0] * 2], [], [], [[5.0] * 3, [5.0] * 2]]
    # A stage with nothing to contribute joins; the middle stages have no part in it.
    assert ranks.run(_shared, [[3], [], [], []], timeout_s=30) == [[[1.0] * 3], [], [], []]
    assert ranks.run(_shared, [[], [], [], []], timeout_s=30) == [[]] * 4


def _shared_error(rank: int, world: int) -> str:
    try:
        _shared(rank, world, [[3], [], [], [4]])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_stages_that_disagree_about_the_embedding_get_an_error(ranks: RankPool) -> None:
    first, second, third, last = ranks.run(_shared_error, timeout_s=30)
    assert first == last
    assert "stages (0, 3) share embeddings of different sizes" in first
    assert "torch.float32: 3 and 4 elements" in first
    assert second == third == ""


def _sequence(rank: int, world: int) -> list[list[float]]:
    groups = ProcessGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    grads = [
        torch.full((n,), 10.0**rank, dtype=d)
        for n, d in ((2, torch.float32), (3, torch.bfloat16), (1, torch.float32))
    ]
    model = Recorder(
        groups,
        *(weight(grad=grad, sequence_parallel=True) for grad in grads),
        weight(sequence_parallel=True),  # no site anywhere: no main_grad
        weight(grad=(plain := torch.full((2,), 7.0))),
    )
    finalize_model_grads(model)
    return [grad.tolist() for grad in [*grads, plain]]


@pytest.mark.dist
def test_sequence_parallel_weights_are_summed_over_tp_alone(ranks: RankPool) -> None:
    results = ranks.run(_sequence, timeout_s=30)
    for rank, result in enumerate(results):
        total = 11.0 if rank < 2 else 1100.0
        bf16 = float(torch.tensor(total).bfloat16())
        assert result == [[total] * 2, [bf16] * 3, [total], [7.0, 7.0]]


def _two_models(rank: int, world: int) -> float | None:
    """Model A on ranks 0 and 1 finalises; model B, on the others, does not."""
    meshes = [DeviceMesh("cpu", r, mesh_dim_names=("gtp",)) for r in ([0, 1], [2, 3])]
    a, _ = [ProcessGroups.from_mesh(mesh) for mesh in meshes]
    if rank >= 2:
        return None
    model = Recorder(a)
    finalize_model_grads(model, 100 * (rank + 1))
    return model.factor


@pytest.mark.dist
def test_K40_one_of_two_models_finalises_and_nobody_hangs(ranks: RankPool) -> None:
    assert ranks.run(_two_models, timeout_s=20) == [1 / 300, 1 / 300, None, None]
