"""Store: snapshots of directories and trees, each content kept once, for several processes and workspaces at once.

A workspace is named by a key of the caller's, such as "host:/srv/x".  What `take` returned is durable: the pack with
the snapshot is synced before it gets its name, and the name after.  `drop` takes the name away; the contents
go with the next `collect_garbage`.

Threading: any thread; two calls for one workspace at a time are in order, and cost each other nothing but time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from protocol.errors import SnapshotExistsError, SnapshotNotFoundError
from protocol.store import upkeep
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable, no_progress
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import Blobs, Digesting, Storing
from protocol.store.format.layout import (
    NO_SPACE,
    Layout,
    default_directory,
    is_inside,
    read_regular,
    sync_directory,
    write_atomically,
)
from protocol.store.format.objects import NewObjects
from protocol.store.format.packs import GENERATION, DamagedError, Pack, PackWriter
from protocol.store.format.records import (
    Record,
    StoredSnapshot,
    encode_record,
    info_of,
    pack_name,
    read_record,
    workspace_and_serial,
)  # fmt: skip
from protocol.store.format.rows import Row
from protocol.store.journal import Interrupted, RestoreJournal
from protocol.store.journal import RestoreEntry as JournalEntry
from protocol.store.restore import RestoredChanges, apply, plan
from protocol.store.trees import MerkleTree, ReadRows
from protocol.store.upkeep import CheckReport, GarbageReport

if TYPE_CHECKING:
    from protocol.diff.tree_diff import Change
    from protocol.store.directory.source import Source
    from protocol.store.directory.target import Target

__all__ = ["Store"]

_VERSION: Final = 1
Kind = Literal["user", "safety"]


class Store:
    """The store in `directory` (by default where the user's is); it is made when the first snapshot is taken."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.layout = Layout(default_directory() if directory is None else os.fspath(directory))
        self.blobs = Blobs(self.layout)
        self._caches: dict[str, StatCache] = {}
        self._records: dict[str, Record] = {}
        self._listed: dict[str, tuple[int, dict[str, Record]]] = {}  # by workspace: of which version of the packs

    @property
    def directory(self) -> str:
        """Where it is."""
        return self.layout.directory

    def close(self) -> None:
        """Close its files.  It opens them again when it is used again."""
        self.blobs.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- snapshots -----------------------------------------------------------------------------
    def snapshots(self, workspace: str) -> Sequence[StoredSnapshot]:
        """All snapshots of a workspace, oldest first."""
        return [info_of(record) for record in self._workspace_records(workspace)]

    def snapshot(self, workspace: str, name: str) -> StoredSnapshot:
        """One snapshot.  SnapshotNotFoundError."""
        return info_of(self._record(workspace, name))

    def take(
        self,
        workspace: str,
        name: str,
        source: Source,
        *,
        tag: str | None = None,
        kind: Kind = "user",
        unreadable: Unreadable = "fail",
        progress: FileProgress | None = None,
    ) -> StoredSnapshot:
        """Keep the state of `source` as it is now under `name`.

        SnapshotExistsError; EACCES naming a path that cannot be read, unless `unreadable` is "skip"; EINVAL where the
        store lies inside the directory.
        """
        with self._taking(workspace, source), self._naming_full_disk():
            info, _ = self._take(workspace, name, source, tag, kind, unreadable, progress or no_progress)
        return info

    @contextlib.contextmanager
    def _taking(self, workspace: str, source: Source) -> Iterator[None]:
        self.check_apart(source.identity)
        self.layout.create()
        with self.layout.shared(), self.layout.changing(workspace, exclusive=False):
            yield

    @contextlib.contextmanager
    def _naming_full_disk(self) -> Iterator[None]:
        """ENOSPC names the store: the system call that failed had only a descriptor."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE or error.filename is not None:
                raise
            what = f"{error.strerror} for the snapshot store; `vfsd store gc` frees what dropped snapshots had"
            raise OSError(error.errno, what, self.directory) from None

    def check_apart(self, identity: tuple[int, int] | None) -> None:
        """EINVAL where the store lies inside the directory (st_dev, st_ino): it would keep itself."""
        if identity is not None and is_inside(self.directory, identity):
            raise OSError(
                errno.EINVAL,
                "the snapshot store lies inside the directory it is to keep: name another with $VFSD_STORE_DIR",
                self.directory,
            )

    def _take(
        self, workspace: str, name: str, source: Source, tag: str | None, kind: Kind, unreadable: Unreadable,
        progress: FileProgress,
    ) -> tuple[StoredSnapshot, Scanned]:  # fmt: skip
        layout, blobs = self.layout, self.blobs
        created_ns = time.time_ns()
        blobs.packs.refresh()
        self._check_new(workspace, name)
        generation = self.generation()
        cache = self._cache(workspace)
        temporary = os.path.join(layout.tmp, f"{os.getpid():x}-{time.monotonic_ns():x}.pack")
        objects = NewObjects(layout, blobs.objects)
        try:
            with PackWriter(temporary) as pack:
                sink = Storing(blobs, pack, objects)
                trusted = cache.generation == generation
                found = source.scan(sink, cache, trusted=trusted, unreadable=unreadable, progress=progress)
                objects.publish()
                record = self._commit(workspace, name, tag, kind, created_ns, found, pack)
        finally:
            objects.discard()
        blobs.packs.refresh()
        if found.directory is not None:
            cache.learn(found.directory, found.changed, generation)
        return info_of(record), found

    def _commit(
        self, workspace: str, name: str, tag: str | None, kind: Kind, created_ns: int, found: Scanned, pack: PackWriter
    ) -> Record:
        layout = self.layout
        with layout.naming(workspace):
            self._check_new(workspace, name)
            serial = self._next_serial(workspace)
            record = Record(
                _VERSION, workspace, name, serial, created_ns, found.counts.files, found.counts.directories,
                found.counts.size_bytes, tag, kind, found.unstable, found.unreadable, found.root,
            )  # fmt: skip
            path = os.path.join(layout.packs, pack_name(layout.workspace_id(workspace), serial))
            pack.finish(path, encode_record(record))
            sync_directory(layout.packs)
        return record

    def drop(self, workspace: str, name: str) -> None:
        """Forget a snapshot; others are not affected.  SnapshotNotFoundError."""
        if not self.layout.exists():
            raise SnapshotNotFoundError(name)
        with self.layout.shared(), self.layout.naming(workspace):
            record = self._record(workspace, name)
            old = os.path.join(self.layout.packs, pack_name(self.layout.workspace_id(workspace), record.serial))
            os.rename(old, old.removesuffix(".snap") + ".pack")
            sync_directory(self.layout.packs)
        self.blobs.packs.refresh()

    def workspaces(self) -> dict[str, list[StoredSnapshot]]:
        """The snapshots of every workspace that has any, oldest first, by the workspace's key."""
        found: dict[str, list[StoredSnapshot]] = {}
        for record in self.records():
            found.setdefault(record.workspace, []).append(info_of(record))
        return found

    def records(self) -> list[Record]:
        """The records of all snapshots, of each workspace oldest first; what is damaged is left out."""
        if not self.layout.exists():
            return []
        self.blobs.packs.refresh()
        found = []
        for pack in self.blobs.packs.all():
            if workspace_and_serial(pack.name) is not None:
                with contextlib.suppress(DamagedError):
                    found.append(self._record_of(pack))
        return sorted(found, key=lambda record: (record.workspace, record.serial))

    def _workspace_records(self, workspace: str) -> list[Record]:
        """The records of a workspace's snapshots, oldest first."""
        return list(self._by_name(workspace).values())

    def _by_name(self, workspace: str) -> dict[str, Record]:
        """The records of a workspace's snapshots by name, oldest first; looked for anew when the packs are others."""
        if not self.layout.exists():
            return {}
        packs = self.blobs.packs
        packs.refresh()
        version, found = self._listed.get(workspace, (-1, {}))
        if version == packs.version:
            return found
        version = packs.version
        prefix = self.layout.workspace_id(workspace) + "-"
        records = []
        for pack in packs.all():
            if pack.name.startswith(prefix) and pack.name.endswith(".snap"):
                with contextlib.suppress(DamagedError):  # see `damaged_snapshots`
                    records.append(self._record_of(pack))
        found = {record.name: record for record in sorted(records, key=lambda record: record.serial)}
        self._listed[workspace] = version, found
        return found

    def _record(self, workspace: str, name: str) -> Record:
        record = self._by_name(workspace).get(name)
        if record is not None:
            return record
        self._raise_if_damaged(workspace)
        raise SnapshotNotFoundError(name)

    def _raise_if_damaged(self, workspace: str) -> None:
        """DamagedError where a snapshot of the workspace cannot be read: it may be the one that is not found."""
        for pack, error in self.damaged_snapshots(workspace).items():
            raise DamagedError(f"a snapshot of this workspace is damaged ({error.strerror})", pack)

    def damaged_snapshots(self, workspace: str | None = None) -> dict[str, DamagedError]:
        """What is wrong with snapshots that cannot be read, by the path of the file; of all workspaces for None."""
        prefix = "" if workspace is None else self.layout.workspace_id(workspace) + "-"
        found = {
            name: error
            for name, error in self.blobs.packs.damaged.items()
            if name.startswith(prefix) and workspace_and_serial(name) is not None
        }
        for pack in self.blobs.packs.all():
            if pack.name.startswith(prefix) and workspace_and_serial(pack.name) is not None:
                try:
                    self._record_of(pack)
                except DamagedError as error:
                    found[pack.name] = error
        return {os.path.join(self.layout.packs, name): error for name, error in found.items()}

    def _record_of(self, pack: Pack) -> Record:
        known = self._records.get(pack.name)
        if known is None:
            known = self._records[pack.name] = read_record(pack)
        return known

    def _check_new(self, workspace: str, name: str) -> None:
        if name in self._by_name(workspace):
            raise SnapshotExistsError(name)

    def _next_serial(self, workspace: str) -> int:
        """A number that this workspace never had; under the naming lock."""
        path = os.path.join(self.layout.workspace(workspace), "serial")
        prefix = self.layout.workspace_id(workspace) + "-"
        serial = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            serial = int(read_regular(path, 100))
        for name in os.listdir(self.layout.packs):
            if name.startswith(prefix):
                serial = max(serial, int(name[len(prefix) :].partition(".")[0]))
        write_atomically(path, b"%d" % (serial + 1), durable=False)
        return serial + 1

    # -- trees ---------------------------------------------------------------------------------
    @contextlib.contextmanager
    def tree(self, workspace: str, name: str) -> Iterator[MerkleTree]:
        """The state of a snapshot, for the length of a block.  SnapshotNotFoundError."""
        if not self.layout.exists():
            raise SnapshotNotFoundError(name)
        with self.layout.shared():
            record = self._record(workspace, name)
            yield MerkleTree(record.root, self.blobs.listing, _StoredContents(self.blobs))

    @contextlib.contextmanager
    def live_tree(
        self, workspace: str, source: Source, *, unreadable: Unreadable = "skip", progress: FileProgress | None = None
    ) -> Iterator[MerkleTree]:
        """The state of `source` at this moment, for the length of a block; what is unchanged is not read.

        The content of a file is read when it is asked for, and may be a later one by then.
        """
        self.check_apart(source.identity)
        self.layout.create()
        with self.layout.shared():
            found, read = self._look(workspace, source, unreadable, progress or no_progress)
            yield MerkleTree(found.root, read, _LiveContents(source))

    # -- restoring -----------------------------------------------------------------------------
    def restore(
        self,
        workspace: str,
        name: str,
        target: Target,
        paths: Sequence[bytes] = (),
        *,
        safety: str | None,
        safety_tag: str | None = None,
        remove: bool = True,
        planned: Callable[[Sequence[Change]], object] | None = None,
        progress: FileProgress | None = None,
    ) -> RestoredChanges:
        """Make `target` (below `paths`, or all of it) what snapshot `name` is.

        The state before is kept as snapshot `safety`, tagged `safety_tag`, unless `safety` is None.  Without `remove`
        what the snapshot lacks stays.  `planned` hears of what is about to be changed, before anything is.  `progress`
        hears of (files looked at, bytes read) and then of (changes done, of how many).  When it fails, or its process
        dies, `interrupted` says so until a restore of the same, or of everything, has come to its end.
        """
        self.check_apart(target.source.identity)
        if not self.layout.exists():
            raise SnapshotNotFoundError(name)
        with self.layout.shared(), self.layout.changing(workspace, exclusive=True):
            keep = None if safety is None else (safety, safety_tag)
            return self._restore(workspace, name, target, paths, keep, remove, planned, progress or no_progress)

    def _restore(
        self, workspace: str, name: str, target: Target, paths: Sequence[bytes], keep: tuple[str, str | None] | None,
        remove: bool, planned: Callable[[Sequence[Change]], object] | None, progress: FileProgress,
    ) -> RestoredChanges:  # fmt: skip
        wanted = MerkleTree(self._record(workspace, name).root, self.blobs.listing, _StoredContents(self.blobs))
        kept: StoredSnapshot | None = None
        read: ReadRows
        safety = None if keep is None else keep[0]
        if keep is not None:
            with self._naming_full_disk():
                kept, found = self._take(workspace, keep[0], target.source, keep[1], "safety", "skip", progress)
            read = self.blobs.listing
        else:
            found, read = self._look(workspace, target.source, "skip", progress)
        live = MerkleTree(found.root, read, _LiveContents(target.source))
        todo = plan(live, wanted, paths, remove=remove)
        if planned is not None:
            planned(todo.changes())
        journal = RestoreJournal(self.layout, workspace)
        previous = journal.read()
        tokens = () if previous is None else (previous.token, *previous.tokens)
        for token in tokens:
            target.clean(found.leftovers, token)
        entry = JournalEntry(
            name, tuple(paths), remove, safety, secrets.token_hex(6), tokens, time.time_ns(), previous
        )  # fmt: skip
        if not todo.steps:
            journal.close(entry)
            return RestoredChanges((), kept, tuple(todo.problems))
        journal.write(entry)
        with target.opened(entry.token):
            changes, problems = apply(todo, target, live, wanted, self.blobs, found.directory, progress)
            target.sync()
        journal.close(entry)
        return RestoredChanges(tuple(changes), kept, tuple(problems))

    def interrupted(self, workspace: str) -> Interrupted | None:
        """The restore that a death, or an error, has left half done; None where there is none, or one is at work."""
        if not self.layout.exists() or not os.path.isdir(self.layout.workspace(workspace)):
            return None
        with self.layout.shared(), self.layout.if_nobody_changes(workspace) as is_idle:
            entry = RestoreJournal(self.layout, workspace).read() if is_idle else None
        if entry is None:
            return None
        return Interrupted(entry.snapshot, entry.paths, entry.safety, entry.started_ns)

    # -- upkeep --------------------------------------------------------------------------------
    def check(self, progress: upkeep.FileProgress | None = None) -> CheckReport:
        """Read everything, and say what is damaged and which snapshots need it."""
        return upkeep.check(self.layout, self.blobs, progress or no_progress)

    def collect_garbage(
        self, progress: upkeep.FileProgress | None = None, *, wait_s: float = 60.0, repair: bool = False
    ) -> GarbageReport:
        """Free what no snapshot needs.  EBUSY when snapshots, restores or readers go on for longer than `wait_s`.

        With `repair` what is damaged is taken out; the next `take` brings what its directory still has.
        """
        return upkeep.collect_garbage(
            self.layout, self.blobs, progress or no_progress, wait_s=wait_s, repair=repair
        )  # fmt: skip

    def forget_interrupted(self, workspace: str, target: Target) -> None:
        """Let the state that an interrupted restore left be as it is; only its temporary files are removed."""
        if not self.layout.exists():
            return
        with self.layout.shared(), self.layout.changing(workspace, exclusive=True):
            journal = RestoreJournal(self.layout, workspace)
            entry = journal.read()
            if entry is not None:
                found, _ = self._look(workspace, target.source, "skip", no_progress)
                for token in (entry.token, *entry.tokens):
                    target.clean(found.leftovers, token)
                journal.forget()

    # -- what several calls need ---------------------------------------------------------------
    def _look(
        self, workspace: str, source: Source, unreadable: Unreadable, progress: FileProgress
    ) -> tuple[Scanned, ReadRows]:
        """The live state, and what reads its listings; nothing is kept of it but the stat cache."""
        self.blobs.packs.refresh()
        sink = Digesting(self.blobs)
        cache = self._cache(workspace)
        generation = self.generation()
        trusted = cache.generation == generation
        found = source.scan(sink, cache, trusted=trusted, unreadable=unreadable, progress=progress)
        if found.directory is not None:
            cache.learn(found.directory, found.changed, generation)
        return found, sink.rows

    def _cache(self, workspace: str) -> StatCache:
        cache = self._caches.get(workspace)
        if cache is None:
            path = os.path.join(self.layout.make_workspace(workspace), "cache")
            cache = self._caches[workspace] = StatCache(path)
        return cache

    def generation(self) -> int:
        """How often garbage was collected; -1, which is no generation, where the file is damaged."""
        try:
            return int(read_regular(os.path.join(self.directory, GENERATION), 100))
        except FileNotFoundError:
            return 0
        except ValueError:
            return -1


class _StoredContents:
    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def read(self, path: bytes, row: Row, offset: int, size: int) -> bytes:  # noqa: ARG002 -- by digest
        return self._blobs.read(row.content, offset, size)

    def chunks(self, path: bytes, row: Row, size: int) -> Iterator[bytes]:  # noqa: ARG002 -- by digest
        return self._blobs.chunks(row.content, size)


class _LiveContents:
    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, path: bytes, row: Row, offset: int, size: int) -> bytes:  # noqa: ARG002 -- by path
        return self._source.read(path, offset, size)

    def chunks(self, path: bytes, row: Row, size: int) -> Iterator[bytes]:  # noqa: ARG002 -- by path
        return self._source.chunks(path, size)
