"""Users and privileges: what another user may do, and what set-id bits survive.  Each test also runs on tmpfs."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.programs import Program
from tests.support.rights import needs_root

pytestmark = needs_root

ALICE, BOB = 61_001, 61_002
As = Callable[..., Program]


@pytest.fixture
def as_user(place: Path) -> Iterator[As]:
    """Programs of other users, standing in `place`: `as_user(ALICE)`, `as_user(BOB, groups=[7])`."""
    started: list[Program] = []

    def start(user: int, groups: tuple[int, ...] = ()) -> Program:
        program = Program(cwd=place)
        started.append(program)
        program(f"os.setgroups({list(groups)}); os.setresgid({user}, {user}, {user}); os.umask(0o022)")
        program(f"os.setresuid({user}, {user}, {user})")
        return program

    yield start
    for program in started:
        program.__exit__(None, None, None)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(program: Program, *attempts: str) -> list[int]:
    """The errno that each attempt fails with."""
    codes = []
    for attempt in attempts:
        with pytest.raises(OSError, match=r".") as raised:
            program(attempt)
        assert raised.value.errno is not None
        codes.append(raised.value.errno)
    return codes


# -- permissions ------------------------------------------------------------------------------------
def test_what_belongs_to_another_is_as_closed_as_its_mode_says(place: Path, as_user: As) -> None:
    alice = as_user(ALICE)
    (place / "secret").write_text("secret")
    (place / "secret").chmod(0o640)
    (place / "public").write_text("public")
    (place / "public").chmod(0o644)
    (place / "closed").mkdir(0o711)
    (place / "closed" / "inside").write_text("inside")
    (place / "listed").mkdir()
    (place / "listed" / "inside").touch()
    (place / "listed").chmod(0o744)
    assert alice("open('public').read(), open('closed/inside').read()") == ("public", "inside")
    assert alice("os.listdir('listed')") == ["inside"]
    assert set(
        refused(
            alice,
            "open('secret')",
            "open('public', 'a')",
            "os.truncate('public', 0)",
            "os.listdir('closed')",
            "open('closed/new', 'x')",
            "os.stat('listed/inside')",
            "os.setxattr('public', 'user.x', b'')",
            "os.getxattr('secret', 'user.x')",
            "os.utime('public')",
        )
    ) == {errno.EACCES}
    assert set(
        refused(
            alice,
            "os.chmod('public', 0o666)",
            "os.chown('public', -1, os.getgid())",
            "os.utime('public', (1, 1))",
            "os.setxattr('public', 'trusted.x', b'')",
        )
    ) == {errno.EPERM}


def test_a_group_lets_its_members_in(place: Path, as_user: As) -> None:
    (place / "shared").write_text("shared")
    os.chown(place / "shared", 0, 7_000)
    (place / "shared").chmod(0o660)
    member, stranger = as_user(ALICE, groups=(7_000,)), as_user(BOB)
    assert member("open('shared', 'r+').read()") == "shared"
    assert refused(stranger, "open('shared')") == [errno.EACCES]
    member("os.close(os.open('mine', os.O_CREAT))")
    member("os.chown('mine', -1, 7000)")
    assert (place / "mine").stat().st_gid == 7_000
    assert refused(member, "os.chown('mine', -1, 7001)", f"os.chown('mine', {BOB}, -1)") == [errno.EPERM] * 2


def test_in_a_sticky_directory_only_owners_remove_and_rename(place: Path, as_user: As) -> None:
    alice, bob = as_user(ALICE), as_user(BOB)
    (place / "sticky").mkdir()
    (place / "sticky").chmod(0o1777)
    alice("os.chdir('sticky'); open('a', 'x').close(); os.chmod('a', 0o666); os.mkdir('d'); os.chmod('d', 0o777)")
    bob("os.chdir('sticky'); open('b', 'x').close()")
    attempts = ("os.unlink('a')", "os.rename('a', 'c')", "os.rename('b', 'a')", "os.rmdir('d')")
    assert refused(bob, *attempts) == [errno.EPERM] * 4
    bob("open('a', 'w').write('b was here')")
    alice("os.rename('a', 'c'); os.unlink('c'); os.rmdir('d')")
    assert os.listdir(place / "sticky") == ["b"]


def test_the_owner_of_a_sticky_directory_removes_what_is_in_it(place: Path, as_user: As) -> None:
    alice, bob = as_user(ALICE), as_user(BOB)
    alice("os.mkdir('hers'); os.chmod('hers', 0o1777)")
    bob("open('hers/his', 'x').close()")
    alice("os.unlink('hers/his')")


def test_access_goes_by_the_real_user(place: Path, as_user: As) -> None:
    (place / "file").touch(0o604)
    alice = as_user(ALICE)
    assert alice("os.access('file', os.R_OK), os.access('file', os.W_OK), os.access('gone', os.F_OK)") == (
        True,
        False,
        False,
    )


# -- set-group-id directories -------------------------------------------------------------------------
def test_a_set_group_id_directory_hands_on_its_group(place: Path, as_user: As) -> None:
    (place / "team").mkdir()
    os.chown(place / "team", 0, 7_000)
    (place / "team").chmod(0o2777)
    alice = as_user(ALICE)
    alice("os.mkdir('team/d'); open('team/f', 'x').close(); os.symlink('x', 'team/l'); os.mkfifo('team/p')")
    alice("os.close(os.open('team/x', os.O_CREAT, 0o2770))")
    assert {path.name: (path.lstat().st_gid, mode(path)) for path in (place / "team").iterdir()} == {
        "d": (7_000, 0o2755),
        "f": (7_000, 0o644),
        "l": (7_000, 0o777),
        "p": (7_000, 0o644),
        "x": (7_000, 0o750),  # sgid is for members of the group to give (mode_strip_sgid, fs/inode.c)
    }


def test_a_chmod_by_who_is_not_of_the_group_drops_set_group_id(place: Path, as_user: As) -> None:
    alice = as_user(ALICE)
    alice("open('f', 'x').close()")
    os.chown(place / "f", ALICE, 7_000)
    alice("os.chmod('f', 0o2755)")
    assert mode(place / "f") == 0o755


# -- what clears set-id bits --------------------------------------------------------------------------
SET_IDS = [(0o6777, 0o777), (0o6767, 0o2767), (0o4777, 0o777)]  # sgid without group execute is no privilege


@pytest.mark.extended
@pytest.mark.parametrize(("before", "after"), SET_IDS)
@pytest.mark.parametrize(
    "change",
    [
        "fd = os.open('f', os.O_WRONLY); os.write(fd, b'x'); os.close(fd)",
        "fd = os.open('f', os.O_WRONLY); os.pwrite(fd, b'x', 1 << 20); os.close(fd)",
        "os.truncate('f', 3)",
        "fd = os.open('f', os.O_WRONLY); os.ftruncate(fd, 3); os.close(fd)",
        "os.close(os.open('f', os.O_WRONLY | os.O_TRUNC))",
    ],
)
def test_a_change_of_content_by_an_unprivileged_user_clears_set_ids(
    place: Path, as_user: As, kind: str, change: str, before: int, after: int
) -> None:
    (place / "f").write_text("content")
    (place / "f").chmod(before)
    as_user(ALICE)(change)
    if kind == "tmpfs":
        # By FUSE_HANDLE_KILLPRIV_V2's rule sgid stays where it is no privilege; tmpfs asks for membership too
        # (setattr_should_drop_sgid, fs/attr.c).
        after &= ~stat.S_ISGID
    # Asked for the mode alone, the kernel answers from what it has of the inode (statx(2)).
    shown = subprocess.run(["stat", "-c", "%a", place / "f"], capture_output=True, text=True, check=True).stdout
    assert (oct(mode(place / "f")), shown) == (oct(after), f"{after:o}\n")


@pytest.mark.parametrize("change", ["open('f', 'a').write('x')", "os.truncate('f', 3)", "open('f', 'w')"])
def test_a_change_of_content_by_root_leaves_set_ids(place: Path, change: str) -> None:
    (place / "f").write_text("content")
    (place / "f").chmod(0o6777)
    with Program(cwd=place) as root:
        root(f"({change}) and None")
    assert mode(place / "f") == 0o6777


def test_a_write_through_a_shared_mapping_leaves_set_ids_as_tmpfs_does(place: Path, as_user: As) -> None:
    (place / "f").write_bytes(bytes(4096))
    (place / "f").chmod(0o6777)
    alice = as_user(ALICE)
    alice("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 4096); m[0:2] = b'hi'; m.flush()")
    assert (place / "f").read_bytes()[:2] == b"hi"


@pytest.mark.parametrize(("before", "after"), SET_IDS)
def test_chown_clears_set_ids_whoever_calls(place: Path, as_user: As, before: int, after: int) -> None:
    (place / "f").touch()
    (place / "f").chmod(before)
    os.chown(place / "f", ALICE, ALICE)
    assert mode(place / "f") == after
    (place / "f").chmod(before)
    as_user(ALICE)("os.chown('f', -1, os.getgid())")
    assert mode(place / "f") == after


def test_chown_leaves_the_set_ids_of_directories(place: Path) -> None:
    (place / "d").mkdir()
    (place / "d").chmod(0o6777)
    os.chown(place / "d", ALICE, ALICE)
    assert mode(place / "d") == 0o6777


def test_a_mount_is_nosuid_and_nodev(place: Path) -> None:
    flags = os.statvfs(place).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    os.mknod(place / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(PermissionError):
        open(place / "null").close()
