"""Imports into volumes that have none of their own: all of it, or the state before."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from protocol import InMemoryFilesystem, VolumeFilesystem
from protocol.backends.memory import MemoryVolume
from protocol.testing.filesystem import contents
from protocol.volume import ROOT_INODE, VolumeCapabilities

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
