"""Attached directories: workspaces without a mount (`vfsd attach DIR`).

The workspace is the directory itself.  Programs use it directly, so vfsd sees no request: there is no log of changes
and no policy.  Snapshots, restores and comparisons go through the store, as for `host:DIR`.

Invariants:

- When a directory is attached, no other daemon of this user serves a part of it, or a directory above it, and two
  attached directories never overlap.  Starts exclude each other (`vfsd.daemon.opening.alone`) from the check until the
  record of the new workspace is written.  A later mount of `host:DIR` is possible; then the store excludes concurrent
  restores, as for two such mounts.
- Neither the store nor vfsd's own sockets and records are in the directory, so no restore removes them.
- The daemon changes files only while it restores or imports.  A daemon that dies leaves the directory, the snapshots
  and, of an unfinished restore, the intent log, which the next one reports.
- No module of an engine is imported.

Threading: `check_free` and `check_fits` in any thread, the engine on the serving loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from protocol.linux.syscalls import filesystem_type
from vfsd.machine import runtime
from vfsd.machine.mountinfo import find_mount, is_at_or_below, resolve, vfsd_mounts
from vfsd.wire.options import NO_ENGINE, BackendSpec

if TYPE_CHECKING:
    from vfsd.daemon.snapshots.store_restore import Stored
    from vfsd.wire.options import MountOptions

# Other machines change these without a change of ctime that this one sees in time; include/uapi/linux/magic.h.
_OF_OTHER_MACHINES: Final = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x00C36400: "Ceph", 0x5346414F: "AFS",
}  # fmt: skip
# Their files are the kernel's state: a restore would change settings.
_OF_THE_KERNEL: Final = {
    0x9FA0: "proc", 0x62656572: "sysfs", 0x0027E0EB: "cgroup", 0x63677270: "cgroup2", 0x64626720: "debugfs",
    0x74726163: "tracefs", 0x62656570: "configfs", 0x73636673: "securityfs", 0xCAFE4A11: "bpf",
}  # fmt: skip
_SECTOR_BYTES: Final = 512


def needs_mount(what: str, instead: str) -> OSError:
    """Return the error of a verb that an attached directory does not have.  `instead` says what to do."""
    return OSError(errno.EOPNOTSUPP, f"{what} needs a mount, and this workspace is an attached directory: {instead}")


class NoEngine:
    """Implements `vfsd.kernel.engines.base.Engine` where nothing is mounted and no kernel has cached anything."""

    name: Final = NO_ENGINE
    fallback_reason: Final = "an attached directory, which programs use without a mount"
    requests: Final = 0
    wakeups: Final = None
    warnings: Final[Sequence[str]] = ()

    def __init__(self) -> None:
        self._ended = trio.Event()

    def mount(self) -> None:
        """Make no mount."""

    async def serve(self) -> None:
        await self._ended.wait()

    def stop(self) -> None:
        self._ended.set()

    def unmount(self) -> None:
        self._ended.set()

    async def drained(self) -> None:
        """Return: there are no requests."""

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """Do nothing: no cache of the kernel is vfsd's."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """As `invalidate_inode`."""


def check_free(options: MountOptions) -> None:
    """Check that the directory of `options` can be attached, without reading it.

    OSError: ENOENT, ENOTDIR, EACCES, EROFS; EBUSY if a workspace serves a part of it, or a directory above it; EINVAL
    if vfsd's runtime directory is in it; EOPNOTSUPP for a file system of a network or of the kernel.
    """
    path = options.workspace.mountpoint
    for record in runtime.read_records():
        # A daemon that is being restarted has its mount.
        if record.alive or record.is_kept:
            _check_apart(path, record)
    mount = find_mount(path)
    if mount is not None and mount.is_vfsd:
        raise OSError(errno.EBUSY, f"in workspace {mount.workspace!r}, which has snapshots itself", path)
    for mount in vfsd_mounts():
        if is_at_or_below(mount.mountpoint, path):
            raise OSError(errno.EBUSY, f"workspace {mount.workspace!r} is mounted in it, at {mount.mountpoint}", path)
    if is_at_or_below(resolve(runtime.socket_dir()), path):
        reason = f"contains vfsd's runtime directory {runtime.socket_dir()}: set ${runtime.RUNTIME_VARIABLE}"
        raise OSError(errno.EINVAL, f"{reason} to a directory outside of it", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        number = filesystem_type(descriptor)
        if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "on a read-only file system, so nothing could be restored", path)
    finally:
        os.close(descriptor)
    for kinds, where in (
        (_OF_OTHER_MACHINES, "where other machines change files unseen"),
        (_OF_THE_KERNEL, "whose files are settings of the kernel"),
    ):
        if number in kinds:
            reason = f"on {kinds[number]}, {where}: attach a directory of a local file system"
            raise OSError(errno.EOPNOTSUPP, reason, path)
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, "you cannot write there, so nothing could be restored", path)


def _check_apart(path: str, record: runtime.WorkspaceRecord) -> None:
    use = f"use it with -w {record.name}, or `vfsd unmount {record.name}` first"
    if record.is_attached and record.mountpoint == path:
        raise OSError(errno.EBUSY, f"attached already, as workspace {record.name!r}: {use}", path)
    backend = BackendSpec.split(record.backend)
    if backend.kind != "host":
        return
    served = resolve(backend.argument)
    if served == path:
        raise OSError(errno.EBUSY, f"workspace {record.name!r} serves it already, at {record.mountpoint}: {use}", path)
    if is_at_or_below(served, path) or is_at_or_below(path, served):
        where = "a part of it" if is_at_or_below(served, path) else "a directory above it"
        raise OSError(errno.EBUSY, f"workspace {record.name!r} serves {where}, {served}: {use}", path)


def check_fits(path: str, stored: Stored, root: int, keep_going: Callable[[], object]) -> None:
    """OSError (ENOSPC) if the store has too little space for the first snapshot of `path`, opened as `root`.

    Later snapshots share most of their content with earlier ones.  `keep_going` may raise to stop the walk.
    """
    if stored.store.snapshots(stored.key):
        return
    place = stored.store.directory
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    there = os.statvfs(place)
    free_bytes, needed_bytes = there.f_bavail * there.f_frsize, 0
    device = os.fstat(root).st_dev
    for _, directories, files, descriptor in os.fwalk(".", dir_fd=root, follow_symlinks=False):
        keep_going()
        for names, is_directory in ((directories, True), (files, False)):
            for name in list(names):
                try:
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue  # it is gone, or unreadable
                if found.st_dev != device and is_directory:
                    names.remove(name)  # a snapshot does not enter other mounts
                elif not is_directory:
                    needed_bytes += found.st_blocks * _SECTOR_BYTES // found.st_nlink
        if needed_bytes > free_bytes:
            reason = f"too large for the store {stored.store.directory}, which has {free_bytes >> 20:,} MiB free"
            raise OSError(errno.ENOSPC, f"{reason}: free some, or name another store with --store", path)
