"""A store in a directory: `file:///DIRECTORY`."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from protocol.store import DamagedError, DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage

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
