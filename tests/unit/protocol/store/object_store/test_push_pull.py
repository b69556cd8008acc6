"""A pushed snapshot returns as it was; only what is missing travels; names are not lost."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest, digest_of_chunks
from protocol.store.object_store import open_storage
from protocol.store.object_store.packs import decoded_name, encoded_name
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


def test_a_second_push_uploads_only_what_changed(opened: Open, local: Store, root: Path) -> None:
    fill(root)
    taken(local, "one", root)
    first = opened().push(local, KEY, "one")
    (root / "d1" / "new").write_bytes(b"new" * 100)
    taken(local, "two", root)

    second = opened().push(local, KEY, "two")
    again = opened().push(local, KEY, "two")

    # The file; the listings of its directory and of the root; the inode listings of both.
    assert second.uploaded_contents == 5
    assert second.uploaded_bytes < first.uploaded_bytes / 100
    assert (again.is_new, again.uploaded_bytes) == (False, 0)
    assert opened().check().ok


def test_a_push_from_a_machine_without_the_earlier_snapshots_uploads_only_what_is_missing(
    opened: Open, local: Store, root: Path, tmp_path: Path
) -> None:
    fill(root)
    taken(local, "one", root)
    opened().push(local, KEY, "one")
    (root / "d1" / "new").write_bytes(b"new" * 100)

    with Store(tmp_path / "elsewhere") as elsewhere:
        elsewhere.take(KEY, "two", DirectorySource(root))
        assert opened().push(elsewhere, KEY, "two").uploaded_contents == 5
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
