"""ApplyJournal: makes an apply one atomic change of the directory below, whenever the process is killed.

Everything that an apply puts in place is first staged in `.vfsd-apply` in that directory, so that putting it in place
is a rename, and so that the next process finds it.  Then the steps are written to `plan` in one go: that is the commit.

- Killed before the commit: `recover` removes the staged entries; the directory has its old state.
- Killed after the commit: `recover` executes the remaining steps; the directory has its new state.  Paths that other
  programs changed meanwhile stay as they are; the new version is put next to them, as NAME.vfsd-new.

A journal is followed only where it was made: by this user, in this very directory.  A journal that came with the files,
in a repository or an archive, or that another user put there, is not trusted.

`recover` may itself be killed and run again.  A lock on the journal's directory (flock(2), released when its holder
dies) tells a running apply from a killed one.

Threading: any one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from protocol.backends.overlay.lower import RESERVED, is_gone
from protocol.backends.overlay.steps import Step, Steps, place
from protocol.linux.beneath import Handle, open_beneath
from protocol.linux.regular_file import open_regular, read_regular

__all__ = ["ApplyJournal", "Recovered", "is_interrupted", "is_left", "journal", "recover"]

_PLAN: Final = b"plan"
_UNFINISHED_PLAN: Final = b"plan.new"
_DONE: Final = b"done"
_ELSEWHERE: Final = b"elsewhere"  # staged entries in other directories, on other mounts
_VERSION: Final = 2
_OTHERS_MAY_WRITE: Final = 0o022
# another process may hold the lock only to check whether there is something to recover
_PATIENCE: Final = 10
_PAUSE_S: Final = 0.05
_NAMED: Final = 5  # paths that a sentence names
_REJECTED: Final = b".vfsd-new"
_MOST_BYTES: Final = 1 << 30  # of a plan: more than any apply writes, less than would exhaust the memory
_Step = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of `recover`: `undone` if nothing was committed; else `paths` are those that remained to be done.

    `rejected` are the paths that other programs had changed; the wanted version, if any, is next to them.
    """

    undone: bool
    paths: tuple[bytes, ...] = ()
    rejected: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        if self.undone:
            return "an apply was killed before it had changed anything: what it had prepared is removed"
        said = (
            f"an apply was killed half-way, and is finished now ({len(self.paths)} paths were left{_named(self.paths)})"
        )
        if self.rejected:
            said += f"; {len(self.rejected)} paths that others changed meanwhile are left as they are"
            said += f"{_named(self.rejected)}, with the new version next to them as *.vfsd-new"
        return said


def _named(paths: Sequence[bytes]) -> str:
    if not paths:
        return ""
    names = [repr(os.fsdecode(path)) for path in paths[:_NAMED]]
    return ": " + ", ".join(names) + (", ..." if len(paths) > _NAMED else "")


class ApplyJournal:
    """The journal of one apply, locked.  `before` is called before each change on the disk."""

    def __init__(self, root: int, directory: Handle, before: _Step) -> None:
        self.root = root
        self.directory = directory
        self.before = before
        self._count = 0

    def stage(self, path: bytes) -> tuple[Handle, bytes, bytes]:
        """Return where to make the new entry of `path`: directory, name, and its path for a `Step`."""
        self._count += 1
        self.before()
        above = self._nearest(path.rpartition(b"/")[0])
        if above is None:
            name = b"%d" % self._count
            return self.directory, name, RESERVED + b"/" + name
        name = RESERVED + b"-%d" % self._count
        staged = above + b"/" + name
        self._note(staged)
        return *place(self.root, staged), staged

    def _nearest(self, above: bytes) -> bytes | None:
        """None if entries staged here can be renamed into `above`; else the nearest directory on its mount."""
        device = os.fstat(self.root).st_dev
        while above and not ((there := _stat_at(self.root, above)) and stat.S_ISDIR(there.st_mode)):
            above = above.rpartition(b"/")[0]  # not made yet
        if not above:
            return None
        try:
            handle = Handle(open_beneath(self.root, above, os.O_PATH | os.O_DIRECTORY, same_mount=True))
        except OSError as error:
            if error.errno == errno.EXDEV:
                return above
            raise
        return None if os.fstat(handle.fd).st_dev == device else above

    def _note(self, staged: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        handle = Handle(open_regular(_ELSEWHERE, flags, dir_fd=self.directory.fd))
        os.write(handle.fd, staged + b"\0")

    def commit(self, steps: Sequence[Step]) -> None:
        """Commit: from now on the steps are executed, whatever happens."""
        inode = os.fstat(self.directory.fd).st_ino
        records = [step.record() for step in steps]
        plan = {"version": _VERSION, "pid": os.getpid(), "inode": inode, "steps": records}
        self.before()
        descriptor = open_regular(_UNFINISHED_PLAN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=self.directory.fd)
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump(plan, file)
            file.flush()
            os.fsync(file.fileno())
        self._rename(_UNFINISHED_PLAN, _PLAN)

    def _rename(self, old: bytes, new: bytes) -> None:
        self.before()
        os.rename(old, new, src_dir_fd=self.directory.fd, dst_dir_fd=self.directory.fd)
        os.fsync(self.directory.fd)

    def done(self) -> None:
        """Record that all steps are done: nothing is left to recover."""
        self._rename(_PLAN, _DONE)

    def recover(self) -> Recovered | None:
        """Finish or undo a killed apply; None if there was none."""
        names = self._names()
        if names:
            self._check_own()
        if not names or _DONE in names:
            self.clear()
            return None
        if _PLAN not in names:
            self.clear()
            return Recovered(undone=True)
        found = self._finish()
        self.done()
        self.clear()
        return found

    def _check_own(self) -> None:
        """Raise EPERM if another user made the journal or can write to it: its steps must not run as this user."""
        seen = os.fstat(self.directory.fd)
        if seen.st_uid != os.geteuid() or seen.st_mode & _OTHERS_MAY_WRITE:
            reason = f"an apply of user {seen.st_uid} was killed here, and is that user's to finish"
            raise OSError(errno.EPERM, reason, os.fsdecode(RESERVED))

    def _names(self) -> set[bytes]:
        return set(map(os.fsencode, os.listdir(self.directory.fd)))

    def _finish(self) -> Recovered:
        todo = self._steps_of(self._read(_PLAN))
        steps = Steps(self.root)
        left, rejected = [], []
        for step in todo:
            self.before()
            if self._is_left(step):
                left.append(step.path)
            if not self._run(steps, step):
                self._reject(step)
                rejected.append(step.path)
        steps.sync()
        return Recovered(False, tuple(dict.fromkeys(left)), tuple(dict.fromkeys(rejected)))

    def _read(self, name: bytes) -> bytes:
        """Read a file of the journal.  EINVAL, EFBIG for a file that no apply wrote."""
        try:
            return read_regular(name, _MOST_BYTES, dir_fd=self.directory.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fsdecode(RESERVED + b"/" + name)) from None

    def _steps_of(self, text: bytes) -> list[Step]:
        """The steps of a plan.  EOPNOTSUPP, EINVAL for a plan that was not made here."""
        shown = os.fsdecode(RESERVED)
        try:
            plan = json.loads(text.decode("ascii"))
            if plan["version"] != _VERSION:
                raise OSError(errno.EOPNOTSUPP, f"a journal of version {plan['version']}: made by another vfsd", shown)
            if plan["inode"] != os.fstat(self.directory.fd).st_ino:
                raise OSError(errno.EINVAL, "this journal was made elsewhere, and copied here: remove it", shown)
            return [Step.of_record(record) for record in plan["steps"]]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
            raise OSError(errno.EINVAL, "no journal that an apply has written: remove it", shown) from None

    def _run(self, steps: Steps, step: Step) -> bool:
        try:
            return steps.run(step)
        except OSError as error:
            # its directory is gone, or holds entries of other programs
            if is_gone(error) or error.errno == errno.ENOTEMPTY:
                return False
            raise

    def _is_left(self, step: Step) -> bool:
        """Whether the step was still to be done, as far as that can be told."""
        if step.do == "leaf":
            return self._is_staged(step)
        there = _stat_at(self.root, step.path)
        if step.do == "attributes":
            return there is not None and not stat.S_ISDIR(there.st_mode)
        return (there is not None) == (step.do == "remove")

    def _is_staged(self, step: Step) -> bool:
        return _stat_at(self.root, step.staged) is not None

    def _reject(self, step: Step) -> None:
        """Put a staged entry next to the entry that blocks it; without its directory, into the root."""
        if step.do != "leaf" or not self._is_staged(step):
            return
        source, staged = place(self.root, step.staged)
        path = step.path
        try:
            directory, name = place(self.root, path)
        except OSError as error:
            if not is_gone(error):
                raise
            path = path.rpartition(b"/")[2]
            directory, name = place(self.root, path)
        suffix = _REJECTED
        number = 1
        while _stat_at(self.root, path + suffix) is not None:
            number += 1
            suffix = _REJECTED + b".%d" % number
        os.rename(staged, name + suffix, src_dir_fd=source.fd, dst_dir_fd=directory.fd)

    def clear(self) -> None:
        """Remove everything staged: first the plan, if it was abandoned; last the mark that all steps are done."""
        names = self._names()
        if _PLAN in names:
            self.before()
            os.unlink(_PLAN, dir_fd=self.directory.fd)
        if _ELSEWHERE in names:
            elsewhere = [path for path in self._read(_ELSEWHERE).split(b"\0") if _is_staged_elsewhere(path)]
            for path in elsewhere:
                self.before()
                _unlink_at(self.root, path)
        for name in sorted(names - {_PLAN}, key=lambda name: (name == _DONE, name == _ELSEWHERE)):
            self.before()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.directory.fd)


def _is_staged_elsewhere(path: bytes) -> bool:
    """Whether `ApplyJournal.stage` gives such names: nothing else is removed, whatever a plan says."""
    return path.rpartition(b"/")[2].startswith(RESERVED + b"-")


def _stat_at(root: int, path: bytes) -> os.stat_result | None:
    try:
        directory, name = place(root, path)
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError as error:
        if is_gone(error):
            return None
        raise


def _unlink_at(root: int, path: bytes) -> None:
    try:
        directory, name = place(root, path)
        os.unlink(name, dir_fd=directory.fd)
    except OSError as error:
        if not is_gone(error):
            raise


@contextmanager
def journal(root: int, before: _Step = _nothing) -> Iterator[ApplyJournal]:
    """Open and lock the journal in the directory of descriptor `root`, and remove it at the end.  EBUSY.

    It may contain something to `recover`.
    """
    while True:
        before()
        with contextlib.suppress(FileExistsError):
            os.mkdir(RESERVED, 0o700, dir_fd=root)
        directory = _locked(root, _PATIENCE)
        if directory is not None:
            break
    found = ApplyJournal(root, directory, before)
    try:
        yield found
    finally:
        # only if empty: entries that could not be recovered stay
        with contextlib.suppress(OSError):
            os.rmdir(RESERVED, dir_fd=root)
        fcntl.flock(directory.fd, fcntl.LOCK_UN)  # an error's traceback may hold the descriptor for longer


def _locked(root: int, patience: int) -> Handle | None:
    """The journal's directory; None if it was removed meanwhile.  EBUSY."""
    try:
        directory = Handle(open_beneath(root, RESERVED, os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:
        return None
    for attempt in range(patience):
        try:
            fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt == patience - 1:
                raise OSError(errno.EBUSY, "another apply into the same directory is going on") from None
            time.sleep(_PAUSE_S)
    try:
        there = os.stat(RESERVED, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return directory if os.path.samestat(there, os.fstat(directory.fd)) else None


def is_left(root: int) -> bool:
    """Whether there is a journal, anyone's, in the directory of descriptor `root`."""
    return _stat_at(root, RESERVED) is not None


def is_interrupted(root: int) -> bool:
    """Whether an apply was killed there and `recover` has something to do."""
    try:
        directory = _locked(root, 1)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return directory is not None and bool(os.listdir(directory.fd))


def recover(root: str | bytes, before: _Step = _nothing) -> Recovered | None:
    """Finish or undo a killed apply in the directory `root`; None, without writing anything, if there was none.

    EBUSY while an apply runs there.
    """
    top = Handle(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    if not is_left(top.fd):
        return None
    with journal(top.fd, before) as found:
        return found.recover()
