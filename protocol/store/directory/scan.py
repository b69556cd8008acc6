"""scan: takes the state of a host directory in, reading what has changed since the last time and nothing else.

By descriptors, a component at a time, through no symlink and into no other mount: nothing leads outside, whatever is
renamed meanwhile.  A file is looked at before and after it is read, so a stored content is one that the file had at one
moment; one that keeps changing is stored as it was read last, and named.  What vanishes meanwhile is not there.
"""

from __future__ import annotations

import bisect
import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from protocol.linux.beneath import TEMPORARY_PREFIX, open_beneath
from protocol.linux.statx import (
    RECORD_BYTES,
    StatxResult,
    change_key,
    differing_records,
    result_at,
    statx_descriptor,
    statx_names,
)
from protocol.store.directory.statcache import CachedDirectory, is_racy
from protocol.store.format.blobs import LARGE_BYTES, Sink
from protocol.store.format.leaves import DENIED, GONE, Leaves, VanishedError, read_xattrs
from protocol.store.format.rows import (
    ELSEWHERE,
    UNREADABLE,
    More,
    Row,
    TreeCounts,
    counts_of,
    decode_listing,
    encode_listing,
    size_of,
    sum_counts,
)

if TYPE_CHECKING:
    from protocol.store.directory.statcache import StatCache

__all__ = ["FileProgress", "Scanned", "Unreadable", "no_progress", "scan"]

_TOLD_EVERY: Final = 512
_TRIES: Final = 5
_FRAMES: Final = 12_000  # of Python, for directories below directories: 2,000 are a path of PATH_MAX
_DEEPEST: Final = 1_700  # directories within each other: seven frames for each, and a descriptor
_O_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY

# Called with (files looked at, bytes read).  What it raises ends the work.
FileProgress = Callable[[int, int], None]
Unreadable = Literal["fail", "skip"]


def no_progress(files: int, size_bytes: int) -> None:
    """Nobody wants to hear of it."""


if sys.getrecursionlimit() < _FRAMES:
    sys.setrecursionlimit(_FRAMES)  # these frames are on the heap: nothing but memory bounds them


@dataclass(slots=True)
class Scanned:
    """A state as it was taken in: the root's row, and what there is to say of it."""

    root: Row
    counts: TreeCounts
    unstable: tuple[bytes, ...] = ()
    unreadable: tuple[bytes, ...] = ()
    leftovers: tuple[bytes, ...] = ()  # temporary files of restores, which are no part of it
    directory: CachedDirectory | None = None
    changed: list[tuple[bytes, CachedDirectory]] = field(default_factory=list)  # of the stat cache


def scan(
    root: int,
    sink: Sink,
    cache: StatCache,
    *,
    trusted: bool,
    unreadable: Unreadable,
    progress: FileProgress = no_progress,
) -> Scanned:
    """Take in the directory that `root` is a readable descriptor of.

    Every name is compared with its cached stat data; nothing is skipped because its directory seems unchanged.  A
    file can change through any of its names (a hard link in another directory or outside the tree), through a
    descriptor whose name is gone, and through a mapping.  Of these, only the ctime of the file itself tells: an
    inotify watch on the directory does not.

    `trusted`: whether the store still has all that `cache` names.  EACCES names the first path that cannot be
    read, unless `unreadable` is "skip".
    """
    walk = _Walk(sink, trusted=trusted, unreadable=unreadable, progress=progress)
    row, directory = walk.directory(root, b"", b"", cache.root)
    counts = directory.counts
    links = walk.links
    total = TreeCounts(counts.files + len(links), counts.directories, counts.size_bytes + sum(links.values()))
    progress(walk.files, walk.read_bytes)
    return Scanned(
        row, total, tuple(walk.leaves.unstable), tuple(walk.unreadable), tuple(walk.leftovers), directory, walk.changed
    )


class _Walk:
    def __init__(self, sink: Sink, *, trusted: bool, unreadable: Unreadable, progress: FileProgress) -> None:
        self.sink = sink
        self._trusted = trusted
        self._skip_unreadable = unreadable == "skip"
        self._progress = progress
        self.files = 0
        self.read_bytes = 0
        self.unreadable: list[bytes] = []
        self.leftovers: list[bytes] = []
        self.links: dict[int, int] = {}
        self.changed: list[tuple[bytes, CachedDirectory]] = []
        self._untold = 0
        self.leaves = Leaves(sink, self._deny, self._read)

    # -- directories -----------------------------------------------------------------------------
    def directory(
        self, descriptor: int, path: bytes, name: bytes, cached: CachedDirectory | None
    ) -> tuple[Row, CachedDirectory]:
        """The row of a directory, and what to remember of it and all below."""
        now_ns = time.time_ns()
        left: list[bytes] = []
        own_record = statx_descriptor(descriptor)
        own = change_key(own_record)
        if cached is not None and own == cached.own and not cached.listed_racy:
            names = cached.names
        else:
            names = sorted(map(os.fsencode, os.listdir(descriptor)))
            left = [each for each in names if each.startswith(TEMPORARY_PREFIX)]
            if left:
                self.leftovers += (path + b"/" + each if path else each for each in left)
                names = [each for each in names if not each.startswith(TEMPORARY_PREFIX)]
        records, gone = statx_names(descriptor, names)
        if gone:
            lost = set(gone)
            records = b"".join(
                records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in range(len(names)) if at not in lost
            )
            names = [each for at, each in enumerate(names) if at not in lost]
        self._tell(len(names))
        if cached is not None and names is cached.names and cached.is_plain and records == cached.records:
            row = cached.row
            if row is not None and row.name == name and self.holds(cached):
                self.links.update(cached.links)
                return row, cached
        seen = result_at(own_record, 0)
        listing = _Listing(self, descriptor, path, names, records, cached, now_ns)
        listing.take()
        made = listing.finish(own, listed_racy=bool(left) or is_racy(seen.ctime_ns, now_ns))
        self.links.update(made.links)
        # A racy one may have got other xattrs in the same tick.
        old = cached.row if cached is not None and own == cached.own and not cached.listed_racy else None
        if old is not None and old.content == made.digest and old.more.counts == made.counts and old.name == name:
            return old, made
        xattrs = old.more.xattrs if old is not None else read_xattrs(descriptor)
        row = Row(
            name, seen.mode, seen.uid, seen.gid, seen.mtime_ns, 0, made.digest,
            More(nlink=seen.nlink, xattrs=xattrs, counts=made.counts),
        )  # fmt: skip
        return row, made

    def enter(
        self, parent: int, name: bytes, path: bytes, seen: StatxResult, cached: CachedDirectory | None
    ) -> tuple[Row, CachedDirectory | None]:
        """As `directory`, of the one called `name`; a directory that cannot be entered is a row with nothing below."""
        if len(path) > 2 * _DEEPEST - 1 and path.count(b"/") >= _DEEPEST:
            self._deny(path, OSError(errno.ELOOP, f"directories nest more than {_DEEPEST} deep"))
            return self._closed(name, seen, UNREADABLE), None
        try:
            descriptor = open_beneath(parent, name, _O_DIRECTORY, same_mount=True)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return self._closed(name, seen, ELSEWHERE), None
            if error.errno in DENIED:
                self._deny(path, error)
                return self._closed(name, seen, UNREADABLE), None
            if error.errno in GONE:
                raise VanishedError from None
            raise
        try:
            return self.directory(descriptor, path, name, cached)
        finally:
            os.close(descriptor)

    def _closed(self, name: bytes, seen: StatxResult, state: int) -> Row:
        digest = self.sink.listing(encode_listing([]))
        more = More(nlink=seen.nlink, state=state, counts=TreeCounts())
        return Row(name, seen.mode, seen.uid, seen.gid, seen.mtime_ns, 0, digest, more)

    def holds(self, directory: CachedDirectory) -> bool:
        """Whether the listing of a directory that was there is there still, with all below it."""
        is_known = directory.is_stored or not self.sink.stores
        return self._trusted and is_known and self.sink.keeps(directory.digest)

    def is_stored(self, digest: bytes, cached: CachedDirectory | None) -> bool:
        """Whether the store has all of a directory, when this walk has come to its end."""
        was = self._trusted and cached is not None and cached.is_stored and cached.digest == digest
        return self.sink.stores or was

    def _deny(self, path: bytes, error: OSError) -> None:
        if not self._skip_unreadable:
            shown = path.decode("utf-8", "backslashreplace")
            raise OSError(error.errno, "cannot be read, and so not be kept in a snapshot", shown) from None
        self.unreadable.append(path)

    def _tell(self, files: int) -> None:
        self.files += files
        self._untold += files
        if self._untold >= _TOLD_EVERY:
            self._untold = 0
            self._progress(self.files, self.read_bytes)

    def _read(self, count: int) -> None:
        self.read_bytes += count
        if count > LARGE_BYTES:  # of small files is told by the directory
            self._progress(self.files, self.read_bytes)


class _Listing:
    """One directory being taken in."""

    def __init__(
        self,
        walk: _Walk,
        descriptor: int,
        path: bytes,
        names: list[bytes],
        records: bytes,
        cached: CachedDirectory | None,
        now_ns: int,
    ) -> None:
        self._walk = walk
        self._descriptor = descriptor
        self._prefix = path + b"/" if path else b""
        self._path = path
        self._names = names
        self._records = records
        self._cached = cached
        self._now_ns = now_ns
        self._rows: dict[bytes, Row | None] = {}  # of names that are not as they were; None: gone
        self._children: dict[bytes, CachedDirectory] = {}
        self._racy: set[bytes] = set()
        self._is_as_cached = False  # but for what `_rows` and `_racy` say

    def take(self) -> None:
        """Look at all names."""
        cached, walk = self._cached, self._walk
        if cached is not None and walk.holds(cached):
            self._is_as_cached = self._names == cached.names
            if self._is_as_cached and self._records == cached.records and not cached.racy:
                if cached.children:
                    for at, name in enumerate(self._names):
                        child = cached.children.get(name)
                        if child is not None:
                            self._subdirectory(at, name, child)
                return
            if self._is_as_cached and not cached.children:
                racy = {bisect.bisect_left(self._names, name) for name in cached.racy}
                for at in sorted(racy.union(differing_records(self._records, cached.records))):
                    self._again(at, self._names[at], cached, at)
            else:
                was = self._places_before(cached)
                for at, name in enumerate(self._names):
                    self._again(at, name, cached, was.get(name))
            return
        old = cached.rows() if cached is not None else {}
        was = self._places_before(cached) if cached is not None else {}
        for at, name in enumerate(self._names):
            self._anew(at, name, old.get(name), was.get(name))

    @staticmethod
    def _places_before(cached: CachedDirectory) -> dict[bytes, int]:
        return {name: at for at, name in enumerate(cached.names)}

    def _is_unchanged(self, at: int, cached: CachedDirectory, was: int) -> bool:
        now = self._records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
        before = cached.records[was * RECORD_BYTES : (was + 1) * RECORD_BYTES]
        return now == before or change_key(now) == change_key(before)

    def _again(self, at: int, name: bytes, cached: CachedDirectory, was: int | None) -> None:
        """A name of a directory of which the store has the old listing."""
        child = cached.children.get(name)
        if child is not None:
            self._subdirectory(at, name, child)
        elif was is None or name in cached.racy or not self._is_unchanged(at, cached, was):
            self._take(at, name)

    def _anew(self, at: int, name: bytes, row: Row | None, was: int | None) -> None:
        """A name of a directory that is new, or of which the store may have lost something."""
        cached = self._cached
        child = None if cached is None else cached.children.get(name)
        if child is not None:
            self._subdirectory(at, name, child)
        elif (
            cached is not None
            and row is not None
            and was is not None
            and not row.is_dir
            and name not in cached.racy
            and self._is_unchanged(at, cached, was)
            and (not row.is_file or not row.content or self._walk.sink.has(row.content))
        ):
            self._rows[name] = row
        else:
            self._take(at, name)

    def _subdirectory(self, at: int, name: bytes, child: CachedDirectory) -> None:
        """A directory that was one before."""
        seen = result_at(self._records, at)
        if not stat.S_ISDIR(seen.mode):
            return self._take(at, name)
        old = child.row
        row = self._enter(name, seen, child)
        if row is None or (row is not old and row != old):
            self._rows[name] = row
        return None

    def _enter(self, name: bytes, seen: StatxResult, child: CachedDirectory | None) -> Row | None:
        try:
            row, made = self._walk.enter(self._descriptor, name, self._prefix + name, seen, child)
        except VanishedError:
            return None
        if made is None:
            self._racy.add(name)  # whether it can be read may change without its showing
        else:
            made.row = row
            self._children[name] = made
        return row

    def _take(self, at: int, name: bytes) -> None:
        """Read a name anew; again where it became something else while it was read."""
        seen = result_at(self._records, at)
        for _ in range(_TRIES):
            self._take_as(name, seen)
            if self._rows[name] is not None:
                return
            record, gone = statx_names(self._descriptor, [name])
            if gone:
                return
            seen = result_at(record, 0)
            self._racy.add(name)  # its record is that of what was there before

    def _take_as(self, name: bytes, seen: StatxResult) -> None:
        if stat.S_ISDIR(seen.mode):
            child = self._cached.children.get(name) if self._cached is not None else None
            self._rows[name] = self._enter(name, seen, child)
            return
        try:
            row, taken_as = self._walk.leaves.take(self._descriptor, name, self._prefix + name, seen)
        except VanishedError:
            self._rows[name] = None
            return
        self._rows[name] = row
        if taken_as != seen or is_racy(seen.ctime_ns, self._now_ns) or row.more.state:
            self._racy.add(name)

    def finish(self, own: bytes, *, listed_racy: bool) -> CachedDirectory:
        """What to remember of the directory."""
        cached, walk = self._cached, self._walk
        if cached is not None and self._is_as_cached and not self._rows:
            is_same = own == cached.own and listed_racy == cached.listed_racy and self._racy == cached.racy
            if is_same and self._records == cached.records and self._same_children(cached):
                return cached
            listing, digest, counts, links = cached.listing, cached.digest, cached.counts, cached.links
        else:
            is_same = False
            listing, counts, links = self._written()
            digest = walk.sink.listing(listing)
            if None in self._rows.values():
                self._leave_out_gone()
                listed_racy = True
        made = CachedDirectory(
            own, self._names, self._records, frozenset(self._racy), listing, digest, counts, links,
            listed_racy=listed_racy, is_stored=walk.is_stored(digest, cached),
        )  # fmt: skip
        made.children = self._children
        if not is_same:
            walk.changed.append((self._path, made))
        return made

    def _same_children(self, cached: CachedDirectory) -> bool:
        known = cached.children
        return len(known) == len(self._children) and all(
            known.get(name) is child for name, child in self._children.items()
        )

    def _leave_out_gone(self) -> None:
        kept = [at for at, name in enumerate(self._names) if self._rows.get(name, self) is not None]
        self._records = b"".join(self._records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in kept)
        self._names = [self._names[at] for at in kept]

    def _written(self) -> tuple[bytes, TreeCounts, dict[int, int]]:
        cached = self._cached
        if cached is not None and self._is_as_cached and not cached.links and None not in self._rows.values():
            found = self._replaced(cached)
            if found is not None:
                return found
        rows = cached.rows() if cached is not None else {}
        rows.update({name: row for name, row in self._rows.items() if row is not None})
        gone = {name for name, row in self._rows.items() if row is None}
        listed = [rows[name] for name in self._names if name not in gone]
        links = {row.more.link: size_of(row) for row in listed if row.rare is not None and row.rare.link}
        return encode_listing(listed), sum_counts(map(counts_of, listed)), links

    def _replaced(self, cached: CachedDirectory) -> tuple[bytes, TreeCounts, dict[int, int]] | None:
        """The same, where names are as they were: only what is new is counted; None where there are links to count."""
        listed = decode_listing(cached.listing)
        if len(listed) != len(self._names):
            return None
        old, new = [], []
        for name, row in self._rows.items():
            at = bisect.bisect_left(self._names, name)
            if row is None or row.more.link or listed[at].name != name:
                return None
            old.append(counts_of(listed[at]))
            new.append(counts_of(row))
            listed[at] = row
        less, more = sum_counts(old), sum_counts(new)
        counts = TreeCounts(
            cached.counts.files - less.files + more.files,
            cached.counts.directories - less.directories + more.directories,
            cached.counts.size_bytes - less.size_bytes + more.size_bytes,
        )
        return encode_listing(listed), counts, {}
