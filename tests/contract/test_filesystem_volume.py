"""A Filesystem as a volume: what a Filesystem can hold, a kernel sees as it would see any files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

import pytest

from protocol import InMemoryFilesystem
from protocol.adapters.filesystem_volume import FilesystemVolume
from protocol.filesystem import Filesystem
from protocol.volume import RENAME_NOREPLACE, ROOT_INODE, AttributeChanges, Caller, FlushingVolume

ME = Caller(os.getuid(), os.getgid())


@pytest.fixture
def filesystem() -> Filesystem:
    return InMemoryFilesystem()


@pytest.fixture
def volume(filesystem: Filesystem) -> Iterator[FilesystemVolume]:
    volume = FilesystemVolume(filesystem)
    yield volume
    volume.check_invariants()


def make_file(volume: FilesystemVolume, name: bytes, content: bytes = b"") -> int:
    inode = volume.mknod(ROOT_INODE, name, stat.S_IFREG | 0o644, 0, ME).inode
    if content:
        volume.write(inode, 0, content)
        volume.flush(inode)
    return inode


def names(volume: FilesystemVolume) -> list[bytes]:
    return [entry.name for entry in volume.readdir(ROOT_INODE, 0)]


def test_it_asks_for_every_close(volume: FilesystemVolume) -> None:
    assert isinstance(volume, FlushingVolume)


def test_what_is_written_is_in_the_filesystem_after_the_close(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    inode = make_file(volume, b"a")
    volume.write(inode, 0, b"hello")
    volume.write(inode, 7, b"world")
    assert filesystem.read_bytes("a").content == b""
    assert volume.getattr(inode).size == 12
    volume.flush(inode)
    assert filesystem.read_bytes("a").content == b"hello\0\0world"


@pytest.mark.parametrize("how", ["fsync", "forget"])
def test_fsync_and_the_last_forget_write_back_too(volume: FilesystemVolume, filesystem: Filesystem, how: str) -> None:
    inode = make_file(volume, b"a")
    volume.write(inode, 0, b"x")
    if how == "fsync":
        volume.fsync(inode, data_only=True)
    else:
        volume.forget(inode, 1)
    assert filesystem.read_bytes("a").content == b"x"


def test_what_the_filesystem_changes_is_seen(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    filesystem.write("dir/file", "one")
    directory = volume.lookup(ROOT_INODE, b"dir")
    found = volume.lookup(directory.inode, b"file")
    assert bytes(volume.read(found.inode, 0, 100)) == b"one"
    filesystem.write("dir/file", "another")
    assert volume.getattr(found.inode).size == 7
    assert bytes(volume.read(found.inode, 2, 3)) == b"oth"
    filesystem.delete("dir", recursive=True)
    with pytest.raises(FileNotFoundError):
        volume.lookup(ROOT_INODE, b"dir")


def test_a_removed_open_file_goes_on(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    inode = make_file(volume, b"a", b"content")
    volume.unlink(ROOT_INODE, b"a")
    assert not filesystem.exists("a")
    assert bytes(volume.read(inode, 0, 100)) == b"content"
    volume.write(inode, 0, b"C")
    volume.flush(inode)
    assert not filesystem.exists("a")
    assert volume.getattr(inode).nlink == 0
    volume.forget(inode, 1)
    with pytest.raises(FileNotFoundError):
        volume.getattr(inode)


def test_a_file_is_renamed_over_another_that_is_open(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    source = make_file(volume, b"new", b"new content")
    victim = make_file(volume, b"old", b"old content")
    volume.rename(ROOT_INODE, b"new", ROOT_INODE, b"old")
    assert filesystem.read_bytes("old").content == b"new content"
    assert volume.lookup(ROOT_INODE, b"old").inode == source
    assert bytes(volume.read(victim, 0, 100)) == b"old content"
    assert names(volume) == [b".", b"..", b"old"]


def test_rename_refuses_what_it_cannot_do(volume: FilesystemVolume) -> None:
    make_file(volume, b"a")
    make_file(volume, b"b")
    volume.mkdir(ROOT_INODE, b"d", 0o755, ME)
    for old, new, flags, code in (
        (b"a", b"b", RENAME_NOREPLACE, errno.EEXIST),
        (b"a", b"d", 0, errno.EISDIR),
        (b"d", b"e", 0, errno.EXDEV),
        (b"none", b"e", 0, errno.ENOENT),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            volume.rename(ROOT_INODE, old, ROOT_INODE, new, flags)
        assert caught.value.errno == code, (old, new)


def test_directories_are_made_listed_and_removed(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    directory = volume.mkdir(ROOT_INODE, b"d", 0o750, ME)
    assert stat.S_ISDIR(directory.mode)
    filesystem.write("d/x", "1")
    with pytest.raises(OSError, match="not empty"):
        volume.rmdir(ROOT_INODE, b"d")
    filesystem.delete("d/x")
    volume.rmdir(ROOT_INODE, b"d")
    assert names(volume) == [b".", b".."]


def test_truncating_and_modes_hold_while_the_inode_is_known(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    inode = make_file(volume, b"a", b"content")
    assert volume.setattr(inode, AttributeChanges(size=3, mode=0o600)).mode == stat.S_IFREG | 0o600
    volume.flush(inode)
    assert filesystem.read_bytes("a").content == b"con"


def test_a_scan_sees_what_stays_once_whatever_is_removed(volume: FilesystemVolume) -> None:
    for number in range(50):
        make_file(volume, b"f%d" % number)
    seen = []
    for entry in volume.readdir(ROOT_INODE, 0):
        if entry.name not in (b".", b".."):
            seen.append(entry.name)
            volume.unlink(ROOT_INODE, entry.name)
            seen += [e.name for e in volume.readdir(ROOT_INODE, entry.cookie) if e.name in seen]
    assert sorted(seen) == sorted(b"f%d" % number for number in range(50))


def test_what_a_filesystem_cannot_hold_is_refused(volume: FilesystemVolume) -> None:
    inode = make_file(volume, b"a")
    for call, code in (
        (lambda: volume.symlink(ROOT_INODE, b"s", b"a", ME), errno.EPERM),
        (lambda: volume.link(inode, ROOT_INODE, b"l"), errno.EPERM),
        (lambda: volume.mknod(ROOT_INODE, b"p", stat.S_IFIFO, 0, ME), errno.EPERM),
        (lambda: volume.setxattr(inode, b"user.x", b"1", 0), errno.EOPNOTSUPP),
        (lambda: volume.lookup(ROOT_INODE, b"n" * 256), errno.ENAMETOOLONG),
        (lambda: volume.mknod(ROOT_INODE, b"n" * 100, stat.S_IFREG, 0, ME), errno.EINVAL),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            call()
        assert caught.value.errno == code
