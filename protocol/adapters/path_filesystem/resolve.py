"""Resolve paths, following symlinks, and never leave the root.

Looks up one name at a time in a directory that is held: if another program replaces a directory by a symlink meanwhile,
the lookup fails instead of leading outside.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from protocol.adapters.path_filesystem.files import PathFiles, Status
from protocol.errors import os_error

_LINKS_MAX: Final = 40  # MAXSYMLINKS, linux/namei.h


@dataclass(slots=True)
class ResolvedPath:
    """The result of resolving a path: `names` from the root, without symlinks; a context that releases `node`.

    `missing` are the names after them that do not exist; `names` and `node` are then those of the last directory that
    does. `is_symlink`: the last part of the path itself is a symlink.
    """

    store: PathFiles
    names: tuple[bytes, ...]
    node: int
    status: Status
    missing: tuple[bytes, ...] = ()
    is_symlink: bool = False

    @property
    def is_dir(self) -> bool:
        return not self.missing and stat.S_ISDIR(self.status.mode)

    @property
    def is_file(self) -> bool:
        return not self.missing and stat.S_ISREG(self.status.mode)

    def take_node(self) -> int:
        """Hand `node` over to the caller, who releases it."""
        node, self.node = self.node, -1
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.node >= 0:
            self.store.release(self.take_node())


def enter(store: PathFiles, names: Sequence[bytes]) -> int:
    """Return a node of the entry at `names` below the root, following no symlink."""
    node = store.top()
    for name in names:
        try:
            below = store.child(node, name)
        finally:
            store.release(node)
        node = below
    return node


def resolve(store: PathFiles, path: bytes, *, follow: bool = True, may_miss: bool = False) -> ResolvedPath:
    """Resolve `path`; a symlink in its last part is followed only with `follow`.

    FileNotFoundError if nothing is there, unless `may_miss`.  NotADirectoryError below a file; PermissionError if a
    symlink leads outside; ELOOP.
    """
    return _Walk(store, path, follow).place(may_miss)


class _Walk:
    """One resolution: `todo` is a stack of the remaining parts, `done` the names that led to `node`."""

    def __init__(self, store: PathFiles, path: bytes, follow: bool) -> None:
        self._store = store
        self._follow = follow
        self._todo = path.split(b"/")[::-1]
        self._done: list[bytes] = []
        self._links = 0
        self._is_symlink = False
        self._own = len(self._todo)  # this many of `todo`, from its start, are from the path; the others from symlinks

    def place(self, may_miss: bool) -> ResolvedPath:
        self._node = self._store.top(begins=True)
        try:
            while self._todo:
                part = self._todo.pop()
                is_own = len(self._todo) < self._own
                self._own = min(self._own, len(self._todo))
                if part == b"..":
                    self._go_up()
                elif part not in {b"", b"."} and not self._go_down(part, is_last=is_own and not self._todo):
                    return self._missing(part, may_miss)
            status = self._store.status(self._node)
        except BaseException:
            self._store.release(self._node)
            raise
        return ResolvedPath(self._store, tuple(self._done), self._node, status, is_symlink=self._is_symlink)

    def _go_down(self, name: bytes, *, is_last: bool) -> bool:
        """Go to entry `name`, or where its symlink leads; return whether it exists.

        `is_last`: it is the last part of the path itself.
        """
        store = self._store
        try:
            node = store.child(self._node, name)
        except FileNotFoundError:
            return False
        try:
            is_link = stat.S_ISLNK(store.status(node).mode)
            target = store.readlink(node) if is_link else b""
        except BaseException:
            store.release(node)
            raise
        self._is_symlink |= is_last and is_link
        if not is_link or (is_last and not self._follow):
            store.release(self._node)
            self._node = node
            self._done.append(name)
            return True
        store.release(node)
        self._follow_link(target)
        return True

    def _follow_link(self, target: bytes) -> None:
        self._links += 1
        if self._links > _LINKS_MAX:
            raise os_error(errno.ELOOP)
        if target.startswith(b"/"):
            root = os.fsencode(self._store.root).rstrip(b"/")
            if target != root and not target.startswith(root + b"/"):
                raise _outside()
            target = target[len(root) :]
            self._restart([])
        self._todo += target.split(b"/")[::-1]

    def _go_up(self) -> None:
        if not self._done:
            raise _outside()
        self._restart(self._done[:-1])

    def _restart(self, names: list[bytes]) -> None:
        node = enter(self._store, names)
        self._store.release(self._node)
        self._node = node
        self._done = names

    def _missing(self, name: bytes, may_miss: bool) -> ResolvedPath:
        rest = [part for part in reversed(self._todo) if part not in {b"", b"."}]
        if not may_miss or b".." in rest:
            raise os_error(errno.ENOENT)
        status = self._store.status(self._node)
        missing = (name, *rest)
        return ResolvedPath(self._store, tuple(self._done), self._node, status, missing, is_symlink=self._is_symlink)


def _outside() -> PermissionError:
    return PermissionError(errno.EACCES, "symlink leads outside the root")
