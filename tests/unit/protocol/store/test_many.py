"""With many snapshots: what a lookup and a listing cost does not grow with them, and a collection gets its turn."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.format import packs as packs_module
from protocol.store.format.packs import Pack, Packs, PackWriter
from protocol.store.format.rows import Record, Row, encode_record, pack_name
from tests.unit.protocol.store.states import state_of

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
