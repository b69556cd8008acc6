"""VfsdSnapshot: the saved state of a session as a snapshot of its workspace.

Saving it does not depend on the size of the workspace.  The snapshot lives in the workspace's daemon, and ends with it.
It is found by its tag, so that the object names the newest state that was saved with its `id`, in any process.

`VfsdSandboxClientOptions` and `VfsdSandboxSessionState`, which a later process resumes, convert to JSON.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from agents.sandbox.errors import SnapshotNotRestorableError, SnapshotPersistError, SnapshotRestoreError
from agents.sandbox.session import Dependencies
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec
from agents.sandbox.util.tar_utils import rebase_symlink_target
from pydantic import ConfigDict, Field

from protocol.archive.read import open_archive
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry, filled
from vfsd.client.async_connection import abandon
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.results import Snapshot
from vfsd.machine.runtime import read_record

_SPOOL_BYTES: Final = 16 << 20  # of a tar stream in memory


class VfsdSnapshot(SnapshotBase):
    """Implements `SnapshotBase` by snapshots of `workspace` with the tag "openai-agents ID".

    `workspace` None: the one of the session that it is passed to.  Each save adds a snapshot; `vfsd snapshots` lists
    the earlier ones, too.
    """

    type: Literal["vfsd"] = "vfsd"
    workspace: str | None = None

    @property
    def tag(self) -> str:
        return f"openai-agents {self.id}"

    async def persist(self, data: io.IOBase, *, dependencies: Dependencies | None = None) -> None:  # noqa: ARG002
        """Raise SnapshotPersistError: sessions of `VfsdSandboxClient` save natively, and no others can."""
        reason = "only sessions of VfsdSandboxClient save to a VfsdSnapshot: use LocalSnapshotSpec"
        raise SnapshotPersistError(snapshot_id=self.id, path=self._path(), cause=TypeError(reason))

    async def restore(self, *, dependencies: Dependencies | None = None) -> io.IOBase:  # noqa: ARG002
        """Return the newest saved state as a tar stream, for sessions of other workspaces and clients.

        SnapshotNotRestorableError if nothing was saved or the workspace does not run any more.
        """
        found = await self.found()
        if found is None:
            raise SnapshotNotRestorableError(snapshot_id=self.id, path=self._path())
        workspace, snapshot = found
        try:
            return await tar_stream(workspace, snapshot.name, lambda _: True, root=workspace.path)
        except (OSError, tarfile.TarError) as error:
            raise SnapshotRestoreError(snapshot_id=self.id, path=self._path(), cause=error) from error

    async def restorable(self, *, dependencies: Dependencies | None = None) -> bool:  # noqa: ARG002
        return await self.found() is not None

    async def found(self) -> tuple[AsyncWorkspace, Snapshot] | None:
        """Return the workspace and its newest snapshot with this tag; None if there is none."""
        workspace = await abandon(lambda: running(self.workspace))
        if workspace is None:
            return None
        try:
            saved = [each for each in await workspace.snapshots(changes=False) if each.tag == self.tag]
        except ConnectionError:  # it ended meanwhile
            return None
        return (workspace, saved[-1]) if saved else None

    def _path(self) -> Path:
        return Path(f"<vfsd:{self.workspace}>")


class VfsdSnapshotSpec(SnapshotSpec):
    """Saves the states of a session as snapshots of its workspace."""

    type: Literal["vfsd"] = "vfsd"

    def build(self, snapshot_id: str) -> SnapshotBase:
        return VfsdSnapshot(id=snapshot_id)


async def tar_stream(
    workspace: AsyncWorkspace, snapshot: str, chosen: Callable[[PurePosixPath], bool], *, root: str
) -> io.IOBase:
    """Return a snapshot as a tar stream with paths relative to the root, without the entries for which not `chosen`.

    Absolute symlinks to paths below `root` become relative; hard links become files of their own; fifos, sockets and
    devices are left out.  OSError (ENAMETOOLONG) for a path that archives cannot hold.
    """
    directory = await abandon(lambda: tempfile.TemporaryDirectory(prefix="vfsd-openai-"))
    try:
        archive = os.path.join(directory.name, "state.zip")
        exported = await workspace.export(archive, snapshot=snapshot)
        for path, reason in exported.skipped.items():
            if not reason.endswith("archived without"):  # only extended attributes, which a tar stream has not either
                raise OSError(errno.ENAMETOOLONG, reason, path)
        return await abandon(lambda: _tar_of(archive, chosen, root))
    finally:
        directory.cleanup()


def _tar_of(archive: str, chosen: Callable[[PurePosixPath], bool], root: str) -> io.IOBase:
    stream = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 the caller closes it
    try:
        # The daemon has just written it, and reading checks each file again.
        with open_archive(archive, check_content=False) as tree, tarfile.open(fileobj=stream, mode="w") as tar:
            for entry in tree.walk():
                name = os.fsdecode(entry.path)
                if chosen(PurePosixPath(name)):
                    _add(tar, tree, entry, name, root)
        stream.seek(0)
    except BaseException:
        stream.close()
        raise
    return stream


def _add(tar: tarfile.TarFile, tree: Tree, entry: TreeEntry, name: str, root: str) -> None:
    member = tarfile.TarInfo(f"./{name}" if name else ".")
    member.mode, member.mtime = entry.mode & 0o7777, entry.mtime_ns // 1_000_000_000
    member.uid, member.gid = entry.uid, entry.gid
    if entry.is_dir:
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    elif entry.is_symlink:
        member.type = tarfile.SYMTYPE
        member.linkname = rebase_symlink_target(os.fsdecode(entry.target), link_name=name, root=root)
        tar.addfile(member)
    elif entry.is_file:
        member.size = entry.size
        tar.addfile(member, _Chunks(tree, entry.path))


def check_end(tar: tarfile.TarFile) -> None:
    """Raise tarfile.ReadError if the stream does not end where an archive ends.

    At a damaged header, and at the end of a truncated stream, `tarfile` ends as at the end of a complete archive.
    """
    tar.getmembers()
    assert tar.fileobj is not None, "open for reading"
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"the archive is damaged or incomplete from byte {tar.offset} on")


class _Chunks:
    """The content of a file of a tree, for `TarFile.addfile`."""

    def __init__(self, tree: Tree, path: bytes) -> None:
        self._chunks = filled(tree.chunks(path))
        self._left = b""

    def read(self, size: int = CHUNK_BYTES, /) -> bytes:
        """Return exactly `size` bytes, fewer only at the end."""
        parts, count = [self._left], len(self._left)
        while count < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            parts.append(chunk)
            count += len(chunk)
        content = b"".join(parts)
        self._left = content[size:]
        return content[:size]


# -- the state of a session ------------------------------------------------------------------------
TYPE: Final = "vfsd"


class VfsdSandboxClientOptions(BaseSandboxClientOptions):
    """How a session's workspace is mounted: `path`, `backend` and the other arguments are those of `Workspace.mount`.

    `path` None: a new temporary directory.  The agent can run commands only with `exec_on_host=True` or a `sandbox`.
    `exposed_ports` are ports that the agent's servers listen on.
    """

    # Besides the fields, the arguments of `Workspace.mount`; it checks them when it mounts.
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["vfsd"] = TYPE
    path: str | None = None
    backend: str = "memory"
    exposed_ports: tuple[int, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Workspace.mount` besides the path and the backend."""
        return dict(self.model_extra or {})


class VfsdSandboxSessionState(SandboxSessionState):
    """The workspace of a session.

    `workspace_root_owned`: the client mounted the workspace for the session, with `options`.  `instance` identifies
    the daemon, because another workspace may later have the same name.
    """

    type: Literal["vfsd"] = TYPE
    workspace: str
    mountpoint: str
    instance: str = ""
    workspace_root_owned: bool = False
    is_temporary: bool = False  # the mountpoint was made for the session
    options: dict[str, Any] = Field(default_factory=dict)


def running(name: str | None) -> AsyncWorkspace | None:
    """Return the running workspace with that name; None if there is none.  Reads files."""
    record = read_record(name) if name else None
    return None if record is None or not record.alive else AsyncWorkspace(record, unmount_at_exit=False)


def instance_of(name: str) -> str:
    """Return a text that identifies the run of a workspace; "" if it does not run.  Reads files."""
    record = read_record(name)
    return "" if record is None or not record.alive else f"{record.started_at} {record.pid}"
