"""Upkeep: `check` reads everything and says what is damaged; `collect_garbage` frees what no snapshot needs.

The collection keeps, at every moment, a store that is whole: what is still needed is written to a new pack, and is
durable, before the packs it comes from go.  It first begins a new generation, so that no stat cache is believed
that names what is gone.

Threading: any thread.  A check goes on beside snapshots and restores; a collection waits until nobody uses the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.linux.regular_file import read_regular
from protocol.store.format.digests import ContentDigest, digest_of
from protocol.store.format.layout import GENERATION, NO_SPACE, read_prefix, sync_directory, write_atomically
from protocol.store.format.objects import fed_from_file
from protocol.store.format.packs import MORE, DamagedError, PackWriter
from protocol.store.format.records import Record, read_record, workspace_and_serial
from protocol.store.format.rows import Row, decode_listing

if TYPE_CHECKING:
    from protocol.store.format.blobs import Blobs
    from protocol.store.format.layout import Layout
    from protocol.store.format.packs import BlobLocation, Pack

__all__ = ["CheckReport", "Damage", "FileProgress", "GarbageReport", "check", "collect_garbage"]

# Called with (done, of how much), in bytes.  What it raises ends the work.
FileProgress = Callable[[int, int], None]
_SMALL_PACK_BYTES: Final = 4 << 20
_LOST_PATHS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not what it was.  `snapshots` are (workspace, name) of those that cannot be restored whole.

    `paths` are paths in these that are lost, some of them when there are many.
    """

    what: str
    snapshots: tuple[tuple[str, str], ...] = ()
    paths: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check has read and found.  `interrupted` are the workspaces with a restore that is half done."""

    snapshots: int
    contents: int
    size_bytes: int
    damages: tuple[Damage, ...] = ()
    interrupted: tuple[str, ...] = ()
    leftover_bytes: int = 0  # of work that died; `collect_garbage` frees it

    @property
    def ok(self) -> bool:
        """Whether every snapshot can be restored whole."""
        return not self.damages


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection has freed, and what the store holds now."""

    freed_bytes: int
    freed_contents: int
    kept_bytes: int
    kept_contents: int


# -- check -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Found:
    bad: dict[bytes, str] = field(default_factory=dict)  # digest -> what is wrong
    packs: dict[str, str] = field(default_factory=dict)
    contents: int = 0
    size_bytes: int = 0


def check(layout: Layout, blobs: Blobs, progress: FileProgress) -> CheckReport:
    """Read all of the store, compare each content with its digest, and follow each snapshot to its last file."""
    if not layout.exists():
        return CheckReport(0, 0, 0)
    with layout.shared():
        blobs.packs.refresh()
        found = _Found()
        _check_contents(blobs, found, progress)
        records: list[Record] = []
        damages = [Damage(f"{name}: {what}", _snapshot_of(layout, name)) for name, what in found.packs.items()]
        for pack in blobs.packs.all():
            if workspace_and_serial(pack.name) is not None:
                try:
                    records.append(read_record(pack))
                except DamagedError as error:
                    damages.append(Damage(str(error.strerror), _snapshot_of(layout, pack.name)))
        damages += _lost(blobs, records, found)
        return CheckReport(
            len(records), found.contents, found.size_bytes, tuple(damages), tuple(_interrupted(layout)),
            sum(size for _, size in _temporaries(layout)),
        )  # fmt: skip


def _snapshot_of(layout: Layout, name: str) -> tuple[tuple[str, str], ...]:
    """Which workspace's snapshot a pack is that cannot say so itself."""
    found = workspace_and_serial(name)
    if found is None:
        return ()
    with contextlib.suppress(OSError):
        key = read_regular(os.path.join(layout.workspaces, found[0], "key"))
        return ((key.decode("utf-8", "surrogateescape"), f"number {found[1]}"),)
    return ((found[0], f"number {found[1]}"),)


def _check_contents(blobs: Blobs, found: _Found, progress: FileProgress) -> None:
    packs = blobs.packs.all()
    objects = list(blobs.objects.all())
    total = sum(pack.size_bytes for pack in packs)
    total += sum(_size(blobs.objects.path(digest)) for digest in objects)
    found.packs.update({name: str(error.strerror) for name, error in blobs.packs.damaged.items()})
    for pack in packs:
        for digest, place in pack.places():
            try:
                if digest_of(blobs.packs.read(place)) != digest:
                    found.bad[digest] = f"a content in {pack.name} is not what was stored"
            except OSError as error:
                found.bad[digest] = f"{pack.name}: {error.strerror}"
            found.contents += 1
            found.size_bytes += place.length
            if not found.contents % 256:
                progress(found.size_bytes, total)
    for digest in objects:
        _check_object(blobs, digest, found, lambda: progress(found.size_bytes, total))
    progress(total, total)


def _check_object(blobs: Blobs, digest: bytes, found: _Found, tell: Callable[[], None]) -> None:
    content = ContentDigest()

    def done(count: int) -> None:
        found.size_bytes += count
        tell()

    try:
        descriptor = blobs.objects.open(digest)
        try:
            fed_from_file(descriptor, os.fstat(descriptor).st_size, content, None, done)
        finally:
            os.close(descriptor)
        if content.digest() != digest:
            found.bad[digest] = f"the content {digest.hex()} is not what was stored"
    except OSError as error:
        found.bad[digest] = f"the content {digest.hex()}: {error.strerror}"
    found.contents += 1


def _lost(blobs: Blobs, records: list[Record], found: _Found) -> list[Damage]:
    """What snapshots need and the store does not have, or has wrong: by what is wrong."""
    lost: dict[str, tuple[dict[tuple[str, str], None], dict[bytes, None]]] = {}
    whole: set[bytes] = set()  # listings below which nothing is wrong
    for record in records:
        key = (record.workspace, record.name)
        for path, why in _follow(blobs, record.root, found, whole):
            snapshots, paths = lost.setdefault(why, ({}, {}))
            snapshots[key] = None
            if len(paths) < _LOST_PATHS_SHOWN:
                paths[path] = None
    return [Damage(why, tuple(snapshots), tuple(paths)) for why, (snapshots, paths) in lost.items()]


def _follow(blobs: Blobs, root: Row, found: _Found, whole: set[bytes]) -> list[tuple[bytes, str]]:
    """What is wrong below a directory, depth first; what is whole is looked at once only."""
    wrong: list[tuple[bytes, str]] = []
    opened: list[tuple[bytes, int]] = []  # listings on the way, and how much was wrong before them
    pending: list[tuple[bytes, Row] | None] = [(b"", root)]
    while pending:
        item = pending.pop()
        if item is None:
            digest, before = opened.pop()
            if len(wrong) == before:
                whole.add(digest)
            continue
        path, row = item
        digest = row.content
        if stat.S_ISREG(row.mode):
            if digest and (digest in found.bad or not blobs.has(digest)):
                wrong.append((path, found.bad.get(digest, "contents are gone from the store")))
            continue
        if not stat.S_ISDIR(row.mode) or digest in whole:
            continue
        try:
            if digest in found.bad:
                raise DamagedError(found.bad[digest])
            rows = blobs.listing(digest)
        except OSError as error:
            wrong.append((path, found.bad.get(digest, error.strerror or "a listing is gone from the store")))
            continue
        opened.append((digest, len(wrong)))
        pending.append(None)
        prefix = path + b"/" if path else b""
        pending += [(prefix + below.name, below) for below in reversed(rows)]
    return wrong


def _interrupted(layout: Layout) -> list[str]:
    found = []
    for name in sorted(os.listdir(layout.workspaces)):
        place = os.path.join(layout.workspaces, name)
        if os.path.exists(os.path.join(place, "journal")):
            with contextlib.suppress(OSError):
                key = read_regular(os.path.join(place, "key")).decode("utf-8", "surrogateescape")
                with layout.if_nobody_changes(key) as is_idle:
                    found += [key] * is_idle
    return found


# -- collection ------------------------------------------------------------------------------------
def collect_garbage(
    layout: Layout, blobs: Blobs, progress: FileProgress, *, wait_s: float, repair: bool
) -> GarbageReport:
    """Free what no snapshot needs.  EBUSY when the store is in use for longer than `wait_s`; EIO where it is damaged.

    With `repair` what is damaged is taken out, and the next snapshot of a directory brings anew what it still has.
    """
    if not layout.exists():
        return GarbageReport(0, 0, 0, 0)
    with layout.exclusive(wait_s):
        blobs.packs.refresh()
        if repair:
            _take_out_damage(layout, blobs, progress)
        elif blobs.packs.damaged:
            # What a damaged pack needs is not known, so nothing can be said to be unneeded.
            raise next(iter(blobs.packs.damaged.values()))
        packs = blobs.packs.all()
        snapshots = [pack for pack in packs if workspace_and_serial(pack.name) is not None]
        needed = _needed(blobs, [read_record(pack).root for pack in snapshots], tolerant=repair)
        run = _Collection(layout, blobs, needed, progress)
        # What is in a snapshot's own pack is needed, by that snapshot.
        # First what needs no space, since the disk may be full.
        run.remove_temporaries()
        run.remove_objects()
        run.repack([pack for pack in packs if workspace_and_serial(pack.name) is None])
        blobs.packs.refresh()
        kept = blobs.packs.all()
        objects = [_size(blobs.objects.path(digest)) for digest in blobs.objects.all()]
        return GarbageReport(
            run.freed_bytes, run.freed_contents,
            sum(pack.size_bytes for pack in kept) + sum(objects), sum(pack.entries for pack in kept) + len(objects),
        )  # fmt: skip


def _take_out_damage(layout: Layout, blobs: Blobs, progress: FileProgress) -> None:
    """Remove packs that cannot be read, and contents that are not what their digest says."""
    found = _Found()
    _check_contents(blobs, found, progress)
    _new_generation(layout)
    for name in blobs.packs.damaged:
        os.unlink(os.path.join(layout.packs, name))
    blobs.packs.damaged.clear()
    for digest in blobs.objects.all():
        if digest in found.bad:
            os.unlink(blobs.objects.path(digest))
    for pack in blobs.packs.all():
        places = dict(pack.places())
        if not places.keys() & found.bad.keys():
            continue
        with PackWriter(os.path.join(layout.tmp, f"{os.getpid():x}-{secrets.token_hex(8)}.pack")) as writer:
            for digest, place in places.items():
                if digest not in found.bad:
                    writer.add(digest, blobs.packs.read(place))
            writer.finish(os.path.join(layout.packs, pack.name), pack.record)
    sync_directory(layout.packs)
    blobs.packs.reread()


def _new_generation(layout: Layout) -> None:
    path = os.path.join(layout.directory, GENERATION)
    try:
        number = int(read_prefix(path))
    except FileNotFoundError:
        number = 0
    except ValueError:  # damaged: it must become a number that no stat cache has
        number = time.time_ns()
    write_atomically(path, b"%d" % (number + 1), durable=True)


def _needed(blobs: Blobs, roots: Iterable[Row], *, tolerant: bool) -> set[bytes]:
    """The digests of all that can be reached."""
    needed: set[bytes] = set()
    pending = [root.content for root in roots]
    while pending:
        digest = pending.pop()
        if digest in needed:
            continue
        needed.add(digest)
        data = blobs.small(digest)
        if data is None:
            if tolerant:
                continue
            raise DamagedError(f"the listing {digest.hex()} is gone from the store: `vfsd store check` says more")
        for row in decode_listing(data):
            if stat.S_ISDIR(row.mode):
                pending.append(row.content)
            elif stat.S_ISREG(row.mode) and row.content:
                needed.add(row.content)
    return needed


class _Collection:
    def __init__(self, layout: Layout, blobs: Blobs, needed: set[bytes], progress: FileProgress) -> None:
        self._layout = layout
        self._blobs = blobs
        self._needed = needed
        self._progress = progress
        self._begun = False
        self.freed_bytes = 0
        self.freed_contents = 0

    def _begin(self) -> None:
        """Before the first thing goes."""
        if not self._begun:
            try:
                _new_generation(self._layout)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._remove_caches()
                _new_generation(self._layout)
            self._begun = True

    def _remove_caches(self) -> None:
        """Make room by removing the stat caches, without which the next snapshots only take longer."""
        for directory in _subdirectories(self._layout.workspaces):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, "cache"))

    def repack(self, packs: list[Pack]) -> None:
        """Put what is needed of the packs of dropped snapshots into one, where that is worth it."""
        worth = self._worth_it(packs)
        if not worth:
            return
        self._begin()
        unneeded = [pack for pack in worth if not any(digest in self._needed for digest, _ in pack.places())]
        for pack in unneeded:
            os.unlink(os.path.join(self._layout.packs, pack.name))
            self.freed_bytes += pack.size_bytes
            self.freed_contents += pack.entries
        worth = [pack for pack in worth if pack not in unneeded]
        if not worth:
            return
        name = secrets.token_hex(8)
        temporary = os.path.join(self._layout.tmp, f"{os.getpid():x}-{name}.pack")
        held = {digest for pack in self._snapshots() for digest, _ in pack.places()}
        total = sum(pack.size_bytes for pack in worth)
        done = 0
        with PackWriter(temporary) as writer:
            for pack in worth:
                for digest, place in pack.places():
                    if digest in self._needed and digest not in held and digest not in writer:
                        writer.add(digest, self._whole(digest, place))
                    else:
                        self.freed_contents += 1
                done += pack.size_bytes
                self._progress(done, total)
            kept_bytes = 0
            if len(writer):
                writer.finish(os.path.join(self._layout.packs, f"{name}.pack"))
                kept_bytes = writer.size_bytes
                sync_directory(self._layout.packs)
        for pack in worth:
            os.unlink(os.path.join(self._layout.packs, pack.name))
        self.freed_bytes += total - kept_bytes

    def _whole(self, digest: bytes, place: BlobLocation) -> bytes:
        """A content that is needed, compared with its digest: what is damaged is not copied as if it were whole."""
        data = self._blobs.packs.read(place)
        if digest_of(data) != digest:
            raise DamagedError(f"the stored content {digest.hex()[:16]} is damaged; {MORE}, `gc --repair` takes it out")
        return data

    def _worth_it(self, packs: list[Pack]) -> list[Pack]:
        """Packs of which a quarter is not needed, and small ones where there are several."""
        wasteful = []
        for pack in packs:
            waste = sum(place.length for digest, place in pack.places() if digest not in self._needed)
            if not pack.entries or waste * 4 >= pack.size_bytes:
                wasteful.append(pack)
        small = [pack for pack in packs if pack.size_bytes < _SMALL_PACK_BYTES and pack not in wasteful]
        return wasteful + small if len(small) > 1 or wasteful else []

    def _snapshots(self) -> list[Pack]:
        return [pack for pack in self._blobs.packs.all() if workspace_and_serial(pack.name) is not None]

    def remove_objects(self) -> None:
        """Remove large contents that nothing needs."""
        for digest in list(self._blobs.objects.all()):
            if digest not in self._needed:
                self._begin()
                path = self._blobs.objects.path(digest)
                self.freed_bytes += _size(path)
                self.freed_contents += 1
                os.unlink(path)

    def remove_temporaries(self) -> None:
        """Remove what processes that died were writing: nobody else writes now."""
        for path, size in _temporaries(self._layout):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                self.freed_bytes += size


def _temporaries(layout: Layout) -> list[tuple[str, int]]:
    """What is being written, or was when somebody died: all who write hold the lock."""
    found = []
    for directory in (layout.tmp, layout.directory, layout.packs, *_subdirectories(layout.workspaces)):
        with contextlib.suppress(FileNotFoundError):
            found += [
                (entry.path, entry.stat().st_size)
                for entry in os.scandir(directory)
                if (directory == layout.tmp or entry.name.endswith(".new")) and entry.is_file()
            ]
    return found


def _subdirectories(path: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(path)]
    except FileNotFoundError:
        return []


def _size(path: str) -> int:
    """What a file takes of the disk."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
