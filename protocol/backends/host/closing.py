"""Closing: many files without a name closed by a thread, while the loop goes on.

With its last descriptor such a file goes, and its file system frees it.  On ext4 that was measured to take a
millisecond each where there are thousands, and hardly anything when the one unlinked last goes first: so they are
collected, and closed in that order.
"""

from __future__ import annotations

import os
import threading
from typing import Final

__all__ = ["Closing"]

_QUIET_S: Final = 0.1  # no more have come for so long: then it begins


class Closing:
    """Descriptors to be closed soon.  Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def soon(self, descriptor: int) -> None:
        """Close it when there is time."""
        with self._changed:
            self._waiting.append(descriptor)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="vfsd closing", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Close all that is left, and return when that is done."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            for descriptor in reversed(taken):
                os.close(descriptor)

    def _take(self) -> list[int] | None:
        """All there is, once no more come; None, and the thread ends, when there is nothing."""
        with self._changed:
            while not self._is_ending and self._changed.wait(_QUIET_S):
                pass
            taken, self._waiting = self._waiting, []
            if not taken:
                self._thread = None
                return None
            return taken
