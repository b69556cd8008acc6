"""Daemons that the fork server starts are as those that are started directly, and do not depend on it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import running_fork_server
from tests.support.waiting import wait_until
from vfsd import Workspace
from vfsd.client import launch as launching
from vfsd.client.launch import ForkedProcess, launch
from vfsd.machine.mounts import clear_dead_mount
from vfsd.wire.options import MountOptions, Ready

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def server(session_dir: str) -> Iterator[int]:
    """The process id of a fork server that the tests of this module share, as its only one."""
    directory = tempfile.mkdtemp(dir=f"{session_dir}/work", prefix="r")
    umask = os.umask(0o027)
    try:
        os.environ["AWS_EXAMPLE"] = "of another mount"
        with running_fork_server(Path(directory)) as pid:
            del os.environ["AWS_EXAMPLE"]
            yield pid
    finally:
        os.umask(umask)


@contextlib.contextmanager
def mounted(mountpoint: Path, name: str = "forked") -> Iterator[Ready]:
    mountpoint.mkdir(exist_ok=True)
    ready = launch(MountOptions.of(str(mountpoint), name))
    try:
        yield ready
    finally:
        Workspace.attach(name).unmount()


def status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def test_a_forked_daemon_has_the_process_state_of_its_mount(
    server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        monkeypatch.setenv(f"EXAMPLE_{number}", "x" * 100_000)  # together longer than a packet of a Unix socket
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with mounted(workdir / "m") as ready:
        assert int(status(ready.pid)["PPid"]) == server
        assert int(status(ready.pid)["Umask"], 8) == 0o027
        assert os.getsid(ready.pid) == ready.pid
        assert os.readlink(f"/proc/{ready.pid}/cwd") == "/"
        assert os.readlink(f"/proc/{ready.pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{ready.pid}/fd/2").endswith("/forked.log")
        ours, its = (Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in ("self", ready.pid))
        assert ours == its
        assert resource.prlimit(ready.pid, resource.RLIMIT_CORE) == (soft, hard)
        for name in os.listdir(f"/proc/{ready.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # the daemon closed it meanwhile
                assert "fork-server" not in os.readlink(f"/proc/{ready.pid}/fd/{name}")
        (workdir / "m" / "file").write_text("content")
        assert (workdir / "m" / "file").read_text() == "content"
        assert Workspace.attach("forked").status().pid == ready.pid
    wait_until(lambda: not os.path.exists(f"/proc/{ready.pid}"), "the server reaped the daemon")


def test_a_forked_daemon_has_the_credentials_of_its_mount_only(
    server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server
    monkeypatch.setenv("AWS_OURS", "ours")
    with pytest.raises(OSError, match=r"\[ours, \]"):
        Workspace.mount(workdir / "m", """exec:sh -c 'echo "[$AWS_OURS, $AWS_EXAMPLE]" >&2; exit 255'""")


def test_a_failed_start_is_reported(server: int, workdir: Path) -> None:
    assert server
    with pytest.raises(FileNotFoundError):
        launch(MountOptions.of(str(workdir / "missing"), "forked"))


def test_the_exit_status_of_a_daemon_that_dies_is_known(server: int, workdir: Path) -> None:
    assert server
    reader, writer = os.pipe()
    with open(workdir / "log", "wb") as log:
        daemon = launching.start_by_server(MountOptions.of(str(workdir), "forked"), writer, log.fileno())
    os.close(writer)
    assert isinstance(daemon, ForkedProcess), daemon
    daemon.send_signal(signal.SIGKILL)
    assert daemon.wait_ended(30)
    assert daemon.status == -signal.SIGKILL
    daemon.release()
    os.close(reader)
    with contextlib.suppress(OSError):
        clear_dead_mount(str(workdir))


def test_a_process_that_differs_has_another_server(server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server
    umask = os.umask(0o022)
    try:
        assert launching.start_by_server(MountOptions.of(str(workdir), "forked"), 1, 2) == "no fork server is running"
    finally:
        os.umask(umask)
    monkeypatch.setenv("LD_BIND_NOW", "1")
    assert launching.start_by_server(MountOptions.of(str(workdir), "forked"), 1, 2) == "no fork server is running"


def test_another_environment_has_a_server_of_its_own(
    server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_BIND_NOW", "1")
    with running_fork_server(Path(os.environ["VFSD_RUNTIME_DIR"])) as other, mounted(workdir / "m") as ready:
        assert other != server
        assert int(status(ready.pid)["PPid"]) == other


def test_a_server_that_is_no_longer_as_its_mounts_ends(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_BIND_NOW", "2")
    with running_fork_server(workdir / "r") as pid:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft - 1, hard))
        reason = launching.start_by_server(MountOptions.of(str(workdir), "forked"), 1, 2)
        assert reason == "the fork server ended"
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the server has ended")
        assert not list((workdir / "r").rglob(".fork-server-*[0-9a-f]"))


def test_a_user_has_few_servers(server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server
    monkeypatch.setattr(launching, "_SERVERS_MAX", 1)
    monkeypatch.setenv("LD_BIND_NOW", "1")
    monkeypatch.setattr(launching.subprocess, "Popen", lambda *_, **__: pytest.fail("a second server is started"))
    launching.ensure_server()


def test_status_says_what_started_the_daemon(server: int, workdir: Path) -> None:
    assert server
    with mounted(workdir / "m"):
        assert Workspace.attach("forked").status().started_by == "the fork server"
    launch(MountOptions.of(str(workdir / "m"), "direct"), fork_server=False)
    with Workspace.attach("direct") as workspace:
        assert workspace.status().started_by == "a new interpreter"
        workspace.unmount()


def test_a_mount_does_not_wait_for_a_stopped_server(
    server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(server, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(launching, "_ANSWER_TIMEOUT_S", 0.01)
            with mounted(workdir / "m") as ready:
                assert int(status(ready.pid)["PPid"]) != server
    finally:
        os.kill(server, signal.SIGCONT)


def test_the_variable_turns_it_off(server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFSD_FORK_SERVER", "off")
    with mounted(workdir / "m") as ready:
        assert int(status(ready.pid)["PPid"]) != server
    monkeypatch.setenv("VFSD_FORK_SERVER", "maybe")
    with pytest.raises(OSError, match="on or off") as raised:
        launch(MountOptions.of(str(workdir / "m"), "forked"))
    assert raised.value.errno == errno.EINVAL


def test_a_workspace_does_not_notice_that_the_server_died(server: int, workdir: Path) -> None:
    with mounted(workdir / "m") as ready:
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: int(status(ready.pid)["PPid"]) != server, "the daemon has another parent")
        (workdir / "m" / "file").write_text("content")
        assert (workdir / "m" / "file").read_text() == "content"
