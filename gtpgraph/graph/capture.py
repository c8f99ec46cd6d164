"""Capture a whole step, forward and backward, as one graph whose replays report.

In: a function of the batch that runs the model (eager or compiled) and its backward. Out: the same
as a callable that replays one graph::

    call 1 of a shape   runs as it is (warm-up is the step itself); what it reported is noted
    call 2              captured; the recorded occurrences must be those of call 1; then replayed
    later               inputs copied in, replayed, reports made

`zero_grad_buffer()` and `finish_grad_sync()` stay outside: they are the host's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gtpgraph.graph.captured import Captured, capture_call
from gtpgraph.graph.driver import CudaDriver, Driver
from gtpgraph.graph.recording import Recording
from gtpgraph.graph.replay import ReplayOptions, ShapeKey
from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.ready import Report

log = logging.getLogger("gtpgraph.replay")


Place = tuple[Mapping[str, Any], str]  # a module's parameters or buffers, and a name in them


@dataclass(eq=False)
class _Step:
    """What is known of one input shape: the reports of its first run, then its graph, where the
    caller finds its results, and where it reads parameters and buffers."""

    reports: list[Report]
    captured: Captured | None = None
    recording: Recording | None = None
    results: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)


class CapturedStep:
    """A step function whose calls are replays; see :func:`capture`."""

    def __init__(
        self,
        step: Callable[..., Any],
        wrapper: DistributedDataParallel,
        options: ReplayOptions,
        driver: Driver,
    ) -> None:
        self.wrapper = wrapper
        self.options = options
        self._step = step
        self._driver = driver
        self._known: dict[ShapeKey, _Step] = {}
        self._told = self._closed = False
        wrapper.add_closer(self.close)

    def __call__(self, *batch: Any) -> Any:
        """Run the step; its result (the loss) is valid until the next call.

        Raises:
            RuntimeError: the captured step or its wrapper is closed, a parameter has moved, or the
                step cannot be captured. NotImplementedError: an input that needs a gradient.
        """
        self._check_call(batch)
        key = self._key(batch)
        known = self._known.get(key)
        if known is None:
            return self._first(key, batch)
        if known.captured is None:
            if self._is_full(key):
                self._tell()
                return self._run(batch)
            self._capture(known, batch, bool(key[0]))
        return self._replay(known, batch)

    def prepare(self, *batch: Any) -> None:
        """Capture for these shapes now, without running anything. Harmless when done already.

        main_grads, buffers, RNG state and what is owed stay as they are.

        Raises:
            RuntimeError: no step of these shapes has run yet, or it cannot be captured.
        """
        self._check_call(batch)
        key = self._key(batch)
        known = self._known.get(key)
        if known is None:
            raise RuntimeError(
                "captured step: expected one synchronised step of these shapes before its capture "
                f"(it is the warm-up), got none for {key[1:]}. Call the step once."
            )
        if known.captured is None:
            self._capture(known, batch, bool(key[0]))

    def _key(self, batch: tuple[Any, ...]) -> ShapeKey:
        shapes = ((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else (type(a), a)
                  for a in batch)  # fmt: skip
        reducing = self.options.dispatch == "in_graph" and self.wrapper.sync
        return (reducing, self.wrapper.ledger.frozen, *shapes)

    def _is_full(self, key: ShapeKey) -> bool:
        """Whether these shapes would be one too many; variants of captured ones are not."""
        captured = {k[2:] for k, known in self._known.items() if known.captured is not None}
        return key[2:] not in captured and len(captured) >= self.options.max_captures

    def _check_call(self, batch: tuple[Any, ...]) -> None:
        self.wrapper.check_open("captured step")
        if self._closed:
            raise RuntimeError(
                "captured step: expected an open one, got a call after close(). Capture it again "
                "with gtpgraph.capture."
            )
        needing = [i for i, a in enumerate(batch) if isinstance(a, Tensor) and a.requires_grad]
        if needing:
            raise NotImplementedError(
                f"captured step: expected inputs without gradients, got requires_grad at positions "
                f"{needing}: a replay would not deliver them. Detach them, or use "
                "gtpgraph.compile(model, replay='cuda'), whose regions do."
            )

    def _run(self, batch: tuple[Any, ...]) -> Any:
        with self.wrapper.numbering_uses():
            return self._step(*batch)

    def _first(self, key: ShapeKey, batch: tuple[Any, ...]) -> Any:
        before = len(self.wrapper.reports)
        result = self._run(batch)
        if self.wrapper.sync:  # under no_sync nothing is reported, so nothing is learned either
            reports = self.wrapper.reports[before:]
            for reducing in {True, False} if self.options.dispatch == "in_graph" else {False}:
                self._known[(reducing, *key[1:])] = _Step(reports)
        # A loss that the caller keeps would keep this run's autograd graph, whose accumulators
        # remember this stream: a capture on another one could not use them (pytorch 137483).
        return _result([r.detach() if isinstance(r, Tensor) else r for r in _as_list(result)])

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "the step runs uncaptured: %d input shapes are captured (max_captures)",
                self.options.max_captures,
            )

    def _capture(self, known: _Step, batch: tuple[Any, ...], reducing: bool) -> None:
        wrapper = self.wrapper
        by_fqn = {s.fqn: s for s in wrapper.states}
        last = Counter(by_fqn[r.weight].bucket.number for r in known.reports)
        for number in wrapper.foreign_buckets:  # their silent weights are in no report
            del last[number]
        record = Recording(
            wrapper, self._driver, last, in_graph=frozenset(last if reducing else ()),
            wgrads_in_flight=self.options.wgrads_in_flight,
        )  # fmt: skip
        record.betas = {b.number: b.zeros.clone() for b in wrapper.buckets}
        step = self._step
        with wrapper.recording_into(record):
            captured = capture_call(
                self._driver, lambda *a: _as_list(step(*a)), list(batch), set(), "captured step",
                lasting=False, scope=lambda: record.capturing(beside_all=False),
            )  # fmt: skip
        try:
            made = [(r.weight, r.use) for r in known.reports]
            record.check(made, "captured step", reported=True)
        except RuntimeError:
            captured.graph.reset()
            raise
        known.captured, known.recording = captured, record
        known.results = captured.outputs
        if not captured.lasting:  # their memory is scratch of graphs captured before
            known.results = [
                torch.empty_like(o) if isinstance(o, Tensor) else o for o in captured.outputs
            ]
        known.places, known.pointers = places_of(wrapper.module)

    def _replay(self, known: _Step, batch: tuple[Any, ...]) -> Any:
        captured, record = known.captured, known.recording
        assert captured is not None and record is not None
        wrapper = self.wrapper
        if known.pointers != [d[k].data_ptr() for d, k in known.places]:
            self._name_moved(known)
        wrapper.enter_replay(record)
        captured.feed(list(batch))
        record.prepare()
        captured.graph.replay()
        events = record.events
        if self.options.dispatch == "after":
            events = dict.fromkeys(events, self._driver.now())
        record.finished(events)
        wrapper.report_replay(record)
        for result, output in zip(known.results, captured.outputs, strict=True):
            if isinstance(output, Tensor) and result is not output:
                result.copy_(output)
        return _result([o.detach() if isinstance(o, Tensor) else o for o in known.results])

    def _name_moved(self, known: _Step) -> None:
        moved = [
            key
            for (tensors, key), pointer in zip(known.places, known.pointers, strict=True)
            if tensors[key].data_ptr() != pointer
        ]
        raise RuntimeError(
            f"captured step: expected parameters and buffers where they were captured, got others "
            f"for {moved[:8]}: they were replaced (.to(), load with assign=True, swapped data). "
            "Capture the model again after such a change."
        )

    def close(self) -> None:
        """Free the graphs. Idempotent; the wrapper's close() calls it, before groups go."""
        self._closed = True
        for known in self._known.values():
            if known.captured is not None:
                known.captured.graph.reset()
        self._known.clear()


def places_of(module: nn.Module) -> tuple[list[Place], list[int]]:
    """Where a module keeps its tensors, for a look before each replay, and their addresses."""
    places: list[Place] = []
    for part in module.modules():
        places += [(part._parameters, k) for k, p in part._parameters.items() if p is not None]
        places += [(part._buffers, k) for k, b in part._buffers.items() if b is not None]
    return places, [tensors[key].data_ptr() for tensors, key in places]


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _result(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def capture(
    step: Callable[..., Any],
    model: nn.Module,
    *,
    dispatch: str = "event",
    max_captures: int = 8,
    wgrads_in_flight: int = 2,
    driver: Driver | None = None,
) -> CapturedStep:
    """Capture `step(*batch)`, which runs a wrapped model forward and backward, as one CUDA graph.

    Args:
        step: runs forward and backward and returns the loss (or a tuple of tensors). It must not
            call zero_grad_buffer() or finish_grad_sync().
        model: holds the one DistributedDataParallel whose weights it reaches.
        dispatch: "event": a bucket's reduction starts when its last accumulate has run, in the
            middle of the replay; "after": when the replay has ended (the usual way, a baseline);
            "in_graph": the reduction itself is captured behind that accumulate (a second graph
            without it serves no_sync()). "event" is the default: it is as early as "in_graph" and
            works with every process group, captured or not.
        max_captures: input shapes that are captured; others run as they are, which is said once.
        wgrads_in_flight: how many accumulates (and the wgrad GEMMs fused with them) may run beside
            the main line of the graph before it waits for the oldest; each keeps its operands so
            long. 0: all in the main line, as for a model compiled with `wgrads_in_flight=0`, and as
            an autograd function needs it that writes over gradients in its backward.
        driver: the graph runtime; None for CUDA.

    Raises:
        ValueError: an unknown dispatch, or a model without a wrapper or not on CUDA.
    """
    from gtpgraph.graph.backend import wrapper_of

    wrapper = wrapper_of(model)
    options = ReplayOptions(dispatch, max_captures, wgrads_in_flight=wgrads_in_flight)
    options.check("gtpgraph.capture")
    return CapturedStep(step, wrapper, options, driver or cuda_driver(wrapper, "gtpgraph.capture"))


def cuda_driver(wrapper: DistributedDataParallel, function: str) -> Driver:
    """The CUDA driver of a wrapper's device.

    Raises:
        ValueError: its weights are not on one CUDA device.
    """
    devices = {s.param.device for s in wrapper.states}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise ValueError(
            f"{function}: expected a model on one CUDA device for graph replay, got "
            f"{sorted(map(str, devices))}. Move it with .to('cuda') before shard(), or leave out "
            "replay='cuda'."
        )
    device = next(iter(devices))
    if not torch.cuda.is_available():
        raise ValueError(f"{function}: CUDA is not available on this machine.")
    return CudaDriver(device)
