"""HostFilesystem: the agent's view of a directory of the host, which may be a mount.

`hydrate` copies files of the host into a new volume.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.adapters.host_files import HostFiles
from protocol.adapters.path_files import PathFilesTree
from protocol.adapters.path_filesystem import PathFilesystem
from protocol.errors import os_error
from protocol.linux.syscalls import MountId
from protocol.paths import DEFAULT_LIMITS, CallLimits, decode, encode, normalise
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, TreeEntry
from protocol.volume_extensions import SnapshotableVolume


class HostFilesystem(PathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` over the directory `root`.

    No path leads outside `root`, even while other programs rename things; absolute symlinks to paths below it stay
    inside.  Snapshots are archives in a temporary directory that is removed with this object.

    With `durable` each write is on the disk when it returns: the file and its name are synced (fsync(2)).  Without, the
    kernel writes it back later, as for most programs; a reader still sees either the old file or the new one.

    All calls raise NotMountedError, a ConnectionError, once `root` is on another mount than `mount` (None: the mount
    that it is on now).

    FileNotFoundError, NotADirectoryError if `root` is not a directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        durable: bool = False,
        limits: CallLimits = DEFAULT_LIMITS,
        mount: MountId | None = None,
    ) -> None:
        super().__init__(HostFiles(root, read_only=read_only, durable=durable, mount=mount), limits=limits)


# -- copies of host files --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HostMount:
    """Files of the host to begin with: copies `host_path`, with everything below it, to `mount_path`.

    `include` and `exclude` are `fnmatch` patterns for paths relative to `host_path` ("*" crosses "/") and for single
    names. A file is copied if one of `include` matches (none: every file) and none of `exclude`; a directory that
    `exclude` matches is omitted with everything below it.  ValueError, before anything is copied, for more than
    `max_bytes` of content.  Modes and times are kept, symlinks copied as they are; fifos, sockets and devices are
    omitted.
    """

    host_path: str | os.PathLike[str]
    mount_path: str = "."
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    max_bytes: int | None = None


def hydrate(volume: SnapshotableVolume, mount: HostMount) -> int:
    """Copy the host's files over those of `volume`, all or nothing; return the number of files and symlinks.

    FileNotFoundError if `host_path` does not exist; ENOSPC over the volume's quota.  The limits on depth and names do
    not apply: they are for files that agents create.
    """
    tree = _MountTree(mount)
    total = sum(entry.size for entry in tree.walk() if entry.is_file)
    if mount.max_bytes is not None and total > mount.max_bytes:
        raise ValueError(
            f"{os.fspath(mount.host_path)!r} has {total} bytes to copy, but the limit is {mount.max_bytes}"
        )
    scope = encode(normalise(mount.mount_path))
    volume.import_tree(tree, replace=False, paths=(scope,) if scope else ())
    return sum(not entry.is_dir for entry in tree.walk())


class _MountTree(LookupTree):
    """The selected files of the host as a tree, at their paths in the volume."""

    def __init__(self, mount: HostMount) -> None:
        host_path = os.path.realpath(mount.host_path)
        if not os.path.lexists(host_path):
            raise os_error(errno.ENOENT, host_path)
        self._scope = encode(normalise(mount.mount_path))
        start = b""
        if not os.path.isdir(host_path):  # for a single file: its directory, and its name there
            if not self._scope:
                raise os_error(errno.EISDIR, host_path)
            host_path, name = os.path.split(host_path)
            start = os.fsencode(name)
        self._host = PathFilesTree(HostFiles(host_path))
        self._entries: dict[bytes, TreeEntry] = {}
        self._sources: dict[bytes, bytes] = {}  # path in the volume -> path on the host
        self._children: dict[bytes, list[bytes]] = {}
        self._add_parents()
        for entry in _chosen(self._host, start, mount):
            below = entry.path[len(start) :].lstrip(b"/")
            self._add(b"/".join(filter(None, (self._scope, below))), entry)

    def _add_parents(self) -> None:
        self._entries[b""] = TreeEntry(b"", stat.S_IFDIR | 0o755, uid=os.getuid(), gid=os.getgid())
        parts = self._scope.split(b"/")
        for end in range(1, len(parts)):
            self._add(b"/".join(parts[:end]), self._entries[b""])

    def _add(self, path: bytes, entry: TreeEntry) -> None:
        self._sources[path] = entry.path
        self._entries[path] = replace(entry, path=path)
        parent, _, name = path.rpartition(b"/")
        if path:
            self._children.setdefault(parent, []).append(name)

    def entry(self, path: bytes) -> TreeEntry:
        try:
            return self._entries[path]
        except KeyError:
            raise os_error(errno.ENOENT, decode(path)) from None

    def children(self, path: bytes) -> list[bytes]:
        if not self.entry(path).is_dir:
            raise os_error(errno.ENOTDIR, decode(path))
        return sorted(self._children.get(path, ()))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._host.read(self._sources[path], offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        return self._host.chunks(self._sources[path], size)


def _chosen(host: PathFilesTree, start: bytes, mount: HostMount) -> Iterator[TreeEntry]:
    """Yield the entries to copy, parents first.  With `include`, only directories that contain something to copy."""
    waiting = [start]
    above: list[TreeEntry] = []  # directories not yielded yet
    while waiting:
        path = waiting.pop()
        entry = host.entry(path)
        relative = decode(path[len(start) :].lstrip(b"/") if path != start else os.path.basename(path))
        is_start = path == start
        if not (is_start and entry.is_dir) and _matches(relative, mount.exclude):
            continue
        above = [each for each in above if not each.path or path.startswith(each.path + b"/")]
        if entry.is_dir:
            above.append(entry)
            waiting.extend(below.path for below in reversed(host.entries(path)))
            if mount.include and not is_start:
                continue
        elif not (entry.is_file or entry.is_symlink) or (mount.include and not _matches(relative, mount.include)):
            continue
        else:
            above.append(entry)
        yield from above
        above.clear()


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(path, each) or fnmatch.fnmatchcase(name, each) for each in patterns)
