"""HiddenNames: refuses a name (EPERM) that is hidden, or that a hidden entry of the lower layer has already."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.backends.overlay.lower import is_gone
from protocol.errors import os_error, shown

if TYPE_CHECKING:
    from protocol.adapters.git_patterns import PathFilter
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.lower import Lower


class HiddenNames:
    """`path` returns the path of a directory, or None if no name leads to it."""

    def __init__(self, path_filter: PathFilter, lower: Lower, path: Callable[[Inode], bytes | None]) -> None:
        self._filter = path_filter
        self._lower = lower
        self._path = path

    def check_new(self, directory: Inode, name: bytes, is_directory: bool) -> None:
        """Check a name that is about to be made."""
        if self._filter:
            self.check(directory, name, is_directory=is_directory)
            self.check_collision(directory, name)

    def check(self, directory: Inode, name: bytes, *, is_directory: bool) -> None:
        """Raise EPERM if `name` in `directory` is hidden: it could collide with a hidden entry below."""
        path = self._below(directory, name) if self._filter else None
        if path is not None and self._filter.hides(path, is_directory=is_directory):
            raise os_error(errno.EPERM, shown(name))

    def check_collision(self, directory: Inode, name: bytes) -> None:
        """Raise EPERM if a hidden entry of the lower layer has the name, which a visible one is to get."""
        path = self._below(directory, name)
        if path is None or not any(self._filter.hides(path, is_directory=each) for each in (True, False)):
            return
        try:
            mode = self._lower.stat(path).st_mode
        except OSError as error:
            if not is_gone(error):
                raise
            return
        if self._filter.hides(path, is_directory=stat.S_ISDIR(mode)):
            raise os_error(errno.EPERM, shown(name))

    def _below(self, directory: Inode, name: bytes) -> bytes | None:
        above = self._path(directory)
        return None if above is None else above + b"/" + name if above else name
