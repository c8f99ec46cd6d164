"""Suite multi_gpu without a GPU: its jobs, its ways, its isolation, and a dry run on gloo ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gtpgraph as gg
from gtpgraph.by_path import module_at
from gtpgraph.models import build

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import multi_gpu, multi_gpu_readiness  # noqa: E402
from bench.multi_gpu_rank import CPU_NOTE  # noqa: E402

tools = module_at("gtpgraph_torchrun", str(ROOT / "tests" / "torchrun.py"))
host = module_at("gtpgraph_host_driver", str(ROOT / "tests" / "graph" / "host_driver.py"))
RUN = str(ROOT / "bench" / "run.py")
JOBS = str(Path(__file__).with_name("multi_gpu_jobs.py"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# --- which jobs there are, and what they need -----------------------------------------------------


def test_layouts_and_sizes() -> None:
    assert multi_gpu.layouts(2) == [(2, 1)]
    assert multi_gpu.layouts(3) == [(3, 1)]
    assert multi_gpu.layouts(8) == [(2, 4), (8, 1)]
    assert [multi_gpu.sizes(n) for n in (2, 3, 4, 6)] == [
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_jobs_have_names_of_their_own_and_all_parts(world: int, device: str) -> None:
    jobs = multi_gpu.jobs(world, device)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    parts = ["readiness", "exposed", "reduce_scatter", "scaling"]
    assert list(dict.fromkeys(name.partition(":")[0] for name in names)) == parts
    assert all(1 <= job.ranks <= world for job in jobs)
    assert all(json.loads(json.dumps(job.arguments)) == job.arguments for job in jobs)
    tiny = [j.arguments["name"] for j in jobs if "name" in j.arguments and device == "cpu"]
    assert all(name.endswith("-tiny") for name in tiny)


def test_models_that_are_measured_can_be_built() -> None:
    with torch.device("meta"):
        for _, name, overrides in (*multi_gpu.EXPOSED, multi_gpu.SCALED):
            model, _ = build(name, **overrides)
            assert sum(p.numel() for p in model.parameters()) > 1e8


def test_without_torchrun_it_says_what_it_needs() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, RUN, "multi_gpu"], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 2
    assert "expected to be started by torchrun" in done.stderr
    assert "torchrun --nproc-per-node N bench/run.py multi_gpu" in done.stderr


def test_too_few_devices_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "4 ranks here and 1 device(s). It needs two GPUs or more" in str(multi_gpu.needs("cuda"))
    assert multi_gpu.needs("cpu") is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert multi_gpu.needs("cuda") is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "expected 2 ranks or more, got 1" in str(multi_gpu.needs("cuda"))


# --- readiness: what counts as right --------------------------------------------------------------


def test_every_way_is_right_and_a_wrong_one_is_not() -> None:
    """All ways, captured ones through a runtime for machines without a GPU; then each fault."""
    torch.manual_seed(0)
    net, make_batch = build("mtp-tiny", hidden=16, layers=1, seq=8)
    reference = multi_gpu_readiness.reference_of(net, make_batch, 0, 1)
    batches = {seed: make_batch(seed, 0, "cpu") for seed in set(multi_gpu_readiness.SEEDS)}
    wrapped = gg.DistributedDataParallel(gg.shard(net), bucket_mb=0.01)
    seen = {}
    for way in multi_gpu_readiness.ways(
        wrapped, "eager", net.config, graphs=True, driver=host.HostDriver(wrapped)
    ):
        seen[way.name] = multi_gpu_readiness.run_way(way, wrapped, batches)
        eager = seen["ours:eager"]
        assert multi_gpu_readiness.problems_of(seen[way.name], eager, reference) == []
        assert seen[way.name].early[1:] == [len(wrapped.buckets)] * 3
    replays = [f"ours:{k}:{d}" for k in ("regions", "step") for d in ("after", "event", "in_graph")]
    assert list(seen) == ["ours:eager", "ours:compiled", *replays]
    assert multi_gpu_readiness.count_problems(eager.reports[0], net.config) == []
    wrong = eager.reports[0][:-1]
    wrong = [report for report in wrong if report != ("embed.weight", 2)]
    (problem,) = multi_gpu_readiness.count_problems(wrong, net.config)
    assert "'embed.weight': 6" in problem and "'embed.weight': 5" in problem

    last = seen["ours:step:event"]
    last.reports[1] = last.reports[1][1:]
    last.grads[2]["norm.weight"] = last.grads[2]["norm.weight"] * 1.001
    last.losses[3] = float("nan")
    last.in_order[0] = False
    problems = multi_gpu_readiness.problems_of(last, eager, reference)
    assert [p.partition(":")[0] for p in problems] == [f"step {k}" for k in (0, 1, 2, 2, 3, 3)]
    assert "not in the plan's order" in problems[0] and "reports lack [" in problems[1]
    assert "gradients 1.0e-03 from fp64" in problems[2] and "loss nan from eager" in problems[5]
    wrapped.close()


# --- isolation ------------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_job_that_fails_on_one_rank_is_reported_and_the_next_runs(tmp_path: Path) -> None:
    done = tools.torchrun(
        2, JOBS, str(tmp_path), "60", "cpu", "raises", "dies", "alone", "right",
        log=tmp_path / "log.txt", timeout_s=120, PYTHONPATH=str(Path(JOBS).parent),
    )  # fmt: skip
    assert done.status == 1
    agreed = "agrees: ['raises', 'dies']"
    assert f"rank 0 {agreed}" in done.text and f"rank 1 {agreed}" in done.text
    assert "FAILED raises\n    rank 0: " in done.text and "    rank 1: exit status 1" in done.text
    assert "ValueError: this rank's own reason" in done.text
    assert "FAILED dies\n    rank 0: ended, because another rank failed\n" in done.text
    assert "    rank 1: exit status 7" in done.text
    rows = [(row["case"], row["value"]) for row in rows_of(tmp_path / "rows.jsonl")]
    assert rows == [("right", 1.0), ("right", 2.0)], "of right jobs alone"


@pytest.mark.dist
def test_a_hang_ends_at_the_limit_with_its_stacks(tmp_path: Path) -> None:
    done = tools.torchrun(
        2, JOBS, str(tmp_path), "15", "cpu", "hangs", "right",
        log=tmp_path / "log.txt", timeout_s=120, PYTHONPATH=str(Path(JOBS).parent),
    )  # fmt: skip
    assert done.status == 1
    assert "rank 1: not finished after 15 s" in done.text
    assert "in hangs" in done.text, "the stack says where"
    assert [row["value"] for row in rows_of(tmp_path / "rows.jsonl")] == [2.0]


@pytest.mark.dist
def test_ranks_end_with_torchrun(tmp_path: Path) -> None:
    process = tools.start(
        2, JOBS, str(tmp_path), "600", "cpu", "hangs",
        log=tmp_path / "log.txt", PYTHONPATH=str(Path(JOBS).parent),
    )  # fmt: skip
    files = [tmp_path / f"pid{rank}.txt" for rank in range(2)]
    try:
        assert within(60, lambda: all(file.exists() and file.read_text() for file in files))
        os.killpg(process.pid, signal.SIGKILL)  # torchrun has no chance to end its ranks
        process.wait()
        pids = [int(file.read_text()) for file in files]
        assert within(30, lambda: not any(alive(pid) for pid in pids))
    finally:
        tools.end(process)


def within(seconds: float, true: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(true())


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


# --- a dry run ------------------------------------------------------------------------------------


def dry_run(tmp_path: Path, ranks: int, only: str, timeout_s: float) -> list[dict[str, Any]]:
    """Rows of the jobs that `only` names, on gloo ranks."""
    out = tmp_path / "rows.jsonl"
    done = tools.torchrun(
        ranks, RUN, "multi_gpu", "--device", "cpu", "--only", only, "--repeats", "2",
        "--out", str(out), log=tmp_path / "log.txt", timeout_s=timeout_s,
    )  # fmt: skip
    assert done.status == 0
    rows = rows_of(out)
    assert rows and all(r["conditions"]["ranks"] == CPU_NOTE for r in rows)
    assert all(r["device"] == "cpu" and r["conditions"]["gpus"] == 0 for r in rows)
    return rows


def check_readiness(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["metric"] == "gradient_error":
            assert 0 < row["value"] < row["conditions"]["bar"]
    assert {row["impl"] for row in rows} == {"ours:eager", "ours:compiled"}


@pytest.mark.dist
@pytest.mark.slow
def test_readiness_on_four_gloo_ranks(tmp_path: Path) -> None:
    rows = dry_run(tmp_path, 4, "readiness:mtp-tiny:gtp2xdp2:eager", 200)
    check_readiness(rows)
    reports = {r["impl"]: r["value"] for r in rows if r["metric"] == "reports"}
    assert reports == {"ours:eager": 45, "ours:compiled": 45}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_readiness_on_four_gloo_ranks(tmp_path: Path) -> None:
    rows = dry_run(tmp_path, 4, "readiness", 800)
    check_readiness(rows)
    assert len({row["case"] for row in rows}) == 8


@pytest.mark.dist
def test_reduce_scatter_on_two_gloo_ranks(tmp_path: Path) -> None:
    rows = dry_run(tmp_path, 2, "reduce_scatter", 120)
    errors = {r["impl"]: r["value"] for r in rows if r["metric"] == "error"}
    assert {impl for impl, error in errors.items() if error > 1e-6} == {"nccl:bf16"}
    assert len(errors) == 5


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("part", ["exposed", "scaling"])
def test_peers_on_two_gloo_ranks(part: str, tmp_path: Path) -> None:
    rows = dry_run(tmp_path, 2, part, 250)
    peers = {"exposed": {"ddp", "fsdp2"}, "scaling": {"fsdp2"}}[part]
    for case in {row["case"] for row in rows}:
        assert peers < {row["impl"] for row in rows if row["case"] == case}
