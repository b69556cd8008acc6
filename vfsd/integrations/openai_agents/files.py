"""SandboxFiles: the file operations of a session, through the mount.  No path leads outside.

Errors are those of `BaseSandboxSession`, as the SDK's `UnixLocalSandboxSession` raises them.

`VfsdEditor` is the editor of `ApplyPatchTool` for the files of a workspace:

    with Workspace.mount("/tmp/agent", "overlay:project") as ws:
        agent = Agent(name="coder", tools=[ApplyPatchTool(editor=VfsdEditor(ws))])

Each of its changes of a file is complete, or does not happen.

Threading: any thread; no state.  Paths of `SandboxFiles` are absolute and normalised, as
`WorkspacePathPolicy` returns them.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, NoReturn

from agents import ApplyPatchOperation, ApplyPatchResult, apply_diff
from agents.sandbox.errors import (
    ExecNonZeroError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.files import EntryKind, FileEntry
from agents.sandbox.types import ExecResult, Permissions

from protocol.adapters.host_files import HostFiles
from protocol.adapters.path_files import ResolvedPath, resolve
from protocol.adapters.plain_filesystem import PlainPathFilesystem
from protocol.linux.portable import proc_path
from protocol.streams import ByteReader
from vfsd.client.workspace import Workspace, WorkspaceBase
from vfsd.integrations.files import NO_LIMITS, files_of


class SandboxFiles:
    """The workspace at `root`, and the directories of `grants`: paths as the agent sees them, and on this host."""

    def __init__(self, workspace: WorkspaceBase, root: PurePosixPath, grants: Mapping[PurePosixPath, str]) -> None:
        own = HostFiles(workspace.path, mount=workspace.mount_id)
        roots = {root: own, **{path: HostFiles(directory) for path, directory in grants.items()}}
        # The longest first, so that a grant inside another one is found.
        self._roots: Final = dict(sorted(roots.items(), key=lambda item: -len(item[0].parts)))

    def _located(self, path: Path) -> tuple[HostFiles, str]:
        """Return the directory that contains `path`, and the path in it ("." for the directory itself)."""
        for root, files in self._roots.items():
            if path.is_relative_to(root):
                return files, str(path.relative_to(root))
        raise PermissionError(errno.EACCES, "outside the workspace", str(path))

    def _filesystem(self, path: Path) -> tuple[PlainPathFilesystem, str]:
        files, name = self._located(path)
        return PlainPathFilesystem(files, limits=NO_LIMITS), name

    @contextmanager
    def _place(self, path: Path, *, follow: bool = True) -> Iterator[ResolvedPath]:
        files, name = self._located(path)
        with resolve(files, os.fsencode(name), follow=follow) as place:
            yield place

    # -- reading ------------------------------------------------------------------------------
    def read(self, path: Path, shown: Path, max_bytes: int | None = None) -> io.BytesIO:
        """Return the content, or its first `max_bytes` bytes.  Errors name the path `shown`."""
        try:
            files, name = self._filesystem(path)
            with files.open_read(name) as reader:
                return io.BytesIO(reader.read() if max_bytes is None else _prefix(reader, max_bytes))
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=shown, cause=error) from error
        except (OSError, ValueError) as error:
            raise WorkspaceArchiveReadError(path=shown, cause=error) from error

    def entries(self, path: Path) -> list[FileEntry]:
        """List a directory.  ExecNonZeroError, as from ls(1), if it cannot be listed."""
        try:
            with self._place(path) as place:
                directory = os.open(proc_path(place.node), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with os.scandir(directory) as found:
                    return [_entry(path, each) for each in found]
            finally:
                os.close(directory)
        except OSError as error:
            _raise_nonzero(error, "ls", "-la", "--", str(path))

    def is_same(self, left: Path, right: Path, *, follow_symlinks: bool) -> bool:
        """Return whether two paths lead to one file.  Without `follow_symlinks` a symlink is like no other file."""
        try:
            with self._place(left, follow=follow_symlinks) as a, self._place(right, follow=follow_symlinks) as b:
                if stat.S_ISLNK(a.status.mode) or stat.S_ISLNK(b.status.mode):
                    return False
                return os.path.samestat(os.fstat(a.node), os.fstat(b.node))
        except FileNotFoundError:
            return False
        except OSError as error:
            _raise_nonzero(error, "test", str(left), "-ef", str(right))

    # -- changing -----------------------------------------------------------------------------
    def write(self, path: Path, content: io.IOBase) -> None:
        """Write a file, creating missing directories.  Readers see either the old content or the new one."""
        with _write_errors(path):
            files, name = self._filesystem(path)
            with files.open_write(name) as writer:
                shutil.copyfileobj(content, writer)

    def create(self, path: Path, content: io.IOBase) -> None:
        """Write a new file.  FileExistsError if there is something at `path`.  A failure leaves nothing behind."""
        with _write_errors(path, passed=FileExistsError):
            files, name = self._filesystem(path)
            with files.open_write(name, mode="create") as writer:
                shutil.copyfileobj(content, writer)

    def mkdir(self, path: Path, *, parents: bool) -> None:
        """Create a directory; it may exist."""
        with _write_errors(path):
            files, name = self._filesystem(path)
            files.mkdir(name, parents=parents)

    def remove(self, path: Path, *, recursive: bool) -> None:
        """Remove an entry, a symlink rather than its target.  Nothing there is an error unless `recursive`."""
        try:
            with _write_errors(path, passed=FileNotFoundError):
                files, name = self._filesystem(path)
                files.delete(name, recursive=recursive)
        except FileNotFoundError as error:
            if not recursive:
                _raise_nonzero(error, "rm", "--", str(path))

    def rename(self, source: Path, destination: Path) -> None:
        """Rename a regular file or a symlink, replacing a file at `destination`.  ExecNonZeroError as from mv(1)."""
        try:
            with self._place(source.parent) as old, self._place(destination.parent) as new:
                mode = os.stat(source.name, dir_fd=old.node, follow_symlinks=False).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                    raise OSError(errno.EINVAL, "Move source must be a regular file or symlink", str(source))  # noqa: TRY301
                os.rename(source.name, destination.name, src_dir_fd=old.node, dst_dir_fd=new.node)
        except OSError as error:
            _raise_nonzero(error, "mv", "-f", "--", str(source), str(destination))


def _prefix(reader: ByteReader, max_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < max_bytes and (piece := reader.read(max_bytes - len(content))):
        content += piece
    return bytes(content)


def _entry(directory: Path, entry: os.DirEntry[str]) -> FileEntry:
    seen = entry.stat(follow_symlinks=False)
    kinds = {stat.S_IFLNK: EntryKind.SYMLINK, stat.S_IFDIR: EntryKind.DIRECTORY, stat.S_IFREG: EntryKind.FILE}
    kind = kinds.get(stat.S_IFMT(seen.st_mode), EntryKind.OTHER)
    return FileEntry(
        path=str(directory / entry.name),
        # `Permissions.from_mode` takes each type whose number shares a bit with S_IFDIR for a directory.
        permissions=Permissions.from_mode(seen.st_mode).model_copy(update={"directory": kind == EntryKind.DIRECTORY}),
        owner=str(seen.st_uid),
        group=str(seen.st_gid),
        size=seen.st_size,
        kind=kind,
    )


@contextmanager
def _write_errors(path: Path, *, passed: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Raise WorkspaceArchiveWriteError for the errors of the block, except `passed`."""
    try:
        yield
    except passed:
        raise
    except (OSError, ValueError) as error:
        raise WorkspaceArchiveWriteError(path=path, cause=error) from error


def _raise_nonzero(error: OSError, *command: str) -> NoReturn:
    done = ExecResult(stdout=b"", stderr=str(error).encode(), exit_code=1)
    raise ExecNonZeroError(done, command=command, cause=error) from error


# -- the editor ------------------------------------------------------------------------------------
class VfsdEditor:
    """Implements `agents.ApplyPatchEditor`.  Paths are relative to the workspace, or absolute and below its mountpoint.

    A change that cannot be made is a result with the status "failed", which the model sees.  ConnectionError if the
    workspace is not mounted any more or its daemon is gone.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace: Final = workspace
        self._files: Final = files_of(workspace)

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Create a file, delete a file or a symlink, or apply a diff to a file of UTF-8 text and move it to `move_to`.

        It is "failed" to create a file that exists, and to delete a directory.
        """
        try:
            return ApplyPatchResult(status="completed", output=self._changed(operation))
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            return ApplyPatchResult(status="failed", output=f"{operation.path}: {error}")

    create_file = delete_file = update_file

    def _changed(self, operation: ApplyPatchOperation) -> str:
        path, diff = self._below(operation.path), operation.diff or ""
        if operation.type == "create_file":
            self._files.write_bytes(path, apply_diff("", diff, mode="create").encode(), mode="create")
            return f"Created {path}"
        if operation.type == "delete_file":
            self._files.delete(path)
            return f"Deleted {path}"
        with self._files.open_read(path) as reader:
            content = apply_diff(reader.read().decode("utf-8"), diff).encode()
        target = path if operation.move_to is None else self._below(operation.move_to)
        if target == path:
            self._files.write_bytes(path, content)
            return f"Updated {path}"
        self._files.write_bytes(target, content, mode="create")
        self._files.delete(path)
        return f"Updated {path} and moved it to {target}"

    def _below(self, path: str) -> str:
        """Return `path` relative to the workspace.  ValueError if it leads outside."""
        name = posixpath.relpath(posixpath.join(self._workspace.path, path), self._workspace.path)
        if name == ".." or name.startswith("../"):
            raise ValueError(f"outside the workspace {self._workspace.path}")
        return name
