"""A memory volume as a whole: its methods, extended attributes and ACLs, listings, and what a fork(2) drops."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.xattrs import Xattrs, after_remove, after_set, content_bytes
from protocol.backends.overlay import OverlayVolume
from protocol.directory_cookies import FIRST_COOKIE, AscendingCookies, DirectoryCookies, downward
from protocol.linux.posix_acl import ACCESS, DEFAULT
from protocol.tree import TreeEntry
from protocol.volume import COOKIE_END, ROOT_INODE, AttributeChanges, Caller
from tests.support.journals import JournalInMemory
from tests.support.trees import DictTree


@pytest.mark.parametrize("kind", [MemoryVolume, OverlayVolume])
def test_no_method_is_assigned_to_an_instance(kind: type[MemoryVolume], tmp_path: Path) -> None:
    volume = MemoryVolume() if kind is MemoryVolume else OverlayVolume(os.fsencode(tmp_path))
    journal = JournalInMemory()
    journal.keep(volume)
    volume.share_limit(None)
    volume.connect(is_known=True)
    assert {name for name in vars(volume) if callable(getattr(kind, name, None))} == set()


USER = Caller(0, 0)


def test_lookups_and_inodes_without_links_are_dropped() -> None:
    volume = MemoryVolume()
    kept = volume.mknod(1, b"kept", 0o100644, 0, USER)
    orphan = volume.mknod(1, b"orphan", 0o100644, 0, USER)
    volume.write(orphan.inode, 0, b"x" * 10_000)
    volume.unlink(1, b"orphan")
    assert volume.lookup_counts().keys() == {1, kept.inode, orphan.inode}
    used = volume.usage().used_bytes
    with volume.forking():
        pass
    volume.forked()
    assert volume.lookup_counts() == {1: 1}
    assert volume.usage().used_bytes == (used or 0) - 12_288
    assert volume.lookup(1, b"kept").inode == kept.inode
    volume.check_invariants()


def test_an_orphan_that_a_snapshot_holds_is_dropped_and_can_be_restored() -> None:
    volume = MemoryVolume()
    directory = volume.mkdir(1, b"directory", 0o755, USER)
    file = volume.mknod(directory.inode, b"file", 0o100644, 0, USER)
    volume.tmpfile(1, 0o600, USER)
    volume.take_snapshot("one")
    volume.unlink(directory.inode, b"file")
    volume.rmdir(1, b"directory")
    volume.restore_snapshot("one")
    directory = volume.lookup(1, b"directory")  # another one: the kernel holds the removed one
    volume.unlink(directory.inode, b"file")
    volume.forked()
    volume.check_invariants()
    assert volume.lookup_counts() == {1: 1}
    volume.restore_snapshot("one")
    assert volume.lookup(directory.inode, b"file").inode == file.inode
    volume.check_invariants()


def test_open_views_are_closed() -> None:
    volume = MemoryVolume()
    volume.mknod(1, b"file", 0o100644, 0, USER)
    kept = volume.usage().snapshot_bytes
    views = contextlib.ExitStack()
    views.enter_context(volume.tree())
    assert volume.usage().snapshot_bytes != kept
    volume.forked()  # the thread that reads the view is not in the new process
    assert volume.usage().snapshot_bytes == kept
    volume.take_snapshot("one")
    volume.drop_snapshot("one")
    assert volume.usage().snapshot_bytes == kept
    views.close()  # changes nothing any more
    assert volume.usage().snapshot_bytes == kept
    volume.check_invariants()


def test_memory_that_an_import_borrowed_is_taken_back() -> None:
    volume = MemoryVolume(max_memory=64 << 20)
    before = volume.usage().overhead_bytes
    stage = volume.new_stage()
    file = stage.mknod(1, b"file", 0o100644, 0, USER)
    stage.write(file.inode, 0, b"x" * (1 << 20))
    assert (volume.usage().overhead_bytes or 0) >= (before or 0) + (1 << 20)
    volume.forked()
    assert volume.usage().overhead_bytes == before
    volume.check_invariants()


CALLER = Caller(1000, 1000, umask=0o027)
VERSION = struct.pack("<I", 2)


def acl(user_obj: int, named: int, group_obj: int, mask: int, other: int) -> bytes:
    rows = ((1, user_obj, -1), (2, named, 7), (4, group_obj, -1), (16, mask, -1), (32, other, -1))
    return VERSION + b"".join(struct.pack("<HHi", *row) for row in rows)


def code_of(action: object, *arguments: object) -> int | None:
    with pytest.raises(OSError, match=r".") as raised:
        action(*arguments)  # type: ignore[operator]
    return raised.value.errno


def test_a_default_acl_takes_the_umasks_place_for_all_but_symlinks(volume: MemoryVolume) -> None:
    default = acl(7, 7, 5, 7, 0)
    volume.setxattr(ROOT_INODE, DEFAULT, default, 0)
    file = volume.mknod(ROOT_INODE, b"f", stat.S_IFREG | 0o666, 0, CALLER)
    assert stat.S_IMODE(file.mode) == 0o660
    assert volume.getxattr(file.inode, ACCESS) == acl(6, 7, 5, 6, 0)
    directory = volume.mkdir(ROOT_INODE, b"d", 0o777, CALLER)
    assert volume.listxattr(directory.inode) == (ACCESS, DEFAULT)
    assert volume.getxattr(directory.inode, DEFAULT) == default
    assert volume.getxattr(volume.tmpfile(ROOT_INODE, 0o666, CALLER).inode, ACCESS) == acl(6, 7, 5, 6, 0)
    link = volume.symlink(ROOT_INODE, b"l", b"x", CALLER)
    assert (stat.S_IMODE(link.mode), volume.listxattr(link.inode)) == (0o777, ())


def test_a_snapshot_keeps_an_acl_that_chmod_then_changes(volume: MemoryVolume) -> None:
    inode = volume.mknod(ROOT_INODE, b"f", stat.S_IFREG | 0o666, 0, CALLER).inode
    volume.setxattr(inode, ACCESS, acl(6, 6, 4, 6, 4), 0)
    volume.take_snapshot("s")
    volume.setattr(inode, AttributeChanges(mode=0o600))
    assert volume.getxattr(inode, ACCESS) == acl(6, 6, 4, 0, 0)
    volume.restore_snapshot("s")
    assert volume.getxattr(inode, ACCESS) == acl(6, 6, 4, 6, 4)
    assert stat.S_IMODE(volume.getattr(inode).mode) == 0o664
    volume.check_invariants()


def test_an_acl_may_be_removed_that_is_not_there_and_no_file_has_a_default(volume: MemoryVolume) -> None:
    inode = volume.mknod(ROOT_INODE, b"f", stat.S_IFREG | 0o666, 0, CALLER).inode
    volume.removexattr(inode, ACCESS)
    volume.removexattr(inode, DEFAULT)
    assert code_of(volume.setxattr, inode, DEFAULT, acl(7, 7, 7, 7, 7), 0) == errno.EACCES
    volume.setxattr(inode, DEFAULT, VERSION, 0)
    link = volume.symlink(ROOT_INODE, b"l", b"x", CALLER).inode
    assert code_of(volume.setxattr, link, ACCESS, acl(7, 7, 7, 7, 7), 0) == errno.EOPNOTSUPP
    assert code_of(volume.setxattr, inode, ACCESS, b"nonsense", 0) in (errno.EINVAL, errno.EOPNOTSUPP)
    assert code_of(volume.setxattr, inode, b"system.posix_acl", b"", 0) == errno.EOPNOTSUPP


@pytest.mark.parametrize("value", [b"nonsense", VERSION + b"\0" * 7, VERSION + struct.pack("<HHi", 1, 7, -1)])
def test_an_import_with_what_is_no_acl_changes_nothing(volume: MemoryVolume, value: bytes) -> None:
    volume.mknod(ROOT_INODE, b"kept", stat.S_IFREG | 0o666, 0, CALLER)
    entry = TreeEntry(b"d", stat.S_IFDIR | 0o755, xattrs={DEFAULT: value})
    tree = DictTree({b"d": (entry, b""), b"a": b"content"})
    assert code_of(lambda: volume.import_tree(tree, replace=True)) in (errno.EINVAL, errno.EOPNOTSUPP)
    assert [entry.name for entry in volume.readdir(ROOT_INODE, 2)] == [b"kept"]
    volume.check_invariants()


NAMES = st.sampled_from([b"user.a", b"user.bb", b"security.capability"])


@given(st.lists(st.tuples(NAMES, st.sampled_from([None, b"", b"x", b"long" * 9])), max_size=12))
def test_the_sum_is_that_of_all_names_and_values(changes: list[tuple[bytes, bytes | None]]) -> None:
    xattrs: Xattrs | None = None
    expected: Xattrs = {}
    for name, value in changes:
        if value is not None:
            _, xattrs = after_set(0o100644, xattrs, name, value, 0)
            expected[name] = value
        else:
            with contextlib.suppress(OSError):  # there is none
                xattrs = after_remove(xattrs, name)
            expected.pop(name, None)
        assert list((xattrs or {}).items()) == list(expected.items())
        assert content_bytes(xattrs) == sum(len(key) + len(kept) for key, kept in expected.items())


class ListingMachine(RuleBasedStateMachine):
    """One listing that changes under several scans.  Each asks for a few names at a time."""

    @initialize(count=st.integers(0, 80))
    def begin(self, count: int) -> None:
        self.names = {b"%d" % at for at in range(count)}
        self.listing = DirectoryCookies(sorted(self.names))
        self.added = 0
        self.cookies = {name: cookie for cookie, name in self.listing.after(0)}
        # Of each scan: where it is, what it has seen, what was there all the time since it began, and what was there
        # when it read its first names.
        self.scans: list[tuple[int, list[bytes], set[bytes], set[bytes]]] = []

    @rule(count=st.integers(1, 40), again=st.booleans())
    def add(self, count: int, again: bool) -> None:
        for at in range(count):
            name = b"%d" % at if again else b"new%d" % self.added
            self.added += 1
            if name not in self.names:
                self.listing.add(name)
                self.names.add(name)

    @rule(first=st.integers(0, 80), count=st.integers(1, 80))
    def remove(self, first: int, count: int) -> None:
        for name in sorted(self.names)[first : first + count]:
            self.listing.remove(name)
            self.names.remove(name)
            self.scans = [(cookie, seen, stayed - {name}, began) for cookie, seen, stayed, began in self.scans]

    @rule()
    def start_a_scan(self) -> None:
        self.scans.append((0, [], set(self.names), set(self.names)))

    @rule(which=st.integers(0, 5), count=st.integers(1, 30))
    def go_on(self, which: int, count: int) -> None:
        if not self.scans:
            return
        cookie, seen, stayed, began = self.scans[which % len(self.scans)]
        began = began if cookie else set(self.names)
        for _, (at, name) in zip(range(count), self.listing.after(cookie), strict=False):
            assert at > cookie
            assert name in began
            cookie = at
            seen.append(name)
        self.scans[which % len(self.scans)] = (cookie, seen, stayed, began)

    @invariant()
    def lists_what_is_there_by_cookies_that_stay(self) -> None:
        listed = list(self.listing.after(0))
        assert sorted(name for _, name in listed) == sorted(self.names)
        assert [at for at, _ in listed] == sorted({at for at, _ in listed})
        assert all(at >= FIRST_COOKIE for at, _ in listed)
        assert len(self.listing) == len(self.names)

    def teardown(self) -> None:
        for cookie, seen, stayed, _ in getattr(self, "scans", []):
            everything = seen + [name for _, name in self.listing.after(cookie)]
            assert stayed <= set(everything), "a name that stayed was not seen"
            assert all(everything.count(name) == 1 for name in stayed), "a name that stayed was seen twice"


TestListing = ListingMachine.TestCase


def test_a_running_iterator_goes_on_when_gaps_are_closed() -> None:
    listing = DirectoryCookies(b"%03d" % at for at in range(200))
    running = listing.after(0)
    seen = [next(running)[1] for _ in range(150)]
    for name in seen:
        listing.remove(name)
    assert [name for _, name in running] == [b"%03d" % at for at in range(150, 200)]


def test_a_name_added_again_comes_first_and_a_cookie_is_never_given_twice() -> None:
    listing = DirectoryCookies([b"a", b"b"])
    cookies = {cookie for cookie, _ in listing.after(0)}
    listing.remove(b"b")
    listing.add(b"b")
    assert [name for _, name in listing.after(0)] == [b"b", b"a"]
    assert {cookie for cookie, name in listing.after(0) if name == b"b"}.isdisjoint(cookies)


@pytest.mark.parametrize("gaps", [0, 100])  # without and with a gap that was closed meanwhile
def test_a_name_that_is_put_back_stays_where_it_was(gaps: int) -> None:
    listing = DirectoryCookies(b"%03d" % at for at in range(150))
    before = [(cookie, name) for cookie, name in listing.after(0) if int(name) >= gaps]
    cookie = listing.cookie(b"120")
    for name in (*(b"%03d" % at for at in range(gaps)), b"120"):
        listing.remove(name)
    listing.add(b"120")
    listing.put_back(b"120", cookie)
    assert list(listing.after(0)) == before
    listing.add(b"new")
    assert next(listing.after(0))[1] == b"new"


@pytest.mark.parametrize("many", [20, 200])
def test_positions_stay_when_the_small_cookies_are_used_up_and_when_cookies_went_up_before(many: int) -> None:
    before = AscendingCookies([b"%03d" % at for at in range(many)])
    before.add(b"added")
    assert [cookie for cookie, _ in before.after(0)] == list(range(FIRST_COOKIE, FIRST_COOKIE + many + 1))
    *_, (position, _), _ = before.after(0)
    listing = downward(before, ())
    assert list(listing.after(0)) == list(before.after(0))
    running, seen = listing.after(FIRST_COOKIE), []
    for number, (_, name) in enumerate(running):
        seen.append(name)
        listing.add(b"new%d" % number)
    assert seen == [*(b"%03d" % at for at in range(1, many)), b"added"]
    assert [name for _, name in listing.after(position)] == [b"added"]
    everything = list(listing.after(0))
    assert all(0 < a < b < COOKIE_END for (a, _), (b, _) in itertools.pairwise(everything))
    for at, (cookie, _) in enumerate(everything):
        assert list(listing.after(cookie)) == everything[at + 1 :]
        assert [name for _, names in listing.chunks(cookie) for name in names] == [n for _, n in everything[at + 1 :]]
    again = DirectoryCookies.of(listing.pairs(), listing.following)
    assert list(again.after(0)) == everything
