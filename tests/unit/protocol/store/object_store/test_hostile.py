"""Snapshots that somebody else wrote: with right digests, and with content that no vfsd writes."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from protocol.store import DamagedError, DirectorySource, Store
from protocol.store.format.digests import CHUNK_BYTES, digest_of
from protocol.store.format.rows import Row, encode_listing
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.packs import Generation, encode_named
from protocol.store.object_store.push import Uploads

KEY = "host:/w"


@dataclass
class Bucket:
    """A store that has the snapshot "one"."""

    remote: RemoteStore
    directory: Path

    def publish(self, rows: list[Row], *others: bytes) -> None:
        """Publish the snapshot "evil" with this listing; `others` are contents."""
        listing = encode_listing(rows)
        uploads = Uploads(self.remote.storage, self.remote.packs, lambda _: None)
        uploads.add("tree", digest_of(listing), listing)
        for data in others:
            uploads.add("data", digest_of(data), data)
        uploads.finish()
        record = self.remote.get("one").record
        root = structs.replace(record.root, content=digest_of(listing))
        data = encode_named(structs.replace(record, name="evil", root=root))
        assert self.remote.storage.create(Generation("evil", 1).key, data).result()

    def pull(self) -> None:
        """Pull "evil" into a new local store, and require that it has nothing of it."""
        with Store(self.directory / "pulled") as local:
            try:
                self.remote.pull(local, self.remote.get("evil"), workspace="x")
            finally:
                assert local.snapshots("x") == []


@pytest.fixture
def bucket(local: Store, root: Path, tmp_path: Path) -> Bucket:
    (root / "file").write_text("content")
    local.take(KEY, "one", DirectorySource(str(root)))
    remote = RemoteStore(open_storage(f"file://{tmp_path}/remote"))
    remote.push(local, KEY, "one")
    return Bucket(remote, tmp_path)


def file_row(name: bytes, data: bytes, size: int | None = None) -> Row:
    return Row(name, stat.S_IFREG | 0o644, 0, 0, 0, len(data) if size is None else size, digest_of(data))


@pytest.mark.parametrize("name", [b"../evil", b"..", b".", b"", b"/etc/evil", b"a/b", b"a\0b", b"x" * 256], ids=repr)
def test_a_name_that_leads_elsewhere_is_damage(bucket: Bucket, name: bytes) -> None:
    bucket.publish([file_row(name, b"evil")], b"evil")
    with pytest.raises(DamagedError, match="is not a listing"):
        bucket.pull()
    report = bucket.remote.check()
    assert [damage.snapshots for damage in report.damages] == [((KEY, "evil"),)]
    with pytest.raises(DamagedError):
        bucket.remote.collect_garbage()
    bucket.remote.drop(KEY, "evil")
    assert bucket.remote.check().ok


def test_a_name_that_is_there_twice_is_damage(bucket: Bucket) -> None:
    bucket.publish([file_row(b"a", b"evil"), file_row(b"a", b"evil")], b"evil")
    with pytest.raises(DamagedError, match="is not a listing"):
        bucket.pull()


@pytest.mark.parametrize("size", [3, 1 << 20, 1 << 62])
def test_a_size_that_its_content_has_not_is_damage_and_fills_no_disk(bucket: Bucket, size: int) -> None:
    bucket.publish([file_row(b"a", b"evil", size)], b"evil")
    with pytest.raises(DamagedError):
        bucket.pull()
    assert size <= CHUNK_BYTES or not bucket.remote.check().ok
