"""The fence of a bucket where there is no CUDA: marks are kept and cleared, and nothing waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtpgraph as gg
from gtpgraph.parallel.streams import Fence

CPU = torch.device("cpu")


def test_a_fence_on_the_cpu_is_inert() -> None:
    fence = Fence(CPU)
    assert not fence.active
    fence.wrote()
    entered = False
    with fence.reducing():
        entered = True
    fence.join()
    assert entered and fence._own == {} and fence._used == {} and fence._done is None


def test_events_given_to_it_are_waited_for_by_nobody_and_forgotten() -> None:
    """A replay's events may be of any kind here: none of their methods is called."""
    fence = Fence(CPU)
    fence.wrote_at(object())  # type: ignore[arg-type]
    with fence.reducing():
        assert len(fence._given) == 1, "kept while the reduction may need it"
    fence.join()
    assert fence._given == []
    fence.join()  # twice is once


def test_a_fence_on_cuda_is_active() -> None:
    """The one decision that is made from the device; no CUDA call is made by it."""
    assert Fence(torch.device("cuda")).active


class Notes:
    """A reduction that notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []

    def start(self, flat: Tensor) -> None:
        self.seen.append(("start", flat.clone()))

    def finish(self, flat: Tensor) -> None:
        self.seen.append(("finish", flat.clone()))


def test_k27_a_reduction_reads_what_every_writer_wrote() -> None:
    """On a CPU all is in order already: two adds, of a GTP and an ordinary weight, then it goes."""
    model = gg.DistributedDataParallel(gg.shard(nn.Linear(4, 4)))
    (bucket,) = model.buckets
    bucket.reduction = notes = Notes()
    model.zero_grad_buffer()
    notes.seen.clear()
    for member, value in zip(bucket.members, (3.0, 2.0), strict=True):
        bucket.add(member, torch.ones(member.shape), value)
    bucket.fence.wrote_at(object())  # type: ignore[arg-type]
    bucket.start_reduce()
    bucket.wait_reduce()
    assert [what for what, _ in notes.seen] == ["start", "finish"]
    for member, value in zip(bucket.members, (3.0, 2.0), strict=True):
        assert (bucket.view(member) == value).all()
        assert torch.equal(notes.seen[0][1], bucket.flat)
    model.close()


def test_steps_leave_no_events_behind() -> None:
    model = gg.DistributedDataParallel(gg.shard(nn.Linear(4, 4)))
    for _ in range(3):
        model.zero_grad_buffer()
        model(torch.ones(2, 4)).sum().backward()
        for bucket in model.buckets:
            bucket.fence.wrote_at(object())  # type: ignore[arg-type]
        model.finish_grad_sync()
        assert all(b.fence._given == [] for b in model.buckets)
    model.close()


class Event:
    """Stands for a CUDA event: knows on which stream it was recorded."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def record(self, stream: object) -> None:
        self.streams.append(stream)


def test_settled_writes_have_their_events_and_are_not_marked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is launched next on the writer's stream is no longer waited for."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    fence = Fence(torch.device("cpu"))
    fence._used = {7: "writer", 8: "other"}  # type: ignore[dict-item]
    fence.settle()
    assert [e.streams for e in fence._given] == [["writer"], ["other"]]  # type: ignore[attr-defined]
    assert fence._used == {}
    fence.settle()
    assert len(fence._given) == 2
