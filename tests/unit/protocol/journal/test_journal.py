"""The journal as a library: what was appended is read back, and nothing that was synced is lost or invented."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.journal.directory import Journal, JournalFiles, drop_journal, has_journal, is_locked, read_journal
from protocol.journal.log import Batch, FsyncPolicy, Log
from protocol.journal.records import (
    FORMAT_VERSION,
    Extent,
    FileHeader,
    JournalDamagedError,
    Kind,
    read_header,
    read_records,
    verify,
)
from tests.support.journals import FileInMemory, JournalInMemory
from tests.unit.protocol.journal.power import UnreliableFile

IDENTITY = {"kind": "memory", "name": "w"}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def append(journal: Journal, *payloads: bytes) -> None:
    for payload in payloads:
        journal.log.require(len(payload))
        journal.log.append([payload[:3], payload[3:]])


def read(directory: str) -> list[bytes]:
    return [b"".join(batch) for batch in JournalFiles(directory).batches()]


def written(directory: str, payloads: list[bytes], *, clean: bool = False, policy: FsyncPolicy = "no") -> Path:
    """Write a journal; return its log.  Unless `clean`, it is left as a killed daemon leaves it."""
    journal = Journal.create(directory, IDENTITY, policy)
    append(journal, *payloads)
    if clean:
        journal.close()
    else:
        journal.detach()
    return Path(directory, "log-00000001")


PAYLOADS = [b"a" * 5, b"", b"second record", bytes(range(1, 256)) * 4, b"last"]


def test_parts_count_only_with_their_commit(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    append(journal, b"one")
    journal.log.require(20)
    journal.log.append([b"half "], Kind.PART)
    journal.log.append([b"done"])
    journal.log.require(20)
    journal.log.append([b"never"], Kind.PART)
    journal.detach()
    assert list(JournalFiles(directory).batches()) == [[b"one"], [b"half ", b"done"]]
    assert read_journal(directory).report().cut_bytes > 0
    _, journal = Journal.resume(directory, "no")
    append(journal, b"after")
    journal.close()
    assert read(directory) == [b"one", b"half done", b"after"]


def test_records_of_any_size_are_read_in_order(directory: str) -> None:
    payloads = [b"small", b"l" * (9 << 20), *(b"%d" % at * 300 for at in range(9000)), b"m" * (4 << 20), b"end"]
    log = written(directory, payloads)
    assert log.stat().st_size > 20 << 20
    assert read(directory) == payloads


def test_a_batch_without_its_commit_is_left_out_of_the_records_that_are_read_after_it_was_cut(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    append(journal, b"one", b"two")
    journal.log.require(20)
    journal.log.append([b"never"], Kind.PART)
    journal.detach()
    files, journal = Journal.resume(directory, "no")
    append(journal, b"three")
    assert list(files.batches()) == [[b"one"], [b"two"]]
    journal.close()


def test_what_changes_after_it_was_verified_is_noticed(directory: str) -> None:
    log = written(directory, PAYLOADS)
    files = JournalFiles(directory)
    content = bytearray(log.read_bytes())
    content[record_ends(log)[1] + 35] ^= 1
    log.write_bytes(content)
    with pytest.raises(JournalDamagedError):
        list(files.batches())


def test_a_log_that_ends_at_any_byte_has_the_records_before(directory: str) -> None:
    log = written(directory, PAYLOADS)
    content = log.read_bytes().rstrip(b"\0")
    ends = record_ends(log)
    for length in range(ends[0], len(content) + 1):
        log.write_bytes(content[:length])
        complete = sum(end <= (length + 7 & ~7) for end in ends[1:])
        # Zeros after a payload may be missing; the payload itself may not end with some.
        found = read(directory)
        assert found == PAYLOADS[: len(found)]
        assert complete - 1 <= len(found) <= complete, length


def record_ends(log: Path) -> list[int]:
    with log.open("rb") as file:
        header = read_header(file, str(log))
        start = file.tell()
        return [start, *(record.end for record in read_records(file, header, start))]


@pytest.mark.parametrize("clean", [False, True])
def test_a_flipped_bit_is_noticed_anywhere(directory: str, clean: bool) -> None:
    log = written(directory, PAYLOADS, clean=clean)
    content = log.read_bytes() if clean else log.read_bytes().rstrip(b"\0")
    choice = random.Random(1)
    for at in [*range(300), *(choice.randrange(len(content)) for _ in range(100))]:
        changed = bytearray(content)
        changed[at] ^= 1 << choice.randrange(8)
        log.write_bytes(changed)
        try:
            files = JournalFiles(directory)
        except (JournalDamagedError, OSError):
            continue
        found = [b"".join(batch) for batch in files.batches()]
        assert found == PAYLOADS[: len(found)]
        if found != PAYLOADS:
            assert files.report().cut_bytes > 0
            # Only a flip in the mark itself can hide that all was synced, and that one costs no record.
            assert not clean, f"byte {at}: a record that was synced was cut off"


def test_damage_before_a_synced_record_stops_the_resume_and_changes_nothing(directory: str) -> None:
    log = written(directory, PAYLOADS, policy="always")
    content = bytearray(log.read_bytes())
    content[record_ends(log)[2] + 40] ^= 1
    log.write_bytes(content)
    with pytest.raises(JournalDamagedError) as raised:
        Journal.resume(directory, "no")
    assert "vfsd persisted check" in str(raised.value)
    assert log.read_bytes() == bytes(content)
    assert not is_locked(directory)


def test_a_later_format_is_refused(directory: str) -> None:
    log = written(directory, PAYLOADS)
    header = FileHeader(FORMAT_VERSION + 1, "log", "x", dict(IDENTITY), 1, 1, 7)
    log.write_bytes(header.encoded())
    with pytest.raises(OSError, match="newer vfsd"):
        read_journal(directory)


# -- a full disk -----------------------------------------------------------------------------------
_FILL = """
import errno, resource, sys
from protocol.journal.directory import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
journal = Journal.create(sys.argv[1], {"kind": "memory"}, "no")
count = 0
try:
    while True:
        journal.log.require(1000)
        journal.log.append([count.to_bytes(8, "little"), bytes(992)])
        count += 1
except OSError as error:
    assert error.errno == errno.ENOSPC, error
removals = 0
for _ in range(10):
    journal.log.require(8, removes=True)
    journal.log.append([b"removed!"])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(count)
journal.close()
"""


def test_a_full_disk_refuses_before_anything_is_written_and_leaves_room_for_removals(directory: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FILL, directory], capture_output=True, text=True, check=True, timeout=60
    )
    count = int(done.stdout)
    assert count > 500
    found = read(directory)
    assert found[:count] == [number.to_bytes(8, "little") + bytes(992) for number in range(count)]
    assert found[count:] == [b"removed!"] * 10
    assert read_journal(directory).report().is_clean


def test_a_journal_that_ends_on_a_full_disk_says_that_its_end_is_clean() -> None:
    journal = JournalInMemory(limit=1 << 20)
    with contextlib.suppress(OSError):
        while True:
            journal.log.require(8, removes=True)
            journal.log.append([b"removed!"])
    assert journal.log.end > 1 << 19
    journal.close()
    file = io.BytesIO(journal.file.content)
    extent = verify(file, read_header(file, "log"), "log")
    assert extent.is_closed
    assert not extent.cut_bytes


@pytest.mark.parametrize("overwrites_in_place", [True, False])
def test_what_follows_the_last_record_is_zeros_until_a_clean_end(
    overwrites_in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileInMemory, "overwrites_in_place", lambda _: overwrites_in_place)
    journal = JournalInMemory()
    choice = random.Random(1)
    payloads = [b"x" * choice.choice((1, 500, 5_000, 20_000, 200_000)) for _ in range(300)]
    for payload in payloads:
        journal.log.require(len(payload))
        journal.log.append([payload])
        rest = journal.file.content[journal.log.end :]
        assert rest == bytes(len(rest))
        assert overwrites_in_place or not rest, "space that was allocated is written once only"
    assert journal.batches() == [[payload] for payload in payloads]
    journal.close()
    assert len(journal.file.content) == journal.log.end


# -- power failures and failed syncs ----------------------------------------------------------------
HEADER = FileHeader(FORMAT_VERSION, "log", "j", dict(IDENTITY), 1, 1, 0xFEEDBEEF)


def unreliable(policy: FsyncPolicy = "no") -> tuple[UnreliableFile, Log]:
    encoded = HEADER.encoded()
    file = UnreliableFile(encoded)
    return file, Log(file, HEADER, Extent(len(encoded), 1, False, 0), policy)


@given(
    steps=st.lists(st.one_of(st.just("sync"), st.binary(max_size=3000)), max_size=12),
    policy=st.sampled_from(("no", "always")),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=settings().max_examples * 2)
def test_after_a_power_failure_everything_synced_is_there(
    steps: list[str | bytes], policy: FsyncPolicy, seed: int
) -> None:
    file, log = unreliable(policy)
    appended: list[bytes] = []
    synced = 0
    for step in steps:
        if isinstance(step, str):
            log.sync()
            synced = len(appended)
        else:
            log.require(len(step))
            log.append([step])
            appended.append(step)
            if policy == "always":
                synced = len(appended)
    content = io.BytesIO(file.after_power_failure(random.Random(seed)))
    header = read_header(content, "log")
    start = content.tell()
    extent = verify(content, header, "log")
    found = [record.payload for record in read_records(content, header, start, extent.end)]
    assert found == appended[: len(found)]
    assert len(found) >= synced


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_after_a_failed_sync_records_are_accepted_when_those_before_are_written_again(keeps_pages: bool) -> None:
    file, log = unreliable()
    log.require(4)
    log.append([b"data"])
    file.fails = True
    with pytest.raises(OSError, match="Input/output error"):
        log.sync()
    for call in (log.sync, lambda: log.require(1)):
        with pytest.raises(OSError, match="no change is accepted") as raised:
            call()
        assert raised.value.errno == errno.EIO
    file.fails = False
    if not keeps_pages:  # a second fsync(2) would succeed without them
        file.present = bytearray(file.synced)
        with pytest.raises(OSError, match="cannot be read any more"):
            log.mend()
        with pytest.raises(OSError, match="no change is accepted"):
            log.require(1)
        return
    log.mend()
    log.require(4)
    log.append([b"more"])
    log.sync()
    assert payloads(bytes(file.synced)) == [b"data", b"more"]


def payloads(content: bytes) -> list[bytes]:
    file = io.BytesIO(content)
    header = read_header(file, "log")
    start = file.tell()
    extent = verify(file, header, "log")
    return [record.payload for record in read_records(file, header, start, extent.end)]


def test_a_record_that_a_read_only_disk_tears_is_written_when_the_disk_works_again() -> None:
    file, log = unreliable()
    for data in (b"first", b"second"):
        log.require(len(data))
        log.append([data])
    file.is_read_only = True
    log.require(100)
    for attempt in (lambda: log.append([b"x" * 100]), lambda: log.require(1), log.mend):
        with pytest.raises(OSError, match="Read-only file system") as raised:
            attempt()
        assert raised.value.errno == errno.EROFS
    assert payloads(bytes(file.present)) == [b"first", b"second"]
    file.is_read_only = False
    log.mend()
    assert payloads(bytes(file.synced)) == [b"first", b"second", b"x" * 100]


def test_a_batch_that_a_read_only_disk_tears_never_counts() -> None:
    file, log = unreliable()
    batch = Batch(log)
    batch.add([b"part" * 300_000])
    file.is_read_only = True
    batch.add([b"rest"])
    with pytest.raises(OSError, match="Read-only file system"):
        batch.end()
    batch.abort()
    file.is_read_only = False
    log.mend()
    log.require(4)
    log.append([b"next"])
    log.sync()
    content = io.BytesIO(bytes(file.synced))
    header = read_header(content, "log")
    kinds = [record.kind for record in read_records(content, header, content.tell(), log.end)]
    assert kinds == [Kind.PART, Kind.ABORT, Kind.COMMIT]


def test_everysec_syncs_in_a_thread(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "everysec")
    append(journal, b"data")
    while journal.log.synced < journal.log.end:
        time.sleep(0.05)
    journal.close()


# -- the directory -----------------------------------------------------------------------------------
def test_two_daemons_cannot_use_one_journal(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    assert is_locked(directory)
    for attempt in (lambda: Journal.resume(directory, "no"), lambda: drop_journal(directory)):
        with pytest.raises(BlockingIOError, match="another daemon"):
            attempt()
    journal.close()
    assert not is_locked(directory)


def test_a_journal_needs_a_private_directory_without_other_files(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError):
        Journal.create(str(shared), IDENTITY, "no")
    used = tmp_path / "used"
    used.mkdir(0o700)
    (used / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="other files"):
        Journal.create(str(used), IDENTITY, "no")
    with pytest.raises(FileNotFoundError):
        drop_journal(str(used))
    with pytest.raises(FileNotFoundError):
        read_journal(str(used))
    assert [path.name for path in used.iterdir()] == ["notes.txt"]


def test_drop_removes_the_journal_and_its_directory(directory: str) -> None:
    written(directory, PAYLOADS)
    assert has_journal(directory)
    drop_journal(directory)
    assert not Path(directory).exists()
    assert not has_journal(directory)


# -- rotation and images -----------------------------------------------------------------------------
def test_an_image_replaces_the_logs_before_it(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    append(journal, b"old", b"older")
    number = journal.rotate()
    append(journal, b"new")
    assert read(directory) == [b"old", b"older", b"new"]
    image = journal.image_log(number)
    image.require(5)
    image.append([b"image"])
    assert read(directory) == [b"old", b"older", b"new"], "an image counts when it is complete"
    image.close()
    journal.finish_image(number)
    assert read(directory) == [b"image", b"new"]
    append(journal, b"newer")
    journal.detach()
    assert read(directory) == [b"image", b"new", b"newer"]
    assert sorted(os.listdir(directory)) == ["image-00000002", "lock", "log-00000002"]


def test_an_image_that_was_not_completed_does_not_count(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    append(journal, b"old")
    number = journal.rotate()
    journal.image_log(number).detach()
    journal.abandon_image(number)
    append(journal, b"new")
    journal.image_log(journal.rotate()).detach()  # and one that a killed daemon leaves
    append(journal, b"newer")
    journal.detach()
    assert "image-00000003.new" in os.listdir(directory)
    files, journal = Journal.resume(directory, "no")
    assert [b"".join(batch) for batch in files.batches()] == [b"old", b"new", b"newer"]
    assert not [name for name in os.listdir(directory) if name.endswith(".new")]
    journal.close()


def test_a_missing_or_short_log_is_noticed(directory: str) -> None:
    journal = Journal.create(directory, IDENTITY, "no")
    append(journal, b"one")
    journal.rotate()
    append(journal, b"two")
    journal.rotate()
    journal.close()
    assert read(directory) == [b"one", b"two"]
    log = Path(directory, "log-00000002")
    content = log.read_bytes()
    log.write_bytes(content[:-32])  # without its mark
    with pytest.raises(JournalDamagedError):
        read(directory)
    log.unlink()
    with pytest.raises(JournalDamagedError, match="missing"):
        read(directory)


def test_content_in_a_payload_cannot_pass_for_a_record(directory: str) -> None:
    log = written(directory, PAYLOADS, policy="always")
    ends = record_ends(log)
    forged = log.read_bytes()[ends[0] : ends[-1]]  # records of another journal
    other = directory + "2"
    journal = Journal.create(other, IDENTITY, "no")
    append(journal, b"one", forged)
    journal.detach()
    path = Path(other, "log-00000001")
    content = bytearray(path.read_bytes())
    content[record_ends(path)[1] + 20] ^= 1  # the record with the forged ones is torn
    path.write_bytes(content)
    assert read(other) == [b"one"]
