"""ReconnectingVolume: one volume for the kernel over the volumes of a container's successive runs.

Guarantees, whatever the container does:

- While no volume is connected, every request fails with EIO at once; none waits for a container.  A request in flight
  when the volume is disconnected fails with EIO as well.
- A number that the kernel was given means the same file for as long as the kernel holds it.  After a restart "the same"
  means a file of the same kind at a name where it was seen before.  A number whose file is gone (or was unlinked and
  only open) fails with ESTALE from then on.
- A number is not given to a second file while the kernel holds it, whatever numbers the new volume uses.
- If the new volume has the inodes of the one before (`Transport.helper`), because only the way to them was cut, every
  number means the same inode, also without a name.

With a keeper a successor may continue to serve the kernel (`keep_log`).  It connects a volume that continues the
log of the one before, so numbers mean the same, and no request is executed twice.  That needs the same run of the
container, or (`keeps_numbers`) that every file which the kernel holds has its own number in this run.  So does an
upgrade (`handing_over`), in which the successor opens its volume while the predecessor serves.

Threading: the serving loop.  `disconnect` is one step; `connect` may await the new volume's answers, and meanwhile the
mount goes on answering EIO.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast

from msgspec.structs import replace

from protocol.backends.container.inode_map import ContainerGiving, ContainerTaking, DentryKey, File, InodeMap
from protocol.diff.tree_diff import Change
from protocol.errors import os_error
from protocol.volume import (
    RENAME_EXCHANGE,
    RENAME_WHITEOUT,
    ROOT_INODE,
    SUPERUSER,
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    StatFs,
    Volume,
    VolumeCapabilities,
    extended,
)
from protocol.volume_durability import HandedOverVolume, RecoverableVolume, recoverable
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange, checkable

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog
    from protocol.volume_durability import TakenState

T = TypeVar("T")
R = TypeVar("R")
Prepare: TypeAlias = Callable[[], tuple[Volume, str]]  # opens a volume; returns it and the run of the container
_DOTS: Final = frozenset({b".", b".."})
# A lookup's errors for a file that does not exist; any other error is a failure of the transport.
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP, errno.EXDEV, errno.EACCES})
# The words of the log's slot that the connected volume does not use.
_RUN: Final = 400  # the run of the container
_IS_TRANSLATED: Final = 401  # 1: the kernel has numbers that are not those of the present run


class ContinuedVolume(RecoverableVolume, HandedOverVolume, Protocol):
    """A connected volume that declares `recoverable`: its numbers mean the same in the next process."""

    def known_inodes(self) -> Iterator[tuple[int, int, int, int, Sequence[DentryKey]]]:
        """Yield the inodes that the kernel knows: number, type bits, the kernel's lookups, the volume's lookups, names.

        The name that was seen last is the last one.
        """
        ...

    def tidy(self) -> None:
        """Write the log anew if it has grown too much.  To be called every second."""
        ...


class _Renumbered:
    """The attributes of a file with the kernel's number."""

    __slots__ = ("_of", "inode")

    def __init__(self, inode: int, of: Attributes) -> None:
        self.inode = inode
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _renumbered(number: int, attributes: Attributes) -> Attributes:
    return attributes if number == attributes.inode else cast("Attributes", _Renumbered(number, attributes))


class ReconnectingVolume:
    """Implements `protocol.volume.Volume` over the volume that `connect` was last given; see the module."""

    def __init__(
        self,
        *,
        read_only: bool = False,
        supports_acl: bool = False,
        keep: Callable[[SharedLog, bool], None] | None = None,
        prepare: Prepare | None = None,
        keeps_numbers: bool = False,
        label: str = "the container",
    ) -> None:
        """`keeps_numbers`: see `Transport`.  `label`: what runs at the other end, in words."""
        self.read_only = read_only
        self._label = label
        self.capabilities = VolumeCapabilities(
            external_changes=True,
            self_check=True,
            acls=supports_acl,
            appends=True,
            locks=True,
            paths=True,
            recoverable=keep is not None,
            handover=prepare is not None,
        )
        self._keep_below = keep
        self._prepare = prepare
        self._keeps_numbers = keeps_numbers
        self._helper = b""  # of the volume that was connected last
        self._before: dict[int, File] = {}  # the files by its numbers
        self._taken: ContinuedVolume | None = None  # what `prepare` opened, until it is connected
        self._run_name = ""  # of the connected volume
        self._log: SharedLog | None = None
        self._is_resumed = False  # a dead daemon has served the kernel, and no volume is connected yet
        self._answering: Callable[[int], None] = _ignore
        self._volume: Volume | None = None
        self._next_volume: Volume | None = None  # while `connect` looks up files in it
        self._map = InodeMap()
        self._run = 0  # grows with each connect and disconnect
        self._locked: tuple[int, int] | None = None  # a directory, and the run in which it was locked

    @property
    def connected(self) -> bool:
        return self._volume is not None

    @property
    def is_translated(self) -> bool:
        """Whether a successor could not continue, because the kernel has numbers that it cannot know."""
        return self._log is not None and bool(self._log.slot[_IS_TRANSLATED])

    # -- a kernel that several processes serve -----------------------------------------------
    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """See `protocol.volume_durability.RecoverableVolume`; the volumes that are connected keep the log."""
        assert self._keep_below is not None, "the capability recoverable"
        self._keep_below(log, is_known)
        self._log, self._is_resumed = log, is_known
        self.capabilities = replace(self.capabilities, answers_once=True)

    def answering(self, unique: int) -> None:
        """See `protocol.volume.ExtendedVolume`."""
        self._answering(unique)

    def tidy(self) -> None:
        """Bound the log, which the connected volume keeps.  To be called every second."""
        if self._log is not None and self._volume is not None:
            cast("ContinuedVolume", self._volume).tidy()

    def handing_over(self) -> ContainerGiving:
        """See `protocol.volume_durability.HandedOverVolume`."""
        volume = self._volume
        if volume is None:
            raise OSError(
                errno.EIO,
                f"{self._label} does not run, so its files cannot be handed over: start it first, or wait until"
                " `vfsd status` says that it runs or is connected",
            )
        if self._is_renumbered:
            again = "unmount the workspace and mount it again"
            if self._keeps_numbers:
                again = f"close the files that were removed or replaced meanwhile and try again, or {again}"
            raise OSError(
                errno.ESTALE,
                f"{self._label} was restarted since the mount was made, so a new daemon cannot find its files again:"
                f" {again} (of an image, take a snapshot before, and restore it after)",
            )
        given = cast("ContinuedVolume", volume).handing_over()
        return ContainerGiving(given, self._run_name, self._map, lambda: self._volume is volume)

    def taking_over(self) -> TakenState:
        assert self._prepare is not None, "the capability handover"
        opened, run = self._prepare()
        self._taken = volume = cast("ContinuedVolume", opened)
        if self._log is not None:
            self._keep(volume, self._log, run)
        return ContainerTaking(volume.taking_over(), run, self._map)

    @property
    def _is_renumbered(self) -> bool:
        return self._map.is_renumbered if self._keeps_numbers else self._run > 1

    def _note_numbers(self) -> None:
        """Say in the log whether the kernel has a number that a successor cannot know."""
        if self._log is not None and self._volume is not None:
            self._log.slot[_IS_TRANSLATED] = self._is_renumbered

    def misnumbered(self) -> CacheInvalidation:
        """Return the names to invalidate so that the kernel asks again for files that can have their own numbers now.

        It forgets those that no program uses.  A directory stays: getcwd(2) fails in one that was invalidated.
        """
        if not self._keeps_numbers or self._volume is None or not self._map.is_renumbered:
            return CacheInvalidation()
        files = (file for file in self._map.misnumbered() if file.kind != stat.S_IFDIR)
        entries = [EntryChange(*dentry, file.number, file.number) for file in files for dentry in file.dentries]
        return CacheInvalidation(entries=entries)

    def discard_journal(self) -> None:
        """There is none; the successor has what it was given."""
        if self._volume is not None:
            cast("ContinuedVolume", self._volume).discard_journal()

    def _keep(self, volume: ContinuedVolume, log: SharedLog, run: str) -> None:
        """Have `volume` continue the log, or begin it.  OSError (ESTALE) if it cannot continue it."""
        number = int.from_bytes(blake2b(run.encode(), digest_size=8).digest())
        if self._is_resumed:
            if log.slot[_RUN] != number or log.slot[_IS_TRANSLATED]:
                raise OSError(errno.ESTALE, f"{self._label} was restarted since the mount was made, so it cannot go on")
            volume.keep_log(log, is_known=True)
            self._resume(volume)
            self._is_resumed = False
        else:
            log.slot[_IS_TRANSLATED] = self._run > 0
            log.slot[_RUN] = number
            volume.keep_log(log, is_known=False)
        self._answering = extended(volume).answering

    def _resume(self, volume: ContinuedVolume) -> None:
        """Enter the inodes that the kernel knows from a predecessor."""
        for inode, kind, lookups, held, dentries in volume.known_inodes():
            file = self._map.resume(inode, kind, lookups, held)
            for dentry in dentries:
                self._map.put(file, dentry)

    # -- connecting ------------------------------------------------------------------------
    def disconnect(self) -> CacheInvalidation:
        """Fail every request with EIO from now on.  Returns what to invalidate so that the kernel sends requests."""
        self._volume = None
        self._answering = _ignore
        self._run += 1
        self._before = self._map.detach()
        return self.cached_by_kernel()

    async def connect(self, volume: Volume, run: str = "", helper: bytes = b"") -> CacheInvalidation:
        """Serve `volume` from now on.  Returns what to invalidate, because the kernel has cached the last volume.

        `run` identifies the run of the container, and `helper` what owns the volume's inodes (`Transport.helper`).
        OSError if the volume fails meanwhile; then nothing has changed.
        """
        self._next_volume = volume
        kept = recoverable(volume)
        is_continued = self._is_resumed or self._taken is not None
        has_returned = bool(helper) and helper == self._helper
        try:
            if helper and not is_continued:
                self._attach_again(cast("ContinuedVolume", volume), self._before if has_returned else {})
            if has_returned:
                self._answering = extended(volume).answering
            elif self._taken is not None:
                self._taken = None
            elif self._log is not None and kept is not None:
                self._keep(cast("ContinuedVolume", kept), self._log, run)
            if not is_continued and not has_returned:
                await self._find_again(volume)
        except BaseException:
            self._map.detach()
            raise
        finally:
            self._next_volume = None
        self._volume, self._run_name, self._helper = volume, run, helper
        self._run += 1
        self._note_numbers()
        return self.cached_by_kernel()

    def _attach_again(self, volume: ContinuedVolume, before: dict[int, File]) -> None:
        """Attach the files `before` to the inodes that they had by these numbers, which `volume` has, too."""
        self._map.attach(self._map.root, ROOT_INODE, 0)
        for inode, _, _, held, _ in volume.known_inodes():
            file = before.get(inode)
            if file is None or not self._map.attach(file, inode, held):
                volume.forget(inode, held)  # forgotten meanwhile, or the answer to the lookup was lost

    async def _find_again(self, volume: Volume) -> None:
        """Attach every known file to the file at the same name in `volume`."""
        self._map.attach(self._map.root, ROOT_INODE, 0)
        asked = {ROOT_INODE}  # directories that were looked up, found or not
        for file in self._map:
            for dentry in reversed(file.dentries):
                for directory in self._above(dentry, asked):
                    await self._attach(volume, directory, directory.dentries[-1])
                if file.inner or await self._attach(volume, file, dentry):
                    break

    def _above(self, dentry: DentryKey, asked: set[int]) -> list[File]:
        """The parent directories of `dentry` that were not looked up yet, the topmost first."""
        found = []
        directory = self._map.get(dentry[0])
        while directory is not None and directory.number not in asked:
            asked.add(directory.number)
            if not directory.dentries:
                break  # removed, but still held
            found.append(directory)
            directory = self._map.get(directory.dentries[-1][0])
        return found[::-1]

    async def _attach(self, volume: Volume, file: File, dentry: DentryKey) -> bool:
        """Attach `file` to the file at `dentry` in `volume`; False if there is none of its kind."""
        directory = self._map.get(dentry[0])
        if directory is None or not directory.inner:
            return False
        try:
            shown = await _result(volume.lookup(directory.inner, dentry[1]))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
        if stat.S_IFMT(shown.mode) == file.kind and self._map.attach(file, shown.inode, 1):
            return True
        volume.forget(shown.inode, 1)
        return False

    def cached_by_kernel(self) -> CacheInvalidation:
        """Everything that the kernel may have cached, for invalidation."""
        files = list(self._map)
        entries = [EntryChange(*dentry, file.number, file.number) for file in files for dentry in file.dentries]
        return CacheInvalidation(entries=entries, inodes=[InodeChange(file.number, content=True) for file in files])

    def path_of(self, inode: int) -> bytes | None:
        """See `protocol.volume.ExtendedVolume`: the path at which the inode was seen last."""
        names = []
        file = self._map.get(inode)
        while file is not self._map.root:
            if file is None or not file.dentries:
                return None
            number, name = file.dentries[-1]
            names.append(name)
            file = self._map.get(number)
        return b"/".join(reversed(names))

    # -- translation -----------------------------------------------------------------------
    def _connected(self) -> Volume:
        volume = self._volume
        if volume is None:
            raise os_error(errno.EIO)
        return volume

    def _inner(self, inode: int) -> int:
        """The present volume's number of `inode`."""
        file = self._map.get(inode)
        inner = self._map.inner_of(inode) if file is None else file.inner
        if not inner:
            raise os_error(errno.ESTALE if self._volume is not None else errno.EIO)
        return inner

    def _then(self, answer: Answer[T], change: Callable[[T], R]) -> Answer[R]:
        """Apply `change` to the answer, now or when it arrives."""
        if hasattr(answer, "__await__"):
            return self._later(answer, change)
        return change(answer)

    async def _later(self, answer: Awaitable[T], change: Callable[[T], R]) -> R:
        run = self._run
        result = await answer
        if run != self._run:
            raise os_error(errno.EIO)  # the answer's numbers are those of the lost volume
        return change(result)

    def _shown(self, attributes: Attributes) -> Attributes:
        return _renumbered(self._map.number_of(attributes.inode), attributes)

    def _entered(self, attributes: Attributes, dentry: DentryKey | None) -> Attributes:
        """Translate the attributes of a new lookup at `dentry`."""
        file = self._map.enter(attributes.inode, attributes.mode)
        if dentry is not None:
            self._map.put(file, dentry)
        if file.number != attributes.inode:
            self._note_numbers()
        return _renumbered(file.number, attributes)

    def _made(self, answer: Answer[Attributes], dentry: DentryKey | None) -> Answer[Attributes]:
        """Translate the answer of an operation that hands out a lookup."""
        return self._then(answer, lambda found: self._entered(found, dentry))

    def _removed(self, answer: Answer[None], dentry: DentryKey) -> Answer[None]:
        def untrack(_: None) -> None:
            self._map.take(dentry)

        return self._then(answer, untrack)

    # -- inodes ------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        """See `protocol.volume.Volume`."""
        dentry = None if name in _DOTS else (parent, name)
        return self._made(self._connected().lookup(self._inner(parent), name), dentry)

    def forget(self, inode: int, count: int) -> None:
        file = self._map.get(inode)
        if file is None:
            return
        inner, held, volume = file.inner, file.held, self._volume or self._next_volume
        if self._map.forget(file, count):
            if inner and volume is not None:
                volume.forget(inner, held)
            if inner != inode:
                self._note_numbers()

    def getattr(self, inode: int) -> Answer[Attributes]:
        return self._then(self._connected().getattr(self._inner(inode)), self._shown)

    def setattr(self, inode: int, changes: AttributeChanges) -> Answer[Attributes]:
        return self._then(self._connected().setattr(self._inner(inode), changes), self._shown)

    def readlink(self, inode: int) -> Answer[bytes]:
        return self._connected().readlink(self._inner(inode))

    # -- making and removing entries ---------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Answer[Attributes]:
        return self._made(self._connected().mknod(self._inner(parent), name, mode, rdev, caller), (parent, name))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Answer[Attributes]:
        return self._made(self._connected().mkdir(self._inner(parent), name, mode, caller), (parent, name))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Answer[Attributes]:
        return self._made(self._connected().symlink(self._inner(parent), name, target, caller), (parent, name))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Answer[Attributes]:
        return self._made(self._connected().tmpfile(self._inner(parent), mode, caller), None)

    def link(self, inode: int, parent: int, name: bytes) -> Answer[Attributes]:
        return self._made(self._connected().link(self._inner(inode), self._inner(parent), name), (parent, name))

    def unlink(self, parent: int, name: bytes) -> Answer[None]:
        return self._removed(self._connected().unlink(self._inner(parent), name), (parent, name))

    def rmdir(self, parent: int, name: bytes) -> Answer[None]:
        return self._removed(self._connected().rmdir(self._inner(parent), name), (parent, name))

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> Answer[None]:
        if self._locked is not None and self._locked[0] == new_parent and self._locked[1] != self._run:
            raise os_error(errno.EIO)  # the lock has ended: another mount may have replaced what the caller compared
        done = self._connected().rename(self._inner(parent), name, self._inner(new_parent), new_name, flags, caller)
        return self._then(done, lambda _: self._moved((parent, name), (new_parent, new_name), flags))

    def _moved(self, old: DentryKey, new: DentryKey, flags: int) -> None:
        if old == new:
            return
        moved, replaced = self._map.take(old), self._map.take(new)
        if moved is not None and moved is replaced:
            # Two names of one file: rename(2) changed nothing.
            self._map.put(moved, old)
        if moved is not None:
            self._map.put(moved, new)
        if replaced is not None and replaced is not moved and flags & RENAME_EXCHANGE and not flags & RENAME_WHITEOUT:
            self._map.put(replaced, old)

    def lock(self, inode: int) -> Answer[None]:
        """See `protocol.volume.ExtendedVolume`."""

        def locked(_: None) -> None:
            self._locked = (inode, self._run)

        return self._then(extended(self._connected()).lock(self._inner(inode)), locked)

    def unlock(self) -> Answer[None]:
        self._locked = None
        return extended(self._connected()).unlock()

    # -- directories -------------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int) -> Answer[Iterator[DirectoryEntry]]:
        return self._then(self._connected().readdir(self._inner(inode), cookie), self._listed)

    def _listed(self, entries: Iterator[DirectoryEntry]) -> Iterator[DirectoryEntry]:
        number_of = self._map.number_of
        for entry in entries:
            number = number_of(entry.inode)
            yield entry if number == entry.inode else entry._replace(inode=number)

    # -- content -----------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Answer[Buffer]:
        return self._connected().read(self._inner(inode), offset, size)

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[int]:
        return self._connected().write(self._inner(inode), offset, data, kill_privileges=kill_privileges)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[tuple[int, int]]:
        volume = extended(self._connected())
        return volume.append(self._inner(inode), data, kill_privileges=kill_privileges)

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> Answer[None]:
        return self._connected().fallocate(self._inner(inode), mode, offset, length)

    def seek(self, inode: int, offset: int, whence: int) -> Answer[int]:
        return self._connected().seek(self._inner(inode), offset, whence)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Answer[int]:
        volume = self._connected()
        return volume.copy_range(self._inner(source), source_offset, self._inner(target), target_offset, length)

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:
        return self._connected().fsync(self._inner(inode), data_only=data_only)

    # -- the rest ----------------------------------------------------------------------------------
    def statfs(self) -> Answer[StatFs]:
        return self._connected().statfs()

    def getxattr(self, inode: int, name: bytes) -> Answer[bytes]:
        return self._connected().getxattr(self._inner(inode), name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Answer[None]:
        return self._connected().setxattr(self._inner(inode), name, value, flags)

    def listxattr(self, inode: int) -> Answer[Sequence[bytes]]:
        return self._connected().listxattr(self._inner(inode))

    def removexattr(self, inode: int, name: bytes) -> Answer[None]:
        return self._connected().removexattr(self._inner(inode), name)

    # -- restores ----------------------------------------------------------------------------------
    def hold(self, paths: Iterable[bytes]) -> None:
        """Nothing: a restore goes through the mount, whose programs keep what they have open."""

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:  # noqa: ARG002
        """Nothing is invalidated, for the same reason."""
        return CacheInvalidation()

    def release(self) -> None:
        """Nothing, for the same reason."""

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant is broken, here or in the connected volume."""
        self._map.check_invariants()
        beneath = checkable(self._volume) if self._volume is not None else None
        if beneath is not None:
            beneath.check_invariants()


def _ignore(_unique: int) -> None:
    pass


async def _result(answer: Answer[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer
