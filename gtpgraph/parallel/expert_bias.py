"""The load-balancing bias of mixture-of-experts routers, updated once a step without a gradient.

In: each router's buffers `expert_bias` and `local_tokens_per_expert`, [num_experts] both. Out: the
biases, moved after the counts of every rank that routed other tokens have been summed.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["UpdateRule", "bias_pairs", "towards_mean", "update_expert_bias"]

UpdateRule = Callable[[Tensor, Tensor], None]  # (expert_bias, summed tokens per expert: float64)


def bias_pairs(model: object, function: str) -> list[tuple[Tensor, Tensor]]:
    """(expert_bias, local_tokens_per_expert) of each module that has both, in module order.

    Raises:
        ValueError: naming `function`, when the model is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{function}: expert_bias: expected an nn.Module whose modules hold the buffers "
            f"expert_bias and local_tokens_per_expert, got {type(model).__name__}"
        )
    return [
        (bias, tokens)
        for module in model.modules()
        if isinstance(bias := getattr(module, "expert_bias", None), Tensor)
        and isinstance(tokens := getattr(module, "local_tokens_per_expert", None), Tensor)
    ]


def towards_mean(rate: float) -> UpdateRule:
    """Move each bias by `rate` up if its expert got fewer tokens than the mean, down if more."""

    def update(bias: Tensor, tokens: Tensor) -> None:
        bias.add_(torch.sign(tokens.mean() - tokens).to(bias.dtype), alpha=rate)

    return update


@torch.no_grad()
def update_expert_bias(
    pairs: Sequence[tuple[Tensor, Tensor]],
    groups: Sequence[ProcessGroup | None],
    update: UpdateRule,
) -> None:
    """Sum every layer's counts over each group in turn, apply the rule, zero the counts.

    One collective a group (None: no collective); none at all without pairs, which is the same on
    every member as long as the groups do not reach beyond a pipeline stage.
    """
    if not pairs:
        return
    counts = [tokens for _, tokens in pairs]
    flat = torch.cat([tokens.double() for tokens in counts])
    for group in groups:
        if group is not None:
            dist.all_reduce(flat, group=group)
    totals = flat.split([tokens.numel() for tokens in counts])
    for (bias, tokens), total in zip(pairs, totals, strict=True):
        update(bias, total)
        tokens.zero_()
