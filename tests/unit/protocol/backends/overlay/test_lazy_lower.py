"""An overlay over a remote snapshot, where calls have to wait all the time, against one over the same snapshot here.

A call that raises NotReadyError has changed nothing: if one had, its repetition would give another result.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lazy_lower import LazyLower
from protocol.backends.overlay.lower import FIRST_NEW_NUMBER
from protocol.errors import NotReadyError
from protocol.store import Store
from protocol.store.format.rows import Row
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.lazy import contents
from protocol.store.object_store.lazy.blob_cache import BlobCache
from protocol.store.object_store.lazy.messages import BlobKind, Progress
from protocol.tree import TreeEntry
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
        self.progress = Progress(0, 0, 0, "")

    def fetch(self, _kind: BlobKind, digests: Sequence[bytes], _ahead: Sequence[bytes] = ()) -> Future[list[bytes]]:
        self.count += 1
        answer: Future[list[bytes]] = Future()
        answer.set_result([self._blobs[digest] for digest in digests])
        return answer

    def forking(self) -> Any:
        return nullcontext()

    def forked(self) -> None:
        pass

    def close(self) -> None:
        pass


def blobs_of(url: str) -> tuple[Row, dict[bytes, bytes]]:
    with RemoteStore(open_storage(url)) as remote:
        view = remote.packs.view()
        places = [item for pack in view.packs.values() for item in pack.places()]
        return remote.get(NAME).record.root, dict(remote.packs.blobs(places))


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
    root, blobs = blobs_of(url)
    client = DirectClient(blobs)
    lazy = LazyLower(contents.RemoteContents(client, BlobCache(None, 0)), root, url, "")  # type: ignore[arg-type]
    here = opened("snapshot", place)
    volumes = OverlayVolume(lazy, clock=clock), OverlayVolume(here, clock=clock)
    volumes[0].serve_here()
    try:
        yield *volumes, client
    finally:
        here.close()


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
