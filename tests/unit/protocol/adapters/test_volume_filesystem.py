"""VolumeFilesystem: what the suites cannot see of it: the volume below, and imports without snapshots."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import InMemoryFilesystem, VolumeFilesystem
from protocol.backends.memory import MemoryVolume
from protocol.testing.filesystem import contents
from protocol.volume import ROOT_INODE, AttributeChanges, Caller, VolumeCapabilities

CALLER = Caller(0, 0)
MEGABYTE = 1 << 20


class CountingVolume(MemoryVolume):
    """Knows how many lookups are out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.out = 0
        for name in ("lookup", "mknod", "mkdir", "symlink", "link"):
            setattr(self, name, self._counting(getattr(self, name)))
        self._forget, self.forget = self.forget, self._forget_counted

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            made = call(*arguments)
            self.out += 1
            return made

        return counted

    def _forget_counted(self, inode: int, count: int) -> None:
        self.out -= count
        self._forget(inode, count)


@pytest.fixture
def volume() -> Iterator[CountingVolume]:
    volume = CountingVolume()
    yield volume
    volume.check_invariants()
    assert volume.out == 0, "lookups were not given back"


@pytest.fixture
def filesystem(volume: CountingVolume) -> VolumeFilesystem:
    return VolumeFilesystem(volume)


def inode_of(volume: MemoryVolume, *names: bytes) -> int:
    inode = ROOT_INODE
    for name in names:
        inode = volume.lookup(inode, name).inode
        volume.forget(inode, 1)
    return inode


def test_every_call_gives_its_lookups_back(
    volume: CountingVolume, filesystem: VolumeFilesystem, tmp_path: Path
) -> None:
    filesystem.write("d/e/file", "text\n")
    filesystem.write("d/e/file", "more", mode="append")
    filesystem.write("d/new", "x", mode="create")
    volume.forget(volume.symlink(ROOT_INODE, b"link", b"d/../d/e", CALLER).inode, 1)
    for call in (filesystem.stat, filesystem.exists, filesystem.is_dir, filesystem.list):
        call("link")
        call("d/e")
    filesystem.read("link/file")
    filesystem.read_bytes("d/e/file")
    filesystem.glob("*", path="link")
    filesystem.grep("text", path="link")
    snapshot = filesystem.snapshot()
    filesystem.mkdir("more/and/more")
    filesystem.delete("d", recursive=True)
    filesystem.restore(snapshot)
    filesystem.export_archive(tmp_path / "a.zip")
    filesystem.import_archive(tmp_path / "a.zip")

    assert volume.out == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda filesystem: filesystem.read("missing"),
        lambda filesystem: filesystem.read("directory"),
        lambda filesystem: filesystem.read("file/below"),
        lambda filesystem: filesystem.read("loop"),
        lambda filesystem: filesystem.read("out"),
        lambda filesystem: filesystem.read("binary"),
        lambda filesystem: filesystem.read("fifo"),
        lambda filesystem: filesystem.list("file"),
        lambda filesystem: filesystem.write("file", "x", mode="create"),
        lambda filesystem: filesystem.write("file/below", "x"),
        lambda filesystem: filesystem.write("no/parent", "x", create_parents=False),
        lambda filesystem: filesystem.write("n" * 81, "x"),
        lambda filesystem: filesystem.write("fifo", "x"),
        lambda filesystem: filesystem.write("fifo", "x", mode="append"),
        lambda filesystem: filesystem.mkdir("file"),
        lambda filesystem: filesystem.delete("directory"),
        lambda filesystem: filesystem.delete("missing"),
    ],
)
def test_a_call_that_fails_gives_its_lookups_back(
    volume: CountingVolume, filesystem: VolumeFilesystem, call: Any
) -> None:
    filesystem.write("file", "x")
    filesystem.write("directory/inner", "x")
    filesystem.write_bytes("binary", b"\xff")
    volume.forget(volume.symlink(ROOT_INODE, b"loop", b"./loop", CALLER).inode, 1)
    volume.forget(volume.symlink(ROOT_INODE, b"out", b"directory/../../x", CALLER).inode, 1)
    volume.forget(volume.mknod(ROOT_INODE, b"fifo", stat.S_IFIFO | 0o644, 0, CALLER).inode, 1)

    with pytest.raises((OSError, ValueError)):
        call(filesystem)

    assert volume.out == 0


def test_a_reader_holds_its_file_and_lets_it_go(volume: CountingVolume, filesystem: VolumeFilesystem) -> None:
    filesystem.write("file", "content")
    inode = inode_of(volume, b"file")

    reader = filesystem.open_read("file")
    assert volume.out == 1
    filesystem.delete("file")
    assert reader.read() == b"content"
    reader.close()

    with pytest.raises(FileNotFoundError):
        volume.getattr(inode)


def test_a_writer_that_fails_to_finish_gives_its_lookups_back(
    volume: CountingVolume, filesystem: VolumeFilesystem
) -> None:
    writer = filesystem.open_write("name")
    filesystem.mkdir("name/in/the/way")

    with pytest.raises(IsADirectoryError) as caught:
        writer.close()

    assert caught.value.filename == "name"
    assert [entry.name for entry in filesystem.list()] == ["name"]


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_write_that_runs_out_of_room_changes_nothing(mode: Any) -> None:
    volume = CountingVolume(max_bytes=MEGABYTE)
    filesystem = VolumeFilesystem(volume)
    if mode == "overwrite":
        filesystem.write("file", "old")
    before = contents(filesystem)

    with pytest.raises(OSError, match="No space") as caught:
        filesystem.write_bytes("file", bytes(range(256)) * 8192, mode=mode)

    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "file")
    assert (contents(filesystem), volume.out) == (before, 0)


def test_an_overwritten_file_keeps_its_mode_and_owner(volume: CountingVolume, filesystem: VolumeFilesystem) -> None:
    filesystem.write("run.sh", "old")
    volume.setattr(inode_of(volume, b"run.sh"), AttributeChanges(mode=0o6755, uid=1234, gid=5678))

    filesystem.write("run.sh", "new")

    seen = volume.getattr(inode_of(volume, b"run.sh"))
    assert (stat.S_IMODE(seen.mode), seen.uid, seen.gid) == (0o6755, 1234, 5678)


def test_what_is_created_belongs_to_the_caller() -> None:
    volume = MemoryVolume()
    VolumeFilesystem(volume, caller=Caller(1234, 5678)).write("d/file", "x")

    for names in ((b"d",), (b"d", b"file")):
        seen = volume.getattr(inode_of(volume, *names))
        assert (seen.uid, seen.gid) == (1234, 5678)


def test_limits_bind_what_a_call_creates_and_not_what_the_mount_did(
    volume: CountingVolume, filesystem: VolumeFilesystem
) -> None:
    inode = ROOT_INODE
    for _ in range(20):
        inode = volume.mkdir(inode, b"d" * 200, 0o755, CALLER).inode
        volume.forget(inode, 1)
    volume.forget(volume.mknod(inode, b"f" * 255, stat.S_IFREG | 0o644, 0, CALLER).inode, 1)
    path = "/".join(["d" * 200] * 20 + ["f" * 255])

    filesystem.write(path, "overwritten")
    filesystem.write(path, ", appended", mode="append")

    assert filesystem.read(path).content == "overwritten, appended"
    with pytest.raises(ValueError, match="deep"):
        filesystem.write(path[:-1], "x")
    assert filesystem.delete("d" * 200, recursive=True) == 21


def test_a_tree_as_deep_as_a_kernel_allows_is_deleted(volume: CountingVolume, filesystem: VolumeFilesystem) -> None:
    inode = ROOT_INODE
    for _ in range(300):
        inode = volume.mkdir(inode, b"d", 0o755, CALLER).inode
        volume.forget(inode, 1)

    assert filesystem.delete("d", recursive=True) == 300


def test_an_absolute_symlink_below_the_mountpoint_stays_inside(volume: CountingVolume) -> None:
    filesystem = VolumeFilesystem(volume, root="/mnt/here")
    filesystem.write("d/file", "inside")
    for name, target in ((b"in", b"/mnt/here/d"), (b"root", b"/mnt/here"), (b"out", b"/mnt/here-not/d")):
        volume.forget(volume.symlink(ROOT_INODE, name, target, CALLER).inode, 1)

    assert filesystem.read("in/file").content == "inside"
    assert filesystem.read("root/in/file").content == "inside"
    with pytest.raises(PermissionError, match="outside"):
        filesystem.read("out/file")


def test_a_search_through_a_symlink_names_files_as_they_were_asked_for(
    volume: CountingVolume, filesystem: VolumeFilesystem
) -> None:
    filesystem.write("real/deep/file", "needle")
    volume.forget(volume.symlink(ROOT_INODE, b"link", b"real/deep", CALLER).inode, 1)

    assert [match.path for match in filesystem.glob("*", path="link")] == ["link/file"]
    assert [match.path for match in filesystem.grep("needle", path="link")] == ["link/file"]


class RemoteVolume(MemoryVolume):
    """One whose answers must be awaited."""

    async def getattr(self, inode: int) -> Any:  # type: ignore[override]
        return super().getattr(inode)


def test_a_volume_that_makes_its_callers_wait_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "coroutine ... was never awaited"
        with pytest.raises(TypeError, match="await"):
            VolumeFilesystem(RemoteVolume()).stat(".")


def test_snapshots_are_the_volumes_own(volume: CountingVolume, filesystem: VolumeFilesystem) -> None:
    snapshot = filesystem.snapshot(tag="mine")

    assert [(info.name, info.tag) for info in volume.snapshots()] == [(snapshot.commit_ref, "mine")]


KILOBYTE = 1024


class PlainVolume:
    """A volume without snapshots, which can be made to fail: `refuses(method, arguments)` says when."""

    def __init__(self, **options: Any) -> None:
        self.memory = MemoryVolume(**options)
        self.capabilities = VolumeCapabilities()
        self.refuses: Any = lambda method, arguments: False

    def __getattr__(self, name: str) -> Any:
        if name in {"take_snapshot", "restore_snapshot", "import_tree", "tree"}:
            raise AttributeError(name)
        found = getattr(self.memory, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if self.refuses(name, arguments):
                raise OSError(errno.EIO, "Input/output error")
            return found(*arguments, **options)

        return call


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    source = InMemoryFilesystem()
    source.write("changed", "new" * KILOBYTE)
    source.write("d/new", "new" * KILOBYTE)
    source.write("becomes-directory/file", "new")
    source.write("becomes-file", "new")
    source.write("same", "the same")
    source.export_archive(tmp_path / "archive.zip")
    return tmp_path / "archive.zip"


def filled(volume: PlainVolume) -> VolumeFilesystem:
    filesystem = VolumeFilesystem(volume)  # type: ignore[arg-type]  # its methods are found when they are called
    for path in ("changed", "gone", "becomes-directory", "becomes-file/inner"):
        filesystem.write(path, f"old {path}")
    filesystem.write("same", "the same")
    return filesystem


def left_in(directory: str) -> set[str]:
    return {name for name in os.listdir(directory) if name.startswith("vfsd-before-")}


def test_an_import_that_runs_out_of_room_changes_nothing(archive: Path) -> None:
    volume = PlainVolume(max_bytes=32 * KILOBYTE)
    filesystem = filled(volume)
    with filesystem.open_write("big") as writer:
        writer.write(b"x" * 10 * KILOBYTE)
    before = contents(filesystem)
    inodes = [entry.inode for entry in volume.memory.readdir(ROOT_INODE, 0)]

    with pytest.raises(OSError, match="No space"):
        filesystem.import_archive(archive)

    assert contents(filesystem) == before
    assert [entry.inode for entry in volume.memory.readdir(ROOT_INODE, 0)] == inodes


@pytest.mark.extended
@pytest.mark.parametrize("method", ["rename", "mkdir", "rmdir", "unlink", "write", "mknod", "setattr"])
@pytest.mark.parametrize("nth", [0, 1, 2, 5])
def test_an_import_that_fails_anywhere_leaves_the_state_before(archive: Path, method: str, nth: int) -> None:
    volume = PlainVolume()
    filesystem = filled(volume)
    before = contents(filesystem)
    calls = 0

    def refuses(name: str, arguments: tuple[Any, ...]) -> bool:
        nonlocal calls
        calls += name == method
        return name == method and calls == nth + 1

    volume.refuses = refuses
    kept = left_in(tempfile.gettempdir())

    try:
        filesystem.import_archive(archive)
    except OSError:
        assert contents(filesystem) == before
    else:
        assert calls <= nth, f"{method} failed and nobody noticed"

    assert left_in(tempfile.gettempdir()) <= kept
    volume.memory.check_invariants()


def test_where_the_state_cannot_be_put_back_the_error_says_where_it_is(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    volume = PlainVolume()
    filesystem = filled(volume)
    before = contents(filesystem)
    volume.refuses = lambda name, arguments: name == "rename"

    with pytest.raises(OSError, match="Input/output") as caught:
        filesystem.import_archive(archive)

    (kept,) = left_in(str(tmp_path))
    assert str(tmp_path / kept) in caught.value.__notes__[0]
    volume.refuses = lambda name, arguments: False
    filesystem.import_archive(tmp_path / kept)
    assert contents(filesystem) == before


def test_an_overwritten_file_keeps_its_attributes_but_no_capabilities() -> None:
    volume = MemoryVolume()
    filesystem = VolumeFilesystem(volume)
    filesystem.write("file", "old")
    inode = volume.lookup(ROOT_INODE, b"file").inode
    volume.setxattr(inode, b"user.note", b"mine", 0)
    volume.setxattr(inode, b"security.capability", b"\1" * 20, 0)

    filesystem.write("file", "new")

    inode = volume.lookup(ROOT_INODE, b"file").inode
    assert {name: volume.getxattr(inode, name) for name in volume.listxattr(inode)} == {b"user.note": b"mine"}


def test_an_import_that_fails_names_the_entry(archive: Path) -> None:
    volume = PlainVolume()
    filesystem = filled(volume)
    calls: list[str] = []

    def refuses(name: str, arguments: tuple[Any, ...]) -> bool:
        calls.append(name)
        return name == "rename" and calls.count("rename") == 1

    volume.refuses = refuses

    with pytest.raises(OSError, match="Input/output") as caught:
        filesystem.import_archive(archive)

    assert caught.value.filename == "becomes-directory/file"


def test_an_export_that_fails_names_the_entry(tmp_path: Path) -> None:
    volume = PlainVolume()
    filesystem = filled(volume)
    volume.refuses = lambda name, arguments: name == "read"

    with pytest.raises(OSError, match="Input/output") as caught:
        filesystem.export_archive(tmp_path / "new.zip")

    assert caught.value.filename == "becomes-directory"
    assert not (tmp_path / "new.zip").exists()
