"""Real ranks over NCCL, one GPU each: readiness under graph replay (A1 to A7), and reductions;
and what of the suite one GPU can run.

The suite ``multi_gpu`` does the work, each of its jobs in processes of its own that end at a time
limit: a rank that is waited for in vain is a failure of these tests, with every rank's output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpgraph.by_path import module_at

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.multi_gpu_trace import exposure, profiled  # noqa: E402

tools = module_at("gtpgraph_torchrun", str(ROOT / "tests" / "torchrun.py"))
JOBS = ROOT / "tests" / "bench" / "multi_gpu_jobs.py"
pytestmark = pytest.mark.timeout(900)
several = pytest.mark.multi_gpu  # conftest skips these where there is one GPU or none
LIMIT_S = 300  # of one job
WAYS = {"ours:eager", "ours:compiled"} | {
    f"ours:{kind}:{dispatch}"
    for kind in ("regions", "step")
    for dispatch in ("after", "event", "in_graph")
}


def run(only: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of the jobs that `only` names, on two or four GPUs."""
    out = tmp_path / "rows.jsonl"
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    done = tools.torchrun(
        ranks, str(ROOT / "bench" / "run.py"), "multi_gpu", "--only", only, "--repeats", "3",
        "--limit", str(LIMIT_S), "--out", str(out), log=tmp_path / "log.txt", timeout_s=800,
    )  # fmt: skip
    assert done.status == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def value(rows: list[dict[str, Any]], metric: str) -> dict[tuple[str, str], float]:
    """(case, implementation) -> value."""
    return {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == metric}


@several
@pytest.mark.parametrize("model", ["mtp-tiny", "moe-tiny"])
def test_a1_a7_every_way_equals_eager_and_plain_pytorch(model: str, tmp_path: Path) -> None:
    rows = run(f"readiness:{model}", tmp_path)
    errors, reports = value(rows, "gradient_error"), value(rows, "reports")
    for case in {row["case"] for row in rows}:
        assert {impl for c, impl in errors if c == case} == WAYS
        assert len({count for (c, _), count in reports.items() if c == case}) == 1
    bars = {row["conditions"]["bar"] for row in rows if row["metric"] == "gradient_error"}
    assert max(errors.values()) <= min(bars)


@several
def test_reductions_are_right(tmp_path: Path) -> None:
    rows = run("reduce_scatter", tmp_path)
    errors = value(rows, "error")
    assert {impl for _, impl in errors} == {
        "nccl:bf16", "nccl:fp32", "ours:all_to_all", "ours:symmetric", "ours:symmetric_in",
    }  # fmt: skip
    assert all(error <= 1e-6 for (_, impl), error in errors.items() if impl != "nccl:bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["alone:eager", "alone:inductor", "alone:scaling"])
def test_one_gpu_runs_what_needs_no_second(job: str, tmp_path: Path) -> None:
    done = tools.torchrun(
        1, str(JOBS), str(tmp_path), str(LIMIT_S), "cuda", job,
        log=tmp_path / "log.txt", timeout_s=400, PYTHONPATH=str(JOBS.parent),
    )  # fmt: skip
    assert done.status == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    if job == "alone:scaling":
        assert {impl for _, impl in value(rows, "time_us")} == {"fsdp2", "ours:dp"}
        assert all(peak > 0 for peak in value(rows, "peak_bytes").values())
    else:
        assert {impl for _, impl in value(rows, "gradient_error")} == WAYS


@pytest.mark.gpu
def test_a_trace_has_the_kernels_of_a_replay() -> None:
    x = torch.ones(512, 512, device="cuda")
    for _ in range(2):
        torch.mm(x, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x = torch.mm(x, x)
    graph.replay()
    for _ in range(2):  # a second profile in one process finds them too
        kernels = profiled(graph.replay, torch.cuda.synchronize)
        assert len(kernels) >= 3 and all(k.end > k.start for k in kernels)
        found = exposure(kernels)
        assert found.compute > 0 and found.communication == found.exposed == 0
