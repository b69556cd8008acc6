"""Fetcher: reads blobs of an object store in ranges of packs, verifies them, and keeps them in the cache.

A push stores the blobs of a snapshot in the order of a walk, so what follows a blob in its pack is probably needed
next.  A range has at least `_FIRST_WINDOW_BYTES`, and twice as much as the one before if it continues that one; then
the next range is read ahead.  Two requests for one blob share one range.

Invariants: every blob that a caller gets, or the cache, was compared with its digest after it arrived.  A blob that a
caller gets was put into the cache before.

Threading: any thread; calls wait for the network.

`LazyIndex` finds the positions of blobs, and reads only the indexes of packs that it needs for that.  The packs whose
age is nearest to that of the snapshot come first, in growing groups: a push uploads a snapshot at once.  So a mount of
a small snapshot reads few indexes, however many packs the store has.  Its lock `_loading` is held during requests,
`_lock` is not.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.store.format.packs import BlobLocation, DamagedError, damaged_blob
from protocol.store.object_store.packs import (
    CONDEMNED,
    PACKS,
    PackView,
    RemotePacks,
    check_blob,
    key_of,
    kind_of,
    listed_packs,
    neighbours,
)

if TYPE_CHECKING:
    from protocol.store.format.packs import BlobLocation, Pack
    from protocol.store.object_store.lazy.client import BlobKind
    from protocol.store.object_store.lazy.contents import BlobCache
    from protocol.store.object_store.storage import Objects, Storage

_FIRST_WINDOW_BYTES: Final = 256 << 10
_LARGEST_WINDOW_BYTES: Final = 4 << 20
_RECENT_BYTES: Final = 32 << 20
_ATTEMPTS: Final = 3


@dataclass(slots=True)
class _Range:
    """Blobs of one pack that are read with one request."""

    pack: str
    offset: int
    length: int
    blobs: list[tuple[int, int, bytes]]  # offset, length, digest
    answer: Future[bytes] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length


class Fetcher:
    """Fetches blobs of the store in `storage`.  `ahead` runs a function later, in another thread."""

    def __init__(
        self, storage: Storage, index: LazyIndex, cache: BlobCache, ahead: Callable[[Callable[[], object]], object]
    ) -> None:
        self._storage = storage
        self._index = index
        self._cache = cache
        self._ahead = ahead
        self._lock = threading.Lock()
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._arriving: dict[bytes, Future[bytes]] = {}
        self._windows: dict[str, tuple[int, int]] = {}  # pack -> end and size of the last range
        self._reading_ahead: set[str] = set()

    def fetch(
        self, kind: BlobKind, digests: Sequence[bytes], *, reads_ahead: bool = True, exactly: bool = False
    ) -> list[bytes]:
        """The blobs with these digests.  DamagedError, which names the blob; OSError (ETIMEDOUT, EACCES, ...).

        `exactly`: without what follows them in their packs.
        """
        for attempt in range(_ATTEMPTS):
            try:
                found = self._fetched(kind, dict.fromkeys(digests), reads_ahead=reads_ahead, exactly=exactly)
                return [found[digest] for digest in digests]
            except FileNotFoundError:
                # A collection has moved the contents of a pack.
                if attempt == _ATTEMPTS - 1:
                    raise DamagedError("a pack is gone from the object store", self._storage.url) from None
                self._index.refresh(always=True)
        raise AssertionError

    def _fetched(
        self, kind: BlobKind, digests: Iterable[bytes], *, reads_ahead: bool, exactly: bool
    ) -> dict[bytes, bytes]:
        known = {digest: self._known(digest) for digest in digests}
        found = {digest: data for digest, data in known.items() if data is not None}
        places = self._index.locate(kind, [digest for digest, data in known.items() if data is None])
        with self._lock:
            arriving = {digest: self._arriving[digest] for digest in places if digest in self._arriving}
            wanted = {digest: place for digest, place in places.items() if digest not in arriving}
            ranges = self._ranges(wanted, exactly=exactly)
            for _, _, digest in itertools.chain.from_iterable(one.blobs for one in ranges):
                self._arriving.setdefault(digest, Future())
        found.update(self._read(ranges, places))
        again = []
        for digest, future in arriving.items():
            failure = future.exception()
            if failure is None:
                found[digest] = future.result()
            elif isinstance(failure, DamagedError):
                raise failure
            else:
                again.append(digest)  # that request began earlier, and was given up earlier
        if again:
            found.update(self._fetched(kind, again, reads_ahead=reads_ahead, exactly=exactly))
        if reads_ahead and ranges:
            self._read_ahead(kind, ranges[-1])
        return found

    def _read(self, ranges: Sequence[_Range], places: dict[bytes, BlobLocation]) -> dict[bytes, bytes]:
        """Read ranges at once.  If one fails, the others are taken in before that raises."""
        for one in ranges:
            one.answer = self._storage.read_range(key_of(one.pack), one.offset, one.length)
        found: dict[bytes, bytes] = {}
        failed: OSError | None = None
        for one in ranges:
            try:
                found.update(self._arrived(one, places))
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    def _known(self, digest: bytes) -> bytes | None:
        with self._lock:
            data = self._recent.get(digest)
            if data is not None:
                self._recent.move_to_end(digest)
                return data
        return self._cache.get(digest)

    # -- ranges ----------------------------------------------------------------------------------
    def _ranges(self, places: dict[bytes, BlobLocation], *, exactly: bool) -> list[_Range]:
        """The ranges to read, so that they have these blobs."""
        ranges = []
        for group in neighbours(sorted(places.items(), key=lambda item: item[1])):
            first, last = group[0][1], group[-1][1]
            least = first.offset + (0 if exactly else self._window(first))
            end = last.offset + last.length
            blobs = []
            for offset, length, digest in self._index.following(first):
                is_wanted = offset + length <= end
                if not is_wanted and (offset + length > least or digest in self._recent or digest in self._arriving):
                    break
                if not is_wanted and self._cache.has(digest):
                    break
                if digest in places or (digest not in self._arriving and digest not in self._recent):
                    blobs.append((offset, length, digest))
            end = max(end, blobs[-1][0] + blobs[-1][1]) if blobs else end
            if not blobs:  # a pack that was forgotten meanwhile
                blobs = [(place.offset, place.length, digest) for digest, place in group]
            self._windows[first.pack] = end, least - first.offset
            ranges.append(_Range(first.pack, first.offset, end - first.offset, blobs))
        return ranges

    def _window(self, place: BlobLocation) -> int:
        """How many bytes to read from a position on."""
        end, size = self._windows.get(place.pack, (0, 0))
        if size and end <= place.offset <= end + size:
            return min(2 * size, _LARGEST_WINDOW_BYTES)
        return _FIRST_WINDOW_BYTES

    def _arrived(self, one: _Range, places: dict[bytes, BlobLocation]) -> dict[bytes, bytes]:
        """Wait for a range; verify and keep its blobs."""
        good: dict[bytes, bytes] = {}
        error: BaseException | None = None
        try:
            assert one.answer is not None
            data = one.answer.result()
            for offset, length, digest in one.blobs:
                blob = data[offset - one.offset : offset - one.offset + length]
                try:
                    check_blob(digest, blob)
                except DamagedError:
                    if digest not in places:
                        continue
                    # Perhaps it was damaged on its way.
                    blob = self._storage.read_range(key_of(one.pack), offset, length).result()
                    check_blob(digest, blob)
                good[digest] = blob
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._keep(one, good, error)
        return good

    def _keep(self, one: _Range, good: dict[bytes, bytes], error: BaseException | None) -> None:
        """Keep blobs, then let the callers go on that wait for them: they may rely on the cache (`Prefetch`)."""
        try:
            if good:
                self._cache.put(list(good.items()))
        finally:
            self._publish(one, good, error)

    def _publish(self, one: _Range, good: dict[bytes, bytes], error: BaseException | None) -> None:
        with self._lock:
            for digest, blob in good.items():
                if digest not in self._recent:
                    self._recent[digest] = blob
                    self._recent_bytes += len(blob)
            while self._recent_bytes > _RECENT_BYTES and len(self._recent) > 1:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])
            futures = [(digest, self._arriving.pop(digest, None)) for _, _, digest in one.blobs]
        for digest, future in futures:
            if future is None:
                continue
            if digest in good:
                future.set_result(good[digest])
            else:
                future.set_exception(error if isinstance(error, OSError) else damaged_blob(digest))

    # -- reading ahead -----------------------------------------------------------------------------
    def _read_ahead(self, kind: BlobKind, last: _Range) -> None:
        """Read the range after `last` in the background, if `last` continued another one."""
        with self._lock:
            _, size = self._windows[last.pack]
            if size <= _FIRST_WINDOW_BYTES or last.pack in self._reading_ahead:
                return
            following = self._index.following(BlobLocation(last.pack, last.end, 0))
            wanted = [digest for _, length, digest in following[:1] if length <= _LARGEST_WINDOW_BYTES]
            if not wanted or wanted[0] in self._recent or wanted[0] in self._arriving:
                return
            self._reading_ahead.add(last.pack)

        def run() -> None:
            try:
                if not self._cache.has(wanted[0]):
                    self.fetch(kind, wanted, reads_ahead=False)
            except OSError:
                pass  # the call that needs it raises the error
            finally:
                with self._lock:
                    self._reading_ahead.discard(last.pack)

        self._ahead(run)


# -- positions -------------------------------------------------------------------------------------
_FIRST_GROUP: Final = 8  # packs
_REFRESH_S: Final = 2.0  # a listing of the packs that is younger than this is not repeated


class LazyIndex:
    """The packs of the store in `storage`.  `near_s`: about when the snapshot was pushed."""

    def __init__(self, storage: Storage, packs: RemotePacks) -> None:
        self._storage = storage
        self._packs = packs
        self.near_s = 0.0
        self._view = PackView()
        self._unread: dict[BlobKind, list[tuple[str, int]]] = {"tree": [], "data": []}
        self._group: dict[BlobKind, int] = {"tree": _FIRST_GROUP, "data": _FIRST_GROUP}
        self._orders: dict[str, list[tuple[int, int, bytes]]] = {}
        self._listing: tuple[Future[Objects], Future[Objects]] | None = None
        self._listed_at = 0.0
        self._lock = threading.Lock()
        self._loading = threading.RLock()

    def begin(self) -> None:
        """Begin to list the packs, before the first position is asked for."""
        with contextlib.suppress(OSError):  # then the first position lists them
            self._listing = self._storage.list(CONDEMNED), self._storage.list(PACKS)

    def locate(self, kind: BlobKind, digests: Iterable[bytes]) -> dict[bytes, BlobLocation]:
        """The position of each blob.  DamagedError if one is gone; OSError."""
        found = {}
        for digest in digests:
            place = self._find(digest) or self._search(kind, digest)
            if place is None:
                raise damaged_blob(digest, "is gone from the object store")
            found[digest] = place
        return found

    def _find(self, digest: bytes) -> BlobLocation | None:
        with self._lock:
            return self._view.find(digest)

    def _search(self, kind: BlobKind, digest: bytes) -> BlobLocation | None:
        """Read further indexes until one has the blob; list the packs again if none has."""
        with self._loading:
            for _ in range(2):
                if not self._listed_at:
                    self.refresh()
                while (place := self._find(digest)) is None and self._unread[kind]:
                    self._read_group(kind)
                if place is not None or not self.refresh():
                    return place
        return None

    def _read_group(self, kind: BlobKind) -> None:
        unread, count = self._unread[kind], self._group[kind]
        group = dict(unread[:count])
        loaded = PackView(condemned=self._view.condemned)
        self._packs.load(group, loaded)
        with self._lock:
            for pack in loaded.packs.values():
                self._view.add(pack)
        del unread[:count]
        self._group[kind] = 2 * count

    def refresh(self, *, always: bool = False) -> bool:
        """List the packs again: a collection moves blobs.  False if they were listed just now, unless `always`."""
        with self._loading:
            now = time.monotonic()
            if self._listed_at and now - self._listed_at < _REFRESH_S and not always:
                return False
            markers, packs = self._listings()
            view = PackView(condemned={info.key.rpartition("/")[2]: info.modified_s for info in markers})
            sizes = listed_packs(packs, view)
            known = self._view.packs
            for name in known.keys() & sizes.keys():
                view.add(known[name])
            rest = sorted(
                ((name, size) for name, size in sizes.items() if name not in known),
                key=lambda each: abs(view.modified_s[each[0]] - self.near_s),
            )
            with self._lock:
                self._view = view
                self._unread["tree"] = [each for each in rest if kind_of(each[0]) == "tree"]
                self._unread["data"] = [each for each in rest if kind_of(each[0]) == "data"]
            self._listed_at = now
            return True

    def _listings(self) -> tuple[Objects, Objects]:
        """The markers and the packs, from the listings that were begun unless these failed."""
        begun, self._listing = self._listing, None
        if begun is not None:
            with contextlib.suppress(OSError):
                return begun[0].result(), begun[1].result()
        markers, packs = self._storage.list(CONDEMNED), self._storage.list(PACKS)
        return markers.result(), packs.result()

    def following(self, place: BlobLocation) -> Sequence[tuple[int, int, bytes]]:
        """Offset, length and digest of the blobs of a pack from a position on, in the order of a walk."""
        with self._lock:
            pack = self._view.packs.get(f"{place.pack}.pack")
            if pack is None:
                return []
            order = self._orders.get(pack.name)
            if order is None:
                order = self._orders[pack.name] = _order(pack)
        return order[bisect.bisect_left(order, (place.offset,)) :]


def _order(pack: Pack) -> list[tuple[int, int, bytes]]:
    return sorted((place.offset, place.length, digest) for digest, place in pack.places())
