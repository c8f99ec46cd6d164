"""shard: which weights, what stands in the way; on ranks: values, gradients, padding, refusals."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import (
    all_weights,
    fqn_of,
    gtp_weights,
    shard,
)


class Net(nn.Module):
    """An embedding tied to the output layer, a frozen layer, norms; 7 rows divide by nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.up = nn.Linear(6, 9, dtype=dtype)
        self.norm = nn.LayerNorm(9, dtype=dtype)
        self.frozen = nn.Linear(9, 6, dtype=dtype).requires_grad_(False)
        self.token = nn.Parameter(torch.ones(1, 1, 6, dtype=dtype))
        self.head = nn.Linear(6, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.up(self.embed(tokens)).relu())) + self.token[0]
        return nn.functional.cross_entropy(self.head(hidden), tokens.flip(0))


class Experts(nn.Module):
    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num, 6, 5))
        self.bias = nn.Parameter(torch.randn(num, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->beo", x, self.gate_up) + self.bias


class Conv1D(nn.Module):
    """As Hugging Face has it: weight [in_features, out_features]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def names(model: nn.Module) -> list[str]:
    return [info.fqns[0] for info in gtp_weights(model).values()]


TOKENS = torch.tensor([0, 3, 6, 3])


# --- which weights -------------------------------------------------------------------------------


def test_linear_embedding_and_frozen_weights_are_sharded_and_ties_are_one() -> None:
    model = Net()
    before = model(TOKENS)
    assert shard(model) is model
    assert names(model) == ["embed.weight", "up.weight", "frozen.weight"]
    tied = gtp_weights(model)[model.embed._parameters["weight"]]
    assert tied.fqns == ("embed.weight", "head.weight")
    assert (tied.spec.rows, tied.spec.shard_rows, tied.spec.shape) == (7, 7, (7, 6))
    assert (tied.spec.gtp_size, tied.spec.group_name, tied.spec.ranks) == (1, "", (0,))
    assert not model.frozen._parameters["weight"].requires_grad
    assert torch.equal(model(TOKENS), before)
    assert list(all_weights(model).values())[:2] == [("token",), tied.fqns]


def test_conv1d_and_experts_are_sharded_but_not_convolutions_norms_and_biases() -> None:
    model = nn.ModuleDict(
        {
            "proj": Conv1D(5, 6),
            "mixture": nn.ModuleDict({"experts": Experts()}),
            "conv": nn.Conv1d(3, 4, 2),
            "norm": nn.LayerNorm(4),
            "one": nn.Linear(4, 1),
        }
    )
    shard(model)
    assert names(model) == ["proj.weight", "mixture.experts.gate_up"]
    infos = {info.fqns[0]: info.spec for info in gtp_weights(model).values()}
    assert infos["mixture.experts.gate_up"].expert
    assert infos["mixture.experts.gate_up"].axis == "expt_gtp"
    assert not infos["proj.weight"].expert


def test_patterns_choose_and_a_tied_weight_follows_any_of_its_names() -> None:
    assert names(shard(Net(), include=["*p.weight", "head.*"])) == ["embed.weight", "up.weight"]
    assert names(shard(Net(), exclude=["head.weight"])) == ["up.weight", "frozen.weight"]
    assert names(shard(Net(), include="up.weight")) == ["up.weight"]
    assert "norm.weight" not in names(shard(Net(), exclude=["norm.*"]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"include": ["up.wieght"]}, r"include pattern 'up.wieght' matches no weight.*up\.weight"),
        ({"exclude": ["haed.*"]}, r"exclude pattern 'haed\.\*' matches no weight.*head\.weight"),
        ({"include": ["norm.*"]}, r"'norm\.\*' matches only weights that are never sharded: norm"),
        ({"exclude": ["*"]}, r"no weight to shard"),
    ],
)
def test_patterns_that_choose_nothing_are_errors(kwargs: Any, message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        shard(model, **kwargs)
    assert type(model.up) is nn.Linear


def test_a_model_without_a_weight_to_shard_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"LayerNorm has no weight to shard among its 2"):
        shard(nn.LayerNorm(4))


def test_all_blockers_come_in_one_error_and_nothing_changes() -> None:
    model = nn.ModuleDict(
        {
            "max_norm": nn.Embedding(4, 3, max_norm=1.0),
            "sparse": nn.Embedding(4, 3, sparse=True),
            "lazy": nn.LazyLinear(3),
            "fine": nn.Linear(3, 3),
        }
    )
    with pytest.raises(ValueError, match="nothing was changed") as caught:
        shard(model)
    text = str(caught.value)
    for part in ("max_norm.weight: max_norm", "sparse.weight: sparse=True", "lazy.weight: a lazy"):
        assert part in text
    assert "exclude=[" in text
    assert type(model["fine"]) is nn.Linear


def test_sharding_twice_or_after_wrapping_is_an_error() -> None:
    model = shard(Net())
    with pytest.raises(ValueError, match="sharded already"):
        shard(model)
    with pytest.raises(ValueError, match="sharded already"):
        shard(nn.Sequential(nn.Linear(2, 2), model))


def test_names_are_those_before_any_wrapper() -> None:
    model = shard(Net())
    expected = names(model)
    assert names(torch.compile(model, backend="eager")) == expected
    model.up.compile(backend="eager")
    model.frozen = torch.compile(model.frozen, backend="eager")
    assert names(model) == expected
    param = model.up._parameters["weight"]
    assert fqn_of(torch.compile(model, backend="eager"), param) == "up.weight"
    with pytest.raises(ValueError, match=r"\(9, 6\).*\['up.weight'\].*after shard"):
        fqn_of(model, nn.Parameter(torch.zeros(9, 6)))


# --- several ranks -------------------------------------------------------------------------------


def _groups(world: int, gtp: int) -> ProcessGroups:
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    return ProcessGroups.from_mesh(mesh)


def _tokens(rank: int) -> Tensor:
    return torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(rank))


def _whole_grads(ranks: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net(torch.float64)
    for rank in ranks:
        model(_tokens(rank)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _rows(whole: Tensor, spec: Any) -> Tensor:
    part = torch.zeros(spec.shard_shape, dtype=whole.dtype)
    part[: spec.valid_rows] = whole[spec.start : spec.start + spec.valid_rows]
    return part


def _check_gradients(rank: int, world: int, gtp: int) -> list[tuple[str, int, int]]:
    torch.manual_seed(0)
    whole = Net(torch.float64)
    groups = _groups(world, gtp)
    model = shard(copy.deepcopy(whole), groups)
    for param, info in gtp_weights(model).items():
        assert torch.equal(param, _rows(whole.get_parameter(info.fqns[0]), info.spec))
    assert torch.equal(model.up.weight, whole.up.weight)
    assert torch.equal(model(_tokens(rank)), whole(_tokens(rank)))

    expected = _whole_grads(groups.ranks("gtp"))
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(_tokens(rank)).backward()
        for param, info in gtp_weights(model).items():
            if param.requires_grad:  # summed over gtp by the reduce
                want = _rows(expected[info.fqns[0]], info.spec)
                torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-14)
                assert param.grad[info.spec.valid_rows :].eq(0).all()
            else:
                assert param.grad is None
    return [(i.fqns[0], i.spec.shard_rows, i.spec.valid_rows) for i in gtp_weights(model).values()]


def _check_padding_stays_zero(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = shard(Net(), _groups(world, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(_tokens(rank)).backward()
        for param in model.parameters():
            if param.grad is not None and param not in gtp_weights(model):
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).to(torch.float32)
    for param, info in gtp_weights(model).items():
        assert param[info.spec.valid_rows :].eq(0).all()
        squares = param.detach().double().square().sum()
        dist.all_reduce(squares)
        whole = model.get_submodule(info.fqns[0].rpartition(".")[0]).weight
        torch.testing.assert_close(squares, whole.detach().double().square().sum())


def _check_refusals(rank: int, world: int) -> list[str]:
    groups = _groups(world, 4)
    errors = []
    torch.manual_seed(0)
    dirty = Net()
    dirty(TOKENS).backward()
    hooked = Net()
    hooked.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    bad_mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "gtp"))
    experts = nn.ModuleDict({"experts": Experts(6)})
    for model, args, kwargs in (
        (experts, (groups,), {}),
        (Net(), (), {}),
        (Net(), (groups,), {"mesh": bad_mesh}),
        (Net(), (ProcessGroups(),), {}),
        (dirty, (groups,), {}),
        (hooked, (groups,), {}),
    ):
        before = {n: id(p) for n, p in model.named_parameters()}
        with pytest.raises(ValueError) as caught:
            shard(model, *args, **kwargs)
        assert before == {n: id(p) for n, p in model.named_parameters()}
        errors.append(str(caught.value))
    return errors


def _check_experts(rank: int, world: int) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleDict({"experts": Experts(4), "proj": Conv1D(3, 6)}).double()
    model = shard(copy.deepcopy(whole), _groups(world, 4))
    assert names(model) == ["experts.gate_up", "proj.weight"]
    assert model.get_parameter("experts.gate_up").shape == (1, 6, 5)
    assert model.get_parameter("proj.weight").shape == (2, 3)  # 6 in_features over 4 ranks
    x = torch.randn(world, 2, 6, dtype=torch.float64)

    def loss(m: Any, x: Tensor) -> Tensor:
        return m["experts"](x).sin().sum() + m["proj"](x).sin().sum()

    loss(model, x[rank]).backward()
    sum(loss(whole, part) for part in x).backward()
    for param, info in gtp_weights(model).items():
        want = _rows(whole.get_parameter(info.fqns[0]).grad, info.spec)
        torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-14)


class Wrapper(nn.Module):
    """As a data-parallel wrapper: its model is `.module`."""

    _gtp_is_wrapper = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_wrapper_is_seen_through_and_cannot_be_sharded() -> None:
    assert names(torch.compile(Wrapper(shard(Net())))) == names(shard(Net()))
    with pytest.raises(ValueError, match="wrapped for data parallelism; shard it first"):
        shard(Wrapper(Net()))


@pytest.mark.slow
def test_inductor_compiles_a_sharded_model_in_one_piece() -> None:
    whole = Net()
    model = shard(copy.deepcopy(whole))
    before = {name: param.clone() for name, param in model.named_parameters()}
    torch.compile(model, fullgraph=True)(TOKENS).backward()
    whole(TOKENS).backward()
    for name, param in whole.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(model.get_parameter(name).grad, param.grad)
        assert torch.equal(model.get_parameter(name), before[name])


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 4])
def test_values_and_gradients_on_four_ranks(ranks4: Any, gtp: int) -> None:
    by_rank = ranks4.run(_check_gradients, gtp)
    rows = {"embed.weight": 7, "up.weight": 9, "frozen.weight": 6}
    for rank, shards in enumerate(by_rank):
        for name, shard_rows, valid in shards:
            assert shard_rows == -(-rows[name] // gtp)
            assert valid == max(0, min(shard_rows, rows[name] - rank % gtp * shard_rows))
    if gtp == 4:
        assert dict((n, v) for n, _, v in by_rank[3]) == {
            "embed.weight": 1,
            "up.weight": 0,
            "frozen.weight": 0,
        }


@pytest.mark.dist
def test_k44_padding_is_zero_and_stays_zero(ranks4: Any) -> None:
    ranks4.run(_check_padding_stays_zero)


@pytest.mark.dist
def test_refusals_on_four_ranks_change_nothing(ranks4: Any) -> None:
    for errors in ranks4.run(_check_refusals):
        expected = (
            "experts.gate_up: 6 experts (6, 6, 5) do not divide by gtp = 4",
            "expected groups=ProcessGroups",
            "has no axis that is the group gtp",
            "gtp: not set",
            "embed.weight: has a .grad",
            "up.weight: has gradient hooks",
        )
        for text, part in zip(errors, expected, strict=True):
            assert part in text


@pytest.mark.dist
def test_experts_and_conv1d_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(_check_experts)
