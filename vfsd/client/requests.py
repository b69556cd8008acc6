"""The Python API's calls without their I/O: parameters for the control socket, and results made from its answers.

`Workspace` and `AsyncWorkspace` differ in how they send a `RemoteCall`, and in nothing else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

import msgspec

from vfsd.client import results
from vfsd.client.paths import UserPath, wire_paths
from vfsd.wire import messages

__all__ = [
    "RemoteCall",
    "apply",
    "check_archive_name",
    "diff",
    "discard",
    "drop",
    "export",
    "import_archive",
    "origin_of",
    "patch",
    "redo",
    "restore",
    "snapshot",
    "snapshots",
    "source_date_epoch",
    "status",
    "undo",
    "unmount",
]

T = TypeVar("T")
_change_records = msgspec.json.Decoder(messages.ChangeRecord)

# Longest first: ".tar.gz" ends in ".gz".
_OTHER_ARCHIVES: Final = (
    ".tar.bz2", ".tar.zst", ".tar.lz4", ".tar.gz", ".tar.xz", ".tar.lz", ".tar.z",
    ".cpio", ".tbz2", ".tzst", ".tar", ".tgz", ".tbz", ".txz", ".tlz", ".rar", ".bz2", ".zst", ".lz4", ".gz", ".xz",
    ".7z",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[T]):
    """One call: `answer` makes the API's value from the control socket's result."""

    method: str
    params: msgspec.Struct | None
    answer: Callable[[Any], T]
    on_output: Callable[[bytes], object] | None = None  # takes what comes before the answer, which has a use for it


def status() -> RemoteCall[results.Status]:
    """What the workspace is and holds."""
    return RemoteCall("status", None, _status)


def snapshot(name: str | None, tag: str | None) -> RemoteCall[results.Snapshot]:
    """Take a snapshot."""
    return RemoteCall("snapshot", messages.SnapshotParams(name=name, tag=tag), _snapshot)


def snapshots(*, changes: bool) -> RemoteCall[list[results.Snapshot]]:
    """List the snapshots."""
    params = messages.SnapshotsParams(changes=changes)
    return RemoteCall("snapshots", params, lambda answer: [_snapshot(record) for record in answer.snapshots])


def drop(name: str) -> RemoteCall[None]:
    """Delete a snapshot."""
    return RemoteCall("drop", messages.DropParams(name=name), _nothing)


def restore(
    source: str | os.PathLike[str],
    paths: Iterable[UserPath],
    mountpoint: str,
    *,
    of: str | None,
    store: str | os.PathLike[str] | None,
    dry_run: bool,
) -> RemoteCall[results.Restored]:
    """Restore: a `str` names a snapshot, a path object an archive."""
    limited_to = wire_paths(paths, mountpoint)
    if isinstance(source, str):
        params = messages.RestoreParams(name=source, paths=limited_to, dry_run=dry_run)
        if of is not None:
            params.of, params.store = origin_of(of, store)
    elif of is not None:
        raise ValueError("an archive is of no workspace: `of` goes with the name of a snapshot")
    else:
        params = messages.RestoreParams(archive=_absolute(source), paths=limited_to, dry_run=dry_run)
    return RemoteCall("restore", params, _restored)


def origin_of(backend: str, store: str | os.PathLike[str] | None) -> tuple[str, str | None]:
    """A workspace's key in a store, and the store's directory (None: the daemon's own), as the wire writes both."""
    kind, _, place = backend.partition(":")
    key = f"host:{os.path.realpath(place)}" if kind == "host" else backend
    return messages.wire_path(os.fsencode(key)), None if store is None else _absolute(store)


def undo(*, dry_run: bool) -> RemoteCall[results.Restored]:
    """Go one restore, import or apply back."""
    return RemoteCall("restore", messages.RestoreParams(undo=True, dry_run=dry_run), _restored)


def redo(*, dry_run: bool) -> RemoteCall[results.Restored]:
    """Go one undone step forward again."""
    return RemoteCall("restore", messages.RestoreParams(redo=True, dry_run=dry_run), _restored)


def apply(paths: Iterable[UserPath], mountpoint: str, *, dry_run: bool, force: bool) -> RemoteCall[results.Applied]:
    """Write what an overlay holds into the directory below it."""
    params = messages.ApplyParams(paths=wire_paths(paths, mountpoint), dry_run=dry_run, force=force)
    return RemoteCall("apply", params, _applied)


def discard(paths: Iterable[UserPath], mountpoint: str, *, dry_run: bool) -> RemoteCall[results.Restored]:
    """Go back to the directory below an overlay."""
    params = messages.RestoreParams(base=True, paths=wire_paths(paths, mountpoint), dry_run=dry_run)
    return RemoteCall("restore", params, _restored)


def diff(
    a: str | None,
    b: str | None,
    paths: Iterable[UserPath],
    mountpoint: str,
    *,
    include: Iterable[str],
    exclude: Iterable[str],
) -> RemoteCall[results.Diff]:
    """List what changed; the changes come before the answer."""
    params = messages.DiffParams(
        a=a, b=b, paths=wire_paths(paths, mountpoint), include=list(include), exclude=list(exclude), stream=True
    )
    pieces: list[bytes] = []

    def diff_of(answer: messages.DiffResult) -> results.Diff:
        changes = _changes(_change_records.decode_lines(b"".join(pieces)))
        return results.Diff(a=answer.a, b=answer.b, counts=_counts(answer.counts), changes=changes)

    return RemoteCall("diff", params, diff_of, pieces.append)


def patch(
    a: str | None,
    b: str | None,
    paths: Iterable[UserPath],
    mountpoint: str,
    *,
    include: Iterable[str],
    exclude: Iterable[str],
    include_git: bool,
) -> RemoteCall[results.Patch]:
    """Make a patch; it comes before the answer."""
    params = messages.DiffParams(a=a, b=b, mode="patch", paths=wire_paths(paths, mountpoint), include_git=include_git)
    params.include, params.exclude = list(include), list(exclude)
    pieces: list[bytes] = []

    def patch_of(answer: messages.DiffResult) -> results.Patch:
        return results.Patch(
            b"".join(pieces),
            counts=_counts(answer.counts),
            problems=_problems(answer.problems),
            omitted=_problems(answer.omitted),
        )

    return RemoteCall("diff", params, patch_of, pieces.append)


def source_date_epoch(environ: Mapping[str, str] = os.environ) -> int | None:
    """$SOURCE_DATE_EPOCH, in seconds; None where it is not set.  OSError(EINVAL) for what is no number.

    The caller's, not the daemon's, who was started in another environment.  Source:
    https://reproducible-builds.org/specs/source-date-epoch/
    """
    text = environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise OSError(errno.EINVAL, f"SOURCE_DATE_EPOCH is not a number of seconds: {text!r}")
    return int(text)


def check_archive_name(path: str | os.PathLike[str]) -> None:
    """ValueError for "-", and for a name that promises another kind of archive than ZIP."""
    name = os.path.basename(os.fspath(path))
    if os.fspath(path) == "-":
        raise ValueError("an archive is written to a file, not to standard output: name it FILE.zip")
    if os.fspath(path).endswith("/"):
        raise ValueError(f"{os.fspath(path)} is a directory: name a file in it, such as backup.zip")
    for suffix in _OTHER_ARCHIVES:
        if name.lower().endswith(suffix):
            better = name[: -len(suffix)] or "archive"
            raise ValueError(f"vfsd writes ZIP archives, not {suffix}: name it {better}.zip")


def export(
    path: str | os.PathLike[str],
    snapshot: str | None,
    *,
    overwrite: bool,
    changes_only: bool,
    include: Iterable[str],
    exclude: Iterable[str],
) -> RemoteCall[results.Exported]:
    """Write an archive.  ValueError for the name of an archive of another kind."""
    check_archive_name(path)
    params = messages.ExportParams(
        path=_absolute(path),
        snapshot=snapshot,
        overwrite=overwrite,
        changes_only=changes_only,
        source_date_epoch=source_date_epoch(),
        include=list(include),
        exclude=list(exclude),
    )
    return RemoteCall(
        "export",
        params,
        lambda answer: results.Exported(
            path=_path(answer.path),
            files=answer.files,
            total_bytes=answer.total_bytes,
            archive_bytes=answer.archive_bytes,
            skipped=_problems(answer.skipped),
        ),
    )


def import_archive(path: str | os.PathLike[str]) -> RemoteCall[results.Imported]:
    """Lay an archive over the workspace."""
    return RemoteCall(
        "import",
        messages.ImportParams(path=_absolute(path)),
        lambda answer: results.Imported(
            path=_path(answer.path),
            files=answer.files,
            total_bytes=answer.total_bytes,
            safety_snapshot=answer.safety_snapshot,
            counts=_counts(answer.counts),
            problems=_problems(answer.problems),
            expired=_expired(answer.expired),
        ),
    )


def unmount(*, lazy: bool) -> RemoteCall[results.Unmounted]:
    """Unmount, and end the daemon; what only it holds is discarded."""
    return RemoteCall(
        "unmount",
        messages.UnmountParams(lazy=lazy, discard=True),
        lambda answer: results.Unmounted(_path(answer.mountpoint), answer.lazy, tuple(answer.holders)),
    )


# -- from the wire --------------------------------------------------------------------------------
def _absolute(path: str | os.PathLike[str]) -> str:
    """A file of the host as the wire writes it: the daemon has another current directory than its callers."""
    return messages.wire_path(os.fsencode(os.path.abspath(path)))


def _path(wire: str) -> str:
    return os.fsdecode(messages.from_wire_path(wire))


def _nothing(_answer: object) -> None:
    return None


def _counts(counts: messages.ChangeCounts) -> results.Counts:
    return results.Counts(counts.added, counts.modified, counts.removed)


def _changes(records: Iterable[messages.ChangeRecord]) -> tuple[results.Change, ...]:
    return tuple(map(_change, records))


def _change(record: messages.ChangeRecord) -> results.Change:
    return results.Change(
        path=_path(record.path),
        change=record.change,
        type=record.type,
        old_size=record.old_size,
        new_size=record.new_size,
    )


def _snapshot(record: messages.SnapshotRecord) -> results.Snapshot:
    return results.Snapshot(
        name=record.name,
        created_at=datetime.fromisoformat(record.created_at),
        files=record.files,
        directories=record.directories,
        size_bytes=record.size_bytes,
        kind=record.kind,
        tag=record.tag,
        changes=None if record.changes is None else _counts(record.changes),
        unstable=tuple(map(_path, record.unstable)),
        unreadable=tuple(map(_path, record.unreadable)),
        step=record.step,
        expired=_expired(record.expired),
    )


def _applied(answer: messages.ApplyResult) -> results.Applied:
    return results.Applied(
        directory=_path(answer.directory),
        applied=answer.applied,
        counts=_counts(answer.counts),
        changes=_changes(answer.changes),
        conflicts={_path(each.path): each.reason for each in answer.conflicts},
        truncated=answer.truncated,
        recovered=answer.recovered,
        safety_snapshot=answer.safety_snapshot,
        expired=_expired(answer.expired),
    )


def _restored(answer: messages.RestoreResult) -> results.Restored:
    return results.Restored(
        source=answer.source,
        safety_snapshot=answer.safety_snapshot,
        counts=_counts(answer.counts),
        changes=_changes(answer.changes),
        truncated=answer.truncated,
        problems=_problems(answer.problems),
        step=answer.step,
        expired=_expired(answer.expired),
        undo_steps=answer.undo_steps,
        redo_steps=answer.redo_steps,
    )


def _expired(records: Iterable[messages.ExpiredRecord]) -> dict[str, datetime]:
    return {record.name: datetime.fromisoformat(record.created_at) for record in records}


def _problems(records: Iterable[messages.ProblemRecord]) -> dict[str, str]:
    return {_path(record.path): record.reason for record in records}


def _status(answer: messages.StatusResult) -> results.Status:
    values = msgspec.structs.asdict(answer)
    values |= {"mountpoint": _path(answer.mountpoint), "started_at": datetime.fromisoformat(answer.started_at)}
    return results.Status(**values)
