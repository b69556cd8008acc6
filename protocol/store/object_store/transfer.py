"""Transfers: a push uploads what a remote store lacks of a snapshot, and then publishes its name; a pull downloads.

Invariants of a push, on which the argument in docs/store.md rests:
1. A name is published only after a view, not older than half of the grace period, in which every blob of the snapshot
   is in a pack that is not condemned; or is part of a base, and the base is the newest generation of its name, and was
   published after the last repair.
2. A push reports success only after a second view, which began after the name was published, shows the same.  What is
   missing there is uploaded again, to a new pack.

So an interrupted push leaves packs that no name needs.  The next push finds their blobs, and uploads only the rest.

`RemoteSource` is the way back: a snapshot of a remote store as the source of a local one.

Threading: one thread.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from protocol.store.directory.scan import FileProgress, Scanned, Unreadable
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Blobs, Sink
from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import DamagedError, MemoryPack, damaged_blob
from protocol.store.format.rows import Record, Row, TreeCounts, needed_by
from protocol.store.object_store.packs import (
    CLOCK_ERROR_S,
    CONDEMNED,
    FORMAT,
    NAMES,
    PACK_BYTES,
    PACKS,
    REPAIRED,
    Generation,
    PackKind,
    decode_chunk_map,
    decode_listing_of,
    encode_chunk_map,
    encode_named,
    new_pack_name,
)
from protocol.store.object_store.remote import RemoteSnapshot, RemoteStore, newest_of
from protocol.tree import Chunk, Hole, no_progress

if TYPE_CHECKING:
    from protocol.store.format.rows import Record
    from protocol.store.object_store.packs import PackView, RemotePacks
    from protocol.store.object_store.storage import Objects, Storage
    from protocol.tree import ByteProgress

_UPLOADS: Final = 4  # at once: as many packs are in memory
_BASES_TRIED: Final = 4
_ROUNDS: Final = 10  # of uploads, while collections condemn what the push relies on


@dataclass(frozen=True, slots=True)
class PushReport:
    """The outcome of a push.

    `is_new` is False if the store already had this state under this name.  If a repair had deleted contents of it,
    they were uploaded again.
    """

    name: str
    generation: int
    files: int
    size_bytes: int
    uploaded_bytes: int
    uploaded_contents: int
    is_new: bool


class _Item(NamedTuple):
    """A blob of the snapshot.  `chunk` is the number of a chunk of the content `content`."""

    kind: PackKind
    size: int
    content: bytes
    chunk: int | None = None
    is_map: bool = False


class PushStart:
    """The first requests of a push, whose answers are needed later; the caller may work meanwhile.

    The listing of packs begins when that of the markers has ended, as a view needs it.
    """

    def __init__(self, storage: Storage) -> None:
        self.began_s = time.monotonic()
        self.format = storage.read(FORMAT)
        self.names = storage.list(NAMES)
        self.markers = storage.list(CONDEMNED)
        self.repairs = storage.list(REPAIRED)


class Push:
    """A push of the local snapshot `record` as `name`.

    `replace` makes a new generation of a name that exists, and looks for everything; without it: FileExistsError if the
    name has another state.
    """

    def __init__(
        self, remote: RemoteStore, blobs: Blobs, record: Record, name: str, *, replace: bool, progress: ByteProgress,
        start: PushStart | None = None, published: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._remote = remote
        self._storage = remote.storage
        self._blobs = blobs
        self._record = record
        self._name = name
        self._replace = replace
        self._progress = progress
        self._start = start or PushStart(self._storage)
        self._published = published
        self._base: RemoteSnapshot | None = None
        self._items: dict[bytes, _Item] = {}
        self._uploaded_bytes = 0
        self._uploaded = 0

    def run(self) -> PushReport:
        """Push.  OSError; DamagedError if the local snapshot is damaged."""
        began = self._start.began_s
        self._remote.create(self._start.format)
        objects = self._start.names.result()
        current = newest_of(objects).get(self._name)
        there = self._there(current)
        if there is not None:
            self._published()
            self._mend(there, objects)
            return self._report(there.generation.number, is_new=False)
        markers = self._start.markers.result()
        packs = self._storage.list(PACKS)  # after the markers; the answer comes while the snapshots are compared
        if not self._replace:
            self._choose_base(objects)
        self._items = self._needed()
        self._upload(self._remote.packs.view_of(markers, packs))
        for _ in range(_ROUNDS):
            if time.monotonic() - began <= self._remote.grace_s / 2:
                break
            began = time.monotonic()
            self._upload(self._remote.packs.view())
        published = self._publish(current)
        self._published()
        self._complete()
        return self._report(published, is_new=True)

    def _complete(self) -> None:
        """Upload what no usable pack has any more, until there is nothing.  EAGAIN."""
        for _ in range(_ROUNDS):
            if self._is_complete():
                return
        what = "collections of this store delete what the push uploads: repeat it when they have ended"
        raise OSError(errno.EAGAIN, what, self._remote.directory)

    def _report(self, number: int, *, is_new: bool) -> PushReport:
        record = self._record
        return PushReport(
            self._name, number, record.files, record.size_bytes, self._uploaded_bytes, self._uploaded, is_new
        )

    # -- the name ------------------------------------------------------------------------------
    def _there(self, current: Generation | None) -> RemoteSnapshot | None:
        """The snapshot, if the name has this state already.  FileExistsError if it has another one that must stay."""
        if current is None or current.is_dropped or self._replace:
            return None
        found = self._remote.records([current])
        if found and found[0].record.root == self._record.root:
            return found[0]
        if found:
            what = f"the store has another snapshot {self._name}: choose a name with --as, or add --replace"
            raise FileExistsError(errno.EEXIST, what, self._remote.directory)
        return None

    def _mend(self, there: RemoteSnapshot, objects: Objects) -> None:
        """Upload what a repair deleted of a snapshot that is there, after it was published.

        This is the last step of the push that published it: what no usable pack has now is uploaded.
        """
        published_s = next((info.modified_s for info in objects if info.key == there.generation.key), 0.0)
        if published_s > _last_repair_s(self._start.repairs.result()):
            return
        if there.record.inodes != self._record.inodes:  # another state of the same content: it needs others
            self._record = structs.replace(self._record, inodes=None)
        self._items = self._needed()
        self._complete()

    def _publish(self, current: Generation | None) -> int:
        """Create the next generation of the name, and return its number."""
        while True:
            number = current.number + 1 if current is not None else 1
            record = encode_named(structs.replace(self._record, name=self._name, serial=number, kind="user"))
            if self._storage.create(Generation(self._name, number).key, record).result():
                return number
            current = self._remote.generation(self._name)  # another process was faster
            there = self._there(current)
            if there is not None:
                return there.generation.number

    # -- what is missing -----------------------------------------------------------------------
    def _choose_base(self, objects: Objects) -> None:
        """Choose a recent snapshot of the store whose listings are here: what it shares needs no comparison."""
        newest = newest_of(objects)
        times = {info.key: info.modified_s for info in objects}
        recent = sorted(newest.values(), key=lambda one: times.get(one.key, 0.0), reverse=True)
        repaired_s = _last_repair_s(self._start.repairs.result())
        recent = [one for one in recent if not one.is_dropped and times.get(one.key, 0.0) > repaired_s][:_BASES_TRIED]
        for one in self._remote.records(recent, lambda _one, _error: None):
            if self._blobs.packs.find(one.record.root.content) is not None:
                self._base = one
                return

    def _needed(self) -> dict[bytes, _Item]:
        """The blobs of the snapshot that the base does not have, in the order of a walk."""
        items: dict[bytes, _Item] = {}
        base = None if self._base is None else self._base.record
        self._add_needed(items, self._record.root, None if base is None else base.root)
        if self._record.inodes is not None:
            inodes: dict[bytes, _Item] = {}
            try:
                self._add_needed(inodes, self._record.inodes, None if base is None else base.inodes)
                items.update(inodes)
            except DamagedError:  # the content is complete without them
                self._record = structs.replace(self._record, inodes=None)
        return items

    def _add_needed(self, items: dict[bytes, _Item], root: Row, base: Row | None) -> None:
        pending: list[tuple[Row, Row | None]] = [(root, base)]
        while pending:
            row, old = pending.pop()
            if not row.content or (old is not None and old.mode == row.mode and old.content == row.content):
                continue
            if stat.S_ISREG(row.mode):
                self._add_content(items, row)
            elif stat.S_ISDIR(row.mode) and row.content not in items:
                place = self._blobs.packs.find(row.content)
                items[row.content] = _Item("tree", 0 if place is None else place.length, row.content)
                before: dict[bytes, Row] = {}
                if old is not None and stat.S_ISDIR(old.mode):
                    with contextlib.suppress(DamagedError):  # then all of it is compared
                        before = {below.name: below for below in self._blobs.listing(old.content)}
                rows = self._blobs.listing(row.content)
                pending += [(below, before.get(below.name)) for below in reversed(rows)]

    def _add_content(self, items: dict[bytes, _Item], row: Row) -> None:
        digest = row.content
        if digest in items:
            return
        if row.size <= CHUNK_BYTES:
            items[digest] = _Item("data", row.size, digest)
            return
        chunks = self._blobs.large.chunk_digests(digest)
        items[digest] = _Item("tree", len(encode_chunk_map(row.size, chunks)), digest, is_map=True)
        for number, chunk in chunks.items():
            length = min(CHUNK_BYTES, row.size - number * CHUNK_BYTES)
            items.setdefault(chunk, _Item("data", length, digest, number))

    # -- uploading -----------------------------------------------------------------------------
    def _upload(self, view: PackView) -> bool:
        """Upload what no usable pack has; whether there was anything."""
        missing = {digest: item for digest, item in self._items.items() if not view.usable(digest)}
        total = sum(item.size for item in missing.values())
        uploads = Uploads(self._storage, self._remote.packs, lambda done: self._progress(min(done, total), total))
        try:
            for digest, item in missing.items():
                uploads.add(item.kind, digest, self._content(item, digest))
            uploads.finish()
        finally:
            uploads.cancel()
        self._uploaded_bytes += uploads.done_bytes
        self._uploaded += len(missing)
        return bool(missing)

    def _content(self, item: _Item, digest: bytes) -> bytes:
        if item.is_map:
            size = self._blobs.large.size(digest)
            return encode_chunk_map(size, self._blobs.large.chunk_digests(digest))
        if item.kind == "tree":
            data = self._blobs.small(digest)
            if data is None:
                raise DamagedError(f"the stored content {digest.hex()[:16]} is gone from the store")
            return data
        at = 0 if item.chunk is None else item.chunk * CHUNK_BYTES
        return self._blobs.read(item.content, at, item.size)

    def _is_complete(self) -> bool:
        """Whether every blob is in a usable pack now; else upload those that are not."""
        markers = self._storage.list(CONDEMNED)
        names = repairs = None
        if self._base is not None:
            names, repairs = self._storage.list(NAMES), self._storage.list(REPAIRED)
        view = self._remote.packs.view_after(markers)
        # The names are listed after the publication: a base that is still there was needed by every collection so far.
        if self._base is not None and names is not None and repairs is not None:
            objects = names.result()
            times = {info.key: info.modified_s for info in objects}
            newest = newest_of(objects).get(self._base.name)
            is_repaired = times.get(self._base.generation.key, 0.0) <= _last_repair_s(repairs.result())
            if newest != self._base.generation or is_repaired:
                self._base = None
                self._items = self._needed()
        return not self._upload(view)


def _last_repair_s(repairs: Objects) -> float:
    """Until when a snapshot may have been published before the last repair ended, in the store's seconds."""
    return max((info.modified_s + CLOCK_ERROR_S for info in repairs), default=-1.0)


class Uploads:
    """Packs that are filled and uploaded.  `progress` is called with the bytes that are uploaded."""

    def __init__(self, storage: Storage, packs: RemotePacks, progress: Callable[[int], object]) -> None:
        self._storage = storage
        self._packs = packs
        self._progress = progress
        self._open: dict[PackKind, MemoryPack] = {}
        self._running: deque[tuple[str, bytes, Future[bool]]] = deque()
        self.done_bytes = 0

    def add(self, kind: PackKind, digest: bytes, data: bytes) -> None:
        """Add a blob; upload a pack that is full."""
        pack = self._open.setdefault(kind, MemoryPack())
        pack.add(digest, data)
        if pack.size_bytes >= PACK_BYTES:
            self._begin(kind)

    def finish(self) -> None:
        """Upload the rest, and wait until all packs are there."""
        for kind in list(self._open):
            self._begin(kind)
        while self._running:
            self._wait()

    def cancel(self) -> None:
        """Cancel the uploads that are running, if there are any."""
        for _, _, answer in self._running:
            answer.cancel()

    def _begin(self, kind: PackKind) -> None:
        name, data = new_pack_name(kind), self._open.pop(kind).encoded()
        while len(self._running) >= _UPLOADS:
            self._wait()
        self._running.append((name, data, self._storage.create(f"{PACKS}/{name}", data)))

    def _wait(self) -> None:
        name, data, answer = self._running[0]
        if not answer.result():
            raise OSError(errno.EEXIST, "another object has the name of a new pack", f"{self._storage.url}/{name}")
        self._running.popleft()
        self._packs.learn(name, data)
        self.done_bytes += len(data)
        self._progress(self.done_bytes)


# -- pull ------------------------------------------------------------------------------------------
class RemoteSource:
    """The snapshot `record` in the packs of a remote store.  `local` are the blobs of the store that takes it.

    Implements what `Store.take` needs of a `Source`.  `progress` is called with (bytes downloaded, all missing bytes).
    """

    identity: Final = None

    def __init__(self, packs: RemotePacks, record: Record, local: Blobs, progress: ByteProgress) -> None:
        self._packs = packs
        self._record = record
        self._local = local
        self._progress = progress
        self._done = 0
        self._total = 0

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        """Give the snapshot to `sink`.  DamagedError."""
        del cache, unreadable, progress
        view = self._packs.view()

        def read(level: Collection[bytes]) -> Iterator[list[Row]]:
            for digest, data in self._listings(view, level):
                sink.listing(data)
                yield decode_listing_of(digest, data)

        _, contents = needed_by(self._record.roots, read)
        missing = {digest: size for digest, size in contents.items() if not sink.has(digest)}
        self._total = sum(missing.values())
        short = [digest for digest, size in missing.items() if size <= LARGE_BYTES]
        for digest, data in self._packs.blobs(map(view.located, short)):
            if len(data) != missing[digest]:
                raise damaged_blob(digest, "has another size than its file")
            sink.small(data)
            self._count(len(data))
        for digest, size in missing.items():
            if size > LARGE_BYTES and sink.stream(self._content(view, digest, size), self._count)[0] != digest:
                raise damaged_blob(digest)
        record = self._record
        counts = TreeCounts(record.files, record.directories, record.size_bytes)
        return Scanned(record.root, counts, record.unstable, record.unreadable, inodes=record.inodes)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Raise NotImplementedError: `Store.take` uses only the scan."""
        raise NotImplementedError

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        """Not used, as `read`."""
        raise NotImplementedError

    def _count(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _listings(self, view: PackView, digests: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        remote = []
        for digest in digests:
            data = self._local.small(digest)
            if data is None:
                remote.append(digest)
            else:
                yield digest, data
        yield from self._packs.blobs(map(view.located, remote))

    def _content(self, view: PackView, content: bytes, size: int) -> Iterator[Chunk]:
        """A content of `size` bytes, in pieces."""
        ((_, data),) = self._packs.blobs([view.located(content)])
        found = None if size <= CHUNK_BYTES else decode_chunk_map(content, data)
        if size != (len(data) if found is None else found.size):
            raise damaged_blob(content, "has another size than its file")
        if found is None:
            yield data
            return
        done = 0
        for number, digest in sorted(found.chunks.items()):
            start = number * CHUNK_BYTES
            if start > done:
                yield Hole(start - done)
            ((_, chunk),) = self._packs.blobs([view.located(digest)])
            yield chunk
            done = start + len(chunk)
        if done < size:
            yield Hole(size - done)
