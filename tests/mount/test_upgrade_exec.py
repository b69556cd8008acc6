"""`vfsd upgrade` of `exec:` workspaces: the new daemon continues with the helper at the other end."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.helper.wire import VERSION
from tests.mount.conftest import check_invariants
from tests.mount.kept_workspaces import KeptCommand
from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.mount.test_upgrade import Dying, Upgradable, broken
from tests.support.waiting import wait_until


class OverCommand(Upgradable):
    """The directory at the other end of a command."""

    def __init__(self, workdir: Path, **options: Any) -> None:
        (workdir / "kept").mkdir()
        self.command = KeptCommand(workdir / "kept")
        super().__init__(workdir, **self.command.options, **options)


@pytest.fixture
def upgradable(workdir: Path) -> Iterator[Callable[..., OverCommand]]:
    made: list[OverCommand] = []

    def start(**options: Any) -> OverCommand:
        made.append(OverCommand(workdir, **options))
        return made[-1]

    yield start
    for each in made:
        each.end()
        wait_until(lambda: not each.command.processes(), "the end of the helper")  # noqa: B023 (called at once)


@pytest.mark.parametrize("keeper", [True, False], ids=["keeper", "no keeper"])
def test_programs_and_snapshots_go_on(upgradable: Callable[..., OverCommand], keeper: bool) -> None:
    workspace = upgradable(keeper=keeper)
    root, below = workspace.path, workspace.command.below
    (below / "dir" / "below").mkdir(parents=True)
    (below / "changed").write_text("one\n")
    attached = workspace.mount()
    attached.snapshot("one")
    (root / "changed").write_text("two\n")
    attached.restore("one")
    (root / "file").write_bytes(b"a" * 300_000)
    (root / "gone").write_bytes(b"gone")
    before = (root / "file").stat().st_ino
    with (
        Program() as program,
        (root / "file").open("r+b") as file,
        (root / "gone").open("r+b", buffering=0) as gone,
    ):
        (root / "gone").unlink()
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0:1] = b"b"
            workspace.upgrade()
            gone.write(b"GO")
            workspace.upgrade()
            mapping[200_000:200_001] = b"c"
            mapping.flush()
        assert (below / "file").read_bytes()[199_999:200_002] == b"aca"
        assert program("os.getcwd()") == str(root / "dir" / "below")
        program("open('new', 'w').close()")
        assert os.pread(gone.fileno(), 9, 0) == b"GOne"
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if keeper:
            pid = workspace.record.pid
            os.kill(pid, signal.SIGKILL)
            assert os.pread(gone.fileno(), 9, 0) == b"GOne"
            wait_until(lambda: workspace.record.pid != pid, "a replacement")
        assert (root / "file").stat().st_ino == os.fstat(file.fileno()).st_ino == before
    assert (below / "dir" / "below" / "new").exists()
    succeeded(vfsd("restore", "--undo", "-w", workspace.name))
    assert (root / "changed").read_text() == "two\n"
    check_invariants(attached)


def test_a_workspace_that_nobody_uses_after_an_upgrade_keeps_its_helper(upgradable: Callable[..., OverCommand]) -> None:
    """A helper that no daemon has joined ends after five minutes, so the next daemon joins before any request comes."""
    workspace = upgradable()
    workspace.mount()
    with (workspace.path / "gone").open("w+b", buffering=0) as gone:
        (workspace.path / "gone").unlink()
        workspace.upgrade()
        helper, relay = workspace.command.processes()

        def has_joined() -> bool:
            """Whether the relay has a connection to the helper, besides its standard streams."""
            descriptors = Path(f"/proc/{relay}/fd").iterdir()
            return any(int(each.name) > 2 and os.readlink(each).startswith("socket:") for each in descriptors)

        wait_until(has_joined, "the relay to join")
        gone.write(b"written")
        assert os.pread(gone.fileno(), 9, 0) == b"written"
        assert workspace.command.processes() == [helper, relay]


@pytest.mark.extended
def test_tar_goes_on(upgradable: Callable[..., OverCommand], workdir: Path) -> None:
    workspace = upgradable()
    attached = workspace.mount()
    source = workdir / "source"
    for number in range(50):
        (source / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 10}" / f"f{number}").write_bytes(os.urandom(3000))
    subprocess.run(["tar", "cf", workdir / "a.tar", "-C", source, "."], check=True)
    turns = 0
    with workspace.being_upgraded() as is_over:
        while not is_over():
            turns += 1
            target = workspace.path / str(turns % 2)
            target.mkdir(exist_ok=True)
            subprocess.run(["tar", "xf", workdir / "a.tar", "-C", target], check=True)
            subprocess.run(["diff", "-r", source, target], check=True)
    check_invariants(attached)


@pytest.mark.extended
def test_either_daemon_is_killed_at_the_last_steps(
    upgradable: Callable[..., OverCommand], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other steps do not depend on the backend: see `tests.mount.test_upgrade`."""
    workspace = upgradable()
    (workspace.command.below / "held").write_bytes(b"held\n")
    dying = Dying(workspace, workdir, monkeypatch)
    with (workspace.path / "held").open("rb", buffering=0) as held, dying.being_written():
        (workspace.path / "held").unlink()
        for step in ("after Finish", "before Go", "after Go", "before Serving"):
            dying.upgrade_at(step)
            dying.check()
            wait_until(lambda: workspace.record.is_kept, "a keeper")
            assert os.pread(held.fileno(), 9, 0) == b"held\n"


@pytest.mark.extended
def test_while_a_file_is_open_that_ended_with_its_helper_an_upgrade_is_refused_and_the_rest_served_on(
    upgradable: Callable[..., OverCommand],
) -> None:
    workspace = upgradable()
    workspace.mount()
    (workspace.path / "file").write_bytes(b"x")
    pid = workspace.record.pid
    with (workspace.path / "gone").open("w+b", buffering=0):
        (workspace.path / "gone").unlink()
        os.kill(workspace.command.processes()[0], signal.SIGKILL)
        check_refused(workspace)
        assert workspace.record.pid == pid
    wait_until(lambda: "keeper\tpid" in succeeded(vfsd("status", "-w", workspace.name)), "the end of the file")
    workspace.upgrade()
    assert (workspace.path / "file").read_bytes() == b"x"


ANOTHER_PROTOCOL = """
import sys
from protocol.backends.container.helper import wire
wire.VERSION += 1
from vfsd.daemon.upgrading import __main__ as upgrading
sys.exit(upgrading.main(int(sys.argv[-1])))
"""


@pytest.mark.extended
def test_a_version_whose_helper_speaks_another_protocol_is_refused_and_the_old_one_serves_on(
    upgradable: Callable[..., OverCommand], workdir: Path
) -> None:
    workspace = upgradable()
    workspace.mount()
    with (workspace.path / "gone").open("w+b", buffering=0) as gone:
        (workspace.path / "gone").unlink()
        pid = workspace.record.pid
        message = (
            rf"speaks another protocol \({VERSION}\) than this version \({VERSION + 1}\): unmount the workspace and"
        )
        with pytest.raises(OSError, match=message):
            workspace.upgrade(broken(workdir, ANOTHER_PROTOCOL))
        assert workspace.record.pid == pid
        gone.write(b"x")
        workspace.upgrade()
        assert os.pread(gone.fileno(), 9, 0) == b"x"


def check_refused(workspace: OverCommand) -> None:
    """Wait for the next helper; an upgrade is refused, and the files are served."""

    def is_served() -> bool:
        try:
            return (workspace.path / "file").read_bytes() == b"x" and (workspace.path / "new").write_bytes(b"new") == 3
        except OSError:
            return False

    wait_until(is_served, "the next helper")
    assert "since the mount was made" in failed(vfsd("upgrade", workspace.name))
    assert (workspace.path / "file").read_bytes() == b"x"
