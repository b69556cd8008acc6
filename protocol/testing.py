"""Contract suites: subclass one, give it a factory, and pytest says where an implementation breaks the contract.

    class TestMyVolume(VolumeContract):
        @pytest.fixture
        def volume(self):
            def make(*, max_bytes=None, max_inodes=None, clock=time.time_ns):
                return MyVolume(...)
            return make

What each call must answer is `protocol.volume`'s docstrings; where they are silent, tmpfs is asked.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final, Protocol, cast

import pytest

from protocol.volume import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INODE,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    Volume,
)

__all__ = ["Clock", "MakeVolume", "VolumeContract"]

ALICE: Final = Caller(1000, 1000)
KEEP_SIZE: Final = 1  # linux/falloc.h
PUNCH_HOLE: Final = 2
PAGE_BYTES: Final = 4096


class Clock:
    """A virtual clock: it goes on a second whenever it is told to, and never by itself."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000 * 10**9

    def __call__(self) -> int:
        return self.now_ns

    def tick(self) -> int:
        """Go on a second; returns the new time."""
        self.now_ns += 10**9
        return self.now_ns


class MakeVolume(Protocol):
    """Makes an empty volume whose root belongs to 0:0 with mode 0755, and that nothing else uses."""

    def __call__(
        self, *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
    ) -> Volume: ...


class Driver:
    """A volume, called as a test wants to: by path, one answer at once, new inodes not held."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume

    # A contract suite calls nothing that must wait: volumes that do are driven by a loop of their own.
    def at(self, path: bytes) -> int:
        """The inode number at `path`; no lookup is kept."""
        number = ROOT_INODE
        for name in path.split(b"/") if path else ():
            number = cast("Attributes", self.volume.lookup(number, name)).inode
            self.volume.forget(number, 1)
        return number

    def _split(self, path: bytes) -> tuple[int, bytes]:
        parent, _, name = path.rpartition(b"/")
        return self.at(parent), name

    def stat(self, path: bytes | int) -> Attributes:
        return cast("Attributes", self.volume.getattr(path if isinstance(path, int) else self.at(path)))

    def _let_go(self, made: object) -> int:
        number = cast("Attributes", made).inode
        self.volume.forget(number, 1)
        return number

    def file(self, path: bytes, data: bytes = b"", mode: int = 0o644, caller: Caller = ALICE) -> int:
        parent, name = self._split(path)
        number = self._let_go(self.volume.mknod(parent, name, stat.S_IFREG | mode, 0, caller))
        if data:
            self.volume.write(number, 0, data)
        return number

    def directory(self, path: bytes, mode: int = 0o755, caller: Caller = ALICE) -> int:
        parent, name = self._split(path)
        return self._let_go(self.volume.mkdir(parent, name, mode, caller))

    def symlink(self, path: bytes, target: bytes) -> int:
        parent, name = self._split(path)
        return self._let_go(self.volume.symlink(parent, name, target, ALICE))

    def link(self, number: int, path: bytes) -> None:
        parent, name = self._split(path)
        self._let_go(self.volume.link(number, parent, name))

    def unlink(self, path: bytes) -> None:
        self.volume.unlink(*self._split(path))

    def rmdir(self, path: bytes) -> None:
        self.volume.rmdir(*self._split(path))

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        self.volume.rename(*self._split(old), *self._split(new), flags)

    def set(self, path: bytes | int, **changes: int | bool) -> Attributes:
        number = path if isinstance(path, int) else self.at(path)
        return cast("Attributes", self.volume.setattr(number, AttributeChanges(**changes)))  # type: ignore[arg-type]

    def hold(self, path: bytes) -> int:
        """Look `path` up and keep the lookup, as somebody who has it open does."""
        return cast("Attributes", self.volume.lookup(*self._split(path))).inode

    def read(self, path: bytes | int, offset: int = 0, size: int = 1 << 20) -> bytes:
        number = path if isinstance(path, int) else self.at(path)
        return bytes(cast("bytes", self.volume.read(number, offset, size)))

    def entries(self, path: bytes | int = b"", cookie: int = 0) -> Iterator[DirectoryEntry]:
        number = path if isinstance(path, int) else self.at(path)
        return cast("Iterator[DirectoryEntry]", self.volume.readdir(number, cookie))

    def names(self, path: bytes | int = b"") -> list[bytes]:
        """The sorted names in a directory, without the dots."""
        return sorted(entry.name for entry in self.entries(path) if entry.name not in (b".", b".."))


def fails(code: int) -> pytest.RaisesExc[OSError]:
    """A context in which an `OSError` with errno `code` must be raised."""
    return pytest.raises(OSError, check=lambda error: error.errno == code)


class VolumeContract:
    """What every `protocol.volume.Volume` that is writable and keeps POSIX must do."""

    @pytest.fixture
    def volume(self) -> MakeVolume:
        """To be overridden: the factory of the volumes to test."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def fs(self, volume: MakeVolume, clock: Clock) -> Driver:
        return Driver(volume(clock=clock))

    # -- inodes and their lifetime -----------------------------------------------------------
    def test_an_unlinked_file_stays_readable_and_writable_until_its_last_forget(self, fs: Driver) -> None:
        fs.file(b"f", b"content")
        number = fs.hold(b"f")
        fs.hold(b"f")
        fs.unlink(b"f")
        assert fs.stat(number).nlink == 0
        fs.volume.write(number, 7, b" and more")
        assert fs.read(number) == b"content and more"
        fs.volume.forget(number, 1)
        assert fs.read(number) == b"content and more"
        fs.volume.forget(number, 1)
        with fails(errno.ENOENT):
            fs.stat(number)

    def test_a_file_renamed_over_stays_readable_while_it_is_held(self, fs: Driver) -> None:
        fs.file(b"old", b"old")
        fs.file(b"new", b"new")
        number = fs.hold(b"old")
        fs.rename(b"new", b"old")
        assert (fs.read(number), fs.read(b"old")) == (b"old", b"new")

    def test_a_removed_directory_that_is_held_is_empty_and_takes_nothing_new(self, fs: Driver) -> None:
        fs.directory(b"d")
        fs.directory(b"e")
        fs.file(b"f")
        number = fs.hold(b"d")
        fs.rmdir(b"d")
        assert fs.stat(number).nlink == 0
        assert fs.names(number) == []
        with fails(errno.ENOENT):
            fs.volume.mknod(number, b"x", stat.S_IFREG, 0, ALICE)
        with fails(errno.ENOENT):
            fs.volume.mkdir(number, b"x", 0o755, ALICE)
        for name in (b"e", b"f"):
            with fails(errno.ENOENT):
                fs.volume.rename(ROOT_INODE, name, number, b"x")
        fs.volume.forget(number, 1)
        with fails(errno.ENOENT):
            fs.stat(number)

    def test_forgetting_a_file_that_has_a_name_does_not_free_it(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x")
        assert fs.hold(b"f") == number
        fs.volume.forget(number, 1)
        assert fs.at(b"f") == number

    def test_forgetting_an_unknown_inode_is_ignored(self, fs: Driver) -> None:
        fs.volume.forget(10**9, 3)

    def test_lookup_finds_the_dots(self, fs: Driver) -> None:
        fs.directory(b"d")
        inner = fs.directory(b"d/e")
        assert fs.at(b"d/e/.") == inner
        assert fs.at(b"d/e/..") == fs.at(b"d")
        assert fs.at(b"..") == ROOT_INODE

    def test_inode_numbers_are_not_given_to_others(self, fs: Driver) -> None:
        numbers = set()
        for _ in range(50):
            numbers.add(fs.file(b"f"))
            fs.unlink(b"f")
        assert len(numbers) == 50

    # -- making entries ----------------------------------------------------------------------
    def test_what_is_made_has_the_callers_owner_its_mode_and_the_time(self, fs: Driver, clock: Clock) -> None:
        now = clock.tick()
        inode = fs.stat(fs.file(b"f", mode=0o4755))
        assert (inode.mode, inode.uid, inode.gid) == (stat.S_IFREG | 0o4755, 1000, 1000)
        assert (inode.nlink, inode.size, inode.blocks) == (1, 0, 0)
        assert {inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.birth_ns} == {now}

    @pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK])
    def test_special_files_keep_their_type_and_device_number(self, fs: Driver, kind: int) -> None:
        device = os.makedev(5, 300) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
        fs.volume.mknod(ROOT_INODE, b"special", kind | 0o600, device, ALICE)
        assert (fs.stat(b"special").mode, fs.stat(b"special").rdev) == (kind | 0o600, device)

    def test_a_symlink_gives_its_target_and_has_its_length(self, fs: Driver) -> None:
        number = fs.symlink(b"s", b"../some where")
        assert fs.volume.readlink(number) == b"../some where"
        assert fs.stat(number).size == 13
        assert stat.S_ISLNK(fs.stat(number).mode)
        with fails(errno.EINVAL):
            fs.volume.readlink(fs.file(b"f"))

    def test_a_symlinks_target_has_up_to_4095_bytes(self, fs: Driver) -> None:
        assert fs.volume.readlink(fs.symlink(b"long", b"x" * 4095)) == b"x" * 4095
        with fails(errno.ENAMETOOLONG):
            fs.symlink(b"too long", b"x" * 4096)

    def test_a_set_gid_directory_hands_on_its_group_and_to_directories_its_bit(self, fs: Driver) -> None:
        fs.directory(b"d", caller=Caller(0, 77))
        fs.set(b"d", mode=0o2775)
        fs.file(b"d/f")
        fs.directory(b"d/d", mode=0o755)
        fs.symlink(b"d/s", b"x")
        assert [fs.stat(path).gid for path in (b"d/f", b"d/d", b"d/s")] == [77, 77, 77]
        assert fs.stat(b"d/d").mode == stat.S_IFDIR | 0o2755
        assert fs.stat(b"d/f").mode == stat.S_IFREG | 0o644

    def test_any_bytes_but_slash_and_nul_make_a_name(self, fs: Driver) -> None:
        for name in (b"\xff\xfe", b"new\nline", b" ", b"...", "ü".encode(), b"x" * NAME_MAX):
            fs.file(name)
            assert name in fs.names()

    def test_a_tmpfile_has_no_name_until_it_is_linked(self, fs: Driver) -> None:
        number = cast("Attributes", fs.volume.tmpfile(ROOT_INODE, 0o600, ALICE)).inode
        fs.volume.write(number, 0, b"content")
        assert fs.stat(number).nlink == 0
        assert fs.names() == []
        fs.link(number, b"f")
        fs.volume.forget(number, 1)
        assert fs.read(b"f") == b"content"
        assert fs.stat(b"f").nlink == 1

    def test_a_tmpfile_that_is_not_linked_is_freed_by_its_last_forget(self, fs: Driver) -> None:
        number = cast("Attributes", fs.volume.tmpfile(ROOT_INODE, 0o600, ALICE)).inode
        fs.volume.forget(number, 1)
        with fails(errno.ENOENT):
            fs.stat(number)

    # -- links -------------------------------------------------------------------------------
    def test_hard_links_are_one_file(self, fs: Driver) -> None:
        number = fs.file(b"a", b"1")
        fs.directory(b"d")
        fs.link(number, b"d/b")
        assert fs.at(b"d/b") == number
        assert fs.stat(number).nlink == 2
        fs.volume.write(number, 0, b"2")
        fs.unlink(b"a")
        assert (fs.read(b"d/b"), fs.stat(number).nlink) == (b"2", 1)

    def test_symlinks_can_be_linked_and_directories_cannot(self, fs: Driver) -> None:
        fs.link(fs.symlink(b"s", b"x"), b"t")
        assert fs.stat(b"t").nlink == 2
        with fails(errno.EPERM):
            fs.link(fs.directory(b"d"), b"e")

    def test_a_directorys_nlink_counts_the_directories_in_it(self, fs: Driver) -> None:
        fs.directory(b"d")
        fs.directory(b"other")
        assert fs.stat(b"d").nlink == 2
        fs.directory(b"d/1")
        fs.directory(b"d/2")
        fs.file(b"d/f")
        assert fs.stat(b"d").nlink == 4
        fs.rename(b"d/1", b"other/1")
        assert (fs.stat(b"d").nlink, fs.stat(b"other").nlink) == (3, 3)
        fs.rename(b"d/f", b"d/f2")
        fs.rename(b"other/1", b"d/2")
        assert (fs.stat(b"d").nlink, fs.stat(b"other").nlink) == (3, 2)
        fs.rename(b"d/2", b"d/f2", RENAME_EXCHANGE)
        fs.rename(b"d/2", b"other", RENAME_EXCHANGE)
        assert (fs.stat(b"d").nlink, fs.stat(b"").nlink) == (4, 3)

    # -- rename ------------------------------------------------------------------------------
    @pytest.mark.parametrize("flags", [0, RENAME_NOREPLACE])
    @pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
    def test_rename_to_a_free_name_keeps_the_inode(self, fs: Driver, kind: str, flags: int) -> None:
        fs.directory(b"to")
        number = {
            "file": lambda: fs.file(b"a"),
            "directory": lambda: fs.directory(b"a"),
            "symlink": lambda: fs.symlink(b"a", b"x"),
        }[kind]()
        fs.rename(b"a", b"to/b", flags)
        assert fs.at(b"to/b") == number
        assert fs.names() == [b"to"]

    @pytest.mark.parametrize(
        ("old", "new", "code"),
        [
            ("file", "file", 0),
            ("file", "empty", errno.EISDIR),
            ("file", "full", errno.EISDIR),
            ("empty", "file", errno.ENOTDIR),
            ("empty", "empty2", 0),
            ("full", "empty", 0),
            ("empty", "full", errno.ENOTEMPTY),
            ("missing", "file", errno.ENOENT),
            ("missing", "missing2", errno.ENOENT),
        ],
    )
    def test_rename_over_something(self, fs: Driver, old: str, new: str, code: int) -> None:
        fs.file(b"file", b"1")
        fs.directory(b"empty")
        fs.directory(b"empty2")
        fs.directory(b"full")
        fs.file(b"full/x")
        before = fs.names()
        if code:
            with fails(code):
                fs.rename(old.encode(), new.encode())
            assert fs.names() == before
            return
        number = fs.at(old.encode())
        fs.rename(old.encode(), new.encode())
        assert fs.at(new.encode()) == number
        assert fs.names() == [name for name in before if name != old.encode() or old == new]

    def test_rename_noreplace_refuses_what_is_there_and_exchange_what_is_not(self, fs: Driver) -> None:
        fs.file(b"a")
        fs.file(b"b")
        with fails(errno.EEXIST):
            fs.rename(b"a", b"b", RENAME_NOREPLACE)
        with fails(errno.ENOENT):
            fs.rename(b"a", b"c", RENAME_EXCHANGE)
        with fails(errno.EINVAL):
            fs.rename(b"a", b"b", RENAME_EXCHANGE | RENAME_NOREPLACE)
        with fails(errno.EINVAL):
            fs.rename(b"a", b"c", 1 << 10)
        assert fs.names() == [b"a", b"b"]

    def test_rename_exchange_lets_a_file_and_a_full_directory_change_places(self, fs: Driver) -> None:
        fs.directory(b"d")
        file, directory = fs.file(b"d/f", b"1"), fs.directory(b"e")
        fs.file(b"e/inside")
        fs.rename(b"d/f", b"e", RENAME_EXCHANGE)
        assert (fs.at(b"e"), fs.at(b"d/f")) == (file, directory)
        assert fs.names(b"d/f") == [b"inside"]
        assert fs.at(b"d/f/..") == fs.at(b"d")

    @pytest.mark.parametrize("new", [b"d/x", b"d/e/x", b"d/e"])
    @pytest.mark.parametrize("flags", [0, RENAME_NOREPLACE])
    def test_a_directory_cannot_move_below_itself(self, fs: Driver, new: bytes, flags: int) -> None:
        fs.directory(b"d")
        fs.directory(b"d/e")
        if new == b"d/e" and flags:
            return  # there already: EEXIST, as above
        with fails(errno.EINVAL):
            fs.rename(b"d", new, flags)

    def test_rename_between_two_names_of_one_file_does_nothing(self, fs: Driver) -> None:
        fs.link(fs.file(b"a"), b"b")
        fs.rename(b"a", b"b")
        assert fs.names() == [b"a", b"b"]

    def test_rename_to_itself_does_nothing(self, fs: Driver) -> None:
        fs.directory(b"d")
        fs.rename(b"d", b"d")
        assert fs.names() == [b"d"]

    # -- errors ------------------------------------------------------------------------------
    def test_a_name_that_is_there_is_refused(self, fs: Driver) -> None:
        number = fs.file(b"f")
        for make in (fs.file, fs.directory, lambda path: fs.symlink(path, b"x"), lambda path: fs.link(number, path)):
            with fails(errno.EEXIST):
                make(b"f")

    def test_a_name_that_is_missing_is_refused(self, fs: Driver) -> None:
        for use in (fs.at, fs.unlink, fs.rmdir):
            with fails(errno.ENOENT):
                use(b"missing")

    def test_a_name_of_256_bytes_is_too_long_everywhere(self, fs: Driver) -> None:
        name = b"x" * (NAME_MAX + 1)
        number = fs.file(b"f")
        for use in (fs.at, fs.unlink, fs.rmdir, fs.file, fs.directory, lambda path: fs.link(number, path)):
            with fails(errno.ENAMETOOLONG):
                use(name)
        with fails(errno.ENAMETOOLONG):
            fs.rename(b"f", name)

    def test_what_is_no_directory_has_no_names(self, fs: Driver) -> None:
        fs.file(b"f")
        for use in (fs.at, fs.unlink, fs.rmdir, fs.file, fs.directory):
            with fails(errno.ENOTDIR):
                use(b"f/x")
        with fails(errno.ENOTDIR):
            list(fs.entries(b"f"))

    def test_directories_and_files_are_removed_each_in_its_way(self, fs: Driver) -> None:
        fs.file(b"f")
        fs.directory(b"d")
        fs.file(b"d/f")
        with fails(errno.ENOTDIR):
            fs.rmdir(b"f")
        with fails(errno.EISDIR):
            fs.unlink(b"d")
        with fails(errno.ENOTEMPTY):
            fs.rmdir(b"d")

    def test_content_calls_refuse_directories_and_symlinks(self, fs: Driver) -> None:
        directory, symlink = fs.directory(b"d"), fs.symlink(b"s", b"x")
        for number, code in ((directory, errno.EISDIR), (symlink, errno.EINVAL)):
            with fails(code):
                fs.volume.read(number, 0, 1)
            with fails(code):
                fs.volume.write(number, 0, b"x")
            with fails(code):
                fs.set(number, size=0)

    def test_an_inode_that_never_was_is_missing(self, fs: Driver) -> None:
        number = 10**9
        for use in (
            lambda: fs.stat(number),
            lambda: fs.set(number, mode=0),
            lambda: fs.read(number),
            lambda: fs.volume.write(number, 0, b"x"),
            lambda: fs.names(number),
            lambda: fs.volume.mknod(number, b"x", stat.S_IFREG, 0, ALICE),
        ):
            with fails(errno.ENOENT):
                use()

    # -- directories -------------------------------------------------------------------------
    def test_readdir_gives_the_dots_and_every_entry_with_its_type(self, fs: Driver) -> None:
        file, directory = fs.file(b"f"), fs.directory(b"d")
        found = {entry.name: (entry.inode, stat.S_IFMT(entry.mode)) for entry in fs.entries()}
        assert found == {
            b".": (ROOT_INODE, stat.S_IFDIR),
            b"..": (ROOT_INODE, stat.S_IFDIR),
            b"f": (file, stat.S_IFREG),
            b"d": (directory, stat.S_IFDIR),
        }

    def test_readdir_goes_on_after_any_cookie(self, fs: Driver) -> None:
        for at in range(20):
            fs.file(b"%d" % at)
        every = list(fs.entries())
        cookies = [entry.cookie for entry in every]
        assert cookies == sorted(set(cookies))
        assert cookies[0] > 0
        for at, entry in enumerate(every):
            assert list(fs.entries(b"", entry.cookie)) == every[at + 1 :]

    def test_a_scan_sees_once_what_stays_while_names_come_and_go_beside_it(self, fs: Driver) -> None:
        for at in range(1000):
            fs.file(b"%d" % at)
        seen: list[bytes] = []
        cookie = 0
        while batch := [entry for _, entry in zip(range(7), fs.entries(b"", cookie), strict=False)]:
            cookie = batch[-1].cookie
            seen += [entry.name for entry in batch]
            step = len(seen)
            fs.file(b"new%d" % step) if step < 2000 else None
            for at in range(step // 7 * 3 % 1000, step // 7 * 3 % 1000 + 3):
                if at % 2 and b"%d" % at in fs.names() and step < 2000:
                    fs.unlink(b"%d" % at)
        assert all(seen.count(b"%d" % at) == 1 for at in range(0, 1000, 2))

    def test_rm_rf_of_20_000_files_removes_each_while_listing(self, fs: Driver) -> None:
        fs.directory(b"d")
        number = fs.at(b"d")
        for at in range(20_000):
            made = cast("Attributes", fs.volume.mknod(number, b"%d" % at, stat.S_IFREG, 0, ALICE))
            fs.volume.forget(made.inode, 1)
        seen = 0
        cookie = 2
        while batch := [entry for _, entry in zip(range(100), fs.entries(number, cookie), strict=False)]:
            cookie = batch[-1].cookie
            for entry in batch:
                fs.volume.unlink(number, entry.name)
            seen += len(batch)
        assert seen == 20_000
        fs.rmdir(b"d")

    # -- content -----------------------------------------------------------------------------
    def test_what_was_written_is_read_and_holes_are_zeros(self, fs: Driver) -> None:
        number = fs.file(b"f")
        for offset, data in ((0, b"start"), (4095, b"page edge"), (131_071, b"block edge"), (300_000, b"end")):
            assert fs.volume.write(number, offset, data) == len(data)
        expected = bytearray(300_003)
        for offset, data in ((0, b"start"), (4095, b"page edge"), (131_071, b"block edge"), (300_000, b"end")):
            expected[offset : offset + len(data)] = data
        assert fs.read(number) == expected
        assert fs.read(number, 131_070, 5) == expected[131_070:131_075]
        assert fs.read(number, 300_001, 100) == b"nd"
        assert fs.read(number, 300_003, 1) == fs.read(number, 10**12, 1) == b""

    def test_any_buffer_can_be_written(self, fs: Driver) -> None:
        number = fs.file(b"f")
        buffers: tuple[Buffer, ...] = (b"ab", bytearray(b"ab"), memoryview(b"xaby")[1:3])
        for at, data in enumerate(buffers):
            fs.volume.write(number, 2 * at, data)
        assert fs.read(number) == b"ababab"

    def test_writing_nothing_changes_nothing(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns
        clock.tick()
        assert fs.volume.write(number, 100, b"") == 0
        assert (fs.stat(number).size, fs.stat(number).mtime_ns) == (1, before)

    def test_truncating_and_growing_again_reads_zeros(self, fs: Driver) -> None:
        for cut in (3, 4096, 5000, 131_072, 131_073):
            number = fs.file(b"f%d" % cut, b"x" * 200_000)
            fs.set(number, size=cut)
            fs.set(number, size=200_000)
            assert fs.read(number) == b"x" * cut + bytes(200_000 - cut)

    def test_a_sparse_file_of_10_to_the_15_costs_nothing_but_what_is_written(self, fs: Driver) -> None:
        number = fs.file(b"f")
        fs.set(number, size=10**15)
        assert (fs.stat(number).size, fs.stat(number).blocks) == (10**15, 0)
        assert fs.read(number, 10**15 - 10, 100) == bytes(10)
        fs.volume.write(number, 5 * 10**14, b"x")
        assert 0 < fs.stat(number).blocks <= 2 * 131_072 // 512
        fs.set(number, size=10)
        assert fs.stat(number).blocks == 0

    def test_nothing_lies_beyond_the_largest_file_size(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x")
        with fails(errno.EFBIG):
            fs.volume.write(number, 2**63 - 1, b"xx")
        with fails(errno.EFBIG):
            fs.set(number, size=2**63)
        with fails(errno.EFBIG):
            fs.volume.fallocate(number, 0, 2**63 - 1, 10)
        assert fs.read(number) == b"x"

    def test_seek_tells_data_from_holes(self, fs: Driver) -> None:
        number = fs.file(b"f")
        fs.volume.write(number, 1 << 20, b"x" * PAGE_BYTES)
        fs.set(number, size=4 << 20)
        data = fs.volume.seek(number, 0, os.SEEK_DATA)
        hole = fs.volume.seek(number, 1 << 20, os.SEEK_HOLE)
        assert isinstance(data, int)
        assert isinstance(hole, int)
        assert 0 < data <= 1 << 20
        assert (1 << 20) + PAGE_BYTES <= hole < 4 << 20
        assert fs.volume.seek(number, 0, os.SEEK_HOLE) == 0
        for offset, whence in ((hole, os.SEEK_DATA), (4 << 20, os.SEEK_DATA), (4 << 20, os.SEEK_HOLE)):
            with fails(errno.ENXIO):
                fs.volume.seek(number, offset, whence)

    def test_punching_a_hole_zeroes_it_keeps_the_size_and_gives_pages_back(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x" * 20_000)
        before = fs.stat(number).blocks
        fs.volume.fallocate(number, PUNCH_HOLE | KEEP_SIZE, 4_000, 10_000)
        assert fs.read(number) == b"x" * 4_000 + bytes(10_000) + b"x" * 6_000
        assert fs.stat(number).blocks == before - 2 * PAGE_BYTES // 512

    def test_fallocate_grows_the_file_unless_told_not_to(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x")
        fs.volume.fallocate(number, KEEP_SIZE, 0, 10_000)
        assert fs.stat(number).size == 1
        assert fs.stat(number).blocks == 3 * PAGE_BYTES // 512
        fs.volume.fallocate(number, 0, 0, 10_000)
        assert fs.read(number) == b"x" + bytes(9_999)
        with fails(errno.EOPNOTSUPP):
            fs.volume.fallocate(number, 0x20, 0, 4096)
        for offset, length in ((-1, 1), (0, 0)):
            with fails(errno.EINVAL):
                fs.volume.fallocate(number, 0, offset, length)

    def test_copy_range_copies_up_to_the_end_of_the_source(self, fs: Driver) -> None:
        source, target = fs.file(b"a", bytes(range(256)) * 1000), fs.file(b"b", b"y" * 10)
        assert fs.volume.copy_range(source, 100, target, 5, 10**6) == 255_900
        assert fs.read(target) == b"yyyyy" + fs.read(source)[100:]
        assert fs.volume.copy_range(source, 10**7, target, 0, 10) == 0

    # -- quota -------------------------------------------------------------------------------
    def test_a_write_over_the_quota_is_cut_to_what_fits_and_then_refused(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        number = fs.file(b"f")
        assert fs.volume.write(number, 100, b"x" * 20 * PAGE_BYTES) == 10 * PAGE_BYTES - 100
        assert fs.stat(number).size == 10 * PAGE_BYTES
        with fails(errno.ENOSPC):
            fs.volume.write(number, 10 * PAGE_BYTES, b"y")
        assert fs.read(number) == bytes(100) + b"x" * (10 * PAGE_BYTES - 100)
        assert fs.volume.write(number, 0, b"y" * PAGE_BYTES) == PAGE_BYTES  # takes no room
        statfs = fs.volume.statfs()
        assert (getattr(statfs, "blocks_free", None), getattr(statfs, "blocks", None)) == (0, 10)

    def test_room_comes_back_when_files_shrink_or_go(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        fs.file(b"a", b"x" * 5 * PAGE_BYTES)
        fs.file(b"b", b"x" * 5 * PAGE_BYTES)
        fs.set(b"a", size=PAGE_BYTES)
        number = fs.hold(b"b")
        fs.unlink(b"b")
        last = fs.file(b"c", b"y" * 4 * PAGE_BYTES)
        with fails(errno.ENOSPC):  # what is open still takes its room
            fs.volume.write(last, 4 * PAGE_BYTES, b"y")
        fs.volume.forget(number, 1)
        assert fs.volume.write(last, 4 * PAGE_BYTES, b"y" * 5 * PAGE_BYTES) == 5 * PAGE_BYTES

    def test_fallocate_takes_room_that_a_later_write_cannot_lack(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        number = fs.file(b"f")
        with fails(errno.ENOSPC):
            fs.volume.fallocate(number, 0, 0, 11 * PAGE_BYTES)
        assert (fs.stat(number).size, fs.stat(number).blocks) == (0, 0)
        fs.volume.fallocate(number, 0, 0, 8 * PAGE_BYTES)
        with fails(errno.ENOSPC):
            fs.volume.fallocate(fs.file(b"g"), 0, 0, 3 * PAGE_BYTES)
        assert fs.volume.write(number, 0, b"x" * 8 * PAGE_BYTES) == 8 * PAGE_BYTES

    def test_holes_take_no_room(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        fs.set(fs.file(b"f"), size=10**12)
        fs.file(b"g", b"x" * 10 * PAGE_BYTES)

    def test_inodes_over_the_quota_are_refused_and_leave_no_trace(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_inodes=3))  # the root is one
        number = fs.file(b"a")
        fs.directory(b"b")
        makers: tuple[Callable[[], object], ...] = (
            lambda: fs.file(b"c"),
            lambda: fs.directory(b"c"),
            lambda: fs.symlink(b"c", b"x"),
            lambda: fs.volume.tmpfile(ROOT_INODE, 0o600, ALICE),
        )
        for make in makers:
            with fails(errno.ENOSPC):
                make()
        assert fs.names() == [b"a", b"b"]
        fs.link(number, b"c")
        fs.unlink(b"c")
        fs.unlink(b"a")
        fs.file(b"c")

    # -- attributes --------------------------------------------------------------------------
    def test_setattr_sets_what_is_named_and_nothing_else(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns
        now = clock.tick()
        shown = fs.set(number, mode=0o600, uid=5, gid=6)
        assert (shown.mode, shown.uid, shown.gid, shown.size) == (stat.S_IFREG | 0o600, 5, 6, 1)
        assert (shown.mtime_ns, shown.ctime_ns) == (before, now)

    def test_times_have_nanoseconds_and_may_lie_before_1970(self, fs: Driver) -> None:
        number = fs.file(b"f")
        shown = fs.set(number, atime_ns=-1, mtime_ns=1_234_567_890_123_456_789)
        assert (shown.atime_ns, shown.mtime_ns) == (-1, 1_234_567_890_123_456_789)

    def test_writes_and_truncations_clear_suid_and_sgid_when_told_to(self, fs: Driver) -> None:
        number = fs.file(b"f", mode=0o6755)
        fs.volume.write(number, 0, b"xx")
        assert fs.stat(number).mode & 0o7777 == 0o6755
        fs.volume.write(number, 0, b"xx", kill_privileges=True)
        assert fs.stat(number).mode & 0o7777 == 0o755
        fs.set(number, mode=0o6755)
        assert fs.set(number, size=1, kill_privileges=True).mode & 0o7777 == 0o755
        fs.set(number, mode=0o6755)
        assert fs.set(number, uid=1, kill_privileges=True).mode & 0o7777 == 0o755

    def test_sgid_without_group_execute_is_no_privilege(self, fs: Driver) -> None:
        number = fs.file(b"f", mode=0o2644)
        fs.volume.write(number, 0, b"x", kill_privileges=True)
        assert fs.stat(number).mode & 0o7777 == 0o2644

    def test_a_directorys_set_gid_bit_survives_a_chown(self, fs: Driver) -> None:
        fs.directory(b"d")
        fs.set(b"d", mode=0o2755)
        assert fs.set(b"d", gid=9, kill_privileges=True).mode & 0o7777 == 0o2755

    def test_file_capabilities_do_not_outlive_a_change_of_content_or_owner(self, fs: Driver) -> None:
        changes: tuple[Callable[[int], object], ...] = (
            lambda number: fs.volume.write(number, 0, b"x"),
            lambda number: fs.set(number, size=0),
            lambda number: fs.set(number, uid=3),
        )
        for at, change in enumerate(changes):
            number = fs.file(b"f%d" % at, b"abc")
            fs.volume.setxattr(number, b"security.capability", b"cap", 0)
            fs.volume.setxattr(number, b"user.kept", b"1", 0)
            change(number)
            assert fs.volume.listxattr(number) == (b"user.kept",)

    @pytest.mark.parametrize("what", ["write", "truncate", "punch"])
    def test_changing_content_moves_mtime_and_ctime(self, fs: Driver, clock: Clock, what: str) -> None:
        number = fs.file(b"f", b"x" * 5000)
        now = clock.tick()
        if what == "write":
            fs.volume.write(number, 0, b"y")
        elif what == "truncate":
            fs.set(number, size=100)
        else:
            fs.volume.fallocate(number, PUNCH_HOLE | KEEP_SIZE, 0, 4096)
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == (now, now)

    def test_changing_names_moves_the_times_of_directories_and_the_ctime_of_what_is_named(
        self, fs: Driver, clock: Clock
    ) -> None:
        fs.directory(b"d")
        number = fs.file(b"f")
        fs.file(b"d/victim")
        victim = fs.hold(b"d/victim")
        steps: tuple[tuple[Callable[[], object], tuple[bytes, ...], int], ...] = (
            (lambda: fs.link(number, b"d/g"), (b"d",), number),
            (lambda: fs.unlink(b"d/g"), (b"d",), number),
            (lambda: fs.rename(b"f", b"d/victim"), (b"", b"d"), number),
            (lambda: fs.directory(b"d/sub"), (b"d",), 0),
            (lambda: fs.rmdir(b"d/sub"), (b"d",), 0),
        )
        for change, directories, named in steps:
            created = fs.stat(number).mtime_ns
            now = clock.tick()
            change()
            for path in directories:
                assert (fs.stat(path).mtime_ns, fs.stat(path).ctime_ns) == (now, now)
            if named:
                assert (fs.stat(named).mtime_ns, fs.stat(named).ctime_ns) == (created, now)
        assert fs.stat(victim).nlink == 0

    def test_reading_changes_neither_mtime_nor_ctime(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns, fs.stat(number).ctime_ns
        clock.tick()
        fs.read(number)
        fs.names()
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == before

    # -- extended attributes -----------------------------------------------------------------
    def test_xattrs_are_set_listed_and_removed(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f")
        before = fs.stat(number).mtime_ns
        now = clock.tick()
        fs.volume.setxattr(number, b"user.a", b"\0binary\xff", 0)
        fs.volume.setxattr(number, b"user.b", b"", 0)
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == (before, now)
        assert sorted(cast("tuple[bytes, ...]", fs.volume.listxattr(number))) == [b"user.a", b"user.b"]
        assert fs.volume.getxattr(number, b"user.a") == b"\0binary\xff"
        assert fs.volume.getxattr(number, b"user.b") == b""
        fs.volume.removexattr(number, b"user.a")
        for use in (fs.volume.getxattr, fs.volume.removexattr):
            with fails(errno.ENODATA):
                use(number, b"user.a")

    def test_xattr_flags_demand_presence_or_absence(self, fs: Driver) -> None:
        number = fs.directory(b"d")
        with fails(errno.ENODATA):
            fs.volume.setxattr(number, b"user.a", b"1", os.XATTR_REPLACE)
        fs.volume.setxattr(number, b"user.a", b"1", os.XATTR_CREATE)
        with fails(errno.EEXIST):
            fs.volume.setxattr(number, b"user.a", b"2", os.XATTR_CREATE)
        fs.volume.setxattr(number, b"user.a", b"3", os.XATTR_REPLACE)
        assert fs.volume.getxattr(number, b"user.a") == b"3"

    # -- the rest ----------------------------------------------------------------------------
    def test_statfs_counts_what_is_used(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=100 * PAGE_BYTES, max_inodes=50))
        fs.file(b"f", b"x" * (PAGE_BYTES + 1))
        statfs = fs.volume.statfs()
        shown = {name: getattr(statfs, name, None) for name in ("blocks", "blocks_free", "inodes", "inodes_free")}
        assert shown == {"blocks": 100, "blocks_free": 98, "inodes": 50, "inodes_free": 48}

    def test_fsync_of_anything_is_allowed(self, fs: Driver) -> None:
        for number in (ROOT_INODE, fs.file(b"f", b"x"), fs.directory(b"d")):
            fs.volume.fsync(number, data_only=False)
