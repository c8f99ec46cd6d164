"""How a model is compiled: the options, and which of them are out of range."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gtpgraph.graph.replay import ReplayOptions
from gtpgraph.parallel.staging import COLLECTIVES


@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled; see :func:`gtpgraph.compile`."""

    lowering: str = "inductor"
    ungraphed: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    reduces_in_flight: int = 1
    replay: str | None = None
    dispatch: str = "event"
    max_captures: int = 8
    max_in_flight: int = 4
    wgrads_in_flight: int = 2
    coalesce: bool = False
    fuse: bool | None = None
    collectives: str = "functional"

    @property
    def replay_options(self) -> ReplayOptions:
        return ReplayOptions(
            self.dispatch, self.max_captures, self.max_in_flight, self.wgrads_in_flight
        )

    def check(self) -> None:
        """Raise one ValueError that lists every option out of range."""
        bad = []
        if self.lowering not in ("eager", "inductor"):
            bad.append(f"lowering: expected 'eager' or 'inductor', got {self.lowering!r}")
        if isinstance(self.ungraphed, str):
            bad.append(f"ungraphed: expected a list of patterns, got {self.ungraphed!r}")
        if self.replay not in (None, "cuda"):
            bad.append(f"replay: expected None or 'cuda', got {self.replay!r}")
        if self.reduces_in_flight < 0:
            bad.append(f"reduces_in_flight: expected 0 or more, got {self.reduces_in_flight}")
        if self.collectives not in COLLECTIVES:
            bad.append(f"collectives: expected one of {COLLECTIVES}, got {self.collectives!r}")
        if bad:
            raise ValueError("gtpgraph.compile: " + "; ".join(bad) + ".")
        self.replay_options.check("gtpgraph.compile")

    def fuses(self, device: torch.device) -> bool:
        """Whether accumulates are fused: by default where that saves launches, and not in the
        lowering whose point is to have the eager bits."""
        if self.fuse is None:
            return device.type == "cuda" and self.lowering == "inductor"
        return self.fuse

    @property
    def identity(self) -> str:
        """What the passes do to a joint graph, for compile caches."""
        return f"gtpgraph-joint-1:reshard={self.reshard_after_forward}"
