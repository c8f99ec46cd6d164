"""The class that a module gets when its weights become GTP weights, and the traps of swapping it.

In: a module whose ``_parameters`` hold shards. Out: the same object, of a subclass of its class
with one property per sharded name, which gathers:

    linear.weight --property--> gtpgraph::gather(linear._parameters["weight"]) --> [rows, *rest]

What a plain module does and this one must not silently do otherwise:

    get_parameter(fqn)                      the shard Parameter, asked of any ancestor
    module.weight = Parameter(...)          refused (its own shard: accepted, no change)
    del, register_parameter, parametrize    refused
    expert weights read in a loop           gathered once per forward, see `gather_once`
    init and resize functions that read it  refused: they would write into a temporary
    pickle, torch.save(module)              refused: save the state dict
    deepcopy, copy                          work; ties, groups and mesh are kept
    .to(...), to_empty                      work; ties are kept where torch replaces Parameters
    repr, type(m).__name__                  the original's; `type(m) is nn.Linear` is False: use
                                            isinstance, or `original_type`
    functional_call                         takes shards, as named_parameters() gives them
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gtpgraph.kernels import comm
from gtpgraph.parallel import shard_state
from gtpgraph.parallel.data_dependence import refuse_expert_loops
from gtpgraph.parallel.gather_once import call_in_scope, gather_in_scope, read_eagerly
from gtpgraph.parallel.shard_spec import (
    SPECS,
    STATE_MESH,
    ShardSpec,
    StateMesh,
    specs_of,
    succeed,
    successor,
)

__all__ = ["PUBLISH_ATTRIBUTE", "ShardedModule", "original_type", "swap_class", "unswapped"]

# On a shard whose update is still on its way: call it before the shard is read.
PUBLISH_ATTRIBUTE = "_gtp_publish"

# Functions, by name, that read a weight to write into it; on a gathered copy that would be lost.
# Nothing else tells them apart: an in-place write under no_grad leaves no trace to act on.
_WRITERS = frozenset(
    {
        "reset_parameters",
        "_reset_parameters",
        "init_weights",
        "_init_weights",
        "initialize_weights",
        "resize_token_embeddings",
        "_get_resized_embeddings",
        "_get_resized_lm_head",
    }
)
_classes: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}


def _gathering_property(name: str) -> property:
    def weight(self: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return _eager_read(self, name)
        spec = self._gtp_specs[name]
        return comm.gather(self._parameters[name], spec.rows, spec.group_name)

    read_eagerly(weight)
    return property(weight, doc=f"The whole {name}, gathered; a temporary.")


def _eager_read(module: nn.Module, name: str) -> Tensor:
    reader = sys._getframe(2).f_code
    shard, spec = module._parameters[name], specs_of(module)[name]
    if shard is None:
        raise RuntimeError(f"{type(module).__name__}.{name}: its shard was removed")
    # The one reader that wants the Parameter. It runs on an ancestor, whose class is not ours.
    if reader is nn.Module.get_parameter.__code__:
        return shard
    if reader.co_name in _WRITERS:
        _refuse_writer(module, name, reader.co_name)
    publish = shard.__dict__.get(PUBLISH_ATTRIBUTE)
    if publish is not None:
        publish()
    if spec.expert and not spec.is_stacked:
        state = getattr(shard, "_gtp_state", None)
        refuse_expert_loops([(name if state is None else state.fqn, spec)])
    if tuple(shard.shape) != spec.shard_shape:
        raise RuntimeError(
            f"{type(module).__name__}.{name}: expected a shard of {spec.shard_shape} (of a weight "
            f"of {spec.shape} on {spec.gtp_size} ranks), got {tuple(shard.shape)}. Remedy: "
            "functional_call and direct writes take shards, as named_parameters() gives them"
        )
    try:
        return gather_in_scope(
            module, name, shard, lambda: comm.gather(shard, spec.rows, spec.group_name)
        )
    except AttributeError as error:
        # nn.Module.__getattr__ would answer an AttributeError of a property with the shard.
        raise RuntimeError(f"{type(module).__name__}.{name}: the gather failed") from error


def _refuse_writer(module: nn.Module, name: str, function: str) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__}.{name}: {function} reads a sharded weight to write into it, and "
        "what it reads is a gathered copy. Expected initialised weights of their final size before "
        "shard(). Remedy: initialise or resize first and shard last; or build on the meta device, "
        "shard, and gtpgraph.materialize(model, device)"
    )


class ShardedModule(nn.Module):
    """What every swapped class adds to the original; see the module's docstring."""

    _gtp_names: tuple[str, ...] = ()
    _gtp_original: type[nn.Module] = nn.Module

    def _gtp_refuse(self, name: str, what: str) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__}.{name}: cannot {what} a sharded weight; expected the model to "
            f"be complete before shard(), got a change after it ({specs_of(self)[name].shape} over "
            f"{specs_of(self)[name].gtp_size} ranks). Remedy: tie, replace and resize weights "
            "first and shard last; values are changed with load_state_dict"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._gtp_names:
            super().__setattr__(name, value)
        elif value is not self._parameters.get(name):
            self._gtp_refuse(name, "assign")

    def __delattr__(self, name: str) -> None:
        if name in self._gtp_names:
            self._gtp_refuse(name, "delete")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self._gtp_names and param is not self._parameters.get(name):
            self._gtp_refuse(name, "register another Parameter over")
        super().register_parameter(name, param)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"{type(self).__name__}: a sharded module cannot be pickled (it holds one rank's part "
            "of its weights and live process groups). Remedy: save its state_dict(), with "
            "torch.distributed.checkpoint where there are several ranks"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._gtp_copy(lambda state: copy.deepcopy(state, memo), memo)

    def __copy__(self) -> Any:
        return self._gtp_copy(lambda state: dict(state), {})

    def _gtp_copy(self, copy_state: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
        plain: Any = self  # torch leaves both methods of state untyped
        new: Any = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__setstate__(copy_state(plain.__getstate__()))
        return new

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before: dict[str, Any] = {}
        for name in self._gtp_names:
            before[name] = self._parameters[name] = successor(self._parameters[name])
        plain: Any = super()
        plain._apply(fn, recurse)
        for name, old in before.items():
            new = self._parameters[name]
            if old is not None and new is not None and new is not old:
                succeed(old, new)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        shard_state.show_whole(self, destination, prefix)

    def extra_repr(self) -> str:
        shards = [
            f"{name}: {spec.valid_rows} of {spec.rows} rows, gtp {spec.gtp_rank} of {spec.gtp_size}"
            for name, spec in specs_of(self).items()
        ]
        own = super().extra_repr()
        return ", ".join(part for part in (own, f"shard=({'; '.join(shards)})") if part)


def _sharded_class(original: type[nn.Module], specs: dict[str, ShardSpec]) -> type[nn.Module]:
    # One class for all modules of a kind: Dynamo guards on it, and copies must share it.
    experts = any(spec.is_stacked for spec in specs.values())
    key = (original, tuple(specs), experts)
    if key not in _classes:
        namespace: dict[str, Any] = {name: _gathering_property(name) for name in key[1]}
        for function in ("reset_parameters", "_reset_parameters"):
            if hasattr(original, function):
                namespace[function] = _refused_reset(function, key[1][0])
        namespace |= {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_gtp_names": key[1],
            "_gtp_original": original,
        }
        if experts:
            namespace["__call__"] = call_in_scope
        metaclass: Any = type(original)
        _classes[key] = metaclass(original.__name__, (ShardedModule, original), namespace)
    return _classes[key]


def _refused_reset(function: str, name: str) -> Callable[..., NoReturn]:
    def reset(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_writer(self, name, function)

    return reset


def _localise_state(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
) -> None:
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for name in specs_of(module):
        if prefix + name in state_dict:
            shard_state.localise(module, name, state_dict, prefix + name, assign, lists[-1])


def swap_class(module: nn.Module, specs: dict[str, ShardSpec], state_mesh: StateMesh) -> None:
    """Make ``module``, whose ``_parameters`` hold shards by now, gather them when they are read."""
    module.__dict__[SPECS] = specs
    module.__dict__[STATE_MESH] = state_mesh
    # A hook, not an override: the hooks there are already may rename keys, and must come first.
    module.register_load_state_dict_pre_hook(_localise_state)
    module.__class__ = _sharded_class(type(module), specs)


class unswapped:
    """Context: ``module`` has its original class, so its attributes are plain Parameters again."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._type = module, type(module)

    def __enter__(self) -> None:
        self._module.__class__ = original_type(self._module)

    def __exit__(self, *exc: object) -> None:
        self._module.__class__ = self._type


def original_type(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` had before shard(); its own class if it was not sharded."""
    cls = type(module)
    return cls._gtp_original if issubclass(cls, ShardedModule) else cls
