"""The hook plan: frozen records of what every region will report, and their JSON form.

In: what the passes found and inserted. Out: ``gtpgraph.plan/1`` (an unknown schema is refused,
unknown keys are kept through a round trip). Nothing here knows torch: a plan can be read, compared
and checked on a machine without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = "gtpgraph.plan/1"
GRAPHED = "GRAPHED"
UNGRAPHED = "UNGRAPHED"


@dataclass(frozen=True)
class AxisRanks:
    """A process group as the plan shows it: the mesh axis and the global ranks on it."""

    axis: str
    ranks: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Occurrence:
    """One execution of one site: one readiness report.

    `use` counts from 1 to `uses` in forward order; `bytes` are those of the shard's main_grad;
    `event` is the bucket that this occurrence completes (region by region), or None; `source` is
    the forward line of the use.
    """

    site: int
    weight: str
    aliases: tuple[str, ...]
    use: int
    uses: int
    chain: str
    gtp: AxisRanks | None
    bucket: int
    bytes: int
    stream: str
    event: int | None
    node: str
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Excluded:
    """A contribution of the region that its plan leaves out, and why."""

    weight: str
    use: int
    chain: str
    reason: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionPlan:
    """Occurrences of one region in order of execution; `calls` are forward calls a step."""

    name: str
    calls: int | None
    occurrences: tuple[Occurrence, ...]
    excluded: tuple[Excluded, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: `numel` elements of `dtype`, padding included, reduced over `group`."""

    bucket: int
    group: AxisRanks
    numel: int
    dtype: str
    wire_dtype: str
    weights: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanWarning:
    """Something the user should know about one weight, with a stable code."""

    code: str
    weight: str
    text: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HookPlan:
    """What a compiled model reports in one synchronised step."""

    model: str
    world: Mapping[str, int]
    versions: Mapping[str, str]
    lowering: str
    regions: tuple[RegionPlan, ...]
    buckets: tuple[BucketPlan, ...]
    ready_counts: Mapping[str, int]
    unused: tuple[str, ...]
    warnings: tuple[PlanWarning, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Whether accumulates were fused in a region: reports of joined weights then follow the
        joint accumulate."""
        return bool(self.extra.get("fused", False))

    @property
    def hash(self) -> str:
        """Digest of everything but versions, model name, lowering, node names, source lines and
        calls: a plan keeps its digest when its first step shows one call of each region. Fusing
        counts by the order that it makes alone."""
        body = _encode(self)
        for key in ("versions", "model", "lowering", "schema", "hash", "warnings", "fused"):
            body.pop(key, None)
        for region in body["regions"]:
            region.pop("calls")  # null until a step has run; ready_counts holds what it changes
            for occurrence in region["occurrences"]:
                occurrence.pop("node"), occurrence.pop("source")
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = 1) -> str:
        """The plan as JSON text of schema ``gtpgraph.plan/1``."""
        return json.dumps(
            {"schema": SCHEMA, **_encode(self), "hash": self.hash}, indent=indent, sort_keys=False
        )

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan") -> HookPlan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: not JSON (a truncated file), another schema, a key missing or of the wrong
                kind, or a hash that does not fit the contents; `name` says which plan.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name}: expected JSON of schema {SCHEMA!r}, got text that stops making sense at "
                f"line {error.lineno}, column {error.colno} ({error.msg}). Is the file complete? "
                "Write it again with `gtpgraph inspect MODEL --format json --out FILE`."
            ) from error
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if schema != SCHEMA:
            raise ValueError(
                f"{name}: expected schema {SCHEMA!r}, got {schema!r}. Write it again with this "
                "release's `gtpgraph inspect MODEL --format json`."
            )
        data.pop("schema")
        digest = data.pop("hash", None)
        plan = _decode(cls, data, name)
        if digest is not None and digest != plan.hash:
            raise ValueError(
                f"{name}: expected contents of hash {digest}, got {plan.hash}: the file was edited "
                "or damaged. Write it again with `gtpgraph inspect`."
            )
        return plan

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None) -> HookPlan:
        """Read a plan file; with `model`, refuse the plan of another model (ValueError)."""
        plan = cls.from_json(Path(path).read_text(), name=str(path))
        if model is not None and plan.model != model:
            raise ValueError(
                f"{path}: expected a plan of model {model!r}, got one of {plan.model!r}. "
                f"Write the plan of {model!r} with `gtpgraph inspect`."
            )
        return plan

    def diff(self, other: HookPlan) -> list[str]:
        """Lines that say what differs, weight by weight; empty when the plans agree."""
        from gtpgraph.graph.plan_diff import diff

        return diff(self, other)

    def __str__(self) -> str:
        from gtpgraph.report import plan_table

        return plan_table(self)


_NESTED: dict[tuple[str, str], type] = {
    ("HookPlan", "regions"): RegionPlan,
    ("HookPlan", "buckets"): BucketPlan,
    ("HookPlan", "warnings"): PlanWarning,
    ("RegionPlan", "occurrences"): Occurrence,
    ("RegionPlan", "excluded"): Excluded,
    ("Occurrence", "gtp"): AxisRanks,
    ("BucketPlan", "group"): AxisRanks,
}
_R = TypeVar("_R")


def _encode(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        own = {f.name: _encode(getattr(value, f.name)) for f in fields(value) if f.name != "extra"}
        return {**own, **value.extra}
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    return value


def _decode(cls: type[_R], data: Any, where: str) -> _R:
    names = {f.name for f in fields(cls) if f.name != "extra"}  # type: ignore[arg-type]
    if not isinstance(data, dict) or not names <= data.keys():
        missing = sorted(names - data.keys()) if isinstance(data, dict) else "a JSON object"
        raise ValueError(
            f"{where}: expected the keys of {cls.__name__}, missing {missing}. "
            "Write the plan again with `gtpgraph inspect`."
        )
    kinds = {f.name: str(f.type) for f in fields(cls)}  # type: ignore[arg-type]
    known = {}
    for key in sorted(names):
        _check_kind(data[key], kinds[key], f"{where}.{key}")
        known[key] = _decode_field(cls.__name__, key, data[key], f"{where}.{key}")
    extra = {k: v for k, v in data.items() if k not in names}
    return cls(**known, extra=extra)  # type: ignore[call-arg]


_JSON_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "None": (type(None),), "tuple": (list,),
    "Mapping": (dict,), "AxisRanks": (dict,),
}  # fmt: skip


def _check_kind(value: Any, annotation: str, where: str) -> None:
    """`annotation` is a field's, for example ``int | None`` or ``tuple[str, ...]``."""
    kinds = [k.partition("[")[0] for k in annotation.split(" | ")]
    if not isinstance(value, tuple(t for k in kinds for t in _JSON_KINDS[k])):
        raise ValueError(
            f"{where}: expected {annotation}, got {value!r:.60}. "
            "Write the plan again with `gtpgraph inspect`."
        )


def _decode_field(owner: str, key: str, value: Any, where: str) -> Any:
    nested = _NESTED.get((owner, key))
    if nested is None:
        return tuple(value) if isinstance(value, list) else value
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(_decode(nested, v, f"{where}[{i}]") for i, v in enumerate(value))
    return _decode(nested, value, where)
