"""Compile one region: from Dynamo's graph to a `Region`, with the passes in between.

In: a graph captured by Dynamo and the live Parameters among its inputs. Out: lowered forward and
backward callables, wrapped by a `Region` that the wrapper knows. The two lowerings share everything
but the last stage, see `gtpgraph.graph.lower`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from gtpgraph import compat
from gtpgraph.graph.agree import agree_on_order
from gtpgraph.graph.chains import chain_of, check_patterns
from gtpgraph.graph.checked import Checked, Expected
from gtpgraph.graph.driver import Driver
from gtpgraph.graph.occurrences import region_plan
from gtpgraph.graph.options import CompileOptions
from gtpgraph.graph.plan import GRAPHED
from gtpgraph.graph.region import Region, RegionSite, declare_calls
from gtpgraph.graph.replay import RegionReplay
from gtpgraph.graph.sites import (
    GraphWeight,
    Use,
    contributions,
    find_uses,
    grad_outputs,
    is_reduce,
    output_node,
    wgrad_names,
)
from gtpgraph.graph.verify import verify
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.staging import Staging
from gtpgraph.parallel.weights import WeightState, state_of
from gtpgraph.passes.edit import one_recompile
from gtpgraph.passes.grad_ready import BucketInputs, Inserted, Place
from gtpgraph.passes.pipeline import (
    BackwardRequest,
    fuse_backward,
    hold_operands,
    rewrite_backward,
    rewrite_forward,
)
from gtpgraph.passes.regather import regather_pass
from gtpgraph.passes.snapshot import Snapshot


def weights_of(gm: fx.GraphModule) -> dict[int, WeightState]:
    """Trainable wrapped weights among a captured graph's inputs, by input position.

    Raises:
        ValueError: trainable Parameters without main_grad, or weights of two wrappers.
    """
    found: dict[int, WeightState] = {}
    unowned = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for position, node in enumerate(placeholders):
        example = compat.example_of(node)
        if not (isinstance(example, nn.Parameter) and example.requires_grad):
            continue
        state = state_of(example)
        if state is None:
            unowned.append(f"{node.name} {tuple(example.shape)}")
        else:
            found[position] = state
    if unowned:
        raise ValueError(
            "gtpgraph backend: expected trainable weights with main_grad, got none for "
            + ", ".join(unowned[:8])
            + ". Wrap the model first: gtpgraph.DistributedDataParallel(gtpgraph.shard(model))."
        )
    wrappers = {id(state.wrapper()) for state in found.values()}
    if len(wrappers) > 1:
        raise ValueError(
            "gtpgraph backend: expected one region to hold the weights of one wrapper, got "
            f"{len(wrappers)} wrappers in one graph. Compile each wrapped model by itself."
        )
    return found


class RegionBuilder:
    """State of one region's compilation, between the callbacks of a lowering."""

    def __init__(
        self,
        states: dict[int, WeightState],
        options: CompileOptions,
        owner: object = None,
        driver: Driver | None = None,
    ) -> None:
        wrapper = next(iter(states.values())).wrapper()
        assert wrapper is not None
        self.wrapper: DistributedDataParallel = wrapper
        self.options = options
        self.owner = owner
        self.region: Region | None = None
        self._states = states
        self._weights = {
            p: GraphWeight(s.index, s.fqn, s.spec is not None) for p, s in states.items()
        }
        self._uses: dict[int, tuple[Use, ...]] = {}
        self._owed: Counter[int] = Counter()
        self._wgrads: dict[int, tuple[str, ...]] = {}
        self.driver = driver
        self._num_saved = 0
        self.forward_staging: list[Tensor] = []
        self.forward_fakes: list[Tensor] = []
        self._staging: Staging | None = None
        if options.collectives == "symmetric":
            self._staging = wrapper.region_staging()
        check_patterns(options.ungraphed, [f for s in wrapper.states for f in s.fqns])

    @property
    def holds_operands(self) -> bool:
        """Whether the backward is lowered so that operands of accumulates last (Inductor)."""
        return self.options.lowering == "inductor" and self.options.wgrads_in_flight > 0

    # -- callbacks of a lowering ----------------------------------------------------------------

    def on_joint(self, joint: fx.Graph) -> None:
        """Read uses and contributions off the joint graph, and tag it for regathering."""
        self._uses = find_uses(joint, self._weights)
        self._owed = Counter()
        for _, source, node in grad_outputs(joint):
            weight = self._weights.get(source)
            if weight is not None:
                leaves = contributions(node, is_reduce) if weight.is_gtp else [node]
                self._owed[weight.index] += len(leaves)
        if self.options.reshard_after_forward:
            regather_pass(joint)

    def on_forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Lower the forward graph's gathers, in place.

        The appended placeholders take `forward_staging`; `forward_fakes` are their fake inputs.
        """
        fakes = self._fake_staging(inputs)
        groups = rewrite_forward(gm, compat.fake_mode_of(inputs), fakes)
        self.forward_staging = self._real_staging(groups)
        self._num_saved = compat.num_saved(output_node(gm.graph))
        self.forward_fakes = [(fakes or {})[g] for g in groups]

    def on_backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Region, list[Tensor]]:
        """Rewrite and verify the backward graph, in place.

        Returns the region and the fake inputs of the placeholders that were appended.
        """
        fake_mode = compat.fake_mode_of(inputs)
        before = str(gm.graph)
        self._wgrads = wgrad_names(gm.graph, self._weights)
        buckets = self._bucket_inputs(fake_mode)
        request = BackwardRequest(
            self._weights, self._uses, self._places(), self._chains(), buckets,
            self.wrapper.options.gtp_wire_dtype, self.options.reduces_in_flight, fake_mode,
            self.options.coalesce, self._fake_staging(inputs),
        )  # fmt: skip
        with one_recompile(gm):
            inserted, snapshot = rewrite_backward(gm, request)
            self.region = self._make_region(gm, inserted, snapshot, fake_mode)
        self.region.texts = {"before": before, "after": str(gm.graph)}
        extra = [buckets[b].flat for b in inserted.buckets]
        extra += [buckets[b].beta for b in inserted.buckets]
        return self.region, extra + [(request.staging or {})[g] for g in inserted.staging]

    # -- what the passes need -------------------------------------------------------------------

    def _places(self) -> dict[int, Place]:
        return {
            s.index: Place(s.bucket.number, s.member.slot, s.member.offset, s.scale)
            for s in self._states.values()
        }

    def _chains(self) -> dict[int, str]:
        return {s.index: chain_of(s.fqns, self.options.ungraphed) for s in self._states.values()}

    def _bucket_inputs(self, fake_mode: Any) -> dict[int, BucketInputs]:
        numbers = sorted({s.bucket.number for s in self._states.values()})
        inputs = {}
        for number in numbers:
            bucket = self.wrapper.buckets[number]
            flat = fake_mode.from_tensor(bucket.flat, static_shapes=True)
            beta = fake_mode.from_tensor(bucket.zeros, static_shapes=True)
            inputs[number] = BucketInputs(flat, beta)
        return inputs

    def _fake_staging(self, inputs: Sequence[Any]) -> dict[str, Tensor] | None:
        if self._staging is None:
            return None
        mode, real = compat.fake_mode_of(inputs), self._staging
        return {g: mode.from_tensor(real[g], static_shapes=True) for g in real.groups}

    def _real_staging(self, groups: Sequence[str]) -> list[Tensor]:
        return [] if self._staging is None else [self._staging[g] for g in groups]

    def _make_region(
        self, gm: fx.GraphModule, inserted: Inserted, snapshot: Snapshot, fake_mode: Any
    ) -> Region:
        wrapper = self.wrapper
        name = wrapper.name_region(compat.frame_ids())
        plan = region_plan(name, gm.graph, inserted, wrapper.states)
        self._verify(gm, inserted, snapshot, plan.occurrences, name)
        fused = self.options.fuses(wrapper.buckets[0].flat.device)
        if fused:
            fuse_backward(gm, fake_mode, name)
            plan = region_plan(name, gm.graph, inserted, wrapper.states)
        if self.holds_operands:
            hold_operands(gm, self.options.wgrads_in_flight, fake_mode)
        by_fqn = {s.fqn: s for s in wrapper.states}
        calls = declare_calls(plan, by_fqn, dict(self._owed))
        sites = [
            [RegionSite(wrapper.states[s.weight.index], s.use) for s in group]
            for group in (inserted.sites, inserted.extra)
        ]
        agree_on_order(wrapper, name, gm.graph, plan)
        region = Region(
            wrapper, plan, calls, sites[0], sites[1], inserted.buckets, inserted.removed,
            self._real_staging(inserted.staging), self.owner, self.options.lowering,
            lasts=self.options.wgrads_in_flight > 0,  # FX keeps what is read, Inductor holds it
            fused=fused,
        )  # fmt: skip
        if self.driver is not None:
            region.replay = RegionReplay(
                region,
                self.driver,
                self.options.replay_options,
                self._num_saved,
                wrapper.captured_shapes,
            )
            wrapper.add_closer(region.replay.close)
        wrapper.add_region(region)
        return region

    def _verify(
        self,
        gm: fx.GraphModule,
        inserted: Inserted,
        snapshot: Snapshot,
        occurrences: Sequence[Any],
        name: str,
    ) -> None:
        chains, places = self._chains(), self._places()
        expected = [
            Expected(
                s.fqn, position, self._owed[s.index], chains[s.index],
                s.spec.group_name if s.spec else "", places[s.index],
                self._wgrads.get(position, ()),
            )
            for position, s in self._states.items()
        ]  # fmt: skip
        checked = Checked(
            gm.graph, expected, occurrences, len(inserted.extra), snapshot,
            coalesced=self.options.coalesce,
        )  # fmt: skip
        assert all(o.chain == GRAPHED for o in occurrences) or self.options.ungraphed
        verify(checked, name)
