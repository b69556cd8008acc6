"""A restore outside the mount of a host directory: open files stay usable, and the kernel invalidates what changed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.backends.host import HostVolume
from protocol.diff.tree_diff import Change
from protocol.testing import Driver
from protocol.testing.volume.driver import fails
from protocol.tree import TreeEntry
from protocol.volume import ROOT_INODE
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange


def _entries(place: Path) -> Iterator[tuple[bytes, TreeEntry]]:
    for base, directories, files in os.walk(os.fsencode(place)):
        for name in [*directories, *files]:
            full = os.path.join(base, name)
            seen = os.lstat(full)
            path = os.path.relpath(full, os.fsencode(place))
            yield path, TreeEntry(path, seen.st_mode, seen.st_size, seen.st_mtime_ns, inode=seen.st_ino)


def restoring(volume: HostVolume, inside: Path, change: Callable[[], None], *paths: bytes) -> CacheInvalidation:
    """Make `change` outside the volume and report it to the volume as a restore does."""
    before = dict(_entries(inside))
    volume.hold(paths)
    change()
    after = dict(_entries(inside))
    made = []
    for path in sorted({*before, *after}, key=lambda path: path.split(b"/")):
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            made.append(Change(path, "removed" if new is None else "added", old, new))
        elif (old.inode, old.size, old.mtime_ns) != (new.inode, new.size, new.mtime_ns) and not old.is_dir:
            made.append(Change(path, "modified", old, new))
        elif (old.inode, old.mode) != (new.inode, new.mode):
            made.append(Change(path, "metadata", old, new))
    invalidation = volume.invalidation_of(made)
    volume.release()
    volume.check_invariants()
    return invalidation


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a restore does: rename a new file over it."""
    path.with_name("temporary").write_bytes(content)
    os.rename(path.with_name("temporary"), path)


def descriptors_below(place: Path) -> int:
    """The number of open descriptors below `place`.  Those of other threads of the test process do not count."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(f"{place}/")
    return count


def test_a_replaced_file_is_invalidated_and_stays_readable_through_open_descriptors(
    volume: HostVolume, fs: Driver, inside: Path
) -> None:
    (inside / "a").write_bytes(b"old")
    number = fs.hold(b"a")
    invalidation = restoring(volume, inside, lambda: replace(inside / "a", b"brand new"), b"a")
    new = fs.at(b"a")
    assert new != number
    assert invalidation.entries == [EntryChange(ROOT_INODE, b"a", number, new)]
    assert invalidation.paths[ROOT_INODE] == b""
    assert stat.S_ISREG(invalidation.modes[number])
    assert stat.S_ISREG(invalidation.modes[new])
    assert fs.read(number) == b"old"
    assert fs.stat(number).nlink == 0
    assert fs.read(b"a") == b"brand new"
    volume.forget(number, 1)
    with fails(errno.ENOENT):
        fs.stat(number)


def test_a_removed_directory_is_invalidated_with_everything_open_in_it(
    volume: HostVolume, fs: Driver, inside: Path
) -> None:
    (inside / "d" / "e").mkdir(parents=True)
    (inside / "d" / "e" / "file").write_bytes(b"content")
    directory, below, file = fs.hold(b"d"), fs.hold(b"d/e"), fs.hold(b"d/e/file")

    def remove() -> None:
        (inside / "d" / "e" / "file").unlink()
        (inside / "d" / "e").rmdir()
        (inside / "d").rmdir()

    invalidation = restoring(volume, inside, remove, b"d", b"d/e", b"d/e/file")
    assert invalidation.entries == [
        EntryChange(ROOT_INODE, b"d", directory, 0),
        EntryChange(directory, b"e", below, 0),
        EntryChange(below, b"file", file, 0),
    ]
    assert set(invalidation.paths) == {ROOT_INODE}  # nothing leads to what was in it
    assert fs.read(file) == b"content"
    assert fs.names(directory) == []
    before = descriptors_below(inside)
    for number in (file, below, directory):
        volume.forget(number, 1)
    while descriptors_below(inside) >= before:
        time.sleep(0.01)  # a thread closes them; the test's own time limit is the limit


def test_the_entries_of_a_replaced_directory_are_invalidated_too(volume: HostVolume, fs: Driver, inside: Path) -> None:
    (inside / "d").mkdir()
    (inside / "d" / "file").write_bytes(b"old")
    directory, file = fs.hold(b"d"), fs.hold(b"d/file")

    def change() -> None:
        os.rename(inside / "d", inside.parent / "moved")
        (inside / "d").mkdir()
        (inside / "d" / "file").write_bytes(b"new")
        # Somebody looks while it is being done.
        fs.hold(b"d/file")
        replace(inside / "d" / "file", b"newer")

    invalidation = restoring(volume, inside, change, b"d", b"d/file")
    assert invalidation.entries[0] == EntryChange(ROOT_INODE, b"d", directory, fs.at(b"d"))
    told = {(change.parent, change.name) for change in invalidation.entries}
    assert {(directory, b"file"), (fs.at(b"d"), b"file")} <= told
    assert fs.read(b"d/file") == b"newer"
    assert fs.read(file) == b"old"


def test_a_file_changed_in_place_keeps_its_inode_number(volume: HostVolume, fs: Driver, inside: Path) -> None:
    (inside / "a").write_bytes(b"old")
    (inside / "b").write_bytes(b"old")
    a, b = fs.hold(b"a"), fs.hold(b"b")

    def change() -> None:
        (inside / "a").chmod(0o600)
        (inside / "b").write_bytes(b"rewritten")

    invalidation = restoring(volume, inside, change, b"a", b"b")
    assert invalidation.entries == []
    assert invalidation.inodes == [InodeChange(a, content=False), InodeChange(b, content=True)]
    assert (invalidation.paths[a], invalidation.paths[b]) == (b"a", b"b")
    assert fs.stat(a).nlink == fs.stat(b).nlink == 1


def test_a_release_closes_the_files_that_kept_their_name(volume: HostVolume, fs: Driver, inside: Path) -> None:
    for number in range(20):
        (inside / f"f{number}").write_bytes(b"x")
        fs.hold(b"f%d" % number)
    before = descriptors_below(inside)
    restoring(volume, inside, lambda: None, *(b"f%d" % number for number in range(20)))
    assert descriptors_below(inside) == before


def test_a_name_that_the_kernel_never_asked_for_is_told_of_with_its_type(
    volume: HostVolume, fs: Driver, inside: Path
) -> None:
    (inside / "d").mkdir()
    (inside / "d" / "sub").mkdir()
    (inside / "d" / "file").write_bytes(b"x")
    parent = fs.hold(b"d")

    def change() -> None:
        (inside / "d" / "sub").rmdir()
        (inside / "d" / "file").unlink()
        (inside / "d" / "new").symlink_to("x")

    invalidation = restoring(volume, inside, change, b"d/sub", b"d/file", b"d/new")
    by_name = {change.name: change for change in invalidation.entries}
    assert {change.parent for change in invalidation.entries} == {parent}
    assert stat.S_ISDIR(invalidation.modes[by_name[b"sub"].old])
    assert stat.S_ISREG(invalidation.modes[by_name[b"file"].old])
    assert by_name[b"sub"].new == by_name[b"file"].new == by_name[b"new"].old == 0
    assert by_name[b"new"].new == fs.at(b"d/new")
    assert stat.S_ISLNK(invalidation.modes[by_name[b"new"].new])


def test_of_what_is_in_a_directory_that_the_kernel_does_not_know_nothing_is_told(
    volume: HostVolume, inside: Path
) -> None:
    (inside / "d" / "e").mkdir(parents=True)
    invalidation = restoring(volume, inside, (inside / "d" / "e" / "new").touch, b"d/e/new")
    assert invalidation == CacheInvalidation([], [], {}, {})


def test_a_listing_goes_on_with_what_is_there_now(volume: HostVolume, fs: Driver, inside: Path) -> None:
    for number in range(5):
        (inside / f"f{number}").write_bytes(b"x")
    scan = fs.entries()
    first = [next(scan) for _ in range(3)]  # the dots, and one more
    rest = sorted({b"f%d" % number for number in range(5)} - {first[-1].name})

    def change() -> None:
        (inside / os.fsdecode(rest[0])).unlink()
        (inside / "new").write_bytes(b"x")

    restoring(volume, inside, change, rest[0], b"new")
    assert sorted(entry.name for entry in fs.entries(b"", first[-1].cookie)) == sorted(rest[1:])
    assert b"new" in fs.names()


def test_a_second_name_of_a_file_that_is_removed_stays(volume: HostVolume, fs: Driver, inside: Path) -> None:
    (inside / "a").write_bytes(b"x")
    os.link(inside / "a", inside / "b")
    number = fs.hold(b"a")
    assert fs.hold(b"b") == number
    restoring(volume, inside, (inside / "a").unlink, b"a")
    assert fs.at(b"b") == number
    assert fs.stat(number).nlink == 1
    with fails(errno.ENOENT):
        fs.at(b"a")


def test_of_more_files_than_can_be_held_none_is_taken_for_another(inside: Path) -> None:
    names = [f"f{number}" for number in range(64)]
    for name in names:
        (inside / name).write_text(f"old {name}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        volume = HostVolume(os.fsencode(inside), descriptors=16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fs = Driver(volume)
    numbers = {name: fs.hold(name.encode()) for name in names}

    def read_on(number: int) -> bytes | int | None:
        try:
            return fs.read(number)
        except OSError as error:
            return error.errno

    def change() -> None:
        # On file systems that give numbers again, each new file gets that of the one replaced before it.
        for name in names:
            replace(inside / name, f"new {name}".encode())

    restoring(volume, inside, change, *(name.encode() for name in names))
    for name in names:
        assert fs.read(name.encode()) == f"new {name}".encode()
        assert fs.at(name.encode()) != numbers[name]
        assert read_on(numbers[name]) in {f"old {name}".encode(), errno.ESTALE}
    volume.check_invariants()
    volume.close()


def test_a_name_that_was_only_for_a_moment_is_told_of(volume: HostVolume, fs: Driver, inside: Path) -> None:
    (inside / "a").write_bytes(b"old")
    seen = []

    def change() -> None:
        (inside / ".vfsd-restore-0-1").write_bytes(b"new")
        seen.append(fs.hold(b".vfsd-restore-0-1"))  # somebody lists the directory
        os.rename(inside / ".vfsd-restore-0-1", inside / "a")

    invalidation = restoring(volume, inside, change, b"a")
    assert EntryChange(ROOT_INODE, b".vfsd-restore-0-1", seen[0], 0) in invalidation.entries
    assert fs.at(b"a") == seen[0]
    assert fs.stat(b"a").nlink == 1
