"""ApplyIntentLog: makes an apply one atomic change of the lower directory, even if the process is killed.

An apply first stages all new entries in its log, `.vfsd-apply` in that directory, so that each of them is put in place
by a rename.  (Below `/` the log is in a directory that the user may write: `HostLower.intent_log`.)  Then it writes the
steps to a temporary file and renames that to `plan`: this is the commit.

- Killed before the commit: `recover` removes the staged entries; the directory has its old state.
- Killed after the commit: `recover` executes the remaining steps; the directory has its new state.  Paths that other
  programs changed meanwhile stay unchanged; the new version is put next to them, as NAME.vfsd-new.

An intent log is trusted only if this user made it, in this very directory.  One that came with the files, in a
repository or an archive, or that another user put there, is refused.

`recover` may itself be killed and run again.  A lock on the intent log's directory (flock(2), released when the process
that holds it ends) distinguishes a running apply from a killed one.

A step records the identity that its path had when it was planned (`seen`).  If another program has changed the path
since, the step does nothing and reports that, because an apply that is completed after a crash may run much later.
Each step can be repeated.

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
from typing import Any, Final, Literal

from protocol.backends.overlay.host_lower import INTENT_LOG_NAME
from protocol.backends.overlay.lower import Identity, is_gone
from protocol.diff.tree_diff import is_at_or_below
from protocol.errors import os_error
from protocol.linux.beneath import DirectoryReference, open_beneath, open_directory
from protocol.linux.portable import Handle, proc_path
from protocol.linux.regular_file import open_regular, read_regular
from protocol.tree import TreeEntry

_PLAN: Final = b"plan"
_UNFINISHED_PLAN: Final = b"plan.new"
_DONE: Final = b"done"
_ELSEWHERE: Final = b"elsewhere"  # staged entries in other directories, on other mounts
_VERSION: Final = 2
_OTHERS_MAY_WRITE: Final = 0o022
# A daemon may hold the lock for a moment, to check whether there is something to recover.
_LOCK_ATTEMPTS: Final = 10
_LOCK_PAUSE_S: Final = 0.05
_NAMED: Final = 5  # paths that a message names
_REJECTED: Final = b".vfsd-new"
_MOST_BYTES: Final = 1 << 30  # of a plan: more than any apply writes, less than would exhaust the memory


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of `recover`: either `undone`, or completed with `paths`, those that the killed apply had left.

    `rejected` are the paths that other programs had changed; the version of the apply, if any, is next to them.
    """

    undone: bool
    paths: tuple[bytes, ...] = ()
    rejected: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        if self.undone:
            return "an earlier apply was killed before it changed anything; its temporary files are removed"
        text = f"an earlier apply was killed; its remaining {len(self.paths)} paths are written now{_named(self.paths)}"
        if self.rejected:
            text += f"; {len(self.rejected)} paths that other programs changed meanwhile stay unchanged"
            text += f"{_named(self.rejected)}, and the new version is next to them as *.vfsd-new"
        return text


def _named(paths: Sequence[bytes]) -> str:
    if not paths:
        return ""
    names = [repr(os.fsdecode(path)) for path in paths[:_NAMED]]
    return ": " + ", ".join(names) + (", ..." if len(paths) > _NAMED else "")


class ApplyIntentLog:
    """The intent log of one apply, locked.  `before` is called before each change on the disk.

    `path` is the path of the log, relative to the lower directory.
    """

    def __init__(self, root: int, path: bytes, directory: Handle, before: Callable[[], None]) -> None:
        self.root = root
        self._path = path
        self._above = path.rpartition(b"/")[0]
        self.directory = directory
        self.before = before
        self._count = 0

    def stage(self, path: bytes) -> tuple[Handle, bytes, bytes]:
        """Return where to make the new entry for `path`: directory, name, and its path for a `Step`."""
        self._count += 1
        self.before()
        above = self._nearest(path.rpartition(b"/")[0])
        if above is None:
            name = b"%d" % self._count
            return self.directory, name, self._path + b"/" + name
        name = INTENT_LOG_NAME + b"-%d" % self._count
        staged = os.path.join(above, name)
        self._note(staged)
        return *place(self.root, staged), staged

    def _nearest(self, above: bytes) -> bytes | None:
        """Return None if entries staged in the log can be renamed into `above`, else a directory on its mount."""
        while above and not ((there := _stat_at(self.root, above)) and stat.S_ISDIR(there.st_mode)):
            above = above.rpartition(b"/")[0]  # not made yet
        if above == self._above:
            return None
        if not is_at_or_below(above, {self._above}):
            return above
        top = Handle(open_beneath(self.root, self._above or b".", os.O_PATH | os.O_DIRECTORY))
        device = os.fstat(top.fd).st_dev
        below = above[len(self._above) :].lstrip(b"/")
        try:
            handle = Handle(open_beneath(top.fd, below, os.O_PATH | os.O_DIRECTORY, same_mount=True))
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
        """Write the plan: from now on the steps are executed, now or by `recover`."""
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
        """Record that all steps are executed: there is nothing to recover."""
        self._rename(_PLAN, _DONE)

    def recover(self) -> Recovered | None:
        """Complete or undo a killed apply; None if there was none."""
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
        """Raise EPERM if another user made the intent log or can write to it: its steps must not run as this user."""
        seen = os.fstat(self.directory.fd)
        if seen.st_uid != os.geteuid() or seen.st_mode & _OTHERS_MAY_WRITE:
            reason = f"user {seen.st_uid} began an apply here that was killed: let that user run `vfsd apply` again"
            raise OSError(errno.EPERM, reason, os.fsdecode(INTENT_LOG_NAME))

    def _names(self) -> set[bytes]:
        return set(map(os.fsencode, os.listdir(self.directory.fd)))

    def _finish(self) -> Recovered:
        todo = self._steps_of(self._read(_PLAN))
        steps = Steps(self.root)
        left, rejected = [], []
        for step in todo:
            self.before()
            if self._is_pending(step):
                left.append(step.path)
            if not self._run(steps, step):
                self._reject(step)
                rejected.append(step.path)
        steps.sync()
        return Recovered(False, tuple(dict.fromkeys(left)), tuple(dict.fromkeys(rejected)))

    def _read(self, name: bytes) -> bytes:
        """Read a file of the intent log.  EINVAL, EFBIG for a file that no apply wrote."""
        try:
            return read_regular(name, _MOST_BYTES, dir_fd=self.directory.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fsdecode(INTENT_LOG_NAME + b"/" + name)) from None

    def _steps_of(self, text: bytes) -> list[Step]:
        """Return the steps of a plan.  EOPNOTSUPP, EINVAL for a plan that was not made here."""
        shown = os.fsdecode(INTENT_LOG_NAME)
        try:
            plan = json.loads(text.decode("ascii"))
            if plan["version"] != _VERSION:
                reason = f"written in format {plan['version']} by another version of vfsd: use that version"
                raise OSError(errno.EOPNOTSUPP, reason, shown)
            if plan["inode"] != os.fstat(self.directory.fd).st_ino:
                raise OSError(errno.EINVAL, "made elsewhere and copied here: remove it", shown)
            return [Step.of_record(record) for record in plan["steps"]]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
            raise OSError(errno.EINVAL, "not an intent log of an apply: remove it", shown) from None

    def _run(self, steps: Steps, step: Step) -> bool:
        try:
            return steps.run(step)
        except OSError as error:
            # The directory was removed, or has entries of other programs.
            if is_gone(error) or error.errno == errno.ENOTEMPTY:
                return False
            raise

    def _is_pending(self, step: Step) -> bool:
        """Return whether the step was probably not executed yet."""
        if step.do == "leaf":
            return self._is_staged(step)
        there = _stat_at(self.root, step.path)
        if step.do == "attributes":
            return there is not None and not stat.S_ISDIR(there.st_mode)
        return (there is not None) == (step.do == "remove")

    def _is_staged(self, step: Step) -> bool:
        return _stat_at(self.root, step.staged) is not None

    def _reject(self, step: Step) -> None:
        """Rename a staged entry to a free name next to its path, or next to the log if that directory was removed."""
        if step.do != "leaf" or not self._is_staged(step):
            return
        source, staged = place(self.root, step.staged)
        path = step.path
        try:
            directory, name = place(self.root, path)
        except OSError as error:
            if not is_gone(error):
                raise
            path = os.path.join(self._above, path.rpartition(b"/")[2])
            directory, name = place(self.root, path)
        suffix = _REJECTED
        number = 1
        while _stat_at(self.root, path + suffix) is not None:
            number += 1
            suffix = _REJECTED + b".%d" % number
        os.rename(staged, name + suffix, src_dir_fd=source.fd, dst_dir_fd=directory.fd)

    def clear(self) -> None:
        """Remove all staged entries: an abandoned plan first, so that it is not executed; the mark `done` last."""
        names = self._names()
        if _PLAN in names:
            self.before()
            os.unlink(_PLAN, dir_fd=self.directory.fd)
        if _ELSEWHERE in names:
            elsewhere = [path for path in self._read(_ELSEWHERE).split(b"\0") if _is_staged_elsewhere(path)]
            for path in elsewhere:
                self.before()
                if _stat_at(self.root, path) is not None:  # else EROFS where none could be made
                    _unlink_at(self.root, path)
        for name in sorted(names - {_PLAN}, key=lambda name: (name == _DONE, name == _ELSEWHERE)):
            self.before()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.directory.fd)


def _is_staged_elsewhere(path: bytes) -> bool:
    """Return whether `ApplyIntentLog.stage` makes such names: nothing else is removed, whatever the file lists."""
    return path.rpartition(b"/")[2].startswith(INTENT_LOG_NAME + b"-")


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
def intent_log(
    root: int, before: Callable[[], None] = lambda: None, path: bytes = INTENT_LOG_NAME
) -> Iterator[ApplyIntentLog]:
    """Make or open the intent log `path` below the directory `root`, locked, and remove it at the end.  EBUSY."""
    above, name = place(root, path)
    while True:
        before()
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above.fd)
        directory = _locked(above, name, _LOCK_ATTEMPTS)
        if directory is not None:
            break
    found = ApplyIntentLog(root, path, directory, before)
    try:
        yield found
    finally:
        # It fails if entries are left that could not be recovered.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=above.fd)
        fcntl.flock(directory.fd, fcntl.LOCK_UN)  # the traceback of an error may keep the descriptor open


def _locked(above: Handle, name: bytes, attempts: int) -> Handle | None:
    """Lock the intent log's directory; None if it does not exist, or was removed meanwhile.  EBUSY."""
    try:
        directory = Handle(open_beneath(above.fd, name, os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:
        return None
    for attempt in range(attempts):
        try:
            fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt == attempts - 1:
                raise OSError(errno.EBUSY, "another apply into this directory is running: try again later") from None
            time.sleep(_LOCK_PAUSE_S)
    there = _stat(above, name)
    return directory if there is not None and os.path.samestat(there, os.fstat(directory.fd)) else None


def has_intent_log(root: int, path: bytes = INTENT_LOG_NAME) -> bool:
    """Return whether there is an intent log at `path` below the directory of descriptor `root`, of any user."""
    return _stat_at(root, path) is not None


def is_interrupted(root: int, path: bytes = INTENT_LOG_NAME) -> bool:
    """Return whether an apply was killed in the directory of descriptor `root`, so that `recover` has work."""
    if not has_intent_log(root, path):
        return False
    try:
        directory = _locked(*place(root, path), attempts=1)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return directory is not None and bool(os.listdir(directory.fd))


def recover(
    root: DirectoryReference, before: Callable[[], None] = lambda: None, path: bytes = INTENT_LOG_NAME
) -> Recovered | None:
    """Complete or undo a killed apply in the directory `root`; None if there was none.  EBUSY while one runs there."""
    top = Handle(open_directory(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    if not has_intent_log(top.fd, path):
        return None
    with intent_log(top.fd, before, path) as found:
        return found.recover()


_PERMISSIONS: Final = 0o7777
_ONLY_MINE: Final = 0o700


@dataclass(frozen=True, slots=True)
class Step:
    """One change at `path`, which is relative to the lower directory.

    "directory" makes a directory, "leaf" renames the entry at `staged` to `path`, "attributes" sets mode, owner, mtime
    and xattrs to those of `attributes`, "remove" removes the entry.
    """

    do: Literal["directory", "leaf", "attributes", "remove"]
    path: bytes
    seen: Identity | None = None
    staged: bytes = b""
    attributes: TreeEntry | None = None

    def record(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        found: dict[str, Any] = {"do": self.do, "path": os.fsdecode(self.path), "seen": self.seen}
        if self.staged:
            found["staged"] = os.fsdecode(self.staged)
        if self.attributes is not None:
            a = self.attributes
            xattrs = {os.fsdecode(name): value.hex() for name, value in a.xattrs.items()}
            found["attributes"] = [a.mode, a.uid, a.gid, a.mtime_ns, xattrs]
        return found

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Step:
        """Return the step of a `record`.  KeyError, ValueError, TypeError, AttributeError for any other object."""
        path, staged = os.fsencode(record["path"]), os.fsencode(record.get("staged", ""))
        attributes = None
        if "attributes" in record:
            mode, uid, gid, mtime_ns, xattrs = record["attributes"]
            values = {os.fsencode(name): bytes.fromhex(value) for name, value in xattrs.items()}
            attributes = TreeEntry(path, mode, mtime_ns=mtime_ns, uid=uid, gid=gid, xattrs=values)
        seen = record["seen"]
        for each in (path, staged):
            if each and not {b"", b".", b".."}.isdisjoint(each.split(b"/")):
                raise ValueError(f"{os.fsdecode(each)!r} leads elsewhere")
        return cls(record["do"], path, seen and (*seen,), staged, attributes)


def place(root: int, path: bytes) -> tuple[Handle, bytes]:
    """Open the directory of `path` and return it with the name in it.  Writes use no cached descriptor."""
    above, _, name = path.rpartition(b"/")
    return Handle(open_beneath(root, above or b".", os.O_RDONLY | os.O_DIRECTORY)), name or b"."


class Steps:
    """Executes steps in the directory of descriptor `root`.

    `before_ctime` is called with the directory and name of each inode that stays and whose ctime is about to change,
    and `after_ctime` with its device and number when the step has changed it.
    """

    def __init__(
        self,
        root: int,
        before_ctime: Callable[[Handle, bytes], None] = lambda _handle, _name: None,
        after_ctime: Callable[[tuple[int, int]], None] = lambda _key: None,
    ) -> None:
        self._root = root
        self._before_ctime = before_ctime
        self._after_ctime = after_ctime
        self._unsynced: set[bytes] = set()  # directories

    def run(self, step: Step) -> bool:
        """Execute a step.  Return False, without a change, if the path was changed by another program.  OSError."""
        if step.do == "attributes":
            return self._set(step)
        try:
            directory, name = place(self._root, step.path)
        except OSError as error:
            if is_gone(error):
                return step.do == "remove"
            raise
        self._unsynced.add(step.path.rpartition(b"/")[0])
        there = _stat(directory, name)
        if step.do == "directory":
            return self._make(step, directory, name, there)
        if step.do == "leaf":
            return self._put(step, directory, name, there)
        return self._remove(step, directory, name, there)

    def _make(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        if there is not None:
            if stat.S_ISDIR(there.st_mode):
                return True
            if not _is_seen(there, step.seen):
                return False
            self._unlink(directory, name, there)
        os.mkdir(name, _ONLY_MINE, dir_fd=directory.fd)
        return True

    def _put(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        source, staged = place(self._root, step.staged)
        new = _stat(source, staged)
        if new is None:
            return True  # executed before
        if there is not None:
            if (there.st_dev, there.st_ino) == (new.st_dev, new.st_ino):
                os.unlink(staged, dir_fd=source.fd)  # rename(2) keeps both if they are names of one file
                return True
            if not _is_seen(there, step.seen):
                return False
            if stat.S_ISDIR(there.st_mode):
                _rmdir(directory, name, step.path)
            elif there.st_nlink > 1:
                self._before_ctime(directory, name)
        try:
            os.rename(staged, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd)
        except OSError as error:  # it names what is staged
            raise os_error(error.errno or errno.EIO, step.path.decode("utf-8", "backslashreplace")) from None
        if there is not None:
            self._after_ctime((there.st_dev, there.st_ino))
        return True

    def _remove(self, step: Step, directory: Handle, name: bytes, there: os.stat_result | None) -> bool:
        if there is None:
            return True
        if not _is_seen(there, step.seen):
            return False
        if not stat.S_ISDIR(there.st_mode):
            self._unlink(directory, name, there)
            return True
        _rmdir(directory, name, step.path)
        return True

    def _unlink(self, directory: Handle, name: bytes, there: os.stat_result) -> None:
        if there.st_nlink > 1:
            self._before_ctime(directory, name)
        os.unlink(name, dir_fd=directory.fd)
        self._after_ctime((there.st_dev, there.st_ino))

    def _set(self, step: Step) -> bool:
        new = step.attributes
        assert new is not None
        try:
            directory, name = place(self._root, step.path)
        except OSError as error:
            if is_gone(error):
                return False
            raise
        there = _stat(directory, name)
        if there is None:
            return False
        if stat.S_ISDIR(there.st_mode):
            self._unsynced.add(step.path)
        elif not _is_seen(there, step.seen) and not (
            step.seen is not None and _is_seen(there, (*step.seen[:3], new.mtime_ns, 0))  # set by a killed apply
        ):
            return False
        else:
            self._before_ctime(directory, name)
        can_sync = stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode)
        flags = os.O_RDONLY | os.O_NONBLOCK if can_sync else os.O_PATH
        handle = Handle(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        set_attributes(handle.fd, new)
        self._after_ctime((there.st_dev, there.st_ino))
        if can_sync:
            os.fsync(handle.fd)
        return True

    def sync(self) -> None:
        """Sync the directories that were changed."""
        for path in sorted(self._unsynced):
            try:
                handle = Handle(open_beneath(self._root, path or b".", os.O_RDONLY | os.O_DIRECTORY))
            except OSError as error:
                if is_gone(error):
                    continue  # removed since
                raise
            os.fsync(handle.fd)


def _stat(directory: Handle, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _rmdir(directory: Handle, name: bytes, path: bytes) -> None:
    try:
        os.rmdir(name, dir_fd=directory.fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise os_error(errno.ENOTEMPTY, path.decode("utf-8", "backslashreplace")) from None


def _is_seen(there: os.stat_result, seen: Identity | None) -> bool:
    """Return whether the identity is the one that was seen, apart from the ctime, which links and renames change."""
    if seen is None:
        return False
    if stat.S_ISDIR(there.st_mode):
        return (there.st_dev, there.st_ino) == seen[:2]
    return (there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns) == seen[:4]


def set_attributes(descriptor: int, new: TreeEntry) -> None:
    """Give the inode of a descriptor, which may be an O_PATH one, the mode, owner, xattrs and mtime of `new`.

    The owner is set first, because that clears mode bits; the mtime last, because the other calls may change it.
    """
    path = proc_path(descriptor)
    there = os.fstat(descriptor)
    if (there.st_uid, there.st_gid) != (new.uid, new.gid):
        os.chown(path, new.uid, new.gid)
    if not stat.S_ISLNK(there.st_mode):  # a new FIFO, too, may have an ACL of its directory
        had: list[str] = []
        with contextlib.suppress(OSError):  # EOPNOTSUPP: there are none to remove
            had = os.listxattr(path)
        for name in had:
            if os.fsencode(name) not in new.xattrs:
                os.removexattr(path, name)
        for key, value in new.xattrs.items():
            os.setxattr(path, key, value)
    if not stat.S_ISLNK(there.st_mode):
        os.chmod(path, new.mode & _PERMISSIONS)
    os.utime(path, ns=(new.mtime_ns, new.mtime_ns))
