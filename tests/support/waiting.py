"""Wait for a condition, or for a descriptor."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Protocol

__all__ = ["longer_limits", "readable", "wait_until"]


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(file: int | _HasFileno | None, timeout_s: float) -> bool:
    """Whether `file` can be read, or is at its end, within `timeout_s`."""
    assert file is not None
    poll = select.poll()  # select(2) refuses numbers above 1,023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def wait_until(condition: Callable[[], bool], description: str = "the condition", timeout_s: float = 60.0) -> None:
    """Wait until `condition` is true; fail with its `description` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s: {description}"
        time.sleep(0.01)


def longer_limits(first_s: int) -> Iterator[int]:
    """Time limits for a program that must come somewhere within its limit: the caller stops at the first that sufficed.

    On a busy machine a program may not even have started when a second has passed.
    """
    for factor in (1, 4, 16, 64):
        yield first_s * factor
