"""Taking the state of a directory: what is kept, what is read again, and what is named."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.diff.tree_diff import changes
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError
from protocol.linux.statx import is_racy
from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store, TreeSource, default_directory
from protocol.store.format.blobs import LARGE_BYTES
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest, digest_of
from protocol.tree import filled, names_in
from tests.support.rights import need_root
from tests.support.trees import DictTree
from tests.unit.protocol.store.states import Chaos, state_of, state_of_tree

LONG_AGO_NS = 10**18


def settle(root: Path) -> None:
    """Let the clock leave the tick in which the files were made: then they are not read again for that."""
    newest = max(os.lstat(os.path.join(at, name)).st_ctime_ns for at, b, n in os.walk(root) for name in [".", *b, *n])
    while is_racy(newest, time.time_ns()):
        time.sleep(0.001)


def reads_of(store: Store, root: Path, name: str) -> int:
    """How many bytes a snapshot reads."""
    told: list[int] = [0]
    store.take("w", name, DirectorySource(root), progress=lambda files, read: told.append(read))
    return told[-1]


def test_a_snapshot_has_everything_that_was_there(store: Store, root: Path) -> None:
    (root / ".git" / "objects").mkdir(parents=True)
    (root / ".git" / "config").write_bytes(b"[core]")
    (root / ".gitignore").write_text("ignored\n")
    (root / "ignored").write_bytes(b"kept")
    (root / "empty").mkdir()
    (root / "program").write_bytes(b"#!")
    os.chmod(root / "program", 0o4755)
    os.setxattr(root / "program", "user.note", b"value")
    os.symlink("nowhere", root / "link")
    os.mkfifo(root / "fifo")
    os.link(root / "program", root / "same")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
    os.utime(root / "empty", ns=(1, 123_456_789))
    wanted = state_of(root)

    info = store.take("w", "all", DirectorySource(root), tag="a remark")

    with store.tree("w", "all") as tree:
        assert state_of_tree(tree) == wanted
    assert (info.name, info.serial, info.tag, info.kind, info.unstable) == ("all", 1, "a remark", "user", ())
    assert (info.files, info.directories) == (7, 3)
    assert info.size_bytes == 6 + 8 + 4 + 2


@pytest.mark.parametrize("mtime_ns", [-1 << 63, (-1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1 << 80])
def test_mtimes_of_any_year_are_kept(store: Store, root: Path, mtime_ns: int) -> None:
    source = DictTree({b"d/a": b"1", b"d/b": b"2"})
    for path in (b"", b"d", b"d/a"):
        source.by_path[path] = replace(source.by_path[path], mtime_ns=mtime_ns)

    store.take("w", "s", TreeSource(source))

    with store.tree("w", "s") as tree:
        assert [entry.mtime_ns for entry in tree.walk()] == [mtime_ns, mtime_ns, mtime_ns, 0]
        assert not list(changes(tree, source))
    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))  # the file system may clamp the times
    store.take("w", "again", DirectorySource(root))
    assert (root / "d/a").read_bytes() == b"1"


def test_the_store_is_private_and_says_its_format(store: Store, root: Path) -> None:
    store.take("w", "s", DirectorySource(root))

    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700
    assert Path(store.directory, "format").read_text() == "vfsd store 1\n"


def test_a_store_of_another_format_is_refused(store: Store, root: Path) -> None:
    store.take("w", "s", DirectorySource(root))
    Path(store.directory, "format").write_text("vfsd store 99\n")

    with pytest.raises(OSError, match=r"unknown format .*99"):
        Store(store.directory).take("w", "t", DirectorySource(root))
    Path(store.directory, "format").write_text("vfsd store 1\n")


def test_a_directory_with_other_things_in_it_does_not_become_a_store(tmp_path: Path, root: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_bytes(b"mine")

    with pytest.raises(FileExistsError, match="not a snapshot store"):
        Store(tmp_path / "home").take("w", "s", DirectorySource(root))
    assert os.listdir(tmp_path / "home") == ["letter"]


@pytest.mark.parametrize("way", ["inside", "itself", "symlink"])
def test_the_store_cannot_lie_in_what_it_keeps(root: Path, tmp_path: Path, way: str) -> None:
    places = {"inside": root / "deep" / "store", "itself": root, "symlink": tmp_path / "link" / "store"}
    os.symlink(root, tmp_path / "link")

    with pytest.raises(OSError, match="inside the directory"):
        Store(places[way]).take("w", "s", DirectorySource(root))
    assert os.listdir(root) == []


def test_where_the_store_is_by_default() -> None:
    assert default_directory({"VFSD_STORE_DIR": "/s"}) == "/s"
    assert default_directory({"XDG_STATE_HOME": "/state"}) == "/state/vfsd/store"
    assert default_directory({"XDG_STATE_HOME": "relative"}).endswith("/.local/state/vfsd/store")


def test_a_name_is_given_once_in_a_workspace_and_serials_are_never_given_again(store: Store, root: Path) -> None:
    source = DirectorySource(root)
    store.take("w", "a", source)
    with pytest.raises(SnapshotExistsError):
        store.take("w", "a", source)
    assert store.take("other", "a", source).serial == 1
    store.drop("w", "a")
    store.collect_garbage()
    assert store.take("w", "a", source).serial == 2
    with pytest.raises(SnapshotNotFoundError):
        store.drop("w", "b")


def test_what_is_unchanged_is_not_read_again(store: Store, root: Path) -> None:
    for number in range(20):
        (root / f"{number}").write_bytes(b"%d" % number * 100)
    settle(root)
    assert reads_of(store, root, "first") > 2000
    (root / "7").write_bytes(b"x" * 10)
    settle(root)

    assert reads_of(store, root, "second") == 10
    assert reads_of(Store(store.directory), root, "by another process") == 0


def test_a_file_changed_in_the_tick_of_its_last_look_is_read_again(store: Store, root: Path) -> None:
    for number in range(30):
        (root / "file").write_bytes(b"%02d" % number)
        store.take("w", f"{number}", DirectorySource(root))

    for number in range(30):
        with store.tree("w", f"{number}") as tree:
            assert tree.read(b"file", 0, 100) == b"%02d" % number


def test_a_change_that_keeps_size_and_mtime_is_seen(store: Store, root: Path) -> None:
    file = root / "file"
    file.write_bytes(b"old")
    os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    settle(root)
    store.take("w", "before", DirectorySource(root))
    file.write_bytes(b"new")
    os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    store.take("w", "after", DirectorySource(root))

    with store.tree("w", "after") as tree:
        assert tree.read(b"file", 0, 3) == b"new"


def test_equal_contents_are_kept_once_whoever_has_them(store: Store, root: Path) -> None:
    content = os.urandom(LARGE_BYTES // 2)
    for number in range(10):
        (root / f"{number}").write_bytes(content)
    store.take("w", "s", DirectorySource(root))
    store.take("another workspace", "s", DirectorySource(root))

    assert _size(store) < 2 * len(content)


def test_a_sparse_file_costs_what_is_written(store: Store, root: Path) -> None:
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"in the middle")
    store.take("w", "s", DirectorySource(root))

    assert _size(store) < 1 << 20
    with store.tree("w", "s") as tree:
        assert tree.entry(b"sparse").size == 1 << 40
        assert tree.read(b"sparse", (1 << 39) - 3, 19) == b"\0\0\0in the middle\0\0\0"


def _size(store: Store) -> int:
    paths = [os.path.join(at, name) for at, _, names in os.walk(store.directory) for name in names]
    return sum(os.stat(path).st_blocks * 512 for path in paths)


def test_what_changes_all_the_time_is_kept_and_named(store: Store, root: Path) -> None:
    file, stop = root / "busy", threading.Event()
    file.write_bytes(b"a" * 200_000)
    (root / "quiet").write_bytes(b"quiet")

    def write() -> None:
        with open(file, "r+b", buffering=0) as opened:
            while not stop.is_set():
                opened.seek(0)
                opened.write(os.urandom(200_000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        infos = [store.take("w", f"{number}", DirectorySource(root)) for number in range(20)]
    finally:
        stop.set()
        writer.join()
    # Whether a take meets the writer is chance; but it never names anything else, and keeps every file.
    assert {path for info in infos for path in info.unstable} <= {b"busy"}
    for info in infos:
        with store.tree("w", info.name) as tree:
            assert names_in(tree, b"") == [b"busy", b"quiet"]
            assert len(b"".join(filled(tree.chunks(b"busy")))) == tree.entry(b"busy").size


def test_files_that_come_and_go_meanwhile_break_no_snapshot(store: Store, root: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        chaos = Chaos(root, 3)
        while not stop.is_set():
            chaos.change(5)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(60):
            store.take("w", f"{number}", DirectorySource(root), unreadable="skip")
    finally:
        stop.set()
        thread.join()
    store.take("w", "quiet", DirectorySource(root))
    with store.tree("w", "quiet") as tree:
        assert state_of_tree(tree) == state_of(root)


def test_what_cannot_be_read_fails_a_snapshot_or_is_named(root: Path, tmp_path: Path) -> None:
    (root / "open").write_bytes(b"open")
    (root / "secret").write_bytes(b"secret")
    os.chmod(root / "secret", 0)
    (root / "cellar").mkdir(mode=0o700)
    need_root()
    os.chmod(tmp_path, 0o755)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    for at in [tmp_path, *tmp_path.parents]:
        if at.stat().st_mode & 0o055 != 0o055:
            os.chmod(at, at.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        store = Store(tmp_path / "theirs" / "store")
        with pytest.raises(PermissionError, match="cannot be read"):
            store.take("w", "s", DirectorySource(root))
        assert store.snapshots("w") == []
        info = store.take("w", "s", DirectorySource(root), unreadable="skip")
        assert sorted(info.unreadable) == [b"cellar", b"secret"]
        with store.tree("w", "s") as tree:
            assert names_in(tree, b"") == [b"cellar", b"open", b"secret"]
            with pytest.raises(PermissionError):
                tree.read(b"secret", 0, 1)
    finally:
        os.seteuid(0)


def test_a_name_that_is_gone_when_it_is_looked_at_is_not_there(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a").write_bytes(b"1")
    (root / "c").write_bytes(b"3")
    listdir = os.listdir

    def listed(place: int | str) -> list[str]:
        return [*listdir(place), *(("b", "d") if isinstance(place, int) else ())]

    monkeypatch.setattr(os, "listdir", listed)
    info = store.take("w", "s", DirectorySource(root))
    monkeypatch.undo()

    assert (info.files, info.unstable, info.unreadable) == (2, (), ())
    with store.tree("w", "s") as tree:
        assert state_of_tree(tree) == state_of(root)


def test_a_tree_can_be_kept_too(store: Store) -> None:
    tree = DictTree({b"a/b": b"content", b"a/link": "b", b"empty": None, b"large": b"x" * (LARGE_BYTES + 1)})

    info = store.take("container:c", "s", TreeSource(tree))

    assert (info.files, info.directories, info.size_bytes) == (3, 2, 7 + LARGE_BYTES + 1)
    with store.tree("container:c", "s") as kept:
        assert not list(changes(tree, kept))


def test_two_snapshots_are_compared_without_looking_at_what_is_equal(store: Store, root: Path) -> None:
    for number in range(100):
        (root / f"{number}").mkdir()
        (root / f"{number}" / "file").write_bytes(b"%d" % number)
    store.take("w", "a", DirectorySource(root))
    (root / "50" / "file").write_bytes(b"other")
    store.take("w", "b", DirectorySource(root))

    with store.tree("w", "a") as old, store.tree("w", "b") as new:
        assert new.touched(old) == [b"50/file"]
        assert [(change.path, change.kind) for change in changes(old, new)] == [(b"50/file", "modified")]


def test_the_live_state_is_compared_without_reading_what_is_unchanged(store: Store, root: Path) -> None:
    (root / "large").write_bytes(os.urandom(1 << 20))
    (root / "small").write_bytes(b"small")
    settle(root)
    store.take("w", "s", DirectorySource(root))
    (root / "small").write_bytes(b"other")
    told: list[int] = []

    live_tree = store.live_tree("w", DirectorySource(root), progress=lambda files, read: told.append(read))
    with store.tree("w", "s") as old, live_tree as new:
        assert [(change.path, change.kind) for change in changes(old, new)] == [(b"small", "modified")]
        assert new.read(b"small", 0, 10) == b"other"
    assert told[-1] < 100


def test_directories_far_below_others_are_kept_and_come_back(store: Store, root: Path) -> None:
    depth = 400
    made = bottom = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=bottom)
        made, bottom = bottom, os.open("d", os.O_RDONLY, dir_fd=bottom)
        os.close(made)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=bottom))
    os.close(bottom)

    info = store.take("w", "deep", DirectorySource(root))

    assert (info.files, info.directories) == (1, depth)
    shutil.rmtree(root / "d")
    store.restore("w", DirectoryTarget(root), RestoreRequest("deep", safety=None))
    assert store.take("w", "again", DirectorySource(root)).directories == depth


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * CHUNK_BYTES)), max_size=5), st.integers(0, 2**32))
def test_a_content_has_one_digest_wherever_its_holes_are(parts: list[tuple[bool, int]], seed: int) -> None:
    with_holes, without = ContentDigest(), ContentDigest()
    whole = b""
    for is_hole, length in parts:
        data = bytes(length) if is_hole else b"%d" % seed * (length // 10)
        if is_hole:
            with_holes.feed_hole(length)
        else:
            with_holes.feed(data)
        whole += data
    without.feed(whole)

    assert with_holes.digest() == without.digest()
    if len(whole) <= CHUNK_BYTES:
        assert without.digest() == digest_of(whole)


def test_a_stat_cache_that_was_cut_short_tells_nothing_wrong(store: Store, root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "was").write_bytes(b"was")
    (root / "plain").mkdir()
    settle(root)
    store.take("w", "first", DirectorySource(root))
    cache = next(Path(store.directory, "workspaces").glob("*/cache"))
    before = cache.stat().st_size
    (root / "a" / "b" / "new").write_bytes(b"new")
    (root / "a" / "b" / "was").unlink()
    (root / "a").chmod(0o700)
    (root / "plain").chmod(0o711)
    settle(root)
    store.take("w", "second", DirectorySource(root))
    log = cache.read_bytes()

    for length in range(before, len(log), 40):
        cache.write_bytes(log[:length])
        with Store(store.directory) as other:
            other.take("w", f"cut {length}", DirectorySource(root))
            with other.tree("w", f"cut {length}") as tree:
                assert state_of_tree(tree) == state_of(root)


def test_directories_that_nest_too_deep_are_left_out_and_named(store: Store, root: Path, many_open_files: None) -> None:
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(2_000):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(OSError, match="cannot be read") as caught:
        store.take("w", "fails", DirectorySource(root))
    assert caught.value.errno == errno.ELOOP
    info = store.take("w", "s", DirectorySource(root), unreadable="skip")
    assert [path.count(b"/") for path in info.unreadable] == [1_700]
    shutil.rmtree(root / "d")


def test_a_store_whose_disk_is_gone_is_an_error_not_an_empty_store(store: Store, root: Path, tmp_path: Path) -> None:
    store.take("w", "s", DirectorySource(root))
    os.rename(store.directory, tmp_path / "unmounted")

    for call in (
        lambda: store.snapshots("w"),
        lambda: store.interrupted("w"),
        lambda: store.take("w", "t", DirectorySource(root)),
    ):
        with pytest.raises(OSError, match="the snapshot store is gone") as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, store.directory)

    os.rename(tmp_path / "unmounted", store.directory)
    assert [info.name for info in store.snapshots("w")] == ["s"]
