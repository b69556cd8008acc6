"""The errors of the contract: `OSError` subclasses, each with its errno.

Python's own subclasses (`FileNotFoundError`, `FileExistsError`, ...) are used wherever there is one;
`OSError(errno, ...)` itself maps to them.  Here stand the errors that Python has no class for, and the
one table from an exception to the errno that a kernel or a caller is told.

Source for what each call may answer: the man pages of section 2, and tmpfs (mm/shmem.c, fs/libfs.c).
"""

from __future__ import annotations

import errno
import functools
import os
from typing import Final

__all__ = [
    "ArchiveError",
    "SnapshotExistsError",
    "SnapshotNotFoundError",
    "errno_of",
    "only_error",
    "os_error",
]


class SnapshotNotFoundError(FileNotFoundError):
    """There is no snapshot of that name (ENOENT)."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ENOENT, "no such snapshot", name)


class SnapshotExistsError(FileExistsError):
    """A snapshot of that name exists; a name in use is refused (EEXIST)."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EEXIST, "a snapshot of this name exists", name)


class ArchiveError(OSError):
    """An archive was refused, before anything was changed (EINVAL); `entry` names the offending entry."""

    def __init__(self, reason: str, entry: str | None = None) -> None:
        super().__init__(errno.EINVAL, reason, entry)
        self.entry = entry


def only_error(error: BaseException) -> BaseException:
    """The error itself where nurseries or task groups have wrapped a single one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def os_error(code: int, detail: str | None = None) -> OSError:
    """The `OSError` for errno `code`, of the subclass that Python maps it to; to be raised."""
    text = _text(code)
    return OSError(code, text, detail) if detail else OSError(code, text)


# "No such file" and "no such attribute" are answers that a busy mount gives all the time.
_text: Final = functools.cache(os.strerror)


# Exceptions that are not OSError but still mean something to a caller.  Most specific first.
_OTHERS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (MemoryError, errno.ENOMEM),
    (NotImplementedError, errno.EOPNOTSUPP),
    # Not obvious what a recursion limit should be; ELOOP would also be reasonable.
    (RecursionError, errno.ENOMEM),
)


def errno_of(error: BaseException) -> int | None:
    """The errno to answer `error` with, or None when it is unexpected (EIO, to be logged)."""
    if isinstance(error, OSError):
        return error.errno or None
    for kind, code in _OTHERS:
        if isinstance(error, kind):
            return code
    return None
