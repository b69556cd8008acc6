"""Fetches of single blobs: few requests, collections meanwhile, and what is gone."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, decode_listing
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.lazy import contents as contents_module
from protocol.store.object_store.lazy.contents import BlobCache
from protocol.store.object_store.lazy.fetcher import Fetcher, LazyIndex
from protocol.store.object_store.lazy.helper import Prefetch
from protocol.store.object_store.packs import IndexCache, RemotePacks
from protocol.store.object_store.storage import ObstoreStorage
from tests.unit.protocol.store.object_store import worker

KEY = worker.KEY
GRACE_S = 0.2
CACHE_BYTES = 16 << 20


@contextmanager
def fetcher_of(url: str) -> Iterator[tuple[Fetcher, list[str]]]:
    """A fetcher without a cache on disk, and the keys of its requests for ranges."""
    storage = open_storage(url)
    ranges: list[str] = []
    read_range = storage.read_range

    def counted(key: str, start: int, length: int) -> Future[bytes]:
        ranges.append(key)
        return read_range(key, start, length)

    storage.read_range = counted  # type: ignore[method-assign]
    try:
        yield new_fetcher(storage), ranges
    finally:
        storage.close()


def new_fetcher(storage: ObstoreStorage, cache: BlobCache | None = None) -> Fetcher:
    index = LazyIndex(storage, RemotePacks(storage, IndexCache(None)))
    return Fetcher(storage, index, cache or BlobCache(None, 0), lambda work: work())


def prefetched(url: str, top: Row, cache: BlobCache) -> str:
    """The last state of a prefetch into `cache`."""
    storage = open_storage(url)
    try:
        index = LazyIndex(storage, RemotePacks(storage, IndexCache(None)))
        fetcher = Fetcher(storage, index, cache, lambda work: work())
        prefetch = Prefetch(fetcher, index, cache, CACHE_BYTES, lambda: None)
        prefetch.run(top)
        return prefetch.state
    finally:
        storage.close()


def pushed(url: str, local: Store, root: Path, name: str) -> Row:
    local.take(KEY, name, DirectorySource(root))
    with RemoteStore(open_storage(url), grace_s=GRACE_S) as remote:
        remote.push(local, KEY, name)
        return remote.get(name).record.root


def contents(fetcher: Fetcher, directory: Row) -> Iterator[tuple[bytes, bytes]]:
    """The digest and the content of each file, one after the other, in the order of a walk."""
    (listing,) = fetcher.fetch("tree", [directory.content])
    for row in decode_listing(listing):
        if row.is_dir:
            yield from contents(fetcher, row)
        else:
            (data,) = fetcher.fetch("data", [row.content])
            yield row.content, data


def fill(root: Path) -> None:
    for number in range(300):
        (root / f"d{number % 10}").mkdir(exist_ok=True)
        (root / f"d{number % 10}" / f"f{number:03}").write_bytes(b"%06d" % number * 500)


def test_a_walk_takes_few_requests(url: str, local: Store, root: Path) -> None:
    fill(root)
    top = pushed(url, local, root, "one")
    with fetcher_of(url) as (fetcher, ranges):
        found = dict(contents(fetcher, top))
    assert len(found) == 300
    assert len(ranges) <= 10  # 900 KB of contents, 11 listings, two indexes


def test_a_collection_that_moves_contents_does_not_disturb(url: str, local: Store, root: Path) -> None:
    fill(root)
    pushed(url, local, root, "one")
    for path in root.rglob("f1*"):
        path.unlink()
    top = pushed(url, local, root, "two")
    with fetcher_of(url) as (fetcher, _):
        walk = contents(fetcher, top)
        begun = [next(walk)]
        with RemoteStore(open_storage(url)) as remote:
            before = {info.key for info in remote.storage.list("packs").result()}
            remote.drop(KEY, "one")
            for _ in range(3):
                time.sleep(GRACE_S * 1.2)
                remote.collect_garbage()
            assert before - {info.key for info in remote.storage.list("packs").result()}, "nothing was moved"
        assert len([*begun, *walk]) == 200


def test_what_was_collected_is_named_as_gone(url: str, local: Store, root: Path) -> None:
    (root / "f").write_bytes(b"content")
    top = pushed(url, local, root, "one")
    with fetcher_of(url) as (fetcher, _):
        (listing,) = fetcher.fetch("tree", [top.content])
        with RemoteStore(open_storage(url)) as remote:
            remote.drop(KEY, "one")
            for _ in range(3):
                time.sleep(GRACE_S * 1.2)
                remote.collect_garbage()
        with pytest.raises(DamagedError, match="gone from the object store"):
            fetcher.fetch("data", [decode_listing(listing)[0].content])
        assert fetcher.fetch("tree", [top.content]) == [listing]  # what is here stays


def test_a_prefetch_is_done_only_if_the_cache_has_everything(
    url: str, local: Store, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root)
    top = pushed(url, local, root, "one")
    assert prefetched(url, top, BlobCache(str(tmp_path / "good"), CACHE_BYTES)) == "done"

    (tmp_path / "file").touch()
    unwritable = BlobCache(str(tmp_path / "file" / "cache"), CACHE_BYTES)
    assert prefetched(url, top, unwritable) == "stopped: the cache cannot be written (Not a directory)"

    def full_disk(_path: str, data: bytes, *, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(contents_module, "write_atomically", full_disk)
    full = BlobCache(str(tmp_path / "full"), CACHE_BYTES)
    assert prefetched(url, top, full) == "stopped: the cache cannot be written (No space left on device)"

    small = BlobCache(str(tmp_path / "small"), 1 << 20)  # perhaps of another workspace
    assert prefetched(url, top, small) == "stopped: the cache is full; a larger --cache-bytes holds more"


class SlowCache(BlobCache):
    """A cache on a slow disk."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), CACHE_BYTES)
        self.is_asked = threading.Event()
        self.go_on = threading.Event()

    def put(self, blobs: Sequence[tuple[bytes, bytes]]) -> None:
        self.is_asked.set()
        self.go_on.wait()
        super().put(blobs)


def test_a_blob_that_another_call_is_fetching_is_in_the_cache_when_it_is_there(
    url: str, local: Store, root: Path, tmp_path: Path
) -> None:
    (root / "f").write_bytes(b"content")
    top = pushed(url, local, root, "one")
    cache = SlowCache(tmp_path / "cache")
    storage = open_storage(url)
    fetcher = new_fetcher(storage, cache)

    def fetch_and_look() -> bool:
        fetcher.fetch("tree", [top.content])
        return cache.has(top.content)

    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(fetch_and_look)
            cache.is_asked.wait()
            second = pool.submit(fetch_and_look)
            wait([second], timeout=0.2)  # by then it would have gone on without the cache
            cache.go_on.set()
            assert first.result()
            assert second.result()
    finally:
        storage.close()
