"""An apply that is killed anywhere: the next user of the directory completes it, or undoes it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.host_lower import INTENT_LOG_NAME
from protocol.backends.overlay.intent_log import Recovered, intent_log, recover
from protocol.diff.tree_diff import changes
from protocol.testing.volume.driver import Driver
from tests.support.foreign_files import NOT_REGULAR, plant
from tests.support.rights import needs_root
from tests.support.suites import with_extended
from tests.unit.protocol.backends.overlay.killed_apply import WORKER, apply_work, make_tree, written

Run = Callable[..., bool]
Tree = dict[str, tuple[object, ...]]
ANSWER_S = 60


@pytest.fixture
def below(tmp_path: Path) -> Path:
    root = make_tree(tmp_path / "below")
    for name, count in (("old", 3), ("gone", 4)):
        (root / name).mkdir()
        for number in range(count):
            (root / name / str(number)).write_bytes(b"%d" % number)
    (root / "old" / "0").unlink()
    return root


@pytest.fixture
def copies(below: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Makes copies of `below`, which differ in nothing."""
    count = 0

    def copy() -> Path:
        nonlocal count
        count += 1
        place = tmp_path / f"copy{count}"
        subprocess.run(["cp", "-a", below, place], check=True)
        return place

    yield copy
    for number in range(1, count + 1):
        place = tmp_path / f"copy{number}"
        subprocess.run(["chmod", "-R", "u+rwX", place], check=True)  # not all of it can be written
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Applies or recovers in another process, killed before its change number N; whether it was killed."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.protocol.backends.overlay.killed_apply"],
        cwd=Path(__file__).parents[5], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None

    def run_it(verb: str, number: int, root: Path, seed: int = 0, log: bytes = INTENT_LOG_NAME) -> bool:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{verb} {number} {seed} {os.fsdecode(log)} {root}\n")
        program.stdin.flush()
        said = program.stdout.readline().strip()
        assert said in {"killed", "done"}, said
        return said == "killed"

    with program:
        yield run_it
        program.stdin.close()
        assert program.wait(ANSWER_S) == 0


def tree_of(root: Path) -> Tree:
    """All that there is to know of what is below `root`, but inode numbers, and times of what was not made."""
    found: Tree = {}
    first: dict[int, str] = {}
    for above, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(above, name)
            at = path.lstat()
            kind = stat.S_IFMT(at.st_mode)
            held: object = None
            if kind == stat.S_IFLNK:
                held = os.readlink(path)
            elif kind == stat.S_IFREG:
                held = path.read_bytes()
            shown = str(path.relative_to(root))
            names = first.setdefault(at.st_ino, shown) if kind == stat.S_IFREG else shown
            mtime = at.st_mtime_ns if kind == stat.S_IFREG else 0
            xattrs = {each: os.getxattr(path, each, follow_symlinks=False)
                      for each in os.listxattr(path, follow_symlinks=False)}  # fmt: skip
            found[shown] = (at.st_mode, at.st_uid, at.st_gid, at.st_nlink, mtime, names, held, xattrs)
    return found


@pytest.fixture
def new(copies: Callable[[], Path]) -> Tree:
    """The directory as it is to be."""
    place = copies()
    apply_work(str(place), lambda: None)
    return tree_of(place)


# That of a user's apply to the whole machine is not in the root: most entries are staged next to their paths.
LOGS = pytest.mark.parametrize("log", [INTENT_LOG_NAME, b"src/" + INTENT_LOG_NAME], ids=os.fsdecode)


@pytest.mark.extended
@pytest.mark.slow
@LOGS
def test_killed_before_any_of_its_changes_it_is_undone_or_finished(
    copies: Callable[[], Path], below: Path, new: Tree, run: Run, log: bytes
) -> None:
    old = tree_of(below)
    assert old != new
    ends = []
    for number in range(1000):
        place = copies()
        if not run("apply", number, place, log=log):
            assert tree_of(place) == new
            break
        found = recover(place, path=log)
        now = tree_of(place)
        assert now in (old, new), number
        ends.append(now == new)
        if found is not None:
            assert found.undone == (now == old), number
            assert found.rejected == ()
        assert recover(place, path=log) is None
    # First all are undone, then all are finished.
    assert ends == sorted(ends)
    assert ends.count(False) > 5
    assert ends.count(True) > 20


@pytest.mark.parametrize("seed", with_extended(range(1, 16), 3))
@needs_root
def test_random_work_is_undone_or_finished_wherever_it_is_killed(
    copies: Callable[[], Path], below: Path, run: Run, seed: int
) -> None:
    old = tree_of(below)
    place = copies()
    apply_work(str(place), lambda: None, seed)
    new = tree_of(place)
    chance = random.SystemRandom()
    for number in (0, *(chance.randrange(60) for _ in range(4))):
        place = copies()
        if run("apply", number, place, seed):
            run("recover", chance.randrange(30), place)
            recover(place)
            assert tree_of(place) in (old, new), number
            assert recover(place) is None
        else:
            assert tree_of(place) == new


@pytest.mark.extended
@LOGS
def test_a_recovery_that_is_killed_too_is_finished_by_the_next(
    copies: Callable[[], Path], below: Path, new: Tree, run: Run, log: bytes
) -> None:
    old = tree_of(below)
    chance = random.Random(1)
    for number in range(0, 60, 4):
        place = copies()
        run("apply", number, place, log=log)
        for _ in range(3):
            run("recover", chance.randrange(12), place, log=log)
        recover(place, path=log)
        assert tree_of(place) in (old, new), number
        assert recover(place, path=log) is None


def _killed_when_committed(copies: Callable[[], Path], run: Run) -> Path:
    """A copy in which an apply was killed after its commit, before its first step."""
    for number in range(100):
        place = copies()
        assert run("apply", number, place)
        if (place / ".vfsd-apply" / "plan").exists():
            return place
    raise AssertionError("never committed")


def test_what_others_changed_before_it_was_finished_stays_and_the_new_is_beside_it(
    copies: Callable[[], Path], run: Run, new: Tree
) -> None:
    place = _killed_when_committed(copies, run)
    (place / "big").write_bytes(b"theirs")
    (place / "src" / "new.c").write_bytes(b"theirs too")
    (place / "gone" / "1").write_bytes(b"kept")
    shutil.rmtree(place / "link", ignore_errors=True)
    found = recover(place)
    assert found is not None
    assert not found.undone
    assert set(found.rejected) == {b"big", b"src/new.c", b"gone/1", b"gone"}
    assert "'big'" in str(found)
    assert (place / "big").read_bytes() == b"theirs"
    assert (place / "big.vfsd-new").read_bytes() == new["big"][6]
    assert (place / "src" / "new.c").read_bytes() == b"theirs too"
    assert (place / "src" / "new.c.vfsd-new").read_bytes() == b"new"
    assert os.listdir(place / "gone") == ["1"]
    assert (place / "README").read_bytes() == b"READ me"
    assert recover(place) is None


def test_what_has_no_directory_any_more_is_put_into_the_topmost(copies: Callable[[], Path], run: Run) -> None:
    place = _killed_when_committed(copies, run)
    shutil.rmtree(place / "src")
    found = recover(place)
    assert found is not None
    assert b"src/new.c" in found.rejected
    assert (place / "new.c.vfsd-new").read_bytes() == b"new"


def test_an_apply_finishes_first_what_another_was_killed_in(copies: Callable[[], Path], run: Run, new: Tree) -> None:
    place = _killed_when_committed(copies, run)
    volume = OverlayVolume(str(place))
    assert b".vfsd-apply" not in Driver(volume, WORKER).names(b"")
    Driver(volume, WORKER).file(b"more", b"more")
    assert written(volume, dry_run=True).recovered is None
    assert not (place / "more").exists()
    done = written(volume)
    assert done.error is None
    assert isinstance(done.recovered, Recovered)
    (place / "more").unlink()
    assert tree_of(place) == new


def test_two_applies_at_once_into_one_directory_are_refused(below: Path) -> None:
    volume = OverlayVolume(str(below))
    Driver(volume, WORKER).file(b"more", b"more")
    top = os.open(below, os.O_RDONLY)
    try:
        with intent_log(top), pytest.raises(OSError, match="another apply") as caught:
            written(volume)
    finally:
        os.close(top)
    assert caught.value.errno == errno.EBUSY
    assert written(volume).error is None
    assert (below / "more").read_bytes() == b"more"
    assert not (below / ".vfsd-apply").exists()


def test_the_name_of_the_intent_log_is_not_there_and_cannot_be_applied(below: Path) -> None:
    volume = OverlayVolume(str(below))
    Driver(volume, WORKER).directory(b".vfsd-apply")
    assert [conflict.path for conflict in written(volume).conflicts] == [b".vfsd-apply"]
    with volume.base_tree() as base, volume.tree() as live:
        assert [change.path for change in changes(base, live)] == [b".vfsd-apply"]


@needs_root
def test_what_goes_into_another_mount_is_staged_there(below: Path) -> None:
    (below / "other").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "vfsd-test", str(below / "other")], check=True)
    try:
        (below / "other" / "f").write_bytes(b"old")
        volume = OverlayVolume(str(below))
        fs = Driver(volume, WORKER)
        volume.write(fs.at(b"other/f"), 0, b"new")
        fs.directory(b"other/d")
        fs.file(b"other/d/g", b"g")
        done = written(volume)
        if done.error is not None:
            raise done.error
        assert (below / "other" / "f").read_bytes() == b"new"
        assert (below / "other" / "d" / "g").read_bytes() == b"g"
        assert sorted(os.listdir(below / "other")) == ["d", "f"]
    finally:
        subprocess.run(["umount", "-l", str(below / "other")], check=True)


# -- intent logs that were not made here ----------------------------------------------------------------
def planted(below: Path, step: dict[str, object], **changed: object) -> Path:
    """An intent log in `below` that says what to do, as somebody may have put it into a repository."""
    place = below / ".vfsd-apply"
    place.mkdir(0o700)
    plan = {"version": 2, "pid": 1, "inode": place.stat().st_ino, "steps": [{"seen": None, **step}], **changed}
    (place / "plan").write_text(json.dumps(plan))
    return place


def test_an_intent_log_that_came_with_the_files_is_not_followed(below: Path) -> None:
    seen = list((below / "README").lstat()[1:3])[::-1]
    inode = below.stat().st_ino  # some other directory's
    planted(below, {"do": "attributes", "path": "src", "attributes": [0o40777, 0, 0, 1, {}], "seen": seen}, inode=inode)
    (below / "src").chmod(0o755)
    with pytest.raises(OSError, match="made elsewhere"):
        recover(str(below))
    assert stat.S_IMODE((below / "src").stat().st_mode) == 0o755


def test_no_step_of_an_intent_log_leads_out_of_its_directory(below: Path) -> None:
    below.parent.chmod(0o700)
    for path in ("..", "src/../..", "src/..", "."):
        place = planted(below, {"do": "attributes", "path": path, "attributes": [0o40777, 0, 0, 1, {}]})
        with pytest.raises(OSError, match="not an intent log"):
            recover(str(below))
        shutil.rmtree(place)
    assert stat.S_IMODE(below.parent.stat().st_mode) == 0o700


@needs_root
def test_an_intent_log_of_another_user_is_not_followed(below: Path) -> None:
    place = planted(below, {"do": "attributes", "path": "README", "attributes": [0o104755, 0, 0, 1, {}]})
    os.chown(place, 65534, 65534)
    with pytest.raises(PermissionError):
        recover(str(below))


def test_an_intent_log_that_others_may_write_is_not_followed(below: Path) -> None:
    place = planted(below, {"do": "attributes", "path": "README", "attributes": [0o104755, 0, 0, 1, {}]})
    place.chmod(0o777)
    with pytest.raises(PermissionError):
        recover(str(below))


def test_only_what_an_apply_has_staged_is_removed(below: Path) -> None:
    place = below / ".vfsd-apply"
    place.mkdir(0o700)
    (below / "src" / ".vfsd-apply-1").write_bytes(b"staged")
    (place / "elsewhere").write_bytes(b"README\0src/main.c\0src/.vfsd-apply-1\0")
    assert recover(str(below)) == Recovered(undone=True)
    assert (below / "README").exists()
    assert (below / "src" / "main.c").exists()
    assert not (below / "src" / ".vfsd-apply-1").exists()


@pytest.mark.parametrize("kind", [*NOT_REGULAR, "huge"])
@pytest.mark.parametrize("name", ["plan", "elsewhere"])
def test_an_intent_log_that_is_no_file_is_named_and_keeps_nobody_waiting(below: Path, kind: str, name: str) -> None:
    place = below / ".vfsd-apply"
    place.mkdir(0o700)
    before = tree_of(below / "src")
    plant(place / name, kind)
    with pytest.raises(OSError, match=rf"\.vfsd-apply/{name}"):
        recover(str(below))
    assert tree_of(below / "src") == before


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", '{"version": 2, "é": 1}'.encode(), b"[" * 200_000, b"\0" * 99, b"null"]
)
def test_a_plan_of_any_content_is_no_intent_log(below: Path, text: bytes) -> None:
    place = below / ".vfsd-apply"
    place.mkdir(0o700)
    (place / "plan").write_bytes(text)
    with pytest.raises(OSError, match="not an intent log of an apply"):
        recover(str(below))
