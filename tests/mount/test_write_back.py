"""`--cache writeback`: snapshots contain what was written before, and no old size, page or time survives a change."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import sqlite3
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.mount.conftest import mounted
from tests.support.rights import needs_root
from tests.support.waiting import wait_until
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.machine.mounts import is_dead
from vfsd.wire.options import CacheChoice

_PAGE = 4096
_COUNTER_AT = 64 * _PAGE


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with mounted(tmp_path_factory.mktemp("cached") / "m", cache="writeback", engine="native") as workspace:
        yield workspace


@pytest.fixture
def place(shared: Workspace, request: pytest.FixtureRequest) -> Path:
    """A directory of the mount for one test."""
    path = Path(shared.path) / request.node.name
    path.mkdir()
    return path


def _exported(workspace: Workspace, snapshot: str, to: Path) -> zipfile.ZipFile:
    workspace.export(to, snapshot=snapshot)
    return zipfile.ZipFile(to)


def test_status_shows_the_mode(shared: Workspace) -> None:
    assert shared.status().cache == "writeback"


def test_small_writes_are_collected(shared: Workspace, place: Path) -> None:
    before = shared.status().requests
    with (place / "file").open("wb", buffering=0) as file:
        for _ in range(1_000):
            file.write(b"x" * 100)
    # The other requests are those of the status, which wrote nothing.
    assert shared.status().requests - before < 500
    assert (place / "file").stat().st_size == 100_000


def test_a_snapshot_contains_what_was_written_before(shared: Workspace, place: Path, tmp_path: Path) -> None:
    """Three threads write; each write that had returned before the snapshot was requested is in it."""
    returned = [0, 0, 0]
    stop = threading.Event()

    def write(index: int) -> None:
        with (place / f"w{index}").open("w+b", buffering=0) as file:
            count = 0
            while not stop.is_set():
                count += 1
                data = count.to_bytes(8, "little")
                os.pwrite(file.fileno(), data, count % 64 * _PAGE)
                os.pwrite(file.fileno(), data, _COUNTER_AT)
                returned[index] = count

    threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            while not all(returned):
                stop.wait(0.01)
            expected = list(returned)
            shared.snapshot("now")
            with _exported(shared, "now", tmp_path / f"{number}.zip") as archive:
                for index, count in enumerate(expected):
                    content = archive.read(f"files/{place.name}/w{index}")
                    assert int.from_bytes(content[_COUNTER_AT : _COUNTER_AT + 8], "little") >= count
            shared.drop("now")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_restore_changes_size_content_and_time_of_open_files(shared: Workspace, place: Path) -> None:
    path = place / "file"
    with path.open("w+b", buffering=0) as file:
        file.write(b"short")
        short = os.fstat(file.fileno())
        shared.snapshot("short")
        file.write(b" and then longer" * 1_000)
        long = os.fstat(file.fileno())
        shared.snapshot("long")
        shared.restore("short")
        assert path.read_bytes() == b"short"
        assert os.fstat(file.fileno()).st_size == 5
        assert os.fstat(file.fileno()).st_mtime_ns == short.st_mtime_ns
        shared.restore("long")
        assert path.read_bytes() == b"short" + b" and then longer" * 1_000
        assert os.fstat(file.fileno()).st_mtime_ns == long.st_mtime_ns
    with path.open("ab") as appended:
        appended.write(b"!")
    assert path.read_bytes().endswith(b"longer!")
    shared.drop("short", "long")


def test_a_restore_changes_size_and_content_of_closed_files(shared: Workspace, place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"old")
    times = path.stat()
    shared.snapshot("old")
    path.write_bytes(b"something new")
    shared.restore("old")
    assert path.read_bytes() == b"old"
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (3, times.st_mtime_ns)
    shared.drop("old")


def test_dirty_pages_do_not_return_after_a_restore(shared: Workspace, place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"a" * 3 * _PAGE)
    shared.snapshot("clean")
    with path.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 3 * _PAGE) as mapped:
        file.write(b"b" * _PAGE)
        mapped[_PAGE] = ord("c")
        shared.restore("clean")
        os.fsync(file.fileno())
    assert path.read_bytes() == b"a" * 3 * _PAGE
    shared.drop("clean")


def test_a_snapshot_keeps_the_times_that_programs_saw(shared: Workspace, place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"1")
    seen = path.stat().st_mtime_ns
    shared.snapshot("seen")
    path.unlink()
    shared.restore("seen")
    assert path.stat().st_mtime_ns == seen
    shared.drop("seen")


def test_fs_commands_see_cached_writes_and_programs_see_theirs(shared: Workspace, place: Path) -> None:
    path = place / "file"
    with path.open("w+b", buffering=0) as file:
        file.write(b"one two three\n")
        command = ["-w", shared.name, "fs", "read", str(path)]
        assert "one two three" in CliRunner().invoke(cli, command).stdout
        command = ["-w", shared.name, "fs", "write", str(path)]
        assert CliRunner().invoke(cli, command, input="one 2 three\n").exit_code == 0
        assert path.read_bytes() == b"one 2 three\n"


def test_truncated_files_have_the_size_that_programs_gave_them(shared: Workspace, place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x" * 10_000)
    os.truncate(path, 5)
    shared.snapshot("cut")
    os.truncate(path, 20_000)
    shared.restore("cut")
    assert path.read_bytes() == b"xxxxx"
    shared.drop("cut")


def test_sqlite_in_wal_mode_survives_a_restore_between_connections(shared: Workspace, place: Path) -> None:
    database = place / "data.db"

    def rows() -> list[tuple[int]]:
        connection = sqlite3.connect(database)
        try:
            return connection.execute("SELECT n FROM t ORDER BY n").fetchall()
        finally:
            connection.close()

    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (n INTEGER)")
    connection.execute("INSERT INTO t VALUES (1)")
    connection.commit()
    connection.close()
    shared.snapshot("one")
    connection = sqlite3.connect(database)
    connection.execute("INSERT INTO t VALUES (2)")
    connection.commit()
    connection.close()
    assert rows() == [(1,), (2,)]
    shared.restore("one")
    assert rows() == [(1,)]
    shared.drop("one")


def test_the_space_of_a_file_is_known_after_fsync(place: Path) -> None:
    with (place / "file").open("wb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_blocks == 0
        file.write(bytes(3 * _PAGE))
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_blocks == 24


@needs_root
def test_capabilities_that_are_set_before_the_data_is_written_back_stay(place: Path) -> None:
    capability = bytes.fromhex("0100000200040000") + bytes(12)
    with (place / "file").open("wb", buffering=0) as file:
        file.write(b"program")
        os.setxattr(place / "file", "security.capability", capability)
        os.fsync(file.fileno())
        assert os.getxattr(place / "file", "security.capability") == capability
        file.write(b"program")
        os.fsync(file.fileno())
    assert "security.capability" not in os.listxattr(place / "file")


def test_data_that_was_not_written_back_is_no_hole(place: Path) -> None:
    with (place / "file").open("w+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"data", 5 * _PAGE)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 5 * _PAGE
        os.pwrite(file.fileno(), b"data", 0)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == _PAGE


def test_seeking_for_data_works_on_a_mount_that_is_detached(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with (
        Workspace.mount(tmp_path / "m", cache="writeback", engine="native") as workspace,
        Path(workspace.path, "file").open("w+b", buffering=0) as file,
    ):
        subprocess.run(["fusermount3", "-u", "-z", workspace.path], check=True)
        os.pwrite(file.fileno(), b"data", 5 * _PAGE)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 5 * _PAGE


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace with room for three pages, its inodes included."""
    with mounted(tmp_path / "m", cache="writeback", max_bytes=16 * _PAGE) as workspace:
        with Path(workspace.path, "filler").open("wb", buffering=0) as file:
            file.write(bytes(13 * _PAGE))
            os.fsync(file.fileno())
        yield workspace


_TOO_MUCH = b"x" * 5 * _PAGE + b"end"
_FITS = b"x" * 3 * _PAGE + bytes(2 * _PAGE + 3)


@pytest.mark.parametrize("report", [os.fsync, os.close])
def test_no_space_is_reported_and_the_file_shows_what_the_workspace_holds(
    full: Workspace, tmp_path: Path, report: Callable[[int], None]
) -> None:
    path = Path(full.path) / "file"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(file, _TOO_MUCH)
    with pytest.raises(OSError, match="No space left"):
        report(file)
    assert path.stat().st_size == len(_TOO_MUCH)
    if report is os.fsync:
        os.fsync(file)  # reported once
        os.close(file)
    full.snapshot("full")
    with _exported(full, "full", tmp_path / "full.zip") as archive:
        assert archive.read("files/file") == _FITS
    full.restore("full")


def test_no_space_is_reported_to_each_open_file(full: Workspace) -> None:
    path = Path(full.path) / "file"
    with path.open("wb", buffering=0) as one, path.open("r+b", buffering=0) as other:
        one.write(_TOO_MUCH)
        for file in (one, other):
            with pytest.raises(OSError, match="No space left"):
                os.fsync(file.fileno())


def test_data_written_again_once_there_is_space_is_kept(full: Workspace) -> None:
    path = Path(full.path) / "file"
    with path.open("w+b", buffering=0) as file:
        file.write(_TOO_MUCH)
        with pytest.raises(OSError, match="No space left"):
            os.fsync(file.fileno())
        Path(full.path, "filler").unlink()
        os.pwrite(file.fileno(), _TOO_MUCH, 0)
        os.fsync(file.fileno())
        full.snapshot("kept")
        full.restore("kept")
        assert path.read_bytes() == _TOO_MUCH


@pytest.mark.parametrize("cache", ["writethrough", "writeback"])
def test_msync_reports_that_only_a_part_of_the_pages_had_space(tmp_path: Path, cache: CacheChoice) -> None:
    with mounted(tmp_path / "m", cache=cache, max_bytes=8 * _PAGE, engine="native") as workspace:
        Path(workspace.path, "filler").write_bytes(bytes(5 * _PAGE))
        with Path(workspace.path, "file").open("w+b", buffering=0) as file:
            file.truncate(5 * _PAGE)
            with mmap.mmap(file.fileno(), 5 * _PAGE) as mapped:
                mapped[:] = b"x" * 5 * _PAGE
                with pytest.raises(OSError, match="No space left"):
                    mapped.flush()


def test_the_hidden_file_is_not_listed(shared: Workspace) -> None:
    shared.snapshot("barrier")
    shared.drop("barrier")
    assert [name for name in os.listdir(shared.path) if name.startswith(".vfsd")] == []


def test_after_the_daemon_died_writes_succeed_until_fsync_reports_the_loss(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    workspace = Workspace.mount(tmp_path / "m", cache="writeback", engine="native")
    path = Path(workspace.path) / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.write(descriptor, b"a")
        os.kill(workspace.status().pid, signal.SIGKILL)
        wait_until(lambda: is_dead(workspace.path), "the mount is dead")
        assert os.write(descriptor, b"b") == 1
        assert os.fstat(descriptor).st_size == 2
        for use in (lambda: os.fsync(descriptor), (Path(workspace.path) / "new").touch):
            with pytest.raises(OSError) as raised:  # noqa: PT011 the error number says which
                use()
            assert raised.value.errno in {errno.ENOTCONN, errno.ECONNABORTED}
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        assert CliRunner().invoke(cli, ["unmount", workspace.name]).exit_code == 0


def test_other_engines_and_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs engine native"):
        Workspace.mount(tmp_path / "m", cache="writeback", engine="pyfuse3")
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match="memory or overlay:DIR"):
        Workspace.mount(tmp_path / "m", f"host:{tmp_path / 'd'}", cache="writeback")


def test_an_overlay_follows_restores_too(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "file").write_bytes(b"below")
    with mounted(tmp_path / "m", backend=f"overlay:{below}", cache="writeback") as workspace:
        path = Path(workspace.path) / "file"
        with path.open("ab", buffering=0) as file:
            file.write(b" and above")
            workspace.snapshot("above")
            workspace.discard()
            assert path.read_bytes() == b"below"
            assert os.fstat(file.fileno()).st_size == 5
