"""Calls behind a large frame: as quick as others, with room; what is called stays the same."""

import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from gtpgraph.graph.stack_room import with_room

CALLS = 50
SLOW_US = 2.0  # a call takes 0.1 us, one that maps a chunk of stack 7


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def framed(slots: int) -> Callable[..., Any]:
    """Calls a function from a frame that reserves `slots` of stack."""
    code = _call.__code__.replace(co_stacksize=slots)
    return FunctionType(code, globals(), f"framed_{slots}")


def leaf(a: int, b: int, c: int) -> int:
    d, e, f = a, b, c
    return d + e + f


def us_a_call() -> float:
    """The quickest of a few tries: what else runs on the machine only makes one slower."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(CALLS):
            leaf(1, 2, 3)
        best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6


FRAMES = range(8, 2400, 4)


@pytest.fixture(scope="module")
def slow() -> list[int]:
    """Frames from which calls are slow on this interpreter, if it maps stack by chunks."""
    return [slots for slots in FRAMES if framed(slots)(us_a_call) > SLOW_US]


def test_calls_behind_any_frame_are_quick_with_room(slow: list[int]) -> None:
    if not slow:
        pytest.skip("this interpreter has no frame from which calls are slow")
    assert all(framed(slots)(with_room, us_a_call) < SLOW_US for slots in slow)


def test_room_is_enough_for_a_large_frame_behind_it() -> None:
    """Inductor's own function lies between the room and the calls."""
    slowest = max(with_room(framed(slots), us_a_call) for slots in FRAMES)
    assert slowest < SLOW_US


def test_results_and_errors_pass_through() -> None:
    assert with_room(leaf, 1, 2, 3) == 6
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 / 0)


def test_room_within_room() -> None:
    def deeper(n: int) -> int:
        return 0 if n == 0 else 1 + with_room(deeper, n - 1)

    assert deeper(100) == 100
