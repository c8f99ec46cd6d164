"""The two communication operators of a GTP weight: ``gtpgraph::gather`` and ``gtpgraph::reduce``.

In: a shard ``[shard_rows, *rest]`` (``shard_rows = ceil(rows / n)``, the tail of the last shards
zero). Out of gather: the whole weight ``[rows, *rest]``. In and out of reduce: the other way round,
summed over the group. Groups travel by name, for an operator's schema holds no group and a name
is the same on every rank; ``""`` is the group of one process, which needs no torch.distributed.

    forward    shard --gather--> weight --> ...
    backward   shard grad <--reduce-- wgrad <-- ...        (equal ``seq_nr`` in a joint graph)

Each backward goes one of two ways. Traced, or with nobody listening: ``reduce``, whose result is
the gradient. Eager and with a *handle* on the shard (``shard._gtp_handle``, set by the
data-parallel wrapper): ``handle.contribute(wgrad, use)``, which reduces and finalises by itself.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gtpgraph import compat

HANDLE_ATTRIBUTE = "_gtp_handle"
GATHERED_ATTRIBUTE = "_gtp_gathered"  # on an eager result: the arguments that gathered it


class GatherHandle(Protocol):
    """Who takes the contributions of a shard in eager mode; one handle a shard."""

    def on_gather(self) -> Any:
        """Called at each gather that could be differentiated; returns what names its use.

        Not every such gather is a use: a read of the weight's dtype and the recomputation of a
        checkpoint gather too, and no contribution follows. Count contributions.
        """

    def contribute(self, wgrad: Tensor, use: Any) -> Tensor | None:
        """Take the unreduced wgrad ``[rows, *rest]`` of ``use``.

        Returns None when the handle finalises it by itself, else the shard's gradient
        ``[shard_rows, *rest]`` for autograd to accumulate.
        """


# --- groups ------------------------------------------------------------------------------------


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group called ``name`` (``ProcessGroup.group_name``).

    Raises ValueError for ``""`` (the group of one has no ProcessGroup), and RuntimeError when
    this process knows no such group, which happens after ``destroy_process_group``.
    """
    if not name:
        raise ValueError(
            'group name: expected the name of a process group, got "" (the group of one process), '
            "which has no ProcessGroup; test for it before resolving"
        )
    try:
        return compat.resolve_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"process group {name!r}: expected a group that this process created and has not "
            f"destroyed, found none ({error}); shard the model again after a new "
            "init_process_group"
        ) from error


def group_size(name: str) -> int:
    """Number of ranks in the group called ``name``; 1 for ``""``."""
    return 1 if not name else resolve_group(name).size()


def is_tracing(tensor: Tensor) -> bool:
    """True where a graph is being traced, so that run-time state must be left alone."""
    return torch.compiler.is_compiling() or compat.stands_for_data(tensor)


# --- gather and reduce, launched and waited -----------------------------------------------------


def pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """``tensor`` ``[rows, *rest]`` contiguous and zero-padded along dim 0 to ``num_rows``.

    No copy where it already is both. Raises ValueError when it has more rows than that.
    """
    rows = tensor.shape[0]
    if rows > num_rows:
        raise ValueError(
            f"pad_rows: expected at most {num_rows} rows, got shape {tuple(tensor.shape)}"
        )
    if rows == num_rows:
        return tensor.contiguous()
    padded = tensor.new_empty((num_rows, *tensor.shape[1:]))
    padded[:rows].copy_(tensor)
    padded[rows:].zero_()
    return padded


def gather_launch(shard: Tensor, group_name: str) -> tuple[Tensor, dist.Work | None]:
    """Start gathering ``shard`` ``[shard_rows, *rest]``; pair with ``work.wait()``.

    Returns the padded weight ``[n * shard_rows, *rest]``, valid after the wait, and the work
    (None: already there). The caller keeps ``shard`` alive until the wait. For ``""`` the result
    is a copy, as the other sizes give.
    """
    if not group_name:
        return shard.detach().clone(memory_format=torch.contiguous_format), None
    group = resolve_group(group_name)
    out = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    work = compat.all_gather(out, shard.detach().contiguous(), group=group, async_op=True)
    return out, work


def reduce_launch(
    wgrad: Tensor, shard_rows: int, group_name: str
) -> tuple[Tensor, dist.Work | None]:
    """Start the sum of ``wgrad`` ``[rows, *rest]`` over the group; pair with ``work.wait()``.

    Returns this rank's ``[shard_rows, *rest]``, in wgrad's dtype and valid after the wait, and the
    work (None: already there). For ``""`` the result may be ``wgrad`` itself.
    """
    if not group_name:
        return pad_rows(wgrad.detach(), shard_rows), None
    group = resolve_group(group_name)
    padded = pad_rows(wgrad.detach(), group.size() * shard_rows)
    out = padded.new_empty((shard_rows, *padded.shape[1:]))
    work = compat.reduce_scatter(out, padded, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return out, work


def exchange_launch(
    wgrad: Tensor, shard_rows: int, group_name: str
) -> tuple[Tensor, dist.Work | None]:
    """Start sending every rank its rows of ``wgrad`` ``[rows, *rest]``; pair with ``work.wait()``.

    Returns ``[n, shard_rows * prod(rest)]``, row r from rank r, in wgrad's dtype: what
    ``gtpgraph::shard_reduce`` sums in fp32.
    """
    group = resolve_group(group_name)
    chunks = pad_rows(wgrad.detach(), group.size() * shard_rows).view(group.size(), -1)
    out = torch.empty_like(chunks)
    work = dist.all_to_all_single(out, chunks, group=group, async_op=True)
    return out, work


def _gather_impl(shard: Tensor, rows: int, group_name: str) -> Tensor:
    out, work = gather_launch(shard, group_name)
    if work is not None:
        work.wait()
    return out.narrow(0, 0, rows)


def _reduce_impl(grad: Tensor, shard_rows: int, group_name: str) -> Tensor:
    out, work = reduce_launch(grad, shard_rows, group_name)
    if work is not None:
        work.wait()
    # An operator whose schema says "new tensor" must not hand back its input.
    return out.clone() if out.data_ptr() == grad.data_ptr() and out.numel() else out


def _gather_fake(shard: Tensor, rows: int, group_name: str) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


def _reduce_fake(grad: Tensor, shard_rows: int, group_name: str) -> Tensor:
    return grad.new_empty((shard_rows, *grad.shape[1:]))


# --- autograd ------------------------------------------------------------------------------------


def _remember_use(ctx: Any, shard: Tensor, rows: int, group_name: str) -> None:
    ctx.rows, ctx.shard_rows, ctx.group_name = rows, shard.shape[0], group_name
    handle = getattr(shard, HANDLE_ATTRIBUTE, None)
    ctx.handle = None if handle is None or is_tracing(shard) else handle
    ctx.use = None if ctx.handle is None else ctx.handle.on_gather()


def _give_back(ctx: Any, wgrad: Tensor) -> Tensor | None:
    if ctx.handle is not None and not is_tracing(wgrad):
        return cast("Tensor | None", ctx.handle.contribute(wgrad, ctx.use))
    return cast(Tensor, torch.ops.gtpgraph.reduce(wgrad, ctx.shard_rows, ctx.group_name))


def _gather_setup(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    _remember_use(ctx, *inputs)


def _gather_backward(ctx: Any, wgrad: Tensor) -> tuple[Tensor | None, None, None]:
    return _give_back(ctx, wgrad), None, None


def _reduce_setup(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    ctx.rows, ctx.group_name = inputs[0].shape[0], inputs[2]


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # The transpose of "sum over the ranks, cut" is "gather": double backward is exact.
    return torch.ops.gtpgraph.gather(grad, ctx.rows, ctx.group_name), None, None


class _GatherAlias(torch.autograd.Function):
    """gather over a group of one in eager mode: the shard itself, with gather's backward."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int) -> Tensor:
        _remember_use(ctx, shard, rows, "")
        return shard.detach()

    @staticmethod
    def backward(ctx: Any, wgrad: Tensor) -> tuple[Tensor | None, None]:
        return _give_back(ctx, wgrad), None


def gather(shard: Tensor, rows: int, group_name: str) -> Tensor:
    """The whole weight ``[rows, *rest]`` of ``shard``; what model code calls, eager and traced.

    With one process in the group and nothing traced, the result shares the shard's memory: a
    copy would double the weight's traffic for nothing, and autograd's version counter (shared
    too) still finds a weight that is changed between forward and backward. The operator itself
    copies there: under Inductor, an operator whose result aliases its input without saying so in
    its schema lets the memory planner reuse, and so overwrite, the weight.
    """
    if not group_name and not torch.compiler.is_compiling() and not compat.stands_for_data(shard):
        alias: Any = _GatherAlias
        return cast(Tensor, alias.apply(shard, rows))
    full = cast(Tensor, torch.ops.gtpgraph.gather(shard, rows, group_name))
    if not is_tracing(shard):
        setattr(full, GATHERED_ATTRIBUTE, (shard, rows, group_name))
    return full


def _register() -> Any:
    library: Any = torch.library.Library  # untyped in torch
    lib = library("gtpgraph", "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag,)
    lib.define("gather(Tensor shard, int rows, str group_name) -> Tensor", tags=tags)
    lib.define("reduce(Tensor grad, int shard_rows, str group_name) -> Tensor", tags=tags)
    lib.impl("gather", _gather_impl, "CompositeExplicitAutograd")
    lib.impl("reduce", _reduce_impl, "CompositeExplicitAutograd")
    torch.library.register_fake("gtpgraph::gather", _gather_fake, lib=lib)
    torch.library.register_fake("gtpgraph::reduce", _reduce_fake, lib=lib)
    torch.library.register_autograd(
        "gtpgraph::gather", _gather_backward, setup_context=_gather_setup, lib=lib
    )
    torch.library.register_autograd(
        "gtpgraph::reduce", _reduce_backward, setup_context=_reduce_setup, lib=lib
    )
    return lib


_LIBRARY = _register()  # the registrations live as long as this object
