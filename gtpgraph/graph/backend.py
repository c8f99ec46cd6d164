"""The torch.compile backend, and :func:`compile`, the few lines that most people need.

In: graphs captured by Dynamo. Out: compiled regions whose plan can be printed before a step.
A graph without a trainable wrapped weight is lowered as it is: it has nothing to report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from gtpgraph import compat
from gtpgraph.graph.assemble import assemble_plan
from gtpgraph.graph.builder import RegionBuilder, weights_of
from gtpgraph.graph.capture import cuda_driver
from gtpgraph.graph.chains import check_patterns
from gtpgraph.graph.driver import Driver
from gtpgraph.graph.lower import LOWERINGS
from gtpgraph.graph.options import CompileOptions
from gtpgraph.graph.pinning import pin_weights
from gtpgraph.graph.plan import HookPlan
from gtpgraph.graph.region import Region
from gtpgraph.parallel.data_dependence import refuse_expert_loops, watch_data_breaks
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.ready import Report
from gtpgraph.parallel.weights import WeightState
from gtpgraph.passes.gather_once import gather_once_pass


def gtpgraph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    owner: object = None,
    driver: Driver | None = None,
) -> Callable[..., Any]:
    """Backend of ``torch.compile(model, backend="gtpgraph", options={...})``.

    Args:
        gm: a graph captured by Dynamo.
        example_inputs: its inputs.
        options: fields of `CompileOptions`: lowering, ungraphed, reshard_after_forward,
            reduces_in_flight, coalesce, collectives, and those of replay.
        owner: whom the region belongs to, for callers that compile one wrapper several times.
        driver: the graph runtime for replay; None for CUDA.

    Raises:
        ValueError: an unknown option, or trainable weights that no wrapper owns.
        NotImplementedError: experts are gathered as a rank's data says.
    """
    chosen = _options(options)
    states = weights_of(gm)
    pin_weights(gm, states)
    if not states:
        return _plain(gm, example_inputs, chosen)
    refuse_expert_loops((s.fqn, s.spec) for s in states.values() if s.spec is not None)
    gather_once_pass(gm, weights=[p for p, s in states.items() if s.spec and s.spec.is_stacked])
    builder = RegionBuilder(states, chosen, owner, driver or _driver(states, chosen))
    return LOWERINGS[chosen.lowering](gm, example_inputs, builder)


def _driver(states: Mapping[int, WeightState], options: CompileOptions) -> Driver | None:
    wrapper = next(iter(states.values())).wrapper()
    if options.replay is None or wrapper is None:
        return None
    return wrapper.graph_driver(lambda: cuda_driver(wrapper, "gtpgraph.compile"))


def _plain(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions
) -> Callable[..., Any]:
    if options.lowering == "inductor":
        return compat.plain_inductor(gm, inputs)
    return gm.forward


def _options(options: Mapping[str, Any] | None) -> CompileOptions:
    values = dict(options or {})
    known = CompileOptions.__dataclass_fields__
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"gtpgraph backend: expected options among {sorted(known)}, got {unknown}."
        )
    if not isinstance(values.get("ungraphed", ()), str):
        values["ungraphed"] = tuple(values.get("ungraphed", ()))
    chosen = CompileOptions(**values)
    chosen.check()
    return chosen


def compile(
    model: nn.Module,
    *,
    lowering: str = "inductor",
    ungraphed: Sequence[str] = (),
    reshard_after_forward: bool = True,
    reduces_in_flight: int = 1,
    coalesce: bool = False,
    fuse: bool | None = None,
    collectives: str = "functional",
    replay: str | None = None,
    dispatch: str = "event",
    max_captures: int = 8,
    max_in_flight: int = 4,
    wgrads_in_flight: int = 2,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    driver: Driver | None = None,
) -> CompiledModel:
    """Compile a wrapped model for graph replay, with readiness inside its backward graphs.

    Args:
        model: a :class:`DistributedDataParallel`, or a module that holds exactly one.
        lowering: "inductor" (kernels) or "eager" (FX runs the graphs; bit-exact).
        ungraphed: fnmatch patterns over FQNs of weights that eager Python finalises.
        reshard_after_forward: gather weights again in the backward rather than keep them.
        reduces_in_flight: GTP reductions in flight before the oldest is waited for.
        coalesce: sum a weight's contributions in a region before one reduction and one report:
            fewer collectives for more memory.
        fuse: join each wgrad GEMM with its accumulate, and small accumulates with each other:
            fewer launches and bytes on a GPU, and no rounding of the wgrad between the two. Reports
            of joined weights follow the joint accumulate. None: in Inductor's lowering on CUDA.
        collectives: "functional" gathers and reduces GTP weights through the process group;
            "symmetric" with kernels over symmetric memory of one machine's GPUs, which a CUDA graph
            can hold. Its buffers are made with the first region that is compiled, a collective over
            each GTP group; nothing is then in flight, so `reduces_in_flight` has no effect. Norms
            and biases leave with their buckets: give the wrapper the same option.
        replay: "cuda" captures each region's forward and backward as CUDA graphs in their second
            call and replays them from then on; None runs them.
        dispatch: of a replay: "event" starts a bucket's reduction when its last accumulate has run,
            in the middle of the replay; "after" when the replay has ended (a baseline); "in_graph"
            captures the reductions too, for groups whose collectives a CUDA graph can hold.
        max_captures: input shapes captured per region; others run uncaptured, which is said once.
        max_in_flight: captured forwards of a region, per shape, whose backward has not run; others
            run uncaptured. Each keeps its activations in memory of its own.
        wgrads_in_flight: of a captured graph: how many accumulates (and the wgrad GEMMs fused with
            them) may run beside the chain of activation gradients before that waits for the oldest;
            Inductor keeps their operands up to twice as long, captured or not. 0: all in the chain.
        fullgraph: refuse graph breaks.
        dynamic: as in torch.compile.
        driver: the graph runtime for replay; None for CUDA.

    Raises:
        ValueError: no wrapper in the model, a pattern that matches no weight, a bad option.
    """
    options: dict[str, Any] = {
        "lowering": lowering,
        "ungraphed": ungraphed,
        "reshard_after_forward": reshard_after_forward,
        "reduces_in_flight": reduces_in_flight,
        "coalesce": coalesce,
        "fuse": fuse,
        "collectives": collectives,
        "replay": replay,
        "dispatch": dispatch,
        "max_captures": max_captures,
        "max_in_flight": max_in_flight,
        "wgrads_in_flight": wgrads_in_flight,
    }
    return CompiledModel(model, options, fullgraph=fullgraph, dynamic=dynamic, driver=driver)


def wrapper_of(module: nn.Module | Callable[..., Any]) -> DistributedDataParallel:
    """The one data-parallel wrapper in a module (compiled or not).

    Raises:
        ValueError: none, or more than one.
    """
    root = getattr(module, "_orig_mod", module)
    found = (
        [m for m in root.modules() if isinstance(m, DistributedDataParallel)]
        if isinstance(root, nn.Module)
        else []
    )
    if len(found) != 1:
        raise ValueError(
            f"expected a module that holds one gtpgraph.DistributedDataParallel, got {len(found)} "
            f"in a {type(root).__name__}. Wrap the model: "
            "gtpgraph.DistributedDataParallel(gtpgraph.shard(model, groups), groups)."
        )
    return found[0]


class CompiledModel:
    """A compiled model: call it like the model; `plan` is what it will report."""

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.model = model
        self.wrapper = wrapper_of(model)
        self.options = _options(options)
        if self.options.replay == "cuda" and driver is None:
            cuda_driver(self.wrapper, "gtpgraph.compile")
        names = [f for s in self.wrapper.states for f in s.fqns]
        check_patterns(self.options.ungraphed, names)

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return gtpgraph(gm, inputs, options=options, owner=self, driver=driver)

        self._compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. A first call that compiles one graph and breaks none declares that
        nothing of the model runs eagerly, so that its first step can overlap."""
        known, breaks = len(self.wrapper.regions), compat.num_graph_breaks()
        with watch_data_breaks():
            result = self._compiled(*args, **kwargs)
        new = self.wrapper.regions[known:]
        if len(new) == 1 and compat.num_graph_breaks() == breaks:
            new[0].calls.whole_model = self.model is self.wrapper
        return result

    @property
    def regions(self) -> list[Region]:
        """Regions that this object has compiled, in order."""
        return [r for r in self.wrapper.regions if r.owner is self]

    @property
    def reports(self) -> list[Report]:
        """The wrapper's reports of the last synchronised step."""
        return self.wrapper.reports

    @property
    def plan(self) -> HookPlan:
        """The hook plan.

        Raises:
            RuntimeError: nothing has been compiled yet (call the model, or `gtpgraph.inspect`).
        """
        return assemble_plan(self.wrapper, self.regions, self.options.lowering)


def plan_of(compiled: Any) -> HookPlan:
    """The plan of a `CompiledModel`, or of what ``torch.compile(model, backend="gtpgraph")`` gave.

    Raises:
        ValueError: the module holds no wrapper. RuntimeError: nothing has been compiled yet.
    """
    if isinstance(compiled, CompiledModel):
        return compiled.plan
    wrapper = wrapper_of(compiled)
    lowerings = {r.lowering for r in wrapper.regions}
    return assemble_plan(wrapper, wrapper.regions, ",".join(sorted(lowerings)))


def inspect(model: nn.Module | CompiledModel, *batch: Any, **kwargs: Any) -> HookPlan:
    """The plan of a model for a batch, without running a step.

    Compiles with the eager lowering unless `model` is compiled already, and runs one forward whose
    effects (buffers, RNG state, reports owed) are undone. Gradients are not touched.
    """
    compiled = model if isinstance(model, CompiledModel) else compile(model, lowering="eager")
    wrapper = compiled.wrapper
    buffers = [(b, b.detach().clone()) for b in wrapper.buffers()]
    with torch.random.fork_rng(), torch.enable_grad():
        compiled(*batch, **kwargs)
    with torch.no_grad():
        for buffer, saved in buffers:
            buffer.copy_(saved)
    for region in compiled.regions:
        wrapper.ledger.forget_forward(region.calls)
    return compiled.plan
