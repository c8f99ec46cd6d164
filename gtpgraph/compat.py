"""Every private or release-dependent torch API that gtpgraph uses, each behind one name.

Tried on torch 2.11.0 and 2.13.0. A function says what it stands on; nothing else in the package
imports a private name of torch, so a new release is checked by reading this file. What a module or
tensor keeps under a leading underscore (`_parameters`, `_base`) is used where it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

# Documented and widely used, and still imported from private names.
__all__ = ["OpOverload", "TorchDispatchMode", "tree_map_only"]
# torch 2.13 renames both and warns on the old names.
all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def backward_id() -> int | None:
    """Identity of the backward pass running on this thread, or None outside one.

    Stands on ``torch._C._current_graph_task_id`` (-1 outside). A forward that runs while this is
    not None is a recomputation of an activation checkpoint.
    """
    task = int(torch._C._current_graph_task_id())
    return None if task == -1 else task


def current_stream_handle(device: torch.device) -> int:
    """The current CUDA stream's handle, without making the object that names it.

    Stands on ``torch._C._cuda_getCurrentRawStream``.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass of this thread ends; call inside a backward."""
    queue: Callable[[Callable[[], None]], None] = (
        torch.autograd.Variable._execution_engine.queue_callback
    )
    queue(callback)


def default_store() -> Store:
    """The rendezvous store of the job: keys and values only, never a collective.

    Stands on ``torch.distributed.distributed_c10d._get_default_store``.
    """
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_default_store()
    return store


def frame_ids() -> tuple[int, int] | None:
    """(frame, compile of that frame) that Dynamo is compiling, or None outside a compile.

    Stands on ``torch._guards.CompileContext``; the second number counts recompilations.
    """
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_id is None or compile_id.frame_compile_id is None:
        return None
    return int(compile_id.frame_id), int(compile_id.frame_compile_id)


def num_graph_breaks(reason: re.Pattern[str] | None = None) -> int:
    """Graph breaks that Dynamo has counted in this process, of those whose reason holds `reason`.

    Stands on ``torch._dynamo.utils.counters``.
    """
    from torch._dynamo.utils import counters

    found = counters["graph_break"].items()
    return sum(n for text, n in found if reason is None or reason.search(text))


def grad_of_input(desc: object) -> int | None:
    """Position, among the traced graph's inputs, of the input whose gradient an output is.

    `desc` is one entry of ``output.meta["desc"]`` of an AOT backward or joint graph.
    """
    from torch._functorch._aot_autograd import descriptors as d

    if isinstance(desc, d.GradAOTOutput):
        return input_position(desc.grad_of)
    return None


def input_position(desc: object) -> int | None:
    """Position that an AOT input descriptor names, None for any other input."""
    from torch._functorch._aot_autograd import descriptors as d

    return int(desc.idx) if isinstance(desc, d.PlainAOTInput) else None


def example_of(placeholder: fx.Node) -> object:
    """The live object that Dynamo bound to a placeholder (a Parameter stays that Parameter)."""
    grapharg = placeholder.meta.get("grapharg")
    return None if grapharg is None else grapharg.example


def is_backward_node(node: fx.Node) -> bool:
    """Whether a joint graph's node was traced in the backward (2.11 has no other mark)."""
    return node.meta.get("partitioner_tag") == "is_backward"


def tag_recompute(node: fx.Node) -> None:
    """Ask both partitioners to recompute `node` in the backward rather than save it.

    ``ac_graph_id`` orders checkpointed regions; one id for all of ours keeps the partitioner from
    saving the edge between two of them.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault("ac_graph_id", 0)


def num_saved(output: fx.Node) -> int:
    """How many of a partitioned forward's last outputs are saved for the backward.

    Stands on the descriptors that the partitioner gives them (``SavedForBackwards...AOTOutput``).
    """
    descs = output.meta.get("desc") or ()
    return sum(type(d).__name__.startswith("SavedForBackwards") for d in descs)


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The FakeTensorMode of a graph's example inputs."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(list(inputs))
    if mode is None:
        raise RuntimeError(
            "no fake mode: expected the example inputs of an AOT graph to be fake tensors, "
            f"got {[type(i).__name__ for i in inputs][:4]}."
        )
    return mode


def end_pool(device_index: int, pool: Any) -> None:
    """Stop routing allocations to a graph's memory pool, when the capture that began it failed.

    Stands on ``torch._C._cuda_endAllocateToPool``; harmless when the capture did end it.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)


@contextmanager
def refuse_reentrant_checkpoints(what: str) -> Iterator[None]:
    """Inside, a reentrant activation checkpoint raises NotImplementedError.

    Stands on ``torch.utils.checkpoint.CheckpointFunction``. Its backward runs another backward
    inside the captured one and restores RNG state on the host, which a replay would not repeat.
    """
    from torch.utils.checkpoint import CheckpointFunction

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{what}: a reentrant activation checkpoint cannot be captured. Use "
            "checkpoint(..., use_reentrant=False)."
        )

    original = CheckpointFunction.forward
    CheckpointFunction.forward = staticmethod(refuse)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.forward = original  # type: ignore[method-assign]


@contextmanager
def eager_backward_compile() -> Iterator[None]:
    """Lower backward graphs together with their forward, and keep them out of AOT's own cache.

    The plan must be known before the first backward; and a hit in AOTAutogradCache would skip the
    passes, which carry live state. Stands on ``torch._functorch.config``.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        yield


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    fw: Callable[..., Any],
    bw: Callable[..., Any],
    inference: Callable[..., Any],
    on_joint: Callable[[fx.Graph], None],
) -> Callable[..., Any]:
    """AOTAutograd with the min-cut partitioner; `on_joint` sees the joint graph uncut."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kw: Any) -> Any:
        on_joint(joint.graph)
        return min_cut_rematerialization_partition(joint, joint_inputs, **kw)

    compiler = aot_autograd(
        fw_compiler=fw, bw_compiler=bw, inference_compiler=inference, partition_fn=partition
    )
    compiled: Callable[..., Any] = compiler(gm, list(inputs))
    return compiled


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `fn(list_of_args)` as taking its arguments in one list that it may empty."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def call_boxed(compiled: Any, args: list[Any]) -> Any:
    """Call a lowered graph, boxed or not."""
    return compiled(args) if getattr(compiled, "_boxed_call", False) else compiled(*args)


# Inductor's default reorderings undo the placement of waits and reports (measured on both
# releases); fx_graph_cache stays on: sites, offsets and scales are constants of the graph, so they
# are part of its key.
INDUCTOR_ORDER = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


def inductor_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inner: Callable[..., Any],
    on_joint: Callable[[fx.Graph], None],
    identity: str,
) -> Callable[..., Any]:
    """The whole Inductor pipeline with `inner(gm, inputs, **kw)` in place of its last stage.

    `identity` becomes part of the cache keys for what `on_joint` does to the joint graph.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class _OnJoint(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            on_joint(graph)

        def uuid(self) -> str:
            return identity

    patches: dict[str, Any] = {"joint_custom_pre_pass": _OnJoint(), **INDUCTOR_ORDER}
    compiled: Any = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def plain_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor with nothing of ours."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(inputs))
    return compiled  # type: ignore[no-any-return]


def inductor_inner(
    gm: fx.GraphModule, inputs: Sequence[Any], *, reuse: bool = True, **kw: Any
) -> Any:
    """Inductor's last stage, post-grad passes and code generation, on one partitioned graph.

    `reuse`: whether its code may give a tensor's memory to another without freeing it; the
    allocator does as well for peak memory, and respects references.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    _register_fallbacks(gm)
    with config.patch({} if reuse else {"allow_buffer_reuse": False, "memory_planning": False}):
        return compile_fx_inner(gm, list(inputs), **kw)


def _register_fallbacks(gm: fx.GraphModule) -> None:
    """Tell Inductor beforehand that our operators are called as they are.

    It finds out by itself, but torch 2.11 then formats the operator's arguments for a log message,
    and with them everything that they were computed from: exponential in a chain of tokens, so that
    the first compilation with an operator at the end of one did not come back.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for node in gm.graph.nodes:
        op = node.target
        if getattr(op, "namespace", None) == "gtpgraph" and op not in lowerings:
            tag = get_layout_constraint_tag(op, with_default=True)
            make_fallback(op, layout_constraint=tag_to_layout_constraint(tag), warn=False)


def mark_visible_outputs(output: fx.Node) -> None:
    """Renew Inductor's list of outputs whose strides must be kept, after outputs were removed."""
    if "user_visible_output_idxs" in output.meta:
        leaves = output.args[0]
        assert isinstance(leaves, (tuple, list))
        kept = [i for i, n in enumerate(leaves) if isinstance(n, fx.Node)]
        was = output.meta["user_visible_output_idxs"]
        output.meta["user_visible_output_idxs"] = kept if was else []


def init_fake_process_group(world: int) -> None:
    """Make this process rank 0 of `world` ranks whose collectives do nothing.

    Stands on ``torch.testing._internal.distributed.fake_pg``, which registers backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def source_of(placeholder: fx.Node) -> Any:
    """Where Dynamo read a placeholder's value from (``grapharg.source``)."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def install_guards(identity: list[Any], requires_grad: list[Any]) -> None:
    """Add guards to the compilation in progress.

    Stands on ``torch._dynamo.guards`` (GuardBuilder.ID_MATCH, CONSTANT_MATCH, install_guard),
    ``torch._dynamo.source`` and ``torch._guards.TracingContext``; the same on 2.11 and 2.13.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    if frame_ids() is None or TracingContext.try_get() is None:
        return

    def module_identity(builder: Any, guard: Any) -> None:
        if isinstance(builder.get(guard), nn.Module):
            builder.ID_MATCH(guard)

    roots: dict[str, Any] = {}
    for source in requires_grad:
        flag = AttrSource(source, "requires_grad")
        install_guard(flag.make_guard(GuardBuilder.CONSTANT_MATCH))
    for source in identity:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        root = source
        while getattr(root, "base", None) is not None:
            root = root.base
        if root is not source:
            roots.setdefault(str(root), root)
    for root in roots.values():
        install_guard(root.make_guard(module_identity))


def run_eagerly(code: CodeType, *, callees: bool) -> None:
    """Dynamo compiles no frame of `code` by itself (it still traces one into its caller's graph);
    with `callees`, none of what such a frame calls either.

    Stands on ``torch._C._dynamo.eval_frame.set_code_exec_strategy``; the same on 2.11 and 2.13.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    below = FrameAction.SKIP if callees else FrameAction.DEFAULT
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, below))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or `mesh`; torch has no public way to ask."""
    return mesh._get_root_mesh()


def nccl_backend(group: ProcessGroup, device: torch.device) -> Any:
    """The NCCL backend of a group on `device`, None for another one (its accessor is private)."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend(group)):
        return None
    return group._get_backend(device)


def stands_for_data(tensor: Tensor) -> bool:
    """True for a tensor that only stands for data: fake, functional, functorch's, or proxied.

    Stands on ``torch._subclasses``, ``torch._C._functorch`` and the proxy mode of ``torch.fx``.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return (
        isinstance(tensor, (FakeTensor, FunctionalTensor))
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or get_proxy_mode() is not None
    )


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name, of whatever error torch raises where there is none.

    Stands on ``torch.distributed.distributed_c10d._resolve_process_group``.
    """
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def symmetric_empty(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] of symmetric memory, whose public import path is still a private name."""
    from torch.distributed import _symmetric_memory

    module: Any = _symmetric_memory
    buffer: Tensor = module.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer


def symmetric_rendezvous(buffer: Tensor, group_name: str) -> Any:
    """The handle of a buffer's peers, a collective over the group; see :func:`symmetric_empty`."""
    from torch.distributed import _symmetric_memory

    module: Any = _symmetric_memory  # its name type for groups differs between releases
    return module.rendezvous(buffer, group_name)


def has_hooks(param: nn.Parameter) -> bool:
    """Whether a Parameter has gradient hooks of any kind; torch keeps them under private names."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)
