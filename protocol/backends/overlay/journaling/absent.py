"""AbsentLower: stands for a lower layer that is not there, so that a journal can be verified without it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from protocol.backends.overlay.lower import Identity, Lower, LowerFile, LowerStat, RecordedStat


class AbsentLower(Lower):
    """An empty root directory.  Reading anything else fails with ENOENT."""

    can_change = False

    def stat(self, path: bytes) -> LowerStat:
        if path:
            _fail(path)
        return RecordedStat(stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0)

    def readlink(self, path: bytes) -> NoReturn:
        _fail(path)

    def xattrs(self, path: bytes) -> None:
        if path:
            _fail(path)

    def scan(self, path: bytes) -> NoReturn:
        _fail(path)

    def file(self, path: bytes, seen: LowerStat) -> LowerFile:
        return _AbsentFile(path, seen)

    def is_same(self, now: Identity, was: Identity) -> bool:
        return now == was

    def forget(self, file: LowerFile) -> None:
        """Nothing is cached."""

    def check(self) -> None:
        """There is nothing to look for."""

    def forking(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""


class _AbsentFile(LowerFile):
    __slots__ = ()

    def read(self, offset: int, size: int) -> NoReturn:  # noqa: ARG002
        _fail(self.path)

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        yield from ()

    def keep(self) -> None:
        """There is nothing to keep."""


def _fail(path: bytes) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, "this journal is verified without its lower layer", os.fsdecode(path))
