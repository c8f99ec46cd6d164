"""The README's measured tables are what bench/tables.py makes of the rows in bench/results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gtpgraph.by_path import module_at

ROOT = Path(__file__).resolve().parents[1]
tables = module_at("gtpgraph_bench_tables", str(ROOT / "bench" / "tables.py"))
RESULTS = ROOT / "bench" / "results"


def row(case: str, impl: str, value: float, run: str = "r1", **kw: Any) -> dict[str, Any]:
    made = {
        "suite": "s", "case": case, "impl": impl, "metric": "time_us", "value": value,
        "p20": value - 1, "p80": value + 1, "n": 30, "floor": None, "conditions": {}, "run": run,
        "commit": "abc", "device": "a GPU", "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    }  # fmt: skip
    return made | kw


def write(folder: Path, suite: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{suite}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def made(suite: str, *rows: dict[str, Any]) -> list[list[str]]:
    _, lines = tables.TABLES[suite](tables.Rows(rows))
    return lines


def test_the_readme_is_what_the_rows_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert tables.render(text, RESULTS) == text, "run make tables"


def test_every_suite_with_rows_stands_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for path in RESULTS.glob("*.jsonl"):
        if path.stem in [*tables.TABLES, *tables.TEXTS]:
            assert f"<!-- table:{path.stem} -->\n\n**" in text, path.name


def test_the_last_run_alone_counts(tmp_path: Path) -> None:
    """Ratios between rows of different runs would be no ratios."""
    write(tmp_path, "kernels", [
        row("accumulate", "ours", 100.0, "old", floor=99.0), row("accumulate", "add_", 1.0, "old"),
        row("accumulate", "ours", 200.0, "new", floor=198.0),
    ])  # fmt: skip
    rows = tables.latest(tmp_path / "kernels.jsonl")
    assert [r["run"] for r in rows.all] == ["new"]
    assert tables.kernels(rows)[1] == [
        ["accumulate", "200.0", "199.0 to 201.0", "0.99 (>= 0.98)", "", ""]
    ]
    assert tables.latest(tmp_path / "steps.jsonl") is None


def test_kernels_against_the_limit_and_the_best_peer() -> None:
    lines = made(
        "kernels",
        row("shard_reduce", "ours", 100.0, floor=90.0),
        row("shard_reduce", "torch", 160.0),
        row("shard_reduce", "inductor", 300.0),
        row("shard_reduce", "ours:stats", 104.0, floor=90.0),
        row("wgrad_gemm:1x2x3", "ours", 50.0, floor=40.0, p20=45.0),
        row("wgrad_gemm:1x2x3", "addmm", 40.0, p80=44.0),
        row("wgrad_gemm:1x2x3", "mm+add_", 60.0),
    )
    assert lines == [
        ["shard_reduce", "100.0", "99.0 to 101.0", "0.90 (>= 0.97, missed)", "torch 160.0",
         "1.60x (>= 1.55x)"],
        ["wgrad_gemm:1x2x3", "50.0", "45.0 to 51.0", "0.80", "addmm 40.0",
         "0.80x (never slower, missed)"],
        ["shard_reduce with norm and flag", "104.0", "103.0 to 105.0", "0.87", "without 100.0",
         "4.00% (<= 3%, missed) more"],
    ]  # fmt: skip


def test_steps_fastest_first_with_ratios() -> None:
    case = "gpt-124m:1x512"
    lines = made(
        "steps",
        row(case, "eager", 17000.0, floor=3000.0),
        row(case, "reduce-overhead", 4200.0, floor=3000.0),
        row(case, "ours:step", 3100.0, floor=3000.0),
    )
    assert [line[1] for line in lines] == ["ours:step", "reduce-overhead", "eager"]
    assert lines[0][2:] == [
        "3.10", "3.10 to 3.10", "1.03x (<= 1.05x)", "5.48x (>= 5x)", "1.35x (>= 1.3x)",
    ]  # fmt: skip
    assert lines[1][4:] == ["1.40x", "4.05x", "1.00x"]


def test_overlap_host_memory_and_compile() -> None:
    where = {"transfer_us": 8000.0, "last_bucket_us": 400.0}
    lines = made(
        "overlap",
        row("m", "ours:after", 8000.0, metric="exposed_us", conditions=where),
        row("m", "ours:event", 900.0, metric="exposed_us", conditions=where),
        row("m", "ours:event", 20000.0),
    )
    assert [line[5] for line in lines] == ["100.00%", "11.25% (<= 10%, missed)"]
    assert [line[6] for line in lines] == ["", "20.00"]
    metric = "host_us_per_occurrence"
    lines = made(
        "host",
        row("occurrences:10", "ours:replay", 2.5, metric=metric),
        row("occurrences:10", "ours:step", 5.0, metric=metric),
        row("occurrences:100", "ours:replay", 0.5, metric=metric),
        row("occurrences:100", "ours:step", 0.9, metric=metric),
        row("occurrences:100", "bare:replay", 0.25, metric=metric),
    )
    assert lines[0] == ["10", "2.50 (<= 2, missed)", "", "5.00"]
    assert lines[1] == ["100", "0.50 (<= 2)", "0.25", "0.90"]
    lines = made(
        "memory",
        row("m", "ours:eager", 100.0 * (1 << 20), metric="peak_bytes"),
        row("m", "ours:step", 110.0 * (1 << 20), metric="peak_bytes"),
        row("t", "ours:step", 0.0, metric="growth_bytes",
            conditions={"replays": 10000, "bitwise_equal": True}),
        row("m", "ours:fused", 70.0, metric="launches", conditions={"all": 700}),
    )  # fmt: skip
    assert [line[3:] for line in lines] == [
        ["100 MiB", "1.00x eager"], ["110 MiB", "1.10x eager"],
        ["0 bytes", "gradients of the first and the last bitwise equal"],
        ["70", "of 700 in the step"],
    ]  # fmt: skip
    lines = made(
        "compile",
        row("g:10", "compile", 4e6, conditions={"sites": 1200}),
        row("g:10", "passes", 1e6),
    )
    assert lines == [["g:10", "1,200", "4.0", "1.0", "25.0%"]]


def test_render_replaces_blocks_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "host", [
        row("occurrences:9", f"ours:{k}", 1.0, metric="host_us_per_occurrence")
        for k in ("replay", "step")
    ])  # fmt: skip
    end = "<!-- /table -->\n"
    text = f"a\n<!-- table:host -->\nold\n{end}b\n<!-- table:steps -->\nold\n{end}"
    once = tables.render(text, tmp_path)
    assert once.startswith("a\n<!-- table:host -->\n\n**Host.** a GPU, torch 2.11.0, triton 3.6.0;")
    assert (
        "commit abc, 2026-01-02; medians, n = 30." in once
        and "| 9 | 1.00 (<= 2) |  | 1.00 |" in once
    )
    assert once.endswith("<!-- /table -->\nb\n<!-- table:steps -->\n<!-- /table -->\n")
    assert tables.render(once, tmp_path) == once


@pytest.mark.parametrize(
    "text",
    ["<!-- table:nothing -->\n<!-- /table -->\n", "<!-- table:host -->\n", "<!-- /table -->\n"],
)
def test_bad_markers_are_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected blocks of \['compile', 'host'"):
        tables.render(text, tmp_path)


def test_check_reports_a_stale_file(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:host -->\nstale\n<!-- /table -->\n")
    command = [sys.executable, str(ROOT / "bench" / "tables.py"), "--readme", str(readme)]
    command += ["--results", str(tmp_path)]
    assert subprocess.run([*command, "--check"]).returncode == 1
    assert subprocess.run(command).returncode == 0
    assert subprocess.run([*command, "--check"]).returncode == 0
    assert readme.read_text() == "<!-- table:host -->\n<!-- /table -->\n"
