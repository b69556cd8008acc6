"""Extended attributes, POSIX ACLs among them, in a memory volume, where no kernel stands before it."""

from __future__ import annotations

import contextlib
import errno
import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.xattrs import Xattrs, after_remove, after_set, content_bytes
from protocol.linux.posix_acl import ACCESS, DEFAULT
from protocol.tree import TreeEntry
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from tests.support.trees import DictTree

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
