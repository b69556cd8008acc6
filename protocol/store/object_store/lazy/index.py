"""LazyIndex: finds the positions of blobs, and reads only the indexes of packs that it needs for that.

The packs whose age is nearest to that of the snapshot come first, in growing groups: a push uploads a snapshot at once.
So a mount of a small snapshot reads few indexes, however many packs the store has.

Threading: any thread.  The lock `_loading` is held during requests, `_lock` is not.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from protocol.store.format.packs import damaged_blob
from protocol.store.object_store.layout import CONDEMNED, PACKS, kind_of
from protocol.store.object_store.packs import PackView, RemotePacks, listed_packs

if TYPE_CHECKING:
    from protocol.store.format.packs import BlobLocation, Pack
    from protocol.store.object_store.lazy.messages import BlobKind
    from protocol.store.object_store.storage import Objects, Storage

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
