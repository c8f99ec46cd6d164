"""Real ranks on one GPU: GTP regions captured in CUDA graphs, without NCCL (A7).

Two and four processes share the device; what they exchange goes through symmetric memory. Every
call starts fresh processes, ended at a time limit: an exchange whose peer never comes would wait
for ever. The ranks take turns on the GPU, so nothing here says anything about speed.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gtpgraph as gg
from gtpgraph import compat
from gtpgraph.graph.driver import CudaDriver
from gtpgraph.models import build
from gtpgraph.parallel.process_groups import ProcessGroups
from gtpgraph.parallel.reduction_symmetric import SymmetricReduction
from gtpgraph.testing import fp64_grads, max_error, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
DISPATCH = ("after", "event", "in_graph")
BAR = 1e-5  # fp32 on CUDA against fp64
LIMIT_S = 200.0


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the ranks must find before they touch CUDA."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that wait block no others
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield


class Watching(CudaDriver):
    """Notes whether each capture left every main_grad as it was."""

    def __init__(self, model: gg.DistributedDataParallel) -> None:
        super().__init__(torch.device("cuda", 0))
        self.model = model
        self.clean: list[bool] = []

    def capture(self, work: Any, *, lasting: bool) -> Any:
        torch.cuda.synchronize()
        before = [b.flat.clone() for b in self.model.buckets]
        captured = super().capture(work, lasting=lasting)
        torch.cuda.synchronize()
        pairs = zip(self.model.buckets, before, strict=True)
        self.clean.append(all(torch.equal(b.flat, kept) for b, kept in pairs))
        return captured


def start(world: int, gtp: int) -> ProcessGroups:
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_flash_sdp(False)  # attention's backward must repeat its bits
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    mesh = init_device_mesh("cpu", (world // gtp, gtp), mesh_dim_names=("dp", "gtp"))
    return ProcessGroups.from_mesh(mesh)


def a_model() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return build("mtp-tiny")


def wrapped(net: nn.Module, groups: ProcessGroups, **kw: Any) -> gg.DistributedDataParallel:
    torch._dynamo.reset()
    return gg.DistributedDataParallel(gg.shard(net, groups), groups, bucket_mb=0.05, **kw)


def step(model: gg.DistributedDataParallel, call: Any, *inputs: Any) -> dict[str, Tensor]:
    """One step; the whole gradients by name, put together on the CPU over gloo."""
    model.zero_grad_buffer()
    loss = call(*inputs)
    if loss.requires_grad:
        loss.backward()
    model.finish_grad_sync()
    flats = {}
    for bucket in model.buckets:
        own = bucket.flat[bucket.own].cpu()
        flats[bucket.number] = own
        if bucket.side.group is not None:
            flats[bucket.number] = own.new_empty(bucket.flat.numel())
            compat.all_gather(flats[bucket.number], own, group=bucket.side.group)
    grads = {}
    for state in model.states:
        member = state.member
        flat = flats[state.bucket.number][member.offset : member.offset + member.numel]
        grads[state.fqn] = flat.view(member.shape)
        if state.spec is not None:
            grads[state.fqn] = torch.ops.gtpgraph.gather(
                grads[state.fqn], state.spec.rows, state.spec.group_name
            )
    return grads


def uses(records: Any) -> list[tuple[str, int]]:
    return [(r.weight, r.use) for r in records]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def eager_on_cpu(groups: ProcessGroups, *inputs: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Gradients and reports of the eager wrapped model on these ranks."""
    model = wrapped(a_model()[0], groups)
    grads = step(model, model, *inputs)
    reports = Counter(uses(model.reports))
    model.close()
    return grads, reports


def replays(rank: int, world: int, gtp: int) -> None:
    groups = start(world, gtp)
    plain, make_batch = a_model()
    batches = [make_batch(seed, rank, "cpu") for seed in range(2)]
    want = [
        fp64_grads(copy.deepcopy(plain), [make_batch(seed, r, "cpu") for r in range(world)])
        for seed in range(2)
    ]
    eager, reports = eager_on_cpu(groups, *batches[0])
    on_gpu = [tuple(x.cuda() for x in batch) for batch in batches]
    for dispatch in DISPATCH:
        print(f"rank {rank} of {world}, gtp {gtp}: {dispatch}", flush=True)
        model = wrapped(copy.deepcopy(plain).cuda(), groups, collectives="symmetric")
        kinds = {type(b.reduction) for b in model.buckets if b.side.group is not None}
        assert kinds == {SymmetricReduction}
        driver = Watching(model)
        call = gg.compile(
            model, lowering="eager", collectives="symmetric",
            replay="cuda", dispatch=dispatch, driver=driver,
        )  # fmt: skip
        assert max_error(step(model, call, *on_gpu[0]), want[0]) < BAR, "uncaptured"
        first = None
        for repeat in range(4):
            got = step(model, call, *on_gpu[0])
            assert max_error(got, want[0]) < BAR, (dispatch, repeat)
            assert max_error(got, eager) < BAR, (dispatch, repeat)
            first = first or got
            assert equal(got, first), (dispatch, repeat)
            planned = [o for r in call.plan.regions for o in r.occurrences]
            assert uses(model.reports) == uses(planned), dispatch
            assert Counter(uses(model.reports)) == reports, dispatch
        assert max_error(step(model, call, *on_gpu[1]), want[1]) < BAR, "other data"
        assert equal(step(model, call, *on_gpu[0]), first), "and the first again"
        assert driver.clean == [True, True], "one forward, one backward: main_grads untouched"
        reduced = [
            record.reduced
            for region in call.regions
            for known in region.replay.instances.values()
            for instance in known
            for _, record in instance.backwards.values()
        ]
        everything = {b.number for b in model.buckets}
        assert reduced == [everything if dispatch == "in_graph" else set()]
        model.close()


@pytest.mark.parametrize(("world", "gtp"), [(2, 2), (4, 4), (4, 2)])
def test_a7_captured_mtp_regions_equal_eager(world: int, gtp: int) -> None:
    run_ranks(replays, world, gtp, timeout_s=LIMIT_S)


def whole_step(rank: int, world: int, gtp: int, lowering: str, dispatch: str) -> None:
    groups = start(world, gtp)
    plain, make_batch = a_model()
    want = fp64_grads(copy.deepcopy(plain), [make_batch(0, r, "cpu") for r in range(world)])
    inputs = tuple(x.cuda() for x in make_batch(0, rank, "cpu"))
    model = wrapped(plain.cuda(), groups, collectives="symmetric")
    body = gg.compile(model, lowering=lowering, collectives="symmetric")

    def train(*batch: Tensor) -> Tensor:
        loss = body(*batch)
        loss.backward()
        return loss.detach()

    driver = Watching(model)
    run = gg.capture(train, model, dispatch=dispatch, driver=driver)
    for repeat in range(4):
        assert max_error(step(model, run, *inputs), want) < BAR, repeat
        planned = [o for r in body.plan.regions for o in r.occurrences]
        assert uses(model.reports) == uses(planned)
    assert driver.clean == [True]
    model.close()


def test_one_graph_holds_the_whole_step_of_an_inductor_region() -> None:
    run_ranks(whole_step, 2, 2, "inductor", "in_graph", timeout_s=LIMIT_S)


def inductor_replays(rank: int, world: int, gtp: int) -> None:
    groups = start(world, gtp)
    plain, make_batch = a_model()
    want = fp64_grads(copy.deepcopy(plain), [make_batch(0, r, "cpu") for r in range(world)])
    inputs = tuple(x.cuda() for x in make_batch(0, rank, "cpu"))
    model = wrapped(plain.cuda(), groups, collectives="symmetric")
    call = gg.compile(
        model, lowering="inductor", collectives="symmetric", replay="cuda", dispatch="event"
    )
    for repeat in range(4):
        assert max_error(step(model, call, *inputs), want) < BAR, repeat
        planned = [o for r in call.plan.regions for o in r.occurrences]
        assert uses(model.reports) == uses(planned)
    model.close()


def test_inductor_regions_replay_on_four_ranks() -> None:
    run_ranks(inductor_replays, 4, 2, timeout_s=LIMIT_S)


def eager_on_gpu(rank: int, world: int, gtp: int) -> None:
    """Eager Python over gloo with CUDA tensors, its buckets through symmetric memory."""
    groups = start(world, gtp)
    plain, make_batch = a_model()
    want = fp64_grads(copy.deepcopy(plain), [make_batch(0, r, "cpu") for r in range(world)])
    inputs = tuple(x.cuda() for x in make_batch(0, rank, "cpu"))
    for wrap in ({}, {"reduce": "all_reduce"}):
        model = wrapped(copy.deepcopy(plain).cuda(), groups, collectives="symmetric", **wrap)
        for _ in range(2):
            model.zero_grad_buffer()
            model(*inputs).backward()
            model.finish_grad_sync()
        got = {name: model.full_grad(name) for name, _ in model.named_weights()}
        assert max_error(got, want) < BAR, wrap
        model.close()


def test_eager_buckets_through_symmetric_memory() -> None:
    run_ranks(eager_on_gpu, 4, 2, timeout_s=LIMIT_S)
