"""An overlay over a remote snapshot, where calls have to wait all the time, against one over the same snapshot here.

A call that raises NotReadyError has changed nothing: if one had, its repetition would give another result.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from msgspec.structs import replace

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lazy_lower import LazyLower
from protocol.backends.overlay.lower import FIRST_NEW_NUMBER
from protocol.backends.overlay.tree_lower import TreeLower
from protocol.errors import NotReadyError
from protocol.store import DirectorySource, Store, TreeSource
from protocol.store.format.packs import damaged_blob
from protocol.store.format.rows import Record
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.lazy import contents
from protocol.store.object_store.lazy.client import BlobKind, Progress
from protocol.store.object_store.lazy.contents import BlobCache
from protocol.testing.volume.driver import Driver, fails
from protocol.tree import Tree, TreeEntry
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from tests.support import lower_layers
from tests.support.lower_layers import NAME, Layer, make, opened
from tests.unit.protocol.store.states import state_of, state_of_tree

KEY = "host:below"
NAMES = [b"a", b"b", b"c", b"big", b"new"]
PATHS = [[], [], [b"a"], [b"a", b"b"], [b"c"], [b"new"]]
PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class DirectClient:
    """Gives the blobs of a store on disk at once, without another process."""

    def __init__(self, blobs: dict[bytes, bytes]) -> None:
        self._blobs = blobs
        self.count = 0
        self.failing: str | None = None
        self.failure: OSError | None = None
        self.progress = Progress(0, 0, 0, "")

    def lose(self, digest: bytes) -> None:
        """Answer as if a collection of another version had removed a blob."""
        del self._blobs[digest]

    def fetch(self, _kind: BlobKind, digests: Sequence[bytes], _ahead: Sequence[bytes] = ()) -> Future[list[bytes]]:
        self.count += 1
        answer: Future[list[bytes]] = Future()
        if self.failure is not None:
            answer.set_exception(self.failure)
        elif any(digest not in self._blobs for digest in digests):
            answer.set_exception(damaged_blob(digests[0], "is gone from the object store"))
        else:
            answer.set_result([self._blobs[digest] for digest in digests])
        return answer

    def forking(self) -> Any:
        return nullcontext()

    def forked(self) -> None:
        pass

    def close(self) -> None:
        pass


class NumberedTree:
    """A tree whose files d/f0, d/f1, ... have these inode numbers, and one ctime."""

    CTIME_NS = 1_500_000_000_123_456_789

    def __init__(self, tree: Tree, numbers: Sequence[int]) -> None:
        self._given = {b"d/f%d" % at: number for at, number in enumerate(numbers)} | {b"second": numbers[-1]}
        self._tree = tree

    def walk(self) -> Iterator[TreeEntry]:
        for entry in self._tree.walk():
            number = self._given.get(entry.path, 1000 + len(entry.path))
            yield replace(entry, inode=number, ctime_ns=self.CTIME_NS)

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        return self._tree.chunks(path, size)


def blobs_of(url: str) -> tuple[Record, dict[bytes, bytes]]:
    with RemoteStore(open_storage(url)) as remote:
        view = remote.packs.view()
        places = [item for pack in view.packs.values() for item in pack.places()]
        return remote.get(NAME).record, dict(remote.packs.blobs(places))


def fill(below: Path, source: random.Random) -> None:
    for directory in (below, below / "a", below / "a" / "b", below / "c"):
        directory.mkdir(exist_ok=True)
        for number in range(4):
            (directory / f"f{number}").write_bytes(source.randbytes(source.choice([10, 300_000])))
    (below / "big").write_bytes(source.randbytes(9 << 20))
    (below / "link").symlink_to("big")
    os.link(below / "a" / "f0", below / "c" / "second")


@contextmanager
def both(
    tmp_path: Path, source: random.Random, clock: Callable[[], int]
) -> Iterator[tuple[OverlayVolume, OverlayVolume, DirectClient]]:
    below, place = tmp_path / "below", tmp_path / "store"
    fill(below, source)
    make("snapshot", below, place)
    url = f"file://{tmp_path}/remote"
    with Store(place) as local, RemoteStore(open_storage(url)) as remote:
        remote.push(local, KEY, NAME)
    record, blobs = blobs_of(url)
    client = DirectClient(blobs)
    read = contents.RemoteContents(client, BlobCache(None, 0))  # type: ignore[arg-type]
    lazy = LazyLower(read, record.root, url, "", inodes=record.inodes)
    here = opened("snapshot", place)
    volumes = OverlayVolume(lazy, clock=clock), OverlayVolume(here, clock=clock)
    volumes[0].serve_here()
    try:
        yield *volumes, client
    finally:
        here.close()


def test_a_kernel_that_repeats_a_failed_read_ahead_for_a_page_gets_the_error_at_once(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "f").write_bytes(os.urandom(300_000))
    url = f"file://{tmp_path}/remote"
    with Store(str(tmp_path / "store")) as local, RemoteStore(open_storage(url)) as remote:
        local.take(KEY, NAME, DirectorySource(str(below)))
        remote.push(local, KEY, NAME)
    record, blobs = blobs_of(url)
    client = DirectClient(blobs)
    read = contents.RemoteContents(client, BlobCache(None, 0))  # type: ignore[arg-type]
    lower = LazyLower(read, record.root, url, "")
    file = lower.file(b"f", lower.waited(lower.stat, b"f"))
    client.failure = OSError(errno.EIO, "no answer")
    with pytest.raises(OSError, match="no answer"):
        file.read(131_072, 131_072)
    fetches = client.count
    with pytest.raises(OSError, match="no answer"):
        file.read(131_072, 4096)
    assert client.count == fetches
    client.failure = None
    assert file.read(131_072, 4096) == (below / "f").read_bytes()[131_072:][:4096]  # a new read tries again
    assert client.count > fetches


@pytest.mark.parametrize("is_lost", [False, True])
def test_inode_numbers_are_those_that_were_pushed_and_never_two_of_one(tmp_path: Path, is_lost: bool) -> None:
    below = tmp_path / "below"
    (below / "d").mkdir(parents=True)
    for number in range(8):
        (below / "d" / f"f{number}").touch()
    os.link(below / "d" / "f7", below / "second")
    given = [5, 5, 1, 0, FIRST_NEW_NUMBER + 77, (77 << 32) + FIRST_NEW_NUMBER + 77, 2**63 - 1, 9]  # by any machine
    url = f"file://{tmp_path}/remote"
    with Store(str(tmp_path / "store")) as local, RemoteStore(open_storage(url)) as remote:
        local.take(KEY, "as-it-is", DirectorySource(str(below)))
        with local.tree(KEY, "as-it-is") as tree:
            local.take(KEY, NAME, TreeSource(NumberedTree(tree, given)))  # type: ignore[arg-type]
        remote.push(local, KEY, NAME)
    record, blobs = blobs_of(url)
    assert record.inodes is not None
    client = DirectClient(blobs)
    if is_lost:
        client.lose(record.inodes.content)
    read = contents.RemoteContents(client, BlobCache(None, 0))  # type: ignore[arg-type]
    lower = LazyLower(read, record.root, url, "", inodes=record.inodes)
    volume = OverlayVolume(lower)
    directory = volume.lookup(ROOT_INODE, b"d").inode
    numbers = [volume.lookup(directory, b"f%d" % number).inode for number in range(8)]
    assert len(set(numbers)) == 8
    assert volume.lookup(ROOT_INODE, b"second").inode == numbers[7]
    made = volume.mknod(directory, b"new", 0o100644, 0, SUPERUSER).inode
    assert made not in numbers
    assert made >= FIRST_NEW_NUMBER
    if not is_lost:
        assert numbers[0] == 5
        assert numbers[7] == 9
        assert numbers[4] % 2**32 == 77  # as in the index of git
        assert volume.getattr(numbers[0]).ctime_ns == NumberedTree.CTIME_NS
    found = volume.usage().inode_failure
    assert (found is not None) == is_lost
    if found is not None:
        assert "ctimes below . are lost" in found
    volume.check_invariants()


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, repeated while it has to wait; or its error."""
    held = []
    while True:
        try:
            found = call()
        except NotReadyError as error:
            held.append(error.arrival.result())
        except OSError as error:
            return error.errno
        else:
            return found if isinstance(found, (bytes, int, type(None))) else None


def resolve(volume: OverlayVolume, path: Sequence[bytes]) -> int:
    number = ROOT_INODE
    for name in path:
        number = volume.lookup(number, name).inode
    return number


def operation(source: random.Random) -> Callable[[OverlayVolume], Any]:
    """A call with random arguments."""
    names = [*NAMES, b"f0", b"f1", b"f2", b"f3", b"link", b"second"]
    path, other = (source.choice(PATHS) for _ in range(2))
    name, new = source.choice(names), source.choice(names)
    at, data = source.choice([0, 5, 131_072, 4 << 20, (4 << 20) + 7]), source.randbytes(source.choice([1, 200_000]))
    size = source.choice([0, 7, 200_000, 5 << 20])

    def chosen(volume: OverlayVolume) -> list[Callable[[], Any]]:
        def node() -> int:
            return resolve(volume, [*path, name])

        def parent() -> int:
            return resolve(volume, path)

        return [
            lambda: bytes(volume.read(node(), at, 100_000)),
            lambda: volume.write(node(), at, data),
            lambda: volume.setattr(node(), AttributeChanges(size=size)),
            lambda: volume.setattr(node(), AttributeChanges(mode=0o600)),
            lambda: volume.fallocate(node(), PUNCH, at + 1, 400_000),
            lambda: volume.rename(parent(), name, resolve(volume, other), new),
            lambda: volume.unlink(parent(), name),
            lambda: volume.rmdir(parent(), name),
            lambda: volume.mkdir(parent(), name, 0o755, SUPERUSER),
            lambda: volume.mknod(parent(), name, 0o100644, 0, SUPERUSER),
            lambda: volume.link(node(), resolve(volume, other), new),
            lambda: b"\0".join(entry.name for entry in volume.readdir(node(), 0)),
            lambda: volume.discard([b"/".join([*path, name])]),
            lambda: volume.restore_snapshot("kept", [b"/".join([*path, name])]),
        ]

    which = source.randrange(14)
    return lambda volume: outcome(chosen(volume)[which])


def number_of(entry: TreeEntry) -> int:
    """The inode number, if it comes from below: an attempt that had to wait may have used up one of the others."""
    return entry.inode if entry.inode < FIRST_NEW_NUMBER else 0


def shown(volume: OverlayVolume) -> list[Any]:
    """Everything that can be seen in the live state, without the link counts of directories."""
    with volume.tree() as tree:
        return [
            (entry.path, entry.mode, entry.size, number_of(entry), entry.mtime_ns, entry.target,
             0 if entry.is_dir else entry.nlink, tree.read(entry.path, 0, entry.size) if entry.is_file else b"")
            for entry in tree.walk()
        ]  # fmt: skip


@pytest.mark.parametrize("seed", range(max(3, settings().max_examples // 10)))
def test_calls_that_have_to_wait_give_the_results_of_those_that_do_not(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "BLOBS_BYTES", 0)
    monkeypatch.setattr(contents, "_ROWS_KEPT", 0)
    source = random.Random(seed)
    now_ns = 10**18  # the same for both, however often a call is repeated
    with both(tmp_path, source, lambda: now_ns) as (lazy, here, client):
        for step in range(120):
            now_ns += 1000
            if step in {5, 60}:
                for volume in (lazy, here):
                    volume.take_snapshot("kept" if step == 5 else "later")
            if step < 5:
                continue
            call = operation(source)
            assert call(lazy) == call(here)
        assert client.count > 3, "hardly anything had to wait"
        lazy.lower.forked()  # from now on calls wait
        assert shown(lazy) == shown(here)
        lazy.check_invariants()
        for volume in (lazy, here):
            volume.restore_snapshot("kept")
        assert shown(lazy) == shown(here)
        lazy.check_invariants()


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
