"""The README's tables of suite ``multi_gpu``: one a part, from the rows of its cases.

In: rows of each case's last run (parts are run one by one: GPUs are lent for a while). Out:
Markdown. A ratio is made of rows of one run alone.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.table_rows import Row, Rows, conditions, markdown, spread

NOT_RUN = "not run: needs two GPUs or more"
GIB = 1 << 30
Table = tuple[list[str], list[list[str]]]


def readiness(rows: Rows) -> Table:
    """A line a case: how many ways were right, and the worst of them."""
    lines = []
    for case in rows.cases():
        impls = rows.impls(case)
        errors = [rows.value(case, impl, "gradient_error") or 0.0 for impl in impls]
        left = [row for impl in impls if (row := rows.get(case, impl, "early_buckets"))]
        reports = rows.value(case, impls[0], "reports") or 0.0
        fewest = min(left, key=lambda row: float(row["value"]), default=None)
        lines.append(
            [_short(case), _gpus(rows, case), str(len(impls)), f"{reports:.0f}",
             f"{max(errors):.1e}",
             f"{fewest['value']:.0f} of {fewest['conditions']['buckets']}" if fewest else ""]
        )  # fmt: skip
    head = ["case", "GPUs", "ways, all right", "reports a step of each", "largest gradient error"]
    return [*head, "buckets that left in the backward"], lines


def exposed(rows: Rows) -> Table:
    """A line an implementation: what of its communication nothing hides."""
    lines = []
    for case in rows.cases():
        for impl in rows.impls(case):
            row, step = rows.get(case, impl, "exposed_us"), rows.value(case, impl)
            total = rows.value(case, impl, "communication_us")
            time = "" if step is None else f"{step / 1e3:.2f}"
            if row is None or not total:
                lines.append([_short(case), _gpus(rows, case), impl, "", "", "", "", time])
                continue
            share = f"{100 * row['value'] / total:.1f}%"
            lines.append(
                [_short(case), _gpus(rows, case), impl, f"{row['value'] / 1e3:.2f}",
                 spread(row, 1e3), f"{total / 1e3:.2f}", share, time]
            )  # fmt: skip
    head = ["case", "GPUs", "implementation", "exposed, ms", "p20 to p80", "communication, ms"]
    return [*head, "exposed share", "ms a step"], lines


def reduce_scatter(rows: Rows) -> Table:
    """A line a size, a column a variant: time and error."""
    impls = list(dict.fromkeys(impl for case in rows.cases() for impl in rows.impls(case)))
    lines = []
    for case in rows.cases():
        cells = []
        for impl in impls:
            row, error = rows.get(case, impl), rows.value(case, impl, "error")
            cells.append("" if row is None else f"{row['value']:.1f} us, {error or 0:.0e}")
        lines.append([_short(case), _gpus(rows, case), *cells])
    return ["size", "GPUs", *impls], lines


def scaling(rows: Rows) -> Table:
    """A line a number of GPUs and implementation; efficiency against one GPU in the same run."""
    lines = []
    for case in sorted(rows.cases(), key=_last):
        model = case.rpartition(":")[0]
        for impl in rows.impls(case):
            row, peak = rows.get(case, impl), rows.value(case, impl, "peak_bytes")
            if row is None:
                continue
            memory = "" if peak is None else f"{peak / GIB:.2f}"
            lines.append(
                [_short(model), str(_last(case)), impl, f"{row['value'] / 1e3:.2f}",
                 spread(row, 1e3), _efficiency(rows.get(f"{model}:1", impl), row), memory]
            )  # fmt: skip
    head = ["model, batch a GPU", "GPUs", "implementation", "ms a step", "p20 to p80"]
    return [*head, "of one GPU's speed", "peak GiB a GPU"], lines


def _efficiency(alone: Row | None, row: Row) -> str:
    if alone is None or alone["run"] != row["run"]:
        return ""
    return f"{100 * alone['value'] / row['value']:.0f}%"


def _last(case: str) -> int:
    return int(case.rpartition(":")[2])


def _short(case: str) -> str:
    """The case without its part."""
    return case.partition(":")[2]


def _gpus(rows: Rows, case: str) -> str:
    row = next(r for r in rows.all if r["case"] == case)
    return str(row["conditions"]["gpus"])


PARTS: dict[str, Callable[[Rows], Table]] = {
    "readiness": readiness,
    "exposed": exposed,
    "reduce_scatter": reduce_scatter,
    "scaling": scaling,
}
TITLES = {
    "readiness": "readiness",
    "exposed": "exposed communication",
    "reduce_scatter": "reduce-scatter of a bf16 gradient into fp32",
    "scaling": "captured step beside eager FSDP2",
}


def multi_gpu(rows: Rows | None) -> str:
    """What stands between the suite's markers; parts without rows are named."""
    tables, missing = [], []
    for part, table in PARTS.items():
        own = [r for r in rows.all if r["case"].partition(":")[0] == part] if rows else []
        if not own:
            missing.append(TITLES[part])
            continue
        found = Rows(own)
        text = markdown(*table(found))
        tables.append(f"**Several GPUs, {TITLES[part]}.** {conditions(found)}\n\n{text}\n")
    if missing:
        tables.append(f"**Several GPUs: {', '.join(missing)}.** {NOT_RUN}\n")
    return "\n" + "\n".join(tables) + "\n"
