"""Room on the interpreter's stack for what a compiled graph calls.

In: a function to call. Out: its result, from a frame behind which a whole chunk of stack is free.

CPython keeps a thread's frames in chunks of 16 KiB (3.11 and later, Python/pystate.c). A call that
does not fit maps a new chunk and unmaps it when it returns, every time: 7 us for 0.1 us. The
function that Inductor generates for a backward has a local for each of its buffers and tokens,
often most of a chunk, and calls into Python for each contribution. Where such a frame happened to
end close to a chunk's end, a step of 149 contributions took 12.3 ms rather than 6.2 (3.11; 3.12 and
3.13 do the same). A frame larger than a chunk gets one of the next power of two, with what it
leaves of that for the calls behind it; so this module calls from one, 10 us a call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

# 8-byte slots. Half of 32768, less the 1000 that CPython keeps free behind a large frame and one:
# the chunk has 32768, of which more than half are free. None of it is touched until it is used.
_SLOTS = 16384 - 999


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# The stack that a function declares is reserved when it is called; it may declare too much.
with_room = FunctionType(
    _call.__code__.replace(co_stacksize=_SLOTS, co_name="with_room"), globals(), "with_room"
)
