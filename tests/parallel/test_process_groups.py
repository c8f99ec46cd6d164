"""ProcessGroups: three states of a field, groups from a mesh, and the errors."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gtpgraph.parallel.process_groups import GROUP_NAMES, UNSET, ProcessGroups, Unset
from gtpgraph.testing import run_ranks


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fake job; the test is parametrised with (rank, world size)."""
    rank, world = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield world
    dist.destroy_process_group()


def job(rank: int, world: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fake_world", [(rank, world)], indirect=True)


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


# The sentinel


def test_unset_is_one_object_with_no_truth_value() -> None:
    assert Unset() is UNSET
    assert repr(UNSET) == "UNSET"
    assert copy.deepcopy(UNSET) is UNSET
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET
    with pytest.raises(TypeError, match="neither 'size one' nor WORLD"):
        bool(UNSET)


def test_a_field_never_set_is_unset_and_none_is_not() -> None:
    groups = ProcessGroups(tp=None)
    assert groups.tp is None
    assert groups.pp is UNSET
    assert groups.size("tp") == 1
    for read in (groups.size, groups.rank, groups.ranks, groups.group_name):
        with pytest.raises(ValueError, match=r"ProcessGroups\.pp.*got UNSET"):
            read("pp")


def test_a_group_of_size_one_is_none_and_none_is_never_handed_to_a_collective() -> None:
    with pytest.raises(ValueError, match=r"ProcessGroups\.dp: expected a group, got None"):
        ProcessGroups.local().group("dp")


def test_local_is_size_one_everywhere_without_a_process_group() -> None:
    groups = ProcessGroups.local()
    assert not dist.is_initialized()
    assert all(getattr(groups, name) is None for name in GROUP_NAMES)
    assert groups.world() == {"pp": 1, "dp": 1, "cp": 1, "gtp": 1, "tp": 1, "ep": 1}
    assert (groups.rank("gtp"), groups.ranks("gtp"), groups.group_name("gtp")) == (0, (0,), "")
    groups.require(*GROUP_NAMES, function="f", option="o")


def test_from_attributes_keeps_absent_and_none_apart() -> None:
    groups = ProcessGroups.from_attributes(SimpleNamespace(tp=None, unrelated=3))
    assert groups.tp is None
    assert all(getattr(groups, name) is UNSET for name in GROUP_NAMES if name != "tp")


def test_a_copy_uses_the_same_groups() -> None:
    groups = ProcessGroups.local()
    assert copy.deepcopy(groups) is groups
    changed = dataclasses.replace(groups, tp=UNSET)
    assert changed.tp is UNSET
    assert changed.pp is None


# Errors


def test_require_names_function_option_and_every_missing_group_at_once() -> None:
    groups = ProcessGroups(tp=None)
    with pytest.raises(ValueError) as error:
        groups.require(
            "tp", "pp", "dp_cp", function="some_function", option={"pp": "a", "dp_cp": "b"}
        )
    assert str(error.value) == (
        "some_function: the collection of process groups lacks what this call uses.\n"
        "  - pp: not set (UNSET), needed by a\n"
        "  - dp_cp: not set (UNSET), needed by b\n"
        "Remedy: build the collection with ProcessGroups.from_mesh, or pass each of these groups; "
        "None says that the axis has size one (unset never does, nor means WORLD)"
    )


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown group 'dpcp'; known: tp, pp"):
        ProcessGroups.local().require("dpcp", function="f", option="o")
    with pytest.raises(ValueError, match="unknown group 'mesh'"):
        ProcessGroups.local().size("mesh")


@job(0, 8)
def test_a_field_must_be_a_group_of_the_caller(fake_world: int) -> None:
    others = dist.new_group([1, 2])
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    with pytest.raises(ValueError) as error:
        ProcessGroups(tp=others, pp=gone, dp="dp", cp=None)  # type: ignore[arg-type]
    text = str(error.value)
    assert "tp: got torch's marker for a group that this rank does not belong to" in text
    assert "pp: got a group that is not registered" in text
    assert "dp: got 'dp' of type str" in text
    assert "cp:" not in text


@job(0, 8)
def test_a_group_of_the_wrong_size_is_an_error(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(dp=2, gtp=2, tp=2))
    wrong = dataclasses.replace(groups, dp_cp_gtp=groups.dp_cp)
    with pytest.raises(ValueError, match=r"dp_cp_gtp: expected 4 ranks = dp_cp \(2\) x gtp \(2\)"):
        wrong.require("dp_cp_gtp", function="f", option="num_tokens")
    wrong = dataclasses.replace(groups, dp_cp=None)
    with pytest.raises(ValueError, match=r"dp_cp: expected 2 ranks .* got 1, needed by"):
        wrong.require("dp_cp", function="f", option="num_tokens")


@job(0, 4)
def test_from_mesh_refuses_axes_it_does_not_know(fake_world: int) -> None:
    with pytest.raises(ValueError, match="unknown mesh axis 'fsdp'; known: 'pp', 'dp'"):
        ProcessGroups.from_mesh(mesh_of(dp=2, fsdp=2))
    with pytest.raises(ValueError, match="axes have no names"):
        ProcessGroups.from_mesh(init_device_mesh("cpu", (4,)))
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size 4"):
        ProcessGroups.from_mesh(mesh_of(dp=4, tp=2))


@job(0, 4)
def test_from_mesh_refuses_a_slice(fake_world: int) -> None:
    mesh = mesh_of(pp=2, dp=2)
    with pytest.raises(ValueError, match=r"got the slice \('dp',\) \(2 ranks\) of \('pp', 'dp'\)"):
        ProcessGroups.from_mesh(mesh["dp"])
    assert ProcessGroups.from_mesh(mesh["pp", "dp"]).size("model") == 4


# Groups from a mesh


@job(5, 1024)
def test_every_field_of_a_five_axis_mesh(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(pp=4, dp=8, cp=2, gtp=8, tp=2))
    # Strides: tp 1, gtp 2, cp 16, dp 32, pp 256; rank 5 = gtp 2, tp 1.
    assert groups.world() == {"pp": 4, "dp": 8, "cp": 2, "gtp": 8, "tp": 2, "ep": 1}
    assert groups.ranks("tp") == (4, 5)
    assert groups.ranks("gtp") == tuple(range(1, 17, 2))
    assert groups.ranks("cp") == (5, 21)
    assert groups.ranks("pp") == (5, 261, 517, 773)
    assert groups.ranks("embd") == (5, 773)
    assert groups.ranks("dp_cp") == tuple(range(5, 256, 16))
    assert groups.ranks("dp_cp_gtp") == tuple(range(1, 256, 2))
    tp_dp_cp = sorted(r + t for r in range(4, 256, 16) for t in (0, 1))
    assert groups.ranks("tp_dp_cp") == tuple(tp_dp_cp)
    assert groups.ranks("model") == groups.ranks("grad_norm") == tuple(range(1024))
    assert groups.ep is None
    assert groups.pos_embd is None
    assert groups.rank("gtp") == 2
    assert groups.group("gtp") is groups.gtp
    assert isinstance(groups.gtp, dist.ProcessGroup)
    assert groups.group_name("gtp") == groups.gtp.group_name
    for name in GROUP_NAMES:
        assert 5 in groups.ranks(name), name


@job(6, 8)
def test_with_experts_the_ep_axis_belongs_to_dp(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(dp=2, ep=2, tp=2))
    assert groups.ranks("ep") == (4, 6)
    assert groups.ranks("dp") == groups.ranks("dp_cp") == (0, 2, 4, 6)
    assert groups.ranks("expt_dp") == (2, 6)
    assert groups.expt_gtp is None
    assert groups.size("dp") == groups.size("expt_dp") * groups.size("ep")


@job(1, 4)
def test_the_order_of_the_axes_is_the_mesh_s(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(tp=2, dp=2))
    assert groups.ranks("tp") == (1, 3)
    assert groups.ranks("dp") == (0, 1)


@job(0, 8)
def test_no_group_is_created_twice_or_for_one_rank(
    fake_world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of(pp=1, dp=2, cp=1, gtp=2, tp=2)
    created: list[list[list[int]]] = []
    create: Any = dist.new_subgroups_by_enumeration

    def spy(lines: list[list[int]], **kw: Any) -> Any:
        created.append(lines)
        return create(lines, **kw)

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", spy)
    groups = ProcessGroups.from_mesh(mesh)
    # tp_dp_cp, dp_cp_gtp, model = grad_norm; everything else is an axis of the mesh or one rank.
    assert created == [
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]
    assert groups.dp_cp is groups.dp is mesh.get_group("dp")
    assert groups.grad_norm is groups.model
    assert groups.pp is groups.cp is groups.embd is None


@job(0, 6)
def test_a_middle_stage_has_no_part_in_embd(fake_world: int) -> None:
    assert ProcessGroups.from_mesh(mesh_of(pp=3, dp=2)).ranks("embd") == (0, 4)
    middle = DeviceMesh("cpu", torch.tensor([[2, 3], [4, 5], [0, 1]]), mesh_dim_names=("pp", "dp"))
    # A stage is a rank's place in the pp group, whatever order the mesh lists the ranks in.
    assert ProcessGroups.from_mesh(middle).ranks("embd") == (0, 4)


@job(2, 6)
def test_on_a_middle_stage_embd_is_none(fake_world: int) -> None:
    assert ProcessGroups.from_mesh(mesh_of(pp=3, dp=2)).embd is None


@job(3, 4)
def test_two_stages_share_one_group_for_pp_and_embd(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(pp=2, tp=2))
    assert groups.embd is groups.pp
    assert groups.ranks("pp") == (1, 3)


@job(3, 8)
def test_none_stands_for_this_rank(fake_world: int) -> None:
    groups = ProcessGroups.from_mesh(mesh_of(dp=8))
    assert groups.ranks("tp") == (3,)
    by_hand = ProcessGroups(dp=dist.new_group([2, 3]), tp=None)
    assert by_hand.ranks("tp") == (3,)


@job(7, 8)
def test_a_rank_outside_the_mesh_gets_nothing_it_could_use(fake_world: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    groups = ProcessGroups.from_mesh(mesh)
    assert all(getattr(groups, name) is UNSET for name in GROUP_NAMES)
    with pytest.raises(ValueError, match="this rank lies outside the model's mesh"):
        groups.require("dp", function="f", option="o")


# Real ranks


def _sums(groups: ProcessGroups) -> dict[str, float]:
    """All-reduce this rank's bit over each group: the result says who took part."""
    found = {}
    for name in GROUP_NAMES:
        group = getattr(groups, name)
        if isinstance(group, dist.ProcessGroup):
            bits = torch.tensor(2.0 ** dist.get_rank(dist.group.WORLD))
            dist.all_reduce(bits, group=group)
            found[name] = bits.item()
            assert found[name] == sum(2.0**r for r in groups.ranks(name)), name
    return found


def _two_grids(rank: int, world: int) -> tuple[dict[str, float], dict[str, float]]:
    """Model A on ranks 0 to 3, model B on ranks 2 and 3: created by all, used by members only."""
    a = ProcessGroups.from_mesh(mesh_of(pp=2, gtp=2))
    mesh_b = DeviceMesh("cpu", torch.tensor([[2], [3]]), mesh_dim_names=("dp", "tp"))
    b = ProcessGroups.from_mesh(mesh_b)
    sums_b = {} if b.dp is UNSET else _sums(b)
    return _sums(a), sums_b


@pytest.mark.dist
def test_groups_of_two_models_reduce_over_their_own_ranks() -> None:
    results = run_ranks(_two_grids, 4)
    for rank, (a, b) in enumerate(results):
        assert a["gtp"] == a["dp_cp_gtp"] == (3.0 if rank < 2 else 12.0)
        assert a["pp"] == a["embd"] == (5.0 if rank % 2 == 0 else 10.0)
        assert a["model"] == a["grad_norm"] == 15.0
        assert b.get("dp") == (12.0 if rank >= 2 else None)
        assert b.get("model") == (12.0 if rank >= 2 else None)
