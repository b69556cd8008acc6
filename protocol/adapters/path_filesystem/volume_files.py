"""VolumeFiles: the files of a `Volume` whose methods return results, not awaitables."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeVar, cast

from protocol.adapters.path_filesystem.files import Status
from protocol.errors import os_error
from protocol.volume import (
    ROOT_INODE,
    USUAL_UMASK,
    Answer,
    AppendingVolume,
    AttributeChanges,
    Attributes,
    Caller,
    Volume,
)

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
            written, _ = now(cast("AppendingVolume", self._volume).append(self.node, data))
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
