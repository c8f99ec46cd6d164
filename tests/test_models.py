"""Built-in models: uses of weights, losses, precision, one graph, and the text they train on."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gtpgraph.data import byte_tokens
from gtpgraph.gpt import Experts, MoE, Rotary
from gtpgraph.models import GPT, MODELS, GPTConfig, build
from gtpgraph.testing import RankPool, fp64_grads, max_error

TINY = ["gpt-tiny", "mtp-tiny", "moe-tiny"]
SHAPES = [
    ("gpt-tiny", {}),
    ("mtp-tiny", {}),
    ("mtp-tiny", {"depths": 3, "repeat_layer": False}),
    ("mtp-tiny", {"tied": False, "bias": False, "norm": "layer"}),
    ("moe-tiny", {}),
    ("moe-tiny", {"depths": 1, "tied": True, "positions": "learned"}),
]


class Uses(TorchDispatchMode):
    """Counts, by storage, the embedding and matmul calls that read a weight."""

    OPS = (
        torch.ops.aten.embedding.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in self.OPS:
            tensors = [a for a in args if isinstance(a, Tensor)]
            self.count.update({t.untyped_storage().data_ptr() for t in tensors})
        return func(*args, **(kwargs or {}))

    def of(self, weight: Tensor) -> int:
        return self.count[weight.untyped_storage().data_ptr()]


def uses_in_forward(model: GPT, batch: tuple[Tensor]) -> Uses:
    with torch.no_grad(), Uses() as uses:
        model(*batch)
    return uses


class TestBuild:
    @pytest.mark.parametrize(("name", "overrides"), SHAPES)
    def test_every_weight_gets_a_gradient_and_sgd_lowers_the_loss(
        self, name: str, overrides: dict[str, Any]
    ) -> None:
        model, make_batch = build(name, **overrides)
        batch = make_batch(0, 0, "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(*batch)
            assert loss.shape == () and loss.dtype == torch.float32
            loss.backward()
            assert [k for k, p in model.named_parameters() if p.grad is None] == []
            assert [k for k, p in model.named_parameters() if not p.grad.abs().max() > 0] == []
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1

    @pytest.mark.parametrize("name", TINY)
    def test_weights_follow_from_the_seed(self, name: str) -> None:
        torch.manual_seed(5)
        one, _ = build(name)
        torch.manual_seed(5)
        two, _ = build(name)
        other, _ = build(name)
        assert max_error(one.state_dict(), two.state_dict()) == 0.0
        assert max_error(one.state_dict(), other.state_dict()) > 0.1

    @pytest.mark.parametrize("name", TINY)
    def test_reset_parameters_in_order_after_meta_gives_the_same_weights(self, name: str) -> None:
        torch.manual_seed(5)
        plain, make_batch = build(name)
        with torch.device("meta"):
            model, _ = build(name)
        assert list(model.buffers()) == []
        tied = model.head.weight is model.embed.weight
        model.to_empty(device="cpu")
        if tied:
            model.head.weight = model.embed.weight
        torch.manual_seed(5)
        for name_, module in model.named_modules():
            if hasattr(module, "reset_parameters") and not (tied and name_ == "head"):
                module.reset_parameters()
        batch = make_batch(0, 0, "cpu")
        assert torch.equal(model(*batch), plain(*batch))

    def test_names_are_those_that_patterns_are_written_for(self) -> None:
        names = [name for name, _ in build("moe-tiny")[0].named_parameters()]
        assert "layers.0.attn.qkv.weight" in names
        assert "layers.1.mlp.shared_experts.fc1.weight" in names
        experts = build("moe-tiny")[0].get_parameter("layers.1.mlp.experts.w1")
        assert experts.shape == (4, 128, 32)

    def test_gpt_124m_has_the_size_of_gpt2_small(self) -> None:
        with torch.device("meta"):
            model, make_batch = build("gpt-124m")
        num_weights = sum(p.numel() for p in model.parameters())
        # 12 layers of 12 C^2 + 13 C, two embeddings, the last norm.
        assert num_weights == 12 * (12 * 768**2 + 13 * 768) + (50304 + 512) * 768 + 2 * 768
        assert make_batch(0, 0, "cpu")[0].shape == (1, 513)

    @pytest.mark.parametrize("name", MODELS)
    def test_every_name_builds_on_the_meta_device(self, name: str) -> None:
        with torch.device("meta"):
            model, make_batch = build(name)
        assert model.config == MODELS[name]
        assert make_batch.length == model.config.seq + 1 + model.config.depths

    def test_overrides_and_a_whole_config(self) -> None:
        model, _ = build("mtp-tiny", depths=3, repeat_layer=False)
        assert (model.config.depths, len(model.mtp)) == (3, 3)
        config = GPTConfig(hidden=64)
        assert build("mtp-tiny", config=config)[0].config == config

    def test_errors_name_what_was_meant(self) -> None:
        with pytest.raises(ValueError, match=r"not a built-in name; did you mean 'mtp-tiny'"):
            build("mtp-tny")
        with pytest.raises(ValueError, match=r"no field 'depth'; did you mean 'depths'"):
            build("mtp-tiny", depth=3)
        with pytest.raises(ValueError, match=r"hidden: expected a multiple .* got 30; positions: "):
            build("mtp-tiny", hidden=30, positions="alibi")
        with pytest.raises(ValueError, match=r"vocab: expected at least 256, got 100"):
            GPTConfig(vocab=100)


class TestMTP:
    @pytest.mark.parametrize("depths", [0, 1, 3])
    @pytest.mark.parametrize("repeat", [True, False])
    def test_uses_of_tied_weight_and_of_mtp_layers(self, depths: int, repeat: bool) -> None:
        model, make_batch = build("mtp-tiny", depths=depths, repeat_layer=repeat)
        assert model.head.weight is model.embed.weight
        uses = uses_in_forward(model, make_batch(0, 0, "cpu"))
        assert uses.of(model.embed.weight) == 2 * (1 + depths)
        assert uses.of(model.layers[0].attn.qkv.weight) == 1
        expected = [depths] if repeat and depths else [1] * depths
        assert [uses.of(layer.join.weight) for layer in model.mtp] == expected

    def test_untied_embedding_and_head(self) -> None:
        model, make_batch = build("mtp-tiny", tied=False)
        uses = uses_in_forward(model, make_batch(0, 0, "cpu"))
        assert uses.of(model.embed.weight) == uses.of(model.head.weight) == 3

    def test_loss_is_the_written_formula(self) -> None:
        model, make_batch = build("mtp-tiny", depths=2, repeat_layer=False)
        (tokens,) = make_batch(3, 1, "cpu")
        t = tokens.shape[1] - 3
        rotary = model.rotary(t, torch.float32, tokens.device)

        def loss_of(h: Tensor, k: int) -> Tensor:
            logits = F.linear(model.norm(h), model.embed.weight)
            picked = logits.log_softmax(-1).gather(-1, tokens[:, k + 1 : t + k + 1, None])
            return -picked.mean()

        h = model.embed(tokens[:, :t])
        for layer in model.layers:
            h = layer(h, rotary)
        expected = loss_of(h, 0)
        for k in (1, 2):
            h = model.mtp[k - 1](h, model.embed(tokens[:, k : t + k]), rotary)
            expected = expected + 0.3 / 2 * loss_of(h, k)
        assert max_error(model(tokens), expected) < 1e-6

    def test_no_position_sees_a_later_token(self) -> None:
        model, make_batch = build("gpt-tiny", positions="rotary")
        (tokens,) = make_batch(0, 0, "cpu")
        hidden: list[Tensor] = []
        model.norm.register_forward_hook(lambda m, args, out: hidden.append(out))
        changed = tokens.clone()
        changed[:, 20] = (changed[:, 20] + 1) % 256
        model(tokens)
        model(changed)
        assert torch.equal(hidden[0][:, :20], hidden[1][:, :20])
        assert not torch.equal(hidden[0][:, 20:], hidden[1][:, 20:])


def test_rotary_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(dim=8)
    cos_sin = rotary(16, torch.float64, torch.device("cpu"))
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).expand(2, 16, 8)
    scores = Rotary.rotate(q, *cos_sin) @ Rotary.rotate(k, *cos_sin).T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(distance)
        assert max_error(diagonal, diagonal[:1].expand_as(diagonal)) < 1e-12
    assert abs(float(scores[0, 0] - scores[0, 5])) > 1e-3


def test_moe_is_the_gated_sum_of_experts_and_the_shared_one() -> None:
    moe = MoE(GPTConfig(experts=3)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    gate = moe.router(x).softmax(-1)
    expected = moe.shared_experts(x)
    for i in range(3):
        hidden = F.gelu(x @ moe.experts.w1[i].T)
        expected = expected + gate[..., i : i + 1] * (hidden @ moe.experts.w2[i].T)
    assert max_error(moe(x), expected) < 1e-12
    assert isinstance(moe.experts, Experts)


class TestPrecisionAndCompile:
    @pytest.mark.parametrize("name", TINY)
    def test_fp32_gradients_agree_with_fp64(self, name: str) -> None:
        model, make_batch = build(name)
        batches = [make_batch(0, rank, "cpu") for rank in range(2)]
        exact = fp64_grads(model, batches)
        assert all(g.dtype == torch.float64 for g in exact.values())
        assert max_error(fp64_grads(model, batches, torch.float32), exact) < 2e-5

    @pytest.mark.parametrize("name", TINY)
    def test_mean_over_ranks_is_the_gradient_of_the_concatenated_batch(self, name: str) -> None:
        model, make_batch = build(name)
        batches = [make_batch(0, rank, "cpu") for rank in range(3)]
        whole = fp64_grads(model, batches)
        each = [fp64_grads(model, [batch]) for batch in batches]
        mean = {key: torch.stack([g[key] for g in each]).mean(0) for key in whole}
        assert max_error(mean, whole) < 1e-12

    def test_bf16_weights_give_an_fp32_loss(self) -> None:
        model, make_batch = build("mtp-tiny")
        loss = model(*make_batch(0, 0, "cpu"))
        low = copy.deepcopy(model).to(torch.bfloat16)(*make_batch(0, 0, "cpu"))
        assert low.dtype == torch.float32
        assert max_error(low, loss) < 0.01

    @pytest.mark.parametrize(("name", "overrides"), SHAPES)
    def test_compiles_as_one_graph(self, name: str, overrides: dict[str, Any]) -> None:
        torch.compiler.reset()
        model, make_batch = build(name, **overrides)
        batch = make_batch(0, 0, "cpu")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(*batch).backward()
        grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        assert max_error(grads, fp64_grads(model, [batch], torch.float32)) < 1e-5


def batch_of(rank: int, world: int) -> Tensor:
    return build("mtp-tiny")[1](7, rank, "cpu")[0]


class TestData:
    def test_pieces_are_real_text_and_differ_by_seed_and_rank(self) -> None:
        pieces = {bytes(byte_tokens(s, r, 70).tolist()) for s in range(20) for r in range(8)}
        assert len(pieces) == 160
        assert any(b"def " in piece for piece in pieces)
        assert torch.equal(byte_tokens(3, 2, 70), byte_tokens(3, 2, 70))

    @pytest.mark.parametrize(
        "bad", [(-1, 0, 8), (0, -1, 8), (0, 4096, 8), (0, 0, 0), (0, 0, 10**9)]
    )
    def test_bad_arguments_are_named(self, bad: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match=r"byte_tokens: expected seed >= 0.* got seed="):
            byte_tokens(*bad)

    @pytest.mark.dist
    def test_ranks_draw_what_this_process_draws(self, ranks2: RankPool) -> None:
        drawn = ranks2.run(batch_of)
        assert [torch.equal(t, batch_of(r, 2)) for r, t in enumerate(drawn)] == [True, True]
