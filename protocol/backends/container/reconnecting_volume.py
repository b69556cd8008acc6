"""ReconnectingVolume: one volume for the kernel, over the volumes of a container's runs, which come and go.

What holds, whatever the container does:

- While there is no volume beneath, every request is answered with EIO, at once; none waits for a container.  A
  request in flight when the volume goes is answered with EIO as well.
- A number that the kernel was given means the same file for as long as it holds it.  After a restart "the same"
  means: a file of the same kind at a place where it was seen before; its number is then good again.  A number whose
  file is not there any more (or was unlinked and only open) answers ESTALE from then on, never another file.
- A number is not given to a second file while the kernel holds it, whatever the new volume calls its files.

Threading: the serving loop.  `disconnect` is one step; `connect` may await the new volume's answers, and meanwhile
the mount goes on answering EIO.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from protocol.backends.container.inode_map import DentryKey, File, InodeMap
from protocol.diff.tree_diff import Change
from protocol.errors import os_error
from protocol.volume import (
    RENAME_EXCHANGE,
    RENAME_WHITEOUT,
    ROOT_INODE,
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    CacheInvalidation,
    Caller,
    DirectoryEntry,
    EntryChange,
    InodeChange,
    StatFs,
    Volume,
    VolumeCapabilities,
)

__all__ = ["ReconnectingVolume"]

T = TypeVar("T")
R = TypeVar("R")
_SUPERUSER: Final = Caller(0, 0)
_DOTS: Final = frozenset({b".", b".."})
# What a lookup answers where there is no such file; anything else is the transport's failure.
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP, errno.EXDEV, errno.EACCES})


class _Renumbered:
    """The attributes of a file under the number that the kernel knows it by."""

    __slots__ = ("_of", "inode")

    def __init__(self, inode: int, of: Attributes) -> None:
        self.inode = inode
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class ReconnectingVolume:
    """Implements `protocol.volume.Volume`, over whatever `connect` was given last; see the module's docstring."""

    def __init__(self, *, read_only: bool = False, supports_acl: bool = False) -> None:
        self.read_only = read_only
        self.capabilities: Final = VolumeCapabilities(external_changes=True, self_check=True, acls=supports_acl)
        self._volume: Volume | None = None
        self._coming: Volume | None = None  # while `connect` looks through it
        self._known = InodeMap()
        self._run = 0  # grows with each connect and disconnect

    @property
    def connected(self) -> bool:
        return self._volume is not None

    def known_files(self) -> Iterator[File]:
        """What the kernel holds, with the places where it was seen."""
        return iter(self._known)

    # -- the volume beneath ------------------------------------------------------------------------
    def disconnect(self) -> CacheInvalidation:
        """From now on all is EIO.  What the kernel is to forget, so that it asks, and hears that."""
        self._volume = None
        self._run += 1
        self._known.detach()
        return self.all_known()

    async def connect(self, volume: Volume) -> CacheInvalidation:
        """Serve `volume` from now on.  What the kernel is to forget: it holds what was true of the last one.

        OSError when the volume fails meanwhile; then nothing has changed.
        """
        self._coming = volume
        try:
            await self._find_again(volume)
        except BaseException:
            self._known.detach()
            raise
        finally:
            self._coming = None
        self._volume = volume
        self._run += 1
        return self.all_known()

    async def _find_again(self, volume: Volume) -> None:
        """Let every file that is known stand for what is at its place in `volume`."""
        self._known.attach(self._known.root, ROOT_INODE, 0)
        asked = {ROOT_INODE}  # directories that were looked for, found or not
        for file in self._known:
            for place in reversed(file.places):
                for directory in self._above(place, asked):
                    await self._attach(volume, directory, directory.places[-1])
                if file.inner or await self._attach(volume, file, place):
                    break

    def _above(self, place: DentryKey, asked: set[int]) -> list[File]:
        """The directories on the way to `place` that are still to be looked for, the uppermost first."""
        found = []
        directory = self._known.get(place[0])
        while directory is not None and directory.number not in asked:
            asked.add(directory.number)
            if not directory.places:
                break  # removed, but held
            found.append(directory)
            directory = self._known.get(directory.places[-1][0])
        return found[::-1]

    async def _attach(self, volume: Volume, file: File, place: DentryKey) -> bool:
        """Whether what is at `place` in `volume` can be `file`."""
        directory = self._known.get(place[0])
        if directory is None or not directory.inner:
            return False
        try:
            shown = await _result(volume.lookup(directory.inner, place[1]))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
        if stat.S_IFMT(shown.mode) == file.kind and self._known.attach(file, shown.inode, 1):
            return True
        volume.forget(shown.inode, 1)
        return False

    def all_known(self) -> CacheInvalidation:
        """All that the kernel may know, for it to forget."""
        files = list(self._known)
        entries = [EntryChange(*place, file.number, file.number) for file in files for place in file.places]
        return CacheInvalidation(entries=entries, inodes=[InodeChange(file.number, content=True) for file in files])

    # -- the way down and up -----------------------------------------------------------------------
    def _served(self) -> Volume:
        volume = self._volume
        if volume is None:
            raise os_error(errno.EIO)
        return volume

    def _inner(self, inode: int) -> int:
        """What the present volume calls `inode`."""
        file = self._known.get(inode)
        inner = self._known.inner_of(inode) if file is None else file.inner
        if not inner:
            raise os_error(errno.ESTALE if self._volume is not None else errno.EIO)
        return inner

    def _then(self, answer: Answer[T], change: Callable[[T], R]) -> Answer[R]:
        """`change` of the answer, now or when it is there."""
        if hasattr(answer, "__await__"):
            return self._later(answer, change)
        return change(answer)

    async def _later(self, answer: Awaitable[T], change: Callable[[T], R]) -> R:
        run = self._run
        result = await answer
        if run != self._run:
            raise os_error(errno.EIO)  # its numbers mean nothing any more
        return change(result)

    def _shown(self, attributes: Attributes) -> Attributes:
        number = self._known.number_of(attributes.inode)
        if number == attributes.inode:
            return attributes
        return cast("Attributes", _Renumbered(number, attributes))

    def _entered(self, attributes: Attributes, place: DentryKey | None) -> Attributes:
        """What was handed out, with a lookup, for `place`."""
        inner = attributes.inode
        file = self._known.enter(inner, attributes.mode)
        if place is not None:
            self._known.put(file, place)
        if file.number == inner:
            return attributes
        return cast("Attributes", _Renumbered(file.number, attributes))

    # -- inodes ------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        """See `protocol.volume.Volume`, as for all that follow."""
        answer = self._served().lookup(self._inner(parent), name)
        place = None if name in _DOTS else (parent, name)
        return self._then(answer, lambda found: self._entered(found, place))

    def forget(self, inode: int, count: int) -> None:
        file = self._known.get(inode)
        if file is None:
            return
        inner, held, volume = file.inner, file.held, self._volume or self._coming
        if self._known.forget(file, count) and inner and volume is not None:
            volume.forget(inner, held)

    def getattr(self, inode: int) -> Answer[Attributes]:
        return self._then(self._served().getattr(self._inner(inode)), self._shown)

    def setattr(self, inode: int, changes: AttributeChanges) -> Answer[Attributes]:
        return self._then(self._served().setattr(self._inner(inode), changes), self._shown)

    def readlink(self, inode: int) -> Answer[bytes]:
        return self._served().readlink(self._inner(inode))

    # -- making and removing entries ---------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Answer[Attributes]:
        made = self._served().mknod(self._inner(parent), name, mode, rdev, caller)
        return self._then(made, lambda found: self._entered(found, (parent, name)))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Answer[Attributes]:
        made = self._served().mkdir(self._inner(parent), name, mode, caller)
        return self._then(made, lambda found: self._entered(found, (parent, name)))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Answer[Attributes]:
        made = self._served().symlink(self._inner(parent), name, target, caller)
        return self._then(made, lambda found: self._entered(found, (parent, name)))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Answer[Attributes]:
        made = self._served().tmpfile(self._inner(parent), mode, caller)
        return self._then(made, lambda found: self._entered(found, None))

    def link(self, inode: int, parent: int, name: bytes) -> Answer[Attributes]:
        made = self._served().link(self._inner(inode), self._inner(parent), name)
        return self._then(made, lambda found: self._entered(found, (parent, name)))

    def unlink(self, parent: int, name: bytes) -> Answer[None]:
        return self._then(self._served().unlink(self._inner(parent), name), lambda _: self._gone((parent, name)))

    def rmdir(self, parent: int, name: bytes) -> Answer[None]:
        return self._then(self._served().rmdir(self._inner(parent), name), lambda _: self._gone((parent, name)))

    def _gone(self, place: DentryKey) -> None:
        self._known.take(place)

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = _SUPERUSER,
    ) -> Answer[None]:
        done = self._served().rename(self._inner(parent), name, self._inner(new_parent), new_name, flags, caller)
        return self._then(done, lambda _: self._moved((parent, name), (new_parent, new_name), flags))

    def _moved(self, old: DentryKey, new: DentryKey, flags: int) -> None:
        if old == new:
            return
        moved, replaced = self._known.take(old), self._known.take(new)
        if moved is not None and moved is replaced:
            # Two names of one file: nothing was done.
            self._known.put(moved, old)
        if moved is not None:
            self._known.put(moved, new)
        if replaced is not None and replaced is not moved and flags & RENAME_EXCHANGE and not flags & RENAME_WHITEOUT:
            self._known.put(replaced, old)

    # -- directories -------------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int) -> Answer[Iterator[DirectoryEntry]]:
        return self._then(self._served().readdir(self._inner(inode), cookie), self._listed)

    def _listed(self, entries: Iterator[DirectoryEntry]) -> Iterator[DirectoryEntry]:
        number_of = self._known.number_of
        for entry in entries:
            number = number_of(entry.inode)
            yield entry if number == entry.inode else entry._replace(inode=number)

    # -- content -----------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Answer[Buffer]:
        return self._served().read(self._inner(inode), offset, size)

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[int]:
        return self._served().write(self._inner(inode), offset, data, kill_privileges=kill_privileges)

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> Answer[None]:
        return self._served().fallocate(self._inner(inode), mode, offset, length)

    def seek(self, inode: int, offset: int, whence: int) -> Answer[int]:
        return self._served().seek(self._inner(inode), offset, whence)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Answer[int]:
        volume = self._served()
        return volume.copy_range(self._inner(source), source_offset, self._inner(target), target_offset, length)

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:
        return self._served().fsync(self._inner(inode), data_only=data_only)

    # -- the rest ----------------------------------------------------------------------------------
    def statfs(self) -> Answer[StatFs]:
        return self._served().statfs()

    def getxattr(self, inode: int, name: bytes) -> Answer[bytes]:
        return self._served().getxattr(self._inner(inode), name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Answer[None]:
        return self._served().setxattr(self._inner(inode), name, value, flags)

    def listxattr(self, inode: int) -> Answer[Sequence[bytes]]:
        return self._served().listxattr(self._inner(inode))

    def removexattr(self, inode: int, name: bytes) -> Answer[None]:
        return self._served().removexattr(self._inner(inode), name)

    # -- restores ----------------------------------------------------------------------------------
    def hold(self, paths: Iterable[bytes]) -> None:
        """Nothing: a restore goes through the mount, whose programs keep what they have open."""

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:  # noqa: ARG002
        """Nothing is invalidated, for the same reason."""
        return CacheInvalidation()

    def release(self) -> None:
        """Nothing, for the same reason."""

    def check_invariants(self) -> None:
        """AssertionError where the state contradicts itself, here or in the volume beneath."""
        self._known.check_invariants()
        beneath = getattr(self._volume, "check_invariants", None)
        if beneath is not None:
            beneath()


async def _result(answer: Answer[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer
