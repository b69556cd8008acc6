"""`vfsd store`, on stores without a mount."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.store import DirectorySource, Store
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
    assert answer("check")["damages"] == [
        {
            "what": f"a content in {min(os.listdir(Path(store.directory, 'packs')))} is not what was stored",
            "snapshots": [{"workspace": "host:/srv/x", "name": "first"}],
            "paths": ["file"],
        }
    ]


def test_gc_frees_what_was_dropped_and_repairs_when_told_to(store: Store) -> None:
    assert answer("drop", "host:/srv/x", "first") == {"dropped": ["first"]}
    found = answer("gc")
    assert found["freed_contents"] == 2  # the file, and the listing
    damage(store)
    assert run("gc", "--repair").exit_code == 0
    assert run("check").exit_code == 1
    assert run("drop", "host:/srv/x").exit_code == 0
    assert run("check").exit_code == 0


def test_dropping_what_is_not_there_says_so(store: Store) -> None:
    result = run("drop", "host:/elsewhere")

    assert result.exit_code == 1
    assert "no snapshots of this workspace: host:/elsewhere" in result.stderr


def test_a_store_that_is_in_use_is_not_collected(store: Store) -> None:
    with store.tree("host:/srv/x", "first"):
        result = run("gc", "--wait", "0")

    assert result.exit_code == 1
    assert "the store is in use" in result.stderr


def test_without_a_store_there_is_nothing_and_none_is_made(tmp_path: Path) -> None:
    place = tmp_path / "nothing"

    assert run("list", "--store", str(place)).stdout == ""
    assert run("check", "--store", str(place)).exit_code == 0
    assert run("gc", "--store", str(place)).exit_code == 0
    assert not place.exists()
