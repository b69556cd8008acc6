"""PathFilesystem: a `PlainPathFilesystem` with snapshots, which are archives, and with restores of archives.

A restore makes the files equal to a tree and changes only what differs: equal files keep their inode and their times.
`put_archive` puts the state before back if that fails.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from protocol.adapters.path_files import OpenFile, PathFiles, PathFilesTree, Status, enter, held
from protocol.adapters.plain_filesystem import PlainPathFilesystem, remove, temporary_name
from protocol.archive import ArchiveLimits, export_archive, open_archive, write_archive
from protocol.diff.plan import Step, execute, plan
from protocol.errors import SnapshotNotFoundError, check_type
from protocol.paths import DEFAULT_LIMITS, ROOT, CallLimits, decode, located
from protocol.tree import Hole, Tree, TreeEntry
from protocol.types import FilesystemSnapshot


class PathFilesystem(PlainPathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem`.

    Snapshots are archives; a subclass whose backend has its own overrides `snapshot`, `restore`, `import_archive` and
    `_state`.
    """

    def __init__(self, store: PathFiles, *, limits: CallLimits = DEFAULT_LIMITS) -> None:
        super().__init__(store, limits=limits)
        self._snapshots = ArchiveSnapshots(store.root)

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        with self._state() as state:
            return self._snapshots.take(state, tag)

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        self.import_archive(self._snapshots.path(snapshot))

    def export_archive(self, path: str | os.PathLike[str]) -> None:
        with self._state() as state:
            export_archive(state, path)

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        self._changing(ROOT, root_is_fine=True)
        with self._state() as state:
            put_archive(state, path, lambda tree: converge(self._store, tree))

    def _state(self) -> AbstractContextManager[Tree]:
        """Open the state as a tree."""
        return nullcontext(PathFilesTree(self._store))


# -- archives --------------------------------------------------------------------------------------
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
        check_type(snapshot, FilesystemSnapshot, "restore takes a FilesystemSnapshot", "`snapshot` returns it")
        try:
            return self._paths[snapshot.snapshot_id]
        except KeyError:
            raise SnapshotNotFoundError(snapshot.snapshot_id) from None


# -- making the files equal to a tree --------------------------------------------------------------
_CHUNK_BYTES: Final = 256 * 1024
_USER_ALL: Final = stat.S_IRWXU


def converge(store: PathFiles, tree: Tree) -> None:
    """Make the state of `store` equal to `tree`.  Owners are set where that is allowed."""
    steps = plan(PathFilesTree(store), tree, whole_directories=True)
    if steps:
        _Target(store, tree).run(steps)


class _Target:
    """Implements `protocol.diff.plan.Target`.

    Writes all new content into a temporary directory first, and changes names after that: a full disk is noticed
    before anything has changed.
    """

    def __init__(self, store: PathFiles, tree: Tree) -> None:
        self._store = store
        self._tree = tree
        self._stage = temporary_name()  # a directory in the root
        self._staged: dict[bytes, bytes] = {}  # path -> name of its new content in that directory
        self._unlocked: set[tuple[bytes, ...]] = set()  # directories whose entries may be changed

    def run(self, steps: list[Step]) -> None:
        """Execute `steps`."""
        store = self._store
        with held(store, store.top()) as root:
            store.mkdir(root, self._stage)
            try:
                with held(store, store.child(root, self._stage)) as stage:
                    store.set_mode(stage, _USER_ALL)
                    for step in steps:
                        if step.kind == "put" and step.new is not None and step.new.is_file:
                            self._staged[step.path] = self._write(stage, step.new)
                    execute(steps, self)
            finally:
                remove(store, (self._stage,), recursive=True)
            # The temporary directory changed the root's mtime.
            self._attributes(root, self._tree.entry(b""), store.status(root))

    def _write(self, stage: int, entry: TreeEntry) -> bytes:
        name = b"%d" % len(self._staged)
        with located(decode(entry.path)):
            file = self._store.create(stage, name, 0o600)
            try:
                self._fill(file, entry)
                self._attributes(file.node, entry, self._store.status(file.node))
            finally:
                file.close()
        return name

    def _fill(self, file: OpenFile, entry: TreeEntry) -> None:
        offset, last = 0, entry.size - 1
        for chunk in self._tree.chunks(entry.path, _CHUNK_BYTES):
            if isinstance(chunk, Hole):
                offset += len(chunk)
                if offset > last:  # a hole at the end: the last byte sets the size
                    file.write(last, b"\0")
                continue
            view = memoryview(chunk)
            while view:
                written = file.write(offset, view)
                offset += written
                view = view[written:]

    # -- steps -----------------------------------------------------------------------------------
    def remove(self, old: TreeEntry) -> None:
        with located(decode(old.path)):
            self._unlock(_names(old.path)[:-1])
            remove(self._store, _names(old.path), recursive=True)

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None:
            self.remove(old)
        *above, name = _names(new.path)
        with located(decode(new.path)), held(self._store, self._parent(above)) as parent:
            self._store.mkdir(parent, name)

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None:
        store = self._store
        if old is not None and (old.is_dir or not new.is_file):
            self.remove(old)
        *above, name = _names(new.path)
        with located(decode(new.path)), held(store, self._parent(above)) as parent:
            if new.is_file:
                with held(store, enter(store, (self._stage,))) as stage:
                    store.rename(stage, self._staged[new.path], parent, name)
                return
            if new.is_symlink:
                store.symlink(parent, name, new.target)
            else:
                store.mknod(parent, name, new.mode, new.rdev)
        self.set_metadata(new)

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None:
        if old is not None:
            self.remove(old)
        store = self._store
        *above, name = _names(new.path)
        with (
            located(decode(new.path)),
            held(store, enter(store, _names(other))) as source,
            held(store, self._parent(above)) as parent,
        ):
            store.link(source, parent, name)

    def set_metadata(self, new: TreeEntry) -> None:
        with located(decode(new.path)), held(self._store, enter(self._store, _names(new.path))) as node:
            self._attributes(node, new, self._store.status(node))

    def _parent(self, names: Sequence[bytes]) -> int:
        """Return a node of a directory and make its entries changeable; the plan sets its final mode at the end."""
        self._unlock(tuple(names))
        return enter(self._store, names)

    def _unlock(self, names: tuple[bytes, ...]) -> None:
        if names not in self._unlocked:
            with held(self._store, enter(self._store, names)) as node:
                mode = self._store.status(node).mode
                if mode & _USER_ALL != _USER_ALL:
                    self._store.set_mode(node, mode | _USER_ALL)
            self._unlocked.add(names)

    # -- metadata --------------------------------------------------------------------------------
    def _attributes(self, node: int, entry: TreeEntry, old: Status) -> None:
        store = self._store
        if (old.uid, old.gid) != (entry.uid, entry.gid):
            try:
                store.set_owner(node, entry.uid, entry.gid)
            except PermissionError:
                pass  # as with tar(1), a file of another user then belongs to this user
            old = store.status(node)
        if not entry.is_symlink:
            if stat.S_IMODE(old.mode) != stat.S_IMODE(entry.mode):
                store.set_mode(node, entry.mode)
            self._xattrs(node, entry)
        if old.mtime_ns != entry.mtime_ns:
            store.set_mtime(node, entry.mtime_ns)

    def _xattrs(self, node: int, entry: TreeEntry) -> None:
        try:
            if dict(self._store.xattrs(node)) != dict(entry.xattrs):
                self._store.set_xattrs(node, entry.xattrs)
        except OSError as error:
            # another file system may lack these attributes, or refuse them to this user
            if error.errno not in {errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL}:
                raise


def _names(path: bytes) -> tuple[bytes, ...]:
    return tuple(path.split(b"/")) if path else ()
