"""Steps: the changes that an apply makes in the lower directory.  Each can be repeated.

A step records the identity that its path had when it was planned (`seen`).  If another program has changed the path
since, the step does nothing and reports that, because an apply that is completed after a crash may run much later.

Threading: any one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from protocol.backends.overlay.lower import Identity, is_gone
from protocol.errors import os_error
from protocol.linux.beneath import open_beneath
from protocol.linux.portable import Handle, proc_path
from protocol.tree import TreeEntry

_PERMISSIONS: Final = 0o7777
_ONLY_MINE: Final = 0o700


@dataclass(frozen=True, slots=True)
class Step:
    """One change at `path`, which is relative to the lower directory.

    "directory" makes a directory, "leaf" renames the entry at `staged` to `path`, "attributes" sets mode, owner, mtime
    and xattrs to those of `attributes`, "remove" removes the entry.
    """

    do: Literal["directory", "leaf", "attributes", "remove"]
    path: bytes
    seen: Identity | None = None
    staged: bytes = b""
    attributes: TreeEntry | None = None

    def record(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        found: dict[str, Any] = {"do": self.do, "path": os.fsdecode(self.path), "seen": self.seen}
        if self.staged:
            found["staged"] = os.fsdecode(self.staged)
        if self.attributes is not None:
            a = self.attributes
            xattrs = {os.fsdecode(name): value.hex() for name, value in a.xattrs.items()}
            found["attributes"] = [a.mode, a.uid, a.gid, a.mtime_ns, xattrs]
        return found

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Step:
        """Return the step of a `record`.  KeyError, ValueError, TypeError, AttributeError for any other object."""
        path, staged = os.fsencode(record["path"]), os.fsencode(record.get("staged", ""))
        attributes = None
        if "attributes" in record:
            mode, uid, gid, mtime_ns, xattrs = record["attributes"]
            values = {os.fsencode(name): bytes.fromhex(value) for name, value in xattrs.items()}
            attributes = TreeEntry(path, mode, mtime_ns=mtime_ns, uid=uid, gid=gid, xattrs=values)
        seen = record["seen"]
        for each in (path, staged):
            if each and not {b"", b".", b".."}.isdisjoint(each.split(b"/")):
                raise ValueError(f"{os.fsdecode(each)!r} leads elsewhere")
        return cls(record["do"], path, seen and (*seen,), staged, attributes)


def place(root: int, path: bytes) -> tuple[Handle, bytes]:
    """Open the directory of `path` and return it with the name in it.  Writes use no cached descriptor."""
    above, _, name = path.rpartition(b"/")
    return Handle(open_beneath(root, above or b".", os.O_RDONLY | os.O_DIRECTORY)), name or b"."


class Steps:
    """Executes steps in the directory of descriptor `root`.

    `before_ctime` is called with the directory and name of each inode that stays and whose ctime is about to change.
    """

    def __init__(self, root: int, before_ctime: Callable[[Handle, bytes], None] = lambda _handle, _name: None) -> None:
        self._root = root
        self._before_ctime = before_ctime
        self._unsynced: set[bytes] = set()  # directories

    def run(self, step: Step) -> bool:
        """Execute a step.  Return False, without a change, if the path was changed by another program.  OSError."""
        if step.do == "attributes":
            return self._set(step)
        try:
            directory, name = place(self._root, step.path)
        except OSError as error:
            if is_gone(error):
                return step.do == "remove"
            raise
        self._unsynced.add(step.path.rpartition(b"/")[0])
        there = _stat(directory, name)
        if step.do == "directory":
            return self._make(step, directory, name, there)
        if step.do == "leaf":
            return self._put(step, directory, name, there)
        return self._remove(step, directory, name, there)

    def _make(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        if there is not None:
            if stat.S_ISDIR(there.st_mode):
                return True
            if not _is_seen(there, step.seen):
                return False
            self._unlink(directory, name, there)
        os.mkdir(name, _ONLY_MINE, dir_fd=directory.fd)
        return True

    def _put(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        source, staged = place(self._root, step.staged)
        new = _stat(source, staged)
        if new is None:
            return True  # executed before
        if there is not None:
            if (there.st_dev, there.st_ino) == (new.st_dev, new.st_ino):
                os.unlink(staged, dir_fd=source.fd)  # rename(2) keeps both if they are names of one file
                return True
            if not _is_seen(there, step.seen):
                return False
            if stat.S_ISDIR(there.st_mode):
                _rmdir(directory, name, step.path)
            elif there.st_nlink > 1:
                self._before_ctime(directory, name)
        os.rename(staged, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd)
        return True

    def _remove(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        if there is None:
            return True
        if not _is_seen(there, step.seen):
            return False
        if not stat.S_ISDIR(there.st_mode):
            self._unlink(directory, name, there)
            return True
        _rmdir(directory, name, step.path)
        return True

    def _unlink(self, directory: Handle, name: bytes, there: os.stat_result) -> None:
        if there.st_nlink > 1:
            self._before_ctime(directory, name)
        os.unlink(name, dir_fd=directory.fd)

    def _set(self, step: Step) -> bool:
        new = step.attributes
        assert new is not None
        try:
            directory, name = place(self._root, step.path)
        except OSError as error:
            if is_gone(error):
                return False
            raise
        there = _stat(directory, name)
        if there is None:
            return False
        if stat.S_ISDIR(there.st_mode):
            self._unsynced.add(step.path)
        elif not _is_seen(there, step.seen) and not (
            step.seen is not None and _is_seen(there, (*step.seen[:3], new.mtime_ns, 0))  # set by a killed apply
        ):
            return False
        else:
            self._before_ctime(directory, name)
        can_sync = stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode)
        flags = os.O_RDONLY | os.O_NONBLOCK if can_sync else os.O_PATH
        handle = Handle(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        set_attributes(handle.fd, new)
        if can_sync:
            os.fsync(handle.fd)
        return True

    def sync(self) -> None:
        """Sync the directories that were changed."""
        for path in sorted(self._unsynced):
            try:
                handle = Handle(open_beneath(self._root, path or b".", os.O_RDONLY | os.O_DIRECTORY))
            except OSError as error:
                if is_gone(error):
                    continue  # removed since
                raise
            os.fsync(handle.fd)


def _stat(directory: Handle, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _rmdir(directory: Handle, name: bytes, path: bytes) -> None:
    try:
        os.rmdir(name, dir_fd=directory.fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise os_error(errno.ENOTEMPTY, path.decode("utf-8", "backslashreplace")) from None


def _is_seen(there: os.stat_result, seen: Identity | None) -> bool:
    """Return whether the identity is the one that was seen, apart from the ctime, which links and renames change."""
    if seen is None:
        return False
    if stat.S_ISDIR(there.st_mode):
        return (there.st_dev, there.st_ino) == seen[:2]
    return (there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns) == seen[:4]


def set_attributes(descriptor: int, new: TreeEntry) -> None:
    """Give the inode of a descriptor, which may be an O_PATH one, the mode, owner, xattrs and mtime of `new`.

    The owner is set first, because that clears mode bits; the mtime last, because the other calls may change it.
    """
    path = proc_path(descriptor)
    there = os.fstat(descriptor)
    if (there.st_uid, there.st_gid) != (new.uid, new.gid):
        os.chown(path, new.uid, new.gid)
    if not stat.S_ISLNK(there.st_mode):  # a new FIFO, too, may have an ACL of its directory
        had: list[str] = []
        with contextlib.suppress(OSError):  # EOPNOTSUPP: there are none to remove
            had = os.listxattr(path)
        for name in had:
            if os.fsencode(name) not in new.xattrs:
                os.removexattr(path, name)
        for key, value in new.xattrs.items():
            os.setxattr(path, key, value)
    if not stat.S_ISLNK(there.st_mode):
        os.chmod(path, new.mode & _PERMISSIONS)
    os.utime(path, ns=(new.mtime_ns, new.mtime_ns))
