"""RemoteStore: snapshots in an object store, by name.

A name is a sequence of objects that are created once, its generations; the newest counts.  See `packs` for the
objects, and docs/store.md for what makes concurrent pushes and collections safe.

Threading: one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.errors import SnapshotNotFoundError
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Record, info_of
from protocol.store.object_store.packs import (
    FORMAT,
    GRACE_S,
    LARGEST_RECORD_BYTES,
    LONGEST_GRACE_S,
    NAMES,
    FormatObject,
    Generation,
    IndexCache,
    RemotePacks,
    decode_named,
    encoded_name,
    generation_of,
)
from protocol.tree import no_progress

if TYPE_CHECKING:
    from protocol.store.object_store.storage import Objects, Storage
    from protocol.store.object_store.transfer import PushReport, PushStart
    from protocol.store.object_store.upkeep import CollectionReport
    from protocol.store.store import Choose, Store
    from protocol.store.upkeep import CheckReport
    from protocol.tree import ByteProgress
    from protocol.volume_extensions import SnapshotInfo

_VERSION: Final = 1
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A snapshot in an object store: one generation of a name.  `record.workspace` is where it was taken."""

    generation: Generation
    record: Record

    @property
    def name(self) -> str:
        """Its name in this store."""
        return self.generation.name

    @property
    def info(self) -> SnapshotInfo:
        """All that is known about it."""
        return info_of(self.record)


class RemoteStore:
    """The store in `storage`.  `cache_directory`: where indexes of packs are kept on this machine.

    `grace_s` is for a store that does not exist yet.
    """

    def __init__(self, storage: Storage, *, cache_directory: str | None = None, grace_s: float = GRACE_S) -> None:
        self.storage = storage
        self.packs = RemotePacks(storage, IndexCache(cache_directory))
        self._new = FormatObject(grace_s=grace_s)
        self._format: FormatObject | None = None

    @property
    def directory(self) -> str:
        """The URL of the store."""
        return self.storage.url

    def close(self) -> None:
        """End all requests."""
        self.storage.close()

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the store itself ----------------------------------------------------------------------
    def exists(self) -> bool:
        """Whether there is a store.  EINVAL for one of another version."""
        return self._opened(self.storage.read(FORMAT))

    def _opened(self, answer: Future[bytes]) -> bool:
        try:
            data = answer.result()
        except FileNotFoundError:
            return False
        try:
            found = msgspec.json.decode(data, type=FormatObject)
        except ValueError:
            what = (
                "the object `format` is damaged, or not of a snapshot store: choose another prefix; if snapshots are "
                "here, delete the object, and the next `vfsd push` writes it again"
            )
            raise OSError(errno.EINVAL, what, self.directory) from None
        if found.vfsd_object_store != _VERSION or not 0 <= found.grace_s <= LONGEST_GRACE_S:
            raise OSError(errno.EINVAL, "not a snapshot store that this vfsd knows: use a newer vfsd", self.directory)
        self._format = found
        return True

    def require(self) -> None:
        """ENOENT if there is no store."""
        if not self.exists():
            raise self._no_store()

    def _no_store(self) -> OSError:
        self.storage.list(NAMES).result()  # names a missing bucket, which a missing object does not
        return FileNotFoundError(errno.ENOENT, "no snapshot store here; `vfsd push` makes one", self.directory)

    def create(self, answer: Future[bytes] | None = None) -> None:
        """Create the store if there is none.  `answer` is that to a read of `format`."""
        while not self._opened(answer or self.storage.read(FORMAT)):
            answer = None
            try:
                self.storage.create(FORMAT, msgspec.json.encode(self._new)).result()
            except FileNotFoundError:
                raise self._no_store() from None

    @property
    def grace_s(self) -> float:
        """How long a condemned pack stays readable."""
        if self._format is None:
            self.require()
        assert self._format is not None
        return self._format.grace_s

    # -- names ---------------------------------------------------------------------------------
    def newest(self) -> dict[str, Generation]:
        """The newest generation of every name, also of dropped ones."""
        return newest_of(self.storage.list(NAMES).result())

    def generation(self, name: str) -> Generation | None:
        """The newest generation of one name, which may be dropped; None if there never was one."""
        return newest_of(self.storage.list(f"{NAMES}/{encoded_name(name)}").result()).get(name)

    def replaced(self, name: str, root: bytes) -> RemoteSnapshot | None:
        """The newest generation of a name whose root listing is `root`, also if it was dropped or replaced since.

        None if there is none (any more): collections delete old generations.
        """
        found = self.storage.list(f"{NAMES}/{encoded_name(name)}").result()
        generations = sorted((one for info in found if (one := generation_of(info.key, info.size_bytes))), reverse=True)
        records = self.records((one for one in generations if one.name == name), lambda _one, _error: None)
        return next((one for one in records if one.record.root.content == root), None)

    def records(
        self, generations: Iterable[Generation], damaged: Callable[[Generation, DamagedError], object] | None = None
    ) -> list[RemoteSnapshot]:
        """Read the records of generations that are not dropped; leave out those that are deleted meanwhile.

        `damaged` is called with what cannot be read; without it: DamagedError.
        """
        begun = [
            (one, self.storage.read(one.key) if one.size_bytes <= LARGEST_RECORD_BYTES else None)
            for one in generations
            if not one.is_dropped
        ]
        found = []
        for one, answer in begun:
            try:
                data = b"" if answer is None else answer.result()
                found.append(RemoteSnapshot(one, decode_named(data, one.key)))
            except FileNotFoundError:
                continue
            except DamagedError as error:
                if damaged is None:
                    raise error.in_object_store(self.directory) from None
                damaged(one, error)
        return found

    def all(self) -> list[RemoteSnapshot]:
        """All snapshots, oldest first, without damaged ones.  ENOENT if there is no store."""
        return self._all(lambda _one, _error: None)

    def _all(self, damaged: Callable[[Generation, DamagedError], object]) -> list[RemoteSnapshot]:
        answer = self.storage.read(FORMAT)
        newest = self.newest()
        if not self._opened(answer):
            raise self._no_store()
        return sorted(self.records(newest.values(), damaged), key=lambda one: (one.record.created_ns, one.name))

    def get(self, name: str | None) -> RemoteSnapshot:
        """The snapshot `name`; None: the newest.  SnapshotNotFoundError, ENOENT, DamagedError."""
        if name is not None:
            self.require()
            newest = self.generation(name)
            found = self.records([newest]) if newest is not None else []
        else:
            unread: dict[str, DamagedError] = {}
            found = self._all(lambda one, error: unread.setdefault(one.name, error))[-1:]
            if unread:  # one of them may be the newest
                damaged, advice = min(unread), " (#NAME takes another snapshot)" if found else ""
                said = f"the newest snapshot is unknown, because the record of {damaged} is damaged{advice}"
                raise DamagedError(said, url=self.directory)
        if found:
            return found[0]
        there = [one for one, generation in sorted(self.newest().items()) if not generation.is_dropped]
        shown = ", ".join(there[:_NAMES_SHOWN]) + (", ..." if len(there) > _NAMES_SHOWN else "")
        if name is None or not there:
            raise FileNotFoundError(errno.ENOENT, "the store has no snapshots", self.directory)
        raise FileNotFoundError(errno.ENOENT, f"the store has no snapshot {name}; it has {shown}", self.directory)

    # -- as a store on disk --------------------------------------------------------------------
    def workspaces(self) -> dict[str, list[SnapshotInfo]]:
        """The snapshots, oldest first, by the workspace that they were taken of."""
        found: dict[str, list[SnapshotInfo]] = {}
        for one in self.all():
            found.setdefault(one.record.workspace, []).append(one.info)
        return found

    def snapshots(self, workspace: str) -> list[SnapshotInfo]:
        """The snapshots of a workspace, oldest first."""
        return self.workspaces().get(workspace, [])

    def damaged_snapshots(self) -> Mapping[str, DamagedError]:
        """The damage of each snapshot whose record cannot be read, by its key."""
        found: dict[str, DamagedError] = {}
        self._all(lambda one, error: found.setdefault(one.key, error))
        return found

    def drop(self, workspace: str, name: str) -> None:
        """Drop a snapshot of a workspace; a later collection frees what it needs.

        SnapshotNotFoundError.  EBUSY if another process replaces the snapshot at this moment: the new one stays.
        """
        newest = self.generation(name)
        found = [] if newest is None else self.records([newest])
        if newest is None or not any(one.record.workspace == workspace for one in found):
            raise SnapshotNotFoundError(name)
        if not self.drop_generation(newest).result():
            what = f"another process has just replaced the snapshot {name}, which was not dropped: look at it first"
            raise OSError(errno.EBUSY, what, self.directory)

    def drop_generation(self, one: Generation) -> Future[bool]:
        """Drop this generation of a name, unless another process has replaced it; return whether it is dropped.

        The next generation is an empty object.
        """
        return self.storage.create(Generation(one.name, one.number + 1).key, b"")

    def prune(self, choose: Choose) -> list[str]:
        """Drop the snapshots that `choose` returns, which is called for each workspace, oldest first.

        Return the names that another process replaced after `choose` was called: the new snapshots stay.  A snapshot
        that is pushed meanwhile stays, too.  Each name is dropped atomically; an interrupted call has dropped some.
        """
        groups: dict[str, dict[str, RemoteSnapshot]] = {}
        for one in self.all():
            groups.setdefault(one.record.workspace, {})[one.name] = one
        chosen = [
            group[name]
            for workspace, group in groups.items()
            for name in choose(workspace, [one.info for one in group.values()], {})
        ]
        chosen.sort(key=lambda one: one.record.created_ns)
        begun = [(one.name, self.drop_generation(one.generation)) for one in chosen]
        return [name for name, answer in begun if not answer.result()]

    # -- moving snapshots ----------------------------------------------------------------------
    def push(
        self, local: Store, workspace: str, snapshot: str, *, name: str | None = None, replace: bool = False,
        progress: ByteProgress = no_progress, start: PushStart | None = None,
        leased: Callable[[], object] = lambda: None, published: Callable[[], object] = lambda: None,
    ) -> PushReport:  # fmt: skip
        """Upload a snapshot of `local` as `name`: see `transfer.Push`.

        `start` is from `start_push`.  `leased` is called when the snapshot may be dropped from `local`, and `published`
        when the name is there.
        """
        from protocol.store.object_store.transfer import Push  # noqa: PLC0415 it imports this module

        with local.leased(workspace, snapshot) as (record, blobs):
            leased()
            return Push(
                self, blobs, record, name or snapshot,
                replace=replace, progress=progress, start=start, published=published,
            ).run()  # fmt: skip

    def start_push(self) -> PushStart:
        """Begin the first requests of a push."""
        from protocol.store.object_store.transfer import PushStart  # noqa: PLC0415 it imports this module

        return PushStart(self.storage)

    def pull(
        self, local: Store, found: RemoteSnapshot, *, workspace: str, name: str | None = None,
        progress: ByteProgress = no_progress,
    ) -> SnapshotInfo:  # fmt: skip
        """Download a snapshot into `local`, as snapshot `name` of `workspace`: see `transfer.RemoteSource`."""
        from protocol.store.object_store.transfer import RemoteSource  # noqa: PLC0415 start-up: only pull needs it

        source = RemoteSource(self.packs, found.record, local.blobs, progress)
        with self._advice():
            return local.take(
                workspace, name or found.name, source, tag=found.record.tag, created_ns=found.record.created_ns
            )

    # -- upkeep --------------------------------------------------------------------------------
    def check(self, progress: ByteProgress | None = None) -> CheckReport:
        """Read everything; report what is damaged and which snapshots need it."""
        from protocol.store.object_store.upkeep import check  # noqa: PLC0415 it imports this module

        return check(self, progress or no_progress)

    def collect_garbage(self, progress: ByteProgress | None = None, *, repair: bool = False) -> CollectionReport:
        """Condemn what no snapshot needs, and delete what was condemned for longer than the grace period.

        `repair` also deletes what is damaged; a push with `replace` uploads it again.
        """
        from protocol.store.object_store.upkeep import Collection  # noqa: PLC0415 it imports this module

        with self._advice():
            return Collection(self, progress or no_progress).run(repair=repair)

    @contextlib.contextmanager
    def _advice(self) -> Iterator[None]:
        """Advise to check this store if the block finds damage."""
        try:
            yield
        except DamagedError as error:
            raise error.in_object_store(self.directory) from None


def newest_of(objects: Objects) -> dict[str, Generation]:
    """The newest generation of each name, from a listing of names."""
    newest: dict[str, Generation] = {}
    for info in objects:
        one = generation_of(info.key, info.size_bytes)
        if one is not None and (one.name not in newest or newest[one.name] < one):
            newest[one.name] = one
    return newest
