"""fsspec: the files of running workspaces as `vfsd://WORKSPACE/PATH`.  fsspec loads this module by its entry point.

    with fsspec.open("vfsd://agent/notes/a.txt", "w") as file:
        file.write("hello")
    pandas.read_csv("vfsd://agent/table.csv")

As in an object store, the first part of a path is the container: the name of a workspace.  `ls("")` lists the running
workspaces of the user.  Files are read and written through the mount, so every program in it sees the changes.  Opening
a file for writing creates missing directories.

No path leads outside its workspace: symlinks are followed within it, and one that leads outside raises PermissionError,
even while other programs rename things.  Nothing is cached; a listing is always current.

Threading: no state, any thread.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

from fsspec.spec import AbstractFileSystem

from protocol.adapters.host_files import HostFiles
from protocol.adapters.path_files import ResolvedPath, resolve
from protocol.adapters.plain_filesystem import copy_access
from protocol.errors import os_error
from protocol.linux.portable import proc_path
from protocol.paths import located
from vfsd.client.workspace import Workspace
from vfsd.machine.mountinfo import workspace_mount
from vfsd.machine.runtime import WorkspaceRecord, read_record, read_records

_FLAGS: Final = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+b": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "x+b": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
_ALWAYS: Final = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # O_NONBLOCK: a fifo must not block


class VfsdFileSystem(AbstractFileSystem):
    """See the module.  FileNotFoundError also for a workspace that is not running, ValueError for the root itself."""

    protocol = "vfsd"
    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return [each.lstrip("/") for each in stripped] if isinstance(stripped, list) else stripped.lstrip("/")

    def workspace(self, path: str) -> Workspace:
        """Return the workspace that `path` is in, for its snapshots: `fs.workspace("agent").snapshot("before")`."""
        return Workspace.attach(_record(self._split(path)[0]).name)

    # -- reading ------------------------------------------------------------------------------
    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the attributes of `path`: those that fsspec defines, and those of `LocalFileSystem`."""
        stripped = self._strip_protocol(path)
        if not stripped:
            return _directory("")
        with self._at(path) as place:
            found = _attributes(stripped, os.fstat(place.node), is_link=place.is_symlink)
        if place.is_symlink:
            with self._parent_of(path) as (parent, name):
                found["destination"] = os.readlink(name, dir_fd=parent.node)
        return found

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a directory, or the running workspaces.

        A symlink has the type of the file that it leads to; if it leads to a directory, outside the workspace or
        nowhere, it has the type "other", so that no recursion follows it.
        """
        stripped = self._strip_protocol(path)
        if not stripped:
            found = [_directory(record.name) for record in read_records() if record.alive]
        elif (own := self.info(path))["type"] != "directory":
            found = [own]
        else:
            with self._at(path) as place:
                found = list(self._entries(stripped, place))
        return found if detail else [entry["name"] for entry in found]

    def _entries(self, path: str, place: ResolvedPath) -> Generator[dict[str, Any]]:
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.node)
        try:
            for name in sorted(os.listdir(directory)):
                with suppress(FileNotFoundError):  # removed meanwhile
                    entry = f"{path}/{name}"
                    seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    yield self._link(entry, seen) if stat.S_ISLNK(seen.st_mode) else _attributes(entry, seen)
        finally:
            os.close(directory)

    def _link(self, path: str, seen: os.stat_result) -> dict[str, Any]:
        with suppress(OSError):
            found = self.info(path)
            return found if found["type"] == "file" else {**found, "type": "other"}
        return _attributes(path, seen, is_link=True)

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def lexists(self, path: str, **_: Any) -> bool:
        """Whether there is an entry at `path`, a symlink that leads nowhere included."""
        try:
            with self._parent_of(path) as (parent, name):
                os.stat(name, dir_fd=parent.node, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except ValueError:  # the root of a workspace
            return self.exists(path)
        return True

    def created(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["created"], tz=UTC)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    # -- files --------------------------------------------------------------------------------
    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,  # noqa: ARG002 the kernel has a cache
        autocommit: bool = True,
        cache_options: Any = None,  # noqa: ARG002 likewise
        **_: Any,
    ) -> BinaryIO:
        """Open a file; see `AbstractFileSystem.open`.

        In a transaction (`with fs.transaction:`) a file that is written appears, complete, when the block ends.
        """
        flags = _FLAGS.get(mode)
        if flags is None:
            raise ValueError(f"no mode of a file: {mode!r}")
        if not autocommit and mode in {"wb", "xb"}:
            return _Uncommitted(self, path, exclusive=mode == "xb")
        return os.fdopen(self._descriptor(path, flags), mode)  # type: ignore[return-value]

    def _descriptor(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            self._make_parents(path)
        with self._at(path, may_miss=bool(flags & os.O_CREAT)) as place, located(path):
            if place.missing:
                # O_EXCL: another program that creates it meanwhile could create a symlink.
                return os.open(place.missing[0], flags | os.O_EXCL | _ALWAYS, 0o666, dir_fd=place.node)
            if flags & os.O_EXCL:
                raise os_error(errno.EEXIST)
            if place.is_dir:
                raise os_error(errno.EISDIR)
            if not place.is_file:
                raise OSError(errno.EINVAL, "not a regular file")
            return os.open(proc_path(place.node), (flags & ~os.O_CREAT) | _ALWAYS)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy a file with its mode; make a directory where `path1` is one.  SameFileError if both are one file."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with os.fdopen(self._descriptor(path1, os.O_RDONLY), "rb") as source:
            seen = os.fstat(source.fileno())
            if self.exists(path2):
                with self._at(path2) as place:
                    if os.path.samestat(seen, os.fstat(place.node)):
                        raise shutil.SameFileError(errno.EINVAL, "source and target are the same file", path1)
            with os.fdopen(self._descriptor(path2, _FLAGS["wb"]), "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                os.fchmod(target.fileno(), stat.S_IMODE(seen.st_mode))

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Create an empty file.  If there is one, set its times to now, and empty it unless `truncate` is False."""
        descriptor = self._descriptor(path, _FLAGS["wb"] if truncate else _FLAGS["ab"])
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    # -- names --------------------------------------------------------------------------------
    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        if create_parents:
            self._make_parents(path)
        with self._parent_of(path) as (parent, name), located(path):
            os.mkdir(name, dir_fd=parent.node)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with suppress(FileNotFoundError):
            kind = self.info(path)["type"]
            if kind != "directory" or not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return
        self._make_parents(path)
        try:
            self.mkdir(path, create_parents=False)
        except FileExistsError:
            if not (exist_ok and self.isdir(path)):
                raise

    def _make_parents(self, path: str) -> None:
        name, below = self._split(path)
        directory = os.path.dirname(below)
        _record(name)
        if directory:
            self.makedirs(f"{name}/{directory}", exist_ok=True)

    def rmdir(self, path: str) -> None:
        with self._parent_of(path) as (parent, name), located(path):
            os.rmdir(name, dir_fd=parent.node)

    def rm_file(self, path: str) -> None:
        with self._parent_of(path) as (parent, name), located(path):
            os.unlink(name, dir_fd=parent.node)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and with `recursive` directories.  A symlink is removed itself."""
        if maxdepth is not None:
            super().rm(path, recursive=recursive, maxdepth=maxdepth)
            return
        for pattern in path if isinstance(path, list) else [path]:
            for each in [pattern] if self.lexists(pattern) else self.expand_path(pattern):
                with self._parent_of(each) as (parent, name), located(each):
                    if not stat.S_ISDIR(os.stat(name, dir_fd=parent.node, follow_symlinks=False).st_mode):
                        os.unlink(name, dir_fd=parent.node)
                    elif not recursive:
                        raise IsADirectoryError(errno.EISDIR, "is a directory: pass recursive=True to remove it", each)
                    else:
                        shutil.rmtree(name, dir_fd=parent.node)

    def mv(
        self, path1: str | list[str], path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Rename a file or directory; between workspaces, copy and remove it."""
        if isinstance(path1, list) or not self.lexists(path1):  # several, or a pattern
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        target = path2
        if path2.endswith("/") or self.isdir(path2):
            target = f"{path2.rstrip('/')}/{os.path.basename(path1.rstrip('/'))}"
        self._make_parents(target)
        with self._parent_of(path1) as (parent, name), self._parent_of(target) as (new_parent, new_name):
            try:
                os.rename(name, new_name, src_dir_fd=parent.node, dst_dir_fd=new_parent.node)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise OSError(error.errno, error.strerror, path1) from None
            else:
                return
        super().mv(path1, path2, recursive=recursive or self.isdir(path1), maxdepth=maxdepth, **kwargs)

    # -- places -------------------------------------------------------------------------------
    def _split(self, path: str) -> tuple[str, str]:
        """Return the workspace's name and the path in it.  ValueError for the root of all workspaces."""
        name, _, below = self._strip_protocol(path).partition("/")
        if not name:
            raise ValueError("a path begins with the name of a workspace: vfsd://WORKSPACE/PATH")
        if ".." in below.split("/"):
            raise ValueError(f"a path must not contain '..': {path!r}")
        return name, below

    @contextmanager
    def _at(self, path: str, *, may_miss: bool = False) -> Generator[ResolvedPath]:
        """Resolve `path` in its workspace, following symlinks."""
        name, below = self._split(path)
        record = _record(name)
        files = HostFiles(record.mountpoint, mount=workspace_mount(record.mountpoint, name))
        with located(path):
            place = resolve(files, os.fsencode(below), may_miss=may_miss)
        with place:
            if len(place.missing) > 1:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            yield place

    @contextmanager
    def _parent_of(self, path: str) -> Generator[tuple[ResolvedPath, str]]:
        """Resolve the directory of the entry `path`, and return the entry's name.  ValueError for a workspace."""
        name, below = self._split(path)
        directory, _, last = below.rpartition("/")
        if not last:
            raise ValueError(f"{path!r} is a workspace: `vfsd mount` and `vfsd unmount` make and remove workspaces")
        if last == ".":
            raise ValueError(f"{path!r} does not end in a name")
        with self._at(f"{name}/{directory}") as place:
            if not place.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            yield place, last


class _Uncommitted(io.BufferedWriter):
    """A file in a transaction: written under another name in the same directory, and renamed by `commit`."""

    def __init__(self, filesystem: VfsdFileSystem, path: str, *, exclusive: bool) -> None:
        self._filesystem = filesystem
        self._path = path
        self._exclusive = exclusive
        self._temporary = f"{path.rstrip('/')}.{uuid.uuid4().hex}.part"
        if exclusive and filesystem.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        descriptor = filesystem._descriptor(self._temporary, _FLAGS["xb"])  # noqa: SLF001 a part of that class
        super().__init__(io.FileIO(descriptor, "wb"))

    def commit(self) -> None:
        self.close()
        with self._filesystem._parent_of(self._temporary) as (parent, name):  # noqa: SLF001 as above
            target = os.path.basename(self._path.rstrip("/"))
            if self._exclusive:
                os.link(name, target, src_dir_fd=parent.node, dst_dir_fd=parent.node)
                os.unlink(name, dir_fd=parent.node)
                return
            with self._filesystem._at(self._path, may_miss=True) as old, self._filesystem._at(self._temporary) as new:  # noqa: SLF001
                if old.is_file:
                    copy_access(old.store, new.node, old.status, old.store.xattrs(old.node))
            os.rename(name, target, src_dir_fd=parent.node, dst_dir_fd=parent.node)

    def discard(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._temporary)


def _record(name: str) -> WorkspaceRecord:
    try:
        record = read_record(name)
    except ValueError:
        record = None
    if record is None or not record.alive:
        raise FileNotFoundError(errno.ENOENT, "no such workspace is running (`vfsd list` lists them)", name)
    return record


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _attributes(path: str, seen: os.stat_result, *, is_link: bool = False) -> dict[str, Any]:
    kind = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}.get(stat.S_IFMT(seen.st_mode), "other")
    return {
        "name": path,
        "size": seen.st_size if kind == "file" else 0,
        "type": kind,
        "created": seen.st_ctime,
        "islink": is_link,
        "mode": seen.st_mode,
        "uid": seen.st_uid,
        "gid": seen.st_gid,
        "mtime": seen.st_mtime,
        "ino": seen.st_ino,
        "nlink": seen.st_nlink,
    }
