"""`vfsd prune` on stores without a mount.  `mount/test_prune_live.py` has running workspaces."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from vfsd.cli.main import cli

KEY = "host:/srv/x"


@pytest.fixture
def store(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The user's store, with four snapshots of one directory and one of another."""
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    kept = Store()
    for name in ("one", "two", "three", "four"):
        (root / "file").write_text(name)
        kept.take(KEY, name, DirectorySource(root), tag=f"tag {name}")
    kept.take("host:/srv/y", "other", DirectorySource(root))
    return kept


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["prune", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def names(store: Store, key: str = KEY) -> list[str]:
    return [info.name for info in store.snapshots(key)]


def test_what_no_rule_keeps_is_removed_in_each_workspace(store: Store) -> None:
    result = run("--keep-last", "1", "--keep-tag", "*two")

    assert result.exit_code == 0
    assert names(store) == ["two", "four"]
    assert names(store, "host:/srv/y") == ["other"]
    assert result.stderr == "vfsd: removed 2 snapshots, kept 3; `vfsd store gc` frees their disk space\n"
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [(row[0], row[1], row[2], row[4], row[5]) for row in rows] == [
        (KEY, "keep", "four", "tag four", "last snapshot"),
        (KEY, "keep", "two", "tag two", "has tag *two"),
        (KEY, "removed", "three", "tag three", ""),
        (KEY, "removed", "one", "tag one", ""),
        ("host:/srv/y", "keep", "other", "-", "last snapshot"),
    ]


def test_a_dry_run_gives_the_same_answer_and_removes_nothing(store: Store) -> None:
    shown = answer("--keep-last", "2", "--dry-run")
    assert len(names(store)) == 4

    done = answer("--keep-last", "2")

    assert shown["dry_run"]
    assert shown["workspaces"] == done["workspaces"]
    assert [each["name"] for each in done["workspaces"][0]["remove"]] == ["two", "one"]
    assert names(store) == ["three", "four"]


def test_named_workspaces_alone_are_pruned(store: Store, root: Path) -> None:
    store.take("host:/srv/y", "newer", DirectorySource(root))

    run("--keep-last", "1", "host:/srv/y")

    assert names(store, "host:/srv/y") == ["newer"]
    assert len(names(store)) == 4


def test_without_a_rule_nothing_is_removed(store: Store) -> None:
    result = run()

    assert result.exit_code == 2
    assert "this would remove every snapshot" in result.stderr
    assert len(names(store)) == 4


def test_a_workspace_without_snapshots_is_an_error_and_nothing_is_removed(store: Store) -> None:
    result = run("--keep-last", "1", "host:/srv/z", KEY)

    assert result.exit_code == 1
    assert "the store has no snapshots of this workspace: host:/srv/z; did you mean host:/srv/" in result.stderr
    assert len(names(store)) == 4


def test_a_mounted_snapshot_stays_and_the_answer_says_so(store: Store) -> None:
    with Store() as other:
        mounted = other.mounted(KEY, "two")
        found = answer("--keep-last", "1", KEY)
        mounted.close()

    assert names(store) == ["two", "four"]
    assert [(each["name"], each["reasons"]) for each in found["workspaces"][0]["keep"]] == [
        ("four", ["last snapshot"]),
        ("two", ["mounted"]),
    ]


def test_safety_snapshots_stay_and_do_not_count(store: Store, root: Path) -> None:
    store.restore(KEY, DirectoryTarget(root), RestoreRequest("one", safety="safety-1"))

    found = answer("--keep-last", "1", KEY)["workspaces"][0]

    assert [(each["name"], each["reasons"]) for each in found["keep"]] == [
        ("safety-1", ["safety snapshot"]),
        ("four", ["last snapshot"]),
    ]


def test_the_snapshots_of_an_interrupted_restore_stay(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "the disk fails")

    monkeypatch.setattr("protocol.store.restore.RestoreRun.run", fail)
    with pytest.raises(OSError, match="the disk fails"):
        store.restore(KEY, DirectoryTarget(root), RestoreRequest("one", safety=None))

    found = answer("--keep-last", "1", KEY)["workspaces"][0]

    assert found["keep"][1]["reasons"] == ["needed by an interrupted restore"]
    assert names(store) == ["one", "four"]


def test_content_of_an_export_that_runs_is_not_touched(store: Store, root: Path) -> None:
    store.take(KEY, "archive-1", DirectorySource(root))

    found = answer("--keep-tag", "none", KEY)["workspaces"][0]

    assert names(store) == ["archive-1"]
    assert [each["name"] for each in found["remove"]] == ["four", "three", "two", "one"]


def test_gc_frees_the_space_at_once(store: Store) -> None:
    found = answer("--keep-last", "1", "--gc")

    assert found["freed"]["freed_bytes"] > 0
    assert store.check().ok


def test_a_store_that_is_in_use_is_refused_after_the_wait(store: Store) -> None:
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with Store() as other, other.tree(KEY, "one"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    result = run("--keep-last", "1", "--wait", "0")
    leave.set()
    thread.join()

    assert result.exit_code == 1
    assert len(names(store)) == 4


def test_no_store_is_an_empty_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "none"))

    assert run("--keep-last", "1").stderr.startswith("vfsd: no snapshots in the store (-w NAME prunes")
    assert run("--keep-last", "1", "--store", str(tmp_path / "none")).exit_code == 1
