"""A small progress bar on stderr, silent where stderr is no terminal.

In: a title and a number of steps. Out: one line that is redrawn, and erased at the end::

    train eager   [############------------]  10/20
"""

from __future__ import annotations

import sys
from types import TracebackType

_CELLS = 24


class Bar:
    """Use as a context manager; `advance` after each step, `title` may change between."""

    def __init__(self, title: str, total: int, *, shown: bool = True) -> None:
        self.title = title
        self._total = max(total, 1)
        self._done = 0
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> Bar:
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self, title: str | None = None) -> None:
        """One step is done; `title` names what comes next."""
        self._done += 1
        self.title = title or self.title
        self._draw()

    def _draw(self) -> None:
        if not self._shown:
            return
        full = min(self._done, self._total) * _CELLS // self._total
        bar = "#" * full + "-" * (_CELLS - full)
        sys.stderr.write(f"\r\x1b[K{self.title}  [{bar}] {self._done:>3}/{self._total}")
        sys.stderr.flush()
