"""Wait for a descriptor.  poll(2), because select(2) refuses numbers above 1,023."""

from __future__ import annotations

import select
from typing import Protocol


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(file: int | _HasFileno | None, timeout_s: float) -> bool:
    """Whether `file` can be read, or is at its end, within `timeout_s`."""
    assert file is not None
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
