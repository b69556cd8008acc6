"""Show where a test waits that takes more than ten minutes, although it holds the interpreter lock.

pytest-timeout ends other tests that hang, but needs that lock.  pytest's own `faulthandler_timeout` makes and joins
a thread for each test, which costs milliseconds where several processes share a CPU.  This one is set once a minute.
"""

from __future__ import annotations

import faulthandler
import os
import time
from typing import Final

__all__ = ["HangWatch"]

_HANGS_S: Final = 600.0  # not less: in Python 3.11 the output can crash a test that is merely slow
_SET_EVERY_S: Final = 60.0


class HangWatch:
    """Watches the tests of this process, from `test_begins` on.  Made while pytest captures nothing."""

    def __init__(self, output: int = 2) -> None:
        self._output = os.dup(output)
        self._set_s = float("-inf")

    def test_begins(self) -> None:
        now_s = time.monotonic()
        if now_s - self._set_s > _SET_EVERY_S:
            self._set_s = now_s
            faulthandler.dump_traceback_later(_HANGS_S + _SET_EVERY_S, file=self._output)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._output)
