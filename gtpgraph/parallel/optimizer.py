"""The optimizer: fp32 master slices, any elementwise torch optimizer, and the way back.

In: a wrapper whose `finish_grad_sync` has left final gradients in the slices that this rank owns.
Out: updated weights, alike on every rank that holds them::

    norm over grad_norm -> not finite? skip : clip
    for each bucket   flat[own] (reduced) --as fp32--> grads of its pieces --torch's step--> masters
    then              masters --cast--> all-gather over the bucket's own group --copy--> weights

The torch optimizer sees weights, cut where the slices cut them (see `pieces`), each a 1-D fp32
Parameter, so that per-weight options are possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from gtpgraph.parallel.data_parallel import DistributedDataParallel
from gtpgraph.parallel.grad_norm import GradNorm, used_weights
from gtpgraph.parallel.pieces import MasterSlice, master_slice
from gtpgraph.parallel.publish import Publisher

FUNCTION = "DistributedOptimizer"
STATE_FORMAT = "gtpgraph.optimizer/1"

# They look at a whole weight (its shape, or norms over it), and a rank sees pieces of weights.
_NEED_WHOLE_WEIGHTS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_HAVE_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)


class DistributedOptimizer:
    """Run a torch optimizer on the slices that this rank owns, then share the result.

    Args:
        torch_optimizer_class: an elementwise optimizer of torch.optim, or one with its interface.
        model: the :class:`DistributedDataParallel`, or a (compiled) model that holds exactly one.
        no_decay: fnmatch patterns over FQNs of weights that get ``weight_decay=0``.
        clip_norm: scale the gradients down to this 2-norm where theirs is larger; None: don't.
        skip_nonfinite: leave everything as it is in a step with a gradient that is not finite, and
            count it in `skipped`.
        overlap_gather: let the next forward overlap the gather of GTP weights, see `publish`. Until
            then the Parameters themselves (not the modules' attributes) hold the old values:
            call ``model.publish_weights()`` before you read them.
        options: the torch optimizer's; ``fused=True`` where the class has it and neither `fused`
            nor `foreach` is given.

    Masters start from the weights as they are: construct it after loading a checkpoint, or call
    `reload_weights`. With ``reduce="all_reduce"`` every rank owns, and updates, everything. A
    weight that no rank of its data-parallel group used in a step (`allow_unused`) is left alone, as
    torch leaves one whose gradient is None: no decay, no momentum.

    Attributes:
        grad_norm: the norm of the last step, before clipping; None where neither option needs it.
        skipped: number of steps that were skipped.

    Raises:
        ValueError: no wrapper in the model, a `no_decay` pattern without a weight, a `clip_norm`
            that is not positive, or a group missing that the norm is made over.
        NotImplementedError: an optimizer that needs whole weights.
    """

    def __init__(
        self,
        torch_optimizer_class: Callable[..., torch.optim.Optimizer],
        model: object,
        *,
        no_decay: tuple[str, ...] | list[str] = (),
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
        overlap_gather: bool = False,
        **options: Any,
    ) -> None:
        _check_class(torch_optimizer_class)
        self.model = _wrapper_in(model)
        _check_patterns(no_decay, [s.fqn for s in self.model.states])
        if torch_optimizer_class in _HAVE_FUSED and not options.keys() & {"fused", "foreach"}:
            options["fused"] = True
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"{FUNCTION}: clip_norm: expected a positive norm, got {clip_norm!r}.")
        self.slices = tuple(master_slice(b, self.model.states) for b in self.model.buckets)
        self.clip_norm, self.skip_nonfinite = clip_norm, skip_nonfinite
        self.grad_norm: float | None = None
        self.skipped = 0
        wants_norm = skip_nonfinite or clip_norm is not None
        self._norm = GradNorm(self.model, self.slices) if wants_norm else None
        self._publisher = Publisher(self.model, overlap=overlap_gather)
        self.reload_weights()
        groups = _param_groups(self.slices, tuple(no_decay), self.model.buckets[0].flat.device)
        self.torch_optimizer = torch_optimizer_class(groups, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's parameter groups, e.g. to set ``lr``."""
        return self.torch_optimizer.param_groups

    @torch.no_grad()
    def step(self) -> bool:
        """Update every weight from the reduced gradients.

        A collective over each bucket's group, and over grad_norm for the norm.

        Returns:
            Whether the weights were updated; False for a step that was skipped.

        Raises:
            RuntimeError: the step's gradients are not final (no `finish_grad_sync` before).
        """
        if not self.model.finished:
            raise RuntimeError(
                f"{FUNCTION}.step: expected final gradients, got a step without finish_grad_sync() "
                "(or one after zero_grad_buffer()). Call model.finish_grad_sync() after the "
                "backward, then step()."
            )
        if not self._clip():
            self.skipped += 1
            return False
        used = used_weights(self.model)
        for part in self.slices:
            reduced = part.grad.float()
            for piece in part.pieces:
                # Frozen after wrapping, or used by nobody: no decay, no momentum either.
                if piece.state.param.requires_grad and piece.state.index in used:
                    piece.master.grad = reduced[piece.start : piece.stop]
        self.torch_optimizer.step()
        for part in self.slices:
            for piece in part.pieces:
                piece.master.grad = None
        self._publisher.share(self.slices)
        return True

    def _clip(self) -> bool:
        """Scale the gradients to `clip_norm`; False where they are to be skipped."""
        if self._norm is None:
            return True
        norm = self.grad_norm = float(self._norm())  # every rank has the same, and decides alike
        if not math.isfinite(norm):
            return not self.skip_nonfinite
        if self.clip_norm is not None and norm > self.clip_norm:
            self.model.scale_gradients(self.clip_norm / norm)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a step: the wrapper's `zero_grad_buffer`."""
        self.model.zero_grad_buffer()

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Take the weights as they are now into the masters (after loading weights)."""
        self.model.publish_weights()
        for part in self.slices:
            whole = torch.zeros_like(part.bucket.flat, dtype=torch.float32)
            for member in part.bucket.members:
                param = self.model.states[member.index].param
                whole[member.offset : member.offset + member.numel].copy_(param.reshape(-1))
            part.flat.copy_(whole[part.bucket.own])

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the torch optimizer's, the masters, and the layout they fit.

        It fits the same model on the same ranks with the same buckets.
        """
        return {
            "format": STATE_FORMAT,
            "layout": self._layout(),
            "masters": [part.flat for part in self.slices],
            "optimizer": self.torch_optimizer.state_dict(),
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave on this rank, weights included.

        A collective, as `step` is.

        Raises:
            ValueError: another format, or the state of another layout; nothing is changed.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(
                f"{FUNCTION}: expected a state of format {STATE_FORMAT!r}, got "
                f"{state.get('format')!r}. Pass what state_dict() returned."
            )
        if state["layout"] != self._layout():
            raise ValueError(
                f"{FUNCTION}: expected the state of {len(self._layout())} piece(s) laid out as on "
                f"this rank, got another layout of {len(state['layout'])}. Use the same model, "
                "ranks, groups and bucket_mb as when it was saved."
            )
        self.torch_optimizer.load_state_dict(state["optimizer"])
        for part, saved in zip(self.slices, state["masters"], strict=True):
            part.flat.copy_(saved)
        self._publisher.share(self.slices)
        self.skipped = int(state["skipped"])

    def _layout(self) -> list[tuple[int, str, int, int]]:
        return [(s.bucket.number, p.fqn, p.start, p.stop) for s in self.slices for p in s.pieces]


def _check_class(cls: Callable[..., torch.optim.Optimizer]) -> None:
    name = getattr(cls, "__name__", repr(cls))
    if name in _NEED_WHOLE_WEIGHTS:
        raise NotImplementedError(
            f"{FUNCTION}: expected an elementwise optimizer, got {name}, which looks at whole "
            "weights while a rank owns pieces of them. Use AdamW, Adam, SGD or another one that "
            "treats elements alike."
        )


def _wrapper_in(model: object) -> DistributedDataParallel:
    root = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    modules = root.modules() if isinstance(root, nn.Module) else ()
    found = [m for m in modules if isinstance(m, DistributedDataParallel)]
    if len(found) != 1:
        raise ValueError(
            f"{FUNCTION}: expected a model that holds one gtpgraph.DistributedDataParallel, got "
            f"{len(found)} in a {type(model).__name__}. Wrap the model first."
        )
    return found[0]


def _check_patterns(patterns: tuple[str, ...] | list[str], names: list[str]) -> None:
    idle = [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
    if idle:
        raise ValueError(
            f"{FUNCTION}: no_decay: expected every pattern to match a trainable weight, got none "
            f"for {idle}. The weights are {names[:8]}."
        )


def _param_groups(
    slices: tuple[MasterSlice, ...], no_decay: tuple[str, ...], device: torch.device
) -> list[dict[str, Any]]:
    """Torch's parameter groups, the same number on every rank, whatever the rank owns."""
    pieces = [p for part in slices for p in part.pieces]
    plain = [p.master for p in pieces if not any(fnmatchcase(p.fqn, n) for n in no_decay)]
    # torch refuses an optimizer without a parameter, and a rank may own padding alone.
    groups: list[dict[str, Any]] = [{"params": plain or [_nothing(device)]}]
    if no_decay:
        kept = [p.master for p in pieces if any(fnmatchcase(p.fqn, n) for n in no_decay)]
        groups.append({"params": kept or [_nothing(device)], "weight_decay": 0.0})
    return groups


def _nothing(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, device=device))
