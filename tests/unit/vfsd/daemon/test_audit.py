"""The audit log without a mount: its limits under the worst content, its invariants, and hostile processes."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time

import pytest
import trio

from protocol.backends.memory.volume import MemoryVolume
from protocol.diff.tree_diff import PathScope
from protocol.volume import ROOT_INODE, Caller
from vfsd.daemon.audit.log import FOLLOWERS_MAX, AuditLog
from vfsd.daemon.audit.processes import Processes
from vfsd.operations.workspace import Overflow

CALLER = Caller(0, 0)


def make(volume: MemoryVolume, parent: int, name: bytes) -> int:
    return volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, CALLER).inode


def test_the_log_keeps_the_newest_entries_within_its_limit() -> None:
    volume = MemoryVolume()
    log = AuditLog(volume, limit_bytes=200_000)
    below = ROOT_INODE
    for number in range(60):  # a path of 15,000 bytes
        name = b"%04d" % number + b"x" * 250
        below = volume.mkdir(below, name, 0o755, CALLER).inode
        log.entry_changed("mkdir", os.getpid(), below, name)
        log.check_invariants()
    for number in range(2000):
        log.entry_changed("mkdir", os.getpid(), ROOT_INODE, b"%d" % number)
    log.check_invariants()
    assert log.dropped > 0
    entries = list(log.entries())
    assert entries[-1].path == b"1999"
    assert entries[0].number == log.dropped + 1
    log.close()


def test_random_changes_keep_the_invariants() -> None:
    chosen = random.Random(7)
    volume = MemoryVolume()
    log = AuditLog(volume, limit_bytes=60_000)
    files = {b"f%d" % number: make(volume, ROOT_INODE, b"f%d" % number) for number in range(20)}
    for step in range(3000):
        name = chosen.choice(list(files))
        thread = chosen.choice((os.getpid(), os.getppid(), 0))
        match chosen.randrange(6):
            case 0 | 1 | 2:
                volume.write(files[name], 0, b"x")
                log.written(thread, files[name], 1)
            case 3:
                other = b"f%d" % chosen.randrange(40)
                if other != name:
                    volume.rename(ROOT_INODE, name, ROOT_INODE, other)
                    files[other] = files.pop(name)
                    log.renamed(thread, ROOT_INODE, name, ROOT_INODE, other, exchange=False)
            case 4:
                log.inode_changed("chmod", thread, files[name])
            case 5:
                if len(files) > 5:
                    volume.unlink(ROOT_INODE, name)
                    log.entry_changed("unlink", thread, ROOT_INODE, name)
                    del files[name]
        if step % 50 == 0:
            log.check_invariants()
    log.close_writes()
    log.check_invariants()
    log.close()


def test_the_path_of_an_entry_is_that_of_the_moment_whatever_was_moved() -> None:
    chosen = random.Random(11)
    volume = MemoryVolume()
    log = AuditLog(volume)
    directories = {b"": ROOT_INODE}
    files: dict[bytes, int] = {}
    for step in range(1500):
        above, name = chosen.choice(list(directories)), b"%d" % chosen.randrange(12)
        path, parent = above + b"/" + name if above else name, directories[above]
        at = chosen.choice(list(files)) if files else None
        match chosen.randrange(8):
            case 0 | 1 | 2 if path not in files and path not in directories:
                files[path] = make(volume, parent, name)
                log.entry_changed("create", 0, parent, name, files[path])
            case 3 if path not in files and path not in directories and len(path) < 12:
                directories[path] = volume.mkdir(parent, name, 0o755, CALLER).inode
                log.entry_changed("mkdir", 0, parent, name)
            case 4 if at is not None and path not in files and path not in directories:
                volume.link(files[at], parent, name)
                files[path] = files[at]
                log.linked(0, files[at], parent, name)
            case 5 if at is not None:
                old, _, path = at.rpartition(b"/")
                volume.unlink(directories[old], path)
                del files[at]
                log.entry_changed("unlink", 0, directories[old], path)
                path = at
            case 6 if len(directories) > 1 and path not in files and path not in directories:
                moved = chosen.choice([*directories][1:])
                if (path + b"/").startswith(moved + b"/"):
                    continue
                old, _, old_name = moved.rpartition(b"/")
                volume.rename(directories[old], old_name, parent, name)
                log.renamed(0, directories[old], old_name, parent, name, exchange=False)
                for known in (directories, files):
                    for each in [each for each in known if (each + b"/").startswith(moved + b"/")]:
                        known[path + each[len(moved) :]] = known.pop(each)
                path = moved
            case 7 if at is not None:
                log.written(0, files[at], 1)
                names = {each for each, inode in files.items() if inode == files[at]}
                entry = list(log.entries())[-1]
                assert entry.path in names
                assert entry.links == len(names)
                log.close_writes()
                continue
            case _:
                continue
        assert list(log.entries())[-1].path == path
        if step % 50 == 0:
            log.check_invariants()
    assert {entry.change for entry in log.entries()} >= {"create", "mkdir", "link", "unlink", "rename", "write"}
    log.close()


def test_a_change_without_reports_is_noticed() -> None:
    volume = MemoryVolume()
    log = AuditLog(volume)
    directory = volume.mkdir(ROOT_INODE, b"d", 0o755, CALLER).inode
    inode = make(volume, directory, b"f")
    log.entry_changed("create", 0, directory, b"f", inode)
    with log.names.suspended():  # as during a call of the control socket
        volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"e")
        log.entry_changed("create", 0, directory, b"g", make(volume, directory, b"g"))
        log.written(0, inode, 1)
    log.entry_changed("create", 0, directory, b"h", make(volume, directory, b"h"))
    assert [entry.path for entry in log.entries()] == [b"d/f", b"e/g", b"e/f", b"e/h"]
    log.check_invariants()
    log.close()


def test_a_follower_holds_a_bounded_number_of_bytes_and_marks_what_it_misses() -> None:
    log = AuditLog(MemoryVolume())
    follower = log.follow(limit_bytes=50_000)
    for number in range(1000):
        log.entry_changed("mkdir", 0, ROOT_INODE, b"%d" % number)
    found = follower.take_nowait()
    last = found.pop()
    assert isinstance(last, Overflow)
    assert last.missing + len(found) == 1000
    log.entry_changed("mkdir", 0, ROOT_INODE, b"after")
    (after,) = trio.run(follower.take)
    assert not isinstance(after, Overflow)
    assert after.path == b"after"
    log.unfollow(follower)
    log.close()


def test_a_follower_gets_a_write_although_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = MemoryVolume()
    log = AuditLog(volume)
    follower = log.follow()
    log.written(0, make(volume, ROOT_INODE, b"file"), 100)
    log.close_quiet()
    assert follower.take_nowait() == []  # the write may go on
    monkeypatch.setattr("vfsd.daemon.audit.log.time_ns", lambda: time.time_ns() - 3600 * 10**9)
    log.close_quiet()
    (written,) = follower.take_nowait()
    assert not isinstance(written, Overflow)
    assert written.path == b"file"
    log.check_invariants()
    log.unfollow(follower)
    log.close()


@pytest.mark.parametrize(
    ("change", "paths", "is_shown"),
    [
        ("mkdir", [b"other", b"a"], True),
        ("mkdir", [b"a/b"], True),
        ("mkdir", [b"a/b/c", b"a/bc"], False),  # below it, and next to it
        ("rename", [b"a/b/c"], True),  # a directory's new name concerns everything below it
        ("rename", [b"a/bc", b"a-b"], False),
        ("mkdir", [b""], True),
    ],
)
def test_an_entry_concerns_its_path_the_directories_above_and_if_it_moved_what_is_below(
    change: str, paths: list[bytes], is_shown: bool
) -> None:
    volume = MemoryVolume()
    log = AuditLog(volume)
    above = volume.mkdir(ROOT_INODE, b"a", 0o755, CALLER).inode
    if change == "rename":
        log.renamed(os.getpid(), above, b"b", ROOT_INODE, b"new", exchange=False)
    else:
        log.entry_changed(change, os.getpid(), above, b"b")
    (entry,) = log.entries()
    assert entry.is_within(PathScope(paths)) is is_shown
    log.close()


def test_there_are_only_so_many_followers() -> None:
    log = AuditLog(MemoryVolume())
    for _ in range(FOLLOWERS_MAX):
        log.follow()
    with pytest.raises(BlockingIOError, match="end one of them"):
        log.follow()
    log.close()


def test_a_process_that_ends_is_not_taken_for_the_next_one_with_its_id() -> None:
    processes = Processes()
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = processes.find(program.pid)
    assert processes.find(program.pid) is seen
    program.communicate(b"\n")
    gone = processes.find(program.pid)
    assert gone is not seen
    assert gone.command == b""
    processes.check_invariants()
    processes.close()


def test_many_processes_take_a_bounded_number_of_descriptors() -> None:
    processes = Processes()
    before = len(os.listdir("/proc/self/fd"))
    programs = [subprocess.Popen(["sleep", "60"]) for _ in range(150)]
    try:
        for program in programs:
            assert processes.find(program.pid).words == [b"sleep", b"60"]
        processes.check_invariants()
        assert len(os.listdir("/proc/self/fd")) <= before + 256
    finally:
        for program in programs:
            program.kill()
            program.wait()
        processes.close()
    assert len(os.listdir("/proc/self/fd")) <= before
