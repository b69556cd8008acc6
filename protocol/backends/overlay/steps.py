"""Steps: the changes that an apply makes in the directory below, one at a time.  Each can be repeated.

A step records the identity that was at its path when it was planned (`seen`).  If another program has changed the path
since, the step leaves it alone and reports that, because an apply that is finished after a crash may run much later.

Threading: any one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from protocol.backends.overlay.lower import Identity, is_gone
from protocol.errors import os_error
from protocol.linux.beneath import Handle, open_beneath, proc_path
from protocol.tree import TreeEntry

__all__ = ["Attributes", "Step", "Steps", "attributes_of", "place", "set_attributes", "set_by_name"]

_PERMISSIONS: Final = 0o7777
_ONLY_MINE: Final = 0o700


@dataclass(frozen=True, slots=True)
class Attributes:
    """Metadata that a step sets."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Step:
    """`directory`: make it.  `leaf`: rename the entry at `staged` into place.  `attributes`: set them.  `remove`.

    Paths are relative to the directory below.
    """

    do: Literal["directory", "leaf", "attributes", "remove"]
    path: bytes
    seen: Identity | None = None
    staged: bytes = b""
    attributes: Attributes | None = None

    def record(self) -> dict[str, Any]:
        """The step as a JSON object."""
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
        """The inverse of `record`.  KeyError, ValueError, TypeError for anything else."""
        attributes = None
        if "attributes" in record:
            mode, uid, gid, mtime_ns, xattrs = record["attributes"]
            attributes = Attributes(
                mode, uid, gid, mtime_ns, {os.fsencode(name): bytes.fromhex(v) for name, v in xattrs.items()}
            )
        seen = record["seen"]
        path, staged = os.fsencode(record["path"]), os.fsencode(record.get("staged", ""))
        for each in (path, staged):
            if each and not {b"", b".", b".."}.isdisjoint(each.split(b"/")):
                raise ValueError(f"{os.fsdecode(each)!r} leads elsewhere")
        return cls(record["do"], path, seen and (*seen,), staged, attributes)


def attributes_of(entry: TreeEntry) -> Attributes:
    """The attributes of a tree's entry."""
    return Attributes(entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.xattrs)


def place(root: int, path: bytes) -> tuple[Handle, bytes]:
    """Open the directory of `path` anew and return it with the name: no write goes through a stale descriptor."""
    above, _, name = path.rpartition(b"/")
    return Handle(open_beneath(root, above or b".", os.O_RDONLY | os.O_DIRECTORY)), name or b"."


class Steps:
    """Executes steps in the directory of descriptor `root`.

    `moving` is called with (directory, name) of each inode that keeps other names and whose ctime is about to change.
    """

    def __init__(self, root: int, moving: Callable[[Handle, bytes], None] = lambda _directory, _name: None) -> None:
        self._root = root
        self._moving = moving
        self.directories: set[bytes] = set()  # whose entries changed, to be synced

    def run(self, step: Step) -> bool:
        """Execute a step.  False, without a change, if something unexpected is at its path.  OSError."""
        if step.do == "attributes":
            return self._set(step)
        try:
            directory, name = place(self._root, step.path)
        except OSError as error:
            if is_gone(error) and step.do == "remove":
                return True
            raise
        self.directories.add(step.path.rpartition(b"/")[0])
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
                self._moving(directory, name)
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
            self._moving(directory, name)
        os.unlink(name, dir_fd=directory.fd)

    def _set(self, step: Step) -> bool:
        new = step.attributes
        assert new is not None
        directory, name = place(self._root, step.path)
        there = _stat(directory, name)
        if there is None:
            return False
        if stat.S_ISDIR(there.st_mode):
            self.directories.add(step.path)
        elif not _is_seen(there, step.seen) and not _has_got(there, step.seen, new.mtime_ns):
            return False
        else:
            self._moving(directory, name)
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISDIR(there.st_mode):
            set_by_name(directory, name, new, is_symlink=stat.S_ISLNK(there.st_mode))
            return True
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = Handle(os.open(name, flags, dir_fd=directory.fd))
        set_attributes(handle.fd, new)
        os.fsync(handle.fd)
        return True

    def sync(self) -> None:
        """Sync all directories whose entries changed."""
        for path in sorted(self.directories):
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
    """Whether the identity is the one that was seen, apart from the ctime, which links and renames change."""
    if seen is None:
        return False
    if stat.S_ISDIR(there.st_mode):
        return (there.st_dev, there.st_ino) == seen[:2]
    return (there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns) == seen[:4]


def _has_got(there: os.stat_result, seen: Identity | None, mtime_ns: int) -> bool:
    """Whether this is the file that was seen, with the mtime that the step sets."""
    return seen is not None and _is_seen(there, (*seen[:3], mtime_ns, 0))


def set_attributes(descriptor: int, new: Attributes) -> None:
    """Set attributes: the owner first, because that clears mode bits; the mtime last, because the others change it."""
    there = os.fstat(descriptor)
    if (there.st_uid, there.st_gid) != (new.uid, new.gid):
        os.chown(descriptor, new.uid, new.gid)
    had: set[str] = set()
    with contextlib.suppress(OSError):  # EOPNOTSUPP: there are none to remove
        had = set(os.listxattr(descriptor))
    for gone in had - {os.fsdecode(each) for each in new.xattrs}:
        os.removexattr(descriptor, gone)
    for name, value in new.xattrs.items():
        os.setxattr(descriptor, name, value)
    os.chmod(descriptor, new.mode & _PERMISSIONS)
    os.utime(descriptor, ns=(new.mtime_ns, new.mtime_ns))


def set_by_name(directory: Handle, name: bytes, new: Attributes, *, is_symlink: bool) -> None:
    """Set attributes of entries that cannot be opened: symlinks, fifos, devices."""
    os.chown(name, new.uid, new.gid, dir_fd=directory.fd, follow_symlinks=False)
    if not is_symlink:
        there = Handle(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        os.chmod(proc_path(there.fd), new.mode & _PERMISSIONS)
    os.utime(name, ns=(new.mtime_ns, new.mtime_ns), dir_fd=directory.fd, follow_symlinks=False)
