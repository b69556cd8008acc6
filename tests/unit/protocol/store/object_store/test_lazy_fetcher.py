"""Fetches of single blobs: few requests, collections meanwhile, and what is gone; the cache of blobs on disk."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import subprocess
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


MOST_BYTES = 4 << 20


def blobs(count: int, size: int, seed: int = 0) -> list[tuple[bytes, bytes]]:
    source = random.Random(seed)
    contents = [source.randbytes(size) for _ in range(count)]
    return [(hashlib.sha256(data).digest(), data) for data in contents]


def used_bytes(directory: Path) -> int:
    done = subprocess.run(["du", "-sk", directory], capture_output=True, check=True)
    return int(done.stdout.split()[0]) << 10


@pytest.mark.parametrize(("count", "size"), [(2000, 17), (400, 5000), (12, 1 << 20)])
def test_the_bound_holds_for_small_and_for_large_blobs(tmp_path: Path, count: int, size: int) -> None:
    cache = BlobCache(str(tmp_path / "cache"), MOST_BYTES)
    for blob in (found := blobs(count, size)):
        cache.put([blob])
    assert used_bytes(tmp_path / "cache") <= MOST_BYTES
    assert cache.get(found[-1][0]) == found[-1][1], "the newest blob was removed"
    assert any(cache.get(digest) is None for digest, _ in found)


def test_the_blobs_that_were_used_last_stay(tmp_path: Path) -> None:
    cache = BlobCache(str(tmp_path / "cache"), MOST_BYTES)
    (used, data), *others = blobs(40, 200_000)
    cache.put([(used, data)])
    for number, blob in enumerate(others):
        cache.put([blob])
        os.utime(tmp_path / "cache" / blob[0].hex()[:2] / blob[0].hex()[2:], (number, number))
        assert cache.get(used) == data


def test_a_damaged_blob_is_removed_and_not_returned(tmp_path: Path) -> None:
    cache = BlobCache(str(tmp_path), MOST_BYTES)
    ((digest, data),) = blobs(1, 1000)
    cache.put([(digest, data)])
    path = tmp_path / digest.hex()[:2] / digest.hex()[2:]
    for wrong in (b"", data[:-1], data + b"x", bytes(1000)):
        path.write_bytes(wrong)
        assert cache.get(digest) is None
        assert not path.exists()
        cache.put([(digest, data)])
        assert cache.get(digest) == data
    path.unlink()
    path.symlink_to("/dev/zero")
    assert cache.get(digest) is None


def test_what_a_killed_writer_left_counts_and_its_temporary_files_go(tmp_path: Path) -> None:
    cache = BlobCache(str(tmp_path), MOST_BYTES)
    cache.put(blobs(30, 100_000))
    (tmp_path / "lock").write_bytes(bytes(8) + b"\1")  # it was killed while it wrote
    part = tmp_path / "00"
    part.mkdir(exist_ok=True)
    (part / "torn.1-2.new").write_bytes(bytes(1 << 20))
    for blob in blobs(30, 100_000, seed=1):
        cache.put([blob])
    assert not list(tmp_path.rglob("*.new"))
    assert used_bytes(tmp_path) <= MOST_BYTES


def _write(directory: str, seed: int) -> None:
    cache = BlobCache(directory, MOST_BYTES)
    for blob in blobs(40, 100_000, seed):
        cache.put([blob])
        assert cache.get(blob[0]) in {blob[1], None}


def test_several_processes_keep_one_bound(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("spawn").Process(target=_write, args=(str(tmp_path), n)) for n in range(3)]
    for writer in workers:
        writer.start()
    workers[0].kill()
    for writer in workers:
        writer.join()
    assert [worker.exitcode for worker in workers[1:]] == [0, 0]
    BlobCache(str(tmp_path), MOST_BYTES).put(blobs(1, 1000, seed=99))
    assert used_bytes(tmp_path) <= MOST_BYTES


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (BlobCache(str(tmp_path / "file"), MOST_BYTES), BlobCache(None, MOST_BYTES), BlobCache("/x", 0)):
        cache.put(blobs(1, 10))
        assert cache.get(blobs(1, 10)[0][0]) is None
        assert cache.size_bytes() == 0
