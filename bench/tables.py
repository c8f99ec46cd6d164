"""``python bench/tables.py [--check]``: write the README's tables from rows in bench/results.

In: rows in the project's benchmark schema. Out: the README with each block between
``<!-- table:SUITE -->`` and ``<!-- /table -->`` made anew from the latest run of that suite, its
conditions below it. A suite without rows leaves its block empty (``multi_gpu`` says that it was not
run). A ratio is computed here, from rows of one run; none is stored.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: for bench.*

from bench.multi_gpu_tables import multi_gpu  # noqa: E402
from bench.table_rows import (  # noqa: E402
    Row,
    Rows,
    conditions,
    judged,
    latest,
    latest_by_case,
    markdown,
    spread,
)

BLOCK = re.compile(r"(<!-- table:(\w+) -->\n)(.*?)(<!-- /table -->)", flags=re.DOTALL)
MIB = 1 << 20
Lines = list[list[str]]

# -- kernels ---------------------------------------------------------------------------------------

# (case, implementation, share of the copy bandwidth, peers, times as fast as their best)
KERNELS: tuple[tuple[str, str, float | None, tuple[str, ...], float | None], ...] = (
    ("accumulate", "ours", 0.98, ("add_",), 1.5),
    ("accumulate", "ours:first", None, (), None),
    ("accumulate_strided", "ours", 0.90, ("add_",), None),
    ("accumulate_many", "ours", 1 / 1.15, ("foreach",), 15),
    ("accumulate_many", "ours", None, ("foreach:eager",), 15),  # as it is called: 200 launches
    ("shard_reduce", "ours", 0.97, ("torch", "inductor"), 1.55),
    ("shard_reduce:64", "ours", None, ("torch", "inductor"), None),
    ("scatter_accumulate", "ours", None, ("torch", "inductor", "index_add_"), None),
    ("pack", "ours", None, ("foreach",), None),
    ("pack", "ours:unpack", None, ("foreach",), None),
)
STATS = (("accumulate", "ours:first"), ("shard_reduce", "ours"))  # without, beside ours:stats


def kernels(rows: Rows) -> tuple[list[str], Lines]:
    """Time, share of the limit (a copy of the same bytes; for a GEMM plain bf16 ``mm``), peers."""
    lines = []
    for case, impl, share, peers, times in KERNELS:
        row = rows.get(case, impl)
        if row is None:
            continue
        label = case if impl == "ours" else f"{case} ({impl.removeprefix('ours:')})"
        of_limit = row["floor"] / row["value"]
        name, peer = rows.best(case, peers)
        against = f"{name} {peer:.1f}" if name else ""
        faster = peer / row["value"]
        ratio = (judged(faster, times, "x") if times else f"{faster:.2f}x") if name else ""
        limit = judged(of_limit, round(share, 2)) if share else f"{of_limit:.2f}"
        lines.append([label, f"{row['value']:.1f}", spread(row), limit, against, ratio])
    return (
        ["kernel", "us", "p20 to p80", "of the limit", "best peer, us", "faster"],
        lines + _gemms(rows) + _stats(rows) + _symmetric(rows),
    )


def _gemms(rows: Rows) -> Lines:
    lines = []
    for case in rows.cases("wgrad_gemm:"):
        row = rows.get(case, "ours")
        name, peer = rows.best(case, ("mm+add_", "addmm"))
        if row is None or not name:
            continue
        other = rows.get(case, name)
        assert other is not None
        slower = row["p20"] > other["p80"]
        ratio = f"{peer / row['value']:.2f}x (never slower{', missed' if slower else ''})"
        limit = f"{row['floor'] / row['value']:.2f}"
        lines.append([case, f"{row['value']:.1f}", spread(row), limit, f"{name} {peer:.1f}", ratio])
    return lines


def _stats(rows: Rows) -> Lines:
    lines = []
    for case, plain in STATS:
        row, without = rows.get(case, "ours:stats"), rows.value(case, plain)
        if row is None or without is None:
            continue
        more = judged(100 * (row["value"] / without - 1), 3, "%", most=True)
        lines.append(
            [f"{case} with norm and flag", f"{row['value']:.1f}", spread(row),
             f"{row['floor'] / row['value']:.2f}", f"without {without:.1f}", f"{more} more"]
        )  # fmt: skip
    return lines


def _symmetric(rows: Rows) -> Lines:
    case = "symmetric_reduce_scatter"
    row = rows.get(case, "ours")
    if row is None:
        return []
    parts = [(i.removeprefix("part:"), rows.value(case, i)) for i in rows.impls(case) if ":" in i]
    text = ", ".join(f"{name} {value:.1f}" for name, value in parts)
    label = f"{case}, {row['conditions']['ranks']} ranks taking turns on one GPU"
    return [[label, f"{row['value']:.1f}", spread(row), "", f"parts: {text}", ""]]


# -- steps -----------------------------------------------------------------------------------------

CAPTURED = ("ours:step", "ours:regions", "ours:step-eager")
OURS_FAST = {"gpt-124m:1x512": {"eager": 5.0, "reduce-overhead": 1.3}}  # goals of "ours:step"


def steps(rows: Rows) -> tuple[list[str], Lines]:
    """ms a step, over the limit (the same body and accumulates in one bare graph), and speedups."""
    lines = []
    for case in rows.cases():
        order = sorted(rows.impls(case), key=lambda impl: rows.value(case, impl) or 0.0)
        for impl in order:
            row = rows.get(case, impl)
            if row is None:
                continue
            main = impl == "ours:step"
            over = row["value"] / row["floor"] if row["floor"] else None
            limit = "" if over is None else f"{over:.2f}x"
            if over is not None and main:
                limit = judged(over, 1.05, "x", most=True)
            times = [_times(rows, case, row, peer, main) for peer in ("eager", "reduce-overhead")]
            lines.append([case, impl, f"{row['value'] / 1e3:.2f}", spread(row, 1e3), limit, *times])
    head = ["case", "implementation", "ms a step", "p20 to p80", "over the limit"]
    return [*head, "eager takes", "reduce-overhead takes"], lines


def _times(rows: Rows, case: str, row: Row, peer: str, main: bool) -> str:
    value = rows.value(case, peer)
    if value is None:
        return ""
    goal = OURS_FAST.get(case, {}).get(peer) if main else None
    ratio = value / row["value"]
    return f"{ratio:.2f}x" if goal is None else judged(ratio, goal, "x")


# -- the others ------------------------------------------------------------------------------------


def overlap(rows: Rows) -> tuple[list[str], Lines]:
    """Exposed transfer time; the goal is a tenth of the transfers, or the last bucket's own."""
    lines = []
    for row in rows.all:
        if row["metric"] != "exposed_us":
            continue
        transfer, last = (row["conditions"][k] for k in ("transfer_us", "last_bucket_us"))
        share = 100 * row["value"] / transfer
        goal = round(100 * max(0.1, last / transfer), 1)
        shown = judged(share, goal, "%", most=True)
        if row["impl"] == "ours:after":
            shown = f"{share:.2f}%"  # the usual way: the baseline
        step = rows.value(row["case"], row["impl"])
        lines.append(
            [row["case"], row["impl"], f"{row['value'] / 1e3:.2f}", spread(row, 1e3),
             f"{transfer / 1e3:.2f}", shown, "" if step is None else f"{step / 1e3:.2f}"]
        )  # fmt: skip
    head = ["case", "dispatch", "exposed, ms", "p20 to p80", "transfers, ms"]
    return [*head, "exposed share", "ms a step"], lines


def host(rows: Rows) -> tuple[list[str], Lines]:
    """Host time for each occurrence: of the replay alone, of a bare graph's (copy of the input,
    launch), and of the whole step around it."""
    metric, lines = "host_us_per_occurrence", []
    for case in rows.cases():
        replay, step = (rows.value(case, impl, metric) for impl in ("ours:replay", "ours:step"))
        if replay is not None and step is not None:
            goal = judged(replay, 2, most=True)
            bare = rows.value(case, "bare:replay", metric)
            floor = "" if bare is None else f"{bare:.2f}"
            lines.append([case.removeprefix("occurrences:"), goal, floor, f"{step:.2f}"])
    return ["occurrences a step", "us each, replay", "bare graph", "us each, whole step"], lines


def memory(rows: Rows) -> tuple[list[str], Lines]:
    """Peak, held and reserved memory beside eager; growth over many replays; kernels launched."""
    lines = []
    for row in rows.all:
        case, impl, metric, value = row["case"], row["impl"], row["metric"], row["value"]
        if metric.endswith("_bytes") and metric != "growth_bytes":
            eager = rows.value(case, "ours:eager", metric)
            ratio = f"{value / eager:.2f}x eager" if eager else ""
            what = metric.removesuffix("_bytes")
            lines.append([case, impl, what, f"{value / MIB:,.0f} MiB", ratio])
        elif metric == "growth_bytes":
            same = "equal" if row["conditions"]["bitwise_equal"] else "NOT equal"
            note = f"gradients of the first and the last bitwise {same}"
            what = f"growth over {row['conditions']['replays']:,} replays"
            lines.append([case, impl, what, f"{value:,.0f} bytes", note])
        elif metric == "launches":
            note = f"of {row['conditions']['all']:,.0f} in the step"
            lines.append([case, impl, "kernels that handle gradients", f"{value:,.0f}", note])
    return ["case", "implementation", "what", "value", ""], lines


def compile(rows: Rows) -> tuple[list[str], Lines]:
    """Seconds to compile a region, and the part of this library's passes."""
    lines = []
    for case in rows.cases():
        whole, passes = rows.get(case, "compile"), rows.get(case, "passes")
        if whole is not None and passes is not None:
            sites = whole["conditions"]["sites"]
            share = 100 * passes["value"] / whole["value"]
            seconds = [f"{r['value'] / 1e6:.1f}" for r in (whole, passes)]
            lines.append([case, f"{sites:,}", *seconds, f"{share:.1f}%"])
    return ["case, layers", "sites", "compile, s", "passes, s", "share"], lines


TABLES: dict[str, Callable[[Rows], tuple[list[str], Lines]]] = {
    "kernels": kernels,
    "steps": steps,
    "overlap": overlap,
    "host": host,
    "memory": memory,
    "compile": compile,
}


APART = ("steps", "memory")  # suites whose cases may come from runs of their own
# Suites whose cases are run apart, and make several tables.
TEXTS: dict[str, Callable[[Rows | None], str]] = {"multi_gpu": multi_gpu}


# -- text ------------------------------------------------------------------------------------------


def block(suite: str, results: Path) -> str:
    """What stands between a suite's markers."""
    path = results / f"{suite}.jsonl"
    if suite in TEXTS:
        return TEXTS[suite](latest_by_case(path))
    rows = latest_by_case(path) if suite in APART else latest(path)
    if rows is None:
        return ""
    text = markdown(*TABLES[suite](rows))
    return f"\n**{suite.capitalize()}.** {conditions(rows)}\n\n{text}\n\n"


def render(text: str, results: Path) -> str:
    """`text` with every block made anew.

    Raises:
        ValueError: a marker of an unknown suite, or one that is not closed.
    """
    opened, closed = re.findall(r"<!-- table:(\w+) -->", text), text.count("<!-- /table -->")
    known = [*TABLES, *TEXTS]
    unknown = [suite for suite in opened if suite not in known]
    if unknown or len(opened) != closed or len(opened) != len(BLOCK.findall(text)):
        raise ValueError(
            f"tables: expected blocks of {sorted(known)}, each closed by <!-- /table -->, got "
            f"{opened} and {closed} closing marker(s). Repair the markers."
        )
    return BLOCK.sub(lambda m: m[1] + block(m[2], results) + m[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the README would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    text = options.readme.read_text()
    made = render(text, options.results)
    if options.check:
        return int(made != text)
    options.readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
