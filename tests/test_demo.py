"""The main job on four ranks, and that each of its checks can fail."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

import gtpgraph as gg
from gtpgraph.cli import main
from gtpgraph.cli_launch import open_job
from gtpgraph.demo import BARS, CONFIG, Outcome, _checks, demo_on_rank, reports_fit
from gtpgraph.graph.plan import HookPlan
from gtpgraph.testing import RankPool


def short_demo(rank: int, world: int) -> Outcome:
    return demo_on_rank(open_job(replace(CONFIG, lowering="eager"), rank), 3)


@pytest.fixture(scope="module")
def outcome(ranks4: RankPool) -> Outcome:
    first: Outcome = ranks4.run(short_demo, timeout_s=200)[0]
    return first


def failed(outcome: Outcome) -> list[str]:
    return [name for name, _, _, holds in _checks(outcome, BARS["eager"]) if not holds]


@pytest.mark.dist
class TestOutcome:
    def test_every_check_holds(self, outcome: Outcome) -> None:
        assert failed(outcome) == []
        assert len(_checks(outcome, BARS["eager"])) == 9
        plan = HookPlan.from_json(outcome.plan)
        assert plan.model == "mtp-tiny" and plan.ready_counts["embed.weight"] == 6

    @pytest.mark.parametrize("pair", ["compiled against eager", "compiled against unsharded fp64"])
    def test_a_wrong_gradient_fails(self, outcome: Outcome, pair: str) -> None:
        wrong = copy.deepcopy(outcome)
        wrong.differences[pair] = (1e-3, "embed.weight")
        assert failed(wrong) == [f"gradients, {pair}"]
        wrong.differences[pair] = (float("nan"), "embed.weight")
        assert failed(wrong) == [f"gradients, {pair}"]

    def test_wrong_reports_late_buckets_and_losses_fail(self, outcome: Outcome) -> None:
        wrong = copy.deepcopy(outcome)
        wrong.wrong_steps["compiled"] = [1]
        wrong.early["eager"] = (2, 3)
        wrong.losses["compiled"][1] *= 1.01
        assert failed(wrong) == [
            "reports equal the plan, compiled",
            "reductions started in the backward, eager",
            "losses, compiled against eager",
        ]


def test_reports_that_are_not_the_plan_are_seen() -> None:
    job = open_job(replace(CONFIG, where="here", ranks=1, gtp=1, dp=1, model="gpt-tiny"), 0)
    compiled = gg.compile(job.model, lowering="eager")
    job.model.zero_grad_buffer()
    compiled(*job.batch(0)).backward()
    job.model.finish_grad_sync()
    plan, reports = compiled.plan, list(job.model.reports)
    assert reports_fit("compiled", job.model, plan)
    assert not reports_fit("eager", job.model, plan)  # they came from a region
    for wrong in (reports[:-1], [*reports, reports[0]], [reports[1], reports[0], *reports[2:]]):
        job.model.reports = wrong
        assert not reports_fit("compiled", job.model, plan)


@pytest.mark.dist
@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert "hook plan of mtp-tiny: dp 2 x gtp 2, lowering inductor" in out
    assert out.count(" ok") == 9 and "FAILED" not in out
    assert "step  loss eager  loss compiled" in out


def test_bad_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0"]) == 2
    assert "--steps of at least 1" in capsys.readouterr().err
