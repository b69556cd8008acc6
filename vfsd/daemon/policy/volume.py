"""PolicyVolume: a volume that refuses what the policy forbids (EPERM) and does not show what it hides (ENOENT).

An engine serves it in place of the volume itself, so every program meets it, root included, and so do `vfsd fs` and the
agent's tools.  Set-id bits, ACLs and times are not decided here: `vfsd.kernel.engines.policy`.

The questions of each call:

- a call on a file asks whether the file is protected under one of its names;
- a call on a name asks whether the name is protected or hidden, whether anything is there or not: making a hidden name
  neither replaces nor reveals what is there;
- a name that something hidden has, although what is made there would be visible (a file `private` under `private/`, a
  further name of a hidden file), is refused with the same error, never with EEXIST;
- a directory is not moved with something protected in it, and not to where something becomes visible or hidden;
- a symlink is not made where a pattern names a directory: it would lead the path to somewhere else;
- open(2) for writing is refused.  So no program has a shared mapping through which it could change the kernel's pages.

A program that had the file open, or mapped, before the policy was tightened is refused its writes, and pages that it
changed are dropped from the kernel's cache: `on_refused_write`.

Threading: the serving loop.  With a volume that answers at once every call is one step.  With one that waits, a program
can make a name in a directory while that directory's move is being decided.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from protocol.errors import DeniedByPolicyError, os_error
from protocol.volume import (
    RENAME_EXCHANGE,
    SUPERUSER,
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    PlainEntry,
    StatFs,
    Volume,
    VolumeCapabilities,
    catching,
    extended,
    then,
)
from vfsd.daemon.policy.rules import stale

if TYPE_CHECKING:
    from vfsd.daemon.policy.rules import PolicyRules

T = TypeVar("T")
_DOTS: Final = frozenset({b".", b".."})
_ABSENT: Final = 2  # ENOENT


class _Seen:
    """The file that an entry leads to, taken from attributes that may change with the next call."""

    __slots__ = ("inode", "is_directory", "is_symlink")

    def __init__(self, found: Attributes) -> None:
        self.inode = found.inode
        self.is_directory = stat.S_ISDIR(found.mode)
        self.is_symlink = stat.S_ISLNK(found.mode)


class PolicyVolume:
    """`volume` under `rules`."""

    def __init__(self, volume: Volume, rules: PolicyRules) -> None:
        self._volume: Final = extended(volume)
        self._rules = rules
        self._path_of = rules.path_of
        capabilities = volume.capabilities
        # A caller that wants snapshots and the like asks the volume itself, and checks what it does: `Policy.check`.
        self.capabilities: Final = VolumeCapabilities(
            acls=capabilities.acls,
            appends=capabilities.appends,
            answers_once=capabilities.answers_once,
            flush=capabilities.flush,
            journal=capabilities.journal,
            durable=capabilities.durable,
            paths=capabilities.paths,
            shortcuts=capabilities.shortcuts,
            external_changes=capabilities.external_changes,
            opens=True,
        )
        self._short = self._volume if capabilities.shortcuts else None
        self.is_tightened = False
        """Whether programs may have files open that are hidden now: then each call asks for that, too."""
        self.writers: dict[int, int] = {}  # how often each file is open for writing
        self.on_refused_write: Callable[[int], None] = lambda _inode: None
        """Called with a file to which a program wrote in vain; its pages in the kernel's cache may be changed."""

    @property
    def read_only(self) -> bool:
        return self._volume.read_only

    def answering(self, unique: int) -> None:
        """See `ExtendedVolume`."""
        self._volume.answering(unique)

    def defer_syncs(self) -> bool:
        """See `ExtendedVolume`."""
        return self._volume.defer_syncs()

    def unsynced(self, *, of_request: bool) -> Callable[[], Awaitable[None]] | None:
        """See `ExtendedVolume`."""
        return self._volume.unsynced(of_request=of_request)

    def path_of(self, inode: int) -> bytes | None:
        """See `ExtendedVolume`."""
        return self._path_of(inode)

    # -- decisions ---------------------------------------------------------------------------------------
    def _below(self, parent: int, name: bytes) -> bytes | None:
        above = self._path_of(parent)
        return None if above is None else above + b"/" + name if above else name

    def _shown(self, inode: int, act: Callable[[], Answer[T]]) -> Answer[T]:
        """Do `act` with a file that programs see; ESTALE for one that became hidden while a program had it open."""
        if not self.is_tightened:
            return act()

        def decide(is_hidden: bool) -> Answer[T]:
            if is_hidden:
                raise stale()
            return act()

        return then(self._rules.hides_inode(inode), decide)

    def _changing(self, attempt: str, inode: int, act: Callable[[], Answer[T]]) -> Answer[T]:
        """Do `act`, which changes a file or directory, unless it is protected."""

        def decide(is_protected: bool) -> Answer[T]:
            if is_protected:
                if attempt == "write":
                    self.on_refused_write(inode)
                raise DeniedByPolicyError(attempt, self._path_of(inode), "the policy of this workspace protects it")
            return self._shown(inode, act)

        return then(self._rules.protects_inode(inode), decide)

    def _making(
        self,
        attempt: str,
        parent: int,
        name: bytes,
        act: Callable[[], Answer[T]],
        *,
        is_directory: bool = False,
        is_symlink: bool = False,
    ) -> Answer[T]:
        """Do `act`, which makes a name in a directory, unless the policy refuses the name."""
        path = self._below(parent, name)
        if path is not None and (
            self._rules.refuses_name(path, is_directory=is_directory)
            or (is_symlink and self._rules.refuses_symlink(path))
        ):
            _refuse(attempt, path)
        return self._shown(parent, lambda: self._unless_taken(attempt, parent, name, path, act))

    def _unless_taken(
        self, attempt: str, parent: int, name: bytes, path: bytes | None, act: Callable[[], Answer[T]]
    ) -> Answer[T]:
        """Do `act`, which makes a name.  If something hidden has the name, the policy refuses it."""
        if not self._rules.hiding:
            return act()

        def taken(error: OSError) -> Answer[T]:
            def decide(is_hidden: bool) -> NoReturn:
                if is_hidden:
                    _refuse(attempt, path)
                raise error

            def find(seen: _Seen | None) -> Answer[T]:
                return then(False if seen is None else self._is_hidden(seen, path), decide)

            return then(self._peek(parent, name), find)

        return catching(FileExistsError, act, taken)

    def _is_hidden(self, seen: _Seen, path: bytes | None) -> Answer[bool]:
        """Whether an existing entry is hidden, by its path or under another name."""
        rules = self._rules
        if path is not None and rules.hides(path, is_directory=seen.is_directory):
            return True
        if seen.is_directory or not (rules.has_linked and rules.hiding):
            return False
        return rules.has_matching_name(seen.inode, hidden=True)

    def _removing(
        self, attempt: str, parent: int, name: bytes, act: Callable[[], Answer[T]], *, is_directory: bool
    ) -> Answer[T]:
        """Do `act`, which removes a name, unless the name or what it leads to is protected."""
        path = self._below(parent, name)
        if path is not None:
            self._check_existing(attempt, path, is_directory=is_directory)
        if is_directory or not self._rules.has_linked:
            return self._shown(parent, act)
        return then(
            self._peek(parent, name),
            lambda seen: act() if seen is None else then(self._check_linked(attempt, seen, path), lambda _: act()),
        )

    def _check_existing(self, attempt: str, path: bytes, *, is_directory: bool) -> None:
        """Raise an error if the entry at `path` is hidden or protected by this path."""
        if self._rules.hides(path, is_directory=is_directory):
            raise os_error(_ABSENT)
        if self._rules.protects(path, is_directory=is_directory):
            _refuse(attempt, path)

    def _check_linked(self, attempt: str, seen: _Seen, path: bytes | None) -> Answer[None]:
        """Raise an error if a file is hidden or protected under another name."""
        rules = self._rules

        def check_protected(is_protected: bool) -> None:
            if is_protected:
                _refuse(attempt, path)

        def check_hidden(is_hidden: bool) -> Answer[None]:
            if is_hidden:
                raise os_error(_ABSENT)
            protected = rules.has_matching_name(seen.inode, hidden=False) if rules.protecting else False
            return then(protected, check_protected)

        if seen.is_directory or not rules.has_linked:
            return None
        return then(self._is_hidden(seen, path), check_hidden)

    def _peek(self, parent: int, name: bytes) -> Answer[_Seen | None]:
        """Look an entry up without keeping the lookup; None if it does not exist."""
        volume = self._volume

        def take(found: Attributes | None) -> _Seen | None:
            if found is None:
                return None
            self._rules.note(found)
            seen = _Seen(found)
            volume.forget(seen.inode, 1)
            return seen

        if self._short is not None:
            return take(self._short.find(parent, name))
        found: Answer[Attributes | None] = catching(
            FileNotFoundError, lambda: volume.lookup(parent, name), lambda _: None
        )
        return then(found, take)

    # -- inodes ------------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        """See `Volume`: this and all methods below implement it."""
        found = self._volume.lookup(parent, name)
        return then(found, lambda seen: self._checked(parent, name, seen, self._gone))

    def find(self, parent: int, name: bytes) -> Attributes | None:
        assert self._short is not None
        found = self._short.find(parent, name)
        if found is None:
            return None
        return cast("Attributes | None", self._checked(parent, name, found, lambda: None))

    def _gone(self) -> NoReturn:
        raise os_error(_ABSENT)

    def _checked(self, parent: int, name: bytes, found: Attributes, absent: Callable[[], T]) -> Answer[Attributes | T]:
        """Return what a lookup found, or `absent()` if it is hidden."""
        rules = self._rules
        is_directory = stat.S_ISDIR(found.mode)
        if found.nlink > 1 and not is_directory:
            rules.has_linked = True
        if not rules.hiding or name in _DOTS:
            return found
        path = self._below(parent, name)
        inode = found.inode
        if path is not None and rules.hides(path, is_directory=is_directory):
            self._volume.forget(inode, 1)
            return absent()
        if is_directory or found.nlink <= 1:
            return found

        def decide(is_hidden: bool) -> Attributes | T:
            if is_hidden:
                self._volume.forget(inode, 1)
                return absent()
            return found

        return then(rules.has_matching_name(inode, hidden=True), decide)

    def forget(self, inode: int, count: int) -> None:
        self._volume.forget(inode, count)

    def getattr(self, inode: int) -> Answer[Attributes]:
        return self._shown(inode, lambda: self._volume.getattr(inode))

    def setattr(self, inode: int, changes: AttributeChanges) -> Answer[Attributes]:
        return self._changing(_attempt(changes), inode, lambda: self._volume.setattr(inode, changes))

    def readlink(self, inode: int) -> Answer[bytes]:
        return self._shown(inode, lambda: self._volume.readlink(inode))

    # -- directory entries -------------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Answer[Attributes]:
        attempt = "create" if stat.S_ISREG(mode) or not stat.S_IFMT(mode) else "mknod"
        return self._making(attempt, parent, name, lambda: self._volume.mknod(parent, name, mode, rdev, caller))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Answer[Attributes]:
        make = lambda: self._volume.mkdir(parent, name, mode, caller)  # noqa: E731
        return self._making("mkdir", parent, name, make, is_directory=True)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Answer[Attributes]:
        make = lambda: self._volume.symlink(parent, name, target, caller)  # noqa: E731
        return self._making("symlink", parent, name, make, is_symlink=True)

    def link(self, inode: int, parent: int, name: bytes) -> Answer[Attributes]:
        def link() -> Answer[Attributes]:
            return self._making("link", parent, name, lambda: self._volume.link(inode, parent, name))

        return self._changing("link", inode, link)

    def unlink(self, parent: int, name: bytes) -> Answer[None]:
        remove = lambda: self._volume.unlink(parent, name)  # noqa: E731
        return self._removing("unlink", parent, name, remove, is_directory=False)

    def rmdir(self, parent: int, name: bytes) -> Answer[None]:
        remove = lambda: self._volume.rmdir(parent, name)  # noqa: E731
        return self._removing("rmdir", parent, name, remove, is_directory=True)

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, caller: Caller = SUPERUSER
    ) -> Answer[None]:
        def rename() -> Answer[None]:
            return self._volume.rename(parent, name, new_parent, new_name, flags, caller)

        def check(moved: _Seen | None, replaced: _Seen | None) -> Answer[None]:
            if moved is None:
                return rename()  # which raises ENOENT
            old, new = self._below(parent, name), self._below(new_parent, new_name)
            first = self._check_move(moved, old, new)
            if replaced is None:
                return then(first, lambda _: rename())

            def check_replaced(is_hidden: bool) -> Answer[None]:
                if is_hidden:
                    _refuse("rename", new)
                if new is not None:
                    self._check_existing("rename", new, is_directory=replaced.is_directory)
                return self._check_linked("rename", replaced, new)

            def second(_: None) -> Answer[None]:
                if flags & RENAME_EXCHANGE:
                    return self._check_move(replaced, new, old)
                return then(self._is_hidden(replaced, new), check_replaced)

            return then(then(first, second), lambda _: rename())

        def find_replaced(moved: _Seen | None) -> Answer[None]:
            return then(self._peek(new_parent, new_name), lambda found: check(moved, found))

        def decide() -> Answer[None]:
            return then(self._peek(parent, name), find_replaced)

        return self._shown(parent, lambda: self._shown(new_parent, decide))

    def _check_move(self, moved: _Seen, old: bytes | None, new: bytes | None) -> Answer[None]:
        """Raise an error if the policy refuses to move an entry from path `old` to `new`."""
        if old is None or new is None:
            return None  # of a removed directory: the volume raises ENOENT
        rules = self._rules
        self._check_existing("rename", old, is_directory=moved.is_directory)
        if rules.refuses_name(new, is_directory=moved.is_directory) or (
            moved.is_symlink and rules.refuses_symlink(new)
        ):
            _refuse("rename", new)
        if not moved.is_directory:
            return self._check_linked("rename", moved, old)

        def decide(is_refused: bool) -> None:
            if is_refused:
                reason = "the policy of this workspace concerns something in it, or where it would be"
                raise DeniedByPolicyError("rename", old, reason)

        return then(rules.moves_matching(moved.inode, old, new), decide)

    def readdir(self, inode: int, cookie: int) -> Answer[Iterator[DirectoryEntry]]:
        def shown(found: Iterator[DirectoryEntry]) -> Iterator[DirectoryEntry]:
            return cast("Iterator[DirectoryEntry]", self._without_hidden(inode, found))

        listed = self._shown(inode, lambda: self._volume.readdir(inode, cookie))
        return then(listed, shown) if self._rules.hiding else listed

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        volume = self._volume
        found = cast("Iterator[PlainEntry]", self._shown(inode, lambda: volume.entries(inode, cookie)))
        return self._without_hidden(inode, found) if self._rules.hiding else found

    def _without_hidden(self, directory: int, entries: Iterator[Any]) -> Iterator[Any]:
        """Leave out hidden names.

        A further name of a hidden file is listed until the first lookup of a file with several names; a lookup of it
        fails from the beginning.
        """
        rules, above = self._rules, self._path_of(directory)
        prefix = b"" if not above else above + b"/"
        for entry in entries:
            name, inode, mode = entry[0], entry[1], entry[2]
            is_free = name in _DOTS or above is None
            is_hidden = not is_free and rules.hides(prefix + name, is_directory=stat.S_ISDIR(mode))
            if is_free or not (is_hidden or rules.is_known_hidden(inode)):
                yield entry

    def entry_count(self, inode: int) -> int:
        return self._volume.entry_count(inode)

    # -- content -----------------------------------------------------------------------------------------
    def open(self, inode: int, flags: int) -> Answer[None]:
        if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
            return self._shown(inode, lambda: None)

        return self._changing("open", inode, lambda: self._count_writer(inode))

    def _count_writer(self, inode: int) -> None:
        self.writers[inode] = self.writers.get(inode, 0) + 1

    def release(self, inode: int, flags: int) -> None:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return
        left = self.writers.get(inode, 0) - 1
        if left > 0:
            self.writers[inode] = left
        else:  # a daemon that continued a mount does not know what was open before
            self.writers.pop(inode, None)

    def read(self, inode: int, offset: int, size: int) -> Answer[Buffer]:
        return self._shown(inode, lambda: self._volume.read(inode, offset, size))

    def read_pieces(self, inode: int, offset: int, size: int) -> Answer[Buffer | list[bytes | bytearray]]:
        volume = self._volume
        return self._shown(inode, lambda: volume.read_pieces(inode, offset, size))

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[int]:
        write = lambda: self._volume.write(inode, offset, data, kill_privileges=kill_privileges)  # noqa: E731
        return self._changing("write", inode, write)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[tuple[int, int]]:
        volume = self._volume
        return self._changing("write", inode, lambda: volume.append(inode, data, kill_privileges=kill_privileges))

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> Answer[None]:
        return self._changing("allocate", inode, lambda: self._volume.fallocate(inode, mode, offset, length))

    def seek(self, inode: int, offset: int, whence: int) -> Answer[int]:
        return self._shown(inode, lambda: self._volume.seek(inode, offset, whence))

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Answer[int]:
        def copy() -> Answer[int]:
            return self._volume.copy_range(source, source_offset, target, target_offset, length)

        return self._changing("write", target, lambda: self._shown(source, copy))

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:
        return self._volume.fsync(inode, data_only=data_only)

    def flush(self, inode: int) -> Answer[None]:
        return self._volume.flush(inode)

    # -- the rest ----------------------------------------------------------------------------------------
    def statfs(self) -> Answer[StatFs]:
        return self._volume.statfs()

    def getxattr(self, inode: int, name: bytes) -> Answer[bytes]:
        return self._shown(inode, lambda: self._volume.getxattr(inode, name))

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        quiet = self._short
        assert quiet is not None
        return cast("bytes | None", self._shown(inode, lambda: quiet.find_xattr(inode, name)))

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Answer[None]:
        return self._changing("setxattr", inode, lambda: self._volume.setxattr(inode, name, value, flags))

    def listxattr(self, inode: int) -> Answer[Sequence[bytes]]:
        return self._shown(inode, lambda: self._volume.listxattr(inode))

    def removexattr(self, inode: int, name: bytes) -> Answer[None]:
        return self._changing("removexattr", inode, lambda: self._volume.removexattr(inode, name))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Answer[Attributes]:
        def count(made: Attributes) -> Attributes:
            self._count_writer(made.inode)
            return made

        made = self._shown(parent, lambda: self._volume.tmpfile(parent, mode, caller))
        return then(made, count)


def _refuse(attempt: str, path: bytes | None) -> NoReturn:
    raise DeniedByPolicyError(attempt, path)


def _attempt(changes: AttributeChanges) -> str:
    """Name the attempt that a SETATTR is, as the log does."""
    if changes.size is not None:
        return "truncate"
    if changes.uid is not None or changes.gid is not None:
        return "chown"
    return "chmod" if changes.mode is not None or changes.kill_privileges else "utime"
