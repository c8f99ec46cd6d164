"""The rules V01 to V09: a good graph keeps all of them, and each break trips exactly one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

from gtpgraph.by_path import module_at
from gtpgraph.graph.checked import Checked
from gtpgraph.graph.verify import RULES, first_difference, verify, violations
from gtpgraph.passes.grad_ready import ACCUMULATE, BUCKET_REDUCE, GRAD_READY, SHARD_REDUCE
from gtpgraph.passes.lower_collectives import ALL_GATHER, EXCHANGE, REDUCE_SCATTER, WAIT
from gtpgraph.passes.snapshot import Snapshot

t = module_at("gtpgraph_graph_tools", str(Path(__file__).parent / "graph_tools.py"))


class Net(nn.Module):
    """A used twice, a norm, an UNGRAPHED layer (B), and an input that wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(self.a(x).relu()))
        return self.c(self.b(h)).square().mean()


@pytest.fixture(scope="module")
def good() -> Checked:
    """The checked backward of `Net` on rank 0 of gtp 2 x dp 2."""
    with t.fake_ranks(2, 2) as groups:
        x = torch.randn(4, 8, requires_grad=True)
        c = t.compiled(Net(), x, groups=groups, ungraphed=["b.*"])
    (checked,) = c.checked
    return replace(checked, peers={0: "a\nb", 1: "a\nb"})


def rules(checked: Checked) -> set[str]:
    return {line.partition(":")[0] for line in violations(checked)}


def find(g: Checked, target: object, weight: str | None = None) -> list[fx.Node]:
    nodes = t.targets(g.graph, target)
    if weight is not None:
        nodes = [n for n in nodes if (w := g.weight_at(n)) and w.fqn == weight]
    return nodes


def erase(g: Checked, accumulate: fx.Node) -> None:
    """Remove an accumulate with its grad_ready, tokens bridged."""
    before = accumulate.kwargs.get("after")
    for ready in [u for u in accumulate.users if u.target is GRAD_READY]:
        for user in list(ready.users):
            kwargs = {k: v for k, v in user.kwargs.items() if k != "after"}
            user.kwargs = {**kwargs, **({"after": before} if before is not None else {})}
        g.graph.erase_node(ready)
    g.graph.erase_node(accumulate)


Break = Callable[[Checked], Checked | None]
BREAKS: list[tuple[str, str, Break]] = []


def breaks(rule: str) -> Callable[[Break], Break]:
    def add(function: Break) -> Break:
        BREAKS.append((rule, function.__name__, function))
        return function

    return add


def set_arg(node: fx.Node, position: int, value: object) -> None:
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


@breaks("V01")
def contribution_without_accumulate(g: Checked) -> None:
    erase(g, find(g, ACCUMULATE, "c.weight")[0])


@breaks("V01")
def contributions_of_two_weights_swapped(g: Checked) -> None:
    one, two = find(g, ACCUMULATE, "norm.weight")[0], find(g, ACCUMULATE, "norm.bias")[0]
    mine, other = one.args[1], two.args[1]
    set_arg(one, 1, other), set_arg(two, 1, mine)


@breaks("V01")
def one_contribution_twice_and_the_other_never(g: Checked) -> None:
    first, second = find(g, ACCUMULATE, "a.weight")
    set_arg(second, 1, first.args[1])


@breaks("V01")
def later_contribution_stores(g: Checked) -> None:
    set_arg(find(g, ACCUMULATE, "a.weight")[1], 6, True)


@breaks("V01")
def first_contribution_adds(g: Checked) -> None:
    set_arg(find(g, ACCUMULATE, "c.weight")[0], 6, False)


@breaks("V01")
def gradient_also_returned(g: Checked) -> None:
    output = g.graph.output_node()
    (accumulate,) = find(g, ACCUMULATE, "norm.bias")
    output.args = ((*output.args[0], accumulate.args[1]),)
    position = next(w.position for w in g.weights if w.fqn == "norm.bias")
    desc = GradAOTOutput(grad_of=PlainAOTInput(idx=position))
    output.meta["desc"] = [*output.meta["desc"], desc]


@breaks("V02")
def accumulate_without_report(g: Checked) -> None:
    ready = find(g, GRAD_READY)[-1]
    ready.replace_all_uses_with(ready.args[2])
    g.graph.erase_node(ready)


@breaks("V02")
def accumulate_reported_twice(g: Checked) -> None:
    ready = find(g, GRAD_READY)[0]
    with g.graph.inserting_after(ready):
        g.graph.call_function(GRAD_READY, ready.args)


@breaks("V02")
def report_before_its_accumulate(g: Checked) -> None:
    """It depends on the token before: nothing holds it behind its own accumulate."""
    accumulate = find(g, ACCUMULATE)[-1]
    (ready,) = (u for u in accumulate.users if u.target is GRAD_READY)
    set_arg(ready, 2, accumulate.kwargs["after"])


@breaks("V02")
def reports_of_two_weights_swapped(g: Checked) -> None:
    by_weight = {g.weight_at(n).fqn: n for n in find(g, ACCUMULATE)}
    one, two = (
        next(u for u in by_weight[w].users if u.target is GRAD_READY)
        for w in ("norm.weight", "norm.bias")
    )
    mine, other = one.args[1], two.args[1]
    set_arg(one, 1, other), set_arg(two, 1, mine)


@breaks("V03")
def reduced_over_another_group(g: Checked) -> None:
    find(g, REDUCE_SCATTER)[0].update_arg(3, "another")


@breaks("V03")
def not_reduced_at_all(g: Checked) -> None:
    """One rank's own wgrad goes to main_grad."""
    (accumulate,) = find(g, ACCUMULATE, "c.weight")
    wait = accumulate.args[1]
    launch = wait.args[0]
    set_arg(accumulate, 1, launch.args[0])
    g.graph.erase_node(wait), g.graph.erase_node(launch)


@breaks("V03")
def another_scale(g: Checked) -> None:
    set_arg(find(g, ACCUMULATE)[0], 5, 1.0)


@breaks("V03")
def another_slot(g: Checked) -> None:
    """The first contribution would store or add by another weight's flag."""
    set_arg(find(g, ACCUMULATE, "norm.bias")[0], 3, 0)
    set_arg(find(g, ACCUMULATE, "norm.weight")[0], 3, 0)


@breaks("V04")
def ungraphed_weight_in_the_plan(g: Checked) -> Checked:
    stray = replace(g.occurrences[0], site=99, weight="b.weight")
    return replace(g, occurrences=(*g.occurrences, stray))


@breaks("V04")
def occurrence_of_the_other_chain(g: Checked) -> Checked:
    first = replace(g.occurrences[0], chain="UNGRAPHED")
    return replace(g, occurrences=(first, *g.occurrences[1:]))


@breaks("V04")
def ungraphed_contribution_lost(g: Checked) -> Checked:
    return replace(g, extra_outputs=g.extra_outputs - 1)


@breaks("V05")
def plan_lost_a_duplicate(g: Checked) -> Checked:
    """[a, b, a] became [a, b]."""
    last = max(k for k, o in enumerate(g.occurrences) if o.weight == "a.weight")
    return replace(g, occurrences=tuple(o for k, o in enumerate(g.occurrences) if k != last))


@breaks("V05")
def plan_counts_a_use_twice(g: Checked) -> Checked:
    again = next(o for o in g.occurrences if o.weight == "c.weight")
    return replace(g, occurrences=(*g.occurrences, replace(again, site=99)))


def reduce_bucket(g: Checked, number: int, behind: fx.Node | None = None) -> fx.Node:
    """A reduction of a bucket in the graph, behind its last report, or behind a given one."""
    (flat,) = (n for n in g.graph.nodes if n.target == f"main_grad_{number}")
    reports = [n for n in find(g, GRAD_READY) if n.args[0] is flat]
    last = behind or reports[-1]
    with g.graph.inserting_after(last):
        return g.graph.call_function(BUCKET_REDUCE, (flat, number, last))


@breaks("V06")
def bucket_reduced_before_its_last_occurrence(g: Checked) -> None:
    (flat,) = (n for n in g.graph.nodes if n.target == "main_grad_0")
    reduce_bucket(g, 0, next(n for n in find(g, GRAD_READY) if n.args[0] is flat))


@breaks("V06")
def another_bucket_reduced(g: Checked) -> None:
    reduce_bucket(g, 0).update_arg(1, 1)


@breaks("V06")
def main_grad_read_by_something_else(g: Checked) -> None:
    (flat,) = (n for n in g.graph.nodes if n.target == "main_grad_1")
    with g.graph.inserting_after(find(g, GRAD_READY)[0]):
        g.graph.call_function(torch.ops.aten.mul.Tensor, (flat, 2.0))


@breaks("V07")
def gather_read_before_its_wait(g: Checked) -> None:
    launch = find(g, ALL_GATHER)[0]
    (wait,) = launch.users
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, launch)


@breaks("V07")
def gather_never_waited_for(g: Checked) -> None:
    launch = find(g, ALL_GATHER)[0]
    (wait,) = launch.users
    wait.replace_all_uses_with(launch)
    g.graph.erase_node(wait)


@breaks("V07")
def launch_waited_for_twice(g: Checked) -> None:
    launch = find(g, ALL_GATHER)[0]
    (wait,) = launch.users
    with g.graph.inserting_after(wait):
        g.graph.call_function(WAIT, (launch,))


@breaks("V07")
def wait_for_what_was_never_launched(g: Checked) -> None:
    launch = find(g, ALL_GATHER)[0]
    with g.graph.inserting_before(launch):
        g.graph.call_function(WAIT, launch.args[:1])


@breaks("V07")
def buffer_rewritten_while_a_launch_reads_it(g: Checked) -> None:
    launch = find(g, REDUCE_SCATTER)[0]
    with g.graph.inserting_after(launch):
        g.graph.call_function(torch.ops.aten.mul_.Tensor, (launch.args[0], 0.0))


def rewritten(g: Checked, change: Callable[[fx.Graph, list[int]], None]) -> Checked:
    """Insertion judged anew, on a graph with the weights' gradients and one more output."""
    b = t.Backward()
    x = b.input(4, 4)
    kept = b.call(t.MUL, x, x)
    other = b.call(t.MM, x, x)
    positions = [w.position for w in g.weights]
    grads = {p: b.call(t.MUL, other, x) for p in positions}
    b.returns({**grads, max(positions) + 1: b.call(t.ADD, kept, other)})
    before = Snapshot.of(b.graph)
    output = b.graph.output_node()
    removed = list(range(len(positions)))
    output.args = (tuple(output.args[0][len(positions) :]),)
    output.meta["desc"] = output.meta["desc"][len(positions) :]
    change(b.graph, removed)
    b.graph.eliminate_dead_code()
    return replace(g, inserting=before.against(Snapshot.of(b.graph), removed))


@breaks("V08")
def insertion_replaced_a_computation(g: Checked) -> Checked:
    def change(graph: fx.Graph, removed: list[int]) -> None:
        (mm,) = t.targets(graph, t.MM)
        with graph.inserting_after(mm):
            new = graph.call_function(t.MUL, mm.args)
        new.name  # noqa: B018 - a node of another name takes the place
        mm.replace_all_uses_with(new)

    return rewritten(g, change)


@breaks("V08")
def insertion_changed_an_argument(g: Checked) -> Checked:
    return rewritten(g, lambda graph, _: set_arg(graph.output_node().args[0][0], 1, 2.0))


@breaks("V08")
def insertion_lost_an_activation_gradient(g: Checked) -> Checked:
    def change(graph: fx.Graph, removed: list[int]) -> None:
        graph.output_node().args = ((),)
        graph.output_node().meta["desc"] = []
        removed.append(len(removed))

    return rewritten(g, change)


@breaks("V08")
def insertion_left_a_finalised_output(g: Checked) -> Checked:
    return rewritten(g, lambda _, removed: removed.pop())


@breaks("V08")
def insertion_returned_another_value(g: Checked) -> Checked:
    def change(graph: fx.Graph, removed: list[int]) -> None:
        (mm,), output = t.targets(graph, t.MM), graph.output_node()
        output.args = ((mm, *output.args[0]),)
        output.meta["desc"] = [None, *output.meta["desc"]]

    return rewritten(g, change)


@breaks("V09")
def another_order_on_a_peer(g: Checked) -> Checked:
    return replace(g, peers={0: "a\nb", 1: "b\na"})


def test_the_good_graph_keeps_every_rule(good: Checked) -> None:
    assert violations(good) == []
    assert violations(t.copied(good)) == []
    verify(good, "r0")
    assert [o.weight for o in good.occurrences].count("a.weight") == 2
    assert good.extra_outputs == 1


def test_an_insertion_like_the_real_one_is_good(good: Checked) -> None:
    assert violations(rewritten(good, lambda *_: None)) == []


def test_a_bucket_reduced_behind_its_last_occurrence_is_good(good: Checked) -> None:
    g = t.copied(good)
    reduce_bucket(g, 0), reduce_bucket(g, 1)
    g.graph.lint()
    assert violations(g) == []


@pytest.mark.parametrize(("rule", "name", "break_"), BREAKS, ids=[f"{r}-{n}" for r, n, _ in BREAKS])
def test_each_break_trips_its_rule_alone(
    good: Checked, rule: str, name: str, break_: Break
) -> None:
    g = t.copied(good)
    g = break_(g) or g
    g.graph.lint()
    assert rules(g) == {rule}, violations(g)
    with pytest.raises(RuntimeError, match=f"{rule}: "):
        verify(g, "r0")


def test_every_rule_has_a_break() -> None:
    assert [r.name for r in RULES] == [f"V0{k}" for k in range(1, 10)]
    assert {rule for rule, _, _ in BREAKS} == {r.name for r in RULES}


def test_all_violations_come_in_one_message(good: Checked) -> None:
    g = t.copied(good)
    find(g, REDUCE_SCATTER)[0].update_arg(3, "another")
    set_arg(find(g, ACCUMULATE, "c.weight")[0], 6, False)
    with pytest.raises(RuntimeError, match=r"(?s)region r7: .*2 rule.*V01: .*V03: "):
        verify(g, "r7")


def test_a_16_bit_wire_is_held_to_the_same_rules() -> None:
    """Sums over ranks are made by the accumulate: the same contributions, places and reports."""
    with t.fake_ranks(2, 2) as groups:
        wrap = {"wire_dtype": torch.bfloat16}
        c = t.compiled(Net(), torch.randn(4, 8), groups=groups, wrap=wrap)
    (g,) = c.checked
    assert violations(g) == []
    assert len(find(g, SHARD_REDUCE)) == 4 and len(find(g, ACCUMULATE)) == 2
    for rule, change in {
        "V01": lambda b: set_arg(find(b, SHARD_REDUCE)[0], 6, False),
        "V02": lambda b: set_arg(find(b, GRAD_READY)[-1], 2, find(b, GRAD_READY)[0]),
        "V03": lambda b: find(b, EXCHANGE)[0].update_arg(3, "another"),
        "V07": lambda b: find(b, EXCHANGE)[0].prepend(
            b.graph.call_function(WAIT, (find(b, EXCHANGE)[0].args[0],))
        ),
    }.items():
        broken = t.copied(g)
        change(broken)
        assert rules(broken) == {rule}, violations(broken)


def test_coalesced_uses_owe_one_accumulate_of_all_their_wgrads() -> None:
    with t.fake_ranks(2, 2) as groups:
        c = t.compiled(Net(), torch.randn(4, 8), groups=groups, coalesce=True)
    (g,) = c.checked
    assert violations(g) == []
    assert rules(replace(g, coalesced=False)) == {"V01", "V05"}
    broken = t.copied(g)
    (add,) = [
        n for n in t.targets(broken.graph, t.ADD) if find(broken, REDUCE_SCATTER)[-1] in n.users
    ]
    add.replace_all_uses_with(add.args[0])
    broken.graph.erase_node(add)
    assert rules(broken) == {"V01"}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("a\nb\nc", None),
        ("a\nx\nc", r"step 1 .*rank 0 has \[b\], rank 3 has \[x\]"),
        ("a\nb", r"step 2 .*rank 0 has \[c\], rank 3 has \[nothing\]"),
        ("", r"step 0 .*rank 0 has \[a\], rank 3 has \[nothing\]"),
    ],
)
def test_first_difference(other: str, expected: str | None) -> None:
    found = first_difference({0: "a\nb\nc", 3: other})
    assert found is None if expected is None else re.search(expected, str(found))


def test_collectives_of_the_model_itself_are_no_violation() -> None:
    """A tensor-parallel sum in the forward has its own launch and wait in the backward."""
    import torch.distributed._functional_collectives as funcol

    with t.fake_ranks(2) as groups:

        class Parallel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                h = funcol.all_gather_tensor_autograd(self.a(x), 0, groups.gtp)
                return self.b(h).square().mean()

        c = t.compiled(Parallel(), torch.randn(4, 4), groups=groups)
    (checked,) = c.checked
    launches = t.targets(checked.graph, REDUCE_SCATTER)
    assert len(launches) == 3 and violations(checked) == []
