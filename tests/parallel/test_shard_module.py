"""What a module with a swapped class does where a plain one is asked: each trap."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtpgraph.parallel.sharding import (
    gtp_weights,
    original_type,
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


def names(model: nn.Module) -> list[str]:
    return [info.fqns[0] for info in gtp_weights(model).values()]


TOKENS = torch.tensor([0, 3, 6, 3])


def test_get_parameter_gives_the_shard_from_any_ancestor() -> None:
    model = shard(Net())
    expected = model.up._parameters["weight"]
    assert model.up.get_parameter("weight") is expected
    assert model.get_parameter("up.weight") is expected
    assert nn.Sequential(model).get_parameter("0.up.weight") is expected
    assert dict(model.named_parameters())["up.weight"] is expected


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.up, "weight", nn.Parameter(torch.zeros(9, 6))),
        lambda m: setattr(m.up, "weight", torch.zeros(9, 6)),
        lambda m: setattr(m.head, "weight", m.up._parameters["weight"]),
        lambda m: m.up.register_parameter("weight", nn.Parameter(torch.zeros(9, 6))),
        lambda m: delattr(m.up, "weight"),
        lambda m: nn.utils.parametrizations.orthogonal(m.up),
    ],
    ids=["assign", "tensor", "tie", "register", "delete", "parametrize"],
)
def test_replacing_a_sharded_weight_is_refused(change: Callable[[Any], None]) -> None:
    model = shard(Net())
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"weight: cannot .* sharded weight.*shard last"):
        change(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is param for name, param in before.items())
    model(TOKENS)


def test_tying_again_what_is_tied_is_no_change() -> None:
    model = shard(Net())
    model.head.weight = model.get_parameter("embed.weight")
    assert names(model) == ["embed.weight", "up.weight", "frozen.weight"]
    model.up.register_parameter("weight", model.get_parameter("up.weight"))
    model.up.note = "other attributes are free"
    del model.up.note


def resize_token_embeddings(model: Any) -> None:
    model.embed.weight.data = torch.zeros(12, 6)  # as Hugging Face does it


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.up.reset_parameters(),
        lambda m: m.apply(_init_weights),
        resize_token_embeddings,
    ],
    ids=["reset", "init", "resize"],
)
def test_initialising_and_resizing_a_sharded_model_are_refused(
    write: Callable[[nn.Module], Any],
) -> None:
    model = shard(Net())
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"final size before shard\(\).*materialize"):
        write(model)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])


def test_pickling_is_refused_in_favour_of_the_state_dict() -> None:
    model = shard(Net())
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=r"state_dict\(\)"):
            save()
    torch.save(model.state_dict(), io.BytesIO())


def test_the_type_is_a_subclass_that_looks_like_the_original() -> None:
    model = shard(Net())
    assert isinstance(model.up, nn.Linear)
    assert type(model.up) is not nn.Linear
    assert original_type(model.up) is nn.Linear
    assert original_type(model.norm) is nn.LayerNorm
    assert type(model.up) is type(model.head), "one class a kind, or each module would recompile"
    expected = "Linear(in_features=6, out_features=9, bias=True, shard=(weight: 9 of 9 rows, gtp 0"
    assert repr(model.up).startswith(expected)


@pytest.mark.parametrize("do", [copy.deepcopy, lambda m: copy.deepcopy(copy.deepcopy(m))])
def test_deepcopy_keeps_ties_frozen_flags_specs_and_state(do: Callable[[Any], Any]) -> None:
    model = shard(Net())
    model.get_parameter("up.weight")._gtp_handle = object()  # belongs to the original alone
    twin = do(model)
    assert [i.fqns for i in gtp_weights(twin).values()] == [
        i.fqns for i in gtp_weights(model).values()
    ]
    assert not set(gtp_weights(twin)) & set(gtp_weights(model))
    assert not twin.get_parameter("frozen.weight").requires_grad
    assert not hasattr(twin.get_parameter("up.weight"), "_gtp_handle")
    twin.get_parameter("up.weight").data.zero_()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(TOKENS), twin(TOKENS))
    del model.get_parameter("up.weight")._gtp_handle
    assert torch.equal(twin(TOKENS), model(TOKENS))
    shallow = copy.copy(model.up)
    assert shallow.get_parameter("weight") is model.get_parameter("up.weight")


def test_conversions_keep_shards_and_ties() -> None:
    model = shard(Net())
    tie = model.get_parameter("embed.weight")
    model.to(torch.float64)
    assert model.get_parameter("embed.weight") is tie is model.get_parameter("head.weight")
    assert model.up.weight.dtype == torch.float64
    assert model(TOKENS).dtype == torch.float64
    with torch.device("meta"):
        empty = Net()
    shard(empty).to_empty(device="cpu")
    assert empty.get_parameter("embed.weight") is empty.get_parameter("head.weight")
    assert not empty.get_parameter("frozen.weight").requires_grad
    assert [i.fqns for i in gtp_weights(empty).values()] == [
        i.fqns for i in gtp_weights(model).values()
    ]


def test_functional_call_takes_shards() -> None:
    model = shard(Net())
    replaced = {name: param.detach() * 2 for name, param in model.named_parameters()}
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for param in expected.parameters():
            param.mul_(2)
    assert torch.equal(torch.func.functional_call(model, replaced, TOKENS), expected(TOKENS))
    with pytest.raises(RuntimeError, match=r"expected a shard of \(9, 6\).*got \(3, 6\)"):
        torch.func.functional_call(model, {"up.weight": torch.zeros(3, 6)}, TOKENS)


def test_attributes_of_a_parameter_survive() -> None:
    model = Net()
    model.up.weight.sequence_parallel = True
    assert shard(model).get_parameter("up.weight").sequence_parallel


class OwnLinear(nn.Linear):
    """Dynamo compiles no frame of torch.nn by itself, but this one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def test_modules_of_a_kind_compile_once() -> None:
    model = shard(nn.Sequential(*(OwnLinear(4, 4) for _ in range(4))))
    compiled = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(sum("gather" in str(node.target) for node in gm.graph.nodes))
        return gm.forward

    torch._dynamo.reset()
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)
    x = torch.randn(2, 4, requires_grad=True) * 1.0  # as every layer's input: not a leaf
    model(x).sum().backward()
    assert compiled == [1]
