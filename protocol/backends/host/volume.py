"""HostVolume: serves a host directory as a volume.

The operations are those of `protocol.backends.host.files`.  This class adds what only a daemon needs: the process that
continues to serve the kernel, and the changes that a restore makes outside the mount.

Threading: the serving loop only.  A call waits for the host's disk, and so do all other requests meanwhile.

Other programs may change the directory at any time.  An inode that was looked up may then be changed, elsewhere below
the root, or gone (ESTALE, after which a kernel looks the name up again); an open file that is in use stays usable.

Files that a root daemon creates belong to the caller, those of an unprivileged one to the daemon's user.  A file system
that is mounted below the directory is not entered (EXDEV; RESOLVE_NO_XDEV of openat2(2)).  Programs outside the mount
do not see file locks that programs take through it.  ctime cannot be set.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from protocol.backends.host.external_changes import ExternalChanges
from protocol.backends.host.inode_table import HostInode
from protocol.backends.host.repeated_requests import RepeatableFiles
from protocol.errors import os_error
from protocol.linux.beneath import open_beneath, open_directory
from protocol.linux.portable import Handle
from protocol.volume import NAME_MAX, DirectoryEntry, StatFs, VolumeCapabilities
from protocol.volume_extensions import CacheInvalidation

if TYPE_CHECKING:
    from protocol.backends.host.known_inodes import HostGiving, HostTaking
    from protocol.diff.tree_diff import Change
    from protocol.linux.beneath import DirectoryReference
    from protocol.linux.shared_log import SharedLog


class HostAttributes(NamedTuple):
    """The attributes of `node` at one moment.  `birth` looks its birth time up, which few callers need."""

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    node: HostInode
    birth: Callable[[HostInode], int]
    generation: int = 0

    @property
    def birth_ns(self) -> int:
        return self.birth(self.node)


_make: Final = HostAttributes._make


class HostVolume(RepeatableFiles[HostAttributes]):
    """A directory, given by a path or by a descriptor that stays the caller's.  Implements `protocol.volume.Volume`.

    The path may be that of a symlink to it.  OSError if it cannot be opened.  `descriptors` is how many files and
    directories may be open at a time (default: derived from RLIMIT_NOFILE).
    """

    def __init__(
        self, directory: DirectoryReference, *, read_only: bool = False, descriptors: int | None = None
    ) -> None:
        root = Handle(open_directory(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        super().__init__(root, partial(open_beneath, same_mount=True), read_only, descriptors or 0)
        self.root_fd = root.fd
        self._external_changes = ExternalChanges(self.table, self.descriptors, self.listings.end)
        self.capabilities = VolumeCapabilities(
            external_changes=True,
            self_check=True,
            acls=self.has_acls(),
            appends=True,
            locks=True,
            paths=True,
            orphans=True,
            recoverable=True,
            handover=True,
        )

    def close(self) -> None:
        """Close every descriptor.  The volume cannot be used after that."""
        self.unlock()
        self.descriptors.close()
        self._external_changes.close()

    def tidy(self) -> None:
        """Close written executables, because an open one cannot be executed.  To be called every second."""
        self.descriptors.close_idle_writers()
        if self.table.known is not None:
            self.table.known.tidy()

    # -- a kernel that several processes serve -----------------------------------------------------
    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """See `protocol.volume_durability.RecoverableVolume`."""
        from protocol.backends.host.known_inodes import KnownInodes  # noqa: PLC0415 (start-up: few have a keeper)

        known = KnownInodes(self.table, log)
        if is_known:
            self._is_known()
            self.listings.resume(known.load())
            for node in self.table:
                node.is_recorded = True
        else:
            known.rewrite()
        self.table.known = known
        self.begin_requests(log.slot, is_known=is_known)
        self.capabilities = replace(self.capabilities, answers_once=True)

    def _is_known(self) -> None:
        """Note that the kernel has numbers from a predecessor."""
        self.unknown_errno = errno.ESTALE

    def handing_over(self) -> HostGiving:
        """See `protocol.volume_durability.HandedOverVolume`."""
        from protocol.backends.host.known_inodes import HostGiving  # noqa: PLC0415 (start-up: upgrades are rare)

        return HostGiving(self.table)

    def taking_over(self) -> HostTaking:
        from protocol.backends.host.known_inodes import HostTaking  # noqa: PLC0415 (start-up: upgrades are rare)

        self._is_known()
        return HostTaking(self.table, self.listings)

    def discard_journal(self) -> None:
        """There is none."""

    def known_inodes(self) -> Iterator[tuple[int, int, int, int, list[tuple[int, bytes]]]]:
        """See `protocol.backends.container.reconnecting_volume.ContinuedVolume`."""
        for node in self.table:
            if node.lookups:
                names = [(parent.number, name) for parent, name in node.dentries()]
                yield node.number, node.kind, node.lookups, node.lookups, names[::-1]

    def check_invariants(self) -> None:
        """AssertionError if the state contradicts itself.  O(inodes in the table)."""
        self.table.check_invariants()
        self.descriptors.check_invariants()
        self.listings.check_invariants()

    # -- changes outside the mount -----------------------------------------------------------------
    def hold(self, paths: Iterable[bytes]) -> None:
        """See `protocol.volume_extensions.ExternallyChangedVolume`."""
        self._external_changes.hold(paths)

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        return self._external_changes.invalidation_of(changes)

    def release(self) -> None:
        self._external_changes.release()

    # -- inodes ------------------------------------------------------------------------------------
    def shown(self, node: HostInode, seen: os.stat_result) -> HostAttributes:
        """Show the attributes of an inode."""
        return _make((
            node.number, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, seen.st_size,
            seen.st_blocks, seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns, node, self.birth_ns, 0,
        ))  # fmt: skip

    def path_of(self, inode: int) -> bytes | None:
        """See `protocol.volume.ExtendedVolume`: the path at which the inode was seen last."""
        node = self.table.get(inode)
        return None if node is None else self.table.path(node)

    def is_orphan(self, inode: int) -> bool:
        """See `protocol.volume.ExtendedVolume`."""
        node = self.table.get(inode)
        return node is not None and node.lookups > 0 and node.parent is None and node is not self.table.root

    def lookup_orphan(self, inode: int) -> HostAttributes:
        if not self.is_orphan(inode):
            raise os_error(errno.ENOENT, f"inode {inode}")
        node = self.node(inode)
        seen = self.stat(node)
        self.table.look_up(node)
        return self.shown(node, seen)

    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        return starmap(DirectoryEntry, self.listed(inode, cookie))

    def statfs(self) -> StatFs:
        shown = os.fstatvfs(self.root_fd)
        return StatFs(
            block_size=shown.f_frsize,
            blocks=shown.f_blocks,
            blocks_free=shown.f_bavail,
            inodes=shown.f_files,
            inodes_free=shown.f_favail,
            name_max=min(shown.f_namemax, NAME_MAX),
        )
