"""Rows of one run, and how a number is shown beside its goal; for the README's tables.

In: a JSONL file of rows in the project's benchmark schema. Out: `Rows` of its last run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """Rows of one run, by case, implementation and metric."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = list(rows)
        self._by_key = {(r["case"], r["impl"], r["metric"]): r for r in rows}

    def get(self, case: str, impl: str, metric: str = "time_us") -> Row | None:
        return self._by_key.get((case, impl, metric))

    def value(self, case: str, impl: str, metric: str = "time_us") -> float | None:
        row = self.get(case, impl, metric)
        return None if row is None else float(row["value"])

    def cases(self, prefix: str = "") -> list[str]:
        return list(dict.fromkeys(r["case"] for r in self.all if r["case"].startswith(prefix)))

    def impls(self, case: str) -> list[str]:
        return list(dict.fromkeys(r["impl"] for r in self.all if r["case"] == case))

    def best(self, case: str, impls: Sequence[str]) -> tuple[str, float]:
        """The fastest of `impls`: its name and median; ("", inf) when none was run."""
        found = [(i, v) for i in impls if (v := self.value(case, i)) is not None]
        return min(found, key=lambda pair: pair[1], default=("", float("inf")))


def latest(path: Path) -> Rows | None:
    """The rows of the run that was appended last, or None."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line]
    return Rows([r for r in rows if r["run"] == rows[-1]["run"]]) if rows else None


def latest_by_case(path: Path) -> Rows | None:
    """Of every case the rows of the run that measured it last, or None without any row."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line]
    last = {row["case"]: row["run"] for row in rows}
    return Rows([r for r in rows if r["run"] == last[r["case"]]]) if rows else None


def judged(value: float, goal: float, unit: str = "", *, most: bool = False) -> str:
    """A ratio with its goal, which it must reach (or, with `most`, not exceed)."""
    sign, met = ("<=", value <= goal) if most else (">=", value >= goal)
    missed = "" if met else ", missed"
    return f"{value:.2f}{unit} ({sign} {goal:g}{unit}{missed})"


def spread(row: Row, unit: float = 1.0) -> str:
    digits = 1 if unit == 1.0 else 2
    low, high = (row[k] / unit for k in ("p20", "p80"))
    return f"{low:.{digits}f} to {high:.{digits}f}"


def conditions(rows: Rows) -> str:
    """One line on where and when the rows were made."""
    row = rows.all[-1]
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows.all))
    versions = row["versions"]
    samples = sorted({r["n"] for r in rows.all})
    n = str(samples[0]) if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    parts = [str(row["device"])]
    parts += [
        f"{k} {versions[k]}"
        for k in ("torch", "triton", "cuda", "driver")
        if versions.get(k, "none").lower() != "none"
    ]
    return f"{', '.join(parts)}; commit {commits}, {row['date'][:10]}; medians, n = {n}."


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of GitHub's Markdown, first column left, numbers as they are."""
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
