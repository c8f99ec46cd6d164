"""End of a backward: complete the gradients that several ranks share, then scale by the tokens.

In: a model whose buckets are under way, the token count if the loss is a sum over tokens, and one
collection of process groups. Out: gradients that are final in the slices this rank owns.

    resolve and check every group -> wait for the buckets
      -> embeddings shared across stages (embd, pos_embd) -> sequence-parallel weights (tp)
      -> expert bias (tp_dp_cp) -> tokens: broadcast over pp, sum over the data group -> scale

Every sum is linear, so the order changes no value; it is the same on all ranks because each group's
members must issue in one order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gtpgraph.parallel.expert_bias import (
    UpdateRule,
    bias_pairs,
    towards_mean,
    update_expert_bias,
)
from gtpgraph.parallel.process_groups import UNSET, ProcessGroups

__all__ = ["GradientModel", "finalize_model_grads"]

_FUNCTION = "finalize_model_grads"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class GradientModel(Protocol):
    """What finalize_model_grads needs of a wrapped model; DistributedDataParallel has it."""

    @property
    def groups(self) -> ProcessGroups:
        """The collection that the model was wrapped with."""

    def finish_grad_sync(self) -> None:
        """Dispatch what is left, wait for every bucket, check."""

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient, in the slices this rank owns, by `factor` (a scalar)."""

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(FQN, weight), in the same order on all ranks of a stage.

        A weight may carry `sequence_parallel`, `shared_embedding` or `shared_position_embedding`
        (True), and has `main_grad`, or none when no site uses it. The stages that share a weight
        own the same slice of it: it has a bucket to itself.
        """


@dataclass(frozen=True)
class _Work:
    """What one call will do, resolved before it does anything.

    A group of None means that this rank has nobody to reduce with.
    """

    tp: ProcessGroup | None
    pp: ProcessGroup | None
    last_stage: int  # global rank
    data: ProcessGroup | None  # tokens are summed over it
    shared: list[tuple[ProcessGroup | None, list[nn.Parameter]]]  # per embedding group
    sequence_parallel: list[nn.Parameter]
    bias_pairs: list[tuple[Tensor, Tensor]]
    bias_groups: list[ProcessGroup | None]


@torch.no_grad()
def finalize_model_grads(
    model: GradientModel,
    num_tokens: Tensor | int | None = None,
    groups: ProcessGroups | None = None,
    *,
    expert_bias: bool | UpdateRule = False,
    expert_bias_rate: float = 1e-3,
) -> None:
    """Wait for the model's gradients, complete those that are shared, scale by the token count.

    Collective over the model's ranks: all must call it, with the same options. It uses the groups
    of one collection alone, checks every one that its options will use before the first collective
    or gradient write, and creates none.

    Args:
        model: the wrapped model.
        num_tokens: tokens that this rank's data contributed to the loss, for a loss that is a sum
            over tokens (`loss="per_token"`); None for a mean. The last pipeline stage's value
            counts, the other stages may pass 0 (but not None). Gradients are divided by the sum
            over the data group: dp x cp, and gtp where that axis exists. No tokens: no division.
        groups: the collection to use; by default the one that the model was wrapped with. An
            object with attributes of these names is read as `ProcessGroups.from_attributes` does.
            Required: tp and pp; embd when pp > 1 (None says that no embedding is shared across
            stages); pos_embd where a weight is marked so; with `num_tokens` dp_cp, or dp_cp_gtp
            when gtp > 1; tp_dp_cp (and gtp) with `expert_bias`.
        expert_bias: update the routers' load-balancing bias. The model is then an nn.Module, in
            which each module with buffers `expert_bias` and `local_tokens_per_expert`, both
            [num_experts], takes part: the counts are summed over tp_dp_cp (and gtp), the bias moves
            by `expert_bias_rate` towards the mean load, the counts are zeroed. A function
            `update(expert_bias, summed_tokens_per_expert)`, tokens float64, replaces that rule.
        expert_bias_rate: the step of that rule.

    Raises:
        ValueError: groups are missing or contradict the model (all of them in one message).
        RuntimeError: the stages that share an embedding disagree about its size or dtype.
    """
    work = _resolve(model, num_tokens, groups, expert_bias is not False)
    model.finish_grad_sync()
    for group, weights in work.shared:
        if group is not None:
            _reduce_shared(_grads(weights), group)
    if work.tp is not None:
        _all_reduce(_grads(work.sequence_parallel), work.tp)
    rule = towards_mean(expert_bias_rate) if isinstance(expert_bias, bool) else expert_bias
    update_expert_bias(work.bias_pairs, work.bias_groups, rule)
    if num_tokens is not None:
        device = next((w.device for _, w in model.named_weights()), None)
        total = _count_tokens(num_tokens, work, device)
        model.scale_gradients(torch.where(total > 0, 1.0 / total, 1.0))


def _resolve(
    model: GradientModel, num_tokens: Tensor | int | None, given: object, expert_bias: bool
) -> _Work:
    """Check everything that the call will use; no collective, no write."""
    if isinstance(num_tokens, int) and num_tokens < 0:
        raise ValueError(f"{_FUNCTION}: num_tokens: expected at least 0, got {num_tokens}")
    groups = _collection(model, given)
    marks = ("shared_embedding", "shared_position_embedding", "sequence_parallel")
    words, positions, sequence = (
        [w for _, w in model.named_weights() if getattr(w, mark, False)] for mark in marks
    )
    gtp = _gtp_size(groups, model)
    data = "dp_cp" if gtp == 1 else "dp_cp_gtp"
    bias_axes = ["tp_dp_cp"] if gtp == 1 else ["tp_dp_cp", "gtp"]
    needed = _needed(groups, gtp, data if num_tokens is not None else None, bool(positions))
    if expert_bias:
        for axis in bias_axes:
            needed[axis] = f"{needed[axis]} and expert_bias" if axis in needed else "expert_bias"
    found = groups.require(*needed, function=_FUNCTION, option=needed)
    if words and "embd" in found and found["embd"] is None:
        raise ValueError(
            f"{_FUNCTION}: embd: expected the group of the stages that share an embedding, since "
            f"{len(words)} weight(s) of this rank are marked shared_embedding, got None. Remedy: "
            "pass the group, or leave the weights unmarked"
        )
    return _Work(
        tp=found["tp"],
        pp=found["pp"],
        last_stage=groups.ranks("pp")[-1],
        data=found.get(data),
        shared=[(found.get("embd"), words), (found.get("pos_embd"), positions)],
        sequence_parallel=sequence,
        bias_pairs=bias_pairs(model, _FUNCTION) if expert_bias else [],
        bias_groups=[found[axis] for axis in bias_axes] if expert_bias else [],
    )


def _collection(model: GradientModel, given: object) -> ProcessGroups:
    """The collection given, else the one that the model was wrapped with."""
    groups = getattr(model, "groups", None) if given is None else given
    if groups is None:
        raise ValueError(
            f"{_FUNCTION}: groups: expected a collection of process groups, got none, and "
            f"{type(model).__name__} was wrapped without one. Remedy: pass groups="
        )
    if isinstance(groups, ProcessGroups):
        return groups
    return ProcessGroups.from_attributes(groups)


def _needed(
    groups: ProcessGroups, gtp: int | None, data: str | None, positions: bool
) -> dict[str, str]:
    """{group that the call may use: what needs it}, conditional branches included."""
    needed = {
        "tp": "every call (gradients of sequence-parallel weights)",
        "pp": "every call (stages that share embeddings or the token count)",
    }
    # Nobody said how many stages there are: then embd may be needed as well, so name both at once.
    if groups.pp is UNSET or groups.size("pp") > 1:
        needed["embd"] = "pp > 1 (embeddings shared across stages; None: none is shared)"
        # A stage without such a weight still joins, if the collection has the group.
        if positions or groups.pos_embd is not UNSET:
            needed["pos_embd"] = "pp > 1 (a weight is marked shared_position_embedding)"
    if data is not None:
        if gtp is None:
            needed["gtp"] = "num_tokens (it decides between dp_cp and dp_cp_gtp)"
        needed[data] = "num_tokens" if gtp in (1, None) else f"num_tokens with gtp = {gtp}"
    return needed


def _gtp_size(groups: ProcessGroups, model: GradientModel) -> int | None:
    """Ranks along gtp; None if there are signs of such an axis and nobody said how large it is.

    The size is the collection's, checked against the one that the model was wrapped with. Where
    both leave gtp unset the model cannot be sharded over it, unless dp_cp_gtp was set.
    """
    wrapped = getattr(model, "groups", None)
    known = [g for g in (groups, wrapped) if isinstance(g, ProcessGroups) and g.gtp is not UNSET]
    sizes = [g.size("gtp") for g in known]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{_FUNCTION}: gtp: expected {sizes[1]} ranks, as the model was wrapped with, got "
            f"{sizes[0]} in the given collection. Remedy: pass the model's own collection"
        )
    if sizes:
        return sizes[0]
    return 1 if groups.dp_cp_gtp is UNSET else None


def _grads(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    """main_grads; a weight without one has no site on any rank of its stage, so all skip it."""
    found = (getattr(weight, "main_grad", None) for weight in weights)
    return [grad for grad in found if grad is not None]


def _all_reduce(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum each tensor over the group, in place: one collective per dtype."""
    for dtype in _DTYPES:
        same = [t for t in tensors if t.dtype == dtype]
        if len(same) == 1 and same[0].is_contiguous():
            dist.all_reduce(same[0], group=group)  # an embedding is large: no copy
        elif same:
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(flat, group=group)
            for t, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                t.copy_(part.view_as(t))


def _reduce_shared(grads: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum the gradients that stages share, after they agreed on what there is to sum.

    Stages are different programs. One with nothing to contribute still joins, with zeros; two that
    differ otherwise get an error where a bare all-reduce would hang or mix weights.
    """
    device = grads[0].device if grads else _device_of(group)
    mine = [sum(g.numel() for g in grads if g.dtype == dtype) for dtype in _DTYPES]
    bounds = torch.tensor([*mine, *(-(n or 2**62) for n in mine)], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds[: len(mine)].tolist(), (-bounds[len(mine) :]).tolist()
    if wrong := [
        f"{dtype}: {low} and {high} elements"
        for dtype, high, low in zip(_DTYPES, most, least, strict=True)
        if high and low != high
    ]:
        raise RuntimeError(
            f"{_FUNCTION}: stages {tuple(dist.get_process_group_ranks(group))} share embeddings of "
            f"different sizes: {'; '.join(wrong)}. Expected equal gradients on each. Remedy: mark "
            "the same weights on every stage"
        )
    absent = [
        torch.zeros(high, dtype=dtype, device=device)
        for dtype, high, own in zip(_DTYPES, most, mine, strict=True)
        if high and not own
    ]
    _all_reduce([*grads, *absent], group)


def _device_of(group: ProcessGroup) -> torch.device:
    """Where this rank's collectives on `group` take their tensors from."""
    nccl = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _count_tokens(num_tokens: Tensor | int, work: _Work, device: torch.device | None) -> Tensor:
    """The last stage's token count, summed over the data group; a float64 scalar."""
    total = (
        torch.as_tensor(num_tokens).to(device=device, dtype=torch.float64, copy=True).reshape(())
    )
    if work.pp is not None:
        dist.broadcast(total, src=work.last_stage, group=work.pp)
    if work.data is not None:
        dist.all_reduce(total, group=work.data)
    return total
