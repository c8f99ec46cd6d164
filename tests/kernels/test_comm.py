"""gather and reduce: values, gradients, what tracing and compiling see, and the eager handle."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.testing._internal.distributed.fake_pg import FakeStore

from gtpgraph.kernels import comm

ops = torch.ops.gtpgraph


@pytest.fixture
def fake_group() -> Iterator[str]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture
def nan_filled_empty() -> None:
    """Not here: Inductor's own uses of torch.empty must stay as they are while it compiles."""


class Recorder:
    """A handle that notes what it is given, and answers with ``answer`` of it."""

    def __init__(self, answer: Any = lambda wgrad: None) -> None:
        self.answer = answer
        self.gathers = 0
        self.taken: list[tuple[int, Tensor]] = []

    def on_gather(self) -> int:
        self.gathers += 1
        return self.gathers

    def contribute(self, wgrad: Tensor, use: int) -> Tensor | None:
        self.taken.append((use, wgrad))
        return self.answer(wgrad)


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_size_one_operators_keep_their_schemas(requires_grad: bool) -> None:
    shard = torch.randn(3, 4, requires_grad=requires_grad)
    torch.library.opcheck(ops.gather.default, (shard, 3, ""))
    torch.library.opcheck(ops.reduce.default, (shard, 3, ""))
    torch.library.opcheck(ops.reduce.default, (shard, 5, ""))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_fakes_agree_with_a_group_of_two(fake_group: str, requires_grad: bool) -> None:
    # The fake backend moves nothing, so the values are whatever memory held: no value checks here.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    shard, wgrad = torch.randn(3, 4), torch.randn(5, 4)
    for op, args in ((ops.gather, (shard, 5)), (ops.reduce, (wgrad, 3))):
        args[0].requires_grad_(requires_grad)
        torch.library.opcheck(op.default, (*args, fake_group), test_utils=checks)
    assert ops.gather(shard, 5, fake_group).shape == (5, 4)
    assert ops.gather(shard, 5, fake_group).is_contiguous()
    assert ops.reduce(wgrad.bfloat16(), 3, fake_group).dtype == torch.bfloat16


def test_eager_gather_of_one_process_copies_nothing_and_the_operator_does() -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    assert comm.gather(shard, 3, "").data_ptr() == shard.data_ptr()
    assert ops.gather(shard, 3, "").data_ptr() != shard.data_ptr()
    wgrad = torch.randn(3, 4)
    assert ops.reduce(wgrad, 3, "").data_ptr() != wgrad.data_ptr()


def test_a_weight_changed_between_forward_and_backward_is_found() -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    loss = comm.gather(shard, 3, "").square().sum()
    with torch.no_grad():
        shard.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_inductor_does_not_reuse_the_weights_memory() -> None:
    # An operator that returned its input here had its weight overwritten.
    weight, x = torch.randn(64, 64), torch.randn(64, 64)
    before = weight.clone()

    def f(weight: Tensor, x: Tensor) -> Tensor:
        first = comm.gather(weight, 64, "") + x
        return (first @ first + (comm.gather(weight, 64, "") * 2).sin()).tanh()

    expected = f(weight, x)
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(weight, x), expected)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("function", [comm.gather, ops.gather], ids=["eager", "operator"])
def test_a_handle_takes_each_contribution_and_autograd_gets_nothing(function: Any) -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    handle = shard._gtp_handle = Recorder()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    (x @ function(shard, 3, "").t() + (y @ function(shard, 3, "").t()) * 2).sum().backward()
    assert shard.grad is None
    assert handle.gathers == 2
    by_use = dict(handle.taken)
    torch.testing.assert_close(by_use[1], torch.ones(3, 2) @ x)
    torch.testing.assert_close(by_use[2], 2 * torch.ones(3, 2) @ y)


def test_a_handle_may_answer_with_the_gradient() -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    shard._gtp_handle = Recorder(lambda wgrad: wgrad * 3)
    comm.gather(shard, 3, "").sum().backward()
    torch.testing.assert_close(shard.grad, torch.full((3, 4), 3.0))


def test_no_grad_and_frozen_gathers_are_no_uses() -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    handle = shard._gtp_handle = Recorder()
    with torch.no_grad():
        ops.gather(shard, 3, "")
    frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
    frozen._gtp_handle = handle
    ops.gather(frozen, 3, "")
    assert handle.gathers == 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_gather_leaves_the_handle_alone(backend: str) -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    x = torch.randn(2, 4)

    def f(shard: Tensor) -> Tensor:
        return (x @ comm.gather(shard, 3, "").t()).sin().sum()

    f(shard).backward()
    expected, shard.grad = shard.grad, None
    handle = shard._gtp_handle = Recorder()
    torch.compile(f, backend=backend, fullgraph=True)(shard).backward()
    torch.testing.assert_close(shard.grad, expected)
    assert (handle.gathers, handle.taken) == (0, [])


def test_joint_graph_pairs_each_reduce_with_its_gather(fake_group: str) -> None:
    pairs: dict[str, list[int]] = {}

    def partition(joint: Any, inputs: Any, **kw: Any) -> Any:
        for node in joint.graph.nodes:
            if "gtpgraph" in str(node.target):
                pairs.setdefault(str(node.target), []).append(node.meta["seq_nr"])
        return default_partition(joint, inputs, **kw)

    def keep(gm: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        return make_boxed_func(gm)

    def f(shard: Tensor, x: Tensor) -> Tensor:
        once, twice = (comm.gather(shard, 5, fake_group) for _ in range(2))
        return (x @ once.t() + (x @ twice.t()).sin()).sum()

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    shard = nn.Parameter(torch.randn(3, 4))
    torch.compile(f, backend=backend, fullgraph=True)(shard, torch.randn(2, 4)).backward()
    gathers, reduces = pairs["gtpgraph.gather.default"], pairs["gtpgraph.reduce.default"]
    assert len(set(gathers)) == 2
    assert reduces == gathers[::-1]


@pytest.mark.parametrize("function", [comm.gather, ops.gather], ids=["eager", "operator"])
def test_functional_transforms_are_refused_not_silently_wrong(function: Any) -> None:
    shard = nn.Parameter(torch.randn(3, 4))
    handle = shard._gtp_handle = Recorder()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda s: function(s, 3, "").square().sum())(shard)
    assert handle.gathers == 0


def test_pad_rows() -> None:
    wgrad = torch.randn(4, 3).t()
    padded = comm.pad_rows(wgrad, 5)
    assert padded.is_contiguous()
    assert torch.equal(padded[:3], wgrad)
    assert padded[3:].eq(0).all()
    whole = torch.randn(3, 4)
    assert comm.pad_rows(whole, 3) is whole
    with pytest.raises(ValueError, match=r"at most 2 rows.*\(3, 4\)"):
        comm.pad_rows(whole, 2)


def test_groups_by_name(fake_group: str) -> None:
    assert comm.group_size("") == 1
    assert comm.group_size(fake_group) == 2
    assert comm.resolve_group(fake_group) is dist.group.WORLD
    with pytest.raises(ValueError, match="has no ProcessGroup"):
        comm.resolve_group("")
    with pytest.raises(RuntimeError, match=r"'nowhere'.*shard the model again"):
        comm.resolve_group("nowhere")


# --- several ranks -------------------------------------------------------------------------------


def _whole(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1)).to(dtype)


def _shard(whole: Tensor, rank: int, world: int) -> Tensor:
    rows = -(-whole.shape[0] // world)
    return comm.pad_rows(whole, rows * world)[rank * rows : (rank + 1) * rows].clone()


def _check_values(rank: int, world: int) -> int:
    name = dist.group.WORLD.group_name
    checked = 0
    for rows in (1, 4, 5, 8, 9):  # 1, 5 and 9 leave padding; 1 and 5 leave ranks without a row
        for dtype in (torch.float32, torch.bfloat16):
            whole = _whole(rows, dtype)
            shard = _shard(whole, rank, world)
            gathered = ops.gather(shard, rows, name)
            assert gathered.is_contiguous()
            assert torch.equal(gathered, whole)
            reduced = ops.reduce(whole * (rank + 1), shard.shape[0], name)
            # The same values times 1, 2, ...: off by a bf16 rounding of each partial sum at most.
            expected = _shard(whole.float() * sum(range(1, world + 1)), rank, world)
            torch.testing.assert_close(reduced.float(), expected, rtol=2e-2, atol=1e-6)
            assert reduced.dtype == dtype
            checked += 1
    return checked


def _check_gradients(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    whole = _whole(5, torch.float64)
    x = torch.randn(world, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight.t()).sin().sum()

    reference = whole.clone().requires_grad_()
    sum(loss(reference, part) for part in x).backward()
    expected = _shard(reference.grad, rank, world)

    def f(shard: Tensor) -> Tensor:
        return loss(comm.gather(shard, 5, name), x[rank])

    for backend in (None, "aot_eager"):
        shard = nn.Parameter(_shard(whole, rank, world))
        run = f if backend is None else torch.compile(f, backend=backend, fullgraph=True)
        run(shard).backward()
        torch.testing.assert_close(shard.grad, expected)

    # Twice differentiable: the gradient of <v, dL/dshard> is one more gather and reduce.
    shard = nn.Parameter(_shard(whole, rank, world))
    (grad,) = torch.autograd.grad(f(shard), shard, create_graph=True)
    grad.square().sum().backward()
    (first,) = torch.autograd.grad(
        sum(loss(reference, part) for part in x), reference, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), reference)
    torch.testing.assert_close(shard.grad, _shard(second, rank, world))


def _opcheck(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for requires_grad in (False, True):
        shard = torch.randn(3, 4, requires_grad=requires_grad)
        torch.library.opcheck(ops.gather.default, (shard, 5, name))
        wgrad = torch.randn(5, 4, requires_grad=requires_grad)
        torch.library.opcheck(ops.reduce.default, (wgrad, 3, name))


def _check_launches(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    whole = _whole(5, torch.float32)
    padded, gather = comm.gather_launch(_shard(whole, rank, world), name)
    gather.wait()
    assert torch.equal(padded, comm.pad_rows(whole, padded.shape[0]))
    shard, reduce = comm.reduce_launch(whole, padded.shape[0] // world, name)
    reduce.wait()
    torch.testing.assert_close(shard, _shard(whole, rank, world) * world)


@pytest.mark.dist
def test_values_on_four_ranks(ranks4: Any) -> None:
    assert ranks4.run(_check_values) == [10] * 4


@pytest.mark.dist
def test_gradients_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(_check_gradients)


@pytest.mark.dist
def test_launch_and_wait_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(_check_launches)


@pytest.mark.dist
def test_opcheck_on_two_ranks(ranks2: Any) -> None:
    ranks2.run(_opcheck)
