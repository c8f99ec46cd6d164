"""The tests reach the bug: each breakage makes the named tests fail, with the message it should."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READINESS = "tests/test_readiness.py::test_"
COUNTING = "tests/cases/test_counting.py::test_"


@dataclass(frozen=True)
class Named:
    """A test that a breakage must fail, and a piece of what it must say."""

    test: str
    says: str


NAMED = {
    "drop-recording": (
        Named(f"{READINESS}reports_are_the_plans_occurrences_in_order[mtp alone]", "of its plan"),
        Named(f"{COUNTING}k01_a_weight_used_twice_reports_twice_and_its_bucket_leaves", "got 0"),
        Named(f"{COUNTING}k02_order_and_multiplicity_survive_the_grouping", "got 0; first"),
    ),
    "deduplicate": (
        Named(f"{READINESS}captured_ready_counts_equal_the_eager_ones[mtp alone]", "embed.weight"),
        Named(f"{COUNTING}k01_a_weight_used_twice_reports_twice_and_its_bucket_leaves", "a.weight"),
        Named(f"{COUNTING}k02_order_and_multiplicity_survive_the_grouping", "got one more after"),
        Named(
            f"{READINESS}gradients_are_those_of_plain_pytorch_on_the_concatenated_batch"
            "[mtp gtp1 x dp2]",
            "declared too few",
        ),
    ),
    "drop-chain-filter": (
        Named(
            f"{READINESS}ungraphed_weights_are_finalised_eagerly_and_not_in_the_plan[moe alone]",
            "shared_experts",
        ),
        Named(
            "tests/cases/test_membership.py::test_k25_a_shared_expert_outside_the_graph_is_"
            "finalised_eagerly",
            "shared_experts",
        ),
    ),
}


def run_broken(name: str, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/sabotage/run.py", name, *tests, "-rfE", "--tb=short"]
    return subprocess.run(
        [*command, "--show-capture=no"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_breakage_fails_the_tests_that_are_named_for_it(name: str) -> None:
    done = run_broken(name, [named.test for named in NAMED[name]])
    assert done.returncode == 1, done.stdout + done.stderr
    for named in NAMED[name]:
        assert f"FAILED {named.test}" in done.stdout, done.stdout
        assert named.says in done.stdout, done.stdout
    assert " passed" not in done.stdout and "ERROR" not in done.stdout, done.stdout


@pytest.mark.slow
def test_without_a_breakage_the_same_command_passes() -> None:
    tests = {n.test for named in NAMED.values() for n in named if COUNTING in n.test}
    done = run_broken("nothing", sorted(tests))
    assert done.returncode == 0, done.stdout + done.stderr
