"""`vfsd store`, on stores without a mount."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from vfsd.cli.main import cli


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The user's store, with two snapshots of one directory."""
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_bytes(b"content" * 100)
    kept = Store()
    kept.take("host:/srv/x", "first", DirectorySource(tmp_path / "root"), tag="a remark")
    (tmp_path / "root" / "file").write_bytes(b"other" * 100)
    kept.take("host:/srv/x", "second", DirectorySource(tmp_path / "root"))
    return kept


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["store", *arguments])


def answer(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    found: dict[str, object] = json.loads(result.stdout)
    return found


def damage(store: Store) -> None:
    pack = min(Path(store.directory, "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[10] ^= 1
    pack.write_bytes(data)


def test_list_names_each_snapshot_with_its_workspace(store: Store) -> None:
    rows = [line.split("\t") for line in run("list").stdout.splitlines()]

    assert [(row[0], row[1], row[3], row[4], row[6]) for row in rows] == [
        ("host:/srv/x", "first", "1", "700", "a remark"),
        ("host:/srv/x", "second", "1", "500", "-"),
    ]
    assert answer("list")["store"] == store.directory


def test_check_of_a_whole_store_ends_with_0(store: Store) -> None:
    result = run("check")

    assert result.exit_code == 0
    assert "2 snapshots" in result.stdout
    assert "all whole" in result.stdout


def test_check_names_what_is_damaged_and_ends_with_1(store: Store) -> None:
    damage(store)

    result = run("check")

    assert result.exit_code == 1
    assert "not what was stored" in result.stderr
    assert "snapshot first of host:/srv/x" in result.stderr
    assert "lost: file" in result.stderr
    assert "`vfsd store gc --repair` removes what is damaged" in result.stderr
    assert "`vfsd store drop WORKSPACE NAME` drops a snapshot that cannot be whole again" in result.stderr
    assert answer("check")["damages"] == [
        {
            "what": f"a content in {min(os.listdir(Path(store.directory, 'packs')))} is not what was stored",
            "snapshots": [{"workspace": "host:/srv/x", "name": "first"}],
            "paths": ["file"],
            "without_inodes": [],
        }
    ]


def test_gc_frees_what_was_dropped_and_repairs_when_told_to(store: Store) -> None:
    assert answer("drop", "host:/srv/x", "first") == {"dropped": ["first"]}
    found = answer("gc")
    assert found["freed_contents"] == 3  # the file, the listing, and the inode numbers
    damage(store)
    repaired = run("gc", "--repair")
    assert repaired.exit_code == 0
    assert repaired.stdout.startswith("removed 1 damaged content (")
    assert "damaged content" not in run("gc", "--repair").stdout
    checked = run("check")
    assert checked.exit_code == 1
    assert "--repair" not in checked.stderr
    assert "`vfsd store drop WORKSPACE NAME` drops a snapshot that cannot be whole again" in checked.stderr
    assert run("drop", "host:/srv/x", "--all").exit_code == 0
    assert run("check").exit_code == 0


def test_a_workspace_to_drop_from_is_written_as_for_backend(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        store.take(f"host:{tmp_path}/root", name, DirectorySource(tmp_path / "root"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert answer("drop", "host:~/root", "one") == {"dropped": ["one"]}
    assert "WORKSPACE is host:DIR" in run("drop", "root", "two").stderr
    assert answer("drop", "host:root", "two") == {"dropped": ["two"]}


def test_dropping_what_is_not_there_says_so(store: Store) -> None:
    result = run("drop", "host:/elsewhere")

    assert result.exit_code == 1
    assert "no snapshots of this workspace: host:/elsewhere" in result.stderr


def test_a_store_that_is_in_use_is_not_collected(store: Store) -> None:
    with store.tree("host:/srv/x", "first"):
        result = run("gc", "--wait", "0")

    assert result.exit_code == 1
    assert "the store is in use" in result.stderr


def test_dropping_all_snapshots_needs_to_be_asked_for(store: Store) -> None:
    result = run("drop", "host:/srv/x")

    assert result.exit_code == 2
    assert "all 2 snapshots of host:/srv/x (first, second)" in result.stderr
    assert "--all" in result.stderr
    assert len(store.snapshots("host:/srv/x")) == 2
    assert run("drop", "host:/srv/x", "first", "--all").exit_code == 2
    assert answer("drop", "host:/srv/x", "--all") == {"dropped": ["first", "second"]}
    assert run("drop", "host:/srv/x", "--all").exit_code == 1


def test_a_terminal_is_asked_before_all_snapshots_are_dropped(store: Store) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", "store", "drop", "host:/srv/x"]
    for reply, status, kept in ((b"n\n", 1, 2), (b"", 130, 2), (b"y\n", 0, 0)):
        ours, theirs = os.openpty()
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        while b"?" not in shown:
            shown += os.read(ours, 1000)
        if reply:
            os.write(ours, reply)
        else:
            process.send_signal(signal.SIGINT)
            # A signal between the question and the read is pending until the read ends: users press Ctrl-C again.
            while not select.select([ours], [], [], 1)[0]:
                process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: the terminal has no user any more
            while data := os.read(ours, 1000):
                shown += data
        os.close(ours)
        assert process.wait() == status
        assert b"Drop all 2 snapshots of host:/srv/x (first, second)?" in shown
        assert (b"nothing was dropped" if kept else b"dropped 2 snapshots of host:/srv/x: first, second") in shown
        assert len(store.snapshots("host:/srv/x")) == kept


def test_an_unknown_name_drops_nothing_and_names_what_is_like_it(store: Store) -> None:
    result = run("drop", "host:/srv/x", "first", "secnd")

    assert result.exit_code == 1
    assert "no snapshot secnd; did you mean second?" in result.stderr
    assert len(store.snapshots("host:/srv/x")) == 2
    assert "did you mean host:/srv/x?" in run("drop", "host:/srv/y", "first").stderr


def test_dropping_twice_drops_once(store: Store) -> None:
    assert answer("drop", "host:/srv/x", "first", "first") == {"dropped": ["first"]}
    assert run("drop", "host:/srv/x", "first").exit_code == 1


def test_a_snapshot_that_an_interrupted_restore_needs_is_not_dropped(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(_: DirectoryTarget) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryTarget, "sync", sync)
        with pytest.raises(OSError, match="the disk failed"):
            store.restore("host:/srv/x", DirectoryTarget(tmp_path / "root"), RestoreRequest("first", safety="safe"))

    for name in ("first", "safe"):
        result = run("drop", "host:/srv/x", name)
        assert result.exit_code == 1
        assert f"{name} is needed" in result.stderr
    assert run("drop", "host:/srv/x", "second").exit_code == 0


def test_a_snapshot_may_be_dropped_while_it_is_read(store: Store) -> None:
    with store.tree("host:/srv/x", "first") as tree:
        assert run("drop", "host:/srv/x", "first").exit_code == 0
        assert tree.read(b"file", 0, 1000) == b"content" * 100


def test_list_says_that_snapshots_are_damaged(store: Store) -> None:
    pack = min(Path(store.directory, "packs").iterdir())
    os.truncate(pack, pack.stat().st_size - 1)

    result = run("list")

    assert result.exit_code == 0
    assert "not in this list: 1 damaged" in result.stderr
    assert answer("list")["damaged"] == [str(pack)]


@pytest.mark.parametrize("command", ["check", "gc", "drop"])
def test_ctrl_c_says_what_became_of_the_work(store: Store, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, {"check": "check", "gc": "collect_garbage", "drop": "drop"}[command], interrupt)
    words = ["drop", "host:/srv/x", "first"] if command == "drop" else [command]

    result = run(*words)

    assert result.exit_code == 130
    assert "interrupted: " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    error = answer(*words)["error"]
    assert isinstance(error, dict)
    assert error["message"].startswith("interrupted: ")


@pytest.mark.parametrize("command", [("list",), ("check",), ("gc",), ("drop", "host:/srv/x", "first")], ids=" ".join)
def test_a_directory_that_is_no_store_is_an_error_and_none_is_made(
    store: Store, tmp_path: Path, command: tuple[str, ...]
) -> None:
    place = tmp_path / "typo"

    result = run(*command, "--store", str(place))

    assert result.exit_code == 1
    assert f"no snapshot store at {place}" in result.stderr
    assert not place.exists()
    assert len(store.snapshots("host:/srv/x")) == 2


def test_without_the_default_store_there_is_nothing_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "nothing"
    monkeypatch.setenv("VFSD_STORE_DIR", str(place))

    assert run("list").stdout == ""
    assert run("check").exit_code == 0
    assert run("gc").exit_code == 0
    assert not place.exists()
