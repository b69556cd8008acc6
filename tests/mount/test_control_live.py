"""The control socket of a daemon that serves a busy mount: bad clients, many clients, long work."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.support.waiting import readable
from vfsd.cli import fast_path
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import socket_path
from vfsd.operations.snapshots import DiffParams, FromArchive, ImportParams, RestoreParams
from vfsd.wire.messages import ProgressReport

MountIt = Callable[..., Workspace]

# Asks and answers on the mount, one thing after the other, and counts; "count" says how far it is.
_VISITOR = """
stopping = threading.Event(); counted = [0]; errors = []
def visit():
    number = 0
    while not stopping.is_set():
        number += 1
        try:
            path = f"{root}/visited-{number % 50}"
            with open(path, "wb") as file: file.write(b"%d" % number)
            os.stat(path)
            with open(path, "rb") as file: assert file.read() == b"%d" % number
            os.rename(path, path + "-moved"); os.unlink(path + "-moved")
            counted[0] = number
        except Exception as error:
            errors.append(repr(error)); break
thread = threading.Thread(target=visit, daemon=True); thread.start()
"""


@contextmanager
def visited(root: Path) -> Iterator[Callable[[], None]]:
    """A program works on the mount meanwhile; yields a call that returns once it got further."""
    with Program() as program:
        program("pass", root=str(root))
        program(_VISITOR)

        def goes_on() -> None:
            before = program("counted[0]")
            while program("counted[0]") < before + 2:
                assert program("errors") == []

        goes_on()
        yield goes_on
        goes_on()
        program("stopping.set(); thread.join()")
        assert program("errors") == []


def connected(workspace: Workspace) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(socket_path(workspace.name))
    return client


# -- bad clients --------------------------------------------------------------------------------------
def test_clients_that_never_read_their_diffs_delay_no_snapshot(workspace: Workspace, root: Path) -> None:
    workspace.snapshot("one")
    for number in range(30):
        (root / f"big{number}").write_text("a line of some length\n" * 10_000)
    with ExitStack() as stack:
        deaf = [stack.enter_context(connected(workspace)) for _ in range(45)]  # trio's default limiter has 40 threads
        for client in deaf:
            client.sendall(b'{"jsonrpc":"2.0","method":"diff","params":{"a":"one","mode":"patch"},"id":1}\n')
        until = time.monotonic() + 25
        while sum(readable(client, 0.01) for client in deaf) < 40:  # so many diffs have begun, and cannot end
            assert time.monotonic() < until
        before = time.monotonic()
        workspace.snapshot("two")
        assert time.monotonic() - before < 10  # a client that reads nothing is dropped after 30 s


def test_a_diff_in_a_pipe_needs_no_full_command_also_if_its_progress_is_reported(
    workspace: Workspace, root: Path
) -> None:
    workspace.snapshot("before")
    (root / "new").touch()
    words = ["diff", "-w", workspace.name, "before"]
    call = fast_path.begin_command(words)
    assert call is not None
    call.sock.settimeout(60)
    assert fast_path.answer(call, words) == "A new\n"
    call.close()


def test_a_request_that_comes_byte_by_byte_is_answered_and_holds_up_nobody(workspace: Workspace, root: Path) -> None:
    request = b'{"jsonrpc":"2.0","method":"snapshot","params":{"name":"slow"},"id":7}\n'
    with visited(root) as goes_on, connected(workspace) as slow:
        for at in range(len(request)):
            slow.sendall(request[at : at + 1])
            if at % 20 == 0:
                goes_on()
                assert [info.name for info in workspace.snapshots()] == []
        assert b'"slow"' in slow.recv(4096)
    assert [info.name for info in workspace.snapshots()] == ["slow"]


@pytest.mark.both_engines
def test_a_hundred_clients_at_once_are_all_served_while_a_program_works(workspace: Workspace, root: Path) -> None:
    # All are connected before the first asks.
    barrier = threading.Barrier(100, timeout=60)

    def client(number: int) -> str:
        with connected(workspace) as sock:
            barrier.wait()
            for request in ("status", "snapshot", "snapshots"):
                sock.sendall(b'{"jsonrpc":"2.0","method":"%s","id":%d}\n' % (request.encode(), number))
                answer = b""
                while not answer.endswith(b"\n"):
                    piece = sock.recv(1 << 16)
                    assert piece, answer
                    answer += piece
                assert b'"result"' in answer, answer
                if request == "snapshot":
                    name = answer.split(b'"name":"')[1].split(b'"')[0].decode()
        return name

    with visited(root), ThreadPoolExecutor(100) as pool:
        names = list(pool.map(client, range(100)))
    assert len(set(names)) == 100
    assert sorted(info.name for info in workspace.snapshots()) == sorted(names)


# -- long work ----------------------------------------------------------------------------------------
@pytest.fixture
def big(root: Path) -> Path:
    """A workspace that takes a moment to export."""
    for number in range(40):
        (root / f"data{number}").write_bytes(os.urandom(1 << 20))
    return root


@pytest.mark.extended
@pytest.mark.both_engines
def test_an_export_is_the_state_at_the_call_whatever_is_written_meanwhile(
    workspace: Workspace, big: Path, workdir: Path
) -> None:
    taken = threading.Event()

    def on_progress(_: object) -> None:
        taken.set()

    workspace.snapshot("before")
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(workspace.export, workdir / "live.zip", on_progress=on_progress)
        assert taken.wait(60)
        for number in range(40):
            path = big / f"data{number}"
            if number % 3 == 0:
                path.unlink()
            elif number % 3 == 1:
                path.write_bytes(b"changed" * 100_000)
            else:
                os.truncate(path, 17)
            (big / f"new{number}").touch()
        exporting.result(60)
    workspace.export(workdir / "snapshot.zip", snapshot="before")
    assert contents(workdir / "live.zip") == contents(workdir / "snapshot.zip")


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if name != "manifest.json"
        }


@pytest.mark.extended
def test_a_snapshot_that_is_read_may_be_dropped_or_is_busy_but_the_export_is_whole(
    workspace: Workspace, big: Path, workdir: Path
) -> None:
    expected = {f"files/data{n}": hashlib.sha256((big / f"data{n}").read_bytes()).hexdigest() for n in range(40)}
    workspace.snapshot("one")
    dropped = []

    def drop(_: object) -> None:
        if not dropped:
            try:
                workspace.drop("one")
            except OSError as error:
                dropped.append(str(error))
            else:
                dropped.append("")

    workspace.export(workdir / "a.zip", snapshot="one", on_progress=drop)
    assert dropped
    found = contents(workdir / "a.zip")
    assert {name: found[name] for name in expected} == expected


def test_a_daemon_that_is_told_to_end_during_an_export_ends_and_leaves_no_file(workdir: Path, engine: str) -> None:
    out = workdir / "out"
    out.mkdir()
    with Workspace.mount(workdir / "m", engine=engine) as workspace:
        for number in range(40):
            (Path(workspace.path) / f"data{number}").write_bytes(os.urandom(1 << 20))
        asked = []

        def unmount(_: object) -> None:
            if not asked:
                asked.append(vfsd("unmount", workspace.name, "--lazy", "--discard"))

        with pytest.raises(ConnectionError):
            workspace.export(out / "a.zip", on_progress=unmount)
    assert os.listdir(out) == []


def test_a_patch_of_many_files_does_not_wait_for_the_loop_at_each(workspace: Workspace, root: Path) -> None:
    workspace.snapshot("one")
    for number in range(500):
        (root / f"small{number}").write_text("x\n")
    pieces: list[bytes] = []
    with ControlClient(socket_path(workspace.name)) as client:
        client.call("diff", DiffParams(a="one", mode="patch"), on_output=pieces.append)
    assert b"".join(pieces).count(b"\n+x\n") == 500
    assert len(pieces) < 50


@pytest.mark.extended
def test_reading_an_archive_tells_how_far_it_is(workspace: Workspace, big: Path, workdir: Path) -> None:
    workspace.export(workdir / "a.zip")
    for path in big.iterdir():
        path.unlink()
    archive = str(workdir / "a.zip")
    for method, params in (("import", ImportParams(archive)), ("restore", RestoreParams(FromArchive(archive)))):
        told: list[ProgressReport] = []
        with ControlClient(socket_path(workspace.name)) as client:
            client.call(method, params, on_progress=told.append)
        read = [step.done for step in told if step.unit == "bytes"]
        assert read == sorted(read)
        # The figures between are sampled; of 80 MiB to go through some are caught.
        assert any(done > 0 for done in read)
        # One figure from start to end: the content, and a little for each entry, so that empty files show too.
        (total,) = {step.total for step in told if step.unit == "bytes"}
        assert 40 << 20 <= total < 41 << 20


# -- names --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", " x", "-x", "a/b", "a\nb", "safety-1", "x" * 129, "\x7f"])
def test_what_is_no_name_for_a_snapshot_is_refused(workspace: Workspace, name: str) -> None:
    with pytest.raises((ValueError, OSError), match="is not a snapshot name"):
        workspace.snapshot(name)
    assert workspace.snapshots() == []


def test_names_of_snapshots_may_be_in_any_language(workspace: Workspace, root: Path) -> None:
    for name in ("x" * 128, "vor dem Umbau", "\u524d", "a.b", "1", "_"):
        (root / "file").write_text(name)
        workspace.snapshot(name, tag=f"tag of {name}")
    for name in ("vor dem Umbau", "\u524d", "x" * 128):
        workspace.restore(name)
        assert (root / "file").read_text() == name
    assert [info.tag for info in workspace.snapshots() if info.kind == "user"][2] == "tag of \u524d"


@pytest.mark.workspaces(backends=["memory", "host"])  # names in memory, and in a store
def test_a_name_in_use_is_refused_and_the_snapshot_stays_as_it_was(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("first")
    workspace.snapshot("one")
    (root / "file").write_text("second")
    with pytest.raises(FileExistsError):
        workspace.snapshot("one")
    assert "exists: one" in failed(vfsd("-w", workspace.name, "snapshot", "one"))
    assert len(workspace.snapshots()) == 1
    workspace.restore("one")
    assert (root / "file").read_text() == "first"


@pytest.mark.workspaces(backends=["memory", "host"])  # names in memory, and in a store
def test_made_up_names_are_never_given_twice_while_they_are_in_use(workspace: Workspace) -> None:
    assert [workspace.snapshot().name for _ in range(3)] == ["snap-1", "snap-2", "snap-3"]
    workspace.drop("snap-2")
    workspace.snapshot("snap-10")
    assert workspace.snapshot().name == "snap-11"
    assert succeeded(vfsd("-w", workspace.name, "snapshot")) == "snap-12\n"
