"""Upkeep of a store: `check` reports what is damaged; `collect_garbage` frees what no snapshot needs.

Invariant of a collection: the store is complete at every moment.  Contents that are still needed are written to a new
pack, which is durable before the packs that they come from are removed.  Before it removes anything, a collection
begins a new generation, so that no stat cache relies on contents that are gone.

Threading: any thread.  A check runs in parallel with snapshots and restores; a collection waits until the store is
not in use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.linux.regular_file import read_regular, sync_directory
from protocol.store.format.digests import digest_of
from protocol.store.format.layout import NO_SPACE
from protocol.store.format.packs import DamagedError, PackWriter, damaged_blob
from protocol.store.format.rows import Record, Row, needed_by, read_record, workspace_and_serial
from protocol.store.restore import RestoreIntentLog
from protocol.store.trees import leased

if TYPE_CHECKING:
    from protocol.store.format.blobs import Blobs
    from protocol.store.format.layout import Layout
    from protocol.store.format.packs import BlobLocation, Pack
    from protocol.tree import ByteProgress

_SMALL_PACK_BYTES: Final = 4 << 20
LOST_PATHS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage in the store.

    `snapshots` are the (workspace, name) of snapshots that cannot be restored completely; `paths` are lost paths in
    them, at most 20.  `without_inodes` are directories, at most 20, below which only the inode numbers and ctimes are
    lost: the content is whole.
    """

    what: str
    snapshots: tuple[tuple[str, str], ...] = ()
    paths: tuple[bytes, ...] = ()
    without_inodes: tuple[bytes, ...] = ()


GONE: Final = "contents are gone from the store"  # what `Damage.what` says after a repair


class Losses:
    """The losses of snapshots, by the reason.

    `damage` returns why the content or listing of a row cannot be read, None if it can; `listing` the rows of a
    listing, or DamagedError.
    """

    def __init__(self, listing: Callable[[bytes], list[Row]], damage: Callable[[Row], str | None]) -> None:
        self._listing = listing
        self._damage = damage
        self._found: dict[str, tuple[dict[tuple[str, str], None], dict[bytes, None], dict[bytes, None]]] = {}
        self._whole: set[bytes] = set()  # listings below which nothing is damaged

    def add(self, name: str, record: Record) -> None:
        """Walk the snapshot `name`, and add what it has lost."""
        for root in (record.root, record.inodes):
            for path, why in () if root is None else self._damaged_paths(root):
                snapshots, paths, without_inodes = self._found.setdefault(why, ({}, {}, {}))
                snapshots[record.workspace, name] = None
                shown = paths if root is record.root else without_inodes
                if len(shown) < LOST_PATHS_SHOWN:
                    shown[path] = None

    def damages(self) -> list[Damage]:
        """One `Damage` for each reason."""
        return [
            Damage(why, tuple(snapshots), tuple(paths), tuple(without_inodes))
            for why, (snapshots, paths, without_inodes) in self._found.items()
        ]

    def _damaged_paths(self, root: Row) -> list[tuple[bytes, str]]:
        """The damaged paths below a directory, with the reason; depth first."""
        wrong: list[tuple[bytes, str]] = []
        opened: list[tuple[bytes, int]] = []  # listings above, and the number of damaged paths before each
        pending: list[tuple[bytes, Row] | None] = [(b"", root)]
        while pending:
            item = pending.pop()
            if item is None:
                digest, before = opened.pop()
                if len(wrong) == before:
                    self._whole.add(digest)
                continue
            path, row = item
            if not row.content or row.is_symlink or row.content in self._whole:
                continue
            why = self._damage(row)
            if why is None and row.is_dir:
                try:
                    rows = self._listing(row.content)
                except DamagedError as error:
                    why = error.damage
                else:
                    opened.append((row.content, len(wrong)))
                    pending.append(None)
                    prefix = path + b"/" if path else b""
                    pending += [(prefix + below.name, below) for below in reversed(rows)]
            if why is not None:
                wrong.append((path, why))
        return wrong


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check.  `interrupted` are the workspaces with an incomplete restore."""

    snapshots: int
    contents: int
    size_bytes: int
    damages: tuple[Damage, ...] = ()
    interrupted: tuple[str, ...] = ()
    leftover_bytes: int = 0  # of processes that died; `collect_garbage` frees them

    @property
    def ok(self) -> bool:
        """Whether every snapshot can be restored completely."""
        return not self.damages


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The space that a collection freed, the damaged files that it removed, and the size of the store afterwards."""

    freed_bytes: int
    freed_contents: int
    kept_bytes: int
    kept_contents: int
    damaged_bytes: int = 0
    damaged_contents: int = 0  # a pack that cannot be read counts as one


# -- check -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Found:
    """The contents that were read, and the damaged ones."""

    bad: dict[bytes, str] = field(default_factory=dict)  # the damage, by digest
    places: set[BlobLocation] = field(default_factory=set)  # of damaged blobs; another pack may have a whole copy
    contents: int = 0
    size_bytes: int = 0


def check(layout: Layout, blobs: Blobs, progress: ByteProgress) -> CheckReport:
    """Read the whole store, compare each content with its digest, and walk each snapshot."""
    if not layout.exists():
        return CheckReport(0, 0, 0)
    with layout.shared():
        blobs.packs.refresh()
        found = _check_contents(blobs, progress)
        records: list[Record] = []
        unreadable = blobs.packs.damaged.items()
        damages = [Damage(f"{name}: {error.damage}", _snapshot_of(layout, name)) for name, error in unreadable]
        for pack in blobs.packs.all():
            if workspace_and_serial(pack.name) is not None:
                try:
                    records.append(read_record(pack))
                except DamagedError as error:
                    damages.append(Damage(error.damage, _snapshot_of(layout, pack.name)))

        def damage(row: Row) -> str | None:
            is_gone = row.is_file and row.content not in found.bad and not blobs.has(row.content)
            return GONE if is_gone else found.bad.get(row.content)

        losses = Losses(blobs.listing, damage)
        for record in records:
            losses.add(record.name, record)
        damages += losses.damages()
        interrupted = _interrupted(layout, damages)
        return CheckReport(
            len(records), found.contents, found.size_bytes, tuple(damages), tuple(interrupted),
            sum(size for _, size in _temporaries(layout)),
        )  # fmt: skip


def _snapshot_of(layout: Layout, name: str) -> tuple[tuple[str, str], ...]:
    """The workspace and number of a snapshot whose pack cannot be read, from the pack's name."""
    found = workspace_and_serial(name)
    if found is None:
        return ()
    with contextlib.suppress(OSError):
        key = read_regular(os.path.join(layout.workspaces, found[0], "key"))
        return ((key.decode("utf-8", "surrogateescape"), f"number {found[1]}"),)
    return ((found[0], f"number {found[1]}"),)


def _check_contents(blobs: Blobs, progress: ByteProgress) -> _Found:
    """Compare each content with its digest."""
    found = _Found()
    packs = blobs.packs.all()
    objects = list(blobs.objects.all())
    total = sum(pack.size_bytes for pack in packs)
    total += sum(_size(blobs.objects.path(digest)) for digest in objects)
    for pack in packs:
        for digest, place in pack.places():
            damage = None
            try:
                if digest_of(blobs.packs.read(place)) != digest:
                    damage = f"a content in {pack.name} is not what was stored"
            except DamagedError as error:
                damage = f"{pack.name}: {error.damage}"
            if damage is not None:
                found.bad[digest] = damage
                found.places.add(place)
            found.contents += 1
            found.size_bytes += place.length
            if not found.contents % 256:
                progress(found.size_bytes, total)

    def done(count: int) -> None:
        found.size_bytes += count
        progress(found.size_bytes, total)

    for digest in objects:
        try:
            blobs.large.verify(digest, done)
        except DamagedError as error:
            found.bad[digest] = error.damage
        found.contents += 1
    progress(total, total)
    return found


def _interrupted(layout: Layout, damages: list[Damage]) -> list[str]:
    """The workspaces with an incomplete restore; a damaged record of one is added to `damages`."""
    found = []
    for name in sorted(os.listdir(layout.workspaces)):
        place = os.path.join(layout.workspaces, name)
        if os.path.exists(os.path.join(place, "journal")):
            with contextlib.suppress(OSError):
                key = read_regular(os.path.join(place, "key")).decode("utf-8", "surrogateescape")
                with layout.if_idle(key) as is_idle:
                    found += [key] * is_idle
                try:
                    RestoreIntentLog(layout, key).read()
                except DamagedError as error:
                    damages.append(Damage(f"{key}: {error.damage}"))
    return found


# -- collection ------------------------------------------------------------------------------------
def collect_garbage(
    layout: Layout, blobs: Blobs, progress: ByteProgress, *, wait_s: float, repair: bool
) -> GarbageReport:
    """Free what no snapshot needs.  EBUSY if the store is in use for longer than `wait_s`; EIO if it is damaged.

    `repair` first removes what is damaged; the next snapshot of a directory stores again what the directory still has.
    """
    if not layout.exists():
        return GarbageReport(0, 0, 0, 0)
    with layout.exclusive(wait_s):
        blobs.packs.refresh()
        damaged_bytes = damaged_contents = 0
        if repair:
            damaged_bytes, damaged_contents = _remove_damage(layout, blobs, progress)
        elif blobs.packs.damaged:
            # A damaged snapshot may need any content.
            raise next(iter(blobs.packs.damaged.values()))
        packs = blobs.packs.all()
        snapshots = [pack for pack in packs if workspace_and_serial(pack.name) is not None]
        roots = [digest for pack in snapshots for digest in read_record(pack).roots]

        def read(level: Collection[bytes]) -> Iterator[list[Row]]:
            return (blobs.listing(digest) for digest in level if not repair or blobs.has(digest))

        listings, contents = needed_by([*roots, *leased(layout)], read)
        run = _Collection(layout, blobs, {*listings, *contents}, progress)
        # First the steps that need no space, because the disk may be full.
        run.remove_temporaries()
        run.remove_objects()
        # The contents of a snapshot's own pack are needed by that snapshot.
        run.repack([pack for pack in packs if workspace_and_serial(pack.name) is None])
        blobs.packs.refresh()
        kept = blobs.packs.all()
        objects = [_size(blobs.objects.path(digest)) for digest in blobs.objects.all()]
        return GarbageReport(
            run.freed_bytes, run.freed_contents,
            sum(pack.size_bytes for pack in kept) + sum(objects), sum(pack.entries for pack in kept) + len(objects),
            damaged_bytes, damaged_contents,
        )  # fmt: skip


def _remove_damage(layout: Layout, blobs: Blobs, progress: ByteProgress) -> tuple[int, int]:
    """Remove packs that cannot be read, and contents that do not match their digest.  Return their bytes and number."""
    found = _check_contents(blobs, progress)
    layout.begin_generation()
    sizes = [place.length for place in found.places]
    for name in blobs.packs.damaged:
        path = os.path.join(layout.packs, name)
        sizes.append(_size(path))
        os.unlink(path)
    blobs.packs.damaged.clear()
    for digest in blobs.objects.all():
        if digest in found.bad:
            sizes.append(_size(blobs.objects.path(digest)))
            os.unlink(blobs.objects.path(digest))
    for pack in blobs.packs.all():
        places = dict(pack.places())
        if found.places.isdisjoint(places.values()):
            continue
        with PackWriter(layout.temporary(".pack")) as writer:
            for digest, place in places.items():
                if place not in found.places:
                    writer.add(digest, blobs.packs.read(place))
            writer.finish(os.path.join(layout.packs, pack.name), pack.record)
    sync_directory(layout.packs)
    blobs.packs.reread()
    return sum(sizes), len(sizes)


class _Collection:
    """The steps of a garbage collection, and what they freed."""

    def __init__(self, layout: Layout, blobs: Blobs, needed: set[bytes], progress: ByteProgress) -> None:
        self._layout = layout
        self._blobs = blobs
        self._needed = needed
        self._progress = progress
        self._begun = False
        self.freed_bytes = 0
        self.freed_contents = 0

    def _begin(self) -> None:
        """Begin a new generation, before the first removal."""
        if not self._begun:
            try:
                self._layout.begin_generation()
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self._remove_caches()
                self._layout.begin_generation()
            self._begun = True

    def _remove_caches(self) -> None:
        """Free space by removing the stat caches; without them the next snapshots only take longer."""
        for directory in _subdirectories(self._layout.workspaces):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, "cache"))

    def repack(self, packs: list[Pack]) -> None:
        """Move the needed contents of dropped snapshots' packs into one pack, if that frees enough."""
        worth = self._worth_repacking(packs)
        if not worth:
            return
        self._begin()
        partly = [pack for pack in worth if any(digest in self._needed for digest, _ in pack.places())]
        for pack in worth:
            if pack not in partly:
                self._remove_pack(pack)
                self.freed_contents += pack.entries
        if partly:
            self._merge(partly)
            for pack in partly:
                self._remove_pack(pack)

    def _merge(self, packs: list[Pack]) -> None:
        """Write the needed contents of `packs` to a new, durable pack."""
        snapshots = (pack for pack in self._blobs.packs.all() if workspace_and_serial(pack.name) is not None)
        held = {digest for pack in snapshots for digest, _ in pack.places()}
        total = sum(pack.size_bytes for pack in packs)
        done = 0
        with PackWriter(self._layout.temporary(".pack")) as writer:
            for pack in packs:
                for digest, place in pack.places():
                    if digest in self._needed and digest not in held and digest not in writer:
                        writer.add(digest, self._verified(digest, place))
                    else:
                        self.freed_contents += 1
                done += pack.size_bytes
                self._progress(done, total)
            if len(writer):
                writer.finish(os.path.join(self._layout.packs, f"{secrets.token_hex(8)}.pack"))
                sync_directory(self._layout.packs)
                self.freed_bytes -= writer.size_bytes

    def _remove_pack(self, pack: Pack) -> None:
        os.unlink(os.path.join(self._layout.packs, pack.name))
        self.freed_bytes += pack.size_bytes

    def _verified(self, digest: bytes, place: BlobLocation) -> bytes:
        """Read and verify a needed content, so that damage is not copied under a valid digest."""
        data = self._blobs.packs.read(place)
        if digest_of(data) != digest:
            raise damaged_blob(digest, "is damaged: `vfsd store gc --repair` removes it")
        return data

    def _worth_repacking(self, packs: list[Pack]) -> list[Pack]:
        """Packs with a quarter or more that is not needed; and small packs, if there are several."""
        wasteful = []
        for pack in packs:
            unneeded = [place.length for digest, place in pack.places() if digest not in self._needed]
            if len(unneeded) == pack.entries or sum(unneeded) * 4 >= pack.size_bytes:
                wasteful.append(pack)
        small = [pack for pack in packs if pack.size_bytes < _SMALL_PACK_BYTES and pack not in wasteful]
        return wasteful + small if len(small) > 1 or wasteful else []

    def remove_objects(self) -> None:
        """Remove large contents that no snapshot needs."""
        for digest in list(self._blobs.objects.all()):
            if digest not in self._needed:
                self._begin()
                path = self._blobs.objects.path(digest)
                self.freed_bytes += _size(path)
                self.freed_contents += 1
                os.unlink(path)

    def remove_temporaries(self) -> None:
        """Remove the files of processes that died; no process writes now."""
        for path, size in _temporaries(self._layout):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                self.freed_bytes += size


def _temporaries(layout: Layout) -> list[tuple[str, int]]:
    """The files that are being written, or were when their process died, with sizes.  All writers hold the lock."""
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
    """The disk space of a file."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
