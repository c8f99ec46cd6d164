"""The README's tables of suite multi_gpu, from made-up rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import multi_gpu_tables, tables  # noqa: E402
from bench.table_rows import Rows, latest_by_case  # noqa: E402

MARKED = "a\n<!-- table:multi_gpu -->\nold\n<!-- /table -->\nb\n"


def row(case: str, impl: str, value: float, metric: str = "time_us", **kw: Any) -> dict[str, Any]:
    made = {
        "suite": "multi_gpu", "case": case, "impl": impl, "metric": metric, "value": value,
        "p20": value - 1, "p80": value + 1, "n": 10, "floor": None, "run": "r1", "commit": "abc",
        "conditions": {"gpus": 4}, "device": "a GPU", "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    return made | kw


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    file = folder / "multi_gpu.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_without_rows_the_block_says_why(tmp_path: Path) -> None:
    made = tables.render(MARKED, tmp_path)
    assert "not run: needs two GPUs or more" in made and "old" not in made
    assert made.startswith("a\n<!-- table:multi_gpu -->\n\n**") and made.endswith("-->\nb\n")
    assert tables.render(made, tmp_path) == made


def test_parts_with_rows_are_tables_and_the_others_are_named(tmp_path: Path) -> None:
    write(tmp_path, [row("scaling:gpt:8x1024:1", "fsdp2", 2000.0)])
    made = tables.render(MARKED, tmp_path)
    assert "**Several GPUs, captured step beside eager FSDP2.** a GPU, torch 2.11.0; commit" in made
    assert "**Several GPUs: readiness, exposed communication, reduce-scatter" in made
    assert tables.render(made, tmp_path) == made


def test_every_case_counts_from_its_own_last_run(tmp_path: Path) -> None:
    write(tmp_path, [
        row("scaling:g:8x1:1", "fsdp2", 1.0, run="old"),
        row("scaling:g:8x1:1", "ddp", 1.0, run="old"),
        row("reduce_scatter:1MiB", "nccl:bf16", 2.0, run="middle", commit="def"),
        row("scaling:g:8x1:1", "fsdp2", 3.0, run="new"),
    ])  # fmt: skip
    rows = latest_by_case(tmp_path / "multi_gpu.jsonl")
    assert rows is not None
    assert [(r["impl"], r["run"]) for r in rows.all] == [("nccl:bf16", "middle"), ("fsdp2", "new")]
    assert latest_by_case(tmp_path / "none.jsonl") is None


def test_readiness_shows_the_worst_way() -> None:
    case, lines = "readiness:mtp-tiny:gtp2xdp2:eager", []
    for impl, error, early in (("ours:eager", 2e-7, 6.0), ("ours:step:event", 3e-7, 5.0)):
        lines += [
            row(case, impl, error, "gradient_error"), row(case, impl, 45.0, "reports"),
            row(case, impl, early, "early_buckets", conditions={"gpus": 4, "buckets": 6}),
        ]  # fmt: skip
    _, made = multi_gpu_tables.readiness(Rows(lines))
    assert made == [["mtp-tiny:gtp2xdp2:eager", "4", "2", "45", "3.0e-07", "5 of 6"]]


def test_exposed_shares_and_an_untraced_peer() -> None:
    case = "exposed:gpt:2x8:gtp1xdp4"
    head, made = multi_gpu_tables.exposed(Rows([
        row(case, "ours:event", 20000.0), row(case, "ours:event", 500.0, "exposed_us"),
        row(case, "ours:event", 2000.0, "communication_us"), row(case, "ddp", 30000.0),
    ]))  # fmt: skip
    assert made == [
        ["gpt:2x8:gtp1xdp4", "4", "ours:event", "0.50", "0.50 to 0.50", "2.00", "25.0%", "20.00"],
        ["gpt:2x8:gtp1xdp4", "4", "ddp", "", "", "", "", "30.00"],
    ]
    assert len(head) == len(made[0])


def test_reduce_scatter_has_a_column_a_variant() -> None:
    head, made = multi_gpu_tables.reduce_scatter(Rows([
        row("reduce_scatter:1MiB", "nccl:bf16", 30.0),
        row("reduce_scatter:1MiB", "nccl:bf16", 2e-3, "error"),
        row("reduce_scatter:4MiB", "ours:symmetric", 40.0),
        row("reduce_scatter:4MiB", "ours:symmetric", 1e-8, "error"),
    ]))  # fmt: skip
    assert head == ["size", "GPUs", "nccl:bf16", "ours:symmetric"]
    assert made == [
        ["1MiB", "4", "30.0 us, 2e-03", ""],
        ["4MiB", "4", "", "40.0 us, 1e-08"],
    ]


def test_scaling_compares_within_one_run() -> None:
    _, made = multi_gpu_tables.scaling(Rows([
        row("scaling:gpt:8x1024:4", "ours:dp", 2500.0),
        row("scaling:gpt:8x1024:1", "ours:dp", 2000.0),
        row("scaling:gpt:8x1024:4", "ours:dp", 3 * 2.0**30, "peak_bytes"),
        row("scaling:gpt:8x1024:2", "ours:dp", 2000.0, run="another"),
    ]))  # fmt: skip
    assert [line[1:4] + line[5:] for line in made] == [
        ["1", "ours:dp", "2.00", "100%", ""],
        ["2", "ours:dp", "2.00", "", ""],
        ["4", "ours:dp", "2.50", "80%", "3.00"],
    ]
