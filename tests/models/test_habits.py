"""What users do to a model between building and stepping it, compiled by FX, against plain PyTorch.

Each habit is checked for gradients first, then for counts: every report is an occurrence of the
plan or an eager one, and a weight reports as often as autograd's backward reaches one of its uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtpgraph
from gtpgraph.by_path import module_at
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.testing import RankPool, fp64_grads, max_error

h = module_at(
    "gtpgraph_case_helpers", str(Path(__file__).resolve().parents[1] / "cases" / "helpers.py")
)
FX = {"lowering": "eager"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def checked_steps(
    ddp: DistributedDataParallel, call: Any, plain: nn.Module, *batch: Any, steps: int = 2
) -> dict[str, int]:
    """Steps with gradients as plain PyTorch's in fp64; reports by weight of the last one."""
    expected = fp64_grads(plain, [batch])
    for _ in range(steps):
        h.step(ddp, call, *batch)
        assert max_error(h.full_grads(ddp), expected) <= h.SUM_ORDER_BAR
        regional = [t for t in h.told(ddp.reports) if t[2] is not None]
        planned = {(o.weight, o.use, r.name) for r in ddp.regions for o in r.plan.occurrences}
        assert set(regional) <= planned
    return h.counts(ddp.reports)  # type: ignore[no-any-return]


class Broken(nn.Module):
    """Three pieces with graph breaks between; `tied` is used in the first and in the last."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        x = self.norm(torch.tanh(self.middle(x)))
        torch._dynamo.graph_break()
        return self.last(self.norm(x)).square().mean()


class TestGraphBreaks:
    def test_a_weight_with_sites_in_two_regions(self) -> None:
        model = Broken()
        plain, ddp = copy.deepcopy(model), h.wrap(model, bucket_mb=0.0005)
        compiled = gtpgraph.compile(ddp, **FX)
        counts = checked_steps(ddp, compiled, plain, h.batch_of(0), steps=3)
        plan = compiled.plan
        assert len(plan.regions) == 3
        assert counts == plan.ready_counts
        assert counts["first.weight"] == 2 and counts["norm.weight"] == 2
        assert {r.region for r in ddp.reports if r.weight == "first.weight"} == {
            plan.regions[0].name,
            plan.regions[2].name,
        }

    def test_a_weight_with_sites_in_a_region_and_in_eager_code(self) -> None:
        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

            @torch._dynamo.disable
            def outside(self, x: Tensor) -> Tensor:
                return torch.tanh(self.a(x))

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.outside(torch.tanh(self.a(x)))).square().mean()

        model = Half()
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        compiled = gtpgraph.compile(ddp, **FX)
        counts = checked_steps(ddp, compiled, plain, h.batch_of(0), steps=3)
        assert counts["a.weight"] == 2 and counts == compiled.plan.ready_counts
        assert len({r.region for r in ddp.reports if r.weight == "a.weight"}) == 2

    def test_a_gathered_weight_carried_across_a_break(self) -> None:
        class Carried(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(8, 8, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                weight = self.a.weight
                x = F.linear(x, weight)
                torch._dynamo.graph_break()
                return F.linear(torch.tanh(x), weight).square().mean()

        model = Carried()
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        counts = checked_steps(ddp, gtpgraph.compile(ddp, **FX), plain, h.batch_of(0))
        assert counts == {"a.weight": 1}  # one gather is one use


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self, num: int, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


class TestRegionalCompile:
    def test_equal_blocks_are_told_apart(self) -> None:
        """Dynamo would reuse the second block's graph for the third: same code, same shapes. The
        number is beyond its limit of recompilations, which counts for each block by itself."""
        model = Blocks(11)
        plain, ddp = copy.deepcopy(model), h.wrap(model, bucket_mb=0.001)
        for block in model.blocks:
            h.compile_part(block)
        counts = checked_steps(ddp, ddp, plain, h.batch_of(0))
        assert set(counts.values()) == {1} and len(ddp.regions) == 11
        assert all(r.region is not None for r in ddp.reports)

    def test_a_compiled_function_that_takes_the_block(self) -> None:
        call = torch.compile(lambda block, x: block(x), backend="gtpgraph", options=FX)
        plain = Blocks(3)
        model = Blocks(3, call)
        model.load_state_dict(plain.state_dict())
        ddp = h.wrap(model)
        counts = checked_steps(ddp, ddp, plain, h.batch_of(0))
        assert set(counts.values()) == {1} and len(ddp.regions) == 3

    def test_a_block_called_many_times(self) -> None:
        class Loop(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(5):
                    x = self.block(x)
                return x.square().mean()

        model = Loop()
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        h.compile_part(model.block)
        x = h.batch_of(0).requires_grad_()  # as inside a model: one graph for all calls
        counts = checked_steps(ddp, ddp, plain, x)
        assert set(counts.values()) == {5} and len(ddp.regions) == 1
        assert gtpgraph.plan_of(ddp).ready_counts == counts


class TestShapes:
    def test_dynamic_batch_sizes_share_one_region(self) -> None:
        model = Blocks(2)
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        compiled = gtpgraph.compile(ddp, dynamic=True, **FX)
        for rows in (4, 7, 5):
            x = h.batch_of(0, rows=rows)
            assert set(checked_steps(ddp, compiled, plain, x, steps=1).values()) == {1}
        assert len(compiled.regions) == 1

    def test_a_new_shape_compiles_again_and_counts_stay(self) -> None:
        model = Blocks(2)
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        compiled = gtpgraph.compile(ddp, dynamic=False, **FX)
        for rows in (4, 7, 4, 7):
            x = h.batch_of(0, rows=rows)
            assert set(checked_steps(ddp, compiled, plain, x, steps=1).values()) == {1}
        assert len(compiled.regions) == 2
        assert set(compiled.plan.ready_counts.values()) == {1}


class Casting(nn.Module):
    """A body under autocast bf16 where `dtype` says so, each block under a checkpoint if asked."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.checkpointed, self.casting = checkpointed, True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casting):
            for block in self.blocks:
                if self.checkpointed:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def run_autocast(rank: int, world: int, checkpointed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Casting(checkpointed)
    batches = [h.batch_of(r, width=16) for r in range(world)]
    cast = fp64_grads(model, [(b,) for b in batches], torch.float32)
    model.casting = False
    exact = fp64_grads(model, [(b,) for b in batches])
    model.casting = True
    ddp = h.wrap(model, world, world)
    compiled = gtpgraph.compile(ddp, **FX)
    for _ in range(2):
        h.step(ddp, compiled, batches[rank])
    (region,) = compiled.regions
    return {
        "error": max_error(h.full_grads(ddp), exact),
        "budget": max_error({n: g.double() for n, g in cast.items()}, exact),
        "counts": h.counts(ddp.reports),
        "gathers": region.texts["after"].count("all_gather_into_tensor.default]"),
    }


@pytest.mark.dist
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_are_gathered_again_under_autocast(ranks2: RankPool, checkpointed: bool) -> None:
    """One gather in the backward for each of the three weights, for the norm in front of each
    wants a gradient; were the bf16 cast saved instead, there would be none."""
    for got in ranks2.run(run_autocast, checkpointed):
        assert got["error"] <= 2 * got["budget"], got
        assert set(got["counts"].values()) == {1}
        assert got["gathers"] == 3, got


class TestFreezing:
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_weight_frozen_between_steps_owes_nothing(self, compiled: bool) -> None:
        """requires_grad counts as it is when a step starts; a frozen weight's bucket does not wait
        for it, its main_grad ends as zeros and its siblings' are right."""
        model = Blocks(2)
        plain, ddp = copy.deepcopy(model), h.wrap(model, bucket_mb=1.0)
        call = gtpgraph.compile(ddp, **FX) if compiled else ddp
        seen, x = h.Departures(ddp), h.batch_of(0)
        everything = checked_steps(ddp, call, plain, x)
        for module in (model, plain):
            module.blocks[0].linear.requires_grad_(False)
        for _ in range(2):
            seen.take()
            h.step(ddp, call, x)
            expected = fp64_grads(plain, [(x,)])
            grads = h.full_grads(ddp)
            frozen = {n: g for n, g in grads.items() if n not in expected}
            assert len(frozen) == 2 and all(g.count_nonzero() == 0 for g in frozen.values())
            assert max_error({n: grads[n] for n in expected}, expected) <= h.SUM_ORDER_BAR
            assert h.counts(ddp.reports) == {n: 1 for n in expected}
        assert [inside for _, _, inside in seen.take()] == [True] * len(ddp.buckets)
        for module in (model, plain):
            module.blocks[0].linear.requires_grad_(True)
        assert checked_steps(ddp, call, plain, x) == everything

    def test_the_optimizer_leaves_a_frozen_weight_alone(self) -> None:
        from gtpgraph.parallel.optimizer import DistributedOptimizer

        model = Blocks(2)
        ddp = h.wrap(model)
        optimizer = DistributedOptimizer(torch.optim.AdamW, ddp, lr=0.1, weight_decay=0.5)
        h.step(ddp, ddp, h.batch_of(0))
        optimizer.step()  # the weight has momentum now
        linear = model.blocks[0].linear.requires_grad_(False)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        h.step(ddp, ddp, h.batch_of(0))
        optimizer.step()
        for name, param in model.named_parameters():
            moved = not torch.equal(param, before[name])
            assert moved is not any(param is p for p in linear.parameters()), name

    def test_a_weight_that_was_frozen_when_wrapped_cannot_be_thawed(self) -> None:
        model = Blocks(2)
        model.blocks[1].requires_grad_(False)
        ddp = h.wrap(model)
        h.step(ddp, ddp, h.batch_of(0))
        model.blocks[1].linear.requires_grad_(True)
        text = h.error_of(ddp.zero_grad_buffer)
        assert text.startswith("RuntimeError") and "blocks.1.linear.weight" in text


class TestArguments:
    def test_a_weight_passed_to_a_compiled_function(self) -> None:
        """A gathered weight as an argument: its gather is eager, and so is its report."""
        project = torch.compile(
            lambda x, w, b: torch.tanh(F.linear(x, w, b)), backend="gtpgraph", options=FX
        )

        class Passes(nn.Module):
            def __init__(self, project: Any) -> None:
                super().__init__()
                self.a, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
                self.project = project

            def forward(self, x: Tensor) -> Tensor:
                y = self.project(self.norm(x), self.a.weight, self.a.bias)
                return self.project(y, self.a.weight, self.a.bias).square().mean()

        plain = Passes(lambda x, w, b: torch.tanh(F.linear(x, w, b)))
        model = Passes(project)
        model.load_state_dict(plain.state_dict())
        ddp = h.wrap(model)
        counts = checked_steps(ddp, ddp, plain, h.batch_of(0))
        assert counts == {"a.weight": 2, "a.bias": 2, "norm.weight": 1, "norm.bias": 1}

    def test_two_models_of_one_process_interleave(self) -> None:
        models = [Blocks(2), Blocks(2)]
        plains = [copy.deepcopy(m) for m in models]
        wrappers = [h.wrap(m) for m in models]
        calls = [gtpgraph.compile(w, **FX) for w in wrappers]
        x = h.batch_of(0)
        for _ in range(2):
            for ddp in wrappers:
                ddp.zero_grad_buffer()
            losses = [call(x) for call in calls]
            for loss in reversed(losses):
                loss.backward()
            for ddp, plain in zip(wrappers, plains, strict=True):
                ddp.finish_grad_sync()
                assert h.error_from_plain(ddp, plain, x) <= h.SUM_ORDER_BAR
                assert set(h.counts(ddp.reports).values()) == {1}
        assert calls[0].plan.hash == calls[1].plan.hash


def run_two_groupings(rank: int, world: int) -> list[float]:
    """One model over gtp, another over dp, on the same ranks and in one backward."""
    torch.manual_seed(0)
    models = [Blocks(2), Blocks(2)]
    batches = [h.batch_of(r) for r in range(world)]
    expected = [fp64_grads(m, [(b,) for b in batches]) for m in models]
    wrappers = [h.wrap(models[0], world, world), h.wrap(models[1], world, 1)]
    calls = [gtpgraph.compile(w, **FX) for w in wrappers]
    for _ in range(2):
        for ddp in wrappers:
            ddp.zero_grad_buffer()
        (calls[0](batches[rank]) + calls[1](batches[rank])).backward()
        for ddp in wrappers:
            ddp.finish_grad_sync()
    return [
        max_error(h.full_grads(ddp), want) for ddp, want in zip(wrappers, expected, strict=True)
    ]


@pytest.mark.dist
def test_two_models_over_two_sets_of_groups(ranks2: RankPool) -> None:
    for errors in ranks2.run(run_two_groupings):
        assert max(errors) <= h.SUM_ORDER_BAR


class TestLateHooks:
    """Hooks added after the first step. Gradients and reports stay right; what a hook sees differs:
    a finalised gradient is no longer there, and `set_ready_hook` is the way to hear of it."""

    @pytest.mark.parametrize("compiled", [False, True])
    def test_tensor_hooks_see_none_where_the_gradient_is_finalised(self, compiled: bool) -> None:
        model = Blocks(1)
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        call = gtpgraph.compile(ddp, **FX) if compiled else ddp
        checked_steps(ddp, call, plain, h.batch_of(0))
        seen: dict[str, list[bool]] = {}
        for name, param in ddp.named_weights():
            param.register_hook(lambda g, name=name: seen.setdefault(name, []).append(g is None))
        counts = checked_steps(ddp, call, plain, h.batch_of(0), steps=1)
        assert set(counts.values()) == {1}
        inside = ddp.named_weights() if compiled else [("blocks.0.linear.weight", None)]
        for name, _ in inside:
            assert seen[name] == [True], name

    @pytest.mark.parametrize("compiled", [False, True])
    def test_module_hooks_do_not_disturb(self, compiled: bool) -> None:
        model = Blocks(2)
        plain, ddp = copy.deepcopy(model), h.wrap(model)
        call = gtpgraph.compile(ddp, **FX) if compiled else ddp
        checked_steps(ddp, call, plain, h.batch_of(0))
        seen: list[str] = []
        block = model.blocks[0]
        block.register_forward_hook(lambda *_: seen.append("forward"))
        block.register_full_backward_hook(lambda *_: seen.append("backward"))
        checked_steps(ddp, call, plain, h.batch_of(0), steps=1)
        # Like any compiled module, one that has been compiled does not look for new hooks.
        assert seen == ([] if compiled else ["forward", "backward"])
