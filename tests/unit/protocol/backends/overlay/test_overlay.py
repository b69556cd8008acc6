"""What only an overlay has: it looks below as late as it can, copies up by block, and notices what changes below."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.adapters.trees import changed_tree
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.inode import LowerContent
from protocol.backends.overlay.lower import LowerEntry
from protocol.diff.patch import write_patch
from protocol.diff.tree_diff import changes
from protocol.linux import statx
from protocol.testing.volume.driver import Clock, Driver, fails
from protocol.tree import filled, losing
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, AttributeChanges, Caller
from protocol.volume_extensions import CacheInvalidation

BLOCK = 128 * 1024
ALICE = Caller(1000, 1000)


@pytest.fixture
def below(tmp_path: Path) -> Path:
    root = tmp_path / "below"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "other").mkdir()
    (root / "src" / "main.c").write_bytes(b"main")
    (root / "src" / "deep" / "x").write_bytes(b"x" * 10)
    (root / "README").write_bytes(b"read me")
    os.symlink("src/main.c", root / "link")
    return root


def over(root: Path, **options: object) -> tuple[OverlayVolume, Driver]:
    volume = OverlayVolume(os.fsencode(root), **options)  # type: ignore[arg-type]
    return volume, Driver(volume)


# -- late -------------------------------------------------------------------------------------------
def test_mounting_reads_no_directory_and_a_path_only_those_on_it(below: Path) -> None:
    for number in range(50):
        (below / f"d{number}").mkdir()
        (below / f"d{number}" / "f").touch()
    volume, fs = over(below)
    scanned: list[bytes] = []
    scan = volume.directory.scan

    def recording(path: bytes) -> list[LowerEntry]:
        scanned.append(path)
        return scan(path)

    volume.directory.scan = recording  # type: ignore[method-assign]
    fs.stat(b"")
    assert scanned == []
    assert fs.read(b"src/main.c") == b"main"
    assert scanned == [b"", b"src"]
    assert inodes_shown(volume) == 3  # the root, src, main.c
    assert len(fs.names()) == 54
    assert inodes_shown(volume) == 3, "listing a directory looks at none of its files"


def test_a_file_has_the_inode_number_of_the_directory_below_whatever_is_looked_up_first(below: Path) -> None:
    (below / "hard").hardlink_to(below / "README")
    numbers = {path: os.lstat(below / path).st_ino for path in ("src", "src/main.c", "README", "hard", "link")}
    for order in (sorted(numbers), sorted(numbers, reverse=True)):
        _, fs = over(below)
        new = fs.file(b"new")
        assert {path: fs.at(os.fsencode(path)) for path in order} == numbers
        assert new not in numbers.values()


def test_a_second_file_never_gets_the_number_of_another_one(below: Path) -> None:
    volume, fs = over(below)
    number = fs.at(b"README")
    scan = volume.directory.scan
    volume.directory.scan = lambda path: [  # type: ignore[method-assign]
        entry._replace(number=number) for entry in scan(path)
    ]  # as after another program removed the file, and made others with its inode number
    assert len({fs.at(path) for path in (b"README", b"src/main.c", b"src/deep")}) == 3
    volume.check_invariants()


def inodes_shown(volume: OverlayVolume) -> int:
    usage = volume.usage()
    return (usage.files or 0) + (usage.directories or 0)


def test_a_thread_walks_a_view_while_the_loop_looks_and_changes(below: Path) -> None:
    for number in range(30):
        (below / f"d{number:02}").mkdir()
        for name in range(20):
            (below / f"d{number:02}" / f"f{name:02}").write_bytes(b"%d" % name)
    volume, fs = over(below)
    found: list[bytes] = []
    with volume.tree() as tree:
        reader = threading.Thread(target=lambda: found.extend(entry.path for entry in tree.walk()))
        reader.start()
        for number in range(29, -1, -1):
            for name in range(20):
                fs.unlink(b"d%02d/f%02d" % (number, name))
            fs.rmdir(b"d%02d" % number)
            fs.file(b"new%d" % number)
        reader.join()
    assert len(found) == 1 + 7 + 30 * 21
    assert found == sorted(found, key=lambda path: path.split(b"/") if path else [])
    volume.check_invariants()


# -- copying up -------------------------------------------------------------------------------------
@pytest.mark.extended
def test_one_byte_changed_in_a_file_of_a_gibibyte_costs_one_block(below: Path) -> None:
    size = 1 << 30
    with (below / "big").open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"d" * 3 * BLOCK)
    volume, fs = over(below)
    number = fs.at(b"big")
    volume.write(number, size // 2 + BLOCK + 5, b"!")
    assert volume.usage().used_bytes == BLOCK
    volume.write(number, 4096 * 3, b"!")  # in a hole there is nothing to copy
    assert volume.usage().used_bytes == BLOCK + 4096
    assert fs.read(number, size // 2 + BLOCK, 8) == b"ddddd!dd"
    assert fs.read(number, 4096 * 3 - 1, 3) == b"\0!\0"
    assert fs.stat(number).size == size
    with volume.base_tree() as old, volume.tree() as new:
        assert [(change.path, change.kind) for change in changes(old, new)] == [(b"big", "modified")]
    assert (below / "big").read_bytes()[size // 2 + BLOCK + 5 : size // 2 + BLOCK + 6] == b"d"
    volume.check_invariants()


def test_a_hole_punched_in_terabytes_of_nothing_masks_what_there_is(below: Path) -> None:
    with (below / "sparse").open("wb") as file:
        file.truncate(1 << 42)
        file.write(b"d" * BLOCK)
        file.seek(1 << 41)
        file.write(b"d" * (BLOCK + 1))
    with (below / "twin").open("wb") as file:
        file.truncate(1 << 42)
        file.seek((1 << 41) + BLOCK)
        file.write(b"d")
    volume, fs = over(below)
    number = fs.at(b"sparse")
    volume.take_snapshot("before")
    volume.fallocate(number, 3, 100, 1 << 41)
    node = volume.getattr(number)
    assert isinstance(node.content, LowerContent)
    assert node.content.masked <= {0}, "a hole below needs no mask"
    assert fs.read(number, 99, 2) == b"d\0"
    assert fs.read(number, 1 << 41, 200) == bytes(100) + b"d" * 100
    assert fs.stat(number).blocks == 8 + (BLOCK + 4096) // 512
    with volume.tree("before") as old, volume.tree() as new:
        assert [(change.path, change.kind) for change in changes(old, new)] == [(b"sparse", "modified")]
    one, other = (volume.getattr(fs.at(name)).content for name in (b"sparse", b"twin"))
    assert one is not None
    assert other is not None
    assert not one.same_as(other), "and what both lack is not read"
    volume.fallocate(number, 3, 0, (1 << 41) + BLOCK)
    one = volume.getattr(number).content
    assert one is not None
    assert one.same_as(other)
    assert other.same_as(one)
    volume.check_invariants()


def test_changing_attributes_names_and_links_copies_nothing(below: Path) -> None:
    volume, fs = over(below)
    fs.set(b"README", mode=0o600)
    fs.rename(b"src", b"other/src")
    fs.link(fs.at(b"README"), b"other/second")
    volume.setxattr(fs.at(b"link"), b"trusted.x", b"1", 0)
    assert volume.usage().used_bytes == 0
    assert fs.read(b"other/src/deep/x") == b"x" * 10
    assert fs.read(b"other/second") == b"read me"
    assert fs.stat(b"README").nlink == 2
    assert volume.statfs().inodes_free == volume.statfs().inodes - 1


# -- names --------------------------------------------------------------------------------------------
def test_names_of_one_file_below_are_one_file(below: Path) -> None:
    os.link(below / "README", below / "other" / "again")
    volume, fs = over(below)
    number = fs.at(b"README")
    assert fs.stat(number).nlink == 2, "also before the other name was met"
    volume.take_snapshot("s")
    volume.write(number, 0, b"READ")
    assert fs.at(b"other/again") == number
    assert fs.read(b"other/again") == b"READ me"
    with volume.base_tree() as old, volume.tree() as new:
        assert [change.path for change in changes(old, new)] == [b"README", b"other/again"]
    fs.unlink(b"README")
    fs.unlink(b"other/again")
    with volume.tree("s") as tree:
        assert tree.entry(b"README").inode == tree.entry(b"other/again").inode
    volume.check_invariants()


def test_a_diff_names_the_other_name_also_when_nobody_met_it(below: Path) -> None:
    os.link(below / "README", below / "other" / "again")
    volume, fs = over(below)
    volume.write(fs.at(b"README"), 0, b"READ")
    with volume.base_tree() as old, volume.tree() as new:
        assert [change.path for change in changes(old, new)] == [b"README", b"other/again"]


def test_a_directory_that_became_a_symlink_is_not_followed(below: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "main.c").write_bytes(b"secret")
    volume, fs = over(below)
    fs.at(b"src")
    (below / "src").rename(below / "away")
    os.symlink(tmp_path / "secret", below / "src")
    volume.lower.close()
    with pytest.raises(OSError, match=r".") as caught:
        fs.read(b"src/main.c")
    assert caught.value.errno in {errno.ENOENT, errno.ESTALE}


# -- what changes below -------------------------------------------------------------------------------
def test_a_file_that_was_not_changed_above_follows_what_is_below(below: Path) -> None:
    volume, fs = over(below)
    number = fs.hold(b"README")
    assert fs.read(number) == b"read me"
    (below / "README").write_bytes(b"written anew, and longer")
    assert fs.read(number) == b"written anew, and longer"
    assert fs.stat(number).size == 24
    assert volume.changed_below == 1
    volume.check_invariants()


def test_with_a_kernel_the_read_fails_until_that_was_told(below: Path) -> None:
    volume, fs = over(below)
    told: list[CacheInvalidation] = []
    volume.on_change = told.append
    number = fs.hold(b"README")
    fs.read(number)
    (below / "README").write_bytes(b"written anew")
    for _ in range(2):
        with fails(errno.ESTALE):
            fs.read(number)
    assert [[(change.inode, change.content) for change in each.inodes] for each in told] == [[(number, True)]]
    volume.invalidation_done(told[0])
    assert fs.read(number) == b"written anew"


def test_what_the_kernel_has_read_is_looked_at_again_by_and_by(below: Path) -> None:
    for number in range(1500):
        (below / "other" / str(number)).write_bytes(b"1")
    volume, fs = over(below)
    told: list[CacheInvalidation] = []
    volume.on_change = told.append
    held = [fs.hold(b"other/%d" % number) for number in range(1500)]
    (below / "other" / "3").write_bytes(b"2")
    (below / "other" / "1400").write_bytes(b"3")
    (below / "other" / "5").unlink()
    for _ in range(4):
        volume.tidy()
    assert {change.inode for each in told for change in each.inodes} == {held[3], held[1400]}
    assert volume.changed_below == 2
    for each in told:
        volume.invalidation_done(each)
    assert [fs.read(held[number]) for number in (3, 4, 1400)] == [b"2", b"1", b"3"]
    volume.check_invariants()


def test_a_file_held_in_part_is_never_a_mixture(below: Path) -> None:
    (below / "f").write_bytes(b"1" * (3 * BLOCK))
    volume, fs = over(below)
    number = fs.at(b"f")
    volume.write(number, BLOCK, b"mine")
    (below / "f").write_bytes(b"2" * (3 * BLOCK))
    assert fs.read(number, BLOCK, 6) == b"mine11"
    for offset in (0, 2 * BLOCK, BLOCK - 1):
        with fails(errno.ESTALE):
            fs.read(number, offset, 10)
    with fails(errno.ESTALE):
        volume.write(number, 5, b"more")
    assert volume.changed_below == 1
    volume.discard([b"f"])
    assert fs.read(b"f", 0, 3 * BLOCK) == b"2" * (3 * BLOCK)
    volume.check_invariants()


def test_a_discarded_rename_makes_a_second_file_that_has_blocks(below: Path) -> None:
    (below / "f").write_bytes(b"1" * (2 * BLOCK + 10))
    clock = Clock()
    volume, fs = over(below, clock=clock)
    fs.rename(b"f", b"moved")
    volume.discard([b"f"])
    for name in (b"f", b"moved"):
        assert fs.stat(name).blocks >= (2 * BLOCK + 10) // 512, name
        assert fs.set(name, size=1).blocks == 8
        now = clock.tick()
        after = fs.set(name, size=1)  # truncate(2) to the size that a file with data has sets its times
        assert (after.mtime_ns, after.ctime_ns) == (now, now), name
    volume.check_invariants()


def test_what_went_away_below_before_it_was_looked_at_is_absent(below: Path) -> None:
    volume, fs = over(below)
    assert b"README" in fs.names()
    (below / "README").unlink()
    with fails(errno.ENOENT):
        fs.read(b"README")
    assert b"README" not in fs.names()
    volume.check_invariants()


def test_a_tree_follows_too_and_says_which_file_it_cannot_read(below: Path) -> None:
    (below / "held").write_bytes(b"1" * (3 * BLOCK))
    (below / "long").write_bytes(b"1" * (3 * BLOCK))
    volume, fs = over(below)
    told: list[CacheInvalidation] = []
    volume.on_change = told.append
    volume.write(fs.at(b"held"), BLOCK, b"mine")
    fs.file(b"new", b"new")
    for name in (b"README", b"long"):
        fs.at(name)
    with volume.base_tree() as base, volume.tree() as live:
        pieces = live.chunks(b"long", BLOCK)
        assert next(pieces) == b"1" * BLOCK
        for name in ("README", "held", "long"):
            (below / name).write_bytes(b"theirs" * BLOCK)
        with fails(errno.ESTALE):
            next(pieces)  # never half the one and half the other
        assert b"".join(filled(live.chunks(b"long", BLOCK))) == b"theirs" * BLOCK
        assert live.read(b"README", 0, 12) == b"theirstheirs"
        assert len(told) == 2, "the kernel forgets what it had"
        with pytest.raises(OSError, match=r"another program changed the file below the overlay.*'held'"):
            live.read(b"held", 0, 10)
        assert [(change.path, change.kind) for change in changes(base, live)] == [
            (b"held", "modified"),
            (b"new", "added"),
        ]
        patch = bytearray()
        write_patch(base, live, changes(base, live), patch.extend)
    assert b"# Not in this patch: held (another program changed it below the overlay)" in patch
    assert b"+++ b/new" in patch
    volume.check_invariants()


# What another program does to a file.
CHANGES_BELOW: dict[str, Callable[[Path], object]] = {
    "rewrite": lambda place: place.write_bytes(b"yy" + place.read_bytes()[2:]),  # of the same size
    "empty": lambda place: place.write_bytes(b""),
    "remove": lambda place: place.unlink(),
    "remove the directory": lambda place: shutil.rmtree(place.parent),
    "rename": lambda place: place.rename(place.with_name("moved")),
    "rename the directory": lambda place: place.parent.rename(place.parent.with_name("moved")),
    "rename above": lambda place: place.parent.parent.rename(place.parent.parent.with_name("moved")),
}
# What the workspace does to it.
OWN: dict[str, Callable[[Driver, bytes], object]] = {
    "nothing": lambda fs, path: None,
    "append": lambda fs, path: fs.volume.write(fs.at(path), fs.stat(path).size, b"more"),
    "chmod": lambda fs, path: fs.set(path, mode=0o600),
    "remove": lambda fs, path: fs.unlink(path),
}


def _replace(place: Path) -> None:
    other = place.parent.parent / "other"
    other.write_bytes(b"another")
    os.utime(other, (1, 1))
    other.rename(place)


def _replace_directory(place: Path) -> None:
    place.parent.rename(place.parent.with_name("moved"))
    place.parent.with_name("another").rename(place.parent)


@pytest.mark.parametrize(
    "change",
    [CHANGES_BELOW["rewrite"], CHANGES_BELOW["empty"], _replace, _replace_directory],
    ids=["rewrite", "empty", "replace", "replace the directory"],
)
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_a_file_that_changed_below_is_lost_in_the_snapshots_before(
    below: Path, change: Callable[[Path], object], is_read: bool
) -> None:
    (below / "src" / "another").mkdir()
    (below / "src" / "another" / "x").write_bytes(b"another")
    volume, fs = over(below)
    path = b"src/deep/x"
    if is_read:
        assert fs.read(path) == b"x" * 10
    taken = volume.take_snapshot("before")
    statx.outlast_tick(taken.created_ns)
    change(below / os.fsdecode(path))
    statx.outlast_tick(statx.file_clock_ns())
    content = (below / os.fsdecode(path)).read_bytes()
    if is_read:
        volume.check_below()
    else:
        assert fs.read(path) == content
    volume.take_snapshot("after")
    with volume.tree("before") as before, volume.tree("after") as after, volume.tree() as live:
        assert before.entry(path).size > 0, "a kernel would not read an empty file"
        with fails(errno.ESTALE):
            before.read(path, 0, 10)
        with fails(errno.ESTALE):
            list(before.chunks(path))
        assert b"".join(filled(after.chunks(path))) == b"".join(filled(live.chunks(path))) == content
        assert [(each.path, each.kind) for each in changes(before, live)] == [(path, "modified")]
        assert list(changes(after, live)) == []
        lost = losing(before)
        assert lost is not None
        assert lost.lost_paths(live) == [path]
        patch = bytearray()
        write_patch(before, live, changes(before, live), patch.extend)
        assert b"# Not in this patch: src/deep/x (another program changed it" in patch
    with volume.following_tree("before") as base, volume.tree() as live:
        assert list(changes(base, live)) == [], "the base of a merge"
    volume.restore_snapshot("before")
    assert fs.read(path) == content, "a restore leaves it alone"
    _overwritten(fs, path)
    volume.restore_snapshot("before")
    volume.check_below()
    assert fs.read(path) == content, "a restore takes the change of the workspace back"
    volume.check_invariants()


def _put_a_link(place: Path) -> None:
    place.unlink()
    place.symlink_to("main.c")


def _put_a_directory(place: Path) -> None:
    place.unlink()
    place.mkdir()


def _put_a_fifo(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def _put_a_link_above(place: Path) -> None:
    CHANGES_BELOW["rename the directory"](place)
    place.parent.symlink_to("moved")


def _overwritten(fs: Driver, path: bytes) -> None:
    fs.set(path, size=0)
    fs.volume.write(fs.at(path), 0, b"mine")


GONE_BELOW = {
    **{what: change for what, change in CHANGES_BELOW.items() if what != "empty"},
    "put a link": _put_a_link,
    "put a directory": _put_a_directory,
    "put a fifo": _put_a_fifo,
    "put a link above": _put_a_link_above,
}


@pytest.mark.parametrize("change", GONE_BELOW)
@pytest.mark.parametrize("own", [*OWN, "overwrite"])
def test_a_file_that_is_gone_below_is_lost_in_the_snapshots_before(below: Path, change: str, own: str) -> None:
    volume, fs = over(below)
    path = b"src/deep/x"
    fs.read(path)
    taken = volume.take_snapshot("before")
    statx.outlast_tick(taken.created_ns)
    {**OWN, "overwrite": _overwritten}[own](fs, path)
    GONE_BELOW[change](below / os.fsdecode(path))
    statx.outlast_tick(statx.file_clock_ns())
    volume.check_below()
    volume.check_below()
    assert volume.changed_below == (own != "remove"), "counted once"
    volume.take_snapshot("after")
    with volume.tree("before") as before, volume.tree("after") as after, volume.tree() as live:
        with fails(errno.ESTALE):
            before.read(path, 0, 10)
        assert [each.path for each in changes(before, live) if each.path == path] == [path]
        assert list(changes(after, live)) == []
        lost = losing(before)
        assert lost is not None
        assert lost.lost_paths(live) == [path]
        was = before.entry(path)
        assert (was.size, was.mode) == (10, stat.S_IFREG | 0o644)
    volume.restore_snapshot("before")
    with volume.tree("before") as before, volume.tree() as live:
        lost = losing(before)
        assert lost is not None
        assert lost.lost_paths(live) == [path], "the answer of a restore names it"
    volume.lose_changed("before")  # as the new process of a fork does
    with volume.tree("before") as before, volume.tree() as live:
        assert list(changes(before, live)) == []
    with fails(errno.ESTALE):
        fs.read(path)
    with volume.applying([], force=False, dry_run=True) as apply:
        conflicts = [each.path for each in apply.write(lambda: None).conflicts]
    assert path in conflicts
    volume.check_invariants()


def test_a_file_that_comes_back_below_is_lost_no_more_and_another_one_in_its_place_is_followed(below: Path) -> None:
    volume, fs = over(below)
    fs.read(b"src/deep/x")
    fs.read(b"src/main.c")
    taken = volume.take_snapshot("before")
    statx.outlast_tick(taken.created_ns)
    (below / "src" / "deep").rename(below / "moved")
    (below / "src" / "main.c").unlink()
    volume.check_below()
    with volume.tree("before") as before:
        for path in (b"src/deep/x", b"src/main.c"):
            with fails(errno.ESTALE):
                before.read(path, 0, 10)
    (below / "moved").rename(below / "src" / "deep")
    (below / "src" / "main.c").write_bytes(b"another")
    volume.check_below()
    assert fs.read(b"src/main.c") == b"another"
    with volume.tree("before") as before, volume.tree() as live:
        assert before.read(b"src/deep/x", 0, 10) == b"x" * 10
        assert [each.path for each in changes(before, live)] == [b"src/main.c"]
    volume.check_invariants()


def test_a_lost_file_keeps_its_attributes_in_each_snapshot(below: Path) -> None:
    volume, fs = over(below)
    fs.read(b"README")
    shown = []
    for number in range(4):
        taken = volume.take_snapshot(f"s{number}")
        statx.outlast_tick(taken.created_ns)
        with volume.tree() as live:
            shown.append(live.entry(b"README"))
        (below / "README").write_bytes(b"theirs" * (number + 2))
        (below / "README").chmod(0o600 + number)
        statx.outlast_tick(statx.file_clock_ns())
        volume.check_below()
    volume.drop_snapshot("s1")
    for number in (0, 2, 3):
        with volume.tree(f"s{number}") as tree:
            assert tree.entry(b"README") == shown[number]
    with volume.tree("s0") as old, volume.tree("s2") as new:
        assert [each.path for each in changes(old, new)] == [b"README"], "lost in both, and not the same"
    volume.check_invariants()


def test_what_a_snapshot_of_an_apply_shows_is_not_lost_by_that_apply(below: Path) -> None:
    os.link(below / "README", below / "twin")
    volume, fs = over(below)
    fs.set(b"src/main.c", mode=0o600)
    fs.file(b"README.new", b"new")
    fs.at(b"twin")
    taken = volume.take_snapshot("before")
    statx.outlast_tick(taken.created_ns)
    fs.unlink(b"README")
    volume.write(fs.at(b"src/deep/x"), 0, b"changed")
    with volume.applying([], force=False, dry_run=False) as apply:
        apply.finish(apply.write(lambda: None))
    with volume.tree("before") as before:
        names = (b"README", b"twin", b"src/main.c", b"src/deep/x")
        assert [before.read(name, 0, 10) for name in names] == [b"read me", b"read me", b"main", b"x" * 10]


def test_a_fork_of_a_snapshot_cannot_read_what_changed_below_since_until_it_is_discarded(below: Path) -> None:
    volume, fs = over(below)
    fs.read(b"README")
    taken = volume.take_snapshot("before")
    statx.outlast_tick(taken.created_ns)
    (below / "README").write_bytes(b"theirs")
    volume.check_below()
    volume.restore_snapshot("before")
    volume.lose_changed("before")  # as the new process of a fork does
    with fails(errno.ESTALE):
        fs.read(b"README")
    with volume.tree("before") as before, volume.tree() as live:
        assert list(changes(before, live)) == []
    with volume.applying([], force=True, dry_run=False) as apply:
        done = apply.write(lambda: None)
    assert [conflict.path for conflict in (*done.conflicts, *done.problems)] == [b"README", b"README"]
    assert (below / "README").read_bytes() == b"theirs"
    volume.discard([b"README"])
    assert fs.read(b"README") == b"theirs"
    volume.check_invariants()


# -- what is hidden -----------------------------------------------------------------------------------
def test_what_is_excluded_is_absent_and_cannot_be_made(below: Path) -> None:
    (below / ".env").write_bytes(b"secret")
    (below / "src" / ".env").write_bytes(b"secret")
    (below / "src" / ".env.example").write_bytes(b"public")
    volume, fs = over(below, exclude=[".env", "/other/"])
    assert fs.names() == [b"README", b"link", b"src"]
    assert fs.names(b"src") == [b".env.example", b"deep", b"main.c"]
    with fails(errno.ENOENT):
        fs.at(b".env")
    with fails(errno.EPERM):
        fs.file(b".env")
    with fails(errno.EPERM):
        fs.rename(b"README", b"src/.env")
    with volume.tree() as tree:
        assert not [entry.path for entry in tree.walk() if b".env" in entry.path.split(b"/")]
    volume.check_invariants()


def test_a_directory_can_be_made_although_only_some_files_are_shown(below: Path) -> None:
    (below / "notes").touch()
    volume, fs = over(below, include=["*.c"])
    fs.directory(b"made")
    fs.file(b"made/new.c")
    for name in (b"made/new.txt", b"notes"):
        with fails(errno.EPERM):
            fs.file(name)
    with fails(errno.EPERM):
        fs.directory(b"notes")  # a hidden file has the name
    assert fs.names(b"made") == [b"new.c"]
    volume.check_invariants()


def test_a_rename_takes_no_name_that_a_hidden_entry_of_another_type_has(below: Path) -> None:
    for name in ("out", "src/out"):
        (below / name).mkdir()
    (below / "other" / "out").touch()
    volume, fs = over(below, exclude=["out/"])
    for name in (b"out", b"src/out"):
        with fails(errno.EPERM):
            fs.rename(b"README", name)
        with fails(errno.EPERM):
            fs.file(name)
    fs.file(b"src/deep/out")  # nothing below has the name
    fs.unlink(b"src/deep/out")
    fs.rename(b"README", b"other/out")  # a visible file, which is replaced
    fs.rename(b"other/out", b"src/deep/out")
    volume.check_invariants()


def test_an_exchange_gives_neither_entry_a_hidden_name(below: Path) -> None:
    (below / "out").touch()
    volume, fs = over(below, exclude=["/out/"])
    for old, new in ((b"src", b"out"), (b"out", b"src")):
        with fails(errno.EPERM):
            volume.rename(ROOT_INODE, old, ROOT_INODE, new, RENAME_EXCHANGE)
    assert fs.names() == [b"README", b"link", b"other", b"out", b"src"]
    volume.rename(ROOT_INODE, b"README", ROOT_INODE, b"out", RENAME_EXCHANGE)
    volume.check_invariants()


def test_with_patterns_to_include_only_those_files_are_seen(below: Path) -> None:
    (below / "src" / "skip.c").touch()
    _, fs = over(below, include=["*.c"], exclude=["skip.*"])
    assert fs.names() == [b"other", b"src"]
    assert fs.names(b"src") == [b"deep", b"main.c"]


def test_the_changes_alone_are_a_tree(below: Path) -> None:
    volume, fs = over(below)
    fs.file(b"src/deep/new", b"1")
    fs.set(b"README", size=1)
    fs.unlink(b"src/main.c")
    with volume.base_tree() as old, volume.tree() as new:
        tree = changed_tree(old, new)
        assert [entry.path for entry in tree.walk()] == [b"", b"README", b"src", b"src/deep", b"src/deep/new"]
        assert tree.read(b"README", 0, 5) == b"r"
        with pytest.raises(FileNotFoundError):
            tree.entry(b"link")


def test_the_first_change_of_a_file_waits_until_a_change_below_would_give_it_another_ctime(
    below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, fs = over(below)
    number = fs.stat(b"README").inode
    ctime_ns, ticks = (below / "README").stat().st_ctime_ns, iter([0, 0, 0, 1])
    monkeypatch.setattr(statx, "file_clock_ns", lambda: ctime_ns + next(ticks))
    volume.write(number, 0, b"R")
    assert next(ticks, None) is None, "it is written in the tick of its last change below"


def test_one_name_of_a_file_is_restored_and_the_others_stay_names_of_it_if_they_are_as_then(below: Path) -> None:
    (below / "one").write_bytes(b"x" * 5000)
    (below / "two").hardlink_to(below / "one")
    volume, fs = over(below)
    number, mtime_ns = fs.at(b"one"), fs.stat(b"one").mtime_ns
    volume.take_snapshot("s")
    volume.write(number, 0, b"x" * 5000)  # in memory now, and no longer below
    volume.setattr(number, AttributeChanges(mtime_ns=mtime_ns))
    volume.restore_snapshot("s", [b"one"])
    assert fs.at(b"one") == fs.at(b"two")
