"""`vfsd prune --store URL`: the rules on an object store, while other machines push to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage
from protocol.volume_extensions import SnapshotInfo
from vfsd.cli.main import cli

KEY = "host:/srv/x"
NAMES = ("one", "two", "three", "four")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Store() as store:
        yield store


@pytest.fixture
def remote(url: str, local: Store, tmp_path: Path) -> Iterator[RemoteStore]:
    """A store with the same snapshots as `local`: four of one directory, and one of another."""
    root = tmp_path / "root"
    root.mkdir()
    with RemoteStore(open_storage(url), grace_s=0.0) as store:
        for name in (*NAMES, "other"):
            (root / "file").write_text(name)
            key = "host:/srv/y" if name == "other" else KEY
            local.take(key, name, DirectorySource(root), tag=f"tag {name}")
            store.push(local, key, name)
        yield store


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["prune", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def names(store: RemoteStore) -> list[str]:
    return [one.name for one in store.all()]


@pytest.mark.parametrize(
    "rules", [("--keep-last", "1", "--keep-tag", "*two"), ("--keep-daily", "3"), ("--keep-within", "1h")], ids=" ".join
)
def test_the_same_snapshots_are_kept_as_in_a_store_on_disk(remote: RemoteStore, url: str, rules: Sequence[str]) -> None:
    shown = answer(*rules, "--dry-run", "--store", url)
    assert len(names(remote)) == 5

    done = answer(*rules, "--store", url)

    assert done["workspaces"] == shown["workspaces"] == answer(*rules)["workspaces"]
    assert names(remote) == [each["name"] for group in done["workspaces"] for each in reversed(group["keep"])]
    assert done["store"] == url
    assert remote.check().ok


def test_named_workspaces_alone_are_pruned(remote: RemoteStore, url: str) -> None:
    assert run("--keep-tag", "none", "host:/srv/y", "--store", url).exit_code == 0

    assert names(remote) == [*NAMES]
    assert "did you mean host:/srv/x?" in run("--keep-last", "1", "host:/srv/z", "--store", url).stderr


def test_the_answer_gives_the_command_that_frees_the_space(remote: RemoteStore, url: str) -> None:
    assert (
        f"kept 2; `vfsd store gc --store {url}` frees their disk space"
        in run("--keep-last", "1", "--store", url).stderr
    )
    found = answer("--keep-last", "1", "--gc", "--store", url)
    assert found["freed"].keys() > {"freed_bytes", "condemned_packs"}
    assert remote.check().ok


def test_a_snapshot_that_was_replaced_or_pushed_meanwhile_stays(remote: RemoteStore, local: Store) -> None:
    seen = []

    def choose(key: str, infos: Sequence[SnapshotInfo], needed: Mapping[str, str]) -> Sequence[str]:
        assert not needed
        if key == KEY:
            seen.extend(info.name for info in infos)
            remote.push(local, KEY, "four", name="one", replace=True)
            remote.push(local, KEY, "one", name="new")
            return ["one", "two"]
        return []

    assert remote.prune(choose) == ["one"]
    assert seen == [*NAMES]
    assert set(names(remote)) == {"one", "three", "four", "other", "new"}
    assert remote.get("one").record.root == remote.get("four").record.root


def test_the_answer_says_what_was_replaced_meanwhile(
    remote: RemoteStore, local: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune = RemoteStore.prune

    def slowly(store: RemoteStore, choose: Any) -> list[str]:
        def pushing(*words: Any) -> Any:
            found = choose(*words)
            if "two" in found:
                remote.push(local, KEY, "four", name="two", replace=True)
            return found

        return prune(store, pushing)

    monkeypatch.setattr(RemoteStore, "prune", slowly)
    found = answer("--keep-last", "1", "--store", url)["workspaces"][0]

    assert [(each["name"], each["reasons"]) for each in found["keep"]] == [
        ("four", ["last snapshot"]),
        ("two", ["replaced meanwhile"]),
    ]
    assert [each["name"] for each in found["remove"]] == ["three", "one"]
    assert {"two", "four"} < set(names(remote))


def test_an_interrupted_prune_is_completed_by_the_next_one(
    remote: RemoteStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = RemoteStore.drop_generation
    left = 2

    def interrupted(store: RemoteStore, generation: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return dropped(store, generation)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteStore, "drop_generation", interrupted)
        result = run("--keep-last", "1", "--store", url)
    assert (result.exit_code, result.stderr.count("\n")) == (130, 1)
    assert "the same command removes the others" in result.stderr
    assert {"four", "other"} < set(names(remote))

    assert run("--keep-last", "1", "--store", url).exit_code == 0
    assert names(remote) == ["four", "other"]


def test_a_dropped_snapshot_that_was_replaced_meanwhile_stays(
    remote: RemoteStore, local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RemoteStore.records

    def slowly(store: RemoteStore, *words: Any) -> Any:
        monkeypatch.setattr(RemoteStore, "records", records)
        found = records(store, *words)
        remote.push(local, KEY, "four", name="one", replace=True)
        return found

    monkeypatch.setattr(RemoteStore, "records", slowly)
    with pytest.raises(OSError, match="just replaced the snapshot one"):
        remote.drop(KEY, "one")
    assert "one" in names(remote)


def test_a_damaged_name_is_not_judged_and_the_answer_says_so(remote: RemoteStore, url: str, tmp_path: Path) -> None:
    path = tmp_path / "remote/names/two/0000000001"
    path.write_bytes(path.read_bytes()[:-1])

    result = run("--keep-last", "1", "--store", url)

    assert f"not in this list: 1 damaged snapshot; `vfsd store check --store {url}` names them" in result.stderr
    assert answer("--keep-last", "1", "--store", url)["damaged"] == ["names/two/0000000001"]
    assert path.exists()


def test_options_for_an_object_store_need_one(local: Store) -> None:
    result = run("--keep-last", "1", "--store-option", "region=x")
    assert result.exit_code == 2
    assert "add --store URL" in result.stderr
