"""Find the process of a request: its command line, its ancestors, its container, and the work that it belongs to.

A request's header names a thread.  `Processes.find` looks its process up before the request is answered, because the
program may end right after.  The process is kept by the thread's id, and is checked each time with one system call
that takes no lock: pread(2) of one byte of an open /proc/PID/pagemap fails with EINVAL, and returns nothing once the
process has executed another program or has ended (pagemap_read, fs/proc/task_mmu.c).

A command line is memory of that process.  Reading it can wait for a lock that another thread of the process holds while
it waits for the mount, or for a page that is itself a file of the mount.  So a thread reads /proc
(`vfsd.machine.processes`).  Without an answer the process is known by its name only.  The loop itself asks only
about a thread whose request waits for the loop's reply: that thread executes no other program meanwhile, and the
loop's reference to its memory is not the last one.

Threading: the serving loop.  `_found` runs in a thread for which the loop waits, and only reads `_kept`.

Invariants (`check_invariants`): at most `_KEPT` threads are kept, each with at most two descriptors, and fewer where
the daemon may have few descriptors; a process holds at most COMMAND_BYTES of its command line, and at most `_DEPTH`
ancestors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import resource
import select
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias, TypeVar

from protocol.linux.syscalls import fails_to_read
from vfsd.machine.processes import BoundedReads, UnansweredError
from vfsd.machine.runtime import process_start_ticks

T = TypeVar("T")
GivenLabel: TypeAlias = tuple[int, int, str]  # a process, when it was started, and the label that it was given
COMMAND_BYTES: Final = 1024  # of a command line; the rest is cut off
EXECUTING_NS: Final = 50_000  # less than execve(2) takes until the new program's first request
_KEPT: Final = 128
_DESCRIPTORS_PER_KEPT: Final = 32  # of RLIMIT_NOFILE: the rest is for the volume and for clients
_DEPTH: Final = 16
_OBJECT_BYTES: Final = 400  # of a `Process` and its strings without their text
# Podman, Docker, containerd and CRI-O put the container's id into the cgroup's name.
_CONTAINER: Final = re.compile(rb"[0-9a-f]{64}")
_IDS: Final = re.compile(rb"^Tgid:\s*(\d+)$.*^PPid:\s*(\d+)$.*^Uid:\s*(\d+)", re.MULTILINE | re.DOTALL)  # of status
_SUPERVISOR: Final = b"/protocol/execution/supervisor.py"
_SUPERVISOR_ARGUMENTS: Final = 4  # its own name, the directory and two descriptors


class Process:
    """A process, while it runs one program.

    `command`: its command line, the first COMMAND_BYTES of it.  `label`: what it belongs to, from when it was seen
    first.  `is_starter`: it started the daemon.  `size_bytes` is its memory.
    """

    __slots__ = (
        "command", "container", "is_cut", "is_starter", "label", "name", "parent", "pid", "session", "uid",
    )  # fmt: skip

    def __init__(
        self,
        pid: int,
        name: bytes = b"",
        command: bytes = b"",
        *,
        uid: int | None = None,
        parent: Process | None = None,
        container: str | None = None,
        session: int = 0,
        is_starter: bool = False,
    ) -> None:
        self.pid = pid
        self.name = name
        self.is_cut = len(command) > COMMAND_BYTES
        self.command = command[:COMMAND_BYTES]
        self.uid = uid
        self.parent = parent
        self.container = container
        self.session = session
        self.is_starter = is_starter
        self.label: str | None = None

    @property
    def words(self) -> list[bytes]:
        """The command line; [] if it could not be read."""
        return self.command.removesuffix(b"\0").split(b"\0") if self.command else []

    @property
    def size_bytes(self) -> int:
        return _OBJECT_BYTES + len(self.command) + len(self.name)

    def parents(self) -> list[Process]:
        """Its parent, the parent of that, and so on."""
        found = []
        above = self.parent
        while above is not None:
            found.append(above)
            above = above.parent
        return found

    def ancestors(self) -> list[Process]:
        """Those of `parents` that belong in the log: up to the program that started the daemon.

        If that program is not among them: those of the same session.
        """
        chain = [self, *self.parents()]
        for at, process in enumerate(chain):
            if process.is_starter:
                return chain[1 : at + 1]
        return list(itertools.takewhile(lambda process: process.session == self.session, chain[1:]))


class _Facts(NamedTuple):
    """The facts that /proc has about a thread."""

    session: int
    pid: int
    parent: int
    uid: int
    name: bytes
    command: bytes
    container: str | None


class _Found(NamedTuple):
    """Facts about a thread, None if it has ended, and descriptors of its pagemap and name, -1 without one.

    `has_kept_parent`: its parent is kept, and is still the same.
    """

    facts: _Facts | None
    memory: int
    name: int
    has_kept_parent: bool

    def close(self) -> None:
        _close(self.memory, self.name)


_NOTHING: Final = _Found(None, -1, -1, has_kept_parent=False)


class _Kept:
    """A process that was looked up, and what shows that it still is the same."""

    __slots__ = ("memory", "name", "process", "seen_ns")

    def __init__(self, process: Process, memory: int, name: int) -> None:
        self.process = process
        self.seen_ns = 0  # the time of the last request
        self.memory = memory  # descriptor of its pagemap; -1 if it may not be opened
        self.name = name  # descriptor of its name, if the memory alone does not identify it; else -1

    @property
    def is_current(self) -> bool:
        """Whether it still is the same.  May wait for a process that waits for nothing here."""
        if self.name >= 0 and not self.has_name:
            return False
        if self.memory < 0:
            return True
        try:
            os.pread(self.memory, 1, 0)
        except OSError:
            return True
        return False

    @property
    def has_name(self) -> bool:
        """Whether the thread runs, and has the name that it had."""
        try:
            return os.pread(self.name, 64, 0).rstrip(b"\n") == self.process.name
        except OSError:  # ESRCH: the thread has ended
            return False

    def close(self) -> None:
        for descriptor in (self.memory, self.name):
            if descriptor >= 0:
                os.close(descriptor)


class Processes:
    """The processes that use the mount.

    `starter`: the process that started the daemon, 0 if it is not known.  It may be a command that ends at once, so its
    parent counts, too.
    """

    def __init__(self, starter: int = 0) -> None:
        self._kept: dict[int, _Kept] = {}  # by thread
        self._kept_max = max(1, min(_KEPT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_PER_KEPT))
        self._reads = BoundedReads()
        self._daemon = os.getpid()
        # By process id: a pidfd, and the label that it was given.  Without any, `label_of` a process is its `label`.
        self.labels: Final[dict[int, tuple[int, str]]] = {}
        self.unknown: Final = Process(0)
        self._starters: dict[int, int] = {}  # by process id: a pidfd
        facts = self._asked(functools.partial(_facts, starter, b"")) if starter else None
        for pid in () if facts is None else (facts.pid, facts.parent):
            with contextlib.suppress(OSError):
                if pid > 1:
                    self._starters[pid] = os.pidfd_open(pid)

    def close(self) -> None:
        """Close all descriptors, end the thread, and forget the labels."""
        self._reads.close()
        _close(*self._starters.values())
        self._starters.clear()
        for pid in tuple(self.labels):
            self._remove_label(pid)
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()

    def find(self, thread: int, now_ns: int = 0) -> Process:
        """Return the process of `thread`, whose request waits for a reply, as it is at `now_ns`.

        For thread 0, and one that has ended, a process without facts.  If the thread made another request just before,
        it has executed no program since: the check takes 0.7 us of 2.
        """
        kept = self._kept.get(thread)
        if kept is not None:
            is_at_once = 0 < now_ns - kept.seen_ns < EXECUTING_NS
            kept.seen_ns = now_ns
            if is_at_once:
                return kept.process
            memory = kept.memory
            if (kept.name < 0 or kept.has_name) and (memory < 0 or fails_to_read(memory)):
                return kept.process
        return self._look_up(thread, _DEPTH) if thread else self.unknown

    def runs_still(self, thread: int, process: Process) -> bool:
        """Whether `thread`, whose request waits for a reply, has executed no other program since it was `process`.

        True if it is not kept any more: looking it up would take longer than its write.
        """
        return thread not in self._kept or self.find(thread) is process

    def find_client(self, thread: int) -> Process:
        """Return the process of `thread`, which waits for nothing here, as it is now."""
        kept = self._kept.get(thread)
        if kept is not None and self._asked(lambda: kept.is_current):
            return kept.process
        return self._look_up(thread, _DEPTH)

    def _asked(self, read: Callable[[], T], discard: Callable[[T], object] | None = None) -> T | None:
        try:
            return self._reads.ask(read, discard)
        except UnansweredError:
            return None

    def _look_up(self, thread: int, depth: int) -> Process:
        """Look up a process that is not kept, or is not the kept one any more, and at most `depth` of its ancestors."""
        outdated = self._kept.pop(thread, None)
        if outdated is not None:
            outdated.close()
        found = self._asked(functools.partial(_found, thread, self._kept), _Found.close) or _NOTHING
        facts, memory, name, has_kept_parent = found
        if facts is None:
            process = Process(thread, _read_name(name) or _comm(thread))
            found.close()
            return process
        if has_kept_parent:
            parent: Process | None = self._kept[facts.parent].process
        else:
            parent = self._look_up(facts.parent, depth - 1) if facts.parent and depth > 1 else None
        process = Process(
            facts.pid,
            facts.name,
            facts.command,
            uid=facts.uid,
            parent=parent,
            container=facts.container,
            session=facts.session,
            is_starter=facts.pid in self._starters and not _has_ended(self._starters[facts.pid]),
        )
        process.label = self._inherited_label(process)
        # The memory is not enough for a thread, whose process may outlive it, nor for a child that shares the memory of
        # its parent until it executes its program (vfork(2)): such a child still has its parent's command line.
        is_like_parent = parent is not None and parent.command == process.command
        if memory >= 0 and facts.pid == thread and not is_like_parent:
            _close(name)
            name = -1
        if memory >= 0 or name >= 0:
            if len(self._kept) >= self._kept_max:
                self._kept.pop(next(iter(self._kept))).close()
            self._kept[thread] = _Kept(process, memory, name)
        return process

    # -- labels ----------------------------------------------------------------------------------------
    def set_label(self, pid: int, label: str | None) -> None:
        """Give process `pid` a label, which all processes that it starts from now on inherit; None removes it.

        ProcessLookupError if there is no such process.
        """
        self._remove_label(pid)
        if label is None:
            return
        handle = os.pidfd_open(pid)
        if len(self.labels) >= _KEPT:
            self._remove_label(next(iter(self.labels)))
        self.labels[pid] = handle, label

    def given_labels(self) -> list[GivenLabel]:
        """Return the labels that processes were given."""
        running = {pid: label for pid, (handle, label) in self.labels.items() if not _has_ended(handle)}
        return [(pid, process_start_ticks(pid) or 0, label) for pid, label in running.items()]

    def give_again(self, labels: Iterable[GivenLabel]) -> None:
        """Give processes that still run the labels that the predecessor returned as `given_labels`."""
        for pid, start_ticks, label in labels:
            with contextlib.suppress(OSError):
                self.set_label(pid, label)
                if process_start_ticks(pid) != start_ticks:
                    self._remove_label(pid)

    def _remove_label(self, pid: int) -> None:
        handle, _ = self.labels.pop(pid, (-1, ""))
        _close(handle)

    def label_of(self, process: Process) -> str | None:
        """The label that applies to a change of `process` now."""
        return self._own_label(process) or process.label or self._label_above(process)

    def _own_label(self, process: Process) -> str | None:
        given = self.labels.get(process.pid)
        if given is None:
            return None
        if not _has_ended(given[0]):
            return given[1]
        self._remove_label(process.pid)  # a later process may get the id
        return None

    def _label_above(self, process: Process) -> str | None:
        return next(filter(None, map(self._own_label, process.parents())), None)

    def _inherited_label(self, process: Process) -> str | None:
        above = process.parents()
        for parent in above:
            label = self._own_label(parent) or parent.label
            if label is not None:
                return label
        chain = [process, *above]
        for supervisor, parent in zip(chain, above, strict=False):
            if parent.pid == self._daemon:
                return _command_label(supervisor)
        return None

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert len(self._kept) <= self._kept_max <= _KEPT
        assert len(self.labels) <= _KEPT
        for kept in self._kept.values():
            assert len(kept.process.command) <= COMMAND_BYTES
            assert len(kept.process.parents()) <= _DEPTH


def _command_label(supervisor: Process) -> str | None:
    """The label of what `vfsd exec` runs: the command of its supervisor (`protocol.execution.supervisor`)."""
    words = supervisor.words
    for at, word in enumerate(words):
        if word.endswith(_SUPERVISOR):
            return "exec: " + b" ".join(words[at + _SUPERVISOR_ARGUMENTS :]).decode("utf-8", "backslashreplace")
    return None


# -- /proc ------------------------------------------------------------------------------------------
def _found(thread: int, kept: Mapping[int, _Kept]) -> _Found:
    """Look a thread up."""
    # Opened first: if the process executes another program meanwhile, the next check notices.
    memory, name = _opened(thread, "pagemap"), _opened(thread, "comm")
    facts = _facts(thread, _read_name(name))
    parent = None if facts is None else kept.get(facts.parent)
    return _Found(facts, memory, name, has_kept_parent=parent is not None and parent.is_current)


def _opened(thread: int, name: str) -> int:
    try:
        return os.open(f"/proc/{thread}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _comm(thread: int) -> bytes:
    name = _opened(thread, "comm")
    try:
        return _read_name(name)
    finally:
        _close(name)


def _read_name(descriptor: int) -> bytes:
    with contextlib.suppress(OSError):
        if descriptor >= 0:
            return os.pread(descriptor, 64, 0).rstrip(b"\n")
    return b""


def _read(thread: int, name: str, size: int) -> bytes:
    descriptor = os.open(f"/proc/{thread}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def _facts(thread: int, name: bytes) -> _Facts | None:
    """Read what /proc tells about a thread called `name`; None if it has ended."""
    try:
        ids = _IDS.search(_read(thread, "status", 2048))
        if ids is None:
            return None
        pid = int(ids[1])
        command = _read(thread, "cmdline", COMMAND_BYTES + 1)
        facts = _Facts(os.getsid(pid), pid, int(ids[2]), int(ids[3]), name, command, None)
        with contextlib.suppress(OSError):
            container = _CONTAINER.search(_read(thread, "cgroup", 4096))
            if container is not None:
                return facts._replace(container=container[0][:12].decode())
    except OSError:
        return None
    return facts
