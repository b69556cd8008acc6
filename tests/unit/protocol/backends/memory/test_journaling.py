"""The journal of a memory volume: what it refuses on a full disk, and what is hard to reach at random."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.tree import filled
from protocol.volume import RENAME_WHITEOUT, ROOT_INODE, SUPERUSER, AttributeChanges
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange
from tests.support.journals import JournalInMemory, assert_same_volume, facts, replayed
from tests.support.trees import DictTree

FILE = stat.S_IFREG | 0o644
BLOCK = 128 * 1024


def journal_of(volume: MemoryVolume, limit: int | None = None) -> JournalInMemory:
    journal = JournalInMemory(limit)
    journal.keep(volume)
    return journal


def file(volume: MemoryVolume, name: bytes, data: bytes = b"") -> int:
    number = volume.mknod(ROOT_INODE, name, FILE, 0, SUPERUSER).inode
    if data:
        volume.write(number, 0, data)
    return number


def assert_recorded(volume: MemoryVolume, journal: JournalInMemory) -> MemoryVolume:
    again = replayed(journal.batches())
    again.check_invariants()
    assert_same_volume(volume, again)
    return again


def size(journal: JournalInMemory) -> int:
    return journal.log.end


def test_a_small_write_costs_its_own_bytes_and_not_its_block(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    number = file(volume, b"f", bytes(range(256)) * 512)
    before = size(journal)
    volume.write(number, 1000, b"x" * 100)
    assert size(journal) - before < 400
    assert_recorded(volume, journal)


def test_a_change_of_an_extended_attribute_costs_its_own_bytes_and_not_those_of_all(volume: MemoryVolume) -> None:
    number = file(volume, b"f")
    volume.setxattr(number, b"user.old", b"1", 0)
    volume.setxattr(number, b"user.gone", b"2", 0)
    journal = journal_of(volume)  # begins with all attributes
    costs = []
    for each in range(300):
        before = size(journal)
        volume.setxattr(number, b"user.%03d" % each, b"value", 0)
        costs.append(size(journal) - before)
    assert len(set(costs)) == 1
    volume.setxattr(number, b"user.old", b"replaced", 0)
    for name in (b"user.gone", b"user.007"):
        volume.removexattr(number, name)
    again = assert_recorded(volume, journal)
    assert again.listxattr(number) == volume.listxattr(number)
    for name in again.listxattr(number):
        volume.removexattr(number, name)
    assert not assert_recorded(volume, journal).listxattr(number)


@pytest.mark.parametrize("seed", range(20))
def test_whenever_its_disk_fails_the_journal_has_every_answered_change_and_in_the_end_the_state(
    volume: MemoryVolume, seed: int
) -> None:
    journal, choice = journal_of(volume), random.Random(seed)
    answered: dict[bytes, bytes | None] = {}
    failed: set[bytes] = set()

    def write(name: bytes, data: bytes) -> None:
        number = file(volume, name) if volume.find(ROOT_INODE, name) is None else volume.lookup(ROOT_INODE, name).inode
        volume.setattr(number, AttributeChanges(size=0))
        volume.write(number, 0, data)

    def replace(name: bytes, data: bytes) -> None:
        with volume.changes():
            if volume.find(ROOT_INODE, name) is not None:
                volume.unlink(ROOT_INODE, name)
            write(name, data)

    for turn in range(60):
        journal.file.error = choice.choice((0, 0, 0, 0, errno.EROFS, errno.EIO))
        if not journal.file.error and choice.random() < 0.7:
            journal.log.mend()
        name, data = b"f%d" % choice.randrange(4), b"%d" % turn * choice.choice((1, 100_000))
        try:
            if choice.random() < 0.2:
                journal.log.sync()
            choice.choice((write, replace))(name, data)
        except OSError as error:
            assert error.errno in {errno.EROFS, errno.EIO}  # noqa: PT017 -- most calls succeed
            failed.add(name)
        else:
            answered[name] = data
            failed.discard(name)
        killed = replayed(journal.batches())
        for each, content in answered.items():
            if each not in failed:
                number = killed.lookup(ROOT_INODE, each).inode
                assert bytes(killed.read(number, 0, 1 << 20)) == content
    journal.file.error = 0
    journal.log.mend()
    assert_recorded(volume, journal)


def test_calls_whose_record_a_disk_did_not_take_are_named_for_the_kernels_caches(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    number = file(volume, b"f")
    journal.file.error = errno.EROFS
    for call in (lambda: volume.write(number, 0, b"x"), lambda: volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER)):
        with pytest.raises(OSError, match="Read-only file system"):
            call()
    assert volume.take_unrecorded() == CacheInvalidation([], [InodeChange(number, content=True)])
    journal.file.error = 0
    journal.log.mend()
    assert volume.take_unrecorded() == CacheInvalidation([], [])
    journal.file.error = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER)
    made = volume.lookup(ROOT_INODE, b"d").inode
    unrecorded = volume.take_unrecorded()
    assert unrecorded.entries == [EntryChange(ROOT_INODE, b"d", 0, made)]
    assert {change.inode for change in unrecorded.inodes} == {ROOT_INODE, made}


def test_a_note_about_the_next_change_is_recorded_with_it_or_not_at_all(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    volume.take_snapshot("one")
    file(volume, b"f")
    volume.note("state", b"with f")
    before = len(journal.batches())
    volume.note("state", b"without f", with_next=True)
    assert len(journal.batches()) == before
    volume.restore_snapshot("one")
    assert len(journal.batches()) == before + 1
    assert assert_recorded(volume, journal).notes == {"state": b"without f"}


def test_a_safety_snapshot_is_recorded_with_the_change_that_follows_or_not_at_all(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    file(volume, b"f")
    before = len(journal.batches())
    volume.take_snapshot("before", kind="safety")
    assert not replayed(journal.batches()).snapshots()
    with volume.changes():
        file(volume, b"g")
    assert len(journal.batches()) == before + 1
    assert [info.name for info in assert_recorded(volume, journal).snapshots()] == ["before"]


def test_a_restore_costs_no_content(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    number = file(volume, b"f", b"1" * (4 * BLOCK))
    volume.take_snapshot("s")
    volume.write(number, 0, b"2" * (4 * BLOCK))
    volume.unlink(ROOT_INODE, b"f")
    volume.forget(number, 1)
    before = size(journal)
    volume.restore_snapshot("s")
    assert size(journal) - before < 2000
    again = assert_recorded(volume, journal)
    assert again.lookup(ROOT_INODE, b"f").inode == number
    assert (again.usage().snapshot_bytes or 0) < BLOCK, "the snapshot and the live file share the content"


def test_a_whiteout_is_recorded(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    file(volume, b"a")
    file(volume, b"b")
    volume.rename(ROOT_INODE, b"a", ROOT_INODE, b"b", RENAME_WHITEOUT)
    again = assert_recorded(volume, journal)
    assert stat.S_ISCHR(again.lookup(ROOT_INODE, b"a").mode)


def test_times_beyond_the_range_of_nanoseconds_in_64_bits_are_recorded(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    number = file(volume, b"f")
    volume.setattr(number, AttributeChanges(mtime_ns=10**11 * 10**9 + 1, atime_ns=-5))
    again = assert_recorded(volume, journal)
    assert again.getattr(number).mtime_ns == 10**20 + 1
    assert again.getattr(number).atime_ns == -5


def test_changes_are_recorded_together_or_not_at_all(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    file(volume, b"kept", b"1")
    count = len(journal.batches())
    with volume.changes():
        file(volume, b"a", b"2")
        file(volume, b"b", b"3")
    assert len(journal.batches()) == count + 1
    with pytest.raises(FileExistsError), volume.changes():
        file(volume, b"a", file(volume, b"c", b"4").to_bytes(1, "big"))
    assert len(journal.batches()) == count + 1
    assert_recorded(volume, journal)


def test_an_inode_that_nobody_has_open_any_more_is_freed_by_a_replay(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    number = file(volume, b"f", b"x" * BLOCK)
    volume.unlink(ROOT_INODE, b"f")
    volume.write(number, BLOCK, b"still open")
    again = assert_recorded(volume, journal)
    assert again.read(number, BLOCK, 10) == b"still open"
    again.keep_journal(journal, is_new=False)
    again.connect(is_known=False)
    with pytest.raises(FileNotFoundError):
        again.getattr(number)
    assert again.usage().live_bytes == MemoryVolume().usage().live_bytes


def large_tree(count: int) -> MemoryVolume:
    """Return a volume with files of several blocks, small files, and holes."""
    other = MemoryVolume()
    for at in range(count):
        directory = other.mkdir(ROOT_INODE, b"d%d" % at, 0o755, SUPERUSER).inode
        number = other.mknod(directory, b"large", FILE, 0, SUPERUSER).inode
        other.write(number, 0, bytes([at + 1]) * (2 * BLOCK + 20_000))
        other.write(other.mknod(directory, b"small", FILE, 0, SUPERUSER).inode, 0, b"small")
        sparse = other.mknod(directory, b"sparse", FILE, 0, SUPERUSER).inode
        other.write(sparse, 3 * BLOCK + 9000, b"s" * 20_000)
    return other


def test_the_content_of_a_prepared_import_is_recorded_before_it_and_counts_only_with_it(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    directory = volume.mkdir(ROOT_INODE, b"d0", 0o755, SUPERUSER).inode
    volume.write(volume.mknod(directory, b"large", FILE, 0, SUPERUSER).inode, 0, b"older" * BLOCK)
    file(volume, b"kept", b"here")
    before = len(journal.batches())
    with large_tree(3).tree() as tree:
        preparation = volume.preparation(tree, replace=False)
        for step, _ in enumerate(preparation.steps()):
            file(volume, b"meanwhile %d" % step, b"!")
            if step % 5 == 0:
                assert_recorded(replayed(journal.batches()), journal)
        prepared = size(journal)
        assert prepared > 6 * BLOCK
        volume.import_prepared(preparation)
    assert size(journal) - prepared < 3 * BLOCK, "the three sparse blocks, and references to the others"
    assert_recorded(volume, journal)
    batches = journal.batches()
    for end in range(before, len(batches)):
        again = replayed(batches[:end])
        again.check_invariants()
        assert b"d1" not in again.getattr(ROOT_INODE).children  # type: ignore[operator]


def many_files() -> MemoryVolume:
    """Return a volume with 400 small files in nested directories, and one with a second name."""
    other = MemoryVolume()
    for at in range(20):
        above = other.mkdir(ROOT_INODE, b"d%d" % at, 0o755, SUPERUSER).inode
        below = other.mkdir(above, b"below", 0o700, SUPERUSER).inode
        for each in range(20):
            number = other.mknod(below, b"f%d" % each, FILE, 0, SUPERUSER).inode
            other.write(number, 0, b"x" * 500)
            other.setxattr(number, b"user.note", b"value", 0)
    other.symlink(ROOT_INODE, b"link", b"d0/below", SUPERUSER)
    other.link(other.lookup(below, b"f0").inode, ROOT_INODE, b"second name")
    return other


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_the_inodes_of_a_prepared_import_are_recorded_before_it(volume: MemoryVolume, is_taken_over: bool) -> None:
    journal = journal_of(volume)
    volume.mkdir(ROOT_INODE, b"d3", 0o755, SUPERUSER)
    other = many_files()
    stage = volume.new_stage()
    with other.tree() as tree:
        if is_taken_over:
            other.unlink(ROOT_INODE, b"second name")
            with other.tree() as without_links:
                stage.fill(without_links, volume.reserve_inodes(1000))
        else:
            stage.fill(tree, volume.reserve_inodes(1000))
    with stage.tree() as tree, volume.tree():
        preparation = volume.preparation(tree, replace=False)
        for step, _ in enumerate(preparation.steps()):
            if step % 50 == 0:
                file(volume, b"meanwhile %d" % step, b"!")
        before = len(journal.batches())
        prepared = size(journal)
        volume.import_prepared(preparation)
    assert size(journal) - prepared < 20_000, "references, and the directories that were there"
    assert len(journal.batches()) == before + 1
    assert_recorded(volume, journal)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_import_is_complete_if_another_transaction_is_recorded_before_it(
    volume: MemoryVolume, is_late: bool
) -> None:
    journal = journal_of(volume)

    def change() -> None:
        with volume.changes():
            file(volume, b"other", b"transaction")
        names = replayed(journal.batches()).getattr(ROOT_INODE).children
        assert names is not None
        assert names.keys() == {b"other"}

    with many_files().tree() as tree:
        preparation = volume.preparation(tree, replace=False)
        before, is_changed = size(journal), False
        for _ in preparation.steps():
            if not (is_late or is_changed) and size(journal) > before + 50_000:
                change()
                is_changed = True
        if is_late:
            change()
        volume.import_prepared(preparation)
    assert is_late or is_changed
    assert_recorded(volume, journal)


def test_a_prepared_import_that_is_discarded_leaves_nothing_for_later_changes(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    for attempt in range(2):
        with large_tree(2).tree() as tree:
            preparation = volume.preparation(tree, replace=False)
            for _ in preparation.steps():
                pass
            if attempt == 0:
                for _ in preparation.discard():
                    pass
                with volume.changes():
                    file(volume, b"other", b"\1" * BLOCK)
                assert_recorded(volume, journal)
            else:
                volume.import_prepared(preparation)
    assert_recorded(volume, journal)


def test_content_that_was_recorded_ahead_of_a_write_is_not_recorded_again(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    data = os.urandom(5 * BLOCK + 40_000)
    for _ in volume.store_content(data):
        file(volume, b"%d" % size(journal))
    before = size(journal)
    with volume.changes():
        file(volume, b"f", data)
        file(volume, b"same start", data[:BLOCK])
        file(volume, b"another", data[1:])
    assert size(journal) - before < len(data) + BLOCK + 20_000
    assert_recorded(volume, journal)
    with volume.changes():
        file(volume, b"later", data)
    assert_recorded(volume, journal)


def test_content_of_an_import_that_does_not_fit_on_the_disk_changes_nothing(volume: MemoryVolume) -> None:
    journal = journal_of(volume, limit=2 << 20)
    with large_tree(10).tree() as tree:
        preparation = volume.preparation(tree, replace=False)
        with pytest.raises(OSError, match="no space left for the journal"):
            for _ in preparation.steps():
                pass
        for _ in preparation.discard():
            pass
    assert not volume.getattr(ROOT_INODE).children  # type: ignore[attr-defined]
    volume.check_invariants()
    assert_recorded(volume, journal)


def test_removed_content_does_not_wait_for_the_end_of_a_replay(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    for at in range(3):
        number = file(volume, b"f%d" % at, b"x" * BLOCK)
        volume.unlink(ROOT_INODE, b"f%d" % at)
        volume.forget(number, 1)
    file(volume, b"end")
    sizes = []
    again = MemoryVolume()

    def observed() -> object:
        for batch in journal.batches():
            yield batch
            sizes.append(again.usage().used_bytes)

    again.replay(observed())  # type: ignore[arg-type]
    assert max(sizes) < 2 * BLOCK + 8192


def test_numbers_of_inodes_are_not_used_again_after_an_image(volume: MemoryVolume) -> None:
    number = file(volume, b"f")
    volume.unlink(ROOT_INODE, b"f")
    volume.forget(number, 1)
    journal = journal_of(volume)
    assert file(assert_recorded(volume, journal), b"g") == number + 1


def test_an_image_keeps_what_snapshots_share(volume: MemoryVolume) -> None:
    number = file(volume, b"f", os.urandom(2 * BLOCK))
    for at in range(5):
        volume.take_snapshot(f"s{at}")
        volume.write(number, 0, b"%d" % at * 100)
    volume.restore_snapshot("s0")
    journal = journal_of(volume)
    assert size(journal) < 8 * BLOCK
    assert_recorded(volume, journal)


# -- a full disk -----------------------------------------------------------------------------------
def fill(volume: MemoryVolume) -> None:
    """Fill the journal with large records, then with small ones."""
    assert _until_refused(lambda at: file(volume, b"filler%d" % at, b"x" * 10_000)) == errno.ENOSPC
    assert _until_refused(lambda at: volume.setattr(ROOT_INODE, AttributeChanges(mtime_ns=at))) == errno.ENOSPC


def _until_refused(change: Callable[[int], object]) -> int | None:
    for at in range(100_000):
        try:
            change(at)
        except OSError as error:
            return error.errno
    return None


CHANGES: dict[str, Callable[[MemoryVolume, int], object]] = {
    "mknod": lambda volume, _: file(volume, b"new"),
    "mkdir": lambda volume, _: volume.mkdir(ROOT_INODE, b"new", 0o755, SUPERUSER),
    "symlink": lambda volume, _: volume.symlink(ROOT_INODE, b"new", b"to", SUPERUSER),
    "tmpfile": lambda volume, _: volume.tmpfile(ROOT_INODE, 0o600, SUPERUSER),
    "link": lambda volume, number: volume.link(number, ROOT_INODE, b"new"),
    "rename": lambda volume, _: volume.rename(ROOT_INODE, b"f", ROOT_INODE, b"new"),
    "write": lambda volume, number: volume.write(number, 5, b"data" * 100),
    "setattr": lambda volume, number: volume.setattr(number, AttributeChanges(mode=0o600)),
    "setxattr": lambda volume, number: volume.setxattr(number, b"user.x", b"y", 0),
    "fallocate": lambda volume, number: volume.fallocate(number, 0, 0, 100_000),
    "take_snapshot": lambda volume, _: volume.take_snapshot("new"),
    "note": lambda volume, _: volume.note("new", b"value"),
    "import_tree": lambda volume, _: volume.import_tree(big_tree(), replace=False),
}


def big_tree() -> DictTree:
    tree = DictTree()
    with MemoryVolume().tree() as empty:
        tree.by_path.update({entry.path: entry for entry in empty.walk()})
    other = MemoryVolume()
    for at in range(40):
        file(other, b"imported%d" % at, os.urandom(BLOCK))
    with other.tree() as source:
        for entry in source.walk():
            tree.by_path[entry.path] = entry
            if entry.is_file:
                tree.content[entry.path] = b"".join(filled(source.chunks(entry.path)))
    return tree


@pytest.mark.parametrize("name", CHANGES)
def test_a_full_disk_refuses_a_change_and_changes_nothing(name: str) -> None:
    volume = MemoryVolume()
    journal = journal_of(volume, limit=2 << 20)
    number = file(volume, b"f", b"content")
    volume.take_snapshot("s")
    fill(volume)
    before = {number: facts(inode) for number, inode in volume._state.inodes.items()}
    infos = list(volume.snapshots())
    with pytest.raises(OSError, match="no space left for the journal"):
        CHANGES[name](volume, number)
    assert {number: facts(inode) for number, inode in volume._state.inodes.items()} == before
    assert list(volume.snapshots()) == infos
    volume.check_invariants()
    assert_recorded(volume, journal)
    # With room again, it works.
    journal.file.limit = None
    CHANGES[name](volume, number)
    assert_recorded(volume, journal)


def test_removing_works_on_a_full_disk(volume: MemoryVolume) -> None:
    journal = journal_of(volume, limit=2 << 20)
    number = file(volume, b"f", b"content")
    volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER)
    volume.take_snapshot("s")
    fill(volume)
    volume.setattr(number, AttributeChanges(size=2))
    volume.unlink(ROOT_INODE, b"f")
    volume.rmdir(ROOT_INODE, b"d")
    volume.drop_snapshot("s")
    for at in range(50):
        volume.unlink(ROOT_INODE, b"filler%d" % at)
    assert_recorded(volume, journal)


def test_after_its_end_a_journal_records_nothing(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    assert volume.capabilities.durable
    file(volume, b"before")
    volume.end_journal()
    end = size(journal)
    file(volume, b"after")
    volume.take_snapshot("s")
    assert size(journal) == end
    assert not volume.capabilities.durable


def test_a_forked_process_writes_nothing_to_the_journal(volume: MemoryVolume) -> None:
    journal = journal_of(volume)
    file(volume, b"before")
    end = size(journal)
    with volume.forking():
        pass
    volume.forked()
    file(volume, b"after")
    volume.take_snapshot("s")
    volume.restore_snapshot("s")
    assert size(journal) == end
    assert not volume.capabilities.durable


def test_an_image_that_could_not_be_replayed_is_not_written() -> None:
    volume = MemoryVolume()
    volume.take_snapshot("one")
    volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER)
    newest = volume._state.log.newest
    assert newest is not None
    newest.names[ROOT_INODE][b"ghost"] = 77  # as a defect of the undo log would leave it
    with pytest.raises(OSError, match="entry of inode 1 to 77") as caught:
        JournalInMemory().keep(volume)
    assert caught.value.errno == errno.EBADMSG
