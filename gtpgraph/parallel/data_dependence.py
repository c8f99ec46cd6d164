"""Refuse experts whose collectives would depend on a rank's own tokens.

In: expert weights that are about to be gathered in a compiled model's forward. A loop that calls
``self.experts[e](x[hit])`` for the experts that were hit breaks the graph on data and runs the rest
eagerly: ranks with other tokens gather other weights, and hang. Dynamo counts such breaks, so the
first call of a compiled model finds out; a model that is never compiled is not watched. Experts in
one stacked weight are fine (gathered once per forward, see `gather_once`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gtpgraph import compat
from gtpgraph.parallel.shard_spec import ShardSpec

_BY_DATA = re.compile(r"data.?dependent|dynamic.?shape|\.item\(|nonzero|_local_scalar", re.I)
_breaks_before: int | None = None  # when the compiled model that is running was called


@contextmanager
def watch_data_breaks() -> Iterator[None]:
    """A compiled model is running: breaks on data from here on are its own."""
    global _breaks_before
    outer, _breaks_before = _breaks_before, compat.num_graph_breaks(_BY_DATA)
    try:
        yield
    finally:
        _breaks_before = outer


def refuse_expert_loops(weights: Iterable[tuple[str, ShardSpec]]) -> None:
    """Raise NotImplementedError if a running compiled model broke on data and these weights hold
    experts, not stacked into one, over several ranks."""
    names = [fqn for fqn, s in weights if s.expert and s.group_name and not s.is_stacked]
    if not names or _breaks_before is None or compat.num_graph_breaks(_BY_DATA) == _breaks_before:
        return
    raise NotImplementedError(
        f"experts: expected collectives that do not depend on a rank's tokens, got a graph break "
        f"on data before the gather of {', '.join(names[:6])}: a rank whose tokens hit other "
        "experts gathers other weights, and hangs. Use experts in one stacked weight (grouped "
        "matrix products), or leave these whole: shard(..., exclude=['*experts*'])."
    )
