"""materialize: a sharded meta model gets the values of an unsharded one, weight by weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.sharding import (
    all_weights,
    gtp_weights,
    materialize,
    shard,
)


def _groups(world: int, gtp: int) -> ProcessGroups:
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    return ProcessGroups.from_mesh(mesh)


def _rows(whole: Tensor, spec: Any) -> Tensor:
    part = torch.zeros(spec.shard_shape, dtype=whole.dtype)
    part[: spec.valid_rows] = whole[spec.start : spec.start + spec.valid_rows]
    return part


class Rooted(nn.Sequential):
    """A root that holds a weight of its own, without a reset_parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(7, 6), nn.Linear(6, 7))
        self.token = nn.Parameter(torch.ones(6))


def _whole_after(seed: int, build: Callable[[], nn.Module], init: Any = None) -> nn.Module:
    with torch.device("meta"):
        model = build()
    ties = all_weights(model)
    model.to_empty(device="cpu")
    for fqns in ties.values():  # torch's to_empty unties
        for alias in fqns[1:]:
            path, _, name = alias.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(fqns[0]))
    torch.manual_seed(seed)
    for module in [m for m in model.modules() if m is not model]:
        init(module) if init else module.reset_parameters()
    return model


def _plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7))
    model[2].weight = model[0].weight
    return model


def _init_to_small(module: nn.Module) -> None:
    for tensor in module.parameters(recurse=False):
        nn.init.normal_(tensor, std=0.02)


@pytest.mark.parametrize("build", [_plain, _tied])
@pytest.mark.parametrize("init", [None, _init_to_small])
def test_materialised_values_are_those_of_an_unsharded_model(build: Any, init: Any) -> None:
    expected = _whole_after(5, build, init)
    with torch.device("meta"):
        model = shard(build())
    assert all(param.is_meta for param in model.parameters())
    torch.manual_seed(5)
    assert materialize(model, "cpu", init=init) is model
    assert gtp_weights(model)
    for name, param in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), param), name
    assert [f for f in all_weights(model).values()] == [f for f in all_weights(expected).values()]


def test_materialised_equals_construction_where_it_only_resets() -> None:
    torch.manual_seed(3)
    expected = _plain()
    with torch.device("meta"):
        model = shard(_plain())
    torch.manual_seed(3)
    materialize(model, torch.device("cpu"))
    for name, param in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), param), name


def test_materialise_says_what_has_no_init_and_changes_nothing() -> None:
    with torch.device("meta"):
        model = shard(Rooted())
    with pytest.raises(ValueError, match=r"none on the model \(Rooted\).*init="):
        materialize(model, "cpu")
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(ValueError, match=r"the model \(Rooted\).*write token, found uninitialised"):
        materialize(model, "cpu", init=lambda m: m is model or _init_to_small(m))
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(ValueError, match="real device"):
        materialize(model, "meta")
    materialize(model, "cpu", init=_init_to_small)
    assert torch.isfinite(model(torch.tensor([1, 2]))).all()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.Linear])
def test_a_tied_weight_may_be_initialised_by_any_of_its_owners(kind: type[nn.Module]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7, bias=False))
        model[1].weight = model[0].weight
        return model

    def init(module: nn.Module) -> None:
        if isinstance(module, kind):
            _init_to_small(module)

    expected = _whole_after(5, build, init)
    with torch.device("meta"):
        model = shard(build())
    with pytest.raises(ValueError, match=r"1 \(Linear\): expected its init to write weight"):
        materialize(model, "cpu", init=lambda module: None)
    torch.manual_seed(5)
    materialize(model, "cpu", init=init)
    assert model[0].get_parameter("weight") is model[1].get_parameter("weight")
    assert torch.equal(model[0].weight, expected[0].weight)


# --- several ranks -------------------------------------------------------------------------------


def _check_materialised(rank: int, world: int) -> None:
    torch.manual_seed(3)
    expected = _plain()
    with torch.device("meta"):
        model = shard(_plain(), _groups(world, 4))
    torch.manual_seed(3)
    materialize(model, "cpu")
    for param, info in gtp_weights(model).items():
        assert torch.equal(param, _rows(expected.get_parameter(info.fqns[0]), info.spec))
    for name, param in expected.named_parameters():
        if not name.endswith("weight") or name.startswith("2."):
            assert torch.equal(model.get_parameter(name), param), name

    def init(module: nn.Module) -> None:  # as GPT-2's: the root scales weights of its blocks
        _init_to_small(module)
        if isinstance(module, nn.Sequential):
            for param in module.parameters():
                param.data.mul_(0.5)

    with torch.device("meta"):
        model = shard(_plain(), _groups(world, 4))
    with pytest.raises(NotImplementedError, match=r"init function writes into 0\.weight"):
        materialize(model, "cpu", init=init)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.dist
def test_materialised_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(_check_materialised)
