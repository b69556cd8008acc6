"""Writing and removing: the calls of `PathFilesystem` that change files."""

from __future__ import annotations

import contextlib
import errno
import secrets
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from protocol.adapters.path_filesystem.files import OpenFile, PathFiles, Status, held
from protocol.adapters.path_filesystem.resolve import ResolvedPath, enter
from protocol.errors import DeniedByPolicyError
from protocol.streams import FileWriter
from protocol.types import WriteMode

_COPIED: Final = (b"user.", b"system.posix_acl_")  # attributes that a write in place keeps


def temporary_name() -> bytes:
    """Return a name for an unfinished file.  It has no suffix that a pattern of a policy is likely to match."""
    return b".vfsd-" + secrets.token_hex(8).encode()


def make_directories(store: PathFiles, names: tuple[bytes, ...], missing: Sequence[bytes]) -> tuple[bytes, ...]:
    """Make the directories `missing`, each inside the previous one, below `names`; return the names of the last one."""
    for name in missing:
        with held(store, enter(store, names)) as node, contextlib.suppress(FileExistsError):
            store.mkdir(node, name)  # another program may have made it first
            store.sync_names(node)
        names = (*names, name)
    return names


def replace_content(store: PathFiles, path: str, place: ResolvedPath, old: bytes, new: bytes) -> bool:
    """Replace the file at `place` if its content is `old`, and return whether it was."""
    parent = enter(store, place.names[:-1])
    try:
        replacement = _Replacement(store, parent, place.names[-1], place)
    except BaseException:
        store.release(parent)
        raise
    writer = FileWriter(path, replacement.file, commit=lambda: replacement.commit(old), abort=replacement.abort)
    try:
        with writer:
            writer.write(new)
    except _ChangedMeanwhileError:
        return False
    return True


class _ChangedMeanwhileError(Exception):
    """A file has other content than the one that was to be replaced."""


def open_writer(store: PathFiles, path: str, place: ResolvedPath, mode: WriteMode) -> FileWriter:
    """Open a writer for the file at `place`, whose parent exists."""
    if mode == "append" and not place.missing:
        node = place.take_node()
        try:
            file = store.open(node, "append")
        except BaseException:
            store.release(node)
            raise
        return FileWriter(path, file, position=file.size(), commit=file.sync)
    names = (*place.names, *place.missing)
    parent = enter(store, names[:-1])
    try:
        if mode == "overwrite":
            replacement = _Replacement(store, parent, names[-1], place)
            return FileWriter(path, replacement.file, commit=replacement.commit, abort=replacement.abort)
        creation = _Creation(store, parent, names[-1])
        return FileWriter(path, creation.file, commit=creation.commit, abort=creation.abort)
    except BaseException:
        store.release(parent)
        raise


class _Creation:
    """A new file under its final name from the start, so that no other program creates it; removed on failure."""

    def __init__(self, store: PathFiles, parent: int, name: bytes) -> None:
        self._store = store
        self._parent = parent
        self._name = name
        self.file: OpenFile = store.create(parent, name, None)

    def commit(self) -> None:
        self.file.sync()
        self._store.sync_names(self._parent)
        self._store.release(self._parent)

    def abort(self) -> None:
        store = self._store
        with held(store, self._parent), contextlib.suppress(FileNotFoundError):
            # Not a file that another program has put there since.
            if store.status_of(self._parent, self._name).inode == store.status(self.file.node).inode:
                store.unlink(self._parent, self._name)


class _Replacement:
    """A file under a temporary name that in the end takes the place, mode, owner and attributes of the old one."""

    def __init__(self, store: PathFiles, parent: int, name: bytes, place: ResolvedPath) -> None:
        self._store = store
        self._parent = parent
        self._name = name
        self._old = old = None if place.missing else place.status
        self._xattrs = {} if old is None else store.xattrs(place.node)
        self._temporary = temporary_name()
        # The old file may be private, so nobody else may read the new one.
        try:
            self.file: OpenFile = store.create(parent, self._temporary, None if old is None else 0o600)
        except DeniedByPolicyError as error:
            raise DeniedByPolicyError(error.attempt, b"/".join((*place.names, *place.missing))) from None

    def commit(self, expected: bytes | None = None) -> None:
        """Replace the file; with `expected`, only one that has this content (_ChangedMeanwhileError)."""
        store = self._store
        if self._old is not None:
            copy_access(store, self.file.node, self._old, self._xattrs)
        self.file.sync()
        with store.locked(self._parent):
            if expected is not None and not self._has_content(expected):
                raise _ChangedMeanwhileError
            store.rename(self._parent, self._temporary, self._parent, self._name)
        store.sync_names(self._parent)
        store.release(self._parent)

    def _has_content(self, expected: bytes) -> bool:
        node = self._store.child(self._parent, self._name)
        try:
            if not stat.S_ISREG(self._store.status(node).mode):
                return False
            file = self._store.open(node, "read")
        except BaseException:
            self._store.release(node)
            raise
        with contextlib.closing(file):
            return file.size() == len(expected) and file.read(0, len(expected) + 1) == expected

    def abort(self) -> None:
        with held(self._store, self._parent), contextlib.suppress(FileNotFoundError):
            self._store.unlink(self._parent, self._temporary)


def copy_access(store: PathFiles, node: int, old: Status, xattrs: Mapping[bytes, bytes]) -> None:
    """Give the new file `node` the ACL, user attributes, mode and, if allowed, the owner of the file that it replaces.

    An ACL that the directory gave the new file goes, because it lets in users whom the old file kept out.  The
    attributes that the system sets stay (security.selinux), and so does what write(2) removes: capabilities.
    """
    made = store.xattrs(node)
    wanted = {name: value for name, value in made.items() if not name.startswith(_COPIED)}
    wanted |= {name: value for name, value in xattrs.items() if name.startswith(_COPIED)}
    if wanted != made:
        store.set_xattrs(node, wanted)
    _copy_ownership(store, node, old)


def _copy_ownership(store: PathFiles, node: int, old: Status) -> None:
    """Give `node` the mode of `old` and, where that is allowed, its owner."""
    made = store.status(node)
    if (made.uid, made.gid) != (old.uid, old.gid):
        try:
            store.set_owner(node, old.uid, old.gid)
        except PermissionError:
            # This user owns the file now: it must not run with the rights of another user.
            old = old._replace(mode=old.mode & ~(stat.S_ISUID | stat.S_ISGID))
    store.set_mode(node, old.mode)  # after the owner: chown clears suid and sgid


def remove(store: PathFiles, names: tuple[bytes, ...], *, recursive: bool) -> int:
    """Remove the entry at `names`, not the root; return the number of entries removed.

    IsADirectoryError (ENOTEMPTY) for a directory with entries, unless `recursive`.
    """
    with held(store, enter(store, names[:-1])) as parent:
        if not stat.S_ISDIR(store.status_of(parent, names[-1]).mode):
            store.unlink(parent, names[-1])
            return 1
        try:
            store.rmdir(parent, names[-1])
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:  # rmdir(2): POSIX allows either
                raise
        else:
            return 1
    if not recursive:
        raise IsADirectoryError(errno.ENOTEMPTY, "Directory not empty")
    return _remove_below(store, names)


def _remove_below(store: PathFiles, names: tuple[bytes, ...]) -> int:
    """Remove a directory with everything in it.  Holds no node between directories: the tree may be very deep."""
    count = 0
    waiting = [(names, False)]  # (directory, whether its entries are gone)
    while waiting:
        directory, is_empty = waiting.pop()
        if not is_empty:
            waiting.append((directory, True))
            with held(store, enter(store, directory)) as node:
                for name, kind in store.names(node):
                    if kind == stat.S_IFDIR:
                        waiting.append(((*directory, name), False))
                    else:
                        store.unlink(node, name)
                        count += 1
            continue
        with held(store, enter(store, directory[:-1])) as parent:
            store.rmdir(parent, directory[-1])
        count += 1
    return count
