"""Stores, object stores, archives and journals that an earlier vfsd wrote can be read and continued.

`older_files.tar.xz` has one of each, written by the vfsd of commit ffce5ef2.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from protocol.archive import MountedArchive, open_archive
from protocol.backends.memory import MemoryVolume
from protocol.journal.directory import Journal
from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.object_store import RemoteStore, open_storage
from protocol.tree import Tree, filled
from protocol.volume import ROOT_INODE, SUPERUSER

KEY = "host:/srv/x"
TEXT = b"a text\n" * 9
SPARSE_BYTES = (9 << 20) + 3
FILES = {
    b"text": TEXT,
    b"directory/linked": TEXT,
    b"directory/below": b"below",
    b"empty": b"",
    b"large": b"large" * 70_000,
    b"not utf-8 \xff": b"name",
    b"sparse": bytes(9 << 20) + b"end",
}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    # By tar: extractall has filters from Python 3.11.4 on only.
    archive = Path(__file__).with_name("older_files.tar.xz")
    subprocess.run(["tar", "-xf", archive, "--no-same-owner", "-C", tmp_path], check=True)
    (tmp_path / "written" / "store").chmod(0o700)
    return tmp_path / "written"


def check_tree(tree: Tree) -> None:
    entries = {entry.path: entry for entry in tree.walk()}
    others = {b"", b"directory", b"fifo", b"symlink"}
    assert entries.keys() == FILES.keys() | others
    for path, content in FILES.items():
        assert b"".join(filled(tree.chunks(path))) == content
    assert tree.entry(b"symlink").target == b"directory/below"
    assert entries[b"text"].xattrs == {b"user.note": b"value"}
    assert entries[b"text"].inode == entries[b"directory/linked"].inode != 0
    assert entries[b"empty"].mode & 0o7777 == 0o640
    assert 1_600_000_000_123_456_789 <= entries[b"large"].mtime_ns < 1_600_000_000_123_456_999


def test_a_store_is_read_checked_restored_and_continued(older: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Store(older / "store") as store:
        assert [(info.name, info.tag) for info in store.snapshots(KEY)] == [("one", "t"), ("two", None)]
        assert store.check().ok
        with store.tree(KEY, "one") as tree, store.tree(KEY, "two") as later:
            check_tree(tree)
            assert set(later.touched(tree) or ()) >= {b"text", b"empty"}
        mounted = store.mounted(KEY, "one")
        assert all(entry.ctime_ns for entry in mounted.entries(b""))
        mounted.close()
        problems = store.restore(KEY, DirectoryTarget(str(root)), RestoreRequest("one", safety=None)).problems
        # The files belong to root.
        assert os.geteuid() != 0 or not problems
        assert all(problem.reason.startswith("owner 0:0") for problem in problems)
        assert {path: (root / path.decode("utf-8", "surrogateescape")).read_bytes() for path in FILES} == FILES
        store.take(KEY, "three", DirectorySource(str(root)))
        store.drop(KEY, "one")
        store.collect_garbage()
        assert store.check().ok
        with store.tree(KEY, "three") as tree:
            check_tree(tree)


def test_an_object_store_is_read_checked_and_continued(older: Path, tmp_path: Path) -> None:
    with RemoteStore(open_storage(f"file://{older}/remote")) as remote, Store(tmp_path / "local") as local:
        assert remote.check().ok
        remote.pull(local, remote.get("one"), workspace="w")
        with local.tree("w", "one") as tree:
            check_tree(tree)
        assert not remote.push(local, "w", "one").uploaded_contents
        assert remote.push(local, "w", "one", name="again").is_new


def test_an_archive_is_read(older: Path) -> None:
    with open_archive(older / "archive.zip") as tree:
        check_tree(tree)
    mounted = MountedArchive(str(older / "archive.zip"))
    for path, content in FILES.items():
        assert mounted.read(path, 0, SPARSE_BYTES) == content
    assert mounted.entry(b"symlink").target == b"directory/below"
    mounted.close()


def test_a_journal_is_replayed_and_continued(older: Path) -> None:
    (older / "journal").chmod(0o700)
    below = bytearray(b"x" * 250_000)
    below[100_000:100_050] = b"y" * 50
    below[4096 : 4096 + 8192] = bytes(8192)
    for name in (b"first", b"second"):
        files, journal = Journal.resume(str(older / "journal"), "no")
        assert files.identity == {"backend": "memory", "workspace": "w"}
        volume = MemoryVolume()
        volume.replay(files.batches())
        volume.check_invariants()
        with volume.tree() as tree, volume.tree("one") as before:
            assert tree.read(b"linked", 0, 300_000) == tree.read(b"directory/below", 0, 300_000) == below
            assert tree.read(b"directory/moved", 0, 300_000)[: len(TEXT)] == TEXT
            assert tree.entry(b"directory/moved").xattrs == {b"user.note": b"value"}
            assert tree.entry(b"symlink").target == b"directory/below"
            assert tree.entry(b"by request").is_dir
            assert before.read(b"linked", 0, 300_000) == b"x" * 300_000
            assert before.read(b"text", 0, 300_000) == TEXT
        volume.keep_journal(journal, is_new=False)
        volume.connect(is_known=False)
        volume.mkdir(ROOT_INODE, name, 0o755, SUPERUSER)
        journal.close()
        assert name != b"second" or b"first" in {entry.name for entry in volume.readdir(ROOT_INODE, 0)}
