"""`exec:` workspaces whose connection is cut under a living daemon: it joins the helper at the other end again."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
from typing import Any

import pytest

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.kept_workspaces import KeptCommand, end_kept
from tests.mount.programs import Program, failed, log_of, succeeded, vfsd
from tests.support import connection
from tests.support.processes import child_running, is_running
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

SERVED = "is running again and served"


class KeptFar(KeptCommand):
    """A directory at the other end of a connection, which can be cut while the helper goes on."""

    @property
    def options(self) -> dict[str, Any]:
        command = shlex.join([sys.executable, "-ISE", connection.__file__, str(self.python)])
        return {**super().options, "backend": f"exec:{command}"}

    @property
    def connection(self) -> int:
        """The process that stands for ssh."""
        return child_running(self.record.pid, connection.__file__)

    def cut(self, helper: int | None = None) -> None:
        """Cut the connection, and kill `helper` before; return when the daemon is connected again."""
        times = log_of(self.name).count(SERVED)
        pid = self.connection
        if helper is not None:
            os.kill(pid, signal.SIGSTOP)  # the daemon does not see that the helper ends
            os.kill(helper, signal.SIGKILL)
            wait_until(lambda: not is_running(helper), "the end of the helper")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: log_of(self.name).count(SERVED) > times, "the next connection")

    @property
    def helper(self) -> int:
        """The process that has the files open."""
        return self.processes()[0]

    def upgrade(self) -> None:
        succeeded(vfsd("upgrade", self.name))

    @property
    def status(self) -> str:
        return succeeded(vfsd("status", "-w", self.name))


kept = fixture_of(KeptFar, end_kept)


@pytest.mark.extended
def test_open_files_go_on_with_the_same_helper_and_so_do_keeper_and_upgrade(kept: KeptFar) -> None:
    below, root = kept.below, kept.path
    (below / "dir" / "below").mkdir(parents=True)
    kept.mount()
    helper = kept.helper
    for name in ("file", "removed"):
        (root / name).write_bytes(name.encode())
    number = (root / "file").stat().st_ino
    with (
        Program() as program,
        (root / "nameless").open("w+b", buffering=0) as nameless,
        (root / "removed").open("rb", buffering=0) as removed,
    ):
        (root / "nameless").unlink()
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        for written, step in enumerate((kept.cut, kept.kill, kept.cut, kept.upgrade, kept.cut, kept.kill)):
            if (below / "removed").exists():
                (below / "removed").unlink()
                (below / "dir").rename(below / "moved")
            step()
            nameless.write(b"%d" % written)
            assert os.pread(nameless.fileno(), 9, 0) == b"012345"[: written + 1]
            assert os.pread(removed.fileno(), 9, 0) == b"removed"
            program(f"open('new{written}', 'w').close()")
            assert kept.helper == helper
            check_invariants(Workspace.attach(kept.name))
    assert sorted(os.listdir(below / "moved" / "below")) == [f"new{number}" for number in range(6)]
    assert (root / "file").stat().st_ino == number
    assert "restarted the daemon" in kept.status


@pytest.mark.extended
def test_a_change_that_was_answered_is_there_once_and_one_that_failed_at_most_once(kept: KeptFar) -> None:
    kept.mount()
    stop = threading.Event()
    answers: list[dict[int, str]] = [{} for _ in range(3)]  # by writer: what each line's write returned
    errors: set[int | None] = set()

    def write(writer: int, answered: dict[int, str]) -> None:
        line = 0
        while not stop.is_set():
            line += 1
            try:
                with (kept.path / f"log{writer}").open("ab", buffering=0) as log:
                    answered[line] = "unknown"
                    log.write(b"%d\n" % line)
                    answered[line] = "there"
            except OSError as error:
                errors.add(error.errno)

    threads = [threading.Thread(target=write, args=each) for each in enumerate(answers)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            counts = [len(each) for each in answers]
            wait_until(lambda: all(map(int.__lt__, counts, map(len, answers))), "more lines")  # noqa: B023
            kept.cut()
        kept.kill()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors <= {errno.EIO}
    for writer, answered in enumerate(answers):
        lines = [int(line) for line in (kept.below / f"log{writer}").read_text().split()]
        assert lines == sorted(set(lines)), "a line was written twice, or late"
        assert set(lines) >= {line for line, answer in answered.items() if answer == "there"}
        assert set(lines) <= set(answered)
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_if_the_helper_has_ended_another_one_is_started_and_keeper_and_upgrade_go_on(kept: KeptFar) -> None:
    kept.mount()
    (kept.path / "file").write_bytes(b"x")
    with (kept.path / "file").open("r+b", buffering=0) as file:
        for step in (kept.kill, kept.upgrade):
            kept.cut(helper := kept.helper)
            assert kept.helper != helper
            step()
            file.write(b"y")
        assert os.pread(file.fileno(), 9, 0) == b"yy"
    assert "keeper\tpid" in kept.status
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_while_a_file_is_open_that_the_next_helper_does_not_find_there_is_no_keeper_and_no_upgrade(
    kept: KeptFar,
) -> None:
    kept.mount()
    (kept.path / "file").write_bytes(b"x")
    with (kept.path / "file").open("rb", buffering=0) as file:
        (kept.path / "file").unlink()
        kept.cut(kept.helper)
        with pytest.raises(OSError, match="Stale file handle"):
            file.read()
        assert "keeper\tnone now: the command ended and runs again, and files that programs still use" in kept.status
        refused = failed(vfsd("upgrade", kept.name))
        assert "the helper of the command `" in refused, "there is no container to name"
        assert "was restarted since the mount was made" in refused
        assert "close the files that were removed or replaced meanwhile and try again" in refused
    wait_until(lambda: "keeper\tpid" in kept.status, "a keeper")
    kept.upgrade()
    kept.kill()
    assert os.listdir(kept.path) == []


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
def test_without_a_keeper_the_next_connection_starts_another_helper(kept: KeptFar, engine: str) -> None:
    """A helper that does not wait for another daemon ends with its connection."""
    kept.mount(keeper=False, engine=engine)
    (kept.path / "file").write_bytes(b"x")
    helper = kept.helper
    kept.cut()
    assert (kept.path / "file").read_bytes() == b"x"
    wait_until(lambda: helper not in kept.processes(), "the end of the helper")
    if engine == "native":
        kept.upgrade()
    assert (kept.path / "file").read_bytes() == b"x"


def test_an_unmount_while_the_connection_is_cut_works(kept: KeptFar) -> None:
    workspace = kept.mount()
    (kept.path / "file").write_bytes(b"x")
    helper = kept.helper
    kept.python.rename(kept.python.with_name("away"))
    os.kill(kept.connection, signal.SIGKILL)
    wait_until(lambda: not workspace.status().connected, "the cut")
    succeeded(vfsd("unmount", kept.name))
    os.kill(helper, signal.SIGKILL)  # it would wait for five minutes
