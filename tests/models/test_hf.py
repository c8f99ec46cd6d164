"""Models of transformers: the ``hf:`` factory, and whole steps through its classes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gtpgraph
from gtpgraph import hf
from gtpgraph.by_path import module_at
from gtpgraph.models import Built, load_factory
from gtpgraph.testing import fp64_grads, max_error

h = module_at(
    "gtpgraph_case_helpers", str(Path(__file__).resolve().parents[1] / "cases" / "helpers.py")
)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FULL_BAR = 5e-6  # fp32 sums over a whole model, against plain PyTorch in fp32


@pytest.fixture(autouse=True, scope="module")
def transformers() -> Iterator[Any]:
    with hf._without_bare_kernels():
        yield pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def tiny(name: str, **fields: Any) -> Built:
    torch.manual_seed(0)
    return load_factory(f"hf:{name}", **fields)


class TestFactory:
    def test_batches_depend_on_seed_and_rank_alone(self) -> None:
        make_batch = tiny("LlamaForCausalLM", num_hidden_layers=1).make_batch
        first, again, other = (make_batch(3, r, "cpu") for r in (1, 1, 2))
        assert first[0].shape == (hf.BATCH, hf.SEQ) and first[0].dtype == torch.int64
        assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])

    def test_fields_after_the_name_and_as_arguments_agree(self) -> None:
        a = tiny("LlamaForCausalLM?tie_word_embeddings=true&num_hidden_layers=1").model
        b = tiny("LlamaForCausalLM", tie_word_embeddings=True, num_hidden_layers=1).model
        assert a.lm_head.weight is a.model.embed_tokens.weight
        assert [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]

    @pytest.mark.parametrize(
        "spec, words",
        [
            ("LamaForCausalLM", ("LamaForCausalLM", "did you mean", "LlamaForCausalLM")),
            ("LlamaForCausalLM?layers=1", ("LlamaConfig has no field 'layers'",)),
            ("LlamaForCausalLM?layers", ("field=value", "'layers'")),
            ("LlamaForCausalLM?num_attention_heads=5", ("LlamaForCausalLM", "5")),
        ],
    )
    def test_what_it_refuses(self, spec: str, words: tuple[str, ...]) -> None:
        with pytest.raises(ValueError) as error:
            load_factory(f"hf:{spec}")
        assert all(word in str(error.value) for word in words), str(error.value)

    def test_without_transformers_the_remedy_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ValueError, match=r"gtpgraph\[models\]"):
            load_factory("hf:LlamaForCausalLM")

    def test_the_import_path_is_left_as_it_was(self) -> None:
        before, kernels = list(sys.path), sys.modules.get("kernels", "none")
        tiny("LlamaForCausalLM", num_hidden_layers=1)
        assert sys.path == before and sys.modules.get("kernels", "none") == kernels


def step_and_check(built: Built, **options: Any) -> tuple[Any, Any]:
    """Two compiled steps against plain PyTorch; eager's reports first, which they must equal."""
    model, make_batch, loss_fn = built
    batch = make_batch(0, 0, "cpu")
    expected = fp64_grads(model, [batch], torch.float32, loss_fn)
    ddp = h.wrap(model)
    h.step(ddp, ddp, *batch, loss_fn=loss_fn)
    eager = h.counts(ddp.reports)
    compiled = gtpgraph.compile(ddp, lowering="eager", **options)
    for _ in range(2):
        h.step(ddp, compiled, *batch, loss_fn=loss_fn)
    assert max_error(h.full_grads(ddp), expected) <= FULL_BAR
    if not options.get("coalesce"):
        assert h.counts(ddp.reports) == eager == compiled.plan.ready_counts
    assert h.told(ddp.reports) == h.occurrences(compiled.plan)
    return ddp, compiled


@pytest.mark.parametrize(
    "name, uses",
    [
        pytest.param("LlamaForCausalLM?num_hidden_layers=1", 1, marks=pytest.mark.slow),
        ("GPT2LMHeadModel?n_layer=1", 2),
        pytest.param(
            "T5ForConditionalGeneration?num_layers=1&num_decoder_layers=1",
            3,
            marks=pytest.mark.slow,
        ),
        ("MixtralForCausalLM?num_hidden_layers=1", 1),
    ],
)
def test_a_step_of_a_class(name: str, uses: int) -> None:
    ddp, compiled = step_and_check(tiny(name))
    assert len(compiled.plan.regions) == 1 and compiled.plan.unused == ()
    assert max(h.counts(ddp.reports).values()) == uses


@pytest.mark.slow
def test_a_shared_embedding_is_coalesced() -> None:
    ddp, compiled = step_and_check(
        tiny("T5ForConditionalGeneration?num_layers=1&num_decoder_layers=1"), coalesce=True
    )
    assert set(h.counts(ddp.reports).values()) == {1}
    assert [o.extra for o in compiled.plan.regions[0].occurrences if o.uses > 1] == [
        {"coalesced": 3}
    ]


class TestHabits:
    """What programs do with such a model around wrapping it."""

    def test_deepcopy_cast_and_load_before_wrapping(self) -> None:
        built = tiny("GPT2LMHeadModel?n_layer=1")
        saved = copy.deepcopy(built.model.state_dict())
        model = copy.deepcopy(built.model)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model.load_state_dict(saved)
        model = model.to(torch.float64).to(torch.float32)
        assert model.lm_head.weight is model.transformer.wte.weight
        step_and_check(Built(model, built.make_batch, built.loss_fn))

    def test_names_and_values_of_its_state_dict_survive(self) -> None:
        """What save_pretrained writes: the names of the model before any wrapper."""
        built = tiny("LlamaForCausalLM?tie_word_embeddings=true&num_hidden_layers=1")
        before = {k: v.clone() for k, v in built.model.state_dict().items()}
        ddp = h.wrap(built.model)
        after = ddp.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(_whole(after[k]), v) for k, v in before.items())
        ddp.load_state_dict(before)

    def test_writers_are_refused_and_readers_work(self) -> None:
        """tie_weights only confirms a tie that is there; what would write into a gathered copy, or
        replace a shard, says so."""
        built = tiny("LlamaForCausalLM?tie_word_embeddings=true&num_hidden_layers=1")
        model = built.model
        gtpgraph.shard(model)
        assert (
            model.get_parameter("model.embed_tokens.weight")
            is dict(model.named_parameters())["model.embed_tokens.weight"]
        )
        model.tie_weights()
        owner, head = model.model.embed_tokens, model.lm_head
        assert owner._parameters["weight"] is head._parameters["weight"]
        text = h.error_of(model.resize_token_embeddings, 80)
        assert text.startswith("RuntimeError") and "shard" in text
        text = h.error_of(setattr, head, "weight", nn.Parameter(torch.zeros(61, 32)))
        assert text.startswith("RuntimeError") and "shard last" in text

    @pytest.mark.slow
    def test_frozen_embeddings_have_no_site(self) -> None:
        built = tiny("LlamaForCausalLM", num_hidden_layers=1)
        built.model.model.embed_tokens.requires_grad_(False)
        _, compiled = step_and_check(built)
        assert "model.embed_tokens.weight" not in compiled.plan.ready_counts

    @pytest.mark.slow
    def test_gradient_checkpointing(self) -> None:
        built = tiny("LlamaForCausalLM", num_hidden_layers=1)
        built.model.gradient_checkpointing_enable({"use_reentrant": False})
        step_and_check(built)


def _whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full
