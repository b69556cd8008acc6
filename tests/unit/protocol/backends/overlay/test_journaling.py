"""The journal of an overlay: torn anywhere, after a power failure and on a full disk, it describes a state that was."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lower import AbsentLower
from protocol.tree import filled
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from tests.support.journals import HEADER, JournalInMemory, replayed_over
from tests.unit.protocol.journal.power import UnreliableFile

Shown = dict[bytes, tuple[int, int, bytes]]


@pytest.fixture
def below(tmp_path: Path) -> Path:
    place = tmp_path / "below"
    (place / "d" / "deep").mkdir(parents=True)
    (place / "d" / "deep" / "file").write_bytes(b"deep" * 20)
    (place / "d" / "f").write_bytes(b"content" * 10)
    os.link(place / "d" / "f", place / "second")
    (place / "link").symlink_to("d/f")
    return place


def shown(volume: OverlayVolume) -> Shown:
    with volume.tree() as tree:
        return {
            entry.path: (
                entry.inode,
                entry.mode,
                b"".join(filled(tree.chunks(entry.path))) if entry.is_file else entry.target,
            )
            for entry in tree.walk()
        }


def number(volume: OverlayVolume, *names: bytes) -> int:
    at = ROOT_INODE
    for name in names:
        at = volume.lookup(at, name).inode
    return at


def steps(volume: OverlayVolume) -> Iterator[None]:
    """Change the overlay, a record at a time."""
    volume.setattr(number(volume, b"d", b"deep", b"file"), AttributeChanges(mode=0o600))
    yield
    volume.write(number(volume, b"d", b"f"), 5, b"partly")
    yield
    volume.take_snapshot("s")
    yield
    volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved")
    yield
    volume.unlink(ROOT_INODE, b"second")
    yield
    volume.fallocate(number(volume, b"moved", b"f"), 3, 0, 30)  # a hole
    yield
    volume.mkdir(number(volume, b"moved", b"deep"), b"new", 0o755, SUPERUSER)
    yield
    volume.restore_snapshot("s", [b"d"])
    yield
    volume.discard()
    yield


def history(volume: OverlayVolume, journal: JournalInMemory) -> list[tuple[int, Shown]]:
    """Make all steps; return where the log ended after each, and what the overlay showed."""
    found = [(journal.log.end, shown(volume))]
    for _ in steps(volume):
        volume.flush_journal()
        found.append((journal.log.end, shown(volume)))
    return found


def test_a_journal_that_is_torn_at_any_byte_gives_the_state_before(below: Path) -> None:
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.keep(volume)
    states = history(volume, journal)
    whole = bytes(journal.file.content)
    before: list[list[bytes]] = []
    for end in range(states[-5][0], states[-1][0] + 1):
        journal.file.content = bytearray(whole[:end])
        batches = journal.batches()
        if batches != before:  # most ends leave the same batches
            replayed_over(AbsentLower(), batches).check_invariants()
            before = batches
        if any(end in (at, at - 1, at + 40) for at, _ in states):
            wanted = [state for at, state in states if at <= end][-1]
            assert shown(replayed_over(bytes(below), batches)) == wanted, end


@pytest.mark.parametrize("seed", range(20))
def test_after_a_power_failure_the_overlay_is_in_a_state_that_was_synced_or_a_later_one(below: Path, seed: int) -> None:
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.file = UnreliableFile(HEADER.encoded())  # type: ignore[assignment]
    journal.log._file = journal.file
    journal.keep(volume)
    choice = random.Random(seed)
    states = [shown(volume)]
    journal.log.sync()
    synced = 0
    for _ in steps(volume):
        states.append(shown(volume))
        if choice.random() < 0.3:
            volume.fsync(ROOT_INODE, data_only=False)
            synced = len(states) - 1
    journal.file.content = bytearray(journal.file.after_power_failure(choice))  # type: ignore[attr-defined]
    batches = journal.batches()
    replayed_over(AbsentLower(), batches).check_invariants()
    assert shown(replayed_over(bytes(below), batches)) in states[synced:]


def test_on_a_full_disk_a_refused_change_leaves_no_trace_and_works_later(below: Path) -> None:
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.keep(volume)
    before = shown(volume)
    journal.file.limit = journal.log.end
    journal.log._allocated = journal.log.end
    for change in (
        lambda: volume.setattr(number(volume, b"d", b"f"), AttributeChanges(mode=0o600)),
        lambda: volume.write(number(volume, b"d", b"f"), 3, b"data"),
        lambda: volume.unlink(number(volume, b"d"), b"f"),
        lambda: volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved"),
    ):
        with pytest.raises(OSError, match="no space left"):
            change()
    assert shown(volume) == before
    assert not volume._overlay.recorded
    journal.file.limit = None
    for _ in steps(volume):
        assert shown(replayed_over(bytes(below), journal.batches())) == shown(volume)


def test_a_disk_that_fails_at_a_record_tears_nothing_and_has_the_state_when_it_works_again(below: Path) -> None:
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.keep(volume)
    for code, change in (
        (errno.EROFS, lambda: volume.setattr(number(volume, b"d", b"deep", b"file"), AttributeChanges(mode=0o600))),
        (errno.EIO, lambda: volume.write(number(volume, b"d", b"f"), 5, b"partly")),
        (errno.EROFS, lambda: volume.take_snapshot("s")),
        (errno.EIO, lambda: volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved")),
        (errno.EROFS, lambda: volume.unlink(ROOT_INODE, b"second")),
        (errno.EIO, lambda: volume.fallocate(number(volume, b"moved", b"f"), 3, 0, 30)),
        (errno.EROFS, lambda: volume.restore_snapshot("s", [b"d"])),
        (errno.EIO, volume.discard),
    ):
        before = shown(volume)
        journal.file.error = code
        for each in (change, lambda: volume.mkdir(ROOT_INODE, b"refused", 0o755, SUPERUSER)):
            with pytest.raises(OSError, match=os.strerror(code)):
                each()
        assert shown(replayed_over(bytes(below), journal.batches())) == before
        journal.file.error = 0
        journal.log.mend()
        assert shown(replayed_over(bytes(below), journal.batches())) == shown(volume)
        volume.check_invariants()


def test_a_hole_over_parts_of_two_blocks_needs_no_lower_layer_later(below: Path) -> None:
    (below / "large").write_bytes(os.urandom(266_241))
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.keep(volume)
    volume.fallocate(number(volume, b"large"), 3, 10_000, 131_072)
    replayed_over(AbsentLower(), journal.batches()).check_invariants()
    assert shown(replayed_over(bytes(below), journal.batches())) == shown(volume)


@pytest.mark.parametrize("change", ["unlink", "replace"])
def test_an_image_has_what_was_removed_so_a_replay_needs_no_lower_layer(below: Path, change: str) -> None:
    volume = OverlayVolume(bytes(below))
    directory = number(volume, b"d")
    if change == "unlink":
        volume.unlink(directory, b"f")
        volume.unlink(ROOT_INODE, b"second")
    else:
        volume.rename(ROOT_INODE, b"link", directory, b"f")
        volume.rename(number(volume, b"d", b"deep"), b"file", ROOT_INODE, b"second")
    journal = JournalInMemory()
    journal.keep(volume)
    replayed_over(AbsentLower(), journal.batches()).check_invariants()
    (below / "d" / "f").unlink()
    assert shown(replayed_over(bytes(below), journal.batches())) == shown(volume)


def test_an_import_whose_files_are_recorded_ahead_is_there_with_its_places_in_the_lower_layer(below: Path) -> None:
    volume = OverlayVolume(bytes(below))
    journal = JournalInMemory()
    journal.keep(volume)
    other = MemoryVolume()
    above = other.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER).inode  # is in the lower layer, and what follows is new
    new = other.mkdir(above, b"new", 0o755, SUPERUSER).inode
    for at in range(100):
        other.write(other.mknod(new, b"%d" % at, 0o100644, 0, SUPERUSER).inode, 0, b"%d" % at * 30)
    other.write(other.mknod(above, b"f", 0o100644, 0, SUPERUSER).inode, 0, b"another content")
    before = len(journal.batches())
    with other.tree() as tree, volume.tree():
        preparation = volume.preparation(tree, replace=False)
        for _ in preparation.steps():
            pass
        volume.import_prepared(preparation)
    batches = journal.batches()
    assert len(batches) == before + 1
    replayed_over(AbsentLower(), batches).check_invariants()
    assert shown(replayed_over(bytes(below), batches)) == shown(volume)
