"""Archives of a Filesystem's files: restored into them, and kept as snapshots."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import uuid4

from protocol.archive import ArchiveLimits, export_archive, open_archive, write_archive
from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree
from protocol.types import FilesystemSnapshot

# Archives that this process wrote itself a moment ago: trusted, and as large as the state.
_OWN: ArchiveLimits = ArchiveLimits(entries=1 << 40, total_bytes=1 << 62, manifest_bytes=1 << 40, names_bytes=1 << 40)


def put_archive(
    state: Tree,
    path: str | os.PathLike[str],
    make_equal: Callable[[Tree], None],
    check: Callable[[Tree], None] = lambda _tree: None,
) -> None:
    """Replace `state` by the archive at `path`: call `make_equal` with its tree, after `check` has accepted it.

    All or nothing: the state before is kept in a temporary archive, and put back if `make_equal` fails.  If putting
    back fails too, a note on the error says where that archive is.
    """
    with open_archive(path) as tree:
        check(tree)
        descriptor, kept = tempfile.mkstemp(prefix="vfsd-before-", suffix=".fs.zip")
        try:
            with open(descriptor, "w+b") as before:
                write_archive(state, before, level=0)
                try:
                    make_equal(tree)
                except BaseException as error:
                    try:
                        before.seek(0)
                        with open_archive(before, limits=_OWN) as old:
                            make_equal(old)
                    except OSError as again:
                        error.add_note(f"the state before could not be put back ({again}); it is in {kept}")
                        kept = ""
                    raise
        finally:
            if kept:
                os.unlink(kept)


class ArchiveSnapshots:
    """Snapshots as archives, in a directory that is removed with this object."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._directory: str | None = None
        self._paths: dict[str, str] = {}

    def take(self, state: Tree, tag: str | None) -> FilesystemSnapshot:
        if self._directory is None:
            self._directory = tempfile.mkdtemp(prefix="vfsd-snapshots-")
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        name = str(uuid4())
        path = os.path.join(self._directory, f"{name}.fs.zip")
        export_archive(state, path)
        self._paths[name] = path
        return FilesystemSnapshot(name, datetime.now(UTC), path, self._root, tag)

    def path(self, snapshot: FilesystemSnapshot) -> str:
        """Return the path of the archive of a snapshot.  SnapshotNotFoundError for a snapshot of another object."""
        try:
            return self._paths[snapshot.snapshot_id]
        except KeyError:
            raise SnapshotNotFoundError(snapshot.snapshot_id) from None
