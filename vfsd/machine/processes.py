"""Other processes: read what the kernel shows of them, and find those that keep a mount busy.

Some files of /proc wait for the process that they show.  On Linux 6.18, stat, maps, pagemap, environ, exe, cwd, root
and ns/ take a lock that a process holds while it replaces its memory (exec_update_lock, fs/exec.c); others, such as
cmdline, one that it holds while it changes its memory (mmap_lock).  status, comm, fd/ and mountinfo take neither.
Meanwhile the process may wait for a mount: the kernel writes dirty pages of a mapping back before it removes the
mapping (fuse_vma_close, fs/fuse/file.c).  A daemon that waits for such a file then waits for itself, or for another
daemon that hangs.  Releasing the last reference to the memory of a process that ends (mmput, kernel/fork.c) does the
same.  So these files are read in a thread that may be left behind.

Threading: a `BoundedReads` belongs to one thread, which waits in `ask`.  What it passes to `ask` runs in another
thread, and must not change anything that is used elsewhere: it may go on after `ask` has returned.

Invariant: at most `_STUCK_MAX` threads wait for processes; more questions are not answered.

`holders` leaves out a process that does not answer, and umount(2) still refuses if it has something open.  It never
touches the mount: opening /proc/PID/cwd with O_PATH sends the daemon no request, and the descriptor's fdinfo names the
mount.  An unprivileged caller sees only its own processes.

Source: proc_pid_fdinfo(5) (mnt_id), proc_pid_maps(5); ptrace(2) for the access rules.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final, Generic, NamedTuple, TypeVar

from vfsd.machine.mountinfo import mount_at, mounts

PATIENCE_S: Final = 0.05
_STUCK_MAX: Final = 4

K = TypeVar("K")
T = TypeVar("T")
_LINKS: Final = (("cwd", "current directory"), ("root", "root directory"), ("exe", "program"))
_HOLDERS_PATIENCE_S: Final = 0.2
_MOUNT_ID: Final = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
# address perms offset dev:inode pathname; the device in hexadecimal
_MAPPING: Final = re.compile(rb"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) \d+ *(.*)$", re.MULTILINE)


# -- bounded reads ----------------------------------------------------------------------------------
class UnansweredError(Exception):
    """The kernel did not answer in time."""


class BoundedReads:
    """A thread that reads for another one, and is replaced if it has to wait.

    `patience_s`: how long `ask` waits, not counting the time in which the reading thread waits for a CPU.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._questions: SimpleQueue[_Question[object] | None] | None = None
        self._stuck: list[_Stuck] = []

    def ask(
        self,
        read: Callable[[], T],
        discard: Callable[[T], object] | None = None,
        progress: Callable[[], object] | None = None,
    ) -> T:
        """Return what `read` returns, or raise what it raises.  UnansweredError if it takes too long.

        `discard` is called, at a later `ask`, with a result that came too late.  While what `progress` returns changes,
        `read` is waited for.
        """
        self._stuck = [stuck for stuck in self._stuck if not stuck.is_over()]
        if len(self._stuck) >= _STUCK_MAX:
            raise UnansweredError
        question = _Question(read)
        self._started().put(question)  # type: ignore[arg-type]  # the queue only carries it
        seen = None
        while not question.answered.acquire(timeout=self._patience_s):
            if progress is not None and seen != (now := progress()):
                seen = now
                continue
            if question.reader and not _is_running(question.reader):
                # The thread goes on alone, and ends when it has answered: nobody asks it again.
                self._stuck.append(_Stuck(question, discard))  # type: ignore[arg-type]
                self.close()
                raise UnansweredError
        return question.result()

    def ask_each(self, keys: Sequence[K], read: Callable[[K], T]) -> dict[K, T]:
        """Return what `read` returns for each of `keys`, without those for which it raises OSError or takes too long.

        As `ask` for each of them, with two changes of thread in all instead of two for each.
        """
        answers: dict[K, T] = {}
        first = 0
        while first < len(keys):
            batch = _Batch(keys, first, read)
            try:
                self.ask(batch.run, progress=lambda batch=batch: batch.position)  # type: ignore[misc]
            except UnansweredError:
                batch.is_left = True
                answers.update(dict(batch.answers))  # its thread may add one more
                first = batch.position + 1
            else:
                answers.update(batch.answers)
                break
        return answers

    def _started(self) -> SimpleQueue[_Question[object] | None]:
        if self._questions is None:
            questions: SimpleQueue[_Question[object] | None] = SimpleQueue()
            # A daemon thread, because one that waits for such a process must not keep this one from ending.
            try:
                threading.Thread(target=_answer_all, args=(questions,), name="vfsd-proc", daemon=True).start()
            except RuntimeError:  # the process may have no more threads
                raise UnansweredError from None
            self._questions = questions
        return self._questions

    def close(self) -> None:
        """End the thread.  The next `ask` starts another one."""
        if self._questions is not None:
            self._questions.put(None)
            self._questions = None


class _Question(Generic[T]):
    __slots__ = ("_error", "_read", "_result", "answered", "reader")

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._error: BaseException | None = None
        self._result: T
        self.reader = 0  # the thread that reads, while it does
        self.answered = threading.Lock()
        self.answered.acquire()

    def answer(self, reader: int) -> None:
        self.reader = reader
        try:
            self._result = self._read()
        except BaseException as error:  # noqa: BLE001 (`result` raises it; without an answer `ask` would wait forever)
            self._error = error
        self.reader = 0
        self.answered.release()

    def result(self) -> T:
        """Return or raise what it was answered."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result


class _Batch(Generic[K, T]):
    """The questions of `ask_each` from `keys[first]` on.  The reading thread changes it; another one reads copies."""

    __slots__ = ("_keys", "_read", "answers", "is_left", "position")

    def __init__(self, keys: Sequence[K], first: int, read: Callable[[K], T]) -> None:
        self._keys = keys
        self._read = read
        self.position = first  # the question that is being answered
        self.answers: dict[K, T] = {}
        self.is_left = False  # nobody waits for the rest

    def run(self) -> None:
        for position in range(self.position, len(self._keys)):
            if self.is_left:
                return
            self.position = position
            try:
                self.answers[self._keys[position]] = self._read(self._keys[position])
            except OSError:
                continue  # the process ended, or we may not inspect it


class _Stuck:
    """A question whose answer nobody waits for any more."""

    __slots__ = ("_discard", "_question")

    def __init__(self, question: _Question[object], discard: Callable[[object], object] | None) -> None:
        self._question = question
        self._discard = discard

    def is_over(self) -> bool:
        """Whether it was answered; discards the answer."""
        if not self._question.answered.acquire(blocking=False):
            return False
        try:
            result = self._question.result()
        except Exception:  # noqa: BLE001 (of a process that nobody asks about any more)
            return True
        if self._discard is not None:
            self._discard(result)
        return True


def _is_running(thread: int) -> bool:
    """Whether a thread of this process runs or waits for a CPU, rather than for something in the kernel.

    False if this process has no descriptor left to look at it.
    """
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].startswith(b"R")
    except OSError:
        return False


def _answer_all(questions: SimpleQueue[_Question[object] | None]) -> None:
    reader = threading.get_native_id()
    while (question := questions.get()) is not None:
        question.answer(reader)


# -- the processes that keep a mount busy ----------------------------------------------------------
class Holder(NamedTuple):
    """A process that keeps a mount busy, and `what` it has there: "current directory", "open file /x/y", ..."""

    pid: int
    command: str
    what: str

    def describe(self) -> str:
        return f"pid {self.pid} ({self.command}), {self.what}"


def holders(mountpoint: str, *, unseen_by_umount: bool = False) -> list[Holder]:
    """List the processes that keep the file system at `mountpoint` busy, by pid; empty if nothing is mounted there.

    With `unseen_by_umount`, only those that do not make umount(2) of `mountpoint` fail: they use another mount of the
    file system, which is a copy in another mount namespace or a bind mount.  That is much faster if there is no bind
    mount, because the processes of this namespace are not examined.
    """
    mount = mount_at(mountpoint)
    if mount is None:
        return []
    # Bind mounts, and copies in other mount namespaces, are separate mounts of the same device.
    own = frozenset(m.mount_id for m in mounts() if m.device == mount.device)
    if unseen_by_umount:
        own -= {mount.mount_id}
    own_namespace = os.readlink("/proc/self/ns/mnt")
    mount_ids = {own_namespace: own}
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    reads = BoundedReads(_HOLDERS_PATIENCE_S)
    # Where one of these fails, the process has ended, or we may not inspect it, or it waits for a mount that hangs.
    namespaces = reads.ask_each(pids, lambda pid: os.readlink(f"/proc/{pid}/ns/mnt"))
    for pid, namespace in namespaces.items():
        if namespace not in mount_ids:
            with suppress(OSError):
                mount_ids[namespace] = frozenset(m.mount_id for m in mounts(pid) if m.device == mount.device)
    candidates = [
        pid for pid, namespace in namespaces.items() if namespace in mount_ids and (own or namespace != own_namespace)
    ]
    held = reads.ask_each(candidates, lambda pid: _holds(pid, mount.device, mount_ids[namespaces[pid]]))
    reads.close()
    found = []
    for pid, what in held.items():
        with suppress(OSError):
            if what:
                found.append(Holder(pid, _command(pid), ", ".join(what)))
    return found


def _holds(pid: int, device: int, mount_ids: frozenset[int]) -> list[str]:
    """Describe what process `pid` uses on the device, at most one of each kind."""
    found = [kind for link, kind in _LINKS if _mount_of_link(f"/proc/{pid}/{link}") in mount_ids]
    open_file = _open_file(pid, mount_ids)
    if open_file is not None:
        found.append(f"open file {open_file}")
    mapped_file = _mapped_file(pid, device)
    if mapped_file is not None:
        found.append(f"mapped file {mapped_file}")
    return found


def _mount_of_link(path: str) -> int | None:
    """Return the id of the mount that the magic link `path` points into; None for a kernel thread's link."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mount_of_descriptor("self", str(descriptor))
    finally:
        os.close(descriptor)


def _mount_of_descriptor(pid: int | str, descriptor: str) -> int | None:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        match = _MOUNT_ID.search(file.read())
    return int(match[1]) if match else None


def _open_file(pid: int, mount_ids: frozenset[int]) -> str | None:
    for descriptor in os.listdir(f"/proc/{pid}/fdinfo"):
        try:
            if _mount_of_descriptor(pid, descriptor) in mount_ids:
                return os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue  # closed meanwhile
    return None


def _mapped_file(pid: int, device: int) -> str | None:
    with open(f"/proc/{pid}/maps", "rb") as file:
        for match in _MAPPING.finditer(file.read()):
            if os.makedev(int(match[1], 16), int(match[2], 16)) == device:
                return os.fsdecode(match[3])
    return None


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/comm", "rb") as file:
        return file.read().rstrip(b"\n").decode("utf-8", "replace")
