"""A plain GPT with multi-token prediction (MTP) and experts (MoE): unsharded nn.Modules.

In: tokens. Out: the scalar loss. MTP as in DeepSeek-V3 (arXiv 2412.19437, section 2.2), D depths:

    h_0 = layers(embed(t[0:T]))                        loss_0: head(norm(h_0)) against t[1:T+1]
    h_k = mtp_k(norm(h_{k-1}), norm(embed(t[k:T+k])))  loss_k: head(norm(h_k)) against t[k+1:T+k+1]
    loss = loss_0 + 0.3 / D * sum of loss_k

so embedding and output layer are used 1 + D times each (2 * (1 + D) uses of one weight when tied)
and with ``repeat_layer`` one MTP layer is used D times.

Shapes: B batch, T sequence, C hidden, H heads, D depths, E experts, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MTP_LOSS_WEIGHT = 0.3
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and switches of a `GPT`; ``batch`` and ``seq`` are those of its make_batch."""

    vocab: int = 256
    hidden: int = 32
    layers: int = 2
    heads: int = 2
    batch: int = 2
    seq: int = 32
    ffn: int = 0  # feed-forward width; 0 means 4 * hidden
    positions: Literal["learned", "rotary"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = True  # of the attention and feed-forward layers
    tied: bool = True  # one weight for embedding and output layer
    depths: int = 0  # MTP depths; 0 means none
    repeat_layer: bool = True  # one MTP layer used ``depths`` times, else one per depth
    experts: int = 0  # 0 means dense feed-forward layers everywhere
    dense_layers: int = 1  # the first ones stay dense in a MoE model

    def __post_init__(self) -> None:
        problems = [
            f"{name}: expected at least {least}, got {getattr(self, name)}"
            for name, least in _LEAST.items()
            if getattr(self, name) < least
        ]
        if self.heads > 0 and self.hidden % (2 * self.heads):
            problems.append(
                f"hidden: expected a multiple of 2 * heads = {2 * self.heads}, got {self.hidden}"
            )
        for name, allowed in (("positions", ("learned", "rotary")), ("norm", ("rms", "layer"))):
            if getattr(self, name) not in allowed:
                problems.append(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

    @property
    def width(self) -> int:
        """Feed-forward width F."""
        return self.ffn or 4 * self.hidden


_LEAST = {
    **dict.fromkeys(("hidden", "layers", "heads", "batch", "seq"), 1),
    **dict.fromkeys(("ffn", "depths", "experts", "dense_layers"), 0),
    "vocab": 256,  # tokens are bytes
}


class Embedding(nn.Embedding):
    """An embedding with rows small enough to serve as a tied output layer."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def _norm(config: GPTConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden, eps=1e-5)


class Attention(nn.Module):
    """Causal self-attention, x [B, T, C] -> [B, T, C]; ``rotary`` is None or cos, sin [T, C/H]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, C/H]
        if rotary is not None:
            q, k = Rotary.rotate(q, *rotary), Rotary.rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, c))
        return out


class Rotary(nn.Module):
    """Rotary position embedding over ``dim`` features of a head; no weights, no buffers.

    cos and sin are made in the forward: a buffer would have to be filled again after a build on
    the meta device.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(
        self, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [num_positions, dim] in ``dtype``, from angles in fp32 or fp64."""
        wide = torch.promote_types(dtype, torch.float32)
        steps = torch.arange(0, self.dim, 2, device=device, dtype=wide) / self.dim
        at = torch.arange(num_positions, device=device, dtype=wide)
        angles = torch.outer(at, ROTARY_BASE**-steps).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., T, dim] by its positions' angles."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """Feed-forward layer with GELU, [..., C] -> [..., C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.fc2 = nn.Linear(config.width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Experts(nn.Module):
    """E feed-forward layers with stacked weights: x [N, C] -> [E, N, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights as nn.Linear draws its own: uniform, bound 1 / sqrt(inputs)."""
        for weight in (self.w1, self.w2):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("nc,efc->enf", x, self.w1))
        return torch.bmm(hidden, self.w2.transpose(1, 2))


class MoE(nn.Module):
    """Softly routed experts and one shared expert, [B, T, C] -> [B, T, C].

    Every expert sees every token, weighted by the router's softmax: shapes do not depend on the
    data, and the gradient is smooth, so that runs in different precisions can be compared.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared_experts = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [N, C]
        gate = torch.softmax(self.router(flat), dim=-1)  # [N, E]
        routed = torch.einsum("ne,enc->nc", gate, self.experts(flat))
        out: Tensor = routed.view_as(x) + self.shared_experts(x)
        return out


class Block(nn.Module):
    """Pre-norm transformer layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig, moe: bool = False) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attn = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = MoE(config) if moe else MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class MTPLayer(nn.Module):
    """One MTP depth: the hidden state and the next token's embedding, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.hidden_norm = _norm(config)
        self.embed_norm = _norm(config)
        self.join = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = Block(config)

    def forward(self, h: Tensor, e: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        joined = self.join(torch.cat((self.hidden_norm(h), self.embed_norm(e)), dim=-1))
        out: Tensor = self.block(joined, rotary)
        return out


class GPT(nn.Module):
    """Decoder with optional MTP and MoE; tokens int64 [B, T + 1 + D] -> mean loss, scalar fp32.

    The loss is fp64 for fp64 weights. Weights are drawn by each module's ``reset_parameters``, in
    order of construction.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.pos = Embedding(config.seq, config.hidden) if learned else None
        self.rotary = None if learned else Rotary(config.hidden // config.heads)
        moe_from = config.dense_layers if config.experts else config.layers
        self.layers = nn.ModuleList(Block(config, i >= moe_from) for i in range(config.layers))
        self.norm = _norm(config)
        num_mtp = min(config.depths, 1) if config.repeat_layer else config.depths
        self.mtp = nn.ModuleList(MTPLayer(config) for _ in range(num_mtp))
        # On the meta device the tied layer's own weight, replaced at once, costs nothing.
        device = torch.device("meta") if config.tied else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False, device=device)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        depths, seq = self.config.depths, tokens.shape[1] - 1 - self.config.depths
        h = self.embed(tokens[:, :seq])
        if self.pos is not None:
            h = h + self.pos(torch.arange(seq, device=tokens.device))
        rotary = None if self.rotary is None else self.rotary(seq, h.dtype, h.device)
        for layer in self.layers:
            h = layer(h, rotary)
        loss = self._loss(h, tokens[:, 1 : seq + 1])
        for depth in range(1, depths + 1):
            layer = self.mtp[0 if self.config.repeat_layer else depth - 1]
            h = layer(h, self.embed(tokens[:, depth : seq + depth]), rotary)
            extra = self._loss(h, tokens[:, depth + 1 : seq + depth + 1])
            loss = loss + MTP_LOSS_WEIGHT / depths * extra
        return loss

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(h))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
