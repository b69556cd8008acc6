"""VfsdWorkspaceSection: WINK's `WorkspaceSection` on a workspace, with tools and snapshots.

    section = VfsdWorkspaceSection(session=session, mounts=[HostMount(host_path="project")])
    prompt = Prompt(PromptTemplate(ns="demo", key="fix", sections=[section]))

A section mounts a workspace of its own, or uses a running one.  Clones share the workspace and its filesystem, as with
WINK's section: the last one that is cleaned up unmounts the workspace.

Threading: any thread; `_Shared.lock` is held while a clone is counted or discounted.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Unpack
from uuid import uuid4

from weakincentives.errors import SnapshotError, SnapshotRestoreError
from weakincentives.filesystem import FilesystemSnapshot
from weakincentives.prompt import workspace as wink
from weakincentives.prompt.workspace import HostMount, HostMountPreview, WorkspaceSection
from weakincentives.runtime import Session
from weakincentives.runtime.session import append_all, replace_latest
from weakincentives.runtime.session.slice_policy import SlicePolicy

from protocol.archive.manifest import read_manifest
from protocol.drafts import default_directory
from protocol.linux.regular_file import write_atomically
from protocol.tools import DirectoryCreated, FileDeleted, FileEdited, FileEvent, FileWritten, ToolContext
from vfsd.client.arguments import FilePath, MountArguments
from vfsd.client.log import MountEvents
from vfsd.client.workspace import Workspace, unmounting
from vfsd.integrations.files import name_of
from vfsd.integrations.weakincentives.filesystem import VfsdFilesystem
from vfsd.integrations.weakincentives.snapshots import CHECKPOINT_SUFFIX, Checkpoints, FilesystemSnapshotManager
from vfsd.integrations.weakincentives.tools import wink_tools

_IN_MEMORY: Final = ("memory", "overlay:")  # backends whose snapshots go with the daemon
_EVENTS: Final = (FileWritten, FileEdited, FileDeleted, DirectoryCreated)


@dataclass(frozen=True, slots=True)
class FilesystemSnapshotRef:
    """The archive that `export_snapshot` wrote last, as part of the session's state.  Sizes are of the content."""

    archive_path: str | None = None
    file_count: int = 0
    total_bytes: int = 0


@dataclass(slots=True)
class _Shared:
    """The state that a section and its clones have in common.

    `sections` counts those that were not cleaned up; `subscriptions` has the way to end each session's subscription,
    and the number of sections that need it.  Invariant: the workspace is released exactly when `sections` becomes 0.
    """

    filesystem: VfsdFilesystem
    tools: tuple[Any, ...]
    archives: FilesystemSnapshotManager
    directory: Path  # of archives and checkpoints
    is_default_directory: bool  # one for this session
    release: Callable[[], None]  # the workspace
    lock: threading.Lock = field(default_factory=threading.Lock)
    sections: int = 0
    mount_events: MountEvents | None = None
    keeps_checkpoints: bool = True  # False: the snapshots go with the workspace
    subscriptions: dict[Session, tuple[Callable[[], None], int]] = field(default_factory=dict)

    def enter(self, session: Session) -> None:
        """Count a section of `session`.  RuntimeError if the last one was cleaned up."""
        with self.lock:
            if self.sections < 0:
                raise RuntimeError("the section was cleaned up, and its workspace is gone: make a new section")
            self.sections += 1
            known = self.subscriptions.get(session)
            if known is None:
                _register(session)
                known = (self.filesystem.workspace.filesystem.events.subscribe(session.dispatch), 0)
            self.subscriptions[session] = (known[0], known[1] + 1)

    def leave(self, session: Session) -> None:
        """Discount a section of `session`, and release the workspace after the last one."""
        with self.lock:
            unsubscribe, count = self.subscriptions.pop(session)
            if count > 1:
                self.subscriptions[session] = (unsubscribe, count - 1)
            else:
                unsubscribe()
            self.sections -= 1
            if self.sections == 0:
                self.sections = -1
                if self.mount_events is not None:
                    self.mount_events.close()
                self.release()
                if not self.keeps_checkpoints:
                    for path in self.directory.glob(f"*{CHECKPOINT_SUFFIX}"):
                        path.unlink(missing_ok=True)
                if self.is_default_directory:
                    with contextlib.suppress(OSError):  # it has archives or checkpoints
                        self.directory.rmdir()


class VfsdWorkspaceSection(WorkspaceSection):
    """WINK's `WorkspaceSection` whose directory is a workspace.  `filesystem` is a `VfsdFilesystem`.

    The host mounts are copied into the workspace, as WINK's section does.  If that fails, nothing is left behind.

    mounts: copied into the workspace.  A target that exists there, in a running workspace or in the directory of a
        backend, is refused (FileExistsError).
    workspace: a running workspace, or its name, which `cleanup` leaves mounted.  None: a new one is mounted, which the
        last `cleanup` unmounts.  That discards content in memory, as WINK's section removes its directory.
    path: where the new workspace is mounted.  None: a temporary directory, which `cleanup` removes.
    backend, and further arguments: those of `Workspace.mount`.
    snapshot_dir: where archives and checkpoints are kept, outside the workspace.  None: a directory for the session
        below "wink-fs-snapshots" in the directory for temporary files.
    tools: whether the agent gets vfsd's tools for files, and for commands if the workspace can run them.  An agent that
        brings tools of its own, such as Claude Code or Codex, works in the directory without them.
    mount_events: whether the session also gets a FileWritten for each file that other programs write through the mount,
        such as the commands of a shell (`vfsd.client.log`).  Off by default, because a slice with the policy
        LOG keeps every event, and a build writes thousands of files.

    The session gets an event for each file that is written through `filesystem`, through `workspace.filesystem` or by
    the tools: FileWritten, FileEdited, FileDeleted and DirectoryCreated of `protocol.tools`, in slices with the policy
    LOG.  Clones share the filesystem, so each of their sessions gets the events of all.

    Errors: those of `Workspace.mount` and of WINK's section; TypeError for a running workspace and arguments of a new
    one.
    """

    def __init__(
        self,
        *,
        session: Session,
        mounts: Sequence[HostMount] = (),
        allowed_host_roots: Sequence[os.PathLike[str] | str] = (),
        accepts_overrides: bool = False,
        key: str = "workspace",
        workspace: Workspace | str | None = None,
        path: FilePath | None = None,
        backend: str | None = None,
        snapshot_dir: FilePath | None = None,
        tools: bool = True,
        mount_events: bool = False,
        **arguments: Unpack[MountArguments],
    ) -> None:
        if workspace is None:
            found, release = _mounted(path, backend or "memory", arguments)
        elif path is not None or backend is not None or arguments:
            raise TypeError("a running workspace takes no path, no backend and no other argument of a mount")
        else:
            found = workspace if isinstance(workspace, Workspace) else Workspace.attach(name_of(workspace))
            release = _nothing
        is_empty = workspace is None and backend in {None, "memory"} and arguments.get("archive") is None
        try:
            previews = _copied(found, mounts, [Path(root) for root in allowed_host_roots], is_empty=is_empty)
            shared = _shared(found, session, snapshot_dir, release, tools=tools)
            if mount_events:
                events = shared.filesystem.workspace.filesystem.events
                shared.mount_events = MountEvents(found, found.path, events)
            shared.keeps_checkpoints = workspace is not None or not (backend or "memory").startswith(_IN_MEMORY)
        except BaseException:
            release()
            raise
        self._begin(
            shared,
            session=session,
            mounts=mounts,
            allowed_host_roots=allowed_host_roots,
            accepts_overrides=accepts_overrides,
            key=key,
            _mount_previews=previews,
        )

    def _begin(self, shared: _Shared, *, session: Session, **arguments: Any) -> None:
        """Initialise a new section or a clone, which uses `shared`."""
        shared.enter(session)
        self._shared = shared
        self._is_clean = False
        self._checkpoints = Checkpoints(session, shared.filesystem, shared.directory)
        super().__init__(
            session=session, _temp_dir=Path(shared.filesystem.root), _filesystem=shared.filesystem, **arguments
        )
        self._tools = self._normalize_tools(shared.tools)

    @property
    def workspace(self) -> Workspace:
        """The workspace: diff, undo, fork, export, and everything else that vfsd does."""
        return self._shared.filesystem.workspace

    @property
    def snapshots(self) -> FilesystemSnapshotManager:
        """Snapshots as archives, which outlive the workspace.  `filesystem.snapshot` takes the fast ones."""
        return self._shared.archives

    @property
    def checkpoints(self) -> Checkpoints:
        """Snapshots of this section's session and of the files, under one id."""
        return self._checkpoints

    def export_snapshot(
        self, archive_path: FilePath | None = None, *, overwrite: bool = False
    ) -> FilesystemSnapshotRef:
        """Write all files to an archive, and record it in the session's state.

        `archive_path` is None for a new name in the directory of `.snapshots`.  Take the session's snapshot afterwards:
        it has the path.  SnapshotError if the archive cannot be written, or exists and `overwrite` is not set.
        RuntimeWarning names what an archive cannot contain.
        """
        path = self._shared.directory / f"{uuid4()}.fs.zip" if archive_path is None else Path(archive_path).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            done = self.workspace.export(path, overwrite=overwrite)
        except (OSError, ValueError) as error:
            raise SnapshotError(
                f"no archive of the workspace {self.workspace.name} could be written: {error}"
            ) from error
        if done.skipped:
            shown = ", ".join(f"{name} ({reason})" for name, reason in list(done.skipped.items())[:3])
            text = f"{path} lacks {len(done.skipped)} paths that an archive cannot contain: {shown}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        ref = FilesystemSnapshotRef(str(path), done.files, done.total_bytes)
        self.session[FilesystemSnapshotRef].seed(ref)
        return ref

    def restore_from_snapshot(self, archive_path: FilePath | None = None) -> int:
        """Make the files equal to an archive, and return how many files it has.

        `archive_path` is None for the archive that the session's state names.  SnapshotRestoreError if there is none,
        or if it cannot be restored; nothing has changed then.
        """
        if archive_path is None:
            ref = self.session[FilesystemSnapshotRef].latest()
            if ref is None or ref.archive_path is None:
                raise SnapshotRestoreError("the session names no archive: call export_snapshot first, or pass a path")
            archive_path = ref.archive_path
        try:
            count = read_manifest(archive_path).file_count
            self.workspace.filesystem.import_archive(archive_path)
        except OSError as error:
            raise SnapshotRestoreError(f"{os.fspath(archive_path)} could not be restored: {error}") from error
        return count

    def clone(self, **kwargs: Any) -> VfsdWorkspaceSection:
        """Return a section for the session `session` that shares the workspace and its filesystem.

        TypeError without a session, or if `dispatcher` is not the session's.  RuntimeError after the last `cleanup`.
        """
        session, dispatcher = kwargs.get("session"), kwargs.get("dispatcher")
        if not isinstance(session, Session):
            raise TypeError("session is required to clone VfsdWorkspaceSection.")
        if dispatcher is not None and dispatcher is not session.dispatcher:
            raise TypeError("Provided dispatcher must match the target session's dispatcher.")
        made = type(self).__new__(type(self))
        made._begin(  # noqa: SLF001 a method of this class
            self._shared,
            session=session,
            mounts=self._mounts,
            allowed_host_roots=self._allowed_host_roots,
            accepts_overrides=self._accepts_overrides,
            key=self._key,
            _mount_previews=self._mount_previews,
            _created_at=self._created_at,
        )
        return made

    def cleanup(self) -> None:
        """End the session's subscription.  The last section unmounts a workspace that was mounted for it.

        What was neither exported nor applied is discarded with it, and so are the checkpoints of a workspace in memory.
        A second call does nothing.
        """
        if not self._is_clean:
            self._is_clean = True
            self._shared.leave(self._session)


# -- making a section -----------------------------------------------------------------------------
def _nothing() -> None:
    """Release a workspace that is not the section's own."""


def _mounted(path: FilePath | None, backend: str, arguments: MountArguments) -> tuple[Workspace, Callable[[], None]]:
    """Mount a workspace; return it with the function that unmounts it."""
    place = tempfile.mkdtemp(prefix="vfsd-workspace-") if path is None else os.path.abspath(path)

    def remove() -> None:
        if path is None:
            with contextlib.suppress(OSError):  # it is not empty if something was written after the unmount
                os.rmdir(place)

    try:
        workspace = Workspace.mount(place, backend, **arguments)
    except BaseException:
        remove()
        raise

    def release() -> None:
        with unmounting(workspace):
            workspace.unmount(lazy=True)
        remove()

    return workspace, release


def _copied(
    workspace: Workspace, mounts: Sequence[HostMount], roots: list[Path], *, is_empty: bool
) -> tuple[HostMountPreview, ...]:
    """Copy the host mounts into the workspace.  Unless it is empty: all or nothing, and nothing is replaced."""
    top = Path(workspace.path)
    copies = []
    for mount in mounts:
        source = wink._resolve_mount_path(mount.host_path, roots)  # noqa: SLF001 the extra is pinned for these
        name = mount.mount_path or Path(mount.host_path).name
        target = top / name
        wink._validate_mount_target(target, top, name)  # noqa: SLF001
        if not is_empty and os.path.lexists(target):
            raise FileExistsError(f"{name} exists in the workspace {workspace.name}: choose another mount_path")
        copies.append((source, target, mount))
    undo_all = contextlib.nullcontext() if is_empty or not copies else workspace.transaction("host mounts")
    with undo_all:
        return tuple(wink._copy_mount_to_temp(*each) for each in copies)  # noqa: SLF001


def _shared(
    workspace: Workspace, session: Session, snapshot_dir: FilePath | None, release: Callable[[], None], *, tools: bool
) -> _Shared:
    filesystem = VfsdFilesystem(workspace)
    directory = Path(default_directory(), str(session.session_id)) if snapshot_dir is None else Path(snapshot_dir)
    archives = FilesystemSnapshotManager(filesystem, directory)
    made = wink_tools(_tool_context(workspace)) if tools else ()
    return _Shared(filesystem, made, archives, directory.absolute(), snapshot_dir is None, release)


def _tool_context(workspace: Workspace) -> ToolContext:
    events = workspace.filesystem.events

    def publish(event: FileEvent) -> None:
        if not isinstance(event, FileWritten | FileDeleted):  # the filesystem publishes these itself
            events(event)

    can_run = workspace.status().commands is not None
    return ToolContext(workspace.filesystem, publish, workspace.executor if can_run else None)


def _register(session: Session) -> None:
    """Register what a section keeps in a session.  A session may have several sections, and clones have it already."""
    known = session._registry  # noqa: SLF001 registering a reducer twice would record each event twice
    for event in _EVENTS:
        if not known.has_registrations(event):
            session[event].register(event, append_all, policy=SlicePolicy.LOG)
    if not known.has_registrations(FilesystemSnapshot):
        session[FilesystemSnapshot].register(FilesystemSnapshot, append_all)
    if not known.has_registrations(FilesystemSnapshotRef):
        session[FilesystemSnapshotRef].register(FilesystemSnapshotRef, replace_latest)


# -- dumps -----------------------------------------------------------------------------------------
def dump_session_tree(
    session: Session, target: FilePath, *, filesystem_section: VfsdWorkspaceSection | None = None
) -> Path | None:
    """Write `<session id>.jsonl`, and with a section `<session id>.fs.zip`, to a directory, and return the first path.

    `target` is that directory, or a file in it, whose own name does not count.  The JSONL file has a line for each
    session that has any state: `session` first, then its children.  `Snapshot.from_json` reads a line, and
    `FilesystemSnapshotManager.restore` the archive.  Both files replace those of an earlier dump of the same session,
    each in one step.  None if no session has any state; the archive is written nevertheless.

    The archive is written first, so that the session's state names it (`FilesystemSnapshotRef`).  Errors: those of
    `VfsdWorkspaceSection.export_snapshot`; OSError.
    """
    place = Path(target).expanduser().absolute()
    directory = place if place.is_dir() or not place.suffix else place.parent
    directory.mkdir(parents=True, exist_ok=True)
    name = str(session.session_id)
    if filesystem_section is not None:
        filesystem_section.export_snapshot(directory / f"{name}.fs.zip", overwrite=True)
    states = [each.snapshot(include_all=True) for each in _top_down(session, set())]
    lines = [state.to_json() for state in states if state.slices]
    if not lines:
        return None
    path = directory / f"{name}.jsonl"
    write_atomically(str(path), ("\n".join(lines) + "\n").encode(), durable=True)
    return path


def _top_down(session: Session, seen: set[Session]) -> Iterator[Session]:
    if session not in seen:
        seen.add(session)
        yield session
        for child in session.children:
            yield from _top_down(child, seen)
