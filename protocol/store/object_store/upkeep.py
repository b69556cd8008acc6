"""Upkeep of a remote store: a collection frees what no snapshot needs, while other processes push; a check reads all.

A pack is first condemned by a marker, which is never taken back.  After the grace period, a later collection copies
what snapshots need of the pack to a new one, and deletes it.  docs/store.md has the argument.

One collection, in this order:
1. take the store's time, list the markers, then the packs, then the names;
2. delete the packs that were condemned before the grace period began, after copying what no usable pack has;
3. condemn packs that are older than the grace period, if they are small or if a quarter or more is not needed.

A snapshot that was dropped or replaced within the grace period counts for step 2 and not for step 3.

A check names what is damaged with the snapshots and paths that need it.  Pushes and collections may run meanwhile: what
they add is not checked, and what they delete is not damage.

Threading: one thread.  Several collections may run at once.
"""

from __future__ import annotations

import contextlib
import secrets
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import BlobLocation, DamagedError, Pack
from protocol.store.format.rows import Row, needed_by
from protocol.store.object_store.packs import (
    CLOCK,
    CLOCK_ERROR_S,
    CONDEMNED,
    NAMES,
    PACK_BYTES,
    PACKS,
    REPAIRED,
    Generation,
    check_blob,
    decode_chunk_map,
    decode_listing_of,
    generation_of,
    kind_of,
)
from protocol.store.object_store.transfer import Uploads
from protocol.store.upkeep import GONE, CheckReport, Damage, Losses

if TYPE_CHECKING:
    from protocol.store.format.packs import Pack
    from protocol.store.object_store.packs import PackView, RemotePacks
    from protocol.store.object_store.remote import RemoteSnapshot, RemoteStore
    from protocol.tree import ByteProgress

_SMALL_PACK_BYTES: Final = PACK_BYTES // 4
_SEVERAL: Final = 8  # small packs, which are worth merging
_CLOCK_ERROR_S: Final = CLOCK_ERROR_S


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """The packs that a collection freed, and those that it condemned for a collection after `grace_s` to free."""

    freed_bytes: int
    freed_packs: int
    condemned_bytes: int
    condemned_packs: int
    kept_bytes: int
    kept_packs: int
    grace_s: float
    damaged_contents: int = 0  # that a repair deleted; a pack that cannot be read counts as one


class Collection:
    """A collection of the store `remote`."""

    def __init__(self, remote: RemoteStore, progress: ByteProgress) -> None:
        self._remote = remote
        self._storage = remote.storage
        self._progress = progress
        self._freed_bytes = self._freed_packs = 0
        self._repairs = False

    def run(self, *, repair: bool = False) -> CollectionReport:
        """Collect.  DamagedError if a listing is damaged, because it might need any content.

        `repair` first drops the names whose records are damaged, deletes damaged contents, and ignores the listings
        that are gone.
        """
        self._repairs = repair
        grace_s = self._remote.grace_s
        before_s = self._now_s() - grace_s - _CLOCK_ERROR_S
        damaged = self._repair() if repair else 0
        view = self._remote.packs.view()
        for error in view.damaged.values():
            raise error
        current, recent = self._roots(before_s)
        self._add_new_packs(view)
        packs = self._remote.packs
        needed = needed_blobs(packs, view, current, tolerant=repair)
        self._delete(view, needed | needed_blobs(packs, view, recent, tolerant=repair), before_s)
        self._remove_markers(view)
        candidates = self._candidates(view, needed, before_s)
        for pack in candidates:
            self._storage.create(f"{CONDEMNED}/{pack.name}", b"").result()
        kept = [pack for pack in view.packs.values() if pack.name not in view.condemned and pack not in candidates]
        return CollectionReport(
            self._freed_bytes, self._freed_packs,
            sum(pack.size_bytes for pack in candidates), len(candidates),
            sum(pack.size_bytes for pack in kept), len(kept), grace_s, damaged,
        )  # fmt: skip

    def _now_s(self) -> float:
        """The present time of the store's own clock, from a new object."""
        key = f"{CLOCK}/{secrets.token_hex(8)}"
        self._storage.create(key, b"").result()
        times = [info.modified_s for info in self._storage.list(CLOCK).result() if info.key == key]
        self._storage.delete(key).result()
        return times[0] if times else 0.0  # 0: nothing is old enough

    def _roots(self, before_s: float) -> tuple[list[bytes], list[bytes]]:
        """The roots of all names; and of generations that were replaced or dropped since `before_s`.

        Deletes older generations.
        """
        current, recent = [], []
        found = sorted(
            (one, info)
            for info in self._storage.list(NAMES).result()
            if (one := generation_of(info.key, info.size_bytes))
        )
        for at, (one, info) in enumerate(found):
            after = found[at + 1] if at + 1 < len(found) and found[at + 1][0].name == one.name else None
            if after is None:
                current.append(one)
            elif after[1].modified_s >= before_s:
                recent.append(one)
            else:
                self._storage.delete(info.key).result()
        return self._roots_of(current), self._roots_of(recent)

    def _roots_of(self, generations: list[Generation]) -> list[bytes]:
        damaged = (lambda _one, _error: None) if self._repairs else None
        return [digest for one in self._remote.records(generations, damaged) for digest in one.record.roots]

    def _add_new_packs(self, view: PackView) -> None:
        """Add packs of names that were published after `view` listed the packs."""
        later = self._remote.packs.view()
        for name, pack in later.packs.items():
            if name not in view.packs:
                if name in later.condemned:
                    view.condemned[name] = later.condemned[name]
                view.modified_s[name] = later.modified_s[name]
                view.add(pack)

    # -- repair --------------------------------------------------------------------------------
    def _repair(self) -> int:
        """Remove damage; return the number of damaged names and contents.

        The store gets a mark before the repair, and one after it.  A snapshot that was published before such a mark may
        lack contents, so no push takes it as its base any more.
        """
        self._mark_repair()
        found = self._drop_damaged() + self._remove_damage()
        self._mark_repair()
        return found

    def _mark_repair(self) -> None:
        self._storage.create(f"{REPAIRED}/{secrets.token_hex(8)}", b"").result()

    def _drop_damaged(self) -> int:
        """Drop the names whose records cannot be read; return their number."""
        damaged: list[Generation] = []
        self._remote.records(self._remote.newest().values(), lambda one, _: damaged.append(one))
        return sum(self._remote.drop_generation(one).result() for one in damaged)

    def _remove_damage(self) -> int:
        """Delete packs with damage, after copying what is whole in them; return the number of damaged contents."""
        view = self._remote.packs.view()
        lost = len(view.damaged)
        for name in view.damaged:
            self._storage.delete(f"{PACKS}/{name}").result()
        for name, pack in view.packs.items():
            try:
                data = self._storage.read(f"{PACKS}/{name}").result()
            except FileNotFoundError:
                continue
            whole = {}
            for digest, place in pack.places():
                blob = data[place.offset : place.offset + place.length]
                with contextlib.suppress(DamagedError):
                    check_blob(digest, blob)
                    whole[digest] = blob
            if len(whole) == pack.entries:
                continue
            lost += pack.entries - len(whole)
            uploads = Uploads(self._storage, self._remote.packs, lambda _: None)
            for digest, blob in whole.items():
                uploads.add(kind_of(name), digest, blob)
            uploads.finish()
            self._storage.delete(f"{PACKS}/{name}").result()
        return lost

    # -- deleting ------------------------------------------------------------------------------
    def _delete(self, view: PackView, needed: set[bytes], before_s: float) -> None:
        """Delete the packs that were condemned before `before_s`; first copy what is needed of them."""
        doomed = [
            pack for name, pack in view.packs.items() if name in view.condemned and view.condemned[name] < before_s
        ]
        rescued = {
            digest: place
            for pack in doomed
            for digest, place in pack.places()
            if digest in needed and not view.usable(digest)
        }
        kinds = {pack.stem: kind_of(pack.name) for pack in doomed}
        total = sum(place.length for place in rescued.values())
        uploads = Uploads(self._storage, self._remote.packs, lambda done: self._progress(min(done, total), total))
        try:
            for digest, data in self._remote.packs.blobs(rescued.items()):
                uploads.add(kinds[rescued[digest].pack], digest, data)
            uploads.finish()
        finally:
            uploads.cancel()
        self._freed_bytes -= uploads.done_bytes
        for pack in doomed:
            self._storage.delete(f"{PACKS}/{pack.name}").result()
            self._freed_bytes += pack.size_bytes
            self._freed_packs += 1

    def _remove_markers(self, view: PackView) -> None:
        """Remove the markers of packs that were already gone when this collection listed the packs."""
        for name in view.condemned:
            if name not in view.modified_s:
                self._storage.delete(f"{CONDEMNED}/{name}").result()

    # -- condemning ----------------------------------------------------------------------------
    def _candidates(self, view: PackView, needed: set[bytes], before_s: float) -> list[Pack]:
        """The packs to condemn: written before `before_s`, because a running push has not yet named what is younger."""
        wasteful, small = [], []
        for name, pack in view.packs.items():
            if name in view.condemned or view.modified_s[name] >= before_s:
                continue
            waste = sum(place.length for digest, place in pack.places() if digest not in needed)
            if waste * 4 >= sum(place.length for _, place in pack.places()):
                wasteful.append(pack)
            elif pack.size_bytes < _SMALL_PACK_BYTES:
                small.append(pack)
        return wasteful + (small if len(small) >= _SEVERAL else [])


def needed_blobs(packs: RemotePacks, view: PackView, roots: Iterable[bytes], *, tolerant: bool = False) -> set[bytes]:
    """The digests of everything that the listings `roots` need.

    DamagedError if a listing is damaged, or is gone and `tolerant` is not set.
    """

    def located(digests: Iterable[bytes]) -> list[tuple[bytes, BlobLocation]]:
        return [view.located(digest) for digest in digests if not tolerant or view.find(digest) is not None]

    def read(level: Iterable[bytes]) -> Iterator[list[Row]]:
        return (decode_listing_of(digest, data) for digest, data in packs.blobs(located(level)))

    listings, contents = needed_by(roots, read)
    found = {*listings, *contents}
    for digest, data in packs.blobs(located(digest for digest, size in contents.items() if size > CHUNK_BYTES)):
        found.update(decode_chunk_map(digest, data).chunks.values())
    return found


# -- check -----------------------------------------------------------------------------------------
_IN_FLIGHT_BYTES: Final = 4 * PACK_BYTES  # more only if one pack is larger


def check(remote: RemoteStore, progress: ByteProgress) -> CheckReport:
    """Read the whole store.  ENOENT if there is none."""
    damages: list[Damage] = []
    # The names first: what they need was there before they were published, and stays.
    newest = remote.newest()
    remote.require()
    snapshots = remote.records(
        newest.values(), lambda one, error: damages.append(Damage(error.damage, (("", one.name),)))
    )
    for _ in range(2):
        run = _Check(remote, progress)
        damages_found = run.run(snapshots)
        if not damages_found:
            break
        # A collection may have moved contents while this check read them; a second run finds only real damage.
        later = remote.newest()
        snapshots = [one for one in snapshots if later.get(one.name) == one.generation]
    return CheckReport(len(snapshots), run.contents, run.size_bytes, (*damages, *damages_found))


class _Check:
    def __init__(self, remote: RemoteStore, progress: ByteProgress) -> None:
        self._remote = remote
        self._progress = progress
        self._whole: set[bytes] = set()
        self._bad: dict[bytes, str] = {}
        self._metadata: dict[bytes, bytes] = {}
        self.contents = 0
        self.size_bytes = 0

    def run(self, snapshots: list[RemoteSnapshot]) -> list[Damage]:
        """Read everything; return the damage."""
        view = self._remote.packs.view()
        damages = [Damage(f"{name}: {error.damage}") for name, error in view.damaged.items()]
        self._read(view)
        losses = Losses(lambda digest: decode_listing_of(digest, self._metadata.get(digest, b"")), self._damage_of)
        for one in snapshots:
            losses.add(one.name, one.record)
        lost = losses.damages()
        needed = {damage.what for damage in lost}
        damages += [Damage(why) for why in dict.fromkeys(self._bad.values()) if why not in needed]
        return damages + lost

    def _read(self, view: PackView) -> None:
        """Compare every blob with its digest."""
        total = sum(pack.size_bytes for pack in view.packs.values())
        waiting: deque[tuple[Pack, Future[bytes]]] = deque()
        for pack in view.packs.values():
            while waiting and sum(each.size_bytes for each, _ in waiting) + pack.size_bytes > _IN_FLIGHT_BYTES:
                self._compare(*waiting.popleft(), total)
            waiting.append((pack, self._remote.storage.read(f"{PACKS}/{pack.name}")))
        while waiting:
            self._compare(*waiting.popleft(), total)
        self._bad = {digest: why for digest, why in self._bad.items() if digest not in self._whole}

    def _compare(self, pack: Pack, answer: Future[bytes], total: int) -> None:
        try:
            data = answer.result()
        except FileNotFoundError:
            return  # collected since it was listed
        for digest, place in pack.places():
            blob = data[place.offset : place.offset + place.length]
            try:
                check_blob(digest, blob)
            except DamagedError:
                self._bad[digest] = f"a content in {pack.name} is not what was stored"
                continue
            self._whole.add(digest)
            if kind_of(pack.name) == "tree":
                self._metadata[digest] = blob
        self.contents += pack.entries
        self.size_bytes += pack.size_bytes
        self._progress(self.size_bytes, total)

    def _damage_of(self, row: Row) -> str | None:
        """Why an entry cannot be read; None if it can."""
        digests = [row.content]
        if stat.S_ISREG(row.mode) and row.size > CHUNK_BYTES and row.content in self._whole:
            data = self._metadata.get(row.content)
            found = None if data is None else decode_chunk_map(row.content, data)
            if found is None or found.size != row.size:
                return "a content has another size than its file"
            digests += found.chunks.values()
        for digest in digests:
            if digest not in self._whole:
                return self._bad.get(digest, GONE)
        return None
