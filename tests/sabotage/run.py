"""Run tests against a library that is broken on purpose, in this process and in every rank.

    python tests/sabotage/run.py drop-recording tests/test_readiness.py -k "mtp and alone"

Arguments: a key of ``breakages.BREAKAGES``, then those of pytest. Exit status: pytest's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from breakages import BREAKAGES, broken

from gtpgraph.ranks import RankPool


def main(argv: list[str]) -> int:
    """Break, and hand over to pytest."""
    if not argv or argv[0] not in BREAKAGES:
        print(f"expected one of {', '.join(BREAKAGES)}, got {argv[:1]}", file=sys.stderr)
        return 2
    name, *rest = argv
    BREAKAGES[name]()
    run = RankPool.run

    def run_broken(self: RankPool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return run(self, broken, name, fn, *args, **kwargs)

    RankPool.run = run_broken  # type: ignore[method-assign]
    return int(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
