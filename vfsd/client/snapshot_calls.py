"""SnapshotCalls: the requests behind the snapshots and archives of `WorkspaceFilesystem` and `AsyncFilesystem`."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from pathlib import Path
from typing import Any, Final, TypeVar

from protocol.errors import ArchiveError, SnapshotNotFoundError
from protocol.types import FilesystemSnapshot
from vfsd.client.connection import ControlError
from vfsd.client.requests import FilePath, RemoteCall, Requests
from vfsd.client.results import Exported, Restored, Snapshot

T = TypeVar("T")
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
        call = self._requests.restore(snapshot.commit_ref)
        created_at = snapshot.created_at.astimezone(UTC)
        call.params.created_at = created_at.isoformat(timespec="milliseconds")
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
