"""Collections free what no snapshot needs, and never what a snapshot or a running push needs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.format.packs import DamagedError
from protocol.store.object_store import RemoteStore, open_storage, upkeep
from protocol.store.object_store.transfer import Push
from protocol.store.object_store.upkeep import Collection, needed_blobs
from tests.support.lower_layers import damage_inodes
from tests.unit.protocol.store.object_store import worker

KEY = worker.KEY
GRACE_S = 0.3
BeforePublishing = Callable[[Callable[[], object]], None]


def opened(url: str) -> RemoteStore:
    return RemoteStore(open_storage(url), grace_s=GRACE_S)


def states(local: Store, root: Path, count: int) -> None:
    """Snapshots that share some of their files."""
    made = random.Random(5)
    contents = [made.randbytes(500 + number) for number in range(30)]
    for number in range(count):
        for slot in range(10):
            (root / f"d{slot % 3}").mkdir(exist_ok=True)
            (root / f"d{slot % 3}" / f"f{slot}").write_bytes(made.choice(contents))
        local.take(KEY, f"state{number}", DirectorySource(root))


def push_states(url: str, local: Store, root: Path, *names: str) -> None:
    """Push the first states under these names."""
    states(local, root, len(names))
    with opened(url) as remote:
        for number, name in enumerate(names):
            remote.push(local, KEY, f"state{number}", name=name)


def collected(url: str) -> upkeep.CollectionReport:
    time.sleep(GRACE_S * 1.2)
    with opened(url) as remote:
        return remote.collect_garbage()


def packs(url: str) -> list[str]:
    return sorted(os.listdir(f"{url.removeprefix('file://')}/packs"))


@pytest.fixture
def before_publishing(monkeypatch: pytest.MonkeyPatch) -> BeforePublishing:
    """Sets what happens while the next push waits before it publishes its name."""

    def set_action(action: Callable[[], object]) -> None:
        publish = Push._publish

        def publish_later(push: Push, *args: object) -> int:
            monkeypatch.setattr(Push, "_publish", publish)
            action()
            return publish(push, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Push, "_publish", publish_later)

    return set_action


def test_what_a_dropped_snapshot_needed_is_freed_after_the_grace_period(url: str, local: Store, root: Path) -> None:
    push_states(url, local, root, "state0", "state1")
    with opened(url) as remote:
        remote.drop(KEY, "state0")

    assert collected(url).condemned_packs == 2
    assert collected(url).freed_packs == 2
    with opened(url) as remote:
        assert remote.check().ok
        remote.drop(KEY, "state1")
    collected(url)
    collected(url)
    assert packs(url) == []
    with opened(url) as remote:
        assert remote.push(local, KEY, "state0").is_new
        assert remote.check().ok


def test_a_young_pack_is_not_condemned(url: str, local: Store, root: Path) -> None:
    states(local, root, 1)
    with RemoteStore(open_storage(url), grace_s=3600) as remote:
        remote.push(local, KEY, "state0")
        remote.drop(KEY, "state0")
        assert remote.collect_garbage().condemned_packs == 0


def test_a_snapshot_that_was_dropped_within_the_grace_period_can_still_be_read(
    url: str, local: Store, root: Path
) -> None:
    grace_s = 3600.0
    place = Path(url.removeprefix("file://"))

    def grow_old(*kinds: str) -> None:
        for each in (file for kind in kinds for file in (place / kind).iterdir()):
            os.utime(each, (time.time() - 2 * grace_s,) * 2)

    (root / "kept").write_bytes(b"kept")
    (root / "waste").write_bytes(random.Random(1).randbytes(4000))
    local.take(KEY, "both", DirectorySource(root))
    (root / "waste").unlink()
    local.take(KEY, "part", DirectorySource(root))
    with RemoteStore(open_storage(url), grace_s=grace_s) as remote:
        remote.push(local, KEY, "both")
        remote.push(local, KEY, "part")
        remote.drop(KEY, "both")
        grow_old("packs")
        assert remote.collect_garbage().condemned_packs > 0
        grow_old("condemned")
        roots = list(remote.get("part").record.roots)
        remote.drop(KEY, "part")
        assert remote.collect_garbage().freed_packs > 0
    with RemoteStore(open_storage(url), grace_s=grace_s) as remote:
        view = remote.packs.view()
        needed = needed_blobs(remote.packs, view, roots)
        found = dict(remote.packs.blobs(map(view.located, needed)))
        assert found.keys() == needed
        assert b"kept" in found.values()


def test_what_another_collection_moves_meanwhile_is_read_where_it_is_now(
    url: str, local: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_states(url, local, root, "state0", "state1")
    with opened(url) as remote:
        remote.drop(KEY, "state0")
    assert collected(url).condemned_packs == 2
    time.sleep(GRACE_S * 1.2)
    delete, freed = Collection._delete, []

    def delete_later(collection: Collection, *args: Any) -> None:
        monkeypatch.setattr(Collection, "_delete", delete)
        with opened(url) as other:
            freed.append(other.collect_garbage().freed_packs)
        delete(collection, *args)

    with opened(url) as reader:
        view = reader.packs.view()
        needed = needed_blobs(reader.packs, view, reader.get("state1").record.roots)
        monkeypatch.setattr(Collection, "_delete", delete_later)
        with opened(url) as remote:
            remote.collect_garbage()
            assert freed == [2]
            assert remote.check().ok
        assert dict(reader.packs.blobs(map(view.located, needed))).keys() == needed
        for name in packs(url):
            os.unlink(f"{url.removeprefix('file://')}/packs/{name}")
        with pytest.raises(DamagedError, match="a pack is gone from the object store"):
            dict(reader.packs.blobs(map(view.located, needed)))


def test_a_push_does_not_rely_on_a_condemned_pack(url: str, local: Store, root: Path) -> None:
    push_states(url, local, root, "state0")
    with opened(url) as remote:
        remote.drop(KEY, "state0")
    assert collected(url).condemned_packs == 2

    with opened(url) as remote:
        assert remote.push(local, KEY, "state0", name="again").uploaded_contents > 5
    assert collected(url).freed_packs == 2
    with opened(url) as remote:
        assert remote.check().ok


def test_a_push_whose_packs_are_deleted_before_it_publishes_uploads_them_again(
    url: str, local: Store, root: Path, before_publishing: BeforePublishing
) -> None:
    push_states(url, local, root, "old")
    with opened(url) as remote:
        remote.drop(KEY, "old")

    def collect_twice() -> None:
        assert collected(url).condemned_packs == 2
        assert collected(url).freed_packs == 2

    before_publishing(collect_twice)
    with opened(url) as remote:
        report = remote.push(local, KEY, "state0", name="new")
        assert report.uploaded_contents > 5
        assert remote.check().ok


@pytest.mark.parametrize("replace", [False, True])
def test_a_repair_removes_damage_and_a_push_brings_it_back(url: str, local: Store, root: Path, replace: bool) -> None:
    push_states(url, local, root, "state0")
    for kind in ("data", "tree"):
        (name,) = [name for name in packs(url) if f".{kind}." in name]
        path = Path(url.removeprefix("file://"), "packs", name)
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
    with opened(url) as remote:
        report = remote.check()
        assert [damage.snapshots for damage in report.damages if damage.snapshots] == [((KEY, "state0"),)]
        with pytest.raises(DamagedError):
            remote.collect_garbage()
        assert remote.collect_garbage(repair=True).damaged_contents == 2
        assert not remote.check().ok
        assert remote.push(local, KEY, "state0", replace=replace).uploaded_contents == 2
        assert remote.check().ok
        assert remote.push(local, KEY, "state0").uploaded_contents == 0
        remote.collect_garbage()


def test_a_damaged_inode_listing_is_no_lost_path_and_a_push_brings_it_back(url: str, local: Store, root: Path) -> None:
    states(local, root, 1)
    with opened(url) as remote:
        remote.push(local, KEY, "state0")
        damage_inodes(remote, "state0")
    with opened(url) as remote:
        for _ in range(2):
            (damage,) = remote.check().damages
            assert damage.snapshots == ((KEY, "state0"),)
            assert damage.paths == ()
            assert damage.without_inodes == (b"",)
            remote.collect_garbage(repair=True)
        assert remote.push(local, KEY, "state0").uploaded_contents == 1
        assert remote.check().ok


def drop_the_base(url: str) -> None:
    with opened(url) as other:
        other.drop(KEY, "base")
    for _ in range(3):
        collected(url)


def repair_the_base(url: str) -> None:
    (name,) = [name for name in packs(url) if ".data." in name and os.path.getsize(f"{url[7:]}/packs/{name}") > 1000]
    os.truncate(f"{url[7:]}/packs/{name}", 100)
    with opened(url) as other:
        other.collect_garbage(repair=True)


@pytest.mark.parametrize("action", [drop_the_base, repair_the_base])
def test_a_base_that_is_dropped_or_repaired_during_the_push_is_not_relied_on(
    url: str, local: Store, root: Path, before_publishing: BeforePublishing, action: Callable[[str], None]
) -> None:
    push_states(url, local, root, "base")
    (root / "new").write_bytes(b"new")
    local.take(KEY, "next", DirectorySource(root))

    before_publishing(lambda: action(url))
    with opened(url) as remote:
        remote.push(local, KEY, "next")
        assert remote.check().ok


def test_a_damaged_name_does_not_stop_collections_for_ever(url: str, local: Store, root: Path) -> None:
    push_states(url, local, root, "state0", "state1")
    Path(url.removeprefix("file://"), "names", "state0", "0000000001").write_bytes(b"not a record")
    with opened(url) as remote:
        with pytest.raises(DamagedError, match="vfsd store check --store"):
            remote.collect_garbage()
        assert remote.collect_garbage(repair=True).damaged_contents == 1
        assert [one.name for one in remote.all()] == ["state1"]
        assert remote.push(local, KEY, "state0").is_new
        assert remote.check().ok
    collected(url)


@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("packs/0123.data.pack", 0),
        ("packs/0123.tree.pack", 50 << 30),
        ("names/state0/0000000002", 50 << 30),
        ("names/state0/99999999999999999999", 7),
        ("names/state0/-1", 7),
        ("names/x/y/z", 7),
        ("condemned/nothing", 7),
    ],
    ids=str,
)
def test_an_object_that_nobody_wrote_costs_no_memory_and_a_repair_removes_its_effect(
    url: str, local: Store, root: Path, key: str, size: int
) -> None:
    push_states(url, local, root, "state0")
    path = Path(url.removeprefix("file://"), key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
    with opened(url) as remote:
        remote.check()
        remote.collect_garbage(repair=True)
        assert remote.check().ok
        assert remote.push(local, KEY, "state0", name="other").is_new


@pytest.mark.extended
def test_pushers_and_collectors_that_are_killed_lose_no_name(
    url: str, local: Store, root: Path, runs_long: bool, tmp_path: Path
) -> None:
    states(local, root, worker.STATES)
    made = random.Random(11)
    pushers, duration_s = (16, 90.0) if runs_long else (4, 5.0)
    output = tmp_path / "output"
    output.mkdir()
    count = 0

    def start(kind: str) -> subprocess.Popen[bytes]:
        nonlocal count
        count += 1
        with open(output / f"{kind}-{count}", "wb") as file:
            module = "tests.unit.protocol.store.object_store.worker"
            words = [url, local.directory, str(count)] if kind == "push" else [url]
            return subprocess.Popen([sys.executable, "-m", module, kind, *words], stdout=file)

    def pushed() -> int:
        return sum(path.read_text().count("pushed w") for path in output.glob("push-*"))

    with opened(url) as remote:
        remote.push(local, KEY, "state0", name="first")  # a collector fails without a store
    running = [start("push") for _ in range(pushers)] + [start("collect"), start("collect")]
    end = time.monotonic() + duration_s
    while time.monotonic() < end or pushed() < pushers:
        time.sleep(made.uniform(0.2, 0.8))
        victim = made.randrange(len(running))
        assert running[victim].poll() is None, "a worker failed"
        running[victim].kill()
        running[victim].wait()
        running[victim] = start("push" if victim < pushers else "collect")
    for process in running:
        process.kill()
        process.wait()

    lines = [line.split() for path in output.glob("push-*") for line in path.read_text().splitlines()]
    dropped = {words[1] for words in lines if words[0] == "dropping"}
    wanted = {words[1] for words in lines if words[0] == "pushed"} - dropped
    assert len(wanted | dropped) >= pushers
    with opened(url) as remote:
        report = remote.check()
        assert report.damages == ()
        assert wanted <= {one.name for one in remote.all()}
    freed = sum(int(line.split()[1]) for path in output.glob("collect-*") for line in path.read_text().splitlines())
    assert freed or not runs_long
