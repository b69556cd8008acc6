"""POSIX ACLs, against the kernel's own arithmetic: a tmpfs is told the same, and must come to the same."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.linux import posix_acl
from protocol.linux.posix_acl import ACCESS, DEFAULT

VERSION = struct.pack("<I", 2)
UNDEFINED = 0xFFFFFFFF
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32


def acl(*entries: tuple[int, int, int]) -> bytes:
    return VERSION + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@st.composite
def acls(draw: st.DrawFn) -> bytes:
    """What setxattr(2) takes: entries in order, a mask where users or groups are named."""
    permission = st.integers(0, 7)
    users = draw(st.lists(st.integers(0, 70_000), max_size=3, unique=True))
    groups = draw(st.lists(st.integers(0, 70_000), max_size=3, unique=True))
    entries = [(USER_OBJ, draw(permission), UNDEFINED)]
    entries += [(USER, draw(permission), user) for user in sorted(users)]
    entries.append((GROUP_OBJ, draw(permission), UNDEFINED))
    entries += [(GROUP, draw(permission), group) for group in sorted(groups)]
    if users or groups or draw(st.booleans()):
        entries.append((MASK, draw(permission), UNDEFINED))
    entries.append((OTHER, draw(permission), UNDEFINED))
    return acl(*entries)


def kept(path: str, name: bytes) -> bytes | None:
    return os.getxattr(path, name) if os.fsdecode(name) in os.listxattr(path) else None


modes = st.integers(0, 0o7777)


@pytest.fixture(scope="module")
def oracle() -> Iterator[str]:
    """A directory on tmpfs."""
    directory = Path("/dev/shm", f"vfsd-acl-{os.getpid()}")
    directory.mkdir(0o700)
    yield str(directory)
    directory.rmdir()


@given(value=acls(), before=modes)
def test_an_access_acl_sets_the_mode_that_tmpfs_sets_and_is_kept_where_tmpfs_keeps_it(
    oracle: str, value: bytes, before: int
) -> None:
    path = f"{oracle}/file"
    with open(path, "x"):
        pass
    try:
        os.chmod(path, before)
        os.setxattr(path, ACCESS, value)
        mode = os.stat(path).st_mode
        assert posix_acl.access_acl(stat.S_IFREG | before, value) == (mode, kept(path, ACCESS))
    finally:
        os.unlink(path)


@given(value=acls(), mode=modes)
def test_chmod_changes_an_access_acl_as_tmpfs_does(oracle: str, value: bytes, mode: int) -> None:
    path = f"{oracle}/file"
    with open(path, "x"):
        pass
    try:
        os.setxattr(path, ACCESS, value)
        before = kept(path, ACCESS)
        os.chmod(path, mode)
        after = kept(path, ACCESS)
        assert after == (None if before is None else posix_acl.chmod(before, mode))
    finally:
        os.unlink(path)


@given(
    value=st.one_of(st.none(), acls()), mode=st.integers(0, 0o777), umask=st.integers(0, 0o777), is_dir=st.booleans()
)
def test_what_is_made_inherits_as_on_tmpfs(
    oracle: str, value: bytes | None, mode: int, umask: int, is_dir: bool
) -> None:
    parent = f"{oracle}/parent"
    path = f"{parent}/made"
    os.mkdir(parent)
    old = os.umask(umask)
    try:
        if value is not None:
            os.setxattr(parent, DEFAULT, value)
        if is_dir:
            os.mkdir(path, mode)
        else:
            os.mknod(path, stat.S_IFREG | mode)
        found = os.stat(path).st_mode
        expected = (found, kept(path, ACCESS), kept(path, DEFAULT))
        kind = stat.S_IFDIR if is_dir else stat.S_IFREG
        assert posix_acl.inherit(value, kind | mode, umask) == expected
    finally:
        os.umask(old)
        if os.path.lexists(path):
            (os.rmdir if is_dir else os.unlink)(path)
        os.rmdir(parent)


def test_a_symlink_inherits_nothing_and_knows_no_umask() -> None:
    default = acl((USER_OBJ, 0, UNDEFINED), (GROUP_OBJ, 0, UNDEFINED), (OTHER, 0, UNDEFINED))
    assert posix_acl.inherit(default, stat.S_IFLNK | 0o777, 0o77) == (stat.S_IFLNK | 0o777, None, None)


def test_an_acl_without_entries_stands_for_none() -> None:
    assert not posix_acl.parse(VERSION)
    assert not posix_acl.parse(b"")
    assert posix_acl.access_acl(stat.S_IFREG | 0o640, VERSION) == (stat.S_IFREG | 0o640, None)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"\2\0\0", errno.EINVAL),
        (VERSION + b"\1", errno.EINVAL),
        (struct.pack("<I", 3) + acl((USER_OBJ, 7, 0))[4:], errno.EOPNOTSUPP),
        (acl((USER_OBJ, 7, UNDEFINED)), errno.EINVAL),
        (acl((USER_OBJ, 7, 0), (GROUP_OBJ, 7, 0), (OTHER, 7, 0), (64, 7, 0)), errno.EINVAL),
    ],
)
def test_what_is_no_acl_is_refused_as_the_kernel_refuses_it(oracle: str, value: bytes, code: int) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        posix_acl.parse(value)
    assert raised.value.errno == code
    path = f"{oracle}/file"
    with open(path, "x"):
        pass
    try:
        with pytest.raises(OSError, match=r".") as raised:
            os.setxattr(path, ACCESS, value)
        assert raised.value.errno == code
    finally:
        os.unlink(path)
