"""Give a sharded model on the meta device its memory and initial values, one weight at a time.

In: a model with meta tensors. Out: the same model with real ones, each rank with its rows of what
an unsharded model would hold. Per module, children first:

    full empty tensors --original class back--> init function --cut--> shards     (full ones freed)

At most one module's weights are whole at a time (a tied weight until its last owner is done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gtpgraph.compat import TorchDispatchMode
from gtpgraph.kernels.comm import HANDLE_ATTRIBUTE
from gtpgraph.parallel.shard_module import original_type, unswapped
from gtpgraph.parallel.shard_spec import cut, like, specs_of

__all__ = ["materialize"]


class _Writes(TorchDispatchMode):
    """Records which memory is written to, also through ``.data`` and views, and guards some."""

    def __init__(self) -> None:
        plain: Any = super()
        plain.__init__()
        self.written: set[int] = set()
        self.finished: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    self._write(_memory(tensor))
        return func(*args, **kwargs)

    def _write(self, memory: int) -> None:
        if memory in self.finished:
            raise NotImplementedError(
                f"materialize: an init function writes into {self.finished[memory]}, which a "
                "submodule owns and which is one rank's shard by now; expected each module to "
                "initialise its own weights. Remedy: build and initialise the model on a real "
                "device, then shard it"
            )
        self.written.add(memory)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # The order of nn.Module.apply, and of construction as far as modules build their children.
    order: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)
        order.append((path, module))

    visit("", model)
    return order


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        # Of the original class: a sharded one refuses to be reset.
        if callable(function := getattr(original_type(module), name, None)):
            return partial(function, module)
    return None


def materialize(
    model: nn.Module,
    device: torch.device | str,
    *,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Allocate the meta tensors of ``model`` on ``device`` and initialise them, in place.

    Values equal those of an unsharded model that goes through the same on one device after the
    same seed: ``model.to_empty(device=device)``, then the same init, children first, each module
    once. With the default that is also what plain construction gives, wherever construction
    initialises by ``reset_parameters`` alone, in that order, and ties no weights.

    Args:
        model: sharded or not; tensors that are not on the meta device are left alone.
        device: a real device.
        init: called with each module that holds meta tensors, or none of its own (a Hugging Face
            model's ``model._init_weights``). Default: its ``reset_parameters()``.

    Returns:
        ``model``. On an error it is as before.

    Raises:
        ValueError: a meta device; modules without an init function; tensors that no init wrote.
        NotImplementedError: a module's init writes into a sharded weight of another module.
        RuntimeError: the model is wrapped already.
    """
    device = torch.device(device)
    _check(model, device, init)
    order = _children_first(model)
    before = [(m, dict(m._parameters), dict(m._buffers)) for _, m in order]
    work = _Materializer(model, device)
    try:
        for path, module in order:
            own = list(_own_tensors(module))
            if own and not any(tensor.is_meta for _, tensor in work.before(module)):
                continue
            function = partial(init, module) if init is not None else _reset(module)
            if function is not None:
                work.initialise(path, module, function)
    except BaseException:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        raise
    return model


def _check(model: nn.Module, device: torch.device, init: Callable[..., Any] | None) -> None:
    if device.type == "meta":
        raise ValueError("materialize: expected a real device, got 'meta'")
    if any(hasattr(param, HANDLE_ATTRIBUTE) for param in model.parameters()):
        raise RuntimeError(
            "materialize: the model is wrapped for data parallelism, whose buckets hold its "
            "weights by now. Remedy: shard, materialize, then wrap"
        )
    without = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in _children_first(model)
        if init is None
        and _reset(module) is None
        and any(tensor.is_meta for _, tensor in _own_tensors(module))
    ]
    if without:
        raise ValueError(
            "materialize: expected a reset_parameters method, found none on "
            + ", ".join(without)
            + ". Remedy: pass init=, a function of one module that initialises it"
        )


class _Materializer:
    """Meta tensor -> its real one, shared by all owners of a tied one."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.guard = _Writes()
        self.real: dict[Tensor, Tensor] = {}
        self.written: set[Tensor] = set()
        self.owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        self.left: dict[Tensor, int] = {}
        self.meta: dict[nn.Module, list[tuple[str, Tensor]]] = {}
        for _, module in _children_first(model):
            self.meta[module] = [(n, t) for n, t in _own_tensors(module)]
            for name, tensor in self.meta[module]:
                if tensor.is_meta:
                    self.owners.setdefault(tensor, []).append((module, name))
                    self.left[tensor] = self.left.get(tensor, 0) + 1

    def before(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The tensors that ``module`` itself held before."""
        return self.meta[module]

    def initialise(self, path: str, module: nn.Module, function: Callable[[], Any]) -> None:
        mine = [(name, tensor) for name, tensor in self.meta[module] if tensor.is_meta]
        fresh = {name: self._full(module, name, tensor) for name, tensor in mine}
        for name, full in fresh.items():
            _holder(module, name)[name] = full
        self.guard.written.clear()  # freed memory comes back under the same address
        with unswapped(module), self.guard:
            function()
        for name, tensor in mine:
            now = _holder(module, name)[name]
            if now is not fresh[name] or not now.numel() or _memory(now) in self.guard.written:
                self.written.add(tensor)
            self.left[tensor] -= 1
        # A tied weight may be left to the init of any one of its owners.
        unwritten = [n for n, t in mine if not self.left[t] and t not in self.written]
        if unwritten:
            raise ValueError(
                f"materialize: {path or 'the model'} ({type(module).__name__}): expected its init "
                f"to write {', '.join(unwritten)}, found uninitialised memory. Remedy: pass init=, "
                "or build this module on a real device"
            )
        for name, tensor in mine:
            self._finish(path, module, name, tensor)

    def _full(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        if tensor not in self.real:
            spec = specs_of(module).get(name)
            shape = tensor.shape if spec is None else spec.shape
            data = torch.empty(shape, dtype=tensor.dtype, device=self.device)
            # The tensor's own class: a Parameter stays one, a plain buffer too.
            self.real[tensor] = like(tensor, data) if isinstance(tensor, nn.Parameter) else data
        return self.real[tensor]

    def _finish(self, path: str, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.real[tensor] = _holder(module, name)[name]  # init may have put another in its place
        spec = specs_of(module).get(name)
        if spec is None or not isinstance(tensor, nn.Parameter):
            return
        if self.left[tensor]:
            module._parameters[name] = tensor  # whole until the last owner; a shard meanwhile
            return
        with torch.no_grad():
            shard = like(tensor, cut(self.real.pop(tensor).detach(), spec))
        for owner, own_name in self.owners[tensor]:
            owner._parameters[own_name] = shard
        if spec.gtp_size > 1:
            self.guard.finished[_memory(shard)] = f"{path}.{name}"


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else module._buffers
