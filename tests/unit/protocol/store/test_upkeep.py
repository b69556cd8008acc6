"""Damage is found, garbage is freed, several processes do not disturb each other, many snapshots slow nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DamagedError, DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.directory.scan import Scanned
from protocol.store.format import packs as packs_module
from protocol.store.format.blobs import LARGE_BYTES
from protocol.store.format.packs import Pack, Packs, PackWriter
from protocol.store.format.rows import Record, Row, encode_record, pack_name
from protocol.tree import names_in
from tests.unit.protocol.store.states import state_of, state_of_tree

WORKERS = 4


@pytest.fixture
def kept(root: Path, tmp_path: Path) -> Store:
    """A store with two snapshots, which may be damaged."""
    store = Store(tmp_path / "store")
    (root / "directory").mkdir()
    (root / "directory" / "file").write_bytes(b"small" * 100)
    (root / "large").write_bytes(b"large" * LARGE_BYTES)
    store.take("host:/w", "first", DirectorySource(root))
    (root / "second").write_bytes(b"second" * 100)
    store.take("host:/w", "second", DirectorySource(root))
    return store


def packs(store: Store) -> list[Path]:
    return sorted(Path(store.directory, "packs").iterdir())


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def large(store: Store) -> Path:
    return next(path for path in Path(store.directory, "objects").rglob("*") if path.is_file())


def test_a_whole_store_is_found_whole(kept: Store) -> None:
    report = kept.check()

    assert (report.ok, report.snapshots, report.damages) == (True, 2, ())
    assert report.size_bytes > 5 * LARGE_BYTES


def test_a_listing_of_several_megabytes_is_whole(store: Store, root: Path) -> None:
    for number in range(20_000):
        os.mknod(root / f"{number:0230}")
    store.take("w", "many", DirectorySource(root))

    assert store.check().damages == ()
    assert store.collect_garbage(repair=True).freed_contents == 0
    with Store(store.directory).tree("w", "many") as tree:
        assert len(names_in(tree, b"")) == 20_000


BOTH = (("host:/w", "first"), ("host:/w", "second"))


@pytest.mark.parametrize(
    ("damage", "said", "snapshots", "paths"),
    [
        (lambda store: flip(packs(store)[0], 10), "not what was stored", BOTH, (b"directory/file",)),
        (lambda store: flip(large(store), 1000), "damaged", BOTH, (b"large",)),
        (lambda store: os.unlink(large(store)), "gone", BOTH, (b"large",)),
        (
            lambda store: os.truncate(packs(store)[1], os.stat(packs(store)[1]).st_size - 1),
            "truncated", (("host:/w", "number 2"),), (),
        ),
    ],
    ids=["flipped", "flipped large", "gone", "cut short"],
)  # fmt: skip
def test_damage_is_found_and_named_with_its_snapshots_and_paths(
    kept: Store, damage: Callable[[Store], None], said: str, snapshots: object, paths: tuple[bytes, ...]
) -> None:
    damage(kept)

    (found,) = Store(kept.directory).check().damages

    assert said in found.what
    assert (found.snapshots, found.paths) == (snapshots, paths)


def test_a_pack_that_is_gone_is_found(kept: Store) -> None:
    os.unlink(packs(kept)[0])

    report = Store(kept.directory).check()

    assert report.snapshots == 1
    assert {path for damage in report.damages for path in damage.paths} == {b"directory"}


def test_repair_takes_out_what_is_damaged_and_the_next_snapshot_is_whole(kept: Store, root: Path) -> None:
    flip(packs(kept)[0], 10)
    flip(large(kept), 1000)
    os.truncate(packs(kept)[1], 50)
    store = Store(kept.directory)
    with pytest.raises(DamagedError):
        store.collect_garbage()

    size = large(kept).stat().st_size
    report = store.collect_garbage(repair=True)
    assert report.damaged_contents == 3  # in a pack, a large one, and an unreadable pack
    assert report.damaged_bytes > size + 50
    store.take("host:/w", "third", DirectorySource(root))

    assert all(("host:/w", "third") not in damage.snapshots for damage in store.check().damages)
    with store.tree("host:/w", "third") as tree:
        assert state_of_tree(tree) == state_of(root)


def test_repair_keeps_the_whole_copy_of_what_two_processes_stored_at_once(tmp_path: Path, root: Path) -> None:
    (root / "file").write_bytes(b"small" * 100)
    place = tmp_path / "store"

    class WhileAnotherTakes(DirectorySource):
        def scan(self, *args: Any, **options: Any) -> Scanned:
            Store(place).take("other", "s", DirectorySource(root))
            return super().scan(*args, **options)

    Store(place).take("w", "s", WhileAnotherTakes(root))
    first, second = packs(Store(place))
    assert first.stat().st_size == pytest.approx(second.stat().st_size, abs=20)
    flip(first, 10)

    store = Store(place)
    store.collect_garbage(repair=True)

    assert store.check().damages == ()
    with store.tree("w", "s") as one, store.tree("other", "s") as other:
        assert one.read(b"file", 0, 1000) == other.read(b"file", 0, 1000) == b"small" * 100


def test_a_look_at_the_live_state_does_not_pass_for_a_snapshot_of_it(kept: Store, root: Path) -> None:
    flip(packs(kept)[0], 10)
    store = Store(kept.directory)
    store.collect_garbage(repair=True)

    # It looks through the files, and stores none.
    with store.live_tree("host:/w", DirectorySource(root)):
        pass
    store.take("host:/w", "third", DirectorySource(root))

    assert all(("host:/w", "third") not in damage.snapshots for damage in store.check().damages)
    with store.tree("host:/w", "third") as tree:
        assert state_of_tree(tree) == state_of(root)


def test_who_had_the_store_open_reads_what_a_repair_has_moved(kept: Store, root: Path, tmp_path: Path) -> None:
    (root / "directory" / "zzz").write_bytes(b"whole" * 1000)
    (root / "damaged").write_bytes(b"lost" * 1000)
    kept.take("host:/w", "third", DirectorySource(root))
    data = packs(kept)[2].read_bytes()
    flip(packs(kept)[2], data.index(b"lost"))
    with Store(kept.directory) as other:
        other.collect_garbage(repair=True)

    kept.close()  # as when too many files are open
    with kept.tree("host:/w", "third") as tree:
        assert tree.read(b"directory/zzz", 0, 10_000) == b"whole" * 1000


def test_a_restore_that_goes_on_is_not_said_to_be_interrupted(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"was")
    store.take("w", "before", DirectorySource(root))
    (root / "file").write_bytes(b"is")
    found: list[tuple[str, ...]] = []

    def look(done: int, total: int) -> None:
        if os.path.exists(Path(store.layout.workspace("w"), "journal")):
            with Store(store.directory) as other:
                found.append(other.check().interrupted)

    store.restore("w", DirectoryTarget(root), RestoreRequest("before", safety=None), progress=look)
    assert set(found) == {()}


def test_what_only_a_dropped_snapshot_had_is_freed(store: Store, root: Path) -> None:
    (root / "shared").write_bytes(os.urandom(100_000))
    (root / "early").write_bytes(os.urandom(LARGE_BYTES + 1))
    (root / "small").write_bytes(os.urandom(50_000))
    store.take("w", "first", DirectorySource(root))
    (root / "early").unlink()
    (root / "small").unlink()
    store.take("w", "second", DirectorySource(root))
    store.drop("w", "first")

    report = store.collect_garbage()

    assert report.freed_bytes > LARGE_BYTES + 40_000
    assert report.kept_bytes < 120_000
    with store.tree("w", "second") as tree:
        assert state_of_tree(tree) == state_of(root)
    assert store.collect_garbage().freed_bytes == 0


def test_after_a_collection_a_snapshot_brings_again_what_was_freed(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"freed and needed again" * 100)
    (root / "large").write_bytes(os.urandom(LARGE_BYTES + 1))
    store.take("w", "first", DirectorySource(root))
    store.drop("w", "first")
    Store(store.directory).collect_garbage()

    store.take("w", "second", DirectorySource(root))

    with store.tree("w", "second") as tree:
        assert state_of_tree(tree) == state_of(root)


def test_a_collection_waits_for_readers_and_says_so_when_they_go_on(store: Store, root: Path) -> None:
    store.take("w", "first", DirectorySource(root))
    with store.tree("w", "first"), pytest.raises(OSError, match="in use") as caught:
        store.collect_garbage(wait_s=0)
    assert caught.value.errno == errno.EBUSY
    store.collect_garbage(wait_s=0)


SCRIPT = """
import os, sys
from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
place, key = sys.argv[1:]
root = os.path.join(place, "root-" + key)
with Store(os.path.join(place, "store")) as store:
    for number in range(15):
        with open(os.path.join(root, str(number)), "wb") as file:
            file.write(b"shared %d" % number * 50)
        with open(os.path.join(root, "large"), "wb") as file:
            file.write(b"%d" % (number % 3) * 300_000)
        store.take(key, str(number), DirectorySource(root))
        if number % 4 == 3:
            store.drop(key, str(number - 2))
        if number % 5 == 4:
            store.collect_garbage()
        if number % 6 == 5:
            request = RestoreRequest(str(number - 1), safety="safe-%d" % number)
            store.restore(key, DirectoryTarget(root), request)
"""


def test_several_processes_take_drop_restore_and_collect_at_once(store: Store, tmp_path: Path) -> None:
    keys = [f"{number}" for number in range(WORKERS)]
    for key in keys:
        (tmp_path / f"root-{key}").mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), key], stderr=subprocess.PIPE) for key in keys
    ]
    errors = [process.communicate()[1] for process in processes]

    assert errors == [b""] * WORKERS
    assert [process.returncode for process in processes] == [0] * WORKERS
    store.collect_garbage()
    for key in keys:
        names = [info.name for info in store.snapshots(key)]
        assert len(names) == len(set(names)) == 15 - 3 + 2
        with store.tree(key, "14") as tree:
            assert tree.read(b"14", 0, 9) == b"shared 14"


def test_snapshots_of_one_workspace_at_once_get_different_serials(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"content")
    taken: list[int] = []

    def take(name: str) -> None:
        with Store(store.directory) as mine:
            taken.extend(mine.take("w", f"{name}-{number}", DirectorySource(root)).serial for number in range(10))

    threads = [threading.Thread(target=take, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(1, 31))


def test_a_damaged_content_that_is_needed_is_not_collected_as_if_it_were_whole(store: Store, root: Path) -> None:
    (root / "needed").write_bytes(b"needed" * 1000)
    (root / "not needed").write_bytes(b"not" * 30_000)
    store.take("w", "first", DirectorySource(root))
    (root / "not needed").unlink()
    store.take("w", "second", DirectorySource(root))
    store.drop("w", "first")
    pack = packs(store)[0]
    at = pack.read_bytes().index(b"needed")
    flip(pack, at)

    with pytest.raises(DamagedError, match="is damaged"):
        store.collect_garbage()

    assert pack.exists()
    flip(pack, at)
    assert store.collect_garbage().freed_bytes > 80_000
    with store.tree("w", "second") as tree:
        assert tree.read(b"needed", 0, 6000) == b"needed" * 1000


def test_a_store_that_other_users_can_change_is_refused(kept: Store, root: Path) -> None:
    os.chmod(kept.directory, 0o777)

    with pytest.raises(PermissionError, match="chmod 700"):
        Store(kept.directory).take("host:/w", "third", DirectorySource(root))


def test_a_damaged_record_of_an_interrupted_restore_is_reported_and_a_restore_replaces_it(
    kept: Store, root: Path
) -> None:
    journal = Path(kept.layout.workspace("host:/w"), "journal")
    journal.write_bytes(b"damaged")

    assert kept.interrupted("host:/w") is None
    assert ["is damaged" in damage.what for damage in kept.check().damages] == [True]
    kept.restore("host:/w", DirectoryTarget(root), RestoreRequest("first", safety=None))
    assert not journal.exists()
    assert kept.check().ok


MANY = 300
VERY_MANY = 10_000
BLOBS = 5
OPEN_FILES = 64


@pytest.fixture
def many(runs_long: bool) -> int:
    return VERY_MANY if runs_long else MANY


@pytest.fixture
def crowded(store: Store, root: Path, many: int, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with many snapshots of other workspaces.  Each has contents of its own."""
    monkeypatch.setattr(packs_module, "_MOST_IN_TABLE", many)  # most are beyond the table
    store.take("w", "first", DirectorySource(root))
    listing = store.blobs.small(next(iter(store.blobs.packs.all()[0].places()))[0])
    assert listing is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        for number in range(many):
            write_snapshot(store, f"other-{number % 10}", number + 1, listing)
    return store


def blob(number: int, part: int) -> bytes:
    return b"content %d of %d" % (part, number)


def write_snapshot(store: Store, workspace: str, serial: int, listing: bytes) -> None:
    layout = store.layout
    with PackWriter(os.path.join(layout.tmp, f"{serial}.pack")) as writer:
        writer.add(hashlib.sha256(listing).digest(), listing)
        for part in range(BLOBS):
            writer.add(hashlib.sha256(blob(serial, part)).digest(), blob(serial, part))
        root = Row(b"", 0o40755, 0, 0, 0, 0, hashlib.sha256(listing).digest())
        record = Record(1, workspace, f"s-{serial}", serial, serial, 0, 0, 0, None, "user", (), (), root)
        path = os.path.join(layout.packs, pack_name(layout.workspace_id(workspace), serial))
        writer.finish(path, encode_record(record))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the packs' expensive operations were done."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    count(Pack, "find")
    count(Pack, "from_file")
    count(os, "listdir")
    return found


def test_a_lookup_asks_no_more_packs_however_many_there_are(crowded: Store, many: int, calls: Counter[str]) -> None:
    packs = Packs(crowded.layout)
    packs.refresh()
    calls.clear()
    for number in range(1, many + 1):
        for part in range(BLOBS):
            place = packs.find(hashlib.sha256(blob(number, part)).digest())
            assert place is not None
            assert packs.read(place) == blob(number, part)
        assert packs.find(hashlib.sha256(b"absent %d" % number).digest()) is None
    assert calls["find"] <= many * BLOBS * 1.1
    assert len(packs._files) <= OPEN_FILES
    packs.close()


def test_what_has_not_changed_is_neither_listed_nor_read_again(crowded: Store, many: int, calls: Counter[str]) -> None:
    with Store(crowded.directory) as other:
        assert len(other.snapshots("other-3")) == many // 10
        while time.time_ns() < os.stat(crowded.layout.packs).st_ctime_ns + 30_000_000:
            time.sleep(0.001)
        other.snapshots("other-3")
        crowded.snapshots("w")
        calls.clear()
        for number in range(50):
            other.snapshots("other-3")
            assert other.snapshot("other-3", f"s-{4 + 10 * (number % 10)}").serial == 4 + 10 * (number % 10)
        assert not calls
        crowded.take("w", "second", DirectorySource(Path(crowded.directory).parent / "root"))
        assert [info.name for info in other.snapshots("w")] == ["first", "second"]
        assert calls["from_file"] <= 3  # the new one, in each of the two


def test_snapshots_and_restores_and_collections_work_among_many(crowded: Store, root: Path, many: int) -> None:
    (root / "file").write_bytes(b"content")
    crowded.take("w", "s", DirectorySource(root))
    expected = state_of(root)
    (root / "file").write_bytes(b"changed")
    crowded.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
    assert state_of(root) == expected
    for number in range(1, many + 1, 10):
        crowded.drop("other-0", f"s-{number}")
    report = crowded.collect_garbage()
    assert report.freed_contents >= BLOBS * many // 10
    assert len(crowded.snapshots("other-0")) == 0
    assert len(crowded.snapshots("other-1")) == many // 10


def test_a_reader_finds_everything_while_packs_are_taken_in_and_forgotten(crowded: Store, many: int) -> None:
    packs = crowded.blobs.packs
    crowded.snapshots("w")
    done = threading.Event()
    missing: list[int] = []

    def look() -> None:
        while not done.is_set():
            missing.extend(
                number for number in range(1, many + 1, 7) if not packs.find(hashlib.sha256(blob(number, 0)).digest())
            )

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(5):
        name = f"{number}.pack"
        with PackWriter(os.path.join(crowded.layout.tmp, name)) as writer:
            writer.add(hashlib.sha256(b"%d" % number).digest(), b"%d" % number)
            writer.finish(os.path.join(crowded.layout.packs, name))
        packs.refresh()
        os.unlink(os.path.join(crowded.layout.packs, name))
        packs.refresh()
    done.set()
    thread.join()

    assert missing == []


# -- a collection's turn ---------------------------------------------------------------------------
def test_a_collection_gets_its_turn_among_snapshots_that_never_stop(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"content")
    store.take("w", "s", DirectorySource(root))
    stop, busy = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        with Store(store.directory) as mine:
            while not stop.is_set():
                with mine.layout.shared():
                    busy.release()
                    stop.wait(0.02)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            busy.acquire()
        for _ in range(3):
            store.collect_garbage(wait_s=60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_reader_that_takes_a_snapshot_is_not_locked_out_by_a_collection_that_waits_for_it(
    store: Store, root: Path
) -> None:
    store.take("w", "s", DirectorySource(root))
    failed: list[OSError] = []

    def collect() -> None:
        with Store(store.directory) as other:
            try:
                other.collect_garbage(wait_s=60)
            except OSError as error:
                failed.append(error)

    with store.tree("w", "s"):
        thread = threading.Thread(target=collect)
        thread.start()
        gate = os.path.join(store.directory, "gate")
        while not is_closed(gate):
            time.sleep(0.001)
        store.take("w", "same store", DirectorySource(root))
        with Store(store.directory) as another:
            another.take("w", "another store", DirectorySource(root))
    thread.join()
    assert failed == []


def is_closed(gate: str) -> bool:
    """Whether /proc/locks has somebody's exclusive lock of a file."""
    inode = os.stat(gate).st_ino
    with open("/proc/locks", encoding="ascii") as file:
        return any("WRITE" in line and f":{inode} " in line for line in file)
