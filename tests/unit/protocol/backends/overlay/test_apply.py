"""apply: the directory below becomes what the overlay shows, file by file, and nobody's work is overwritten unasked."""

from __future__ import annotations

import codecs
import errno
import os
import random
import resource
import shutil
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.apply import Applied
from protocol.diff.tree_diff import changes
from protocol.linux.posix_acl import ACCESS, DEFAULT
from protocol.testing.volume.driver import Driver
from protocol.volume import ROOT_INODE, AttributeChanges
from tests.support.rights import needs_root
from tests.support.suites import with_extended
from tests.unit.protocol.backends.overlay.killed_apply import WORKER, make_tree, random_step, some_work

BLOCK = 128 * 1024


class StoppedError(Exception):
    """Raised where an apply is to stop."""


@pytest.fixture
def below(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "below")


def run(
    volume: OverlayVolume,
    paths: Sequence[bytes] = (),
    *,
    force: bool = False,
    dry_run: bool = False,
    keep_going: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
) -> Applied:
    with volume.applying(paths, force=force, dry_run=dry_run) as apply:
        done = apply.write(keep_going, before)
        if not dry_run and (force or not done.conflicts):
            apply.finish(done)
        if done.error is not None:
            raise done.error
    volume.check_invariants()
    return done


@pytest.mark.parametrize("what", ["attributes", "names"])
def test_an_apply_changes_more_files_in_place_than_a_process_may_have_open(tmp_path: Path, what: str) -> None:
    """Each of them keeps its inode, whose new ctime the workspace must know."""
    below = tmp_path / "below"
    below.mkdir()
    for number in range(200):
        (below / f"f{number}").write_text("content")
        os.link(below / f"f{number}", below / f"other{number}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, hard))
    try:
        volume = OverlayVolume(os.fsencode(below))
        driver = Driver(volume)
        for number in range(200):
            if what == "attributes":
                driver.set(b"f%d" % number, mode=0o600)
            else:
                driver.unlink(b"other%d" % number)
        run(volume)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in range(200):
        driver.set(b"f%d" % number, mode=0o640)
    done = run(volume)
    assert not done.conflicts, "the workspace knows that it was the apply that changed the ctime"
    assert {stat.S_IMODE(path.stat().st_mode) for path in below.iterdir()} == {0o640}
    assert len(list(below.iterdir())) == (400 if what == "attributes" else 200)
    assert driver.read(b"f7") == b"content"


@needs_root
@pytest.mark.parametrize("force", [False, True])
def test_directories_below_that_the_user_may_not_change_are_named_before_anything_is_written(
    tmp_path: Path, force: bool
) -> None:
    for name in ("free", "closed", "closed/open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"old")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, WORKER.uid, WORKER.gid)
    (tmp_path / "closed").chmod(0o555)
    volume = OverlayVolume(os.fsencode(tmp_path))
    fs = Driver(volume, WORKER)
    for name in (b"free", b"closed", b"closed/open"):
        volume.write(fs.at(name + b"/f"), 0, b"new")
    codecs.lookup("ascii")  # before: the interpreter may lie where the user may not look
    os.setegid(WORKER.gid)
    os.seteuid(WORKER.uid)
    try:
        done = run(volume, force=force)
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert [(each.path, "`chmod u+w`" in each.reason) for each in done.conflicts] == [(b"closed", True)]
    assert [each.path for each in done.problems] == ([b"closed/f"] if force else [])
    new = {"free/f", "closed/open/f"} if force else set()
    assert {name for name in ("free/f", "closed/f", "closed/open/f") if (tmp_path / name).read_bytes() == b"new"} == new


def difference(volume: OverlayVolume, below: Path) -> list[tuple[bytes, str]]:
    """How the overlay differs from what anybody would find below now."""
    with OverlayVolume(os.fsencode(below)).tree() as now, volume.tree() as live:
        return [(change.path, change.kind) for change in changes(now, live)]


def changed(volume: OverlayVolume) -> list[bytes]:
    with volume.base_tree() as base, volume.tree() as live:
        return [change.path for change in changes(base, live)]


def test_what_was_done_above_is_below_afterwards_and_no_change_any_more(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    some_work(fs, volume)
    assert run(volume).conflicts == []
    assert difference(volume, below) == []
    assert changed(volume) == []
    assert (below / "README").stat().st_ino == (below / "src" / "README.too").stat().st_ino
    assert (below / "a" / "twin").stat().st_ino == (below / "a" / "sparse").stat().st_ino
    assert (below / "a" / "sparse").stat().st_blocks < 100
    assert stat.S_IMODE((below / "a").stat().st_mode) == 0o555
    assert not [name for _, _, names in os.walk(below) for name in names if name.startswith(".vfsd")]


@needs_root
def test_the_workspace_goes_on_as_it_was_and_can_be_applied_again(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    held = fs.hold(b"big")
    volume.take_snapshot("before")
    some_work(fs, volume)
    run(volume)
    assert fs.read(held, BLOCK, 12) == b"bbbchangedbb"
    volume.write(held, 0, b"again")
    fs.unlink(b"src/new.c")
    fs.set(b"a", mode=0o755)
    fs.file(b"a/more", b"1")
    assert changed(volume) == [b"a", b"a/more", b"big", b"src/new.c"]
    assert run(volume).conflicts == []
    assert difference(volume, below) == []
    volume.restore_snapshot("before")
    assert fs.read(b"big", 0, 3 * BLOCK) == b"b" * (3 * BLOCK), "what was replaced below is kept for snapshots"
    assert fs.read(b"README") == b"read me"
    assert run(volume).conflicts == []
    assert difference(volume, below) == []


def test_files_that_were_unlinked_while_open_keep_what_was_written_to_them(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    held = fs.hold(b"big")
    volume.write(held, 0, b"changed")
    fs.unlink(b"big")
    fs.file(b"new", b"n")
    run(volume)
    assert fs.read(held, 0, 10) == b"changedbbb"
    volume.write(held, 0, b"again")
    run(volume)
    assert fs.read(held, 0, 10) == b"againedbbb"


def test_a_dry_run_writes_nothing(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    some_work(Driver(volume, WORKER), volume)
    before = difference(volume, below)
    found = run(volume, dry_run=True)
    assert [change.path for change in found.changes] == changed(volume)
    assert difference(volume, below) == before


def test_changes_that_came_back_after_a_discard_do_not_replace_what_others_wrote_meanwhile(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    number = Driver(volume, WORKER).at(b"src/main.c")
    volume.read(number, 0, 10)
    volume.write(number, 0, b"mine")
    (below / "src" / "main.c").write_bytes(b"theirs")
    volume.take_snapshot("ours")
    volume.invalidation_done(volume.discard([b"src/main.c"]))
    assert volume.read(number, 0, 10) == b"theirs"
    volume.check_invariants()

    volume.restore_snapshot("ours")

    assert [(conflict.path, conflict.reason) for conflict in run(volume).conflicts] == [
        (b"src/main.c", "was changed by another program")
    ]
    assert (below / "src" / "main.c").read_bytes() == b"theirs"


def test_a_full_disk_is_reported_with_the_directory_before_anything_is_applied(
    below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    volume = OverlayVolume(os.fsencode(below))
    Driver(volume, WORKER).file(b"new", b"new")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device for the changes; nothing was applied") as caught:
        run(volume)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(below))
    assert not (below / "new").exists()


@pytest.mark.parametrize("what", ["changed", "removed", "created"])
def test_what_others_changed_below_stops_all_of_it_unless_forced(below: Path, what: str) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.file(b"src/new.c", b"mine")
    volume.write(fs.at(b"src/main.c"), 0, b"mine")
    fs.file(b"first", b"1")
    if what == "changed":
        (below / "src" / "main.c").write_bytes(b"theirs")
    elif what == "removed":
        (below / "src" / "main.c").unlink()
    else:
        (below / "src" / "new.c").write_bytes(b"theirs")
    done = run(volume)
    assert [(conflict.path, conflict.reason) for conflict in done.conflicts] == [
        (b"src/new.c" if what == "created" else b"src/main.c", f"was {what} by another program")
    ]
    assert not (below / "first").exists()
    kinds = {change.path: change.kind for change in run(volume, force=True).changes}
    assert kinds[b"src/main.c"] == ("added" if what == "removed" else "modified")
    assert (below / "first").read_bytes() == b"1"
    assert (below / "src" / "new.c").read_bytes() == b"mine"
    assert (below / "src" / "main.c").read_bytes() == b"mine"


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("becomes", [None, b"file"])
def test_a_directory_with_entries_that_the_workspace_does_not_remove_is_kept_and_named(
    below: Path, hidden: bool, becomes: bytes | None
) -> None:
    if hidden:
        (below / "src" / "deep" / "x.env").write_bytes(b"theirs")
    volume = OverlayVolume(os.fsencode(below), exclude=["*.env"])
    fs = Driver(volume, WORKER)
    volume.write(fs.at(b"README"), 0, b"mine")
    for path in (b"src/deep/x", b"src/main.c", b"src/README.too"):
        fs.unlink(path)
    fs.rmdir(b"src/deep")
    fs.rmdir(b"src")
    if becomes is not None:
        fs.file(b"src", becomes)
    if not hidden:
        (below / "src" / "deep" / "x.too").write_bytes(b"theirs")
    left = below / "src" / "deep" / ("x.env" if hidden else "x.too")
    reason = "is hidden from the workspace" if hidden else "was created by another program"
    expected = [(os.fsencode(left.relative_to(below)), f"{reason}, so its directory cannot be removed")]
    for force in (False, True, True):  # forced again, it succeeds again
        done = run(volume, force=force)
        assert [(conflict.path, conflict.reason) for conflict in done.conflicts] == expected
        assert (below / "README").read_bytes() == (b"mine me" if force else b"read me")
        assert (below / "src" / "main.c").exists() != force
    assert done.changes == []
    assert left.read_bytes() == b"theirs"
    assert changed(volume) == [b"src", b"src/deep"]
    left.unlink()
    assert run(volume).conflicts == []
    assert difference(volume, below) == []


@pytest.mark.parametrize("in_workspace", ["added", "removed"])
def test_a_directory_that_another_program_made_in_the_place_of_a_file_is_kept(below: Path, in_workspace: str) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.file(b"first", b"1")
    name = "new" if in_workspace == "added" else "big"
    if in_workspace == "added":
        fs.file(b"new", b"mine")
    else:
        fs.unlink(b"big")
        (below / "big").unlink()
    (below / name / "theirs").mkdir(parents=True)
    done = run(volume, force=True)
    assert [change.path for change in done.changes] == [b"first"]
    assert os.fsencode(name) + b"/theirs" in {conflict.path for conflict in done.conflicts}
    assert (below / name / "theirs").is_dir()


@pytest.mark.extended
@pytest.mark.parametrize("hook", ["before", "keep_going"], ids=["failed", "interrupted"])
def test_an_apply_that_ended_anywhere_leaves_each_path_old_or_new_and_is_finished_by_the_next(
    below: Path, tmp_path: Path, hook: str
) -> None:
    for stop in range(1000):
        root = tmp_path / f"copy{stop}"
        os.system(f"cp -a {below} {root}")
        volume = OverlayVolume(os.fsencode(root))
        some_work(Driver(volume, WORKER), volume)
        wanted = changed(volume)
        left = stop

        def step() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise StoppedError

        try:
            run(volume, **{hook: step})  # type: ignore[arg-type]
        except StoppedError:
            assert {path for path, _ in difference(volume, root)} <= set(wanted)
            assert run(volume).conflicts == [], stop
        else:
            break
        assert not [name for _, _, names in os.walk(root) for name in names if name.startswith(".vfsd")]
        assert difference(volume, root) == [], stop
        assert changed(volume) == []
    assert stop > 5


@pytest.mark.parametrize("seed", with_extended(range(40), 4))
@needs_root
def test_random_work_is_applied_as_it_is_shown(below: Path, seed: int) -> None:
    chance = random.Random(seed)
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    for _ in range(4):
        for _ in range(12):
            random_step(chance, volume, fs)
        done = run(volume)
        assert done.conflicts == []
        assert difference(volume, below) == []
        assert changed(volume) == []


@pytest.mark.extended
@pytest.mark.parametrize("seed", with_extended(range(10), 4))
@needs_root
def test_random_parts_of_random_work_are_applied_one_after_the_other(below: Path, seed: int) -> None:
    chance = random.Random(seed)
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    for _ in range(6):
        for _ in range(8):
            random_step(chance, volume, fs)
        found = changed(volume)
        if found:
            assert run(volume, chance.sample(found, chance.randrange(1, len(found) + 1))).conflicts == []
    assert run(volume).conflicts == []
    assert difference(volume, below) == []
    assert changed(volume) == []


def test_a_new_file_is_applied_with_its_directories_and_without_what_else_is_in_them(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.directory(b"new")
    fs.directory(b"new/deep")
    fs.file(b"new/deep/one", b"1")
    fs.file(b"new/deep/two", b"2")
    run(volume, [b"new/deep/one"])
    assert os.listdir(below / "new" / "deep") == ["one"]
    assert changed(volume) == [b"new/deep/two"]


@pytest.mark.parametrize("what", ["content", "mode"])
def test_a_file_is_applied_and_discarded_under_the_named_names_only(below: Path, what: str) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    readme, other = below / "README", below / "src" / "README.too"

    def change(mode: int, content: bytes) -> None:
        if what == "mode":
            fs.set(b"README", mode=mode)
        else:
            volume.write(fs.at(b"README"), 0, content)

    def seen(path: Path) -> tuple[bytes, int]:
        return path.read_bytes(), path.stat().st_mode & 0o777

    before = seen(readme)
    change(0o600, b"changed")
    run(volume, [b"README"])
    after = seen(readme)
    assert after != before
    assert seen(other) == before
    assert changed(volume) == [b"src/README.too"]
    run(volume)
    assert seen(other) == after
    assert readme.samefile(other)
    assert changed(volume) == []

    volume = OverlayVolume(os.fsencode(below))  # which has not read the directory of the other name
    fs = Driver(volume, WORKER)
    change(0o640, b"CHANGED")
    volume.discard([b"README"])
    volume.check_invariants()
    assert (fs.read(b"README"), fs.stat(b"README").mode & 0o777) == after
    assert (fs.read(b"src/README.too"), fs.stat(b"src/README.too").mode & 0o777) != after
    assert changed(volume) == [b"src/README.too"]


def test_a_file_that_a_directory_replaces_has_to_be_named(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.unlink(b"big")
    fs.directory(b"big")
    fs.file(b"big/inside", b"1")
    with pytest.raises(NotADirectoryError, match="apply it together with 'big/inside'"):
        run(volume, [b"big/inside"])
    assert (below / "big").read_bytes()[:1] == b"b"
    assert run(volume, [b"big"]).conflicts == []
    assert changed(volume) == []


@pytest.mark.parametrize("instead", ["nothing", "symlink", "file", "directory"])
def test_a_directory_that_vanished_below_is_a_conflict_and_force_makes_it_anew(below: Path, instead: str) -> None:
    build = below / "build"
    build.mkdir()
    for name in ("whole", "part", "removed", "kept"):
        (build / name).write_bytes(b"1" * (2 * BLOCK))
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.unlink(b"build/whole")
    fs.file(b"build/whole", b"2")
    fs.link(fs.at(b"build/whole"), b"other-name")
    fs.file(b"build/new", b"2")
    fs.unlink(b"build/removed")
    volume.write(fs.at(b"build/part"), 0, b"2")
    fs.file(b"elsewhere", b"2")
    outside = below.with_name("outside")
    outside.mkdir()
    shutil.rmtree(build)
    if instead == "symlink":
        build.symlink_to(outside)
    elif instead == "file":
        build.write_bytes(b"theirs")
    elif instead == "directory":
        build.mkdir()
    found = run(volume)
    assert [conflict.path for conflict in found.conflicts if conflict.reason == "was removed by another program"] == [
        b"build/part",
        b"build/whole",
    ]
    assert (found.conflicts[0].path == b"build") == (instead != "directory")
    assert not (below / "elsewhere").exists()
    assert run(volume, [b"elsewhere"]).conflicts == []
    assert [problem.path for problem in run(volume, force=True).problems] == [b"build/part"]
    assert {name: (build / name).read_bytes() for name in os.listdir(build)} == {"new": b"2", "whole": b"2"}
    assert (below / "other-name").stat().st_ino == (build / "whole").stat().st_ino
    assert changed(volume) == [b"build/part"]
    volume.discard([b"build/part"])
    assert run(volume).changes == []
    assert os.listdir(outside) == []


def test_nothing_gains_the_acl_of_the_directory_that_it_is_applied_to(below: Path) -> None:
    entries = ((1, 7, 2**32 - 1), (2, 7, 65534), (4, 7, 2**32 - 1), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(below, DEFAULT, acl)
    volume = OverlayVolume(os.fsencode(below))
    for name, kind in ((b"new-file", stat.S_IFREG), (b"new-fifo", stat.S_IFIFO)):
        made = volume.mknod(ROOT_INODE, name, kind | 0o664, 0, WORKER)
        volume.removexattr(made.inode, ACCESS)
        volume.setattr(made.inode, AttributeChanges(mode=0o664))
        volume.forget(made.inode, 1)

    run(volume)

    for name in ("new-file", "new-fifo"):
        assert ACCESS.decode() not in os.listxattr(below / name), name
        assert stat.S_IMODE((below / name).stat().st_mode) == 0o664, name
    assert difference(volume, below) == []


def test_a_directory_that_its_own_user_may_not_search_any_more_is_applied_with_what_is_in_it(below: Path) -> None:
    volume = OverlayVolume(os.fsencode(below))
    fs = Driver(volume, WORKER)
    fs.file(b"src/deep/new", b"new")
    fs.set(b"src/deep", mode=0o600)
    assert run(volume).conflicts == []
    assert stat.S_IMODE((below / "src" / "deep").stat().st_mode) == 0o600
    (below / "src" / "deep").chmod(0o700)
    assert (below / "src" / "deep" / "new").read_bytes() == b"new"


def test_what_cannot_be_put_into_its_directory_is_named(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = OverlayVolume(os.fsencode(below))
    Driver(volume, WORKER).file(b"src/new", b"new")

    rename = os.rename

    def refuse(old: bytes, new: bytes, **at: int) -> None:
        if new == b"new":
            raise PermissionError(errno.EACCES, "Permission denied", "staged")
        rename(old, new, **at)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="src/new"):
        run(volume)
    monkeypatch.undo()
    assert changed(volume) == [b"src/new"]
    assert run(volume).conflicts == []
