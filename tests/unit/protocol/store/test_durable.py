"""What is written is on the disk before it counts; on a full disk nothing is torn and the error names the place."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.directory import target as target_module
from protocol.store.format.blobs import LARGE_BYTES
from tests.support.host_directories import mounted_tmpfs
from tests.unit.protocol.store.states import differences, state_of, state_of_tree


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@dataclass
class Disk:
    """A disk whose power may fail after any system call: which changes would be lost now.

    `lost` has (what, path): "data" of files that were written, "names" of directories in which names changed.
    """

    root: str
    log: str
    is_watched: bool = False
    lost: set[tuple[str, str]] = field(default_factory=set)
    log_synced: bool = False
    calls: list[str] = field(default_factory=list)
    lost_when_log_went: set[tuple[str, str]] | None = None

    def written(self, path: str) -> None:
        if path.startswith(self.root):
            assert self.log_synced, "changed before the intent log was durable"
            self.lost.add(("data", path))

    def renamed(self, old: str, new: str) -> None:
        if new == self.log:
            assert ("data", old) not in self.lost
        if new.startswith(self.root):
            if ("data", old) in self.lost:
                self.lost.discard(("data", old))
                self.lost.add(("data", new))
            self.names_changed(new)

    def names_changed(self, path: str) -> None:
        if path == self.log:
            self.lost_when_log_went = set(self.lost)
        elif path.startswith(self.root):
            assert self.log_synced
            self.lost.discard(("names", path))  # of a directory that was removed
            self.lost.add(("names", os.path.dirname(path)))

    def fsynced(self, path: str) -> None:
        self.calls.append("fsync")
        self.lost -= {("data", path), ("names", path)}
        if path == os.path.dirname(self.log):
            self.log_synced = os.path.exists(self.log)

    def all_synced(self) -> None:
        self.calls.append("syncfs")
        self.lost.clear()


@pytest.fixture
def disk(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(str(root), os.path.join(store.layout.workspace("w"), "journal"))

    def at(path: Any, dir_fd: int | None) -> str:
        return os.path.join(path_of(dir_fd), os.fsdecode(path)) if dir_fd is not None else os.fsdecode(path)

    def watch(name: str, note: Callable[..., None]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if disk.is_watched:
                note(*arguments, **options)
            return result

        monkeypatch.setattr(os, name, call)

    watch("pwrite", lambda descriptor, *_: disk.written(path_of(descriptor)))
    watch("rename", lambda old, new, src_dir_fd=None, dst_dir_fd=None: disk.renamed(
        at(old, src_dir_fd), at(new, dst_dir_fd)))  # fmt: skip
    for name in ("unlink", "rmdir"):
        watch(name, lambda path, dir_fd=None: disk.names_changed(at(path, dir_fd)))
    watch("mkdir", lambda path, mode=0, dir_fd=None: disk.names_changed(at(path, dir_fd)))
    watch("fsync", lambda descriptor: disk.fsynced(path_of(descriptor)))
    real = target_module.renameat2

    def renameat2(source: int, name: bytes, target: int, new_name: bytes, flags: int) -> None:
        real(source, name, target, new_name, flags)
        disk.renamed(at(name, source), at(new_name, target))

    monkeypatch.setattr(target_module, "renameat2", renameat2)
    syncfs = target_module.syncfs
    monkeypatch.setattr(target_module, "syncfs", lambda descriptor: (syncfs(descriptor), disk.all_synced()))
    return disk


def fill(root: Path, files: int, directories: int = 1) -> None:
    for number in range(files):
        place = root / f"directory-{number % directories}"
        place.mkdir(exist_ok=True)
        (place / f"file-{number}").write_bytes(b"%d" % number * 100)
    (root / "large").write_bytes(os.urandom(LARGE_BYTES + 1))


@pytest.mark.parametrize(
    ("files", "directories", "wanted"), [(1, 1, "fsync"), (3, 2, "fsync"), (9, 2, "syncfs"), (8, 8, "syncfs")]
)
def test_all_changes_are_on_the_disk_before_the_intent_log_goes(
    store: Store, root: Path, disk: Disk, files: int, directories: int, wanted: str
) -> None:
    fill(root, files, directories)
    store.take("w", "s", DirectorySource(root))
    expected = state_of(root)
    for path in [*root.glob("*/file-*"), root / "large"]:
        path.write_bytes(b"changed")
    (root / "made").mkdir()
    (root / "made" / "since").write_bytes(b"x")
    disk.is_watched = True

    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))

    assert done.problems == ()
    assert state_of(root) == expected
    assert disk.lost_when_log_went == set()
    assert ("syncfs" in disk.calls) == (wanted == "syncfs")


def test_removals_and_metadata_and_links_are_on_the_disk_too(store: Store, root: Path, disk: Disk) -> None:
    (root / "file").write_bytes(b"content")
    os.link(root / "file", root / "other")
    (root / "link").symlink_to("file")
    store.take("w", "s", DirectorySource(root))
    (root / "other").unlink()
    (root / "link").unlink()
    (root / "file").chmod(0o600)
    (root / "new").write_bytes(b"x")

    disk.is_watched = True
    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert disk.lost_when_log_went == set()
    assert os.stat(root / "file").st_nlink == 2


def test_a_restore_whose_changes_cannot_be_synced_keeps_its_intent_log(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 20)
    store.take("w", "s", DirectorySource(root))
    for path in root.glob("*/file-*"):
        path.write_bytes(b"changed")

    def syncfs(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(target_module, "syncfs", syncfs)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))

    found = store.interrupted("w")
    assert found is not None
    assert (found.snapshot, found.safety) == ("s", "safe")
    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))
    assert store.interrupted("w") is None


def test_a_snapshot_is_on_the_disk_before_it_is_announced(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 3)
    events: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        events.append(("fsync", path_of(descriptor)))

    def rename(old: str, new: str) -> None:
        real_rename(old, new)
        events.append(("rename", f"{old}\0{new}"))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store.take("w", "s", DirectorySource(root))
    monkeypatch.undo()

    named = [tuple(paths.split("\0")) for event, paths in events if event == "rename"]
    for old, new in named:
        if "/packs/" in new or "/objects/" in new:
            place = events.index(("rename", f"{old}\0{new}"))
            assert ("fsync", old) in events[:place]
            assert ("fsync", os.path.dirname(new)) in events[place:]
    pack = next(place for place, (_, paths) in enumerate(events) if paths.endswith(".snap"))
    objects = [place for place, (_, paths) in enumerate(events) if "/objects" in paths]
    assert objects
    assert max(objects) < pack  # the contents before the snapshot that needs them


SIZE_BYTES = 4 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    place = tmp_path / "small"
    with mounted_tmpfs(place, max_bytes=SIZE_BYTES):
        yield place


@contextlib.contextmanager
def filled(place: Path, left_bytes: int = 0) -> Iterator[None]:
    """The file system at `place` with so much space left, for the length of a block."""
    with open(place / "ballast", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        file.truncate(max(0, os.fstat(file.fileno()).st_size - left_bytes))
    try:
        yield
    finally:
        (place / "ballast").unlink()


def content(size: int) -> bytes:
    return os.urandom(size)


@pytest.mark.parametrize("left_bytes", [0, 4096, 100_000, LARGE_BYTES])
def test_a_snapshot_that_does_not_fit_is_not_there_and_the_others_are_whole(
    small: Path, root: Path, left_bytes: int
) -> None:
    with Store(small / "store") as store:
        (root / "file").write_bytes(content(50_000))
        store.take("w", "before", DirectorySource(root))
        before = state_of(root)
        for number in range(10):
            (root / f"small-{number}").write_bytes(content(20_000))
        (root / "large").write_bytes(content(LARGE_BYTES * 2))
        with filled(small, left_bytes):
            with pytest.raises(OSError, match="No space left on device for the snapshot store") as caught:
                store.take("w", "after", DirectorySource(root))
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small / "store"))
            assert [info.name for info in store.snapshots("w")] == ["before"]
            assert store.check().damages == ()
            assert store.check().leftover_bytes == 0
            with store.tree("w", "before") as tree:
                assert differences(state_of_tree(tree), before) == []
        store.take("w", "after", DirectorySource(root))
        with store.tree("w", "after") as tree:
            assert differences(state_of_tree(tree), state_of(root)) == []


@pytest.mark.parametrize("left_bytes", [0, 4096, 50_000])
def test_a_restore_onto_a_full_disk_tears_nothing_and_is_finished_later(
    small: Path, tmp_path: Path, left_bytes: int
) -> None:
    root = small / "root"
    root.mkdir()
    with Store(tmp_path / "store") as store:
        for number in range(5):
            (root / f"small-{number}").write_bytes(content(30_000))
        (root / "large").write_bytes(content(LARGE_BYTES + 1))
        store.take("w", "s", DirectorySource(root))
        wanted = state_of(root)
        for path in root.iterdir():
            path.write_bytes(b"changed")
        changed = state_of(root)
        with filled(small, left_bytes):
            with pytest.raises(OSError, match="No space left on device") as caught:
                store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
            assert os.fsdecode(caught.value.filename) in {os.fsdecode(path) for path in wanted.files}
            now = state_of(root)
            for path in now.files:
                assert now.files[path][5] in {wanted.files[path][5], changed.files[path][5]}, path
            assert store.interrupted("w") is not None
        assert store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe-2")).problems == ()
        assert differences(state_of(root), wanted) == []
        assert store.interrupted("w") is None


def test_a_restore_whose_safety_snapshot_does_not_fit_changes_nothing(small: Path, root: Path) -> None:
    with Store(small / "store") as store:
        (root / "file").write_bytes(b"before")
        store.take("w", "s", DirectorySource(root))
        (root / "file").write_bytes(content(100_000))
        changed = state_of(root)
        with filled(small):
            with pytest.raises(OSError, match="for the snapshot store"):
                store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
            assert differences(state_of(root), changed) == []
            assert store.interrupted("w") is None
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
        assert (root / "file").read_bytes() == b"before"


def test_dropping_and_collecting_make_room_on_a_full_disk(small: Path, root: Path) -> None:
    with Store(small / "store") as store:
        for name in ("first", "second", "third"):
            (root / "large").write_bytes(content(LARGE_BYTES + 1))
            for number in range(3):
                (root / f"small-{number}").write_bytes(content(20_000))
            store.take("w", name, DirectorySource(root))
        expected = state_of(root)
        with filled(small):
            store.drop("w", "first")
            store.drop("w", "second")
            report = store.collect_garbage()
            assert report.freed_bytes > 2 * LARGE_BYTES
            assert store.check().damages == ()
            (root / "new").write_bytes(content(30_000))
            store.take("w", "fourth", DirectorySource(root))
        (root / "new").unlink()
        with store.tree("w", "third") as tree:
            assert state_of_tree(tree).files[b"large"] == expected.files[b"large"]
