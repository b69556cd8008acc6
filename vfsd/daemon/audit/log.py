"""AuditLog: the changes of a workspace in memory (`Entry`), and what passes them on.

An engine reports each change before it answers the program (`vfsd.kernel.engines.base.ChangeObserver`); the control
socket's methods report theirs.  Consecutive writes to one file by one program of a process are one entry, which is open
until something else happens to the file, or until no write follows for `_QUIET_NS`.

`Names` has the paths of inodes, as they are when a change is reported.  Looking a path up takes as long as the rest of
an entry.  So the paths of directories, and of files that were just made, are kept until something is renamed or
removed.  That is possible only for a volume that nothing else changes (`VolumeCapabilities.snapshots`), and while no
call of the control socket changes it (`Names.suspended`).

Threading: the serving loop.  No method awaits, so an entry and its paths belong to one moment.  A closed entry does not
change any more, so other threads may read it.

Invariants (`check_invariants`):
- every change that was reported is in exactly one entry, and the numbers of entries are those of the order in which the
  changes were made (of writes that are one entry: of the first);
- `_entries` holds the newest entries in that order, without a gap; `bytes` is what they and their processes take, at
  most AUDIT_BYTES; an entry that is too old is dropped, and counted in `dropped`;
- `_open` has an entry for each inode that is being written, at most `_OPEN_MAX`; each of them has a path of its own;
- each follower gets every entry that was closed since it began, in the order in which they were closed, or an
  `Overflow` in its place: it holds at most its own number of bytes, and nobody waits for it.
- at most `_KEPT` paths of each kind are kept in `Names`, each the one that the volume tells, and each kept file has one
  name.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Final, cast

import msgspec
import trio

from protocol.diff.tree_diff import PathScope
from protocol.volume import extended
from vfsd.daemon.audit.processes import Process, Processes
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
_EXECUTING_NS: Final = 50_000  # less than execve(2) takes until the new program's first request
_DROPPED_AT_ONCE: Final = 64  # this part of the log


class Follower:
    """The entries that wait for one reader; see `AuditLog.follow`."""

    def __init__(self, wanted: Callable[[Entry], bool], limit_bytes: int) -> None:
        self._wanted = wanted
        self._limit_bytes = limit_bytes
        self._waiting: deque[Entry | Overflow] = deque()
        self._bytes = 0
        self._arrived = trio.Event()

    def offer(self, entry: Entry) -> None:
        """Add `entry`, or count it as missing."""
        if not self._wanted(entry):
            return
        size = _full_size(entry)
        if self._bytes + size <= self._limit_bytes:
            self._bytes += size
            self._waiting.append(entry)
        elif self._waiting and isinstance(last := self._waiting[-1], Overflow):
            last.missing += 1
        else:
            self._waiting.append(Overflow(1))
        self._arrived.set()

    async def take(self) -> list[Entry | Overflow]:
        """Return what waits, at least one."""
        while not self._waiting:
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self.take_nowait()

    def take_nowait(self) -> list[Entry | Overflow]:
        """Return what waits."""
        taken = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return taken


class AuditLog:
    """The log of one workspace.  Implements `vfsd.kernel.engines.base.ChangeObserver` for its engine.

    `starter`: the id of the process that started the daemon, 0 if it is not known.
    """

    def __init__(self, volume: Volume, *, starter: int = 0, limit_bytes: int = AUDIT_BYTES) -> None:
        self.names = Names(volume)
        self._limit_bytes = limit_bytes
        self.processes = Processes(starter)
        self._find = self.processes.find
        self._entries: deque[Entry] = deque()
        self._open: dict[int, Entry] = {}  # by inode
        self._open_paths: dict[bytes, int] = {}  # of the entries in `_open`: the inode
        self._open_directories: set[bytes] | None = None  # those of `_open_paths`, or more; None if some may be missing
        self._followers: list[Follower] = []
        self._acting: dict[int, tuple[str, Process]] = {}  # by thread: the call and program that it serves
        self._last = 0
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
        entry = self._open.get(inode)
        process: Process | None = None
        if entry is not None:
            now_ns = time_ns()
            is_at_once = 0 <= now_ns - entry.until_ns < _EXECUTING_NS
            if (
                entry.thread != thread
                or opener is not None
                or not (is_at_once or self.processes.runs_still(thread, entry.process))
            ):
                process = self._process(thread, opener)
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
            process = self._process(thread, opener) if self._acting or opener is not None else self._find(thread)
        entry = self._add("write", thread, process, path, inode, links)
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
        if inode and name:
            path = self.names.made(parent, name, inode)
        else:
            path = self.names.below(parent, name) if name else None
            if change == "unlink":
                self._end_writes(0 if path is None else self._open_paths.get(path, 0))
                self.names.linked_or_unlinked()
            elif change == "rmdir":
                self.names.moved()
        entry = self._add(change, thread, self._process(thread) if self._acting else self._find(thread), path)
        if self._followers:
            self._pass_on(entry)

    def linked(self, thread: int, inode: int, parent: int, name: bytes) -> None:
        self._end_writes(inode)
        self.names.linked_or_unlinked()
        path = self.names.below(parent, name)
        other, links = self.names.find(inode)
        entry = self._add("link", thread, self._process(thread), path, links=links)
        if other != path:
            self._add_other(entry, other)
        self._pass_on(entry)

    def renamed(
        self, thread: int, parent: int, name: bytes, new_parent: int, new_name: bytes, *, exchange: bool
    ) -> None:
        self.names.moved()
        old, new = self.names.below(parent, name), self.names.below(new_parent, new_name)
        self._end_writes_to(old, and_below=True)
        self._end_writes_to(new, and_below=exchange)
        entry = self._add("exchange" if exchange else "rename", thread, self._process(thread), old)
        self._add_other(entry, new)
        self._pass_on(entry)

    def inode_changed(self, change: str, thread: int, inode: int) -> None:
        self._end_writes(inode)
        path, links = self.names.find(inode)
        entry = self._add(change, thread, self._process(thread), path, inode, links)
        if self._followers:
            self._pass_on(entry)

    def denied(self, attempt: str, thread: int, path: bytes | None) -> None:
        self._add_denied(attempt, thread, self._process(thread), path)

    def denied_call(self, attempt: str, process: Process, path: bytes | None) -> None:
        """Add the entry of a call of the control socket that the policy refused."""
        self._add_denied(attempt, process.pid, process, path)

    def _add_denied(self, attempt: str, thread: int, process: Process, path: bytes | None) -> None:
        entry = self._add("denied", thread, process, None if path is None else shortened(path))
        entry.attempt = attempt
        self._pass_on(entry)

    # -- changes that do not come through the mount ----------------------------------------------------
    def applied(self, change: str, process: Process, changed: Iterable[bytes]) -> None:
        """Add the entry of a call of the control socket that changed these paths; none if there are no paths."""
        for entry in tuple(self._open.values()):
            self._close(entry)
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
        entry = self._add(change, process.pid, process, next(iter(paths)) if count == 1 else None)
        entry.count = count
        entry.paths = tuple(paths) if count > 1 else ()
        self._grow(entry, entry.measured() - entry.size_bytes)
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
    def _process(self, thread: int, opener: object = None) -> Process:
        if self._acting and thread in self._acting:
            return self._acting[thread][1]
        return self.processes.find(thread) if opener is None else self._opener(thread, opener)

    def _opener(self, thread: int, opener: object) -> Process:
        """The process that opened a file, as it is now; as it was then if it has ended."""
        assert isinstance(opener, Process)
        now = self.processes.find(thread)
        return now if now.command and now.pid == opener.pid else opener

    def _add(
        self, change: str, thread: int, process: Process, path: bytes | None, inode: int = 0, links: int = 1
    ) -> Entry:
        label = process.label
        if self._acting or self.processes.labels:
            label = self._label(thread, process)
        size = OBJECT_BYTES if label is None else size_of(label)
        if path is not None:
            size += len(path)
        now_ns = time_ns()
        self._last = number = self._last + 1
        entry = Entry(number, now_ns, now_ns, change, process, thread, path, label, size, inode, links)
        self._entries.append(entry)
        process.held += 1
        if process.held == 1:
            size += _hold_parents(process)
        self.bytes += size
        if self.bytes > self._limit_bytes:
            self._drop_oldest()
        return entry

    def _label(self, thread: int, process: Process) -> str | None:
        label = self.processes.label_of(process)
        return self._acting[thread][0] if label is None and thread in self._acting else label

    def _add_other(self, entry: Entry, other: bytes | None) -> None:
        if other is not None:
            entry.other = other
            self._grow(entry, len(other))

    def _grow(self, entry: Entry, size_bytes: int) -> None:
        """Count `size_bytes` more for the newest entry."""
        entry.size_bytes += size_bytes
        self.bytes += size_bytes
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop entries if they are over the limit; some more, because one at a time takes three times as long."""
        if self.bytes <= self._limit_bytes:
            return
        while self.bytes > self._limit_bytes - self._limit_bytes // _DROPPED_AT_ONCE:
            oldest = self._entries.popleft()
            if oldest.writes and self._open.get(oldest.inode) is oldest:
                self._close(oldest)
            self.bytes -= oldest.size_bytes
            process = oldest.process
            process.held -= 1
            if not process.held:
                self.bytes -= _release_parents(process)
            self.dropped += 1
            self.complete_since_ns = oldest.until_ns

    def _pass_on(self, entry: Entry) -> None:
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
        return iter(tuple(self._entries))

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
        follower = Follower(wanted, limit_bytes)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """End a follower."""
        self._followers.remove(follower)

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold.  O(entries)."""
        numbers = [entry.number for entry in self._entries]
        assert numbers == list(range(self.dropped + 1, self._last + 1))
        processes: dict[int, Process] = {}
        for entry in self._entries:
            for process in _chain(entry.process):
                processes[id(process)] = process
        assert all(entry.size_bytes == entry.measured() for entry in self._entries)
        size = sum(entry.size_bytes for entry in self._entries)
        assert self.bytes == size + sum(process.size_bytes for process in processes.values())
        assert self.bytes <= self._limit_bytes
        assert len(self._open) <= _OPEN_MAX
        assert {entry.path: inode for inode, entry in self._open.items() if entry.path is not None} == self._open_paths
        if self._open_directories is not None:
            assert self._open_directories >= {path.rpartition(b"/")[0] for path in self._open_paths}
        kept = set(map(id, self._entries))
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


def _chain(process: Process) -> Sequence[Process]:
    return (process, *process.parents())


def _full_size(entry: Entry) -> int:
    return entry.size_bytes + sum(process.size_bytes for process in _chain(entry.process))


def _hold_parents(process: Process) -> int:
    """Count the references of a process that is held now; return how many bytes it and its parents add to the log."""
    size, at = process.size_bytes, process.parent
    while at is not None:
        at.held += 1
        if at.held > 1:
            break
        size += at.size_bytes
        at = at.parent
    return size


def _release_parents(process: Process) -> int:
    """Drop the references of a process that is not held any more; return how many bytes that frees."""
    size, at = process.size_bytes, process.parent
    while at is not None:
        at.held -= 1
        if at.held:
            break
        size += at.size_bytes
        at = at.parent
    return size


_KEPT: Final = 256
_KEPT_BYTES: Final = 512  # a longer path is not kept
_PATH_BYTES: Final = 4096


class Names:
    """The paths of the inodes of `volume`, in at most about _PATH_BYTES each, and how many names an inode has."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._path_of: Callable[[int], bytes | None] = lambda _inode: None  # a volume may not know paths
        if volume.capabilities.paths:
            self._path_of = extended(volume).path_of
        self._is_kept = volume.capabilities.snapshots
        self._suspensions = 0
        self._above: dict[int, bytes] = {}  # by directory: its path, with a slash unless it is the root
        self._made: dict[int, bytes] = {}  # by inode: the path under which it was made, which is its only name

    def below(self, parent: int, name: bytes) -> bytes | None:
        """Return the path of `name` in directory `parent`."""
        above = self._above.get(parent)
        if above is None:
            path = self.of(parent)
            if path is None:
                return None
            above = path + b"/" if path else path
            if self._is_kept and len(above) <= _KEPT_BYTES:
                if len(self._above) >= _KEPT:
                    self._above.clear()
                self._above[parent] = above
        return above + name

    def of(self, inode: int) -> bytes | None:
        """Return a path of `inode`; None if it has no name."""
        path = self._path_of(inode)
        return path if path is None or len(path) <= _PATH_BYTES else shortened(path)

    def find(self, inode: int) -> tuple[bytes | None, int]:
        """A path of `inode`, None if it has no name, and how many names it has: 1 if the volume does not tell."""
        made = self._made.get(inode)
        return (self.of(inode), self._count(inode)) if made is None else (made, 1)

    def _count(self, inode: int) -> int:
        if not self._volume.capabilities.snapshots:
            return 1
        try:
            # A volume with snapshots returns results, never awaitables.
            found = cast("Attributes", self._volume.getattr(inode))
        except OSError:
            return 0
        return max(found.nlink, 1)

    # -- changes of names ------------------------------------------------------------------------------
    def made(self, parent: int, name: bytes, inode: int) -> bytes | None:
        """Note that file `inode` was made in directory `parent`; return its path."""
        above = self._above.get(parent)
        path = self.below(parent, name) if above is None else above + name
        if self._is_kept and path is not None:
            made = self._made
            if len(made) >= _KEPT:
                made.clear()
            if len(path) <= _KEPT_BYTES:
                made[inode] = path
        return path

    def linked_or_unlinked(self) -> None:
        """Note that a file got or lost a name."""
        self._made.clear()

    def moved(self) -> None:
        """Note that a directory may have another path."""
        self._made.clear()
        self._above.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, keep no paths: something changes the volume without a report of each name."""
        self._suspensions += 1
        self._is_kept = False
        self.moved()
        try:
            yield
        finally:
            self._suspensions -= 1
            self._is_kept = not self._suspensions and self._volume.capabilities.snapshots

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert max(len(self._above), len(self._made)) <= _KEPT
        assert self._is_kept or not (self._above or self._made)
        for inode, above in self._above.items():
            path = self._path_of(inode)
            assert path is not None
            assert above == (path + b"/" if path else b"")
        for inode, made in self._made.items():
            assert made == self._path_of(inode)
            assert cast("Attributes", self._volume.getattr(inode)).nlink == 1


def shortened(path: bytes) -> bytes:
    """Leave out the middle of a path that is longer than any system call takes (PATH_MAX, linux/limits.h)."""
    return path if len(path) <= _PATH_BYTES else path[: _PATH_BYTES // 2] + b"/.../" + path[-_PATH_BYTES // 2 :]


OBJECT_BYTES: Final = 640  # of an `Entry` with its numbers and without its texts, and its places in the log
_TEXT_BYTES: Final = 64  # of a string, without its characters
PATHS_LISTED: Final = 100  # of one entry for many changes at once, such as a restore
# Changes of a directory that are changes of everything below it, too.
OF_WHOLE_DIRECTORIES: Final = frozenset(
    {"rename", "exchange", "restore", "import", "merge", "adopt", "revert", "fs.rm"}
)


class Entry(msgspec.Struct, eq=False, gc=False):
    """One change, or consecutive writes to one file by one program.

    `number` counts the changes in the order in which they were made.  `paths`: of one entry for many changes, the first
    PATHS_LISTED of their paths; `count` counts all.  `attempt` is what was denied, `other` the new name of a rename or
    the older name of a link, `written_bytes` the size of all `writes`.

    `size_bytes` is the memory that it takes, without that of its process; see `measured`.

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
    size_bytes: int
    inode: int = 0
    links: int = 1
    written_bytes: int = 0
    writes: int = 0
    attempt: str | None = None
    other: bytes | None = None
    paths: Sequence[bytes] = ()
    count: int = 1

    def measured(self) -> int:
        """Return what `size_bytes` has to be, which no attribute changes any more once the entry is in the log."""
        texts = [text for text in (self.path, self.other) if text is not None]
        size = size_of(self.label) + sum(map(len, texts))
        return size + sum(map(len, self.paths)) + _TEXT_BYTES * len(self.paths)

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


def size_of(label: str | None) -> int:
    """Return the size of an entry with this label and without paths."""
    return OBJECT_BYTES if label is None else OBJECT_BYTES + 4 * len(label)


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
