"""Random programs against plain PyTorch: gradients, reports and plan.

``make fuzz`` runs 1,000 of them; a plain test run a few. A failure is shrunk and printed as a
`Program`, with the seed that finds it again; add it to KEPT with a name for what was wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtpgraph.by_path import module_at
from gtpgraph.testing import RankPool

p = module_at("gtpgraph_fuzz_programs", str(Path(__file__).with_name("programs.py")))
EXAMPLES = int(os.environ.get("GTPGRAPH_FUZZ_EXAMPLES", "8"))
OPS = [*p.OPS, "norm", "break"]
NAMES = [f"pool.{k}.weight" for k in range(p.NUM_WEIGHTS)] + ["norms.0.weight", "head.bias"]
settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,  # a plain test run sees the same programs every time
    suppress_health_check=list(HealthCheck),
)
SETTINGS = settings.get_profile("fuzz")


def programs(ranks: int) -> st.SearchStrategy[object]:
    step = st.tuples(st.sampled_from(OPS), st.integers(0, 2), st.integers(0, 2))
    return st.builds(
        p.Program,
        steps=st.lists(step, min_size=1, max_size=8).map(tuple),
        frozen=st.lists(st.integers(0, 4), max_size=2, unique=True).map(tuple),
        gtp=st.sampled_from([g for g in (1, 2, 4) if ranks % g == 0]),
        ranks=st.just(ranks),
        bucket_bytes=st.sampled_from([1, 200, 500, 1 << 20]),
        ungraphed=st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple),
        parts=st.booleans(),
        coalesce=st.booleans(),
        reshard=st.booleans(),
        in_flight=st.integers(0, 3),
        microbatches=st.integers(1, 2),
        eager_first=st.booleans(),
        reduce=st.sampled_from(["reduce_scatter", "all_reduce"]),
        seed=st.integers(0, 3),
    )


@settings(SETTINGS)
@given(program=programs(1))
def test_programs_of_one_process(program: object) -> None:
    assert p.run(0, 1, program) == []


@pytest.mark.dist
@settings(SETTINGS, max_examples=max(2, EXAMPLES // 8))
@given(program=programs(2))
def test_programs_of_two_ranks(ranks2: RankPool, program: object) -> None:
    assert ranks2.run(p.run, program) == [[], []]


KEPT: dict[str, object] = {
    # The third part ran the second one's graph: the same code, other weights of the same shape.
    "equal parts share no graph": p.Program(
        (("linear", 0, 0), ("linear", 0, 0), ("linear", 1, 1), ("linear", 2, 1)), parts=True
    ),
    # One node for two contributions: a set of leaves would hold one of them.
    "equal contributions are two": p.Program((("same", 0, 0), ("break", 0, 0), ("twice", 0, 0))),
    # Plain PyTorch in fp32 is off by 5e-6 itself here, and this library bitwise equal to it.
    "rounding is measured, not assumed": p.Program(
        (
            ("linear", 2, 0), ("linear", 0, 0), ("linear", 0, 0), ("norm", 0, 0),
            ("linear", 2, 0), ("checkpoint", 0, 1), ("linear", 0, 0), ("norm", 1, 0),
        ),
        bucket_bytes=1, reshard=False, in_flight=0, seed=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    torch.compiler.reset()
    assert p.run(0, 1, KEPT[name]) == []
