"""An overlay over a remote snapshot, where calls have to wait all the time, against one over the same snapshot here.

A call that raises NotReadyError has changed nothing: if one had, its repetition would give another result.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
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
from protocol.errors import NotReadyError
from protocol.store import DirectorySource, Store, TreeSource
from protocol.store.format.packs import damaged_blob
from protocol.store.format.rows import Record
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.lazy import contents
from protocol.store.object_store.lazy.client import BlobKind, Progress
from protocol.store.object_store.lazy.contents import BlobCache
from protocol.tree import Tree, TreeEntry
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from tests.support.lower_layers import NAME, make, opened

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
