"""A pushed snapshot returns as it was; only what is missing travels; names are not lost.

Also stores in a directory, and snapshots that somebody else wrote: with right digests, and hostile content.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from protocol.store import DamagedError, DirectorySource, Store
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest, digest_of, digest_of_chunks
from protocol.store.format.rows import Row, encode_listing
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.packs import Generation, decoded_name, encode_named, encoded_name
from protocol.store.object_store.transfer import Uploads
from protocol.tree import filled
from tests.unit.protocol.store.object_store.conftest import Open, taken

KEY = "host:/w"


def fill(root: Path, seed: int = 0) -> None:
    made = random.Random(seed)
    for number in range(40):
        (root / f"d{number % 4}").mkdir(exist_ok=True)
        (root / f"d{number % 4}" / f"f{number}").write_bytes(made.randbytes(made.randrange(3000)))
    (root / "medium").write_bytes(made.randbytes(300_000))
    (root / "large").write_bytes(made.randbytes(CHUNK_BYTES + 1000))
    os.truncate(root / "large", 4 * CHUNK_BYTES + 17)  # chunks that are a hole, and a short one
    os.symlink("medium", root / "link")
    os.link(root / "medium", root / "hard")
    (root / "empty").write_bytes(b"")
    os.setxattr(root / "medium", "user.x", b"value")
    os.mkfifo(root / "fifo")


def pulled(opened: Open, name: str, directory: Path) -> Store:
    store = Store(directory)
    remote = opened()
    remote.pull(store, remote.get(name), workspace="there", name=name)
    return store


def test_a_pulled_snapshot_equals_the_pushed_one(opened: Open, local: Store, root: Path, tmp_path: Path) -> None:
    fill(root)
    taken(local, "one", root)

    report = opened().push(local, KEY, "one")

    assert (report.name, report.is_new) == ("one", True)
    with pulled(opened, "one", tmp_path / "other") as other:
        with local.tree(KEY, "one") as here, other.tree("there", "one") as there:
            assert here.root == there.root
            assert b"".join(filled(here.chunks(b"large"))) == b"".join(filled(there.chunks(b"large")))
        assert other.check().damages == ()
        assert other.snapshot("there", "one").created_ns == local.snapshot(KEY, "one").created_ns
    assert opened().check().ok


@pytest.mark.parametrize("has_first", [True, False], ids=["same machine", "one without the earlier snapshot"])
def test_a_second_push_uploads_only_what_changed(
    opened: Open, local: Store, root: Path, tmp_path: Path, has_first: bool
) -> None:
    fill(root)
    taken(local, "one", root)
    first = opened().push(local, KEY, "one")
    (root / "d1" / "new").write_bytes(b"new" * 100)
    with Store(local.directory if has_first else tmp_path / "elsewhere") as store:
        taken(store, "two", root)

        second = opened().push(store, KEY, "two")
        again = opened().push(store, KEY, "two")

    # The file; the listings of its directory and of the root; the inode listings of both.
    assert second.uploaded_contents == 5
    assert second.uploaded_bytes < first.uploaded_bytes / 100
    assert (again.is_new, again.uploaded_bytes) == (False, 0)
    assert opened().check().ok


def test_a_pull_downloads_only_what_is_missing(opened: Open, local: Store, root: Path) -> None:
    fill(root)
    taken(local, "one", root)
    opened().push(local, KEY, "one")
    (root / "d1" / "new").write_bytes(b"new" * 100)
    taken(local, "two", root)
    opened().push(local, KEY, "two")
    local.drop(KEY, "two")
    local.collect_garbage()
    seen: list[tuple[int, int]] = []

    remote = opened()
    remote.pull(local, remote.get("two"), workspace=KEY, progress=lambda done, total: seen.append((done, total)))

    assert seen[-1] == (300, 300)


def test_a_name_with_another_state_is_refused_unless_it_is_replaced(opened: Open, local: Store, root: Path) -> None:
    (root / "file").write_bytes(b"first")
    taken(local, "one", root)
    opened().push(local, KEY, "one")
    (root / "file").write_bytes(b"second")
    taken(local, "two", root)

    with pytest.raises(FileExistsError, match="--replace"):
        opened().push(local, KEY, "two", name="one")
    assert opened().push(local, KEY, "two", name="one", replace=True).generation == 2
    with local.tree(KEY, "two") as tree:
        assert opened().get("one").record.root == tree.root


def test_a_dropped_name_is_gone_and_can_be_used_again(opened: Open, local: Store, root: Path) -> None:
    taken(local, "one", root)
    opened().push(local, KEY, "one")
    opened().drop(KEY, "one")

    with pytest.raises(FileNotFoundError, match="no snapshots"):
        opened().get("one")
    assert opened().workspaces() == {}
    assert opened().push(local, KEY, "one").generation == 3
    assert [info.name for info in opened().snapshots(KEY)] == ["one"]


def test_a_missing_name_is_answered_with_those_that_exist(opened: Open, local: Store, root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no snapshot store here"):
        opened().get("one")
    taken(local, "one", root)
    opened().push(local, KEY, "one")

    with pytest.raises(FileNotFoundError, match="no snapshot other; it has one"):
        opened().get("other")
    assert opened().get(None).name == "one"


@pytest.mark.parametrize("name", ["simple", "with space", "a#b=c%2F", "é\U0001f600", ".", "..", "...", "=41"])
def test_a_name_survives_its_encoding_in_a_key(name: str) -> None:
    encoded = encoded_name(name)
    assert decoded_name(encoded) == name
    assert set(encoded) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-=")


def test_names_with_special_characters_are_stored(opened: Open, local: Store, root: Path) -> None:
    for name in ("with space", "a#b=c%2F", "é", ".", ".."):
        taken(local, name, root)
        opened().push(local, KEY, name)
        assert opened().get(name).name == name


def test_a_wrong_url_or_option_is_named() -> None:
    for url in ("ftp://x/y", "s3:///"):
        with pytest.raises(OSError, match=r"URL|cannot open") as caught:
            open_storage(url)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="wrong_option"):
        open_storage("s3://x/y", {"wrong_option": "1"})


@pytest.mark.parametrize("size", [CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES + 9])
@pytest.mark.parametrize("data", [(0,), (1,), (), (0, 1)])
def test_a_chunk_map_has_the_digest_of_its_content(size: int, data: tuple[int, ...]) -> None:
    digest = ContentDigest(keeps_chunks=True)
    for number in range(-(-size // CHUNK_BYTES)):
        length = min(CHUNK_BYTES, size - number * CHUNK_BYTES)
        digest.feed(bytes([number + 1]) * length) if number in data else digest.feed_hole(length)
    whole = digest.digest()
    assert digest_of_chunks(size, digest.chunks) == whole


def test_a_snapshot_may_be_dropped_while_it_is_pushed(opened: Open, local: Store, root: Path) -> None:
    (root / "file").write_text("content")
    taken(local, "temporary", root)
    published: list[bool] = []
    remote = opened()

    def leased() -> None:
        local.drop(KEY, "temporary")
        assert local.collect_garbage().kept_contents > 0  # the lease keeps them

    start = remote.start_push()
    report = remote.push(
        local, KEY, "temporary", name="kept", start=start, leased=leased,
        published=lambda: published.append(remote.generation("kept") is not None),
    )  # fmt: skip

    assert (report.is_new, published) == (True, [True])
    assert local.layout.dropped_packs() == 1
    assert remote.check().ok
    local.collect_garbage()
    assert (local.check().contents, local.layout.dropped_packs()) == (0, 0)


obstore = pytest.importorskip("obstore")


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b"])
def test_a_path_that_a_url_parser_would_change_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="cannot have") as caught:
        open_storage(f"file://{tmp_path}/{name}")
    assert caught.value.errno == errno.EINVAL
    assert not list(tmp_path.iterdir())


def test_a_directory_with_other_files_does_not_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "passwd").touch()
    with pytest.raises(OSError, match="not a store: choose an empty one") as caught:
        open_storage(f"file://{tmp_path}")
    assert caught.value.errno == errno.ENOTEMPTY
    assert [each.name for each in tmp_path.iterdir()] == ["passwd"]


def test_a_full_disk_is_named_and_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    async def put(*_arguments: object, **_options: object) -> None:
        attempts.append(1)
        raise obstore.exceptions.GenericError(
            "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"
        )

    monkeypatch.setattr(obstore, "put_async", put)
    storage = open_storage(f"file://{tmp_path}/store")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            storage.create("key", b"data").result()
    finally:
        storage.close()
    assert caught.value.errno == errno.ENOSPC
    assert len(attempts) == 1


def test_a_name_that_is_too_long_for_the_store_is_named_and_not_retried(tmp_path: Path, local: Store) -> None:
    (tmp_path / "root").mkdir()
    local.take("host:/w", "one", DirectorySource(tmp_path / "root"))
    with RemoteStore(open_storage(f"file://{tmp_path}/store", patience_s=3600)) as remote:
        with pytest.raises(OSError, match="the name is too long") as caught:
            remote.push(local, "host:/w", "one", name="x" * 300)
        assert caught.value.errno == errno.ENAMETOOLONG
        assert remote.all() == []


def test_a_directory_that_is_missing_is_made_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no snapshot store here; `vfsd push` makes one"):
        open_storage(f"file://{tmp_path}/store", makes_directory=False)
    assert not (tmp_path / "store").exists()
    open_storage(f"file://{tmp_path}/store").close()
    open_storage(f"file://{tmp_path}/store", makes_directory=False).close()


def test_an_older_snapshot_is_not_taken_for_the_newest_if_a_record_is_damaged(tmp_path: Path, local: Store) -> None:
    (tmp_path / "root").mkdir()
    with RemoteStore(open_storage(f"file://{tmp_path}/store")) as remote:
        for name in ("old", "new"):
            local.take("host:/w", name, DirectorySource(tmp_path / "root"))
            remote.push(local, "host:/w", name)
        (record,) = (tmp_path / "store/names/new").iterdir()
        record.write_bytes(record.read_bytes()[:-1])
        with pytest.raises(DamagedError, match=r"record of new is damaged.*#NAME takes another.*store check --store"):
            remote.get(None)
        assert remote.get("old").name == "old"
        remote.drop("host:/w", "old")
        with pytest.raises(DamagedError, match=r"record of new is damaged; `vfsd store check"):
            remote.get(None)


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


ELSEWHERE = [b"../evil", b"..", b".", b"", b"/etc/evil", b"a/b", b"a\0b", b"x" * 256]


@pytest.mark.parametrize("names", [*([name] for name in ELSEWHERE), [b"a", b"a"]], ids=repr)
def test_a_name_that_leads_elsewhere_or_is_there_twice_is_damage(bucket: Bucket, names: list[bytes]) -> None:
    bucket.publish([file_row(name, b"evil") for name in names], b"evil")
    with pytest.raises(DamagedError, match="is not a listing"):
        bucket.pull()
    report = bucket.remote.check()
    assert [damage.snapshots for damage in report.damages] == [((KEY, "evil"),)]
    with pytest.raises(DamagedError):
        bucket.remote.collect_garbage()
    bucket.remote.drop(KEY, "evil")
    assert bucket.remote.check().ok


@pytest.mark.parametrize("size", [3, 1 << 20, 1 << 62])
def test_a_size_that_its_content_has_not_is_damage_and_fills_no_disk(bucket: Bucket, size: int) -> None:
    bucket.publish([file_row(b"a", b"evil", size)], b"evil")
    with pytest.raises(DamagedError):
        bucket.pull()
    assert size <= CHUNK_BYTES or not bucket.remote.check().ok
