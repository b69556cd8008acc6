"""AuditLog: the changes of a workspace in memory (`Entry`), and what passes them on.

An engine reports each change before it answers the program (`vfsd.kernel.engines.base.ChangeObserver`); the control
socket's methods report theirs.  Consecutive writes to one file by one program of a process are one entry, which is open
until something else happens to the file, or until no write follows for `_QUIET_NS`.

A report looks up the process and the path, and makes the entry.  The rest waits until it can be done for many entries
at once: memory is counted when a chunk of entries is complete, and followers get entries when their tasks run, which is
after the replies of the engine's slice.  A record that becomes an `Entry` later would save 0.05 us of 2.

`Names` has the paths of inodes, as they are when a change is reported.  Looking a path up takes as long as the rest of
an entry.  So the paths of directories are kept until one of them is moved or removed, and those of files that were just
made until a file loses or gets a name.  That is possible only for a volume that nothing else changes
(`VolumeCapabilities.snapshots`), and while no call of the control socket changes it (`Names.suspended`).

Threading: the serving loop.  No method awaits, so an entry and its paths belong to one moment.  A closed entry does not
change any more, so other threads may read it.

Invariants (`check_invariants`):
- every change that was reported is in exactly one entry, and the numbers of entries are those of the order in which the
  changes were made (of writes that are one entry: of the first);
- `_chunks` and then `_recent` hold the newest entries in that order, without a gap; the bytes of a chunk are what its
  entries and their processes take, `bytes` is their sum, and with what `_recent` can take they are at most AUDIT_BYTES;
  the oldest chunk is dropped if they would be more, and its entries are counted in `dropped`;
- `_open` has an entry for each inode that is being written, at most `_OPEN_MAX`; each of them has a path of its own;
- each follower gets every entry that was closed since it began, in the order in which they were closed, or an
  `Overflow` in its place: it holds at most its own number of bytes, and nobody waits for it.  `_unsent` has at most
  _UNSENT entries that were closed and not offered to followers yet, none without followers;
- `Names` keeps the paths of at most `_KEPT` directories and `_KEPT_FILES` files, each the one that the volume tells;
  each kept file has one name.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
import trio

from protocol.diff.tree_diff import PathScope
from protocol.volume import extended
from vfsd.daemon.audit.processes import EXECUTING_NS, Process, Processes
from vfsd.operations.workspace import LogEntry, Overflow, ProcessRecord
from vfsd.wire.messages import wire_path

if TYPE_CHECKING:
    from protocol.volume import Attributes, Volume
    from protocol.volume_extensions import CacheInvalidation, EntryChange

AUDIT_BYTES: Final = 8 << 20
FOLLOWER_BYTES: Final = 1 << 20
FOLLOWERS_MAX: Final = 16
_OPEN_MAX: Final = 256
_QUIET_NS: Final = 1_000_000_000
_UNSENT: Final = 256


class Follower:
    """The entries that wait for one reader; see `AuditLog.follow`.

    `settle` offers the entries that the log has closed.
    """

    def __init__(self, settle: Callable[[], None], wanted: Callable[[Entry], bool], limit_bytes: int) -> None:
        self._settle = settle
        self._wanted = wanted
        self._limit_bytes = limit_bytes
        self._waiting: deque[Entry | Overflow] = deque()
        self._bytes = 0
        self._arrived = trio.Event()

    def offer(self, entry: Entry) -> None:
        """Add `entry`, or count it as missing."""
        if not self._wanted(entry):
            return
        size = entry.measured() + sum(process.size_bytes for process in (entry.process, *entry.process.parents()))
        if self._bytes + size <= self._limit_bytes:
            self._bytes += size
            self._waiting.append(entry)
        elif self._waiting and isinstance(last := self._waiting[-1], Overflow):
            last.missing += 1
        else:
            self._waiting.append(Overflow(1))

    def wake(self) -> None:
        """Have `take` return soon."""
        self._arrived.set()

    async def take(self) -> list[Entry | Overflow]:
        """Return what waits, at least one."""
        while not (taken := self.take_nowait()):
            self._arrived = trio.Event()
            await self._arrived.wait()
        return taken

    def take_nowait(self) -> list[Entry | Overflow]:
        """Return what waits."""
        self._settle()
        taken = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return taken


class _Chunk(NamedTuple):
    """Consecutive entries, and the memory that they and their processes take."""

    entries: Sequence[Entry]
    bytes: int


class AuditLog:
    """The log of one workspace.  Implements `vfsd.kernel.engines.base.ChangeObserver` for its engine.

    `starter`: the id of the process that started the daemon, 0 if it is not known.
    """

    def __init__(self, volume: Volume, *, starter: int = 0, limit_bytes: int = AUDIT_BYTES) -> None:
        self.names = Names(volume)
        self._most_recent = max(1, min(_CHUNK, limit_bytes // _RECENT_PART // _LARGEST_BYTES))
        self._most_bytes = limit_bytes - self._most_recent * _LARGEST_BYTES
        self.processes = Processes(starter)
        self._chunks: deque[_Chunk] = deque()
        self._recent: list[Entry] = []
        self._numbers = itertools.count(1)
        self._open: dict[int, Entry] = {}  # by inode
        self._open_paths: dict[bytes, int] = {}  # of the entries in `_open`: the inode
        self._open_directories: set[bytes] | None = None  # those of `_open_paths`, or more; None if some may be missing
        self._followers: list[Follower] = []
        self._unsent: list[Entry] = []
        self._acting: dict[int, tuple[str, Process]] = {}  # by thread: the call and program that it serves
        self.bytes = 0
        self.dropped = 0
        self.complete_since_ns = time_ns()

    def close(self) -> None:
        """Release the descriptors of processes."""
        self.processes.close()

    # -- the engine's reports --------------------------------------------------------------------------
    def identify(self, thread: int) -> object:
        """Return what `written` takes as `opener`: see `vfsd.kernel.engines.base.ChangeObserver`."""
        return self.processes.find(thread)

    def written(self, thread: int, inode: int, size_bytes: int, opener: object = None) -> None:
        now_ns = time_ns()
        entry = self._open.get(inode)
        process: Process | None = None
        if entry is not None:
            is_at_once = 0 <= now_ns - entry.until_ns < EXECUTING_NS
            if (
                entry.thread != thread
                or opener is not None
                or not (is_at_once or self.processes.runs_still(thread, entry.process))
            ):
                process = self._process(thread, now_ns, opener)
            if process is None or process is entry.process:
                entry.written_bytes += size_bytes
                entry.writes += 1
                entry.until_ns = now_ns
                return
            self._close(entry)
        path, links = self.names.find(inode)
        if len(self._open) >= _OPEN_MAX:
            self._close_oldest()
        if process is None:
            process = self._process(thread, now_ns, opener)
        entry = self._add("write", thread, process, path, now_ns, inode, links)
        entry.written_bytes = size_bytes
        entry.writes = 1
        self._open[inode] = entry
        if path is not None:
            # A volume that learns of names as they are looked up may still have one that another file has now.
            if path in self._open_paths:
                self._end_writes(self._open_paths[path])
            self._open_paths[path] = inode
            self._open_directories = None

    def entry_changed(self, change: str, thread: int, parent: int, name: bytes, inode: int = 0) -> None:
        now_ns = time_ns()
        if inode and name:
            path = self.names.made(parent, name, inode)
        else:
            path = self.names.below(parent, name) if name else None
            if change == "unlink":
                self.names.linked_or_unlinked()
                if path in self._open_paths:
                    self._end_writes(self._open_paths[path])
            elif change == "rmdir":
                self.names.left(path)
        process = self._process(thread, now_ns) if self._acting else self.processes.find(thread, now_ns)
        entry = self._add(change, thread, process, path, now_ns)
        if self._followers:
            self._pass_on(entry)

    def linked(self, thread: int, inode: int, parent: int, name: bytes) -> None:
        now_ns = time_ns()
        self._end_writes(inode)
        self.names.linked_or_unlinked()
        path = self.names.below(parent, name)
        other, links = self.names.find(inode)
        other = None if other == path else other
        process = self._process(thread, now_ns) if self._acting else self.processes.find(thread, now_ns)
        entry = self._add("link", thread, process, path, now_ns, links=links, other=other)
        if self._followers:
            self._pass_on(entry)

    def renamed(
        self, thread: int, parent: int, name: bytes, new_parent: int, new_name: bytes, *, exchange: bool
    ) -> None:
        now_ns = time_ns()
        names = self.names
        old, new = names.below(parent, name), names.below(new_parent, new_name)
        names.left(old, new)
        if self._open_paths:
            self._end_writes_to(old, and_below=True)
            self._end_writes_to(new, and_below=exchange)
        change = "exchange" if exchange else "rename"
        process = self._process(thread, now_ns) if self._acting else self.processes.find(thread, now_ns)
        entry = self._add(change, thread, process, old, now_ns, other=new)
        if self._followers:
            self._pass_on(entry)

    def inode_changed(self, change: str, thread: int, inode: int) -> None:
        now_ns = time_ns()
        if inode in self._open:
            self._close(self._open[inode])
        path, links = self.names.find(inode)
        process = self._process(thread, now_ns) if self._acting else self.processes.find(thread, now_ns)
        entry = self._add(change, thread, process, path, now_ns, inode, links)
        if self._followers:
            self._pass_on(entry)

    def denied(self, attempt: str, thread: int, path: bytes | None) -> None:
        self._add_denied(attempt, thread, self._process(thread, time_ns()), path)

    def denied_call(self, attempt: str, process: Process, path: bytes | None) -> None:
        """Add the entry of a call of the control socket that the policy refused."""
        self._add_denied(attempt, process.pid, process, path)

    def _add_denied(self, attempt: str, thread: int, process: Process, path: bytes | None) -> None:
        entry = self._add("denied", thread, process, None if path is None else shortened(path), time_ns())
        entry.attempt = attempt
        if self._followers:
            self._pass_on(entry)

    # -- changes that do not come through the mount ----------------------------------------------------
    def applied(self, change: str, process: Process, changed: Iterable[bytes]) -> None:
        """Add the entry of a call of the control socket that changed these paths; none if there are no paths."""
        self.close_writes()
        paths: dict[bytes, None] = {}
        count = 0
        for path in map(shortened, changed):
            if path in paths:
                continue
            count += 1
            if len(paths) < PATHS_LISTED:
                paths[path] = None
        if not count:
            return
        only, more = (next(iter(paths)), ()) if count == 1 else (None, tuple(paths))
        self._end_chunk()  # the entry may be larger than those of other changes
        entry = self._add(change, process.pid, process, only, time_ns(), paths=more, count=count)
        self._end_chunk()
        if self._followers:
            self._pass_on(entry)

    def set_acting(self, thread: int, change: tuple[str, Process] | None) -> None:
        """Attribute the changes that `thread` of this process makes through the mount to a method and its caller."""
        for entry in [entry for entry in self._open.values() if entry.thread == thread]:
            self._close(entry)
        if change is None:
            self._acting.pop(thread, None)
        else:
            self._acting[thread] = change

    # -- entries ---------------------------------------------------------------------------------------
    def _process(self, thread: int, now_ns: int, opener: object = None) -> Process:
        if self._acting and thread in self._acting:
            return self._acting[thread][1]
        return self.processes.find(thread, now_ns) if opener is None else self._opener(thread, opener)

    def _opener(self, thread: int, opener: object) -> Process:
        """The process that opened a file, as it is now; as it was then if it has ended."""
        assert isinstance(opener, Process)
        now = self.processes.find(thread)
        return now if now.command and now.pid == opener.pid else opener

    def _add(
        self,
        change: str,
        thread: int,
        process: Process,
        path: bytes | None,
        now_ns: int,
        inode: int = 0,
        links: int = 1,
        other: bytes | None = None,
        paths: Sequence[bytes] = (),
        count: int = 1,
    ) -> Entry:
        label = process.label
        if self._acting or self.processes.labels:
            label = self._label(thread, process)
        entry = Entry(
            next(self._numbers), now_ns, now_ns, change, process, thread, path, label, inode, links, other, paths, count
        )
        recent = self._recent
        recent.append(entry)
        if len(recent) >= self._most_recent:
            self._end_chunk()
        return entry

    def _label(self, thread: int, process: Process) -> str | None:
        label = self.processes.label_of(process)
        return self._acting[thread][0] if label is None and thread in self._acting else label

    def _end_chunk(self) -> None:
        """Count the memory of the newest entries; drop the oldest ones if all take too much."""
        if not self._recent:
            return
        chunk = _Chunk(self._recent, _bytes_of(self._recent))
        self._recent = []
        self._chunks.append(chunk)
        self.bytes += chunk.bytes
        while self.bytes > self._most_bytes:
            oldest = self._chunks.popleft()
            self.bytes -= oldest.bytes
            for entry in oldest.entries:
                if entry.writes and self._open.get(entry.inode) is entry:
                    self._close(entry)
            self.dropped += len(oldest.entries)
            self.complete_since_ns = oldest.entries[-1].until_ns

    def _pass_on(self, entry: Entry) -> None:
        """Offer `entry` to followers once their tasks run, after the replies of the engine's slice."""
        if not self._unsent:
            for follower in self._followers:
                follower.wake()
        self._unsent.append(entry)
        if len(self._unsent) >= _UNSENT:
            self._settle()

    def _settle(self) -> None:
        """Offer to each follower the entries that were closed."""
        unsent, self._unsent = self._unsent, []
        for entry in unsent:
            for follower in self._followers:
                follower.offer(entry)

    # -- writes that may go on -------------------------------------------------------------------------
    def _close(self, entry: Entry) -> None:
        del self._open[entry.inode]
        if entry.path is not None:
            self._open_paths.pop(entry.path, None)
        if self._followers:
            self._pass_on(entry)

    def _close_oldest(self) -> None:
        """Close half of the entries of writes."""
        closed = list(islice(self._open.values(), _OPEN_MAX // 2))
        if self._followers:
            for entry in closed:
                self._close(entry)
        else:
            self._open = dict(islice(self._open.items(), len(closed), None))
            self._open_paths = {entry.path: inode for inode, entry in self._open.items() if entry.path is not None}

    def _end_writes(self, inode: int) -> None:
        entry = self._open.get(inode)
        if entry is not None:
            self._close(entry)

    def _end_writes_to(self, path: bytes | None, *, and_below: bool) -> None:
        """End the entries of writes to `path`, or to what is below it, if it is a directory."""
        if path is None or not self._open_paths:
            return
        inode = self._open_paths.get(path)
        if inode is not None:
            self._end_writes(inode)
        elif and_below:
            if self._open_directories is None:
                self._open_directories = {each.rpartition(b"/")[0] for each in self._open_paths}
            prefix = path + b"/"
            if any(each == path or each.startswith(prefix) for each in self._open_directories):
                for open_path, inode in tuple(self._open_paths.items()):
                    if open_path.startswith(prefix):
                        self._end_writes(inode)

    def close_quiet(self) -> None:
        """End the entries of writes that no further write has followed.  To be called every second."""
        now_ns = time_ns()
        for entry in tuple(self._open.values()):
            if not 0 <= now_ns - entry.until_ns <= _QUIET_NS:  # or the clock was set back
                self._close(entry)

    def close_writes(self) -> None:
        """End the entries of all writes, at the end of the workspace."""
        for entry in tuple(self._open.values()):
            self._close(entry)

    # -- readers ---------------------------------------------------------------------------------------
    def entries(self) -> Iterator[Entry]:
        """The entries that the log holds, the oldest first.  Those of writes that go on may still change."""
        return itertools.chain(*[chunk.entries for chunk in self._chunks], tuple(self._recent))

    def going_on(self) -> Iterator[Entry]:
        """The entries of writes that go on."""
        return iter(tuple(self._open.values()))

    def follow(
        self, wanted: Callable[[Entry], bool] = lambda _: True, *, limit_bytes: int = FOLLOWER_BYTES
    ) -> Follower:
        """Return a follower, which gets the entries that are closed from now on; end it with `unfollow`.

        BlockingIOError if there are FOLLOWERS_MAX already.
        """
        if len(self._followers) >= FOLLOWERS_MAX:
            raise BlockingIOError(f"{FOLLOWERS_MAX} programs follow the log of this workspace already; end one of them")
        self._settle()  # what was closed before
        follower = Follower(self._settle, wanted, limit_bytes)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """End a follower."""
        self._followers.remove(follower)
        self._settle()

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold.  O(entries)."""
        entries = list(self.entries())
        assert [entry.number for entry in entries] == list(range(self.dropped + 1, self.dropped + 1 + len(entries)))
        for chunk in self._chunks:
            chains = {process for entry in chunk.entries for process in (entry.process, *entry.process.parents())}
            size = sum(entry.measured() for entry in chunk.entries) + sum(process.size_bytes for process in chains)
            assert chunk.bytes == size
        assert self.bytes == sum(chunk.bytes for chunk in self._chunks) <= self._most_bytes
        assert len(self._recent) < self._most_recent
        assert len(self._unsent) < _UNSENT
        assert self._followers or not self._unsent
        assert len(self._open) <= _OPEN_MAX
        assert {entry.path: inode for inode, entry in self._open.items() if entry.path is not None} == self._open_paths
        if self._open_directories is not None:
            assert self._open_directories >= {path.rpartition(b"/")[0] for path in self._open_paths}
        kept = set(map(id, entries))
        assert all(id(entry) in kept for entry in self._open.values())
        self.names.check_invariants()
        self.processes.check_invariants()


def changed_paths(invalidation: CacheInvalidation) -> Iterator[bytes]:
    """Yield the paths of the entries that were made, replaced or removed, and of the files with new content.

    Those below a removed directory have the path that it had.
    """
    paths = invalidation.paths
    removed = {change.old: change for change in invalidation.entries if change.old and change.old not in paths}
    removed_paths: dict[int, bytes | None] = {}

    def path_of(directory: int) -> bytes | None:
        below: list[EntryChange] = []
        while directory not in paths and directory not in removed_paths:
            found = removed.get(directory)
            if found is None or len(below) > len(removed):
                break
            below.append(found)
            directory = found.parent
        path = paths.get(directory, removed_paths.get(directory))
        for found in reversed(below):
            path = None if path is None else _joined(path, found.name)
            removed_paths[found.old] = path
        return path

    for change in invalidation.entries:
        if change.old != change.new and (above := path_of(change.parent)) is not None:
            yield _joined(above, change.name)
    entered = {change.new for change in invalidation.entries}
    for changed in invalidation.inodes:
        if changed.inode in paths and changed.inode not in entered and changed.content:
            yield paths[changed.inode]


def _joined(above: bytes, name: bytes) -> bytes:
    return above + b"/" + name if above else name


def _bytes_of(entries: Sequence[Entry]) -> int:
    """Return the memory that `entries` and their processes take."""
    size = OBJECT_BYTES * len(entries)
    processes: set[Process] = set()
    for entry in entries:
        if entry.label is not None or entry.paths:
            size += entry.measured() - OBJECT_BYTES
        else:
            if entry.path is not None:
                size += len(entry.path)
            if entry.other is not None:
                size += len(entry.other)
        at: Process | None = entry.process
        while at is not None and at not in processes:
            processes.add(at)
            size += at.size_bytes
            at = at.parent
    return size


_KEPT: Final = 256  # directories
_KEPT_FILES: Final = 1024
_KEPT_BYTES: Final = 512  # a longer path is not kept
_PATH_BYTES: Final = 4096


class Names:
    """The paths of the inodes of `volume`, in at most about _PATH_BYTES each, and how many names an inode has."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._path_of: Callable[[int], bytes | None] = lambda _inode: None  # a volume may not know paths
        if volume.capabilities.paths:
            self._path_of = extended(volume).path_of
        self._is_kept = self._tells_links = volume.capabilities.snapshots
        self._suspensions = 0
        self._above: dict[int, bytes] = {}  # by directory: its path, with a slash unless it is the root
        self._prefixes: set[bytes] = set()  # the paths in `_above`, and those of the directories above, with a slash
        self._made: dict[int, bytes] = {}  # by inode: the path under which it was made, which is its only name

    def below(self, parent: int, name: bytes) -> bytes | None:
        """Return the path of `name` in directory `parent`."""
        above = self._above.get(parent)
        if above is None:
            path = self._path_of(parent)
            if path is None:
                return None
            above = shortened(path) + b"/" if path else path
            if self._is_kept and len(above) <= _KEPT_BYTES:
                if len(self._above) >= _KEPT:
                    self._drop_directories()
                self._above[parent] = above
                end = above.find(b"/") + 1
                while end:
                    self._prefixes.add(above[:end])
                    end = above.find(b"/", end) + 1
        return above + name

    def find(self, inode: int) -> tuple[bytes | None, int]:
        """A path of `inode`, None if it has no name, and how many names it has: 1 if the volume does not tell."""
        made = self._made.get(inode)
        if made is not None:
            return made, 1
        path = self._path_of(inode)
        if path is not None and len(path) > _PATH_BYTES:
            path = shortened(path)
        if not self._tells_links:
            return path, 1
        try:
            # A volume with snapshots returns results, never awaitables.
            links = cast("Attributes", self._volume.getattr(inode)).nlink
        except OSError:
            return path, 0
        return path, links or 1

    # -- changes of names ------------------------------------------------------------------------------
    def made(self, parent: int, name: bytes, inode: int) -> bytes | None:
        """Note that file `inode` was made in directory `parent`; return its path."""
        above = self._above.get(parent)
        path = self.below(parent, name) if above is None else above + name
        if self._is_kept and path is not None:
            made = self._made
            if len(made) >= _KEPT_FILES:
                made.clear()
            if len(path) <= _KEPT_BYTES:
                made[inode] = path
        return path

    def linked_or_unlinked(self) -> None:
        """Note that a file got or lost a name."""
        self._made.clear()

    def left(self, *paths: bytes | None) -> None:
        """Note that what had one of these paths may be gone, or have another one."""
        self._made.clear()
        for path in paths:
            if path is None or path + b"/" in self._prefixes:
                self._drop_directories()

    def _drop_directories(self) -> None:
        self._above.clear()
        self._prefixes.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, keep no paths: something changes the volume without a report of each name."""
        self._suspensions += 1
        self._is_kept = False
        self.left(None)
        try:
            yield
        finally:
            self._suspensions -= 1
            self._is_kept = not self._suspensions and self._tells_links

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert len(self._above) <= _KEPT
        assert len(self._made) <= _KEPT_FILES
        assert self._is_kept or not (self._above or self._made or self._prefixes)
        for inode, above in self._above.items():
            path = self._path_of(inode)
            assert path is not None
            assert above == (path + b"/" if path else b"")
            assert not path or above in self._prefixes
        for inode, made in self._made.items():
            assert made == self._path_of(inode)
            assert cast("Attributes", self._volume.getattr(inode)).nlink == 1


def shortened(path: bytes) -> bytes:
    """Leave out the middle of a path that is longer than any system call takes (PATH_MAX, linux/limits.h)."""
    return path if len(path) <= _PATH_BYTES else path[: _PATH_BYTES // 2] + b"/.../" + path[-_PATH_BYTES // 2 :]


OBJECT_BYTES: Final = 512  # of an `Entry` with its numbers and without its texts, and its places in the log
_TEXT_BYTES: Final = 64  # of a string, without its characters
PATHS_LISTED: Final = 100  # of one entry for many changes at once, such as a restore
_CHUNK: Final = 32  # entries
_RECENT_PART: Final = 8  # what `_recent` can take is at most this part of the limit
_LARGEST_BYTES: Final = 48 << 10  # an entry with two paths and a label, and its process with parents of its own
# Changes of a directory that are changes of everything below it, too.
OF_WHOLE_DIRECTORIES: Final = frozenset(
    {"rename", "exchange", "restore", "import", "merge", "adopt", "revert", "fs.rm"}
)


class Entry(msgspec.Struct, eq=False, gc=False):
    """One change, or consecutive writes to one file by one program.

    `number` counts the changes in the order in which they were made.  `paths`: of one entry for many changes, the first
    PATHS_LISTED of their paths; `count` counts all.  `attempt` is what was denied, `other` the new name of a rename or
    the older name of a link, `written_bytes` the size of all `writes`.

    A struct takes a tenth of the time of a class, and the garbage collector need not examine it: nothing that an entry
    refers to refers to entries.
    """

    number: int
    time_ns: int
    until_ns: int
    change: str
    process: Process
    thread: int
    path: bytes | None
    label: str | None
    inode: int = 0
    links: int = 1
    other: bytes | None = None
    paths: Sequence[bytes] = ()
    count: int = 1
    written_bytes: int = 0
    writes: int = 0
    attempt: str | None = None

    def measured(self) -> int:
        """Return the memory that it takes, without that of its process."""
        texts = sum(len(text) for text in (self.path, self.other) if text is not None)
        label = 0 if self.label is None else 4 * len(self.label)
        return OBJECT_BYTES + texts + label + sum(map(len, self.paths)) + _TEXT_BYTES * len(self.paths)

    def is_within(self, scope: PathScope) -> bool:
        """Whether the change concerns one of the paths of `scope`, or something below one.

        The removal of a directory by a restore, or its new name, concerns the paths below it.
        """
        if self.count > len(self.paths) > 0:
            return True  # not all of its paths are known
        is_named = scope.meets if self.change in OF_WHOLE_DIRECTORIES else scope.covers
        return any(one is not None and is_named(one) for one in self.paths or (self.path, self.other)) or scope.covers(
            b""
        )

    def is_by(self, who: str) -> bool:
        """Whether its process, or an ancestor, has the process id or the program's name `who`."""
        return any(_is_called(process, who) for process in (self.process, *self.process.ancestors()))

    def record(self) -> LogEntry:
        process = self.process
        ancestors = [_record(above) for above in process.ancestors()]
        return LogEntry(
            number=self.number,
            time=time_text(self.time_ns),
            change=self.change,
            path=None if self.path is None else wire_path(self.path),
            pid=process.pid,
            until=time_text(self.until_ns) if self.until_ns != self.time_ns else None,
            to=wire_path(self.other) if self.other is not None and self.change in _TWO_NAMES else None,
            of=wire_path(self.other) if self.other is not None and self.change == "link" else None,
            links=self.links,
            inode=self.inode if self.path is None else None,
            bytes=self.written_bytes if self.writes else None,
            writes=self.writes or None,
            attempt=self.attempt,
            paths=[wire_path(path) for path in self.paths],
            count=self.count,
            process=_record(process) if process.pid else None,
            thread=self.thread if self.thread not in {0, process.pid} else None,
            ancestors=ancestors,
            container=process.container,
            label=self.label,
        )


_TWO_NAMES: Final = frozenset({"rename", "exchange"})


def _is_called(process: Process, who: str) -> bool:
    if who.isdigit():
        return process.pid == int(who)
    name = who.encode("utf-8", "surrogateescape")
    return process.name == name[:15] or any(word.rpartition(b"/")[2] == name for word in process.words[:1])


def _record(process: Process) -> ProcessRecord:
    return ProcessRecord(
        pid=process.pid,
        name=wire_path(process.name),
        command=list(map(wire_path, process.words)),
        truncated=process.is_cut,
        uid=process.uid,
    )


def time_text(time_ns: int) -> str:
    """Format a time in nanoseconds since the epoch for the wire (ISO 8601, UTC), with microseconds."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="microseconds")
