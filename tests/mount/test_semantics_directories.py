"""Directories and names: what is removed while open, lists during change, long and deep paths.  Also on tmpfs."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.conftest import EACH_ENGINE_AND_BACKEND_ONCE
from tests.mount.programs import Program
from vfsd.client.workspace import Workspace

libc = ctypes.CDLL(None, use_errno=True)
MountIt = Callable[..., Workspace]
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
PATH_MAX = 4096
LEVELS = 1000


def errno_of(action: Callable[..., object], *arguments: object) -> int:
    with pytest.raises(OSError, match=r".") as raised:
        action(*arguments)
    assert raised.value.errno is not None
    return raised.value.errno


def renameat2(source: Path, target: Path, flags: int) -> int:
    """The errno of renameat2(2), 0 for none."""
    done = libc.renameat2(-100, os.fsencode(source), -100, os.fsencode(target), flags)
    return ctypes.get_errno() if done else 0


# -- removed while open ---------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_directory_that_was_removed_while_open_is_empty_and_takes_nothing(place: Path) -> None:
    (place / "d").mkdir()
    with Program(cwd=place / "d") as inside:
        inside("fd = os.open('.', os.O_RDONLY)")
        (place / "d").rmdir()
        assert inside("os.fstat(fd).st_nlink, os.listdir(fd), os.listdir('.')") == (0, [], [])
        for attempt in ("open('x', 'w')", "os.mkdir('x')", "os.symlink('y', 'x')", "os.rename('../f', 'x')"):
            (place / "f").touch()
            assert errno_of(inside, attempt) == errno.ENOENT
        assert errno_of(inside, "os.getcwd()") == errno.ENOENT
        inside("os.fchmod(fd, 0o700); os.chdir('..')")
        assert inside("sorted(os.listdir('.'))") == ["f"]


def test_a_directory_made_again_is_another(place: Path) -> None:
    (place / "d").mkdir()
    with Program(cwd=place / "d") as inside:
        (place / "d").rmdir()
        (place / "d").mkdir()
        (place / "d" / "new").touch()
        assert inside("os.listdir('.')") == []
        assert errno_of(inside, "os.stat('new')") == errno.ENOENT


# -- lists during change --------------------------------------------------------------------------------
@contextmanager
def scan(path: Path) -> Iterator[Iterator[str]]:
    with os.scandir(path) as entries:
        yield (entry.name for entry in entries)


@pytest.mark.extended
def test_what_stays_is_listed_exactly_once_whatever_comes_and_goes_beside_it(place: Path) -> None:
    stay = {f"stays-{number}" for number in range(800)}
    for number in range(800):
        (place / f"stays-{number}").touch()
        (place / f"goes-{number}").touch()
    seen: list[str] = []
    with scan(place) as names:
        for count, name in enumerate(names):
            seen.append(name)
            if count % 2 == 0 and count < 1600:
                (place / f"goes-{count // 2}").unlink()
                (place / f"comes-{count}").touch()
                (place / f"comes-{count}").rename(place / f"came-{count}")
    staying = [name for name in seen if name.startswith("stays")]
    assert len(staying) == len(stay)
    assert set(staying) == stay


def _replace(path: Path) -> None:
    (path.parent / "T").touch()
    (path.parent / "T").rename(path)


def _recreate(path: Path) -> None:
    path.unlink()
    path.touch()


def test_a_listing_ends_and_has_each_name_once_though_its_reader_renames_makes_and_replaces(place: Path) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "rename": lambda path: path.rename(f"{path}.x"),
        "copy": lambda path: Path(f"{path}~").touch(),
        "replace": _replace,
        "recreate": _recreate,
    }
    made = {f"{number:0200}" for number in range(150)}  # more than one buffer of getdents(2)
    for kind, change in changes.items():
        (place / kind).mkdir()
        for name in made:
            (place / kind / name).touch()
        seen = []
        with scan(place / kind) as names:
            for name in names:
                seen.append(name)
                assert len(seen) <= len(made), f"{kind}: the listing does not end"
                change(place / kind / name)
        assert set(seen) == made


@pytest.mark.extended
def test_a_directory_is_emptied_while_it_is_listed(place: Path) -> None:
    for number in range(1300):  # more than two buffers of getdents(2)
        (place / f"{number}").touch()
    with scan(place) as names:
        for name in names:
            (place / name).unlink()
    assert os.listdir(place) == []


@pytest.mark.extended
def test_seekdir_goes_back_to_where_telldir_was(place: Path) -> None:
    for number in range(500):
        (place / f"n{number}").touch()
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(libc.opendir(os.fsencode(place)))

    def following() -> str:
        entry = libc.readdir(stream)
        return os.fsdecode(ctypes.string_at(entry + 19)) if entry else ""

    for _ in range(100):
        following()
    at = libc.telldir(stream)
    after = [following() for _ in range(300)]
    libc.seekdir(stream, ctypes.c_long(at))
    assert [following() for _ in range(300)] == after
    libc.rewinddir(stream)
    assert len([name for name in iter(following, "") if name.startswith("n")]) == 500
    libc.closedir(stream)


# -- rename -----------------------------------------------------------------------------------------------
def test_the_errors_of_rename(place: Path) -> None:
    for name in ("empty", "full", "full/sub", "other"):
        (place / name).mkdir()
    for name in ("f", "g", "full/x"):
        (place / name).touch()
    cases = {
        ("f", "empty"): errno.EISDIR,
        ("empty", "f"): errno.ENOTDIR,
        ("other", "full"): errno.ENOTEMPTY,
        ("full", "full/sub/under"): errno.EINVAL,
        ("full", "full/sub"): errno.EINVAL,
        ("gone", "f"): errno.ENOENT,
        ("f", "gone/x"): errno.ENOENT,
        ("f", "g/x"): errno.ENOTDIR,
        ("full/sub", "full"): errno.ENOTEMPTY,
        ("f", "x" * 256): errno.ENAMETOOLONG,
    }
    found = {case: errno_of(os.rename, place / case[0], place / case[1]) for case in cases}
    assert found == cases
    os.rename(place / "full", place / "empty")
    os.link(place / "f", place / "same")
    os.rename(place / "f", place / "same")  # two names of one file: nothing happens
    assert sorted(os.listdir(place)) == ["empty", "f", "g", "other", "same"]


def test_rename_exchanges_keeps_and_leaves_a_whiteout(place: Path) -> None:
    (place / "f").write_text("f")
    (place / "d").mkdir()
    (place / "d" / "inside").touch()
    assert renameat2(place / "f", place / "d", NOREPLACE) == errno.EEXIST
    assert renameat2(place / "f", place / "gone", EXCHANGE) == errno.ENOENT
    assert renameat2(place / "d", place / "d" / "inside", EXCHANGE) == errno.EINVAL
    assert renameat2(place / "f", place / "d", EXCHANGE | NOREPLACE) == errno.EINVAL
    assert renameat2(place / "f", place / "d", EXCHANGE) == 0
    assert (place / "d").read_text() == "f"
    assert os.listdir(place / "f") == ["inside"]
    assert renameat2(place / "d", place / "moved", NOREPLACE) == 0
    assert renameat2(place / "moved", place / "again", WHITEOUT) == 0
    whiteout = (place / "moved").lstat()
    assert (whiteout.st_mode, whiteout.st_rdev) == (stat.S_IFCHR, 0)
    assert (place / "again").read_text() == "f"


def test_directories_count_their_subdirectories(place: Path) -> None:
    (place / "a").mkdir()
    (place / "b").mkdir()
    (place / "a" / "sub").mkdir()
    (place / "a" / "file").touch()

    def counts() -> tuple[int, int]:
        return (place / "a").stat().st_nlink, (place / "b").stat().st_nlink

    assert counts() == (3, 2)
    (place / "a" / "sub").rename(place / "b" / "sub")
    assert counts() == (2, 3)
    assert renameat2(place / "a" / "file", place / "b" / "sub", EXCHANGE) == 0
    assert counts() == (3, 2)
    (place / "a" / "file").rmdir()
    assert counts() == (2, 2)


# -- names ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        b"\xff\xfe not utf-8 \x80",
        b"new\nline\ttab",
        b"\x01\x7f",
        b" \\ \"'*?[",
        b"\xc3\xa9",  # two ways to write one letter, and two names
        b"e\xcc\x81",
        b"n" * 255,
        "€".encode() * 85,
        b"....",
        b"-rf",
    ],
)
def test_a_name_is_any_bytes_but_slash_and_nul(place: Path, name: bytes) -> None:
    path = os.fsencode(place) + b"/" + name
    with open(path, "x") as file:
        file.write("content")
    assert os.listdir(os.fsencode(place)) == [name]
    os.symlink(name, os.fsencode(place) + b"/l")
    assert os.readlink(os.fsencode(place) + b"/l") == name
    os.unlink(os.fsencode(place) + b"/l")
    os.rename(path, path[:-1])
    os.unlink(path[:-1])


def test_names_and_paths_end_where_linux_says(place: Path) -> None:
    assert errno_of(os.mkdir, place / ("n" * 256)) == errno.ENAMETOOLONG
    assert errno_of(os.symlink, "x" * PATH_MAX, place / "l") == errno.ENAMETOOLONG
    assert errno_of(os.symlink, "", place / "l") == errno.ENOENT
    os.symlink("x" * (PATH_MAX - 1), place / "l")
    assert os.readlink(place / "l") == "x" * (PATH_MAX - 1)
    assert os.lstat(place / "l").st_size == PATH_MAX - 1
    path = os.fsencode(place)
    while len(path) + 256 < PATH_MAX - 1:
        path += b"/" + b"d" * min(255, PATH_MAX - 1 - len(path) - 3)
        os.mkdir(path)
    last = path + b"/" + b"f" * (PATH_MAX - 2 - len(path))
    assert len(last) == PATH_MAX - 1
    with open(last, "x") as file:
        file.write("deep")
    with open(last) as file:
        assert file.read() == "deep"
    assert errno_of(os.stat, last + b"x") == errno.ENAMETOOLONG
    shutil.rmtree(place / os.fsdecode(path[len(os.fsencode(place)) + 1 :].split(b"/")[0]))


def test_forty_symlinks_are_followed_and_no_more(place: Path) -> None:
    (place / "f").write_text("end")
    previous = "f"
    for number in range(41):
        (place / f"l{number}").symlink_to(previous)
        previous = f"l{number}"
    assert (place / "l39").read_text() == "end"
    assert errno_of(os.stat, place / "l40") == errno.ELOOP


# -- a deep tree ------------------------------------------------------------------------------------------
def _dig(top: Path) -> None:
    """A tree of a thousand levels, with a file in each hundredth."""
    fd = os.open(top, os.O_RDONLY)
    for level in range(LEVELS):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        if level % 100 == 99:
            inside = os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
            os.write(inside, b"%d" % level)
            os.close(inside)
    os.close(fd)


def _levels(top: Path) -> int:
    found = subprocess.run(["find", ".", "-name", "f"], cwd=top, capture_output=True, check=True, text=True).stdout
    assert len(found.splitlines()) == LEVELS // 100
    return max(line.count("/d") for line in found.splitlines())


@pytest.mark.extended
@pytest.mark.parametrize("on", EACH_ENGINE_AND_BACKEND_ONCE, indirect=True)
def test_a_tree_of_a_thousand_levels_is_made_walked_and_removed(place: Path) -> None:
    (place / "top").mkdir()
    _dig(place / "top")
    assert _levels(place / "top") == LEVELS
    subprocess.run(["rm", "-rf", "top"], cwd=place, check=True)
    assert os.listdir(place) == []


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_a_tree_of_a_thousand_levels_is_snapshotted_compared_exported_and_restored(
    mount: MountIt, workdir: Path
) -> None:
    workspace = mount()
    root = Path(workspace.path)
    (root / "top").mkdir()
    _dig(root / "top")
    workspace.snapshot("deep")
    workspace.export(workdir / "deep.zip")
    subprocess.run(["rm", "-rf", "top"], cwd=root, check=True)
    assert os.listdir(root) == []
    assert len(workspace.diff("deep").changes) == LEVELS + 1 + LEVELS // 100
    workspace.restore("deep")
    assert _levels(root / "top") == LEVELS
    other = mount(archive=workdir / "deep.zip")
    assert _levels(Path(other.path) / "top") == LEVELS
    other.restore(workdir / "deep.zip")
