"""The models by name, and the way to a user's own.

In: a built-in name, ``hf:ClassName``, ``package.module:factory`` or ``file.py:factory``.
Out: an nn.Module, ``make_batch(seed, rank, device)`` giving its forward arguments, and, where the
forward returns something else than the scalar loss, ``loss_fn(output)``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gtpgraph import hf
from gtpgraph.by_path import module_at
from gtpgraph.data import ByteBatches
from gtpgraph.gpt import GPT, GPTConfig

__all__ = ["GPT", "MODELS", "Built", "GPTConfig", "build", "load_factory"]

# GPT-2 small, its vocabulary rounded up to a multiple of 128.
_SMALL = GPTConfig(
    vocab=50304,
    hidden=768,
    layers=12,
    heads=12,
    batch=1,
    seq=512,
    positions="learned",
    norm="layer",
)
MODELS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(positions="learned", norm="layer"),
    "gpt-124m": _SMALL,
    "gpt-1.3b": replace(_SMALL, hidden=2048, layers=24, heads=16, batch=2, seq=2048),
    "mtp-tiny": GPTConfig(depths=2),
    "mtp-124m": replace(_SMALL, depths=2, positions="rotary", norm="rms"),
    "moe-tiny": GPTConfig(experts=4, tied=False),
}


class Built(NamedTuple):
    """What a factory returns; ``loss_fn`` is None where the forward returns the loss."""

    model: nn.Module
    make_batch: Callable[..., tuple[Any, ...]]
    loss_fn: Callable[[Any], Tensor] | None = None


def near_misses(word: str, known: list[str]) -> str:
    """The tail of an error text: what ``word`` may have meant, then everything there is."""
    close = difflib.get_close_matches(word, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def build(name: str, **overrides: Any) -> tuple[GPT, ByteBatches]:
    """Build a built-in model and its make_batch; weights from torch's current seed.

    Args:
        name: a key of `MODELS`.
        overrides: `GPTConfig` fields, e.g. ``depths=3``; or ``config=`` a whole `GPTConfig`.

    Raises:
        ValueError: an unknown name or field (near misses are listed), or a bad value.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r}: not a built-in name; {near_misses(name, list(MODELS))}")
    config = overrides.pop("config", MODELS[name])
    known = [field.name for field in fields(GPTConfig)]
    if unknown := [key for key in overrides if key not in known]:
        raise ValueError(
            f"model {name!r}: no field {unknown[0]!r}; {near_misses(unknown[0], known)}"
        )
    config = replace(config, **overrides)
    return GPT(config), ByteBatches(config.batch, config.seq + 1 + config.depths)


def load_factory(spec: str, **overrides: Any) -> Built:
    """Build what ``spec`` names.

    Args:
        spec: a built-in name, ``hf:ClassName`` (see `gtpgraph.hf`), ``package.module:factory`` or
            ``file.py:factory``; the factory takes no required argument and returns
            (model, make_batch) or (model, make_batch, loss_fn).
        overrides: `GPTConfig` fields for built-in names, configuration fields for ``hf:``.

    Raises:
        ValueError: it cannot be found, imported or called as described; the factory's own
            exception is the cause.
    """
    if ":" not in spec:
        if spec not in MODELS and ("." in spec or "/" in spec):
            raise ValueError(
                f"model {spec!r}: no factory named; expected 'package.module:factory' or "
                "'file.py:factory'"
            )
        return Built(*build(spec, **overrides))
    if spec.startswith("hf:"):
        return Built(*hf.build(spec.removeprefix("hf:"), **overrides))
    if overrides:
        raise ValueError(
            f"model {spec!r}: {', '.join(overrides)} can be set on built-in models alone; set it "
            "in the factory"
        )
    where, _, name = spec.rpartition(":")
    module = _import(spec, where)
    factory = getattr(module, name, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        found = "no such name" if factory is None else f"a {type(factory).__name__}"
        raise ValueError(
            f"model {spec!r}: expected {name!r} to be a function in {where}, found {found}; "
            f"{near_misses(name, public)}"
        )
    return _checked(spec, factory)


def _import(spec: str, where: str) -> ModuleType:
    """Import a dotted module, or a file under its stem's name."""
    file = Path(where).resolve() if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"model {spec!r}: expected a file {where}, found none in {Path.cwd()}")
    try:
        if file is None:
            return importlib.import_module(where)
        return module_at(f"gtpgraph_factory_{file.stem}", str(file))
    except ModuleNotFoundError as error:
        missing = error.name or where
        own = where == missing or where.startswith(missing + ".")
        remedy = (
            "install it, run from its folder with PYTHONPATH=., or name a file: file.py:factory"
            if own
            else f"install {missing.partition('.')[0]}, which it imports"
        )
        raise ValueError(f"model {spec!r}: no module named {missing!r}; {remedy}") from error
    except Exception as error:
        raise ValueError(
            f"model {spec!r}: importing {where} raised {type(error).__name__}: {error}"
        ) from error


def _checked(spec: str, factory: Callable[[], Any]) -> Built:
    """Call a factory; its result as `Built`, or one error with everything that is wrong."""
    try:
        built = factory()
    except Exception as error:
        raise ValueError(
            f"model {spec!r}: the factory raised {type(error).__name__}: {error}; it is called "
            "without arguments"
        ) from error
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        size = f" of {len(built)}" if isinstance(built, tuple) else ""
        raise ValueError(
            f"model {spec!r}: expected (model, make_batch) or (model, make_batch, loss_fn), got a "
            f"{type(built).__name__}{size}"
        )
    result = Built(*built)
    problems: list[str] = []
    if not isinstance(result.model, nn.Module):
        problems.append(f"model: expected an nn.Module, got a {type(result.model).__name__}")
    if not callable(result.make_batch):
        got = type(result.make_batch).__name__
        problems.append(f"make_batch: expected a function (seed, rank, device), got a {got}")
    if result.loss_fn is not None and not callable(result.loss_fn):
        got = type(result.loss_fn).__name__
        problems.append(f"loss_fn: expected a function of the model's output, got a {got}")
    if problems:
        raise ValueError(f"model {spec!r}: " + "; ".join(problems))
    return result
