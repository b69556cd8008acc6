"""The cache of blobs on disk: its bound, what is read from it, and writers that are killed or run at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import subprocess
from pathlib import Path

import pytest

from protocol.store.object_store.lazy.contents import BlobCache

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
    for worker in workers:
        worker.start()
    workers[0].kill()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers[1:]] == [0, 0]
    BlobCache(str(tmp_path), MOST_BYTES).put(blobs(1, 1000, seed=99))
    assert used_bytes(tmp_path) <= MOST_BYTES


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (BlobCache(str(tmp_path / "file"), MOST_BYTES), BlobCache(None, MOST_BYTES), BlobCache("/x", 0)):
        cache.put(blobs(1, 10))
        assert cache.get(blobs(1, 10)[0][0]) is None
        assert cache.size_bytes() == 0
