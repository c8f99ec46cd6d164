"""``hf:ClassName``: any model class of transformers, tiny and with random weights; no download.

In: ``hf:LlamaForCausalLM``, or ``hf:LlamaForCausalLM?tie_word_embeddings=true&num_hidden_layers=4``
with fields of the class's configuration. Out: the model in train mode with every dropout off, and
batches of equal size, so that the mean of the ranks' losses is the loss of the concatenated batch.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

BATCH, SEQ = 2, 8
_FIRST_TOKEN = 3  # 0, 1 and 2 are padding, begin and end

# Values by field name, for whichever of these fields a configuration has. The vocabulary is odd,
# so that no number of GTP ranks divides it.
_TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "vocab_size_per_layer_input": 61,
    "intermediate_size": 48, "d_ff": 48, "d_inner": 48, "n_inner": 48, "hidden_dim": 48,
    "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "d_kv": 8, "rotary_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "n_positions": 32, "max_source_positions": 8,
    "max_target_positions": 32, "num_mel_bins": 8, "state_size": 4, "time_step_rank": 4,
    "image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "use_cache": False,
}  # fmt: skip
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter", "drop_path")  # in names of rates; set to 0


@dataclass(frozen=True)
class HFBatches:
    """make_batch(seed, rank, device) of one class: forward arguments in the order of `names`.

    Token ids int64 [BATCH, SEQ]; pixels and audio features float32; arguments that are left out
    are None.
    """

    names: tuple[str, ...]
    vocab: int
    shapes: dict[str, tuple[int, ...]]
    num_labels: int | None  # a class of labels a sample, or None: one a token

    def __call__(self, seed: int, rank: int, device: str | torch.device = "cpu") -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(100_003 * seed + rank)
        return tuple(self._value(name, generator, device) for name in self.names)

    def _value(self, name: str, generator: torch.Generator, device: str | torch.device) -> Any:
        shape = self.shapes.get(name)
        if shape is None:
            return None
        if name in ("pixel_values", "input_features", "input_values", "inputs_embeds"):
            return torch.randn(shape, generator=generator).to(device)
        low, high = _FIRST_TOKEN, self.vocab
        if name == "labels" and self.num_labels is not None:
            low, high = 0, self.num_labels
        return torch.randint(low, high, shape, generator=generator).to(device)


def build(name: str, **overrides: Any) -> tuple[nn.Module, HFBatches, Callable[[Any], Tensor]]:
    """A tiny model of a transformers class, its make_batch, and the loss of its output.

    Args:
        name: a class, optionally with ``?field=value&...`` (values as in JSON, else text).
        overrides: more fields of the configuration. Weights come from torch's current seed.

    Raises:
        ValueError: transformers is not installed, an unknown class or field (near misses listed),
            or a configuration that the class refuses. NotImplementedError: a class whose inputs
            are of no known kind.
    """
    name, _, query = name.partition("?")
    with _without_bare_kernels():
        cls = _model_class(name)
        config = _config(cls, {**_parse(query), **overrides})
        try:
            model: nn.Module = cls(config)
        except Exception as error:
            raise ValueError(f"hf:{name}: {type(error).__name__}: {error}") from error
    return model.train(), _batches(cls, config), loss_of


def loss_of(output: Any) -> Tensor:
    """The loss of a transformers output: its own, else the mean square of its first tensor."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    first: Tensor = output[0]
    return first.square().mean()


@contextmanager
def _without_bare_kernels() -> Iterator[None]:
    """Keep other things called ``kernels`` out of sight while transformers is imported.

    It takes a top-level module of that name for Hugging Face's package. Run from a checkout, that
    would be our folder (its root is importable) or a script's neighbour.
    """
    before, modules = list(sys.path), cast("dict[str, Any]", sys.modules)
    hidden = "kernels" not in modules and not _is_installed("kernels")
    if hidden:
        modules["kernels"] = None  # the import system's own mark for "there is none"
    root = Path(__file__).resolve().parents[1]
    sys.path[:] = [p for p in before if Path(p or ".").resolve() != root]
    try:
        yield
    finally:
        sys.path[:] = before
        if hidden:
            del modules["kernels"]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _model_class(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"hf:{name}: expected transformers to be installed, got: {error}. "
            "Install gtpgraph[models]."
        ) from error
    cls = getattr(transformers, name, None) if name in dir(transformers) else None
    if cls is None or getattr(cls, "config_class", None) is None:
        known = [n for n in dir(transformers) if "For" in n or n.endswith(("Model", "LMHead"))]
        near = difflib.get_close_matches(name, known, n=3) or ["LlamaForCausalLM"]
        raise ValueError(
            f"hf:{name}: expected a model class of transformers {transformers.__version__}, got "
            f"none of that name; did you mean {' or '.join(near)}?"
        )
    return cls


def _parse(query: str) -> dict[str, Any]:
    values = {}
    for item in filter(None, query.split("&")):
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"hf: expected field=value after '?', got {item!r}")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values


def _config(cls: Any, overrides: dict[str, Any]) -> Any:
    config_class = cls.config_class
    known = set(inspect.signature(config_class.__init__).parameters) | set(
        config_class.attribute_map
    )
    always = {
        "num_labels",
        "use_cache",
        "decoder_start_token_id",
        "attn_implementation",
        "experts_implementation",
    }
    unknown = sorted(overrides.keys() - known - always)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=3)
        raise ValueError(
            f"hf:{cls.__name__}: {config_class.__name__} has no field {unknown[0]!r}; "
            f"did you mean {' or '.join(near) or ', '.join(sorted(known)[:8])}?"
        )
    defaults = inspect.signature(config_class.__init__).parameters
    values = {k: v for k, v in _TINY.items() if k in defaults or k in always}
    for key in defaults:
        if any(part in key for part in _RANDOM) and not key.startswith("classifier"):
            values[key] = 0.0
    values.update(overrides)
    try:
        return config_class(**values)
    except Exception as error:
        raise ValueError(f"hf:{cls.__name__}: {type(error).__name__}: {error}") from error


def _batches(cls: Any, config: Any) -> HFBatches:
    order = [p for p in inspect.signature(cls.forward).parameters if p not in ("self", "kwargs")]
    per_sample = "Classification" in cls.__name__ and "Token" not in cls.__name__
    shapes = _input_shapes(cls, config)
    if "labels" in order:
        shapes["labels"] = (BATCH,) if per_sample else (BATCH, SEQ)
    elif "decoder_input_ids" in order:
        shapes["decoder_input_ids"] = (BATCH, SEQ)
    last = max(order.index(name) for name in shapes)
    labelled = config.num_labels if "Classification" in cls.__name__ else None
    vocab = getattr(config, "vocab_size", _FIRST_TOKEN + 1)
    return HFBatches(tuple(order[: last + 1]), vocab, shapes, labelled)


def _input_shapes(cls: Any, config: Any) -> dict[str, tuple[int, ...]]:
    main = cls.main_input_name
    if main == "input_ids":
        return {main: (BATCH, SEQ)}
    if main == "pixel_values" and hasattr(config, "image_size"):
        return {main: (BATCH, config.num_channels, config.image_size, config.image_size)}
    if main == "input_features" and hasattr(config, "max_source_positions"):
        return {main: (BATCH, config.num_mel_bins, 2 * config.max_source_positions)}
    raise NotImplementedError(
        f"hf:{cls.__name__}: expected a main input of token ids, pixels or mel features, got "
        f"{main!r}. Write a factory: file.py:build, returning (model, make_batch, loss_fn)."
    )
