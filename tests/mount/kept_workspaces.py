"""Workspaces with a keeper: they are killed again and again, and compared with a twin that is a plain directory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import check_invariants
from tests.mount.dying_daemon import STEPS
from tests.mount.programs import vfsd, wait_ended
from tests.support.processes import children, running
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace
from vfsd.kernel.engines.native.wire import Opcode
from vfsd.machine.runtime import WorkspaceRecord, process_start_ticks, read_record


class Kept:
    """A workspace in memory with a journal and a keeper."""

    below: Path | None = None  # the directory that a workspace of a subclass shows

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / "mount"
        self.path.mkdir()
        self.name = f"{workdir.name}-kept"
        self.journal = workdir / "journal"
        self.flag = workdir / "flag"
        self.kills = 0
        self._mounted: list[Workspace] = []  # one that is collected while it is mounted warns

    @property
    def options(self) -> dict[str, Any]:
        return {"persist": True, "journal_dir": self.journal}

    def mount(self, **options: Any) -> Workspace:
        self._mounted.append(Workspace.mount(self.path, name=self.name, **{**self.options, **options}))
        return self._mounted[-1]

    def mount_dying(self) -> None:
        """Mount with a daemon that `dying_at` kills."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VFSD_TEST_FLAG", str(self.flag))
            patch.setenv("VFSD_COMPILED", "0")  # that daemon replaces functions, which compiled code does not look up
            launch(mount_options(self.path, name=self.name, **self.options), daemon_module="tests.mount.dying_daemon")

    @contextlib.contextmanager
    def dying_at(self, opcode: Opcode, step: str) -> Iterator[None]:
        """Inside the block, have the daemon die at `step` of the first request with `opcode`; return after that."""
        pid = self.record.pid
        new = self.flag.with_suffix(".new")
        new.write_text(f"{opcode.name} {step}")
        new.rename(self.flag)
        yield
        wait_until(lambda: not self.flag.exists(), "the death")
        wait_until(lambda: self.record.pid != pid, "a replacement")

    @property
    def record(self) -> WorkspaceRecord:
        record = read_record(self.name)
        assert record is not None
        return record

    def kill(self) -> None:
        """Kill the daemon that has written its record; return when its replacement has written its own."""
        record = self.record
        os.kill(record.pid, signal.SIGKILL)
        self.kills += 1
        wait_until(lambda: self.record.pid != record.pid, "a replacement")

    def wait_answered(self) -> None:
        """Wait until the daemon has answered a request, if that may take longer than the pauses between its deaths."""

    @contextlib.contextmanager
    def being_killed(self, seed: int, times: int | None = None) -> Iterator[None]:
        """Kill the daemon again and again at random moments, inside the block, or `times` times."""
        choice, stop = random.Random(seed), threading.Event()

        def run() -> None:
            while not stop.wait(choice.random() * 0.15) and (times is None or self.kills < times):
                self.wait_answered()
                self.kill()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            if times is None:
                stop.set()
            thread.join()

    def processes(self) -> list[int]:
        """The processes of the command at whose other end the directory is."""
        return []

    def end(self) -> None:
        vfsd("unmount", self.name, "--discard")


class KeptOver(Kept):
    """A workspace with a keeper that shows the directory `below`."""

    below: Path

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.below = workdir / "below"
        self.below.mkdir()


class KeptHost(KeptOver):
    """A host workspace with a keeper."""

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": f"host:{self.below}"}


class KeptCommand(KeptOver):
    """The directory at the other end of a command, with a keeper."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.python = workdir / "python"
        self.python.symlink_to(os.path.realpath(sys.executable))

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": f"exec:{self.python}", "workdir": str(self.below)}

    def wait_answered(self) -> None:
        (self.path / f"missing{self.kills}").exists()

    def processes(self) -> list[int]:
        """The processes of the command, the oldest first: that of the helper, and relays to it."""
        return sorted(running(self.python), key=lambda pid: process_start_ticks(pid) or 0)


class KeptOverlay(KeptOver):
    """An overlay with a journal and a keeper."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.backend = f"overlay:{self.below}"

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "backend": self.backend}


def end_kept(workspace: Kept) -> None:
    """Unmount, and wait until the keeper and the helper have ended."""
    keeper = read_record(workspace.name)
    workspace.end()
    if keeper is not None and keeper.keeper is not None and keeper.is_kept:
        wait_ended(keeper.keeper)
    wait_until(lambda: not workspace.processes(), "the end of the helper")


def facts(root: Path) -> dict[str, Any]:
    """What the twins have in common: names, modes, link counts, targets, content, and attributes of the user."""
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            content: Any = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            links = 0 if path.is_dir() and not path.is_symlink() else status.st_nlink
            found[str(path.relative_to(root))] = (status.st_mode, links, content)
    return found


def insert_rows(directory: Path, mode: str, is_over: Callable[[int], bool]) -> None:
    """Insert rows in a database in `directory`, each in a transaction, until `is_over` of their number; check them."""
    with contextlib.closing(sqlite3.connect(directory / "base.db")) as base:
        assert base.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
        base.execute("create table t (n integer, data text)")
        written = 0
        while not is_over(written):
            base.execute("insert into t values (?, ?)", (written, "x" * 500))
            base.commit()
            written += 1
        assert base.execute("pragma integrity_check").fetchone() == ("ok",)
        assert base.execute("select count(*), sum(n) from t").fetchone() == (written, written * (written - 1) // 2)


def check_dead_without_keeper(kept: Kept) -> None:
    kept.mount(keeper=False)
    record = kept.record
    assert record.keeper is None
    os.kill(record.pid, signal.SIGKILL)
    wait_ended(record.pid)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(kept.path)


# -- random changes -----------------------------------------------------------------------------------
def change_at_random(roots: list[Path], seed: int, is_over: Callable[[], bool]) -> int:
    """Make the same random changes below each of `roots` until `is_over`; the answers must agree.  Return how many."""
    choice = random.Random(seed)
    count = 0
    while not is_over():
        count += 1
        call = random_call(choice)
        answers = []
        for root in roots:
            try:
                answers.append(call(root))
            except OSError as error:
                answers.append(error.errno)
        assert answers[0] == answers[1], (count, answers)
    return count


def random_call(choice: random.Random) -> Callable[[Path], Any]:
    def name() -> str:
        return f"d{choice.randrange(3)}/n{choice.randrange(12)}" if choice.randrange(3) else f"n{choice.randrange(12)}"

    one, other, what = name(), name(), choice.randrange(14)
    data, offset = bytes([choice.randrange(256)]) * choice.choice((1, 700, 9000, 70_000)), choice.randrange(60_000)

    def change(path: Path, flags: int, call: Callable[[int], Any]) -> Any:
        descriptor = os.open(path, flags, 0o644)
        try:
            return call(descriptor)
        finally:
            os.close(descriptor)

    return [
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY, lambda f: os.pwrite(f, data, offset)),
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY | os.O_APPEND, lambda f: os.write(f, data)),
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY | os.O_EXCL, lambda f: os.write(f, data)),
        lambda root: change(root / one, os.O_WRONLY | os.O_TRUNC, lambda f: os.write(f, data[:5])),
        lambda root: os.mkdir(root / f"d{offset % 3}"),
        lambda root: os.rmdir(root / f"d{offset % 3}"),
        lambda root: os.unlink(root / one),
        lambda root: os.rename(root / one, root / other),
        lambda root: os.link(root / one, root / other),
        lambda root: os.symlink(other, root / one),
        lambda root: os.chmod(root / one, 0o600 + offset % 8, follow_symlinks=True),
        lambda root: os.truncate(root / one, offset),
        lambda root: sorted(os.listdir(root)),
        lambda root: (root / one).read_bytes(),
    ][what]


def kill_replacements(kept: Kept, count: int) -> None:
    keeper = kept.record.keeper
    assert keeper is not None
    killed = {0}
    for _ in range(count):
        wait_until(lambda: not killed.issuperset(children(keeper)), "the next daemon")
        (daemon,) = children(keeper)
        os.kill(daemon, signal.SIGKILL)
        killed.add(daemon)


# -- one request, at each step ---------------------------------------------------------------------
def fill(root: Path) -> None:
    (root / "dir").mkdir(parents=True)
    (root / "file").write_bytes(b"content")
    (root / "victim").write_bytes(b"victim")
    os.setxattr(root / "file", "user.old", b"old")


def _with(path: Path, flags: int, call: Callable[[int], Any]) -> None:
    descriptor = os.open(path, flags, 0o644)
    try:
        call(descriptor)
    finally:
        os.close(descriptor)


def _copied(root: Path) -> None:
    with (root / "file").open("rb") as source, (root / "victim").open("r+b") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 7, 0, 2)


CHANGES: dict[str, tuple[Opcode, Callable[[Path], Any]]] = {
    "mkdir": (Opcode.MKDIR, lambda root: (root / "new").mkdir()),
    "exclusive create": (Opcode.MKNOD, lambda root: _with(root / "new", os.O_CREAT | os.O_EXCL, lambda _: None)),
    "symlink": (Opcode.SYMLINK, lambda root: (root / "new").symlink_to("target")),
    "link": (Opcode.LINK, lambda root: (root / "new").hardlink_to(root / "file")),
    "unlink": (Opcode.UNLINK, lambda root: (root / "file").unlink()),
    "rmdir": (Opcode.RMDIR, lambda root: (root / "dir").rmdir()),
    "rename": (Opcode.RENAME, lambda root: (root / "file").rename(root / "victim")),
    "append": (Opcode.WRITE, lambda root: _with(root / "file", os.O_WRONLY | os.O_APPEND, lambda f: os.write(f, b"!"))),
    "truncate": (Opcode.SETATTR, lambda root: os.truncate(root / "file", 3)),
    "fallocate": (
        Opcode.FALLOCATE, lambda root: _with(root / "file", os.O_WRONLY, lambda f: os.posix_fallocate(f, 0, 100))
    ),
    "exclusive setxattr": (
        Opcode.SETXATTR, lambda root: os.setxattr(root / "file", "user.new", b"new", os.XATTR_CREATE)
    ),
    "removexattr": (Opcode.REMOVEXATTR, lambda root: os.removexattr(root / "file", "user.old")),
    "copy": (Opcode.COPY_FILE_RANGE, _copied),
    "temporary file": (
        Opcode.TMPFILE, lambda root: _with(root, os.O_TMPFILE | os.O_WRONLY, lambda f: os.write(f, b"x"))
    ),
}  # fmt: skip


def check_executed_once(kept: Kept, change: str) -> None:
    """Make a change of CHANGES while its daemon dies, at each of STEPS; the tree is always that of a twin directory."""
    twin = kept.path.with_name("twin")
    opcode, call = CHANGES[change]
    if kept.below is None:
        kept.mount_dying()
    for step in STEPS:
        for root in (kept.below or kept.path, twin):
            fill(root / step)
    if kept.below is not None:
        kept.mount_dying()
    for step in STEPS:
        with kept.dying_at(opcode, step):
            for root in (kept.path, twin):
                call(root / step)
        assert facts(kept.path) == facts(twin), step
        files = [root / step / "file" for root in (kept.path, twin)]
        assert len({tuple(os.listxattr(file)) for file in files if file.exists()}) <= 1, step
        check_invariants(Workspace.attach(kept.name))
