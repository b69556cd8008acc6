"""RepeatableFiles: a request that the kernel sends again, because its daemon died, is executed once.

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

One case remains: another program makes the same name between the facts and the daemon's death, some microseconds.

Threading: the serving loop.  No call awaits between facts and result.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol.backends.host.files import HostFiles
from protocol.linux import portable, statx
from protocol.linux.portable import Handle
from protocol.values import Value
from protocol.volume import RENAME_EXCHANGE, RENAME_WHITEOUT, SUPERUSER, AttributeChanges, Attributes, Caller
from protocol.volume_durability import UNIQUE_RESEND

if TYPE_CHECKING:
    from protocol.volume import Buffer

A = TypeVar("A", bound=Attributes)

_XATTR_CREATE: Final = 1  # linux/xattr.h
# The words of an entry of the slot.
_UNIQUE, _CALL, _IS_DONE, _RESULT, _TIME, _FACTS = range(6)
_FACTS_MAX: Final = 4
_ENTRY_WORDS: Final = _FACTS + _FACTS_MAX
_ENTRIES: Final = 32
_OTHERS_BYTES: Final = 1 << 20  # that other programs may append between the facts of an append and the append
_NEWEST: Final = _ENTRY_WORDS * _ENTRIES  # the word with the position of the entry that was written last


class _Earlier(Value):
    """The record of a call in the slot: `facts` are from before it, at `time_ns`."""

    call: int
    is_done: bool
    result: int
    time_ns: int
    facts: tuple[int, ...]


class _Requests:
    """The calls of a volume in the slot of a log, which is as the dead daemon left it."""

    def __init__(self, slot: memoryview, *, is_known: bool) -> None:
        self._slot = slot
        self._entry = slot[:_ENTRY_WORDS]
        self._unique = 0
        self._call = 0  # of the request: one may need several
        self._is_repeated = False
        self._earlier = dict(self._entries()) if is_known else {}

    def answering(self, unique: int) -> None:
        """Count the calls from now on as those of this request."""
        self._unique = unique & ~UNIQUE_RESEND
        self._is_repeated = self._unique != unique
        self._call = 0

    def _entries(self) -> Iterator[tuple[int, _Earlier]]:
        """Yield the records of dead daemons by request, the newest last."""
        newest = self._slot[_NEWEST]
        for number in range(1, _ENTRIES + 1):
            start = (newest + number) % _ENTRIES * _ENTRY_WORDS
            entry = self._slot[start : start + _ENTRY_WORDS]
            if entry[_UNIQUE]:
                facts = tuple(entry[_FACTS:])
                yield entry[_UNIQUE], _Earlier(entry[_CALL], bool(entry[_IS_DONE]), entry[_RESULT], entry[_TIME], facts)

    def found(self) -> _Earlier | None:
        """Begin a call; return the record of it that a dead daemon has left."""
        self._call += 1
        earlier = self._earlier.get(self._unique) if self._is_repeated else None
        return None if earlier is None or earlier.call < self._call else earlier

    def is_done(self, found: _Earlier | None) -> bool:
        """Whether a dead daemon has executed the call."""
        return found is not None and (found.is_done or found.call > self._call)

    def result(self, found: _Earlier | None) -> int | None:
        """The recorded result of the call, if there is one."""
        return found.result if found is not None and found.is_done and found.call == self._call else None

    def intend(self, found: _Earlier | None, *facts: int) -> None:
        """Begin to execute the call; if a dead daemon has begun it (`found`), its facts stay."""
        newest = (self._slot[_NEWEST] + 1) % _ENTRIES
        entry = self._entry = self._slot[newest * _ENTRY_WORDS : (newest + 1) * _ENTRY_WORDS]
        entry[_UNIQUE] = 0
        entry[_CALL] = self._call
        entry[_IS_DONE] = 0
        entry[_TIME] = statx.file_clock_ns() if found is None else found.time_ns
        for at, fact in enumerate(facts if found is None else found.facts, _FACTS):
            entry[at] = fact
        entry[_UNIQUE] = self._unique  # the entry counts from here on
        self._slot[_NEWEST] = newest

    def done(self, result: int = 0) -> None:
        """Record the result of the call."""
        self._entry[_RESULT] = result
        self._entry[_IS_DONE] = 1


class RepeatableFiles(HostFiles[A]):
    """HostFiles that executes each change once, from `begin_requests` on."""

    _requests: _Requests | None = None

    def begin_requests(self, slot: memoryview, *, is_known: bool) -> None:
        """Record changes in `slot`; `is_known`: a dead daemon has served the kernel before."""
        self._requests = _Requests(slot, is_known=is_known)

    def answering(self, unique: int) -> None:
        """See `ExtendedVolume.answering`."""
        if self._requests is not None:
            self._requests.answering(unique)

    # -- making names --------------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> A:
        """See `protocol.volume.Volume`."""
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        return self._make(super().mknod, parent, name, kind | stat.S_IMODE(mode), caller, mode, rdev)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> A:
        return self._make(super().mkdir, parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller, mode)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> A:
        return self._make(super().symlink, parent, name, stat.S_IFLNK, caller, target)

    def _make(
        self, create: Callable[..., A], parent: int, name: bytes, mode: int, caller: Caller, *arguments: object
    ) -> A:
        requests = self._requests
        if requests is None:
            return create(parent, name, *arguments, caller)
        found = requests.found()
        if requests.is_done(found):
            return self.lookup(parent, name)
        requests.intend(found, *self._key(parent, name))
        try:
            made = create(parent, name, *arguments, caller)
        except FileExistsError:
            if found is None or any(found.facts) or not self._is_made(parent, name, mode, caller, found):
                raise
            made = self.lookup(parent, name)
        requests.done()
        return made

    def _is_made(self, parent: int, name: bytes, mode: int, caller: Caller, found: _Earlier) -> bool:
        """Whether the dead daemon made the inode at `name`; finishes it."""
        above, handle = self._opened(parent, name)
        seen = os.fstat(handle.fd)
        made_ns = portable.birth_ns(handle.fd) or seen.st_ctime_ns
        if stat.S_IFMT(seen.st_mode) != stat.S_IFMT(mode) or made_ns < found.time_ns:
            return False
        self.finish_interrupted(above, handle, mode, caller)
        return True

    def _opened(self, parent: int, name: bytes) -> tuple[Handle, Handle]:
        """Descriptors of a directory and of its entry `name`."""
        directory = self.node(parent)
        above = self.descriptors.directory(directory)
        return above, self.descriptors.opened(directory, name, os.O_PATH)

    def link(self, inode: int, parent: int, name: bytes) -> A:
        requests = self._requests
        if requests is None:
            return super().link(inode, parent, name)
        found = requests.found()
        if requests.is_done(found):
            return self.lookup(parent, name)
        before = self.getattr(inode)
        requests.intend(found, before.nlink)
        try:
            made = super().link(inode, parent, name)
        except FileExistsError:
            if found is None or before.nlink != found.facts[0] + 1:
                raise
            made = self.lookup(parent, name)
            if made.inode != inode:
                self.forget(made.inode, 1)
                raise
        requests.done()
        return made

    # -- removing and moving names -------------------------------------------------------------------
    def unlink(self, parent: int, name: bytes) -> None:
        self._remove_once(super().unlink, parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        self._remove_once(super().rmdir, parent, name)

    def _remove_once(self, remove: Callable[[int, bytes], None], parent: int, name: bytes) -> None:
        requests = self._requests
        if requests is None:
            remove(parent, name)
            return
        found = requests.found()
        if requests.is_done(found):
            return
        key = self._key(parent, name)
        requests.intend(found, *key)
        if found is not None and key != found.facts[:2]:
            node = self.table.by_key((found.facts[0], found.facts[1]))
            if node is not None:
                self.table.remove_dentry(node, self.node(parent), name)
        else:
            remove(parent, name)
        requests.done()

    def _key(self, parent: int, name: bytes) -> tuple[int, int]:
        """The inode that a name leads to, zeros for none."""
        try:
            above = self.descriptors.directory(self.node(parent))
            seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
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
        requests = self._requests
        if requests is None:
            super().rename(parent, name, new_parent, new_name, flags, caller)
            return
        found = requests.found()
        if requests.is_done(found):
            return
        old, new = self._key(parent, name), self._key(new_parent, new_name)
        requests.intend(found, *old, *new)
        if found is not None and _is_moved(old, new, found.facts, flags):
            self._enter_rename(found.facts, (parent, name), (new_parent, new_name), flags)
            if flags & RENAME_WHITEOUT:
                self.finish_interrupted(*self._opened(parent, name), stat.S_IFCHR, caller)
        else:
            super().rename(parent, name, new_parent, new_name, flags, caller)
        requests.done()

    def _enter_rename(self, keys: tuple[int, ...], old: tuple[int, bytes], new: tuple[int, bytes], flags: int) -> None:
        """Update the table for a rename that the dead daemon executed; `keys` are its source's and target's."""
        source, target = (self.node(old[0]), old[1]), (self.node(new[0]), new[1])
        moved, victim = self.table.by_key((keys[0], keys[1])), self.table.by_key((keys[2], keys[3]))
        self.table.move_dentry(moved, source, target)
        if flags & RENAME_EXCHANGE:
            self.table.move_dentry(victim, target, source)
        elif victim is not None:
            self.table.remove_dentry(victim, *target)

    # -- attributes and content ----------------------------------------------------------------------
    def setattr(self, inode: int, changes: AttributeChanges) -> A:
        requests = self._requests
        if requests is None:
            return super().setattr(inode, changes)
        found = requests.found()
        if requests.is_done(found):
            return self.getattr(inode)
        requests.intend(None)
        changed = super().setattr(inode, changes)
        requests.done()
        return changed

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        requests = self._requests
        if requests is None:
            super().setxattr(inode, name, value, flags)
            return
        found = requests.found()
        if requests.is_done(found):
            return
        before = self._value(inode, name) if flags & _XATTR_CREATE else None
        requests.intend(found, before is not None)
        if found is None or before != value or found.facts[0]:
            super().setxattr(inode, name, value, flags)
        requests.done()

    def removexattr(self, inode: int, name: bytes) -> None:
        requests = self._requests
        if requests is None:
            super().removexattr(inode, name)
            return
        found = requests.found()
        if requests.is_done(found):
            return
        before = self._value(inode, name)
        requests.intend(found, before is not None)
        if found is None or before is not None or not found.facts[0]:
            super().removexattr(inode, name)
        requests.done()

    def _value(self, inode: int, name: bytes) -> bytes | None:
        try:
            return self.getxattr(inode, name)
        except OSError:
            return None

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        return self._again(super().write, inode, offset, data, kill_privileges=kill_privileges)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        requests = self._requests
        if requests is None:
            return super().append(inode, data, kill_privileges=kill_privileges)
        found = requests.found()
        if found is not None and requests.is_done(found):
            return found.result, self.getattr(inode).size
        requests.intend(found, self.getattr(inode).size)
        there = 0 if found is None else self._appended(inode, found.facts[0], bytes(data))
        written, size = super().append(inode, data[there:], kill_privileges=kill_privileges)
        requests.done(there + written)
        return there + written, size

    def _appended(self, inode: int, end: int, data: bytes) -> int:
        """How many bytes of `data` the dead daemon appended to a file that ended at `end`."""
        tail = self.read(inode, end, len(data) + _OTHERS_BYTES)
        if data in tail:
            return len(data)
        return len(tail) if data.startswith(tail) else 0  # killed in the middle of the write

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        self._again(super().fallocate, inode, mode, offset, length)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        return self._again(super().copy_range, source, source_offset, target, target_offset, length)

    def _again(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """Make a call that can be made twice; return the recorded result if there is one."""
        requests = self._requests
        if requests is None:
            return call(*args, **kwargs) or 0
        result = requests.result(requests.found())
        if result is None:
            requests.intend(None)
            result = call(*args, **kwargs) or 0
            requests.done(result)
        return result


def _is_moved(old: tuple[int, int], new: tuple[int, int], facts: tuple[int, ...], flags: int) -> bool:
    was_old, was_new = facts[:2], facts[2:]
    if was_old == was_new:  # names of one inode, for which rename(2) does nothing
        return False
    return new == was_old and (old == was_new if flags & RENAME_EXCHANGE else old != was_old)
