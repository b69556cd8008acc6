"""The errors of the contracts: `OSError` subclasses, each with its errno.

The contracts use Python's own subclasses (`FileNotFoundError`, `FileExistsError`, ...) where they exist;
`OSError(errno, ...)` maps to them.  This module defines the other errors, and the one table from an exception to the
errno that the kernel or a caller gets.

Source for the errors of each call: the man pages of section 2, and tmpfs (mm/shmem.c, fs/libfs.c).
"""

from __future__ import annotations

import errno
import functools
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from concurrent.futures import Future

_PATH_END_SHOWN: Final = 100  # characters


class SnapshotNotFoundError(FileNotFoundError):
    """No snapshot has this name (ENOENT)."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ENOENT, "no such snapshot", name)


class SnapshotExistsError(FileExistsError):
    """A snapshot with this name exists already (EEXIST)."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EEXIST, "a snapshot of this name exists", name)


class ArchiveError(OSError):
    """An archive was refused before any change (EINVAL); `entry` names the invalid entry."""

    def __init__(self, reason: str, entry: str | None = None) -> None:
        super().__init__(errno.EINVAL, reason, entry)
        self.entry = entry


class NotMountedError(ConnectionError):
    """The mount that an object works on is gone from `path`, or its daemon has died (ENOTCONN).

    Nothing was changed: a path of the mount may lead to the directory below it now, or into another mount.
    """

    def __init__(self, path: str, reason: str = "not mounted here any more: mount it again, and open it anew") -> None:
        super().__init__(errno.ENOTCONN, reason, path)


class NotReadyError(OSError):
    """A call on a volume needs content that is being fetched (EAGAIN).  It has changed nothing: repeat it later.

    Wait for `arrival`, which raises OSError if the content cannot be fetched, and hold its result until the repeated
    call has returned: it keeps the content in memory.
    """

    def __init__(self, arrival: Future[object]) -> None:
        super().__init__(errno.EAGAIN, _text(errno.EAGAIN))
        self.arrival = arrival


class DeniedByPolicyError(PermissionError):
    """The policy of a workspace refused `attempt` at `path` (EPERM, as for a file with chattr +i).

    EPERM rather than EACCES, which makes programs try again after a chmod, and rather than EROFS, after which they take
    the whole mount to be read-only.  `path` is None if no name of the file is known.
    """

    def __init__(
        self, attempt: str, path: bytes | None, reason: str = "the policy of this workspace refuses it"
    ) -> None:
        super().__init__(errno.EPERM, reason, None if path is None else shown(path))
        self.attempt = attempt
        self.path = path


def check_type(value: object, kinds: type | tuple[type, ...], expected: str, advice: str = "") -> None:
    """Raise TypeError, which says what a caller must pass, unless `value` is one of `kinds`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{expected}, not {type(value).__name__}{advice and f': {advice}'}")


def only_error(error: BaseException) -> BaseException:
    """Return the only exception in nested exception groups (of nurseries or task groups), or `error` itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def os_error(code: int, detail: str | None = None) -> OSError:
    """Return the `OSError` for errno `code`, of the subclass that Python maps it to."""
    text = _text(code)
    return OSError(code, text, detail) if detail else OSError(code, text)


def shown(path: bytes) -> str:
    """A path or a name for a message; bytes that are not UTF-8 as "\\xNN"."""
    return path.decode("utf-8", "backslashreplace")


def shortened(path: str) -> str:
    """A path for a message to people, cut in the middle if it is very long."""
    return path if len(path) <= 2 * _PATH_END_SHOWN else f"{path[:_PATH_END_SHOWN]} ... {path[-_PATH_END_SHOWN:]}"


# Cached, because a busy mount constantly answers "No such file" and "No data available".
_text: Final = functools.cache(os.strerror)


# Exceptions that are not OSError but have a meaning for a caller.  Most specific first.
_OTHERS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (MemoryError, errno.ENOMEM),
    (NotImplementedError, errno.EOPNOTSUPP),
    # ELOOP would also be reasonable for a recursion limit.
    (RecursionError, errno.ENOMEM),
)


def errno_of(error: BaseException) -> int | None:
    """Return the errno that answers `error`, or None if it is unexpected (the caller logs it and answers EIO)."""
    if isinstance(error, OSError):
        return error.errno or None
    for kind, code in _OTHERS:
        if isinstance(error, kind):
            return code
    return None
