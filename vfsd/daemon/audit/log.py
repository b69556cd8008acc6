"""AuditLog: the changes of a workspace in memory, and what passes them on.

An engine reports each change before it answers the program (`vfsd.kernel.engines.base.ChangeObserver`); the control
socket's methods report theirs.  Consecutive writes to one file by one process are one entry, which is open until
something else happens to the file, or until no write follows for `_QUIET_NS`.

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
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import trio

from vfsd.daemon.audit.entries import PATHS_LISTED, Entry
from vfsd.daemon.audit.processes import Process, Processes
from vfsd.wire.audit_messages import Overflow

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from protocol.volume import Attributes, NamedVolume, Volume
    from protocol.volume_extensions import CacheInvalidation

AUDIT_BYTES: Final = 8 << 20
FOLLOWER_BYTES: Final = 1 << 20
FOLLOWERS_MAX: Final = 16
_OPEN_MAX: Final = 256
_PATH_BYTES: Final = 4096
_QUIET_NS: Final = 1_000_000_000


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
        self._volume = volume
        self._path_of = _shortened_paths(volume)
        self._limit_bytes = limit_bytes
        self.processes = Processes(starter)
        self._entries: deque[Entry] = deque()
        self._open: dict[int, Entry] = {}  # by inode
        self._open_paths: dict[bytes | None, int] = {}  # of the entries in `_open`: the inode
        self._followers: list[Follower] = []
        self._acting: dict[int, tuple[str, Process]] = {}  # by thread of this process: for whom it works
        self._last = 0
        self.bytes = 0
        self.dropped = 0
        self.complete_since_ns = time.time_ns()

    def close(self) -> None:
        """Release the descriptors of processes."""
        self.processes.close()

    # -- the engine's reports --------------------------------------------------------------------------
    def identify(self, thread: int) -> object:
        """See `vfsd.kernel.engines.base.ChangeObserver`, as for all of these methods."""
        return self.processes.find(thread)

    def written(self, thread: int, inode: int, size_bytes: int, opener: object = None) -> None:
        entry = self._open.get(inode)
        if entry is None or entry.thread != thread or opener is not None:
            process = self._process(thread, opener)
            if entry is None or entry.process is not process:
                self._end_writes(inode)
                entry = self._begin_write(thread, process, inode)
        entry.bytes += size_bytes
        entry.writes += 1
        entry.until_ns = time.time_ns()

    def _begin_write(self, thread: int, process: Process, inode: int) -> Entry:
        entry = self._new("write", thread, process, self._path_of(inode))
        entry.inode = inode
        entry.links = self._links(inode)
        if len(self._open) >= _OPEN_MAX:
            self._close(next(iter(self._open.values())))
        self._open[inode] = entry
        if entry.path is not None:
            # A volume that learns of names as they are looked up may still have one that another file has now.
            self._end_writes(self._open_paths.get(entry.path, 0))
            self._open_paths[entry.path] = inode
        self._keep(entry)
        return entry

    def entry_changed(self, change: str, thread: int, parent: int, name: bytes) -> None:
        path = self._below(parent, name)
        if change in {"unlink", "rmdir"}:
            self._end_writes_to(path)
        self._add(self._new(change, thread, self._process(thread), path if name else None))

    def linked(self, thread: int, inode: int, parent: int, name: bytes) -> None:
        self._end_writes(inode)
        path = self._below(parent, name)
        entry = self._new("link", thread, self._process(thread), path)
        other = self._path_of(inode)
        entry.other = None if other == path else other
        entry.links = self._links(inode)
        self._add(entry)

    def renamed(
        self, thread: int, parent: int, name: bytes, new_parent: int, new_name: bytes, *, exchange: bool
    ) -> None:
        old, new = self._below(parent, name), self._below(new_parent, new_name)
        self._end_writes_to(old)
        self._end_writes_to(new)
        entry = self._new("exchange" if exchange else "rename", thread, self._process(thread), old)
        entry.other = new
        self._add(entry)

    def inode_changed(self, change: str, thread: int, inode: int) -> None:
        self._end_writes(inode)
        entry = self._new(change, thread, self._process(thread), self._path_of(inode))
        entry.inode = inode
        entry.links = self._links(inode)
        self._add(entry)

    def denied(self, attempt: str, thread: int, path: bytes | None) -> None:
        self._add_denied(attempt, thread, self._process(thread), path)

    def denied_call(self, attempt: str, process: Process, path: bytes | None) -> None:
        """Add the entry of a call of the control socket that the policy refused."""
        self._add_denied(attempt, process.pid, process, path)

    def _add_denied(self, attempt: str, thread: int, process: Process, path: bytes | None) -> None:
        entry = self._new("denied", thread, process, None if path is None else _shortened(path))
        entry.attempt = attempt
        self._add(entry)

    # -- changes that do not come through the mount ----------------------------------------------------
    def applied(self, change: str, process: Process, changed: Iterable[bytes]) -> None:
        """Add the entry of a call of the control socket that changed these paths; none if there are no paths."""
        for entry in tuple(self._open.values()):
            self._close(entry)
        paths: dict[bytes, None] = {}
        count = 0
        for path in map(_shortened, changed):
            if path in paths:
                continue
            count += 1
            if len(paths) < PATHS_LISTED:
                paths[path] = None
        if not count:
            return
        entry = self._new(change, process.pid, process, next(iter(paths)) if count == 1 else None)
        entry.count = count
        entry.paths = tuple(paths) if count > 1 else ()
        self._add(entry)

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
        if thread in self._acting:
            return self._acting[thread][1]
        if isinstance(opener, Process):
            return self._opener(thread, opener)
        return self.processes.find(thread)

    def _opener(self, thread: int, opener: object) -> Process:
        """The process that opened a file, as it is now; as it was then if it has ended."""
        assert isinstance(opener, Process)
        now = self.processes.find(thread)
        return now if now.command and now.pid == opener.pid else opener

    def _new(self, change: str, thread: int, process: Process, path: bytes | None) -> Entry:
        self._last += 1
        entry = Entry(self._last, time.time_ns(), change, process, thread, path)
        entry.label = self.processes.label_of(process)
        if entry.label is None and thread in self._acting:
            entry.label = self._acting[thread][0]
        return entry

    def _below(self, parent: int, name: bytes) -> bytes | None:
        above = self._path_of(parent)
        return None if above is None else above + b"/" + name if above else name

    def _links(self, inode: int) -> int:
        found: Attributes | Awaitable[Attributes] | None = None
        try:
            found = self._volume.getattr(inode) if self._volume.capabilities.snapshots else None
        except OSError:
            return 0
        # A volume with snapshots returns results, never awaitables.
        return 1 if found is None else max(found.nlink, 1)  # type: ignore[union-attr]

    def _add(self, entry: Entry) -> None:
        self._keep(entry)
        self._pass_on(entry)

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.bytes += entry.size_bytes + _hold(entry.process)
        while self.bytes > self._limit_bytes:
            oldest = self._entries.popleft()
            if self._open.get(oldest.inode) is oldest:
                self._close(oldest)
            self.bytes -= oldest.size_bytes + _release(oldest.process)
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
        self._pass_on(entry)

    def _end_writes(self, inode: int) -> None:
        entry = self._open.get(inode)
        if entry is not None:
            self._close(entry)

    def _end_writes_to(self, path: bytes | None) -> None:
        """End the entries of writes to `path`, and to what is below it: it is renamed or removed."""
        if path is None or not self._open:
            return
        inode = self._open_paths.get(path)
        if inode is not None:
            self._end_writes(inode)
            return
        prefix = path + b"/"
        for open_path, inode in tuple(self._open_paths.items()):
            if open_path is not None and open_path.startswith(prefix):
                self._end_writes(inode)

    def close_quiet(self) -> None:
        """End the entries of writes that no further write has followed.  To be called every second."""
        before_ns = time.time_ns() - _QUIET_NS
        for entry in tuple(self._open.values()):
            if entry.until_ns < before_ns:
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
        size = sum(entry.size_bytes for entry in self._entries)
        assert self.bytes == size + sum(process.size_bytes for process in processes.values())
        assert self.bytes <= self._limit_bytes
        assert len(self._open) <= _OPEN_MAX
        assert {entry.path: inode for inode, entry in self._open.items() if entry.path is not None} == self._open_paths
        kept = set(map(id, self._entries))
        assert all(id(entry) in kept for entry in self._open.values())
        self.processes.check_invariants()


def _shortened_paths(volume: Volume) -> Callable[[int], bytes | None]:
    """Return a function that tells a path of an inode, in at most about _PATH_BYTES.

    A volume of another package may not know paths.
    """
    if not volume.capabilities.paths:
        return lambda _inode: None
    path_of = cast("NamedVolume", volume).path_of

    def shortened(inode: int) -> bytes | None:
        path = path_of(inode)
        return path if path is None or len(path) <= _PATH_BYTES else _shortened(path)

    return shortened


def _shortened(path: bytes) -> bytes:
    """Leave out the middle of a path that is longer than any system call takes (PATH_MAX, linux/limits.h)."""
    return path if len(path) <= _PATH_BYTES else path[: _PATH_BYTES // 2] + b"/.../" + path[-_PATH_BYTES // 2 :]


def changed_paths(invalidation: CacheInvalidation) -> Iterator[bytes]:
    """Yield the paths of the entries that were made, replaced or removed, and of the files with new content."""
    paths = invalidation.paths
    for change in invalidation.entries:
        if change.old != change.new and change.parent in paths:
            above = paths[change.parent]
            yield above + b"/" + change.name if above else change.name
    entered = {change.new for change in invalidation.entries}
    for changed in invalidation.inodes:
        if changed.inode in paths and changed.inode not in entered and changed.content:
            yield paths[changed.inode]


def _chain(process: Process) -> Sequence[Process]:
    return (process, *process.parents())


def _full_size(entry: Entry) -> int:
    return entry.size_bytes + sum(process.size_bytes for process in _chain(entry.process))


def _hold(process: Process) -> int:
    """Count a reference to `process`; return how many bytes that adds to the log."""
    size = 0
    at: Process | None = process
    while at is not None:
        at.held += 1
        if at.held > 1:
            break
        size += at.size_bytes
        at = at.parent
    return size


def _release(process: Process) -> int:
    """Drop a reference; return how many bytes that frees."""
    size = 0
    at: Process | None = process
    while at is not None:
        at.held -= 1
        if at.held:
            break
        size += at.size_bytes
        at = at.parent
    return size
