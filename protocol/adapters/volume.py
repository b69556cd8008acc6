"""VolumeFilesystem: the agent's view of any `Volume` that returns results, not awaitables.

`VolumeFiles` are the volume's files.  `SharedVolume` is one caller's view of a volume that another thread serves.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, TypeVar
from uuid import uuid4

from protocol.adapters.path_files import Status
from protocol.adapters.path_filesystem import PathFilesystem
from protocol.archive import open_archive
from protocol.errors import SnapshotNotFoundError, check_type, os_error
from protocol.paths import DEFAULT_LIMITS, ROOT, CallLimits
from protocol.tree import Tree
from protocol.types import FilesystemSnapshot, utc_time
from protocol.volume import (
    ROOT_INODE,
    USUAL_UMASK,
    Answer,
    AttributeChanges,
    Attributes,
    Caller,
    Volume,
    extended,
)
from protocol.volume_extensions import CacheInvalidation, SnapshotableVolume, SnapshotInfo, snapshotable


class VolumeFilesystem(PathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` over a volume, on the volume's thread.

    `root` is the mount point, if the volume is mounted: an absolute symlink to a path below it stays inside.  New
    files belong to `caller` (None: this process).  Uses the snapshots and the import of the volume if it has them,
    else archives.

    A volume whose methods return awaitables raises TypeError at the first call.  This class does not invalidate kernel
    caches: that is the task of the code that mounted the volume.
    """

    def __init__(
        self, volume: Volume, *, root: str = "/", caller: Caller | None = None, limits: CallLimits = DEFAULT_LIMITS
    ) -> None:
        self._files = VolumeFiles(volume, root=root, caller=caller)
        super().__init__(self._files, limits=limits)
        self.volume = volume
        self._snapshotable = snapshotable(volume)

    def _use(self, volume: Volume) -> None:
        """Make all later calls, but not those of open streams, on `volume`: another view of the same state."""
        self._files.volume = self.volume = volume
        self._snapshotable = snapshotable(volume)

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        if self._snapshotable is None:
            return super().snapshot(tag=tag)
        return self._record(self._snapshotable.take_snapshot(str(uuid4()), tag=tag))

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        if self._snapshotable is None:
            super().restore(snapshot)
            return
        check_type(snapshot, FilesystemSnapshot, "restore takes a FilesystemSnapshot", "`snapshot` returns it")
        self._changing(ROOT, root_is_fine=True)
        info = self._snapshotable.snapshot(snapshot.commit_ref)
        if self._record(info) != snapshot:  # a snapshot of another volume, with the same name
            raise SnapshotNotFoundError(snapshot.snapshot_id)
        self._snapshotable.restore_snapshot(info.name)

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        if self._snapshotable is None:
            super().import_archive(path)
            return
        self._changing(ROOT, root_is_fine=True)
        with open_archive(path) as tree:
            self._snapshotable.import_tree(tree, replace=True)

    def _record(self, info: SnapshotInfo) -> FilesystemSnapshot:
        created = utc_time(info.created_ns)
        assert created is not None  # the clock's year when it was taken
        return FilesystemSnapshot(info.name, created, info.name, self.root, info.tag)

    def _state(self) -> AbstractContextManager[Tree]:
        return super()._state() if self._snapshotable is None else self._snapshotable.tree()

    def _search_tree(self) -> AbstractContextManager[Tree]:
        return super()._search_tree() if self._snapshotable is None else self._snapshotable.tree()


# -- the files of a volume -------------------------------------------------------------------------
T = TypeVar("T")


def now(answer: Answer[T]) -> T:
    """Return the result of a volume's method.  TypeError if it is an awaitable."""
    if isinstance(answer, Awaitable):
        if isinstance(answer, Coroutine):
            answer.close()  # avoids Python's warning that it was never awaited
        raise TypeError(
            "this volume answers with awaitables (it waits for something remote): "
            "a synchronous filesystem cannot be made of it"
        )
    return answer


class VolumeFiles:
    """Nodes are inode numbers, each held by a lookup.  New files belong to `caller`."""

    def __init__(self, volume: Volume, *, root: str = "/", caller: Caller | None = None) -> None:
        self.volume = volume
        self.root = root
        self._caller = caller or Caller(os.getuid(), os.getgid(), USUAL_UMASK)

    @property
    def read_only(self) -> bool:
        return self.volume.read_only

    def top(self, *, begins: bool = False) -> int:  # noqa: ARG002 a volume cannot be gone
        return ROOT_INODE  # never released: the root always lives

    def child(self, node: int, name: bytes) -> int:
        return now(self.volume.lookup(node, name)).inode

    def release(self, node: int) -> None:
        if node != ROOT_INODE:
            self.volume.forget(node, 1)

    def status(self, node: int) -> Status:
        return _status(now(self.volume.getattr(node)))

    def status_of(self, node: int, name: bytes) -> Status:
        status = _status(now(self.volume.lookup(node, name)))
        self.volume.forget(status.inode, 1)
        return status

    def readlink(self, node: int) -> bytes:
        return now(self.volume.readlink(node))

    def names(self, node: int) -> list[tuple[bytes, int]]:
        entries = now(self.volume.readdir(node, 0))
        return [(entry.name, stat.S_IFMT(entry.mode)) for entry in entries if entry.name not in {b".", b".."}]

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        return {bytes(name): now(self.volume.getxattr(node, name)) for name in now(self.volume.listxattr(node))}

    # -- content -----------------------------------------------------------------------------
    def open(self, node: int, mode: Literal["read", "append"]) -> VolumeFile:
        if mode == "append" and self.read_only:
            raise os_error(errno.EROFS)
        return VolumeFile(self.volume, node, appends=mode == "append")

    def create(self, node: int, name: bytes, mode: int | None) -> VolumeFile:
        permissions = 0o666 if mode is None else mode
        made = now(self.volume.mknod(node, name, stat.S_IFREG | permissions, 0, self._caller))
        return VolumeFile(self.volume, made.inode)

    # -- entries -----------------------------------------------------------------------------
    def mkdir(self, node: int, name: bytes) -> None:
        self._drop(self.volume.mkdir(node, name, 0o777, self._caller))

    def symlink(self, node: int, name: bytes, target: bytes) -> None:
        self._drop(self.volume.symlink(node, name, target, self._caller))

    def link(self, source: int, node: int, name: bytes) -> None:
        self._drop(self.volume.link(source, node, name))

    def mknod(self, node: int, name: bytes, mode: int, rdev: int) -> None:
        self._drop(self.volume.mknod(node, name, mode, rdev, self._caller))

    def _drop(self, answer: Answer[Attributes]) -> None:
        """Drop the lookup that a creating call added."""
        self.volume.forget(now(answer).inode, 1)

    def unlink(self, node: int, name: bytes) -> None:
        now(self.volume.unlink(node, name))

    def rmdir(self, node: int, name: bytes) -> None:
        now(self.volume.rmdir(node, name))

    def rename(self, node: int, name: bytes, new_node: int, new_name: bytes) -> None:
        now(self.volume.rename(node, name, new_node, new_name))

    def locked(self, node: int) -> AbstractContextManager[None]:  # noqa: ARG002 one thread calls a volume
        return nullcontext()

    def sync_names(self, node: int) -> None:
        pass  # a volume keeps names with the content

    # -- attributes --------------------------------------------------------------------------
    def set_mode(self, node: int, mode: int) -> None:
        now(self.volume.setattr(node, AttributeChanges(mode=stat.S_IMODE(mode))))

    def set_owner(self, node: int, uid: int, gid: int) -> None:
        now(self.volume.setattr(node, AttributeChanges(uid=uid, gid=gid)))

    def set_mtime(self, node: int, mtime_ns: int) -> None:
        now(self.volume.setattr(node, AttributeChanges(mtime_ns=mtime_ns)))

    def set_xattrs(self, node: int, xattrs: Mapping[bytes, bytes]) -> None:
        for name in now(self.volume.listxattr(node)):
            if name not in xattrs:
                now(self.volume.removexattr(node, name))
        for name, value in xattrs.items():
            now(self.volume.setxattr(node, name, value, 0))


class VolumeFile:
    """An open file: an inode that is held."""

    def __init__(self, volume: Volume, node: int, *, appends: bool = False) -> None:
        self._volume = volume
        self.node = node
        self._appends = appends

    def size(self) -> int:
        return now(self._volume.getattr(self.node)).size

    def read(self, offset: int, size: int) -> bytes:
        return bytes(now(self._volume.read(self.node, offset, size)))

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> int:
        if self._appends and self._volume.capabilities.appends:
            written, _ = now(extended(self._volume).append(self.node, data))
        else:
            written = now(self._volume.write(self.node, self.size() if self._appends else offset, data))
        if not written:
            raise os_error(errno.ENOSPC)
        return written

    def sync(self) -> None:
        pass  # nobody asks to make each write durable, and a journal keeps the order of changes

    def close(self) -> None:
        self._volume.forget(self.node, 1)


def _status(seen: Attributes) -> Status:
    # A copy: the volume returns a live view.
    return Status(
        seen.mode,
        seen.size,
        seen.mtime_ns,
        seen.uid,
        seen.gid,
        seen.nlink,
        seen.inode,
        seen.rdev,
        seen.birth_ns or None,
        seen.ctime_ns,
    )


# -- a volume that another thread serves -----------------------------------------------------------
_LOOKING_UP: Final = frozenset({"lookup", "mknod", "mkdir", "symlink", "link", "tmpfile"})


class SharedVolume:
    """Has the methods of `volume`, and holds `lock` during each call, so that each is one step for the serving thread.

    Calls `invalidate`, without the lock, with what a restore or import changed: the kernel may wait for the serving
    thread before it drops a cache.  `lookups` counts the lookups that came through this object and were not forgotten.
    """

    def __init__(
        self,
        volume: SnapshotableVolume,
        lock: AbstractContextManager[Any],
        invalidate: Callable[[CacheInvalidation], None],
    ) -> None:
        self._volume = volume
        self._lock = lock
        self._invalidate = invalidate
        self.lookups: Counter[int] = Counter()

    @contextmanager
    def tree(self, name: str | None = None) -> Iterator[Tree]:
        """See `SnapshotableVolume.tree`: only the ends of the block need the lock."""
        with self._lock:
            state = self._volume.tree(name)
            tree = state.__enter__()
        try:
            yield tree
        finally:
            with self._lock:
                state.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._volume, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                answer = self._settled(name, args, member(*args, **kwargs))
            if isinstance(answer, CacheInvalidation):
                self._invalidate(answer)
            return answer

        return call

    def _settled(self, name: str, args: tuple[Any, ...], answer: Any) -> Any:
        """Count lookups, and copy an answer that later changes of the volume would alter."""
        if name in _LOOKING_UP:
            self.lookups[answer.inode] += 1
        elif name == "forget":
            self.lookups[args[0]] -= args[1]
        elif name == "readdir":
            return list(answer)
        elif name == "read":
            return bytes(answer)
        return answer
