"""State dicts of sharded models: DTensors of the whole weight; loading at another gtp degree."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.shard_state import whole_dtensor
from gtpgraph.parallel.sharding import gtp_weights, shard

ROWS = {"0.weight": 7, "1.weight": 9, "2.weight": 5, "3.weight": 7}


def build(seed: int) -> nn.Module:
    """Rows 7 (tied), 9 and 5: over four ranks 5 rows leave the last rank without one."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 9), nn.Linear(9, 5, bias=False), nn.Linear(6, 7)
    )
    model[3].weight = model[0].weight
    return model


def groups_of(gtp: int, world: int) -> ProcessGroups:
    if world == 1:
        return ProcessGroups.local()
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    return ProcessGroups.from_mesh(mesh)


def assert_holds(model: nn.Module, whole: nn.Module) -> None:
    """``model`` holds this rank's rows of ``whole``, and zero below them."""
    expected = dict(whole.named_parameters())
    infos = gtp_weights(model)
    for name, param in model.named_parameters():
        want = expected[name]
        if param in infos:
            spec = infos[param].spec
            want = want[spec.start : spec.start + spec.valid_rows]
            assert param[spec.valid_rows :].eq(0).all(), name
            param = param[: spec.valid_rows]
        assert torch.equal(param, want), name


# --- one process ---------------------------------------------------------------------------------


def test_one_process_shows_plain_tensors_and_loads_them() -> None:
    whole, model = build(0), shard(build(1))
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    assert all(type(value) is Tensor for value in state.values())
    assert state["1.weight"].data_ptr() == model.get_parameter("1.weight").data_ptr()
    model.load_state_dict(whole.state_dict())
    assert_holds(model, whole)


def test_assign_keeps_ties_and_frozen_flags_and_leaves_meta() -> None:
    whole = build(0)
    with torch.device("meta"):
        model = build(1)
    model[2].requires_grad_(False)
    shard(model).load_state_dict(whole.state_dict(), assign=True)
    assert_holds(model, whole)
    assert model[0].get_parameter("weight") is model[3].get_parameter("weight")
    assert not model[2].get_parameter("weight").requires_grad
    before = {name: param for name, param in model.named_parameters()}
    model.get_parameter("1.weight")._gtp_handle = object()
    with pytest.raises(RuntimeError, match=r"1\.weight: assign=True.*data-parallel wrapper"):
        model.load_state_dict(whole.state_dict(), assign=True)
    assert model.get_parameter("1.weight") is before["1.weight"]


def test_what_is_no_whole_weight_is_refused_by_name() -> None:
    model = shard(build(0))
    state = build(1).state_dict() | {"1.weight": torch.zeros(9, 5), "2.weight": [1.0]}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "1.weight: expected the whole weight, a DTensor or tensor of (9, 6)" in text
    assert "found a Tensor of (9, 5)" in text
    assert "2.weight: expected the whole weight" in text
    assert "found a list" in text
    del state["1.weight"], state["2.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1.weight", "2.weight"'):
        model.load_state_dict(state)


def test_hooks_that_rename_keys_come_first() -> None:
    model, whole = build(1), build(0)

    def rename(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")

    model[1].register_load_state_dict_pre_hook(rename)
    shard(model)
    old = whole.state_dict()
    old["1.kernel"] = old.pop("1.weight")
    for target in (model, copy.deepcopy(model)):
        target.load_state_dict(old)
        assert_holds(target, whole)


# --- several ranks -------------------------------------------------------------------------------


def _check_shown(rank: int, world: int, gtp: int) -> None:
    whole, groups = build(0), groups_of(gtp, world)
    model = shard(build(0), groups)
    state = model.state_dict()
    placements = (Replicate(), Shard(0))
    for name, value in whole.state_dict().items():
        if name not in ROWS:
            assert type(state[name]) is Tensor
            continue
        shown = state[name]
        assert isinstance(shown, DTensor)
        assert shown.device_mesh == groups.mesh
        assert (shown.shape, shown.stride(), shown.placements) == (
            value.shape,
            value.stride(),
            placements,
        )
        assert torch.equal(shown.full_tensor(), value)
        # torch's own layout of the same weight, and the shard's own memory.
        assert torch.equal(
            shown.to_local(), distribute_tensor(value, groups.mesh, placements)._local_tensor
        )
        param = model.get_parameter(name)
        if shown.to_local().numel():
            assert shown.to_local().data_ptr() == param.data_ptr()
    kept = model.state_dict(keep_vars=True)["1.weight"]
    kept.full_tensor().sum().backward()
    spec = gtp_weights(model)[model.get_parameter("1.weight")].spec
    grad = model.get_parameter("1.weight").grad
    assert grad[: spec.valid_rows].ne(0).all()
    assert grad[spec.valid_rows :].eq(0).all()


def _check_without_mesh(rank: int, world: int) -> None:
    whole = build(0)
    fields = {name: None for name in ("tp", "pp", "cp", "dp", "dp_cp")}
    group = dist.group.WORLD
    groups = ProcessGroups(gtp=group, dp_cp_gtp=group, **fields)
    model = shard(build(0), groups)
    for name, value in model.state_dict().items():
        if name in ROWS:
            assert value.device_mesh.ndim == 1
            assert value.placements == (Shard(0),)
            assert torch.equal(value.full_tensor(), whole.state_dict()[name])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    twin.load_state_dict(model.state_dict())
    assert_holds(twin, whole)


def _check_tp_axis_is_left_out(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("gtp", "tp"))
    model = shard(build(mesh.get_local_rank("tp")), ProcessGroups.from_mesh(mesh))
    shown = model.state_dict()["1.weight"]
    assert shown.device_mesh.mesh_dim_names == ("gtp",)
    assert torch.equal(shown.full_tensor(), build(mesh.get_local_rank("tp"))[1].weight)


def _check_loads(rank: int, world: int) -> list[str]:
    whole = build(0)
    plain = whole.state_dict()
    gtp2, gtp4 = groups_of(2, world), groups_of(4, world)
    flat = init_device_mesh("cpu", (world,))
    sources = {
        "plain": plain,
        "gtp2": shard(build(0), gtp2).state_dict(),
        "gtp4": shard(build(0), gtp4).state_dict(),
        "replicated": {
            n: distribute_tensor(v, flat, [Replicate()]) if n in ROWS else v
            for n, v in plain.items()
        },
        "columns": {
            n: distribute_tensor(v, flat, [Shard(1)]) if n in ROWS else v for n, v in plain.items()
        },
    }
    for groups in (gtp2, gtp4):
        for source in sources.values():
            for assign in (False, True):
                model = shard(build(1), groups)
                model.load_state_dict(source, assign=assign)
                assert_holds(model, whole)
                assert model[0].get_parameter("weight") is model[3].get_parameter("weight")
    alone = shard(build(1), ProcessGroups.local())
    alone.load_state_dict(sources["gtp4"])
    assert_holds(alone, whole)

    model = shard(build(1), gtp4)
    bare = {n: p.detach() for n, p in model.named_parameters()}  # one rank's shards: no whole
    errors = []
    for state in (
        {**plain, "1.weight": bare["1.weight"]},
        {**plain, "0.weight": torch.zeros(8, 6)},
    ):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        errors.append(str(caught.value))
    return errors


def _check_torch_state_dict_api(rank: int, world: int) -> None:
    whole, groups = build(0), groups_of(2, world)
    model = shard(build(0), groups)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole.state_dict().items():
        assert torch.equal(full[name], value)
    other = shard(build(1), groups_of(4, world))
    set_model_state_dict(other, get_model_state_dict(model))
    assert_holds(other, whole)
    other = shard(build(1), groups_of(4, world))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if rank == 0 else {}, options=options)
    assert_holds(other, whole)


def _save(rank: int, world: int, gtp: int, folder: str) -> None:
    dcp.save(shard(build(0), groups_of(gtp, world)).state_dict(), checkpoint_id=folder)


def _load(rank: int, world: int, gtp: int, folder: str) -> None:
    model = shard(build(1), groups_of(gtp, world))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_holds(model, build(0))


def _check_meta(rank: int, world: int) -> None:
    whole = build(0)
    with torch.device("meta"):
        model = shard(build(1), groups_of(4, world))
    shown = model.state_dict()["1.weight"]
    assert shown.shape == (9, 6)
    assert shown.to_local().is_meta
    model.load_state_dict(whole.state_dict(), assign=True)
    assert_holds(model, whole)


def _check_whole_dtensor(rank: int, world: int) -> None:
    groups = groups_of(4, world)
    model = shard(build(0), groups)
    param = model.get_parameter("2.weight")
    spec = gtp_weights(model)[param].spec
    main_grad = torch.full(spec.shard_shape, float(rank))
    whole = whole_dtensor(main_grad, spec, groups.mesh).full_tensor()
    # 5 rows in chunks of 2: the last rank has none, and its padding is never shown.
    assert whole[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]


@pytest.mark.dist
@pytest.mark.parametrize("gtp", [2, 4])
def test_state_dict_shows_whole_weights_on_the_callers_mesh(ranks4: Any, gtp: int) -> None:
    ranks4.run(_check_shown, gtp)


@pytest.mark.dist
def test_without_a_mesh_the_group_is_the_mesh(ranks4: Any) -> None:
    ranks4.run(_check_without_mesh)


@pytest.mark.dist
def test_axes_with_other_weights_are_left_out(ranks4: Any) -> None:
    ranks4.run(_check_tp_axis_is_left_out)


@pytest.mark.dist
def test_loading_any_layout_of_the_whole_weight(ranks4: Any) -> None:
    for bare, other in ranks4.run(_check_loads):
        assert "1.weight: expected the whole weight" in bare
        assert "(9, 6) (here cut over 4 ranks), found a Tensor of (3, 6)" in bare
        assert "looks like one rank's shard" in bare
        assert "found a Tensor of (8, 6)" in other


@pytest.mark.dist
def test_torchs_model_state_dict_functions(ranks4: Any) -> None:
    ranks4.run(_check_torch_state_dict_api)


@pytest.mark.dist
def test_checkpoint_moves_between_gtp_degrees(ranks4: Any, ranks2: Any, tmp_path: Any) -> None:
    two, four, one = (os.fspath(tmp_path / name) for name in ("two", "four", "one"))
    ranks2.run(_save, 2, two)
    ranks4.run(_load, 4, two)
    ranks4.run(_save, 4, four)
    ranks4.run(_load, 2, four)
    ranks2.run(_load, 2, four)
    ranks2.run(_load, 1, four)
    _load(0, 1, 1, four)
    _save(0, 1, 1, one)
    ranks4.run(_load, 4, one)


@pytest.mark.dist
def test_meta_models_show_and_load_whole_weights(ranks4: Any) -> None:
    ranks4.run(_check_meta)


@pytest.mark.dist
def test_anything_of_a_shards_layout_can_be_shown_whole(ranks4: Any) -> None:
    ranks4.run(_check_whole_dtensor)
