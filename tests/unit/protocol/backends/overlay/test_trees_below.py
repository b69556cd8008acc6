"""An overlay over an archive or a stored snapshot: the same content, loaded when needed, and never wrong bytes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.tree_lower import TreeLower
from protocol.diff.tree_diff import changes
from protocol.store import DirectorySource, Store
from protocol.testing.volume.driver import Driver, fails
from tests.support import lower_layers
from tests.support.lower_layers import Layer
from tests.unit.protocol.store.states import state_of, state_of_tree

LARGE = 10 << 20
DAMAGED = 5_500_000  # more than what is read ahead from the beginning


@pytest.fixture
def below(tmp_path: Path) -> Path:
    root = tmp_path / "below"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "src" / "main.c").write_bytes(b"main")
    (root / "src" / "none").touch()
    (root / "large").write_bytes(random.Random(7).randbytes(6 << 20) + bytes(LARGE - (6 << 20)))
    (root / "hard").hardlink_to(root / "src" / "main.c")
    os.symlink("src/main.c", root / "link")
    os.mkfifo(root / "fifo")
    os.chmod(root / "src", 0o2750)
    os.setxattr(root / "src" / "deep", "user.note", b"value")
    for path in (root / "src" / "main.c", root / "large"):
        os.utime(path, ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    return root


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "layer.zip"


@pytest.fixture
def volume(layer: Layer, below: Path, place: Path) -> Iterator[OverlayVolume]:
    with lower_layers.over(layer, below, place) as volume:
        yield volume


def test_inode_numbers_and_times_are_the_same_at_the_next_mount(fs: Driver, layer: Layer, place: Path) -> None:
    paths = (b"src", b"src/main.c", b"hard", b"large", b"link")
    first = {path: fs.stat(path) for path in paths}
    lower = lower_layers.opened(layer, place)
    again = Driver(OverlayVolume(lower))
    for path in reversed(paths):
        seen, was = again.stat(path), first[path]
        assert (seen.inode, seen.mtime_ns, seen.ctime_ns, seen.size) == (
            was.inode, was.mtime_ns, was.ctime_ns, was.size
        )  # fmt: skip
    assert again.stat(b"hard").inode == again.stat(b"src/main.c").inode
    lower.close()


def test_what_changes_is_seen_by_diff_restored_and_discarded(volume: OverlayVolume, fs: Driver, below: Path) -> None:
    volume.take_snapshot("before")
    fs.unlink(b"hard")
    fs.rename(b"src", b"moved")
    volume.write(fs.at(b"large"), 200_000, b"new")
    fs.file(b"added", b"data")
    with volume.base_tree() as base, volume.tree() as live:
        found = {change.path for change in changes(base, live)}
    assert {b"hard", b"added", b"large", b"src", b"moved"} <= found
    data = bytearray((below / "large").read_bytes())
    data[200_000:200_003] = b"new"
    assert fs.read(b"large", 0, LARGE) == data
    volume.restore_snapshot("before")
    with volume.tree() as tree:
        assert state_of_tree(tree) == state_of(below)
    fs.unlink(b"link")
    volume.discard()
    with volume.base_tree() as base, volume.tree() as live:
        assert not list(changes(base, live))


def test_apply_is_refused_and_says_what_to_do(volume: OverlayVolume, fs: Driver) -> None:
    fs.file(b"added", b"data")
    with pytest.raises(OSError, match="vfsd export") as caught, volume.applying((), force=False, dry_run=False):
        pass
    assert caught.value.errno == errno.EOPNOTSUPP
    assert not volume.apply_interrupted


def test_opening_reads_no_content(layer: Layer, below: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_layers.make(layer, below, place)
    data = (below / "large").read_bytes()
    read: list[int] = []
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda *given: read.append(len(found := pread(*given))) or found)
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(count := preadv(*given)) or count)
    lower = lower_layers.opened(layer, place)
    fs = Driver(OverlayVolume(lower))
    assert len(fs.names()) == 6
    assert fs.stat(b"large").size == LARGE
    assert sum(read) < LARGE // 4
    assert fs.read(b"large", 0, LARGE) == data
    assert sum(read) > LARGE // 4
    lower.close()


def damage(layer: Layer, place: Path, below: Path) -> None:
    """Overwrite content of the file "large" with other bytes of the same length, in place."""
    needle = (below / "large").read_bytes()[DAMAGED : DAMAGED + 100]
    files = [place] if layer == "archive" else [path for path in place.rglob("*") if path.is_file()]
    for file in files:
        data = bytearray(file.read_bytes())
        at = data.find(needle)
        if at >= 0:
            with file.open("r+b") as out:
                out.seek(at)
                out.write(bytes(byte ^ 0xFF for byte in data[at : at + 100]))
            return
    raise AssertionError("nothing to damage")


@pytest.mark.extended
@pytest.mark.parametrize("was_read", [False, True])
def test_damaged_content_is_eio_and_one_line_in_the_log(
    volume: OverlayVolume, fs: Driver, layer: Layer, place: Path, below: Path, was_read: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    data = (below / "large").read_bytes()
    fs.file(b"added", b"kept")
    if was_read:
        assert fs.read(b"large", 0, 10) == data[:10]
    damage(layer, place, below)
    with caplog.at_level(logging.WARNING):
        for offset in range(0, LARGE, 500_000):
            with contextlib.suppress(OSError):
                assert fs.read(b"large", offset, 100_000) == data[offset : offset + 100_000]
        with fails(errno.EIO):
            fs.read(b"large", DAMAGED, 10)
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert fs.read(b"added") == b"kept"
    assert fs.read(b"src/main.c") == b"main"


def test_a_layer_that_is_gone_is_eio_and_the_changes_stay(
    volume: OverlayVolume, fs: Driver, layer: Layer, place: Path
) -> None:
    fs.file(b"added", b"kept")
    fs.stat(b"large")
    if layer == "archive":
        os.truncate(place, 100)
    else:
        shutil.rmtree(place)
    with fails(errno.EIO):
        fs.read(b"large")
    assert fs.read(b"added") == b"kept"
    volume.take_snapshot("after")
    fs.unlink(b"added")
    volume.restore_snapshot("after")
    assert fs.read(b"added") == b"kept"


def test_a_replaced_archive_shows_the_old_content(below: Path, place: Path) -> None:
    with lower_layers.over("archive", below, place) as volume:
        other = place.with_suffix(".new")
        lower_layers.make("archive", below / "src", other)
        os.replace(other, place)
        with volume.tree() as tree:
            assert state_of_tree(tree) == state_of(below)


def test_a_dropped_snapshot_is_readable_until_it_is_unmounted(below: Path, place: Path) -> None:
    with lower_layers.over("snapshot", below, place) as volume, Store(place) as other:
        other.drop("host:below", lower_layers.NAME)
        assert other.collect_garbage().freed_contents == 0
        with volume.tree() as tree:
            assert state_of_tree(tree) == state_of(below)
    with Store(place) as other:
        other.collect_garbage()
        assert not any(stat.S_ISREG(path.stat().st_mode) for path in (place / "objects").rglob("*"))
        assert not list((place / "packs").iterdir())
        assert not list((place / "leases").iterdir())


def test_a_collection_that_moves_contents_is_not_noticed(below: Path, place: Path) -> None:
    with lower_layers.over("snapshot", below, place) as volume, Store(place) as other:
        before = state_of(below)
        for number in range(3):  # their packs are small, so that a collection merges them
            (below / f"only-{number}").write_bytes(b"x" * 5000 + b"%d" % number)
            other.take("host:below", f"s{number}", DirectorySource(str(below)))
            (below / f"only-{number}").unlink()
        os.utime(below, ns=(0, before.files[b""][3]))
        for name in (lower_layers.NAME, "s0", "s1", "s2"):
            other.drop("host:below", name)
        packs = set(os.listdir(place / "packs"))
        other.collect_garbage()
        assert set(os.listdir(place / "packs")).isdisjoint(packs)
        with volume.tree() as tree:
            assert state_of_tree(tree) == state_of(below)


def test_other_files_are_read_while_a_large_one_is_verified(
    volume: OverlayVolume, fs: Driver, below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    lower = volume.lower
    assert isinstance(lower, TreeLower)
    preparation = lower._tree.preparation

    def slow(path: bytes) -> Callable[[], object] | None:
        prepare = preparation(path)

        def wait() -> None:
            begun.set()
            assert may_end.wait(60)
            assert prepare is not None
            prepare()

        return None if prepare is None else wait

    monkeypatch.setattr(lower._tree, "preparation", slow)
    threads: list[threading.Thread] = []

    async def joined(thread: threading.Thread) -> None:
        thread.join(60)

    def in_thread(run: Callable[[], object]) -> Awaitable[object]:
        threads.append(threading.Thread(target=run))
        threads[0].start()
        return joined(threads[0])

    volume.in_thread = in_thread
    answer = volume.read_pieces(fs.at(b"large"), 300_000, 5)
    assert isinstance(answer, Awaitable)
    assert begun.wait(60)
    assert volume.read_pieces(fs.at(b"src/main.c"), 0, 4) == b"main"
    assert fs.names(b"src") == [b"deep", b"main.c", b"none"]
    may_end.set()
    with pytest.raises(StopIteration) as ended:
        answer.__await__().send(None)
    assert ended.value.value == (below / "large").read_bytes()[300_000:300_005]
    assert volume.read_pieces(fs.at(b"large"), 0, 5) == (below / "large").read_bytes()[:5]
