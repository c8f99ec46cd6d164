"""Which weights of a model become GTP weights, and what stands in the way.

In: a model, its groups, patterns. Out: one `Candidate` for each weight to shard. Nothing is changed
here, and everything that is wrong comes out in one error.

    sharded: weight of nn.Linear, nn.Embedding, Hugging Face's Conv1D; 3-D weights of experts
    left:    norms, biases, convolutions, weights whose dim 0 has size 0 or 1
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gtpgraph import compat
from gtpgraph.parallel.shard_spec import SPECS

__all__ = ["Candidate", "find_candidates", "named_owners", "unwrap"]

_EXPERT = re.compile(r"(^|\.)(local_|routed_)?experts?(\.|$)")
_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)  # those whose weight is 3-D
WRAPPER_MARK = "_gtp_is_wrapper"  # class attribute of a wrapper whose model is its `.module`


@dataclass(frozen=True)
class Candidate:
    """A weight to shard: the Parameter, each (module, attribute) that holds it, and its names."""

    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    fqns: tuple[str, ...]
    expert: bool


def unwrap(model: nn.Module) -> nn.Module:
    """The model under torch.compile's and the data-parallel wrappers."""
    while True:
        if "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif getattr(type(model), WRAPPER_MARK, False) or isinstance(
            model, nn.parallel.DistributedDataParallel
        ):
            model = model.get_submodule("module")
        else:
            return model


def named_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(fqn, module, attribute, Parameter) in module order, aliases included.

    FQNs are those of the model before any wrapper. A module reached by two paths comes twice.
    """
    for path, module in unwrap(model).named_modules(remove_duplicate=False):
        parts = [part for part in path.split(".") if part and part not in _TRANSPARENT]
        for name, param in module._parameters.items():
            if param is not None:
                yield ".".join([*parts, name]), module, name, param


def _is_conv1d(module: nn.Module) -> bool:
    # transformers is not a dependency. Its weight is [in_features, out_features]; dim 0 is cut all
    # the same: the gather gives the whole weight back, so which dim it was matters to nobody else.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_expert(fqn: str, param: nn.Parameter) -> bool:
    return bool(_EXPERT.search(fqn)) or getattr(param, "allreduce", True) is False


def _is_kind(fqn: str, module: nn.Module, name: str, param: nn.Parameter) -> bool:
    if isinstance(module, (nn.Linear, nn.Embedding)) or _is_conv1d(module):
        return name == "weight"
    if is_lazy(param) or param.ndim != 3 or isinstance(module, _CONVOLUTIONS):
        return False
    return _is_expert(fqn, param) or "expert" in type(module).__name__.lower()


def _all_candidates(model: nn.Module) -> list[Candidate]:
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    fqns: dict[nn.Parameter, list[str]] = {}
    chosen: set[nn.Parameter] = set()
    for fqn, module, name, param in named_owners(model):
        fqns.setdefault(param, []).append(fqn)
        held = owners.setdefault(param, [])
        if not any(m is module and n == name for m, n in held):
            held.append((module, name))
        if _is_kind(fqn, module, name, param) and (is_lazy(param) or param.shape[0] > 1):
            chosen.add(param)
    return [
        Candidate(p, tuple(owners[p]), tuple(fqns[p]), any(_is_expert(f, p) for f in fqns[p]))
        for p in owners
        if p in chosen
    ]


def _matches(candidate: Candidate, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for fqn in candidate.fqns for pattern in patterns)


def _unmatched(
    option: str, patterns: Sequence[str], known: Sequence[str], every: Sequence[str]
) -> Iterator[str]:
    for pattern in patterns:
        if any(fnmatchcase(fqn, pattern) for fqn in known):
            continue
        others = [fqn for fqn in every if fnmatchcase(fqn, pattern)]
        if others and option == "exclude":
            continue  # it asks for what happens anyway
        if others:
            yield (
                f"{option} pattern {pattern!r} matches only weights that are never sharded: "
                f"{', '.join(others[:3])}"
            )
            continue
        close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}" if close else f"there are {', '.join(known[:3])}"
        yield f"{option} pattern {pattern!r} matches no weight; {hint}"


def _blockers(candidate: Candidate, gtp_size: int) -> Iterator[str]:
    param, fqn = candidate.param, candidate.fqns[0]
    if is_lazy(param):
        yield f"{fqn}: a lazy weight without a shape; run one batch first"
        return
    if type(param) is not nn.Parameter:
        yield f"{fqn}: expected a plain Parameter, got {type(param).__name__}"
    if not param.is_floating_point():
        yield f"{fqn}: expected a floating dtype, got {param.dtype}"
    for module, name in candidate.owners:
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{fqn}: its module is a ScriptModule, whose attribute {name!r} cannot be swapped"
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            yield f"{fqn}: max_norm rewrites the weight in forward; on a gathered copy that is lost"
        if isinstance(module, nn.Embedding) and module.sparse:
            yield f"{fqn}: sparse=True gives a sparse gradient, which is not reduced; use dense"
    if param.ndim == 3 and param.shape[0] % gtp_size:
        yield (
            f"{fqn}: {param.shape[0]} experts {tuple(param.shape)} do not divide by gtp = "
            f"{gtp_size}; expert weights are cut between experts only"
        )
    if gtp_size > 1 and param.grad is not None:
        yield f"{fqn}: has a .grad, which the cut would lose; zero_grad(set_to_none=True) first"
    if gtp_size > 1 and compat.has_hooks(param):
        yield f"{fqn}: has gradient hooks, which the shard would not carry; add them afterwards"


def _model_blockers(model: nn.Module) -> Iterator[str]:
    inner = unwrap(model)
    if any(SPECS in module.__dict__ for module in inner.modules()):
        yield "the model is sharded already; shard a freshly built one, once"
    if any(
        getattr(type(m), WRAPPER_MARK, False) or isinstance(m, nn.parallel.DistributedDataParallel)
        for m in model.modules()
    ):
        yield "the model is wrapped for data parallelism; shard it first, then wrap"


def find_candidates(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    gtp_size: int,
    expert_gtp_size: int,
) -> list[Candidate]:
    """The weights to shard, in module order.

    A tied weight is taken when any of its names matches ``include``, and left when any matches
    ``exclude``.

    Raises:
        ValueError: once, with everything that is wrong with patterns, model and weights.
    """
    every = [fqn for fqn, *_ in named_owners(model)]
    found = _all_candidates(model)
    known = [fqn for candidate in found for fqn in candidate.fqns]
    problems = list(_model_blockers(model))
    if not problems:
        problems += _unmatched("include", include or (), known, every)
        problems += _unmatched("exclude", exclude or (), known, every)
    taken = [
        c
        for c in found
        if (include is None or _matches(c, include)) and not _matches(c, exclude or ())
    ]
    for candidate in taken:
        problems += _blockers(candidate, expert_gtp_size if candidate.expert else gtp_size)
    if not taken and not problems:
        problems.append(
            f"{type(unwrap(model)).__name__} has no weight to shard among its {len(every)}: "
            "expected a weight of nn.Linear, nn.Embedding or Conv1D, or 3-D expert weights"
        )
    if problems:
        raise ValueError(
            "shard: nothing was changed, for\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nRemedy: mend these, or leave a weight whole with exclude=[its name]"
        )
    return taken
