"""The operations on a workspace as requests: the parameters to send, and how to read the answer.  No I/O.

`Workspace`, `AsyncWorkspace` and the command line send the same `RemoteCall`s.  The two classes convert the daemon's
answer to a value of `vfsd.client.results`; the command line prints the answer itself.

`SnapshotCalls` has the requests behind the snapshots and archives of `WorkspaceFilesystem` and `AsyncFilesystem`.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
    runtime_checkable,
)

import msgspec

from protocol.errors import ArchiveError, SnapshotNotFoundError, check_type
from protocol.types import FilesystemSnapshot
from vfsd.client.arguments import FilePath, UserPath, wire_paths
from vfsd.client.connection import ControlError
from vfsd.client.results import Exported, Restored, Snapshot
from vfsd.operations.declaration import Peer
from vfsd.operations.forks import AdoptParams, ConflictsParams, ForkParams, MergeParams, RevertParams
from vfsd.operations.snapshots import (
    ApplyParams,
    DiffParams,
    DropParams,
    ExportParams,
    FromArchive,
    FromBelow,
    FromOther,
    FromSnapshot,
    ImportParams,
    Redo,
    RestoreParams,
    SaveParams,
    SaveResult,
    SnapshotParams,
    SnapshotsParams,
    Undo,
)
from vfsd.operations.workspace import LabelParams, LogParams, PolicyParams, UnmountParams, UpgradeParams, WatchParams
from vfsd.wire.messages import ProgressReport, wire_path
from vfsd.wire.options import BackendSpec

if TYPE_CHECKING:
    from vfsd.client.log import LoggedChange
    from vfsd.client.results import (
        Applied,
        Conflicts,
        Diff,
        Exported,
        Imported,
        Merged,
        Patch,
        Policy,
        Restored,
        Reverted,
        Snapshot,
        Status,
        Unmounted,
        Upgraded,
    )
    from vfsd.wire.options import Ready

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[ProgressReport], object]

# Longest first: ".tar.gz" ends in ".gz".
_OTHER_ARCHIVES: Final = (
    ".tar.bz2", ".tar.zst", ".tar.lz4", ".tar.gz", ".tar.xz", ".tar.lz", ".tar.z",
    ".cpio", ".tbz2", ".tzst", ".tar", ".tgz", ".tbz", ".txz", ".tlz", ".rar", ".bz2", ".zst", ".lz4", ".gz", ".xz",
    ".7z",
)  # fmt: skip


def upgrade_params(instead_of: int) -> UpgradeParams:
    """Return the parameters of an upgrade of the daemon `instead_of` to the version that this process has imported."""
    from vfsd.machine.daemon_start import daemon_environment  # noqa: PLC0415 (start-up: upgrades are rare)

    paths = filter(None, daemon_environment().get("PYTHONPATH", "").split(os.pathsep))
    return UpgradeParams(
        wire_path(os.fsencode(sys.executable)),
        [wire_path(os.fsencode(path)) for path in paths],
        instead_of,
    )


def _unchanged(answer: Any) -> Any:
    return answer


@runtime_checkable
class AnyWorkspace(Protocol):
    """A running workspace: a `Workspace`, an `AsyncWorkspace`, or a record of one."""

    @property
    def name(self) -> str: ...
    @property
    def socket(self) -> str: ...
    @property
    def instance(self) -> str: ...


class RemoteCall(msgspec.Struct, Generic[T], frozen=True):
    """One request: its method and parameters, and `result`, which converts the daemon's answer."""

    method: str
    params: Any = None
    result: Callable[[Any], T] = _unchanged
    on_progress: OnProgress | None = None
    on_output: Callable[[bytes], object] | None = None  # receives the output that precedes the answer


class Requests:
    """Build the requests for the workspace mounted at `mountpoint`.

    Paths in the workspace are relative to its root, or absolute and under its mountpoint.  With `cwd`, they are
    relative to that directory if it is in the workspace.  A path outside the workspace raises OSError (EINVAL).
    """

    def __init__(self, mountpoint: str, cwd: bytes | None = None) -> None:
        self._mountpoint = mountpoint
        self._cwd = cwd

    def _paths(self, paths: Iterable[UserPath]) -> list[str]:
        return wire_paths(paths, self._mountpoint, self._cwd)

    def fork(self, name: str, mountpoint: str, snapshot: str | None = None) -> RemoteCall[Ready]:
        """Make a workspace at `mountpoint` (absolute) that starts as a copy of this one."""
        params = ForkParams(name, wire_path(os.fsencode(mountpoint)), snapshot)
        return RemoteCall("fork", params, _to("Ready"))

    # -- snapshots --------------------------------------------------------------------------------
    def snapshot(
        self,
        name: str | None = None,
        *,
        tag: str | None = None,
        automatic: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Snapshot]:
        """Take a snapshot.  Without a `name`, the daemon chooses one ("snap-1", ...).

        An `automatic` snapshot in memory is dropped when `max_memory` is reached; on disk it is like any other.
        FileExistsError if the name is in use.  `on_progress` is called now and then while the daemon works, here and in
        the other methods: a snapshot of "host:DIR" is written to disk, which may take a while.
        """
        params = SnapshotParams(name=name, tag=tag, automatic=automatic)
        return RemoteCall("snapshot", params, _to("Snapshot"), on_progress)

    def snapshots(self, *, changes: bool = True) -> RemoteCall[list[Snapshot]]:
        """List the snapshots, oldest first.  `changes` counts what each one changed since the previous one."""
        to_snapshot = _to("Snapshot")
        return RemoteCall(
            "snapshots",
            SnapshotsParams(changes=changes),
            lambda answer: [to_snapshot(record) for record in answer.snapshots],
        )

    def drop(self, name: str, *others: str, force: bool = False) -> RemoteCall[None]:
        """Delete snapshots: all of the named ones or, if one does not exist (FileNotFoundError), none.

        OSError(EBUSY) if one of them is the base of a merge with a running workspace, such as a fork that was made from
        it; `force` drops it nevertheless.  An export or diff that is reading a snapshot completes.
        """
        return RemoteCall("drop", DropParams(name=name, also=list(others), force=force), lambda _: None)

    def drop_unneeded(self, created_at: Mapping[str, str]) -> RemoteCall[None]:
        """Delete the snapshots with these names and times, or none: see `DropParams`.  At least one."""
        name, *others = created_at
        return RemoteCall("drop", DropParams(name, others, created_at=dict(created_at)), lambda _: None)

    def restore(
        self,
        source: FilePath,
        paths: Iterable[UserPath] = (),
        *,
        of: str | None = None,
        store: FilePath | None = None,
        dry_run: bool = False,
        touch: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Restored]:
        """Restore the workspace, or `paths` in it, from a snapshot (a `str`) or a ZIP archive (a path object).

        Files that do not differ are not touched, and programs with open files continue.  The state before the restore
        is kept as a safety snapshot, which `undo` restores.  `dry_run` reports the changes without making them.
        `touch` gives the files whose content it changes one present mtime instead of the recorded ones, so that build
        tools notice them.

        With `of`, the backend of another workspace ("host:DIR"), the snapshot is read from that workspace's snapshots
        in the store at `store` (None: the daemon's own).
        """
        found: FromSnapshot | FromOther | FromArchive
        if not isinstance(source, str):
            if of is not None:
                raise ValueError("`of` needs a snapshot name, not an archive")
            found = FromArchive(_absolute(source))
        elif of is not None:
            found = FromOther(source, workspace_key(of), None if store is None else _absolute(store))
        else:
            found = FromSnapshot(source)
        params = RestoreParams(found, self._paths(paths), dry_run=dry_run, touch=touch)
        return RemoteCall("restore", params, _to("Restored"), on_progress)

    def undo(
        self,
        paths: Iterable[UserPath] = (),
        *,
        dry_run: bool = False,
        touch: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Restored]:
        """Undo the last step that was not undone yet; with `paths`, only below these.

        A step is a restore, import, merge, adoption, apply or discard that changed something.  The state before the
        undo is kept for `redo`.  FileNotFoundError if there is nothing to undo.  Undoing an apply does not change the
        directory that it wrote to.  Without `touch`, as for `restore`, files get the times back that they had.
        """
        params = RestoreParams(Undo(), self._paths(paths), dry_run=dry_run, touch=touch)
        return RemoteCall("restore", params, _to("Restored"), on_progress)

    def redo(
        self, *, dry_run: bool = False, touch: bool = False, on_progress: OnProgress | None = None
    ) -> RemoteCall[Restored]:
        """Redo the last step that was undone, including the changes that programs made between the step and its undo.

        The state before the redo is kept for `undo`.  FileNotFoundError if there is nothing to redo.
        """
        params = RestoreParams(Redo(), dry_run=dry_run, touch=touch)
        return RemoteCall("restore", params, _to("Restored"), on_progress)

    def apply(
        self,
        paths: Iterable[UserPath] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        conflicts: Literal["fail", "ours", "theirs", "markers"] = "fail",
        touch: bool = False,
    ) -> RemoteCall[Applied]:
        """Write the changes that an overlay holds, all or those below `paths`, into the directory below it.

        If other programs changed one of these files there, nothing is written unless `force` is set; see
        `Applied.conflicts`.  `touch`, as for `restore`, holds for the workspace and the directory.

        A workspace that was mounted with `frozen` is merged with the directory instead. `conflicts` says what happens
        to paths that cannot be merged: "fail" writes nothing, "ours" keeps those of the directory, "theirs" takes those
        of the workspace (as `force` does), "markers" is as for `merge`.
        """
        params = ApplyParams(paths=self._paths(paths), dry_run=dry_run, force=force, conflicts=conflicts, touch=touch)
        return RemoteCall("apply", params, _to("Applied"))

    def discard(
        self, paths: Iterable[UserPath] = (), *, dry_run: bool = False, touch: bool = False
    ) -> RemoteCall[Restored]:
        """Discard the changes that an overlay holds, all or those below `paths`; `undo` restores them.

        With `touch`, as for `restore`, the mtime of a discarded file is no change of the overlay.
        """
        params = RestoreParams(FromBelow(), self._paths(paths), dry_run=dry_run, touch=touch)
        return RemoteCall("restore", params, _to("Restored"))

    def diff(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        against: AnyWorkspace | str | None = None,
        complete: bool = True,
    ) -> RemoteCall[Diff]:
        """List the changes from snapshot `a` (None: the newest) to snapshot `b` (None: the live state).

        With `against`, list the changes from this workspace's live state to that of another workspace, which is given
        as for `merge`; then `a` and `b` are None.
        `include` and `exclude` are patterns in gitignore's syntax: with `include` only files that match are compared,
        and paths that match `exclude` are left out.  Without `complete`, only the first 10,000 changes are listed, and
        `Diff.truncated` says that there are more; `Diff.counts` counts all of them.
        """
        return self._compared("Diff", a, b, paths, include, exclude, against=_peer(against), stream=complete)

    def patch(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        include_git: bool = False,
        against: AnyWorkspace | str | None = None,
    ) -> RemoteCall[Patch]:
        """Make a patch of the changes that `diff` lists.  `git apply` accepts it, binary files included.

        `Patch.problems` names the changes that no patch can express.  `include_git` includes the content of `.git`,
        which `git apply` rejects.
        """
        others = {"mode": "patch", "include_git": include_git, "against": _peer(against)}
        return self._compared("Patch", a, b, paths, include, exclude, **others)

    def _compared(
        self,
        kind: str,
        a: str | None,
        b: str | None,
        paths: Iterable[UserPath],
        include: Iterable[str],
        exclude: Iterable[str],
        **others: Any,
    ) -> RemoteCall[Any]:
        """Build a `diff` whose answer and output become the class `kind` of `vfsd.client.results`."""
        params = DiffParams(a=a, b=b, paths=self._paths(paths), include=list(include), exclude=list(exclude), **others)
        pieces: list[bytes] = []
        return RemoteCall("diff", params, lambda answer: _to(kind)(answer, b"".join(pieces)), on_output=pieces.append)

    # -- forks ------------------------------------------------------------------------------------
    def merge(
        self,
        fork: AnyWorkspace | str,
        paths: Iterable[UserPath] = (),
        *,
        conflicts: Literal["fail", "ours", "theirs", "markers"] = "fail",
        tool: str | None = None,
        dry_run: bool = False,
        touch: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Merged]:
        """Take over the changes that `fork` has made since it was merged last, or since the fork.

        `fork` is a workspace object, or the name of a running workspace or a path in it: a fork of this one, its
        source, or another fork of the same workspace.  Paths that both have changed are merged by the rules of
        docs/forks.md.  `conflicts` says what happens to paths that cannot be merged.  With "fail" nothing is changed if
        there are any; "ours" keeps this workspace's version, "theirs" takes the fork's, and "markers" writes both into
        text files.  `tool` is the name of a merge driver in the user's global git configuration
        (merge.NAME.driver), which then merges the texts that both have changed.

        `Merged.applied` says whether anything was changed, and `Merged.conflicts` why not.  `undo` takes a merge back.
        After a merge that is limited to `paths`, the next one without compares these paths again, too.  OSError: EINVAL
        if the workspaces have no state in common; EBUSY if programs keep changing what is merged; ENOSPC.  `touch` is
        as for `restore`.
        """
        params = MergeParams(
            fork=_peer(fork), paths=self._paths(paths), conflicts=conflicts, dry_run=dry_run, touch=touch, tool=tool
        )
        return RemoteCall("merge", params, _to("Merged"), on_progress)

    def adopt(
        self,
        fork: AnyWorkspace | str,
        *,
        force: bool = False,
        dry_run: bool = False,
        touch: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Merged]:
        """Make this workspace equal to `fork`, which is given as for `merge`.

        Changes of this workspace that `fork` does not have are listed in `Merged.conflicts`, and nothing is changed,
        unless `force` is set.  `undo` takes it back.  `touch` is as for `restore`.
        """
        params = AdoptParams(fork=_peer(fork), force=force, dry_run=dry_run, touch=touch)
        return RemoteCall("adopt", params, _to("Merged"), on_progress)

    def conflicts(self, *forks: AnyWorkspace | str) -> RemoteCall[Conflicts]:
        """Tell which of the workspaces, this one and `forks`, change the same paths, and which merges would conflict.

        `forks` are given as for `merge`; without any, they are all running workspaces that may have a state in common
        with this one: its forks, its source and the forks of that.  Nothing is changed.
        """
        named: Iterable[AnyWorkspace | str] = forks
        if not forks:
            from vfsd.machine.runtime import family, read_records  # noqa: PLC0415 (start-up: few commands need it)

            records = read_records()
            own = next((each for each in records if each.alive and each.mountpoint == self._mountpoint), None)
            named = [] if own is None else family(own.name, own.forked_from, records)
        peers = [_peer(each) for each in named]
        return RemoteCall("conflicts", ConflictsParams(peers), _to("Conflicts"))

    def revert(
        self,
        since: str | None = None,
        until: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        tool_call: str | None = None,
        session: str | None = None,
        conflicts: Literal["fail", "ours", "theirs", "markers"] = "fail",
        dry_run: bool = False,
        touch: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Reverted]:
        """Undo what changed from snapshot `since` to snapshot `until` (None: the live state), and keep later changes.

        With `tool_call` or `session`, an id that the hooks of an agent kept, undo only what that call, or the calls of
        that session, changed; then `since` can be left out.  Paths that were changed again since are merged as for
        `merge`, and `conflicts` says what happens to those that cannot be merged: "ours" keeps them as they are now,
        "theirs" takes the older state.

        `Reverted.applied` says whether anything was changed, and `Reverted.conflicts` why not.  `undo` takes a revert
        back.  SnapshotNotFoundError; OSError: EINVAL if `until` is older than `since`; ENOENT for an unknown call or
        session; EBUSY as for `merge`.  `touch` is as for `restore`.
        """
        if (tool_call is not None and session is not None) or (since is None and tool_call is None and session is None):
            raise ValueError("give `since`, or one of `tool_call` and `session`")
        params = RevertParams(
            since=since,
            until=until,
            tool_call=tool_call,
            session=session,
            paths=self._paths(paths),
            conflicts=conflicts,
            dry_run=dry_run,
            touch=touch,
        )
        return RemoteCall("revert", params, _to("Reverted"), on_progress)

    # -- archives ---------------------------------------------------------------------------------
    def export(
        self,
        path: FilePath,
        *,
        snapshot: str | None = None,
        overwrite: bool = False,
        changes_only: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        on_progress: OnProgress | None = None,
    ) -> RemoteCall[Exported]:
        """Write the live state, or a snapshot, to the ZIP file `path`.  The file appears when it is complete.

        `changes_only` exports only what differs from the directory below an overlay.  `include` and `exclude` are as in
        `diff`.  FileExistsError if the file exists and `overwrite` is not set; ValueError for the file name of another
        kind of archive.
        """
        check_archive_name(path)
        params = ExportParams(
            path=_absolute(path),
            snapshot=snapshot,
            overwrite=overwrite,
            changes_only=changes_only,
            source_date_epoch=_source_date_epoch(),
            include=list(include),
            exclude=list(exclude),
        )
        return RemoteCall("export", params, _to("Exported"), on_progress)

    def import_archive(self, path: FilePath, *, on_progress: OnProgress | None = None) -> RemoteCall[Imported]:
        """Add the content of the ZIP file `path` to the workspace and replace files of the same path: all or nothing.

        OSError (EINVAL) says why an archive was rejected.  `undo` takes the import back.
        """
        return RemoteCall("import", ImportParams(path=_absolute(path)), _to("Imported"), on_progress)

    # -- the log --------------------------------------------------------------------------------------
    def log(
        self, *paths: UserPath, since: str | datetime | None = None, by: int | str | None = None
    ) -> RemoteCall[list[LoggedChange]]:
        """Return the changes that the log holds, the oldest first.

        `paths`: only changes of these paths and below them.  `since`: the name of a snapshot, or an aware time.  `by`:
        the id of a process or the name of a program; changes by what it started count.  FileNotFoundError if there is
        no such snapshot; OSError (EOPNOTSUPP) if the workspace keeps no log.
        """
        pieces: list[bytes] = []

        def changes(_: Any) -> list[LoggedChange]:
            # Start-up: the command line does not need these classes.
            from vfsd.client.log import logged_changes  # noqa: PLC0415

            return logged_changes(b"".join(pieces))

        params = LogParams(**self.selected_changes(paths, since, by))
        return RemoteCall("log", params, changes, on_output=pieces.append)

    def policy(self, *, protect: Iterable[str] = (), hide: Iterable[str] = ()) -> RemoteCall[Policy]:
        """Return the policy of the workspace; before that, add the patterns that are given, in gitignore's syntax.

        No pattern can be removed before the unmount.  OSError: EOPNOTSUPP if the workspace was mounted without a
        policy, EINVAL for an invalid pattern.
        """
        patterns = ([wire_path(os.fsencode(each)) for each in some] for some in (protect, hide))
        return RemoteCall("policy", PolicyParams(*patterns), _to("Policy"))

    def watch(
        self, paths: Iterable[UserPath] = (), since: str | datetime | None = None, by: int | str | None = None
    ) -> RemoteCall[None]:
        """Send the changes from now on, or with `since` from then on, as output, until the call is cancelled."""
        return RemoteCall("watch", WatchParams(**self.selected_changes(paths, since, by)))

    def selected_changes(
        self, paths: Iterable[UserPath], since: str | datetime | None, by: int | str | None
    ) -> dict[str, Any]:
        """The parameters that `log` and `watch` have in common.  ValueError for a time without a time zone."""
        since_ns = None
        if isinstance(since, datetime):
            if since.tzinfo is None:
                raise ValueError("since needs a time zone: datetime.now(UTC), for example")
            since_ns = int(since.timestamp() * 1e9)
        return {
            "paths": self._paths(paths),
            "since": since if isinstance(since, str) else None,
            "since_ns": since_ns,
            "by": None if by is None else str(by),
        }

    def label(self, label: str | None, pid: int | None = None) -> RemoteCall[None]:
        """Give process `pid` (None: this one) a label in the log, which what it starts from now on inherits."""
        return RemoteCall("label", LabelParams(label=label, pid=pid))

    def save(self, snapshot: str | None = None) -> RemoteCall[SaveResult]:
        """Put the live state, or a snapshot, into the snapshot store on disk, from where it can be uploaded."""
        return RemoteCall("save", SaveParams(snapshot), lambda answer: answer)

    # -- the workspace itself ---------------------------------------------------------------------
    def status(self) -> RemoteCall[Status]:
        """Return the workspace's settings, contents and limits."""
        return RemoteCall("status", None, _to("Status"))

    def upgrade(self, instead_of: int) -> RemoteCall[Upgraded]:
        """Replace the daemon, which is the process `instead_of`, by one of the version of this process."""
        return RemoteCall("upgrade", upgrade_params(instead_of), _to("Upgraded"))

    def unmount(self, *, lazy: bool = False) -> RemoteCall[Unmounted]:
        """Unmount the workspace and discard what only its daemon holds."""
        return RemoteCall("unmount", UnmountParams(lazy=lazy, discard=True), _to("Unmounted"))


@overload
def _peer(fork: AnyWorkspace | str) -> Peer: ...


@overload
def _peer(fork: AnyWorkspace | str | None) -> Peer | None: ...


def _peer(fork: AnyWorkspace | str | None) -> Peer | None:
    """Return another workspace as the wire names it.  FileNotFoundError if a name means no running workspace."""
    if fork is None:
        return None
    if isinstance(fork, str):
        # Start-up: most commands name no other workspace.
        from vfsd.client.arguments import running_workspace  # noqa: PLC0415

        fork = running_workspace(fork)
    else:
        check_type(fork, AnyWorkspace, "a fork is a Workspace, an AsyncWorkspace or a name")
        from vfsd.machine.runtime import check_instance  # noqa: PLC0415

        check_instance(fork.socket, fork.instance)
    return Peer(fork.name, wire_path(os.fsencode(fork.socket)))


def _to(kind: str) -> Callable[..., Any]:
    """Return the function that converts an answer to the class `kind` of `vfsd.client.results`."""

    def convert(answer: Any, *output: bytes) -> Any:
        # Start-up: these classes cost 10 ms, and the command line does not need them.
        from vfsd.client.results import CONVERTERS  # noqa: PLC0415

        return CONVERTERS[kind](answer, *output)

    return convert


def _absolute(path: FilePath) -> str:
    """Return a host path as the wire writes it.  Absolute, because the daemon has another current directory."""
    return wire_path(os.fsencode(os.path.abspath(path)))


def workspace_key(backend: str) -> str:
    """Return the key under which a store keeps the snapshots of the workspace `backend`."""
    spec = BackendSpec.split(backend)
    key = f"host:{os.path.realpath(spec.argument)}" if spec.kind == "host" else backend
    return wire_path(os.fsencode(key))


def _source_date_epoch() -> int | None:
    """Return $SOURCE_DATE_EPOCH in seconds, None if it is not set.  OSError (EINVAL) if it is not a number.

    The caller's value counts: the daemon was started in another environment.  Source:
    https://reproducible-builds.org/specs/source-date-epoch/
    """
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise OSError(errno.EINVAL, f"SOURCE_DATE_EPOCH is not a number of seconds: {text!r}")
    return int(text)


def check_archive_name(path: FilePath) -> None:
    """Raise ValueError for "-", for a directory, and for the file name of another kind of archive than ZIP."""
    name = os.path.basename(os.fspath(path))
    if os.fspath(path) == "-":
        raise ValueError("an archive is written to a file, not to standard output: name it FILE.zip")
    if os.fspath(path).endswith("/"):
        raise ValueError(f"{os.fspath(path)} is a directory: name a file in it, such as backup.zip")
    for suffix in _OTHER_ARCHIVES:
        if name.lower().endswith(suffix):
            better = name[: -len(suffix)] or "archive"
            raise ValueError(f"vfsd writes ZIP archives, not {suffix}: name it {better}.zip")


_PATHS_SHOWN: Final = 3


class SnapshotCalls:
    """The requests for the methods of `SnapshotableFilesystem`, with their results.  No I/O.

    `root` is the filesystem's root, as its snapshots name it.
    """

    def __init__(self, mountpoint: str, root: str) -> None:
        self._requests = Requests(mountpoint)
        self._root = root

    def snapshot(self, tag: str | None) -> RemoteCall[FilesystemSnapshot]:
        """Build the request for a snapshot."""
        call = self._requests.snapshot(tag=tag)

        def record(answer: object) -> FilesystemSnapshot:
            taken = call.result(answer)
            _warn_of(taken.name, "lacks files that could not be read", taken.unreadable)
            _warn_of(taken.name, "may mix old and new data of files that changed while they were read", taken.unstable)
            return self._record(taken)

        return _with_result(call, record)

    def get(self, name: str) -> RemoteCall[FilesystemSnapshot]:
        """Build the request for the record of a snapshot.  Its result raises SnapshotNotFoundError."""
        call = self._requests.snapshots(changes=False)

        def record(answer: object) -> FilesystemSnapshot:
            found = [snapshot for snapshot in call.result(answer) if snapshot.name == name]
            if not found:
                raise SnapshotNotFoundError(name)
            return self._record(found[0])

        return _with_result(call, record)

    def restore(self, snapshot: FilesystemSnapshot) -> RemoteCall[None]:
        """Build the request for a restore.  Its result raises OSError (EIO) if the restore was incomplete."""
        check_type(snapshot, FilesystemSnapshot, "restore takes a FilesystemSnapshot", "`snapshot` and `get` return it")
        call = self._requests.restore(snapshot.commit_ref)
        created_at = snapshot.created_at.astimezone(UTC)
        call.params.source.created_at = created_at.isoformat(timespec="milliseconds")
        return _with_result(call, lambda answer: _check_complete(call.result(answer), self._root))

    def export(self, path: FilePath) -> RemoteCall[Exported]:
        """Build the request for an export."""
        return self._requests.export(path)

    def import_archive(self, path: FilePath) -> RemoteCall[None]:
        """Build the request that replaces the state by an archive.  Its result is that of `restore`."""
        # Not the method `import`, which adds the content and removes nothing.
        call = self._requests.restore(Path(path))
        return _with_result(call, lambda answer: _check_complete(call.result(answer), self._root))

    def _record(self, taken: Snapshot) -> FilesystemSnapshot:
        return FilesystemSnapshot(taken.name, taken.created_at, taken.name, self._root, taken.tag)


@contextmanager
def errors_of_restore(name: str) -> Iterator[None]:
    """Raise the contract's errors for those of the daemon while the block restores snapshot `name`."""
    try:
        with _read_only_errors():
            yield
    except FileNotFoundError as error:
        raise SnapshotNotFoundError(name) from error


@contextmanager
def errors_of_import() -> Iterator[None]:
    """Raise the contract's errors for those of the daemon while the block imports an archive."""
    try:
        with _read_only_errors():
            yield
    except ControlError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ArchiveError(str(error), error.filename) from error


@contextmanager
def _read_only_errors() -> Iterator[None]:
    try:
        yield
    except ControlError as error:
        if error.errno != errno.EROFS:
            raise
        raise PermissionError(errno.EROFS, str(error), ".") from error


def _with_result(call: RemoteCall[Any], result: Callable[[Any], T]) -> RemoteCall[T]:
    return RemoteCall(call.method, call.params, result, call.on_progress, call.on_output)


def _warn_of(snapshot: str, what: str, paths: Sequence[str]) -> None:
    if paths:
        warnings.warn(f"snapshot {snapshot} {what}: {_shown(paths)}", RuntimeWarning, stacklevel=3)


def _check_complete(restored: Restored, root: str) -> None:
    """Raise OSError (EIO) if `restored` has paths that could not be restored."""
    if restored.problems:
        count = len(restored.problems)
        reasons = [f"{path} ({reason})" for path, reason in restored.problems.items()]
        text = f"{count} path{'s'[: count > 1]} could not be restored from {restored.source}: {_shown(reasons)}"
        raise OSError(errno.EIO, f"{text}; the method `undo` of the workspace restores the state before", root)


def _shown(items: Sequence[str]) -> str:
    more = len(items) - _PATHS_SHOWN
    return ", ".join(items[:_PATHS_SHOWN]) + (f" and {more} more" if more > 0 else "")
