"""RootfsTransport: a container on this machine, by descriptors below the root directory of its first process.

It runs the host backend's code on another root: microseconds per operation, and no path leads outside.  /proc/PID/root
shows the directory with the container's own mounts: a read-only mount is read-only, and volumes are visible.  Other
mounts below the workspace directory are not entered (EXDEV), as in the host backend.

Such a root exists only while the container runs.  Descriptors would keep it alive after that, so they are closed as
soon as the first process has ended.  The files of a paused container stay accessible.

Ids: a root daemon's mount shows the container's ids, as `ls -l` inside and the agent transport do, translated by the
map of its user namespace.  An unprivileged daemon's mount shows the host's ids: in rootless Podman the user is the
container's root, and the kernel checks permissions by the ids that the mount shows.

`ContainerInit` is the container's first process, as /proc shows it.  A pid may have been reused, and Podman may run on
another machine.  So this opens a pidfd first, and accepts what it reads by number only if the process of the pidfd is
still alive and is a child of the container's monitor.

`RootVolume` shows owners in the container's ids, and takes callers' ids as the container's, so a file that root
creates through the mount belongs to root inside.  One exception lets "edit here, run inside" work if commands inside
run as another user: files that the host's root creates belong to the container's own user, the user of its first
process.

Executables: the host backend keeps a written file open for the next write.  A file that is open for writing cannot be
executed (ETXTBSY), and "write it here, run it inside" is the purpose of a container's workspace.  So a file stays open
for writing only until the serving loop is idle: during consecutive writes and about a millisecond longer, less than it
takes to start anything in the container.  (A program that writes there itself holds its file open longer.)

`open_workdir` opens the workspace directory below a container's root, by the path resolution of a process inside:
symlinks on the way resolve as in the container: absolute ones start at its root, ".." at its root stays there, and
links of /proc lead nowhere (RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS, openat2(2)).  A missing directory is created in
an open parent, by a single name, so a concurrent replacement is never followed.
"""

from __future__ import annotations

import errno
import os
import re
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import trio
from msgspec.structs import replace

from protocol.backends.container.inode_map import IDENTITY, IdMap, parse_map
from protocol.backends.container.podman.spec import ContainerState
from protocol.backends.host.inode_table import HostInode
from protocol.backends.host.volume import HostAttributes, HostVolume
from protocol.errors import os_error
from protocol.linux import posix_acl
from protocol.linux.beneath import open_beneath
from protocol.linux.portable import proc_path
from protocol.linux.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, openat2
from protocol.volume import AttributeChanges, Caller

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog


class RootfsTransport:
    """Implements `protocol.backends.container.connection.Transport`."""

    name: Final[Literal["rootfs"]] = "rootfs"

    def __init__(self, workdir: str, *, read_only: bool = False) -> None:
        self.supports_acl = False
        self._workdir = workdir
        self._read_only = read_only
        self._process: ContainerInit | None = None
        self._volume: RootVolume | None = None
        self._wrote = trio.Event()
        self.run = ""
        self.is_left: Callable[[], bool] = lambda: False

    helper: Final = b""
    keeps_numbers: Final = False  # its log is of one run

    def probe(self, state: ContainerState) -> None:
        """Raise OSError if this transport cannot reach the container; create a missing directory."""
        process, volume = self._opened(state)
        self.supports_acl = volume.capabilities.acls
        volume.close()
        process.close()

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Nothing: the volume keeps it."""

    def prepare(self, state: ContainerState) -> RootVolume:
        """See `Transport`."""
        process, volume = self._opened(state)
        self._process, self._volume, self.run = process, volume, process.identity
        return volume

    async def open(self, state: ContainerState, nursery: trio.Nursery) -> RootVolume:
        volume = self._volume
        if volume is None:
            volume = await trio.to_thread.run_sync(self.prepare, state)
        nursery.start_soon(self._close_writers, volume)
        return volume

    def _on_writer(self) -> None:
        self._wrote.set()

    async def _close_writers(self, volume: RootVolume) -> None:
        """Close writers whenever the loop is idle.  A waiting task is cheaper than a callback, which wakes the loop."""
        while True:
            await self._wrote.wait()
            self._wrote = trio.Event()
            volume.close_writers()

    def _opened(self, state: ContainerState) -> tuple[ContainerInit, RootVolume]:
        process = ContainerInit(state)
        try:
            owner = process.ids.users.outside(process.user), process.ids.groups.outside(process.group)
            directory = open_workdir(process.root, self._workdir, owner)
            try:
                is_mapped = os.geteuid() == 0
                ids, user = (process.ids, (process.user, process.group)) if is_mapped else (IDENTITY, (0, 0))
                path = f"/proc/self/fd/{directory}"
                return process, RootVolume(path, ids, user, self._on_writer, read_only=self._read_only)
            finally:
                os.close(directory)
        except BaseException:
            process.close()
            raise

    def begin(self) -> None:
        """See `Transport`: the descriptors are this process's own already."""

    async def wait_lost(self) -> str:
        assert self._process is not None
        await trio.lowlevel.wait_readable(self._process.pidfd)
        return "it has stopped"

    async def close(self) -> None:
        volume, process = self._volume, self._process
        self._volume = self._process = None
        if volume is not None:
            volume.close()
        if process is not None:
            process.close()


_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class ContainerInit:
    """`pidfd` becomes readable when the process ends.  `root` is an O_PATH descriptor of its root directory.

    `identity` is the same as long as the process runs.  `user` and `group` are the ids that it runs as, in the
    container's own ids.  `close` closes both descriptors.
    """

    def __init__(self, state: ContainerState) -> None:
        """OSError: EPERM for a process that may not be inspected, ESRCH for one that is not on this machine."""
        self.pidfd: Final = _open_pidfd(state)
        self.root = -1
        try:
            _check_is_of(state)
            self.root = _open_root(state)
            self.ids = IdMap(
                parse_map(_read(f"/proc/{state.pid}/uid_map")), parse_map(_read(f"/proc/{state.pid}/gid_map"))
            )
            status = _read(f"/proc/{state.pid}/status")
            self.user = self.ids.users.inside(_effective_id(status, "Uid"))
            self.group = self.ids.groups.inside(_effective_id(status, "Gid"))
            ticks = _read(f"/proc/{state.pid}/stat").rpartition(")")[2].split()[19:20]
            self.identity = f"{state.id} {state.pid} {''.join(ticks)}"
            self._check_alive(state)
        except BaseException:
            self.close()
            raise

    def _check_alive(self, state: ContainerState) -> None:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(0):
            raise ProcessLookupError(errno.ESRCH, f"the first process of container {state.name} has ended")

    def close(self) -> None:
        for descriptor in (self.pidfd, self.root):
            if descriptor >= 0:
                os.close(descriptor)
        self.root = -1


def _open_pidfd(state: ContainerState) -> int:
    try:
        return os.pidfd_open(state.pid)
    except OSError as error:
        raise _elsewhere(state) if error.errno == errno.ESRCH else error from None


def _open_root(state: ContainerState) -> int:
    try:
        return os.open(f"/proc/{state.pid}/root", _FLAGS)
    except PermissionError:
        advice = "run as its owner or root, or use --transport agent"
        raise PermissionError(errno.EACCES, f"no access to container {state.name}: {advice}") from None


def _check_is_of(state: ContainerState) -> None:
    """Raise ESRCH unless a conmon of this machine with the container's id started the process."""
    parent = re.search(r"^PPid:\s*(\d+)$", _read(f"/proc/{state.pid}/status"), re.MULTILINE)
    words = _read(f"/proc/{state.conmon_pid}/cmdline").split("\0")
    if parent is None or int(parent[1]) != state.conmon_pid or state.id not in words:
        raise _elsewhere(state)


def _elsewhere(state: ContainerState) -> OSError:
    return ProcessLookupError(errno.ESRCH, f"container {state.name} does not run among the processes of this machine")


def _effective_id(status: str, what: str) -> int:
    """proc_pid_status(5): real, effective, saved set, file system."""
    found = re.search(rf"^{what}:\s+\d+\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the process has ended, which the caller checks afterwards


_ACLS: Final = frozenset({posix_acl.ACCESS, posix_acl.DEFAULT})


class RootVolume(HostVolume):
    """A HostVolume with mapped ids.  `user` is the container's own user and group, in its ids.

    It calls `on_writer` when it opened a file for writing; the serving loop then calls `close_writers` when it is idle.
    ACLs contain ids, which are not translated, so there are no ACLs if the map changes ids.
    """

    def __init__(
        self, path: str, ids: IdMap, user: tuple[int, int], on_writer: Callable[[], None], *, read_only: bool = False
    ) -> None:
        super().__init__(path, read_only=read_only)
        self._ids = ids
        self._user = user
        self._is_identity = ids.is_identity
        self._request_close = on_writer
        self._is_close_requested = False
        self.descriptors.on_writer = self._on_writer
        if not self._is_identity:
            self.capabilities = replace(self.capabilities, acls=False)

    # -- executables ---------------------------------------------------------------------------
    def _on_writer(self, _node: HostInode) -> None:
        if not self._is_close_requested:
            self._is_close_requested = True
            self._request_close()

    def close_writers(self) -> None:
        """Close the files that are open for writing."""
        self._is_close_requested = False
        self.descriptors.close_writers()

    def check_invariants(self) -> None:
        """Check HostVolume's invariants, and that no file stays open for writing."""
        super().check_invariants()
        assert self._is_close_requested or not any(node.writable for node in self.table)

    # -- ids -----------------------------------------------------------------------------------
    def shown(self, node: HostInode, seen: os.stat_result) -> HostAttributes:
        """Show the attributes of an inode, with the container's ids."""
        shown = super().shown(node, seen)
        if self._is_identity:
            return shown
        return shown._replace(uid=self._ids.users.inside(shown.uid), gid=self._ids.groups.inside(shown.gid))

    def outside(self, caller: Caller) -> Caller:
        """Return the caller with the host's ids."""
        uid, gid = (caller.uid, caller.gid) if caller.uid or not any(self._user) else self._user
        return caller._replace(uid=self._ids.users.outside(uid), gid=self._ids.groups.outside(gid))

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        """See `protocol.volume.Volume`."""
        if changes.uid is not None:
            changes = changes._replace(uid=self._ids.users.outside(changes.uid))
        if changes.gid is not None:
            changes = changes._replace(gid=self._ids.groups.outside(changes.gid))
        return super().setattr(inode, changes)

    # -- ACLs ----------------------------------------------------------------------------------
    def getxattr(self, inode: int, name: bytes) -> bytes:
        self._check_attribute(name)
        return super().getxattr(inode, name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._check_attribute(name)
        super().setxattr(inode, name, value, flags)

    def listxattr(self, inode: int) -> tuple[bytes, ...]:
        names = super().listxattr(inode)
        return names if self._is_identity else tuple(name for name in names if name not in _ACLS)

    def _check_attribute(self, name: bytes) -> None:
        if not self._is_identity and name in _ACLS:
            raise os_error(errno.EOPNOTSUPP)


_ATTEMPTS: Final = 16  # EAGAIN: the kernel cannot tell a concurrent rename or mount from an escape
_MODE: Final = 0o755


def open_workdir(root: int, workdir: str, owner: tuple[int, int]) -> int:
    """An O_PATH descriptor of the directory `workdir` in the root directory of descriptor `root`.

    Missing directories are created and belong to `owner` (user and group, in the host's ids).  OSError with advice:
    EROFS if a directory is missing on a read-only file system.
    """
    at = b"/"
    descriptor = _in_root(root, at)
    for name in os.fsencode(workdir).split(b"/"):
        if not name:
            continue
        at = os.path.join(at, name)
        try:
            below = _in_root(root, at)
        except FileNotFoundError:
            try:
                _make(descriptor, name, owner)
                below = _in_root(root, at)
            except OSError as error:
                raise _explained(error, workdir) from None
        except OSError as error:
            raise _explained(error, workdir) from None
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _make(directory: int, name: bytes, owner: tuple[int, int]) -> None:
    try:
        os.mkdir(name, _MODE, dir_fd=directory)
    except FileExistsError:
        return  # created concurrently, or a dangling symlink, which the next attempt reports
    if os.geteuid() != 0:
        return
    # By descriptor: the name may have been replaced by a file whose owner must not change.
    made = open_beneath(directory, name, os.O_PATH | os.O_DIRECTORY)
    try:
        if os.fstat(made).st_uid == 0:
            os.chown(proc_path(made), *owner)
    finally:
        os.close(made)


def _explained(error: OSError, workdir: str) -> OSError:
    reason = {
        errno.EROFS: "does not exist in the container, whose root is read-only; name a volume's place with --workdir",
        errno.ENOTDIR: "is not a directory in the container",
        errno.ENOENT: "is a dangling symlink in the container",
        errno.EACCES: "is not accessible to this user from outside the container; use --transport agent",
    }.get(error.errno or 0, error.strerror)
    return OSError(error.errno, f"the working directory {reason}", workdir)


def _in_root(root: int, path: bytes) -> int:
    left = _ATTEMPTS
    while True:
        left -= 1
        try:
            return openat2(root, path, _FLAGS, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        except BlockingIOError:
            if not left:
                raise
