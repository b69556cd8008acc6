"""Store: snapshots of directories and trees that keep each content once, for several processes and workspaces.

The caller names a workspace by a key such as "host:/srv/x".  A snapshot that `take` returned is durable: its pack is
synced before it gets its name, and the directory after.  `drop` removes the name; the next `collect_garbage` frees
the contents that no other snapshot needs.

Threading: any thread.  Calls for one workspace wait for each other where they must.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol.errors import SnapshotExistsError, SnapshotNotFoundError
from protocol.linux.regular_file import read_prefix, sync_directory, write_atomically
from protocol.store import upkeep
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import Blobs, DigestSink, StoreSink
from protocol.store.format.layout import (
    NO_SPACE,
    Layout,
    default_directory,
    is_inside,
)
from protocol.store.format.objects import NewObjects
from protocol.store.format.packs import DamagedError, PackWriter
from protocol.store.format.rows import Record, encode_record, info_of, pack_name, read_record, workspace_and_serial
from protocol.store.restore import (
    InterruptedRestore,
    Plan,
    RestoredChanges,
    RestoreIntentLog,
    RestoreRequest,
    RestoreRun,
    plan,
)
from protocol.store.trees import (
    Lease,
    MerkleTree,
    MountedSnapshot,
    NumberedTree,
    fingerprint_of,
    leased,
    leased_roots,
    root_of,
)
from protocol.store.upkeep import CheckReport, GarbageReport
from protocol.tree import ByteProgress, no_progress
from protocol.volume_extensions import SnapshotInfo, SnapshotKind

if TYPE_CHECKING:
    from protocol.store.directory.source import Source
    from protocol.store.directory.target import DirectoryTarget
    from protocol.store.format.blobs import Sink
    from protocol.store.format.layout import Layout
    from protocol.store.format.packs import Pack, Packs
    from protocol.store.trees import ReadRows

_VERSION: Final = 1
# Called with a workspace, its snapshots (oldest first), and the names of those that are needed, with the reason.
Choose: TypeAlias = Callable[[str, Sequence[SnapshotInfo], Mapping[str, str]], Iterable[str]]


class Store:
    """The store in `directory` (default: `default_directory`).  The first snapshot creates it."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.layout = Layout(default_directory() if directory is None else os.fspath(directory))
        self.blobs = Blobs(self.layout)
        self._catalog = SnapshotCatalog(self.layout, self.blobs.packs)
        self._caches: dict[str, StatCache] = {}

    @property
    def directory(self) -> str:
        """The path of the store."""
        return self.layout.directory

    def close(self) -> None:
        """Close the store's files.  The next call opens them again."""
        self.blobs.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- snapshots -----------------------------------------------------------------------------
    def snapshots(self, workspace: str) -> Sequence[SnapshotInfo]:
        """The snapshots of a workspace, oldest first.  ESTALE if the store is gone since it was last used."""
        return [info_of(record) for record in self._catalog.of(workspace).values()]

    def snapshot(self, workspace: str, name: str) -> SnapshotInfo:
        """One snapshot.  SnapshotNotFoundError."""
        return info_of(self._catalog.get(workspace, name))

    def workspaces(self) -> dict[str, list[SnapshotInfo]]:
        """The snapshots of every workspace that has any, oldest first, by the workspace's key."""
        found: dict[str, list[SnapshotInfo]] = {}
        for record in self._catalog.all():
            found.setdefault(record.workspace, []).append(info_of(record))
        return found

    def damaged_snapshots(self) -> dict[str, DamagedError]:
        """The damage of each snapshot that cannot be read, by the path of its file."""
        return self._catalog.damaged()

    def take(
        self,
        workspace: str,
        name: str,
        source: Source,
        *,
        tag: str | None = None,
        kind: SnapshotKind = "user",
        created_ns: int | None = None,
        unreadable: Unreadable = "fail",
        progress: FileProgress = no_progress,
    ) -> SnapshotInfo:
        """Keep the present state of `source` under `name`.

        `created_ns` is the time of an older state; None: now.
        SnapshotExistsError; EACCES with the first path that cannot be read, unless `unreadable` is "skip"; EINVAL if
        the store lies inside the directory.
        """
        self.check_apart(source.identity)
        self.layout.create()
        with self.layout.shared(), self.layout.workspace_lock(workspace, exclusive=False):
            info, _ = self._take(workspace, name, source, tag, kind, unreadable, progress, created_ns)
        return info

    def check_apart(self, identity: tuple[int, int] | None) -> None:
        """EINVAL if the store lies inside the directory (st_dev, st_ino): a snapshot would contain the store."""
        if identity is not None and is_inside(self.directory, identity):
            raise OSError(
                errno.EINVAL,
                "the snapshot store lies inside the directory: choose another place with $VFSD_STORE_DIR",
                self.directory,
            )

    def _take(
        self, workspace: str, name: str, source: Source, tag: str | None, kind: SnapshotKind, unreadable: Unreadable,
        progress: FileProgress, created_ns: int | None = None,
    ) -> tuple[SnapshotInfo, Scanned]:  # fmt: skip
        layout, blobs = self.layout, self.blobs
        if created_ns is None:
            created_ns = time.time_ns()
        blobs.packs.refresh()
        self._catalog.check_new(workspace, name)
        objects = NewObjects(layout, blobs.objects)
        try:
            with self._naming_full_disk(), PackWriter(layout.temporary(".pack")) as pack:
                sink = StoreSink(blobs, pack, objects)
                with self._scanned(workspace, source, sink, unreadable, progress) as scanned:
                    objects.publish()
                    record = self._commit(workspace, name, tag, kind, created_ns, scanned, pack)
                    blobs.packs.refresh()
        finally:
            objects.discard()
        return info_of(record), scanned

    def _commit(
        self, workspace: str, name: str, tag: str | None, kind: SnapshotKind, created_ns: int, scanned: Scanned,
        pack: PackWriter,
    ) -> Record:  # fmt: skip
        with self.layout.names_lock(workspace):
            self._catalog.check_new(workspace, name)
            serial = self._catalog.next_serial(workspace)
            counts = scanned.counts
            record = Record(
                _VERSION, workspace, name, serial, created_ns, counts.files, counts.directories, counts.size_bytes,
                tag, kind, scanned.unstable, scanned.unreadable, scanned.root, scanned.inodes,
            )  # fmt: skip
            pack.finish(self._catalog.path(workspace, serial), encode_record(record))
            sync_directory(self.layout.packs)
        return record

    @contextlib.contextmanager
    def _naming_full_disk(self) -> Iterator[None]:
        """Name the store in ENOSPC errors about its files, and say how to free space."""
        try:
            yield
        except OSError as error:
            named = error.filename  # None: the system call had only a descriptor
            if error.errno not in NO_SPACE or not (named is None or self._contains(named)):
                raise
            what = f"{error.strerror} for the snapshot store; `vfsd store gc` frees the space of dropped snapshots"
            raise OSError(error.errno, what, self.directory) from None

    def _contains(self, path: str | bytes) -> bool:
        return os.fsdecode(path).startswith(os.path.join(self.directory, ""))

    def drop(self, workspace: str, name: str) -> None:
        """Drop a snapshot; others are not affected.  SnapshotNotFoundError."""
        self._require(name)
        with self.layout.shared(), self.layout.names_lock(workspace):
            _unname(self._catalog.path(workspace, self._catalog.get(workspace, name).serial))
            sync_directory(self.layout.packs)
        self.blobs.packs.refresh()

    def prune(self, choose: Choose, *, wait_s: float = 60.0, journals: Callable[[], Mapping[str, str]] = dict) -> None:
        """Drop the snapshots that `choose` returns, which is called for each workspace.

        `journals` returns the reason why a snapshot is needed though nothing has it mounted, by its fingerprint
        (`MountedSnapshot.fingerprint`).  It is called when nothing else uses the store.

        Nothing else uses the store meanwhile, so what `choose` is told stays true until its choice is dropped.  EBUSY
        if snapshots, restores or readers take longer than `wait_s`.
        """
        if not self.layout.exists():
            return
        with self.layout.exclusive(wait_s):
            held, journaled = set(leased(self.layout)), journals()
            chosen = []
            records = self._catalog.all()
            for workspace, group in itertools.groupby(records, key=lambda record: record.workspace):
                found = {record.name: record for record in group}
                needed = {name: "mounted" for name, record in found.items() if record.root.content in held}
                needed |= {
                    name: journaled[fingerprint_of(record.root)]
                    for name, record in found.items()
                    if fingerprint_of(record.root) in journaled
                }
                needed |= dict.fromkeys(self._needed_by_restore(workspace), "needed by an interrupted restore")
                infos = [info_of(record) for record in found.values()]
                chosen += [
                    self._catalog.path(workspace, found[name].serial) for name in choose(workspace, infos, needed)
                ]
            for path in chosen:
                _unname(path)
            sync_directory(self.layout.packs)
        self.blobs.packs.refresh()

    def _needed_by_restore(self, workspace: str) -> Iterator[str]:
        """Yield the snapshots that finish or undo a restore that was interrupted.  The store is not in use."""
        half_done = RestoreIntentLog(self.layout, workspace).read()
        while half_done is not None:
            yield half_done.snapshot
            if half_done.safety is not None:
                yield half_done.safety
            half_done = half_done.previous

    def _require(self, name: str) -> None:
        if not self.layout.exists():
            raise SnapshotNotFoundError(name)

    @contextlib.contextmanager
    def _record(self, workspace: str, name: str) -> Iterator[Record]:
        """The record of a snapshot; inside the block, the store's lock is held shared.  SnapshotNotFoundError."""
        self._require(name)
        with self.layout.shared():
            yield self._catalog.get(workspace, name)

    # -- trees ---------------------------------------------------------------------------------
    @contextlib.contextmanager
    def tree(self, workspace: str, name: str) -> Iterator[MerkleTree]:
        """The state of a snapshot, inside the block.  SnapshotNotFoundError."""
        with self._record(workspace, name) as record:
            yield MerkleTree(record.root, self.blobs.listing, self.blobs)

    @contextlib.contextmanager
    def numbered_tree(self, workspace: str, name: str) -> Iterator[NumberedTree]:
        """The state of a snapshot with its inode numbers and ctimes, inside the block.  SnapshotNotFoundError."""
        with self._record(workspace, name) as record:
            yield NumberedTree(record.root, record.inodes, self.blobs)

    def mounted(self, workspace: str, name: str) -> MountedSnapshot:
        """A snapshot that stays readable until the caller closes it, also if it is dropped.  SnapshotNotFoundError.

        It uses the files of this store, and closes them.
        """
        with self._record(workspace, name) as record:
            return MountedSnapshot(self.layout, self.blobs, record.root, record.inodes)

    def mounted_again(self, fingerprint: str) -> MountedSnapshot | None:
        """The snapshot with this fingerprint, if a lease keeps it, also if it was dropped; else None."""
        digest = root_of(fingerprint)
        if digest is None or not self.layout.exists():
            return None
        with self.layout.shared():
            roots = leased_roots(self.layout, digest)
            return None if roots is None else MountedSnapshot(self.layout, self.blobs, *roots)

    def lease(self, workspace: str, name: str) -> Lease:
        """Keep the content of a snapshot, also if it is dropped, until the caller closes the result.

        SnapshotNotFoundError.
        """
        with self._record(workspace, name) as record:
            return Lease(self.layout, record.root, record.inodes)

    @contextlib.contextmanager
    def leased(self, workspace: str, name: str) -> Iterator[tuple[Record, Blobs]]:
        """The record of a snapshot and the blobs, which stay inside the block, also if it is dropped.

        SnapshotNotFoundError.
        """
        with self._record(workspace, name) as record:
            lease = Lease(self.layout, record.root, record.inodes)
        try:
            yield record, self.blobs
        finally:
            lease.close()

    def fingerprint(self, workspace: str, name: str) -> str:
        """Return what a journal over this snapshot has as its lower layer.  SnapshotNotFoundError."""
        self._require(name)
        return fingerprint_of(self._catalog.get(workspace, name).root)

    def workspaces_with(self, name: str) -> list[str]:
        """The keys of the workspaces that have a snapshot `name`, sorted."""
        if not self.layout.exists():
            return []
        return sorted(record.workspace for record in self._catalog.all() if record.name == name)

    @contextlib.contextmanager
    def live_tree(
        self, workspace: str, source: Source, *, progress: FileProgress = no_progress
    ) -> Iterator[MerkleTree]:
        """The present state of `source`, inside the block.  Only files that changed since the last scan are read.

        The content of a file is read from `source` when the caller asks for it, so it may be newer than the scan.
        """
        self.check_apart(source.identity)
        self.layout.create()
        with self.layout.shared():
            scanned, read = self._scan(workspace, source, progress)
            yield MerkleTree(scanned.root, read, source)

    # -- restoring -----------------------------------------------------------------------------
    def restore(
        self,
        workspace: str,
        target: DirectoryTarget,
        request: RestoreRequest,
        *,
        planned: Callable[[Plan], object] = lambda _: None,
        progress: FileProgress = no_progress,
    ) -> RestoredChanges:
        """Make `target` equal to a snapshot.

        `planned` is called before the first change.  `progress` is called with (files scanned, bytes read), and then
        with (changes done, all changes).  After a failure, or if the process dies, `interrupted` reports the restore
        until a restore of the same paths and snapshot, or of everything, is complete.
        """
        self.check_apart(target.source.identity)
        self._require(request.snapshot)
        with self.layout.shared(), self.layout.workspace_lock(workspace, exclusive=True):
            return self._restore(workspace, target, request, planned, progress)

    def _restore(
        self, workspace: str, target: DirectoryTarget, request: RestoreRequest, planned: Callable[[Plan], object],
        progress: FileProgress,
    ) -> RestoredChanges:  # fmt: skip
        wanted = MerkleTree(self._catalog.get(workspace, request.snapshot).root, self.blobs.listing, self.blobs)
        safety: SnapshotInfo | None = None
        read: ReadRows = self.blobs.listing
        if request.safety is None:
            scanned, read = self._scan(workspace, target.source, progress)
        else:
            safety, scanned = self._take(
                workspace, request.safety, target.source, request.safety_tag, "safety", "skip", progress
            )
        live = MerkleTree(scanned.root, read, target.source)
        todo = plan(live, wanted, request)
        planned(todo)
        intents = RestoreIntentLog(self.layout, workspace)
        previous = None
        with contextlib.suppress(DamagedError):  # the record of this restore replaces it
            previous = intents.read()
        tokens = () if previous is None else (previous.token, *previous.tokens)
        for token in tokens:
            target.remove_leftovers(scanned.leftovers, token)
        entry = InterruptedRestore(
            request.snapshot, request.paths, request.remove, request.safety, secrets.token_hex(6), tokens,
            time.time_ns(), previous, request.directories,
        )  # fmt: skip
        if not todo.steps:
            intents.close(entry)
            return RestoredChanges((), safety, tuple(todo.problems))
        intents.write(entry)
        with target.opened(entry.token):
            run = RestoreRun(todo, target, wanted, self.blobs, scanned.directory, progress)
            changes, problems = run.run()
            target.sync()
        intents.close(entry)
        return RestoredChanges(tuple(changes), safety, tuple(problems))

    def interrupted(self, workspace: str) -> InterruptedRestore | None:
        """The restore that failed or whose process died; None if there is none, or while a restore runs."""
        if not self.layout.exists() or not os.path.isdir(self.layout.workspace(workspace)):
            return None
        with self.layout.shared(), self.layout.if_idle(workspace) as is_idle:
            if is_idle:
                with contextlib.suppress(DamagedError):  # `check` reports it
                    return RestoreIntentLog(self.layout, workspace).read()
        return None

    # -- upkeep --------------------------------------------------------------------------------
    def check(self, progress: ByteProgress | None = None) -> CheckReport:
        """Read everything; report what is damaged and which snapshots need it."""
        return upkeep.check(self.layout, self.blobs, progress or no_progress)

    def collect_garbage(
        self, progress: ByteProgress | None = None, *, wait_s: float = 60.0, repair: bool = False
    ) -> GarbageReport:
        """Free what no snapshot needs.  EBUSY if other snapshots, restores or readers take longer than `wait_s`.

        `repair` also removes what is damaged; the next `take` stores again what its directory still has.
        """
        return upkeep.collect_garbage(
            self.layout, self.blobs, progress or no_progress, wait_s=wait_s, repair=repair
        )  # fmt: skip

    # -- scanning ------------------------------------------------------------------------------
    def _scan(self, workspace: str, source: Source, progress: FileProgress) -> tuple[Scanned, ReadRows]:
        """Scan the live state without storing it; and the function that reads its listings."""
        self.blobs.packs.refresh()
        sink = DigestSink(self.blobs)
        with self._scanned(workspace, source, sink, "skip", progress) as scanned:
            return scanned, sink.rows

    @contextlib.contextmanager
    def _scanned(
        self, workspace: str, source: Source, sink: Sink, unreadable: Unreadable, progress: FileProgress
    ) -> Iterator[Scanned]:
        """Scan `source` into `sink`; the stat cache learns the result unless the block fails."""
        cache = self._caches.get(workspace)
        if cache is None:
            path = os.path.join(self.layout.make_workspace(workspace), "cache")
            cache = self._caches[workspace] = StatCache(path)
        cache.prepare(self.layout.generation())
        scanned = source.scan(sink, cache, unreadable=unreadable, progress=progress)
        yield scanned
        if scanned.directory is not None:
            cache.learn(scanned.directory, scanned.changed)


def _unname(path: str) -> None:
    """Make the pack of a snapshot one that belongs to no snapshot."""
    os.rename(path, path.removesuffix(".snap") + ".pack")


# -- the records of the snapshots ------------------------------------------------------------------
class SnapshotCatalog:
    """Reads the records from the packs, and keeps them until the packs change."""

    def __init__(self, layout: Layout, packs: Packs) -> None:
        self._layout = layout
        self._packs = packs
        self._by_pack: dict[str, Record] = {}
        self._by_workspace: dict[str, tuple[int, dict[str, Record]]] = {}  # with the version of the packs

    def of(self, workspace: str) -> dict[str, Record]:
        """Return the snapshots of a workspace, by name, the oldest first.  Damaged ones are left out."""
        if not self._layout.exists():
            return {}
        self._packs.refresh()
        version, found = self._by_workspace.get(workspace, (-1, {}))
        if version != self._packs.version:
            version = self._packs.version
            found = {record.name: record for record in self._readable(self._prefix(workspace))}
            self._by_workspace[workspace] = version, found
        return found

    def all(self) -> list[Record]:
        """All snapshots, by workspace and oldest first, without damaged ones."""
        if not self._layout.exists():
            return []
        self._packs.refresh()
        return self._readable("")

    def get(self, workspace: str, name: str) -> Record:
        """One snapshot.  SnapshotNotFoundError; DamagedError if a damaged snapshot may be the one."""
        record = self.of(workspace).get(name)
        if record is not None:
            return record
        for path, error in self.damaged(workspace).items():
            raise DamagedError(f"a snapshot of this workspace is damaged ({error.damage})", path)
        raise SnapshotNotFoundError(name)

    def check_new(self, workspace: str, name: str) -> None:
        """SnapshotExistsError if the workspace has a snapshot of that name."""
        if name in self.of(workspace):
            raise SnapshotExistsError(name)

    def damaged(self, workspace: str | None = None) -> dict[str, DamagedError]:
        """The damage of each snapshot that cannot be read, by the path of its pack; None: of all workspaces."""
        prefix = "" if workspace is None else self._prefix(workspace)
        found = {
            name: error
            for name, error in self._packs.damaged.items()
            if name.startswith(prefix) and workspace_and_serial(name) is not None
        }
        for pack in self._snapshot_packs(prefix):
            try:
                self._read(pack)
            except DamagedError as error:
                found[pack.name] = error
        return {os.path.join(self._layout.packs, name): error for name, error in found.items()}

    def path(self, workspace: str, serial: int) -> str:
        """The path of a snapshot's pack."""
        return os.path.join(self._layout.packs, pack_name(self._layout.workspace_id(workspace), serial))

    def next_serial(self, workspace: str) -> int:
        """A serial number that the workspace never used.  The caller holds the naming lock."""
        path = os.path.join(self._layout.workspace(workspace), "serial")
        prefix = self._prefix(workspace)
        serial = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            serial = int(read_prefix(path))
        for name in os.listdir(self._layout.packs):
            if name.startswith(prefix):
                serial = max(serial, int(name[len(prefix) :].partition(".")[0]))
        write_atomically(path, b"%d" % (serial + 1), durable=False)
        return serial + 1

    def _prefix(self, workspace: str) -> str:
        return self._layout.workspace_id(workspace) + "-"

    def _snapshot_packs(self, prefix: str) -> Iterator[Pack]:
        for pack in self._packs.all():
            if pack.name.startswith(prefix) and workspace_and_serial(pack.name) is not None:
                yield pack

    def _readable(self, prefix: str) -> list[Record]:
        found = []
        for pack in self._snapshot_packs(prefix):
            with contextlib.suppress(DamagedError):  # `damaged` has it
                found.append(self._read(pack))
        return sorted(found, key=lambda record: (record.workspace, record.serial))

    def _read(self, pack: Pack) -> Record:
        cached = self._by_pack.get(pack.name)
        if cached is None:
            cached = self._by_pack[pack.name] = read_record(pack)
        return cached
