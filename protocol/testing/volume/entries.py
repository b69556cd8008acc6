"""The contract of names: inodes and their lifetime, links, rename, directories, errors."""

from __future__ import annotations

import errno
import os
import stat
from typing import ClassVar, cast

import pytest

from protocol.testing.volume.driver import (
    ALICE,
    Clock,
    Driver,
    VolumeSuite,
    fails,
)
from protocol.volume import (
    COOKIE_END,
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INODE,
    Attributes,
    Caller,
    extended,
)


class EntriesContract(VolumeSuite):
    """The contract of names."""

    removed_files: ClassVar = 20_000  # in one directory, by `rm -rf`

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

    def test_an_orphan_is_found_by_number_until_its_last_forget(self, fs: Driver) -> None:
        volume = fs.volume
        if not volume.capabilities.orphans:
            return
        finding = extended(volume)
        for number in (fs.file(b"f", b"content"), fs.symlink(b"l", b"target"), ROOT_INODE, 10**9):
            assert not finding.is_orphan(number)
            with fails(errno.ENOENT):
                finding.lookup_orphan(number)
        number = fs.hold(b"f")
        fs.unlink(b"f")
        assert finding.is_orphan(number)
        found = finding.lookup_orphan(number)
        assert (found.inode, found.nlink, found.size) == (number, 0, len(b"content"))
        volume.forget(number, 1)
        assert finding.is_orphan(number)
        volume.forget(number, 1)
        assert not finding.is_orphan(number)

    def test_a_file_renamed_over_stays_readable_while_it_is_held(self, fs: Driver) -> None:
        fs.file(b"old", b"old")
        fs.file(b"new", b"new")
        number = fs.hold(b"old")
        fs.rename(b"new", b"old")
        assert (fs.read(number), fs.read(b"old")) == (b"old", b"new")

    def test_a_removed_directory_that_is_held_is_empty_and_accepts_no_new_entry(self, fs: Driver) -> None:
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

    def test_inode_numbers_are_never_reused(self, fs: Driver) -> None:
        numbers = set()
        for _ in range(50):
            numbers.add(fs.file(b"f"))
            fs.unlink(b"f")
        assert len(numbers) == 50

    # -- making entries ----------------------------------------------------------------------
    def test_a_new_file_has_the_callers_owner_its_mode_and_the_time(self, fs: Driver, clock: Clock) -> None:
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

    def test_a_symlink_returns_its_target_and_has_its_length(self, fs: Driver) -> None:
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

    def test_a_set_gid_directory_passes_on_its_group_and_to_directories_its_bit(self, fs: Driver) -> None:
        fs.directory(b"d", caller=Caller(0, 77))
        fs.set(b"d", mode=0o2775)
        fs.file(b"d/f")
        fs.directory(b"d/d", mode=0o755)
        fs.symlink(b"d/s", b"x")
        assert [fs.stat(path).gid for path in (b"d/f", b"d/d", b"d/s")] == [77, 77, 77]
        assert fs.stat(b"d/d").mode == stat.S_IFDIR | 0o2755
        assert fs.stat(b"d/f").mode == stat.S_IFREG | 0o644

    def test_a_name_may_have_any_bytes_but_slash_and_nul(self, fs: Driver) -> None:
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
    def test_rename_over_an_existing_name(self, fs: Driver, old: str, new: str, code: int) -> None:
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

    def test_rename_noreplace_refuses_an_existing_name_and_exchange_a_missing_one(self, fs: Driver) -> None:
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

    def test_rename_exchange_swaps_a_file_and_a_full_directory(self, fs: Driver) -> None:
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
    def test_creating_an_existing_name_is_refused(self, fs: Driver) -> None:
        number = fs.file(b"f")
        for make in (fs.file, fs.directory, lambda path: fs.symlink(path, b"x"), lambda path: fs.link(number, path)):
            with fails(errno.EEXIST):
                make(b"f")

    def test_using_a_missing_name_is_refused(self, fs: Driver) -> None:
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

    def test_a_file_has_no_names_below_it(self, fs: Driver) -> None:
        fs.file(b"f")
        for use in (fs.at, fs.unlink, fs.rmdir, fs.file, fs.directory):
            with fails(errno.ENOTDIR):
                use(b"f/x")
        with fails(errno.ENOTDIR):
            list(fs.entries(b"f"))

    def test_rmdir_refuses_files_and_full_directories_and_unlink_directories(self, fs: Driver) -> None:
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

    def test_an_inode_that_never_existed_is_missing(self, fs: Driver) -> None:
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
    def test_readdir_lists_the_dots_and_every_entry_with_its_type(self, fs: Driver) -> None:
        file, directory = fs.file(b"f"), fs.directory(b"d")
        found = {entry.name: (entry.inode, stat.S_IFMT(entry.mode)) for entry in fs.entries()}
        assert found == {
            b".": (ROOT_INODE, stat.S_IFDIR),
            b"..": (ROOT_INODE, stat.S_IFDIR),
            b"f": (file, stat.S_IFREG),
            b"d": (directory, stat.S_IFDIR),
        }

    def test_readdir_continues_after_any_cookie(self, fs: Driver) -> None:
        for at in range(20):
            fs.file(b"%d" % at)
        every = list(fs.entries())
        cookies = [entry.cookie for entry in every]
        assert cookies == sorted(set(cookies))
        assert cookies[0] > 0
        for at, entry in enumerate(every):
            assert list(fs.entries(b"", entry.cookie)) == every[at + 1 :]

    def test_a_scan_lists_each_lasting_name_once_while_others_come_and_go(self, fs: Driver) -> None:
        there = set(range(1000))
        for at in there:
            fs.file(b"%d" % at)
        seen: list[bytes] = []
        cookie = 0
        while batch := [entry for _, entry in zip(range(7), fs.entries(b"", cookie), strict=False)]:
            cookie = batch[-1].cookie
            seen += [entry.name for entry in batch]
            step = len(seen)
            fs.file(b"new%d" % step) if step < 2000 else None
            for at in range(step // 7 * 3 % 1000, step // 7 * 3 % 1000 + 3):
                if at % 2 and at in there and step < 2000:
                    fs.unlink(b"%d" % at)
                    there.remove(at)
        assert all(seen.count(b"%d" % at) == 1 for at in range(0, 1000, 2))

    def test_a_scan_ends_and_lists_a_name_once_though_its_reader_adds_and_replaces_names(self, fs: Driver) -> None:
        there = [b"%d" % at for at in range(60)]
        for name in there:
            fs.file(name)
        seen: list[bytes] = []
        cookie = 2
        while batch := [entry for _, entry in zip(range(5), fs.entries(b"", cookie), strict=False)]:
            cookie = batch[-1].cookie
            assert cookie < COOKIE_END
            for entry in batch:
                seen.append(entry.name)
                assert len(seen) < 500, "the scan does not end"
                fs.file(b"%d.new" % len(seen))
                fs.file(b"%d.t" % len(seen))
                fs.volume.rename(ROOT_INODE, b"%d.t" % len(seen), ROOT_INODE, there[-1 - len(seen) % 60])
        assert all(seen.count(name) == 1 for name in there)

    def test_rm_rf_removes_each_file_while_listing(self, fs: Driver) -> None:
        fs.directory(b"d")
        number = fs.at(b"d")
        for at in range(self.removed_files):
            made = cast("Attributes", fs.volume.mknod(number, b"%d" % at, stat.S_IFREG, 0, ALICE))
            fs.volume.forget(made.inode, 1)
        seen = 0
        cookie = 2
        while batch := [entry for _, entry in zip(range(100), fs.entries(number, cookie), strict=False)]:
            cookie = batch[-1].cookie
            for entry in batch:
                fs.volume.unlink(number, entry.name)
            seen += len(batch)
        assert seen == self.removed_files
        fs.rmdir(b"d")
