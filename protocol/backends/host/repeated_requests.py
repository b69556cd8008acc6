"""RepeatedRequests: a request that the kernel sends again, because its daemon died, is executed once.

Some calls fail if they are made twice: mkdir(2), unlink(2), rename(2).  So each changing call writes its request's
number and the facts that it depends on into the slot of a `SharedLog` before it changes the host, and its result
afterwards.  The loop executes one request at a time, so at most one was executed and not answered: the last one.  The
slot has the last 32, because several daemons may die one after the other while they answer the requests that wait.

If the slot has the result, the next process returns it.  If it has only the facts, the daemon died in between, and the
host shows what happened:

- mkdir, mknod, symlink: the call is made.  If the name exists, and did not when the facts were written, it is ours;
  the owner is set, which may be what the daemon did not come to.
- link: the same, if the name leads to the inode, and that has one link more.
- unlink, rmdir: done if the name is gone, or leads to another inode.
- rename: done if the new name leads to the inode that was moved, and the old one does not.
- setxattr with XATTR_CREATE, removexattr: the facts say whether the attribute existed.
- append: done as far as the bytes are behind the old end of the file.
- All others are made again: the same bytes at the same offset, the same attributes.

What remains: another program that makes the same name between the facts and the daemon's death, some microseconds.

Threading: the serving loop.  No call awaits between facts and result.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from protocol.linux import portable, statx
from protocol.linux.beneath import open_beneath
from protocol.values import Value
from protocol.volume import RENAME_EXCHANGE, RENAME_WHITEOUT, SUPERUSER, AttributeChanges, Caller
from protocol.volume_durability import UNIQUE_RESEND

if TYPE_CHECKING:
    from protocol.backends.host.attributes import HostAttributes
    from protocol.backends.host.volume import HostVolume
    from protocol.volume import Buffer

_XATTR_CREATE: Final = 1  # linux/xattr.h
_WRAPPED: Final = (
    "mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename", "setattr", "setxattr", "removexattr", "write",
    "append", "fallocate", "copy_range",
)  # fmt: skip
# The words of an entry of the slot.
_UNIQUE, _CALL, _IS_DONE, _RESULT, _TIME, _FACTS = range(6)
_FACTS_MAX: Final = 4
_ENTRY_WORDS: Final = _FACTS + _FACTS_MAX
_ENTRIES: Final = 32
_OTHERS_BYTES: Final = 1 << 20  # that other programs may append between the facts of an append and the append
_NEWEST: Final = _ENTRY_WORDS * _ENTRIES  # the word with the position of the entry that was written last


class _Earlier(Value):
    """What the slot has of a call: `facts` are from before it, at `time_ns`."""

    call: int
    is_done: bool
    result: int
    time_ns: int
    facts: tuple[int, ...]


class RepeatedRequests:
    """Takes the place of the changing methods of `volume`.  `slot` is as the process before left it."""

    def __init__(self, volume: HostVolume, slot: memoryview, *, is_known: bool) -> None:
        self._slot = slot
        self._entry = slot[:_ENTRY_WORDS]
        self._unique = 0
        self._call = 0  # of the request: one may need several
        self._is_repeated = False
        self._earlier = dict(self._entries()) if is_known else {}
        self._volume = volume
        self._replaced: dict[str, Callable[..., Any]] = {name: getattr(volume, name) for name in _WRAPPED}
        for name in _WRAPPED:
            setattr(volume, name, getattr(self, name))

    def answering(self, unique: int) -> None:
        """See `AnsweringVolume.answering`."""
        self._unique = unique & ~UNIQUE_RESEND
        self._is_repeated = self._unique != unique
        self._call = 0

    # -- the slot ------------------------------------------------------------------------------------
    def _entries(self) -> Iterator[tuple[int, _Earlier]]:
        """Yield what processes before have recorded, by request, the newest last."""
        newest = self._slot[_NEWEST]
        for number in range(1, _ENTRIES + 1):
            start = (newest + number) % _ENTRIES * _ENTRY_WORDS
            entry = self._slot[start : start + _ENTRY_WORDS]
            if entry[_UNIQUE]:
                facts = tuple(entry[_FACTS:])
                yield entry[_UNIQUE], _Earlier(entry[_CALL], bool(entry[_IS_DONE]), entry[_RESULT], entry[_TIME], facts)

    def _found(self) -> _Earlier | None:
        """Begin a call; return what a process before has recorded of it."""
        self._call += 1
        earlier = self._earlier.get(self._unique) if self._is_repeated else None
        return None if earlier is None or earlier.call < self._call else earlier

    def _intend(self, *facts: int) -> None:
        """Begin to execute the call."""
        newest = (self._slot[_NEWEST] + 1) % _ENTRIES
        entry = self._entry = self._slot[newest * _ENTRY_WORDS : (newest + 1) * _ENTRY_WORDS]
        entry[_UNIQUE] = 0
        entry[_CALL] = self._call
        entry[_IS_DONE] = 0
        entry[_TIME] = statx.file_clock_ns()
        for at, fact in enumerate(facts, _FACTS):
            entry[at] = fact
        entry[_UNIQUE] = self._unique  # the entry counts from here on
        self._slot[_NEWEST] = newest

    def _repeat(self, found: _Earlier) -> None:
        """Begin to execute a call that a process before may have executed: its facts stay."""
        self._intend(*found.facts)
        self._entry[_TIME] = found.time_ns

    def _done(self, result: int = 0) -> None:
        self._entry[_RESULT] = result
        self._entry[_IS_DONE] = 1

    def _is_done(self, found: _Earlier | None) -> bool:
        return found is not None and (found.is_done or found.call > self._call)

    # -- making names --------------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttributes:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        return self._make("mknod", parent, name, kind | stat.S_IMODE(mode), caller, mode, rdev)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> HostAttributes:
        return self._make("mkdir", parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller, mode)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> HostAttributes:
        return self._make("symlink", parent, name, stat.S_IFLNK, caller, target)

    def _make(
        self, method: str, parent: int, name: bytes, mode: int, caller: Caller, *arguments: object
    ) -> HostAttributes:
        found = self._found()
        if self._is_done(found):
            return self._volume.lookup(parent, name)
        self._intend(*self._key(parent, name)) if found is None else self._repeat(found)
        try:
            made: HostAttributes = self._replaced[method](parent, name, *arguments, caller)
        except FileExistsError:
            if found is None or any(found.facts) or not self._is_made(parent, name, mode, caller, found):
                raise
            made = self._volume.lookup(parent, name)
        self._done()
        return made

    def _is_made(self, parent: int, name: bytes, mode: int, caller: Caller, found: _Earlier) -> bool:
        """Whether the call before made the inode at `name`; finishes it."""
        volume = self._volume
        descriptor = open_beneath(volume.directory(parent), name, os.O_PATH, same_mount=True)
        try:
            seen = os.fstat(descriptor)
            made_ns = portable.birth_ns(descriptor) or seen.st_ctime_ns
            if stat.S_IFMT(seen.st_mode) != stat.S_IFMT(mode) or made_ns < found.time_ns:
                return False
            volume.finish(parent, descriptor, mode, caller)
        finally:
            os.close(descriptor)
        return True

    def link(self, inode: int, parent: int, name: bytes) -> HostAttributes:
        found = self._found()
        if self._is_done(found):
            return self._volume.lookup(parent, name)
        before = self._volume.getattr(inode)
        self._intend(before.nlink) if found is None else self._repeat(found)
        try:
            made: HostAttributes = self._replaced["link"](inode, parent, name)
        except FileExistsError:
            if found is None or before.nlink != found.facts[0] + 1:
                raise
            made = self._volume.lookup(parent, name)
            if made.inode != inode:
                self._volume.forget(made.inode, 1)
                raise
        self._done()
        return made

    # -- removing and moving names -------------------------------------------------------------------
    def unlink(self, parent: int, name: bytes) -> None:
        self._remove("unlink", parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        self._remove("rmdir", parent, name)

    def _remove(self, method: str, parent: int, name: bytes) -> None:
        found = self._found()
        if self._is_done(found):
            return
        key = self._key(parent, name)
        self._intend(*key) if found is None else self._repeat(found)
        if found is not None and key != found.facts[:2]:
            self._volume.lost_name((found.facts[0], found.facts[1]), parent, name)
            self._done()
            return
        self._replaced[method](parent, name)
        self._done()

    def _key(self, parent: int, name: bytes) -> tuple[int, int]:
        """The inode that a name leads to, zeros for none."""
        try:
            seen = os.stat(name, dir_fd=self._volume.directory(parent), follow_symlinks=False)
        except (OSError, ValueError):  # the call itself says what is wrong
            return 0, 0
        return seen.st_dev, seen.st_ino

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        found = self._found()
        if self._is_done(found):
            return
        old, new = self._key(parent, name), self._key(new_parent, new_name)
        self._intend(*old, *new) if found is None else self._repeat(found)
        if found is not None and self._is_moved(old, new, found.facts, flags):
            self._volume.moved(found.facts, (parent, name), (new_parent, new_name), flags)
            if flags & RENAME_WHITEOUT:
                descriptor = open_beneath(self._volume.directory(parent), name, os.O_PATH, same_mount=True)
                try:
                    self._volume.finish(parent, descriptor, stat.S_IFCHR, caller)
                finally:
                    os.close(descriptor)
            self._done()
            return
        self._replaced["rename"](parent, name, new_parent, new_name, flags, caller)
        self._done()

    @staticmethod
    def _is_moved(old: tuple[int, int], new: tuple[int, int], facts: tuple[int, ...], flags: int) -> bool:
        was_old, was_new = facts[:2], facts[2:]
        if was_old == was_new:  # names of one inode, for which rename(2) does nothing
            return False
        return new == was_old and (old == was_new if flags & RENAME_EXCHANGE else old != was_old)

    # -- attributes and content ----------------------------------------------------------------------
    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        if self._is_done(self._found()):
            return self._volume.getattr(inode)
        self._intend()
        changed: HostAttributes = self._replaced["setattr"](inode, changes)
        self._done()
        return changed

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        found = self._found()
        if self._is_done(found):
            return
        before = self._value(inode, name) if flags & _XATTR_CREATE else None
        self._intend(before is not None) if found is None else self._repeat(found)
        if found is not None and before == value and not found.facts[0]:
            self._done()
            return
        self._replaced["setxattr"](inode, name, value, flags)
        self._done()

    def removexattr(self, inode: int, name: bytes) -> None:
        found = self._found()
        if self._is_done(found):
            return
        before = self._value(inode, name)
        self._intend(before is not None) if found is None else self._repeat(found)
        if found is not None and before is None and found.facts[0]:
            self._done()
            return
        self._replaced["removexattr"](inode, name)
        self._done()

    def _value(self, inode: int, name: bytes) -> bytes | None:
        try:
            return self._volume.getxattr(inode, name)
        except OSError:
            return None

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        return self._again("write", inode, offset, data, kill_privileges=kill_privileges)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        found = self._found()
        if found is not None and self._is_done(found):
            return found.result, self._volume.getattr(inode).size
        self._intend(self._volume.getattr(inode).size) if found is None else self._repeat(found)
        there = 0 if found is None else self._appended(inode, found.facts[0], bytes(data))
        written, size = self._replaced["append"](inode, data[there:], kill_privileges=kill_privileges)
        self._done(there + written)
        return there + written, size

    def _appended(self, inode: int, end: int, data: bytes) -> int:
        """How many bytes of `data` the call before appended to a file that ended at `end`."""
        tail = bytes(self._volume.read(inode, end, len(data) + _OTHERS_BYTES))
        if data in tail:
            return len(data)
        return len(tail) if data.startswith(tail) else 0  # killed in the middle of the write

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        self._again("fallocate", inode, mode, offset, length)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        return self._again("copy_range", source, source_offset, target, target_offset, length)

    def _again(self, method: str, *args: Any, **kwargs: Any) -> int:
        """Make a call that can be made twice; return the result of the call before if that is recorded."""
        found = self._found()
        if found is not None and found.is_done and found.call == self._call:
            return found.result
        self._intend()
        result: int = self._replaced[method](*args, **kwargs)
        self._done(result or 0)
        return result
