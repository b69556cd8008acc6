"""Spare file descriptors, so that control calls still work when the process has no others left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator
from typing import Final

__all__ = ["SpareDescriptors"]

_MOST: Final = 32
_SHARE: Final = 4  # the spares are this part of the limit at most: 12 of 48


class SpareDescriptors:
    """Descriptors that are kept open for nothing, and closed when something has to be opened.

    Serving loop only.  While a call runs and the process has fewer free descriptors than `count`, the spares are
    closed for it.  Programs that use the mount can take them meanwhile; then the call fails with EMFILE.
    """

    def __init__(self, count: int | None = None) -> None:
        """Hold `count` of them; None: as many as suit RLIMIT_NOFILE."""
        if count is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            count = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // _SHARE)
        self._count = count
        self._held: list[int] = []
        self._calls = 0  # that run while the spares are lent
        self.refill()

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Give all of them back."""
        while self._held:
            os.close(self._held.pop())

    def take_one(self) -> bool:
        """Make room for one descriptor; False where there is no spare left."""
        if not self._held:
            return False
        os.close(self._held.pop())
        return True

    def refill(self) -> None:
        """Hold as many as there should be, or as there can be now."""
        if not self._calls:
            self._held += _opened(self._count - len(self._held))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Have descriptors free for the length of the block, if need be those that are held for that."""
        if not self._calls and not self._has_room():
            self.close()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self.refill()

    def _has_room(self) -> bool:
        found = _opened(self._count)
        for descriptor in found:
            os.close(descriptor)
        return len(found) == self._count


def _opened(count: int) -> list[int]:
    """So many descriptors, or fewer where the limit is reached."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while len(found) < count:
            # Of the null device, because a duplicate needs an original that stays open.
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if not found else _duplicate(found[0]))
    return found


def _duplicate(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
