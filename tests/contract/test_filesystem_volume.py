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
from protocol.types import FileEntry, FileStat
from protocol.volume import RENAME_NOREPLACE, ROOT_INODE, AttributeChanges, Caller

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
    assert volume.capabilities.flush


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


class Failing:
    """Forwards to a filesystem; the methods named in `fails` raise."""

    def __init__(self, filesystem: Filesystem) -> None:
        self.filesystem = filesystem
        self.fails: dict[str, BaseException] = {}

    def __getattr__(self, name: str) -> object:
        if name in self.fails:
            raise self.fails[name]
        return getattr(self.filesystem, name)


@pytest.fixture
def failing(filesystem: Filesystem) -> Failing:
    return Failing(filesystem)


@pytest.fixture
def over_failing(failing: Failing) -> Iterator[FilesystemVolume]:
    volume = FilesystemVolume(failing)  # type: ignore[arg-type]  # its methods are found when they are called
    yield volume
    volume.check_invariants()


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (OSError(errno.EDQUOT, "full"), errno.EDQUOT),
        (OSError("says nothing"), errno.EIO),
        (ValueError("over a limit"), errno.EINVAL),
    ],
)
def test_what_cannot_be_written_back_is_told_to_close_and_fsync_and_can_be_tried_again(
    over_failing: FilesystemVolume, failing: Failing, raised: Exception, code: int
) -> None:
    inode = make_file(over_failing, b"a", b"old")
    over_failing.write(inode, 0, b"new")
    failing.fails["open_write"] = raised
    for told in (lambda: over_failing.flush(inode), lambda: over_failing.fsync(inode, data_only=False)):
        with pytest.raises(OSError, match=r".") as caught:
            told()
        assert caught.value.errno == code
    assert bytes(over_failing.read(inode, 0, 9)) == b"new"
    failing.fails.clear()
    over_failing.flush(inode)
    assert failing.filesystem.read("a").content == "new"


def test_a_last_forget_that_cannot_write_back_leaves_no_inode(over_failing: FilesystemVolume, failing: Failing) -> None:
    inode = make_file(over_failing, b"a", b"old")
    over_failing.write(inode, 0, b"new")
    failing.fails["open_write"] = OSError(errno.EIO, "broken")
    with pytest.raises(OSError, match="broken"):
        over_failing.forget(inode, 1)
    failing.fails.clear()
    found = over_failing.lookup(ROOT_INODE, b"a")
    assert bytes(over_failing.read(found.inode, 0, 9)) == b"old"


@pytest.mark.parametrize("method", ["delete", "open_write"])
def test_a_removal_or_rename_that_fails_changes_nothing(
    over_failing: FilesystemVolume, failing: Failing, method: str
) -> None:
    inode = make_file(over_failing, b"a", b"content")
    make_file(over_failing, b"b", b"other")
    failing.fails[method] = OSError(errno.EIO, "broken")

    def change() -> None:
        if method == "delete":
            over_failing.unlink(ROOT_INODE, b"a")
        else:
            over_failing.rename(ROOT_INODE, b"b", ROOT_INODE, b"a")

    with pytest.raises(OSError, match="broken"):
        change()
    failing.fails.clear()
    assert over_failing.lookup(ROOT_INODE, b"a").inode == inode
    over_failing.write(inode, 0, b"C")
    over_failing.flush(inode)
    assert failing.filesystem.read("a").content == "Content"
    assert failing.filesystem.read("b").content == "other"


def test_a_file_that_cannot_be_read_can_be_removed(over_failing: FilesystemVolume, failing: Failing) -> None:
    inode = make_file(over_failing, b"a", b"content")
    failing.fails["open_read"] = OSError(errno.EIO, "broken")
    over_failing.unlink(ROOT_INODE, b"a")
    assert names(over_failing) == [b".", b".."]
    with pytest.raises(OSError, match=r".") as caught:
        over_failing.read(inode, 0, 1)
    assert caught.value.errno == errno.ESTALE


def test_at_the_end_everything_is_written_back_that_can_be(over_failing: FilesystemVolume, failing: Failing) -> None:
    for name in (b"a", b"gone/b", b"c"):
        above, _, last = name.rpartition(b"/")
        parent = over_failing.mkdir(ROOT_INODE, above, 0o755, ME).inode if above else ROOT_INODE
        over_failing.write(over_failing.mknod(parent, last, stat.S_IFREG | 0o644, 0, ME).inode, 0, b"written")
    failing.filesystem.delete("gone", recursive=True)
    assert [(path, type(error)) for path, error in over_failing.write_back_all()] == [("gone/b", FileNotFoundError)]
    assert failing.filesystem.read("a").content == failing.filesystem.read("c").content == "written"
    over_failing.write_back_all()


def test_a_file_over_the_limit_of_a_write_is_renamed_in_pieces(
    volume: FilesystemVolume, filesystem: Filesystem
) -> None:
    with filesystem.open_write("big") as writer:
        writer.write_all([bytes(1 << 20)] * 33)
    volume.rename(ROOT_INODE, b"big", ROOT_INODE, b"bigger")
    assert filesystem.stat("bigger").size_bytes == 33 << 20
    assert not filesystem.exists("big")


def test_a_time_that_was_set_holds_until_the_object_changes(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    inode = make_file(volume, b"a", b"one")
    volume.write(inode, 0, b"two")
    volume.setattr(inode, AttributeChanges(mtime_ns=1_000))
    volume.flush(inode)
    assert volume.getattr(inode).mtime_ns == 1_000
    filesystem.write("a", "six")
    assert volume.getattr(inode).mtime_ns > 1_000


def test_what_became_a_directory_behind_the_mount_is_one(volume: FilesystemVolume, filesystem: Filesystem) -> None:
    inode = make_file(volume, b"a", b"content")
    filesystem.delete("a")
    filesystem.mkdir("a")
    found = volume.lookup(ROOT_INODE, b"a")
    assert stat.S_ISDIR(found.mode)
    assert found.inode != inode
    with pytest.raises(OSError, match=r".") as caught:
        volume.read(inode, 0, 1)
    assert caught.value.errno == errno.ESTALE


def test_names_that_cannot_be_are_not_listed(failing: Failing, over_failing: FilesystemVolume) -> None:
    class Listing:
        def list(self, path: str = ".") -> list[FileEntry]:
            odd = ["", ".", "..", "a/b", "n\0", "x" * 300, "\ud800", "good"]
            return [FileEntry(name, f"{path}/{name}", is_file=True, is_directory=False) for name in odd]

        def stat(self, path: str) -> FileStat:
            return failing.filesystem.stat(path)

    failing.filesystem, kept = Listing(), failing.filesystem  # type: ignore[assignment]
    listed = list(over_failing.readdir(ROOT_INODE, 0))
    failing.filesystem = kept
    assert [entry.name for entry in listed] == [b".", b"..", b"good"]


def test_writing_nothing_and_privileges_are_as_on_any_file_system(volume: FilesystemVolume) -> None:
    inode = make_file(volume, b"a", b"x")
    assert volume.write(inode, 100, b"") == 0
    assert volume.getattr(inode).size == 1
    volume.setattr(inode, AttributeChanges(mode=0o6755))
    assert volume.setattr(inode, AttributeChanges(size=0, kill_privileges=True)).mode & 0o7777 == 0o755
    volume.setattr(inode, AttributeChanges(mode=0o2644))
    volume.write(inode, 0, b"y", kill_privileges=True)
    assert volume.getattr(inode).mode & 0o7777 == 0o2644
