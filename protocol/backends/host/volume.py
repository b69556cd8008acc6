"""HostVolume: serves a host directory as a volume.

The host's kernel does what it can: modes, ACLs, xattrs, links, sparse files, atime, clearing of suid and sgid for an
unprivileged daemon.  This package adds what the host's kernel cannot know: who the caller is, which inode a number
means, and that no path may lead out of the directory (see `protocol.backends.host.descriptors`).

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
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from protocol.backends.host.attributes import HostAttributes, InodeCreator, set_attributes
from protocol.backends.host.descriptors import Descriptors
from protocol.backends.host.external_changes import ExternalChanges
from protocol.backends.host.inode_table import HostDentry, HostInode, HostInodeTable, Key
from protocol.backends.host.listings import Listings
from protocol.errors import os_error
from protocol.linux import portable, posix_acl
from protocol.linux.beneath import open_beneath, open_directory
from protocol.linux.portable import proc_path
from protocol.volume import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_WHITEOUT,
    SUPERUSER,
    AttributeChanges,
    Caller,
    DirectoryEntry,
    StatFs,
    VolumeCapabilities,
)
from protocol.volume_extensions import CacheInvalidation

if TYPE_CHECKING:
    from protocol.backends.host.known_inodes import HostGiving, HostTaking
    from protocol.diff.tree_diff import Change
    from protocol.linux.beneath import DirectoryReference
    from protocol.linux.shared_log import SharedLog
    from protocol.volume import Buffer

MAX_FILE_BYTES: Final = 2**63 - 1  # what off_t holds
_DOT: Final = b"."
_DOT_DOT: Final = b".."
_DOTS: Final = frozenset({_DOT, _DOT_DOT})
_make: Final = HostAttributes._make


class HostVolume:
    """A directory, given by a path or by a descriptor that stays the caller's.  Implements `protocol.volume.Volume`.

    The path may be that of a symlink to it.  OSError if it cannot be opened.  `descriptors` is how many files and
    directories may be open at a time (default: derived from RLIMIT_NOFILE).
    """

    def __init__(
        self, directory: DirectoryReference, *, read_only: bool = False, descriptors: int | None = None
    ) -> None:
        self.root_fd = root = open_directory(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.read_only = read_only
        self._table = HostInodeTable(os.fstat(root), self._release)
        self._descriptors = Descriptors(root, self._table, descriptors)
        self._creator = InodeCreator(self._descriptors)
        self._listings = Listings(self._table, self._descriptors)
        self._external_changes = ExternalChanges(self._table, self._descriptors, self._listings.forget)
        self.capabilities = VolumeCapabilities(
            external_changes=True,
            self_check=True,
            acls=_keeps_acls(root),
            appends=True,
            paths=True,
            orphans=True,
            recoverable=True,
            handover=True,
        )
        self._is_known = False  # the kernel has numbers from another process

    def close(self) -> None:
        """Close every descriptor.  The volume cannot be used after that."""
        self._descriptors.close()

    def tidy(self) -> None:
        """Close written executables, because an open one cannot be executed.  To be called every second."""
        self._descriptors.close_idle_writers()
        if self._table.known is not None:
            self._table.known.tidy()

    # -- a kernel that several processes serve -----------------------------------------------------
    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """See `protocol.volume_durability.RecoverableVolume`."""
        # Start-up: few volumes have a keeper.
        from protocol.backends.host.known_inodes import KnownInodes  # noqa: PLC0415
        from protocol.backends.host.repeated_requests import RepeatedRequests  # noqa: PLC0415

        known = KnownInodes(self._table, log)
        if is_known:
            self._listings.resume(known.load())
            for node in self._table:
                node.is_recorded = True
        else:
            known.rewrite()
        self._table.known, self._is_known = known, is_known
        self.answering = RepeatedRequests(self, log.slot, is_known=is_known).answering
        self.capabilities = replace(self.capabilities, answers_once=True)

    def handing_over(self) -> HostGiving:
        """See `protocol.volume_extensions.HandedOverVolume`, as for the next ones."""
        from protocol.backends.host.known_inodes import HostGiving  # noqa: PLC0415 (start-up: upgrades are rare)

        return HostGiving(self._table)

    def taking_over(self) -> HostTaking:
        from protocol.backends.host.known_inodes import HostTaking  # noqa: PLC0415 (start-up: upgrades are rare)

        self._is_known = True
        return HostTaking(self._table, self._listings)

    def discard_journal(self) -> None:
        """There is none."""

    def known_inodes(self) -> Iterator[tuple[int, int, int, int, list[tuple[int, bytes]]]]:
        """See `protocol.backends.container.reconnecting_volume.ContinuedVolume`."""
        for node in self._table:
            if node.lookups:
                names = [(parent.number, name) for parent, name in node.dentries()]
                yield node.number, node.kind, node.lookups, node.lookups, names[::-1]

    def directory(self, inode: int) -> int:
        """Return an O_PATH descriptor of a directory, which is valid until the next call."""
        return self._directory(self._node(inode))

    def finish(self, parent: int, descriptor: int, mode: int, caller: Caller) -> None:
        """Finish an inode that another process has made in directory `parent` for `caller`."""
        self._creator.finish_interrupted(self._node(parent), descriptor, mode, caller)

    def lost_name(self, key: Key, parent: int, name: bytes) -> None:
        """Record that another process has removed a name of an inode."""
        node = self._table.by_key(key)
        if node is not None:
            self._table.remove_dentry(node, self._node(parent), name)

    def moved(self, keys: Sequence[int], old: tuple[int, bytes], new: tuple[int, bytes], flags: int) -> None:
        """Record a rename by another process.  `keys`: of the inodes that `old` and `new` led to before."""
        source, target = (self._node(old[0]), old[1]), (self._node(new[0]), new[1])
        moved, victim = self._table.by_key((keys[0], keys[1])), self._table.by_key((keys[2], keys[3]))
        self._move_dentry(moved, source, target)
        if flags & RENAME_EXCHANGE:
            self._move_dentry(victim, target, source)
        elif victim is not None:
            self._table.remove_dentry(victim, *target)

    def check_invariants(self) -> None:
        """AssertionError if the state contradicts itself.  O(inodes in the table)."""
        self._table.check_invariants()
        self._descriptors.check_invariants()
        self._listings.check_invariants()

    # -- changes outside the mount -----------------------------------------------------------------
    def hold(self, paths: Iterable[bytes]) -> None:
        """See `protocol.volume_extensions.ExternallyChangedVolume`, as for the next two."""
        self._external_changes.hold(paths)

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        return self._external_changes.invalidation_of(changes)

    def release(self) -> None:
        self._external_changes.release()

    # -- inodes ----------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> HostAttributes:
        """See `protocol.volume.Volume`, as for all methods below."""
        directory = self._node(parent)
        if name in _DOTS:
            node = directory if name == _DOT else directory.parent or directory
            self._directory(directory)
            seen = self._stat(node)
        else:
            _check_name(name)
            seen = os.stat(name, dir_fd=self._directory(directory), follow_symlinks=False)
            node = self._enter(directory, name, seen)
        self._table.look_up(node)
        return self._attributes(node, seen)

    def _enter(self, directory: HostInode, name: bytes, seen: os.stat_result) -> HostInode:
        if seen.st_dev != directory.key[0]:
            # Either a mount point, which is refused, or a subvolume, which is part of the same mount.
            os.close(open_beneath(self._directory(directory), name, os.O_PATH, same_mount=True))
        return self._table.enter(directory, name, seen)

    def forget(self, inode: int, count: int) -> None:
        self._table.forget(inode, count)

    def getattr(self, inode: int) -> HostAttributes:
        node = self._node(inode)
        return self._attributes(node, self._stat(node))

    def path_of(self, inode: int) -> bytes | None:
        """See `protocol.volume.NamedVolume`: the path at which the inode was seen last."""
        node = self._table.get(inode)
        return None if node is None else self._table.path(node)

    def is_orphan(self, inode: int) -> bool:
        """See `protocol.volume.OrphanFindingVolume`."""
        node = self._table.get(inode)
        return node is not None and node.lookups > 0 and node.parent is None and node is not self._table.root

    def lookup_orphan(self, inode: int) -> HostAttributes:
        if not self.is_orphan(inode):
            raise os_error(errno.ENOENT, f"inode {inode}")
        node = self._node(inode)
        seen = self._stat(node)
        self._table.look_up(node)
        return self._attributes(node, seen)

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        self._check_writable()
        node = self._node(inode)
        if changes.size is not None:
            _check_size(node, changes.size)
        set_attributes(self._descriptors, node, changes)
        return self._attributes(node, self._stat(node))

    def readlink(self, inode: int) -> bytes:
        node = self._node(inode)
        if node.kind != stat.S_IFLNK:
            raise os_error(errno.EINVAL)
        with self._descriptors.of(node) as descriptor:
            return os.readlink(b"", dir_fd=descriptor)

    # -- creating and removing entries -------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttributes:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind in {stat.S_IFDIR, stat.S_IFLNK}:
            raise os_error(errno.EPERM)
        directory = self._directory_for(parent, name)
        if kind != stat.S_IFREG:
            return self._created(directory, name, self._creator.special(directory, name, mode, rdev, caller))
        descriptor, seen = self._creator.file(directory, name, mode, caller)
        made = self._created(directory, name, seen)
        self._descriptors.release_file(made.node)  # of an earlier inode with the same number
        self._descriptors.keep_file(made.node, descriptor, writable=True)
        return made

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> HostAttributes:
        directory = self._directory_for(parent, name)
        return self._created(directory, name, self._creator.directory(directory, name, mode, caller))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> HostAttributes:
        directory = self._directory_for(parent, name)
        return self._created(directory, name, self._creator.symlink(directory, name, target, caller))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> HostAttributes:
        self._check_writable()
        descriptor, seen = self._creator.file(self._node(parent), None, mode, caller)
        node = self._table.enter_unnamed(seen)
        self._table.look_up(node)
        node.pin = os.open(proc_path(descriptor), os.O_PATH | os.O_CLOEXEC)
        self._descriptors.keep_file(node, descriptor, writable=True)
        return self._attributes(node, seen)

    def link(self, inode: int, parent: int, name: bytes) -> HostAttributes:
        node = self._node(inode)
        if node.is_dir:
            raise os_error(errno.EPERM)
        directory = self._directory_for(parent, name)
        with self._descriptors.held(), self._descriptors.of(node) as descriptor:
            os.link(proc_path(descriptor), name, dst_dir_fd=self._directory(directory), follow_symlinks=True)
        self._table.add_dentry(node, directory, name)
        self._table.look_up(node)
        seen = self._stat(node)
        self._descriptors.unpin(node)
        if directory.entries is not None:
            directory.entries.add(name, seen)
        return self._attributes(node, seen)

    def _created(self, directory: HostInode, name: bytes, seen: os.stat_result) -> HostAttributes:
        earlier = self._table.at(seen)
        if earlier is not None:
            self._table.lose(earlier)  # the host reused the number of an inode that is gone
        node = self._table.enter(directory, name, seen)
        self._table.look_up(node)
        if directory.entries is not None:
            directory.entries.add(name, seen)
        return self._attributes(node, seen)

    def unlink(self, parent: int, name: bytes) -> None:
        self._remove(parent, name, rmdir=False)

    def rmdir(self, parent: int, name: bytes) -> None:
        if name == _DOT:
            raise os_error(errno.EINVAL)
        if name == _DOT_DOT:
            raise os_error(errno.ENOTEMPTY)
        self._remove(parent, name, rmdir=True)

    def _remove(self, parent: int, name: bytes, *, rmdir: bool) -> None:
        self._check_writable()
        _check_name(name)
        directory = self._node(parent)
        node = self._pinned(directory, name)
        try:
            (os.rmdir if rmdir else os.unlink)(name, dir_fd=self._directory(directory))
        except BaseException:
            self._unpin_if_named(node)
            raise
        if directory.entries is not None:
            directory.entries.remove(name)
        if node is not None:
            self._removed(node, directory, name)

    def _pinned(self, directory: HostInode, name: bytes) -> HostInode | None:
        """The node of a name that is about to be removed or replaced; pinned if the kernel has lookups of it."""
        seen = os.stat(name, dir_fd=self._directory(directory), follow_symlinks=False)
        node = self._table.at(seen)
        if node is not None and node.lookups and not self._descriptors.pin(node):
            self._table.lose(node)
            return None
        return node

    def _unpin_if_named(self, node: HostInode | None) -> None:
        if node is not None and node.parent is not None:
            self._descriptors.unpin(node)

    def _removed(self, node: HostInode, directory: HostInode, name: bytes) -> None:
        if node.is_dir:
            self._listings.forget(node)
        self._table.remove_dentry(node, directory, name)
        self._unpin_if_named(node)

    # -- rename ------------------------------------------------------------------------------------
    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        self._check_writable()
        _check_name(name)
        _check_name(new_name)
        source, target = self._node(parent), self._node(new_parent)
        with self._descriptors.held():
            moved = os.stat(name, dir_fd=self._directory(source), follow_symlinks=False)
            node = self._table.at(moved)
            try:
                victim = self._pinned(target, new_name)
            except FileNotFoundError:
                victim = None
            try:
                self._rename_on_host(source, name, target, new_name, flags)
            except BaseException:
                self._unpin_if_named(victim)
                raise
            if victim is not None and victim is node:
                self._unpin_if_named(victim)  # two names of one file, for which rename(2) does nothing
                return
            if flags & RENAME_WHITEOUT:
                self._creator.finish(source, name, stat.S_IFCHR, caller)
        if source.entries is not None:
            source.entries.remove(name)
            if flags & (RENAME_EXCHANGE | RENAME_WHITEOUT):
                source.entries.add(name, os.stat(name, dir_fd=self._directory(source), follow_symlinks=False))
        if target.entries is not None:
            target.entries.add(new_name, moved)
        self._move_dentry(node, (source, name), (target, new_name))
        if flags & RENAME_EXCHANGE:
            self._move_dentry(victim, (target, new_name), (source, name))
            self._unpin_if_named(victim)
        elif victim is not None:
            self._removed(victim, target, new_name)

    def _rename_on_host(self, source: HostInode, name: bytes, target: HostInode, new_name: bytes, flags: int) -> None:
        old, new = self._directory(source), self._directory(target)
        if flags:
            portable.renameat2(old, name, new, new_name, flags)
        else:
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def _move_dentry(self, node: HostInode | None, old: HostDentry, new: HostDentry) -> None:
        if node is not None:
            self._table.add_dentry(node, *new)
            if old != new:
                self._table.remove_dentry(node, *old)

    # -- directories -------------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        return self._listings.after(self._node(inode), cookie)

    # -- content -----------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Buffer:
        return os.pread(self._descriptors.file(self._node(inode)), size, offset)

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        if self.read_only:
            raise os_error(errno.EROFS)
        descriptor = self._descriptors.file(self._node(inode), write=True)
        if offset + len(data) > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        written = os.pwrite(descriptor, data, offset)
        if kill_privileges:
            portable.kill_privileges(descriptor)
        return written

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        self._check_writable()
        descriptor = self._descriptors.file(self._node(inode), write=True)
        written = portable.append(descriptor, data)
        if kill_privileges:
            portable.kill_privileges(descriptor)
        return written, os.fstat(descriptor).st_size

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        self._check_writable()
        descriptor = self._descriptors.file(self._node(inode), write=True)
        if offset < 0 or length <= 0:
            raise os_error(errno.EINVAL)
        if offset + length > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        portable.fallocate(descriptor, mode, offset, length)

    def seek(self, inode: int, offset: int, whence: int) -> int:
        return os.lseek(self._descriptors.file(self._node(inode)), offset, whence)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        self._check_writable()
        with self._descriptors.held():
            new = self._descriptors.file(self._node(target), write=True)
            # In this order: if both are the same file, the second call returns the descriptor of the first.
            old = self._descriptors.file(self._node(source))
            return portable.copy_range(old, source_offset, new, target_offset, length)

    def fsync(self, inode: int, *, data_only: bool) -> None:
        node = self._node(inode)
        if node.kind == stat.S_IFREG:
            (os.fdatasync if data_only else os.fsync)(self._descriptors.file(node))
        elif node.is_dir:
            descriptor = os.open(_DOT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._directory(node))
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- the rest ----------------------------------------------------------------------------------
    def statfs(self) -> StatFs:
        shown = os.fstatvfs(self._table.root.fd)
        return StatFs(
            block_size=shown.f_frsize,
            blocks=shown.f_blocks,
            blocks_free=shown.f_bavail,
            inodes=shown.f_files,
            inodes_free=shown.f_favail,
            name_max=min(shown.f_namemax, NAME_MAX),
        )

    def getxattr(self, inode: int, name: bytes) -> bytes:
        with self._descriptors.of(self._node(inode)) as descriptor:
            return os.getxattr(proc_path(descriptor), name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._check_writable()
        with self._descriptors.of(self._node(inode)) as descriptor:
            os.setxattr(proc_path(descriptor), name, value, flags)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        with self._descriptors.of(self._node(inode)) as descriptor:
            return tuple(os.fsencode(name) for name in os.listxattr(proc_path(descriptor)))

    def removexattr(self, inode: int, name: bytes) -> None:
        self._check_writable()
        with self._descriptors.of(self._node(inode)) as descriptor:
            os.removexattr(proc_path(descriptor), name)

    # -- helpers -----------------------------------------------------------------------------------
    def _node(self, inode: int) -> HostInode:
        node = self._table.get(inode)
        if node is None:
            raise os_error(errno.ESTALE if self._is_known else errno.ENOENT, f"inode {inode}")
        return node

    def _directory(self, node: HostInode) -> int:
        return self._descriptors.directory(node)

    def _directory_for(self, parent: int, name: bytes) -> HostInode:
        self._check_writable()
        if name in _DOTS:
            raise os_error(errno.EEXIST)
        _check_name(name)
        return self._node(parent)

    def _stat(self, node: HostInode) -> os.stat_result:
        """The stat data of `node`; ESTALE if no name leads to its inode."""
        if node.pin >= 0:
            return os.fstat(node.pin)
        if node.fd >= 0:
            node.used = True
            return os.fstat(node.fd)
        parent = node.parent
        if parent is not None and not node.lost:
            try:
                seen = os.stat(node.name, dir_fd=self._directory(parent), follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                if node.is_shown(seen):
                    return seen
        with self._descriptors.of(node) as descriptor:  # by its other names
            return os.fstat(descriptor)

    def _attributes(self, node: HostInode, seen: os.stat_result) -> HostAttributes:
        return _make((
            node.number, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, seen.st_size,
            seen.st_blocks, seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns, node, self._birth, 0,
        ))  # fmt: skip

    def _birth(self, node: HostInode) -> int:
        try:
            with self._descriptors.of(node) as descriptor:
                return portable.birth_ns(descriptor)
        except OSError:
            return 0

    def _release(self, node: HostInode) -> None:
        self._descriptors.release(node)
        # A reader may still continue in a directory that is only idle.
        if node.entries is not None and self._table.get(node.number) is not node:
            self._listings.forget(node)

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)


def _check_name(name: bytes) -> None:
    """EINVAL for a name with a slash, which could lead out of its directory."""
    if b"/" in name or not name:
        raise os_error(errno.EINVAL)


def _check_size(node: HostInode, size: int) -> None:
    if node.kind != stat.S_IFREG:
        raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)
    if size < 0:
        raise os_error(errno.EINVAL)
    if size > MAX_FILE_BYTES:
        raise os_error(errno.EFBIG)


def _keeps_acls(root: int) -> bool:
    try:
        os.getxattr(proc_path(root), posix_acl.ACCESS)
    except OSError as error:
        return error.errno == errno.ENODATA
    return True
