"""What a volume in memory does at its limit, and how large the limit is by default."""

from __future__ import annotations

import errno
import gc
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.volume import AttributeChanges, Caller
from protocol.volume_extensions import SnapshotInfo
from vfsd.machine.resources import available_memory, free_memory

CALLER = Caller(0, 0)
MIB = 1 << 20
BLOCK = 128 * 1024
MakeVolume = Callable[[int], MemoryVolume]


@pytest.fixture(params=["memory", "overlay"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> MakeVolume:
    """Makes a volume with a `max_memory`."""

    def make(limit: int) -> MemoryVolume:
        if request.param == "overlay":
            return OverlayVolume(str(tmp_path), limit, max_memory=limit)
        return MemoryVolume(limit, max_memory=limit)

    return make


def file(volume: MemoryVolume, name: bytes, content: bytes = b"") -> int:
    inode = volume.mknod(1, name, 0o100644, 0, CALLER).inode
    volume.forget(inode, 1)
    for offset in range(0, len(content), BLOCK):
        volume.write(inode, offset, content[offset : offset + BLOCK])
    return inode


def fill(volume: MemoryVolume) -> None:
    """Make files until not even an empty one fits."""
    number = 0
    size = MIB
    while True:
        try:
            file(volume, b"fill%d" % number, os.urandom(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if not size:
                return
            size = size // 2 if size > BLOCK else 0
        number += 1


def names(volume: MemoryVolume) -> list[str]:
    return [info.name for info in volume.snapshots()]


def memory_of(volume: MemoryVolume) -> int:
    usage = volume.usage()
    return (usage.live_bytes or 0) + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)


def test_a_byte_at_the_end_of_a_block_takes_a_page_and_not_the_block() -> None:
    volume = MemoryVolume(max_memory=64 * MIB)
    inode = file(volume, b"sparse")
    for number in range(100):
        volume.write(inode, number * BLOCK + BLOCK - 1, b"x")
    assert volume.usage().live_bytes < 100 * 5000 + 10_000
    assert volume.read(inode, 0, 2 * BLOCK) == (bytes(BLOCK - 1) + b"x") * 2
    volume.check_invariants()


def test_a_hole_punched_into_a_block_gives_its_memory_back() -> None:
    volume = MemoryVolume(max_memory=64 * MIB)
    inode = file(volume, b"f", os.urandom(BLOCK))
    volume.fallocate(inode, 3, 4096, BLOCK - 8192)
    assert volume.usage().live_bytes < 20_000
    volume.check_invariants()


def test_automatic_snapshots_go_first_and_oldest_first_and_named_ones_stay(volume: MakeVolume) -> None:
    limited = volume(8 * MIB)
    dropped: list[SnapshotInfo] = []
    limited.on_pruned = dropped.append
    inode = file(limited, b"f", os.urandom(MIB))
    limited.take_snapshot("named")
    for number in range(20):
        limited.write(inode, 0, os.urandom(BLOCK))
        limited.write(inode, BLOCK, os.urandom(4 * BLOCK))
        limited.take_snapshot(f"exec-{number}", kind="automatic")
    assert [info.name for info in dropped] == [f"exec-{number}" for number in range(len(dropped))]
    assert dropped
    assert limited.usage().pruned == len(dropped)
    assert names(limited) == ["named", *(f"exec-{number}" for number in range(len(dropped), 20))]
    limited.check_invariants()


def test_no_automatic_snapshot_is_dropped_while_a_state_is_read_because_that_frees_nothing(volume: MakeVolume) -> None:
    limited = volume(8 * MIB)
    inode = file(limited, b"f", os.urandom(3 * MIB))
    limited.take_snapshot("exec-1", kind="automatic")
    file(limited, b"g", os.urandom(MIB))
    limited.take_snapshot("exec-2", kind="automatic")
    limited.write(inode, 0, os.urandom(2 * MIB))
    with limited.tree("exec-1") as tree:
        before = tree.read(b"f", 0, BLOCK)
        with pytest.raises(OSError, match="No space left"):
            file(limited, b"h", os.urandom(4 * MIB))
        assert names(limited) == ["exec-1", "exec-2"]
        assert tree.read(b"f", 0, BLOCK) == before
    file(limited, b"i", os.urandom(MIB))
    assert names(limited) != ["exec-1", "exec-2"]
    limited.check_invariants()


def test_changes_under_a_snapshot_fail_at_the_limit_and_removing_does_not(volume: MakeVolume) -> None:
    limited = volume(4 * MIB)
    kept = [file(limited, b"kept%d" % number, os.urandom(1000)) for number in range(300)]
    limited.take_snapshot("named")
    fill(limited)
    for change in (
        lambda: [limited.setattr(inode, AttributeChanges(mode=0o600)) for inode in kept],
        lambda: limited.setxattr(kept[0], b"user.x", bytes(60_000), 0),
        lambda: limited.write(kept[1], 0, bytes(BLOCK)),
        lambda: limited.mkdir(1, b"d", 0o755, CALLER),
        lambda: [limited.rename(1, b"kept%d" % number, 1, b"%0255d" % number) for number in range(300)],
    ):
        with pytest.raises(OSError, match="No space left"):
            change()
    with pytest.raises(OSError, match="No memory left for a snapshot"):
        limited.take_snapshot("another")
    limited.take_snapshot("safety-1", kind="safety")
    limited.setattr(kept[2], AttributeChanges(size=10))
    for name in [entry.name for entry in limited.readdir(1, 0)]:
        if name not in (b".", b".."):
            limited.unlink(1, name)
    limited.restore_snapshot("named")
    assert limited.lookup(1, b"kept299").size == 1000
    limited.check_invariants()
    for name in names(limited):
        limited.drop_snapshot(name)
    limited.check_invariants()
    assert limited.usage().snapshot_bytes < 1 * MIB


def test_what_only_snapshots_hold_is_freed_with_the_last_of_them(volume: MakeVolume) -> None:
    limited = volume(64 * MIB)
    inode = file(limited, b"f", os.urandom(4 * MIB))
    before = limited.usage().snapshot_bytes
    limited.take_snapshot("a")
    limited.take_snapshot("b")
    limited.setattr(inode, AttributeChanges(size=0))
    assert limited.usage().snapshot_bytes - before > 4 * MIB
    limited.drop_snapshot("a")
    assert limited.usage().snapshot_bytes - before > 4 * MIB
    limited.drop_snapshot("b")
    assert limited.usage().snapshot_bytes - before < 10_000
    limited.check_invariants()


def test_a_restored_file_is_not_charged_twice() -> None:
    volume = MemoryVolume(max_memory=64 * MIB)
    inode = file(volume, b"f", os.urandom(8 * MIB))
    volume.take_snapshot("a")
    volume.unlink(1, b"f")
    volume.restore_snapshot("a")
    assert memory_of(volume) < 8.6 * MIB
    volume.unlink(1, b"f")
    volume.restore_snapshot("a", [b"f"])
    assert memory_of(volume) < 8.6 * MIB
    assert volume.getattr(inode).size == 8 * MIB
    volume.check_invariants()


def test_a_tag_has_a_largest_length(volume: MakeVolume) -> None:
    limited = volume(8 * MIB)
    limited.take_snapshot("a", tag="x" * 1024)
    with pytest.raises(OSError, match="longer than 1,024 bytes") as refused:
        limited.take_snapshot("b", tag="é" * 513)
    assert refused.value.errno == errno.ENAMETOOLONG
    assert names(limited) == ["a"]


def test_an_import_borrows_what_it_unpacks_and_gives_it_back() -> None:
    volume = MemoryVolume(16 * MIB, max_memory=16 * MIB)
    staged = volume.new_stage()
    file(staged, b"large", os.urandom(10 * MIB))
    assert volume.usage().overhead_bytes > 10 * MIB
    with pytest.raises(OSError, match="No space left"):
        file(volume, b"mine", os.urandom(8 * MIB))
    volume.unlink(1, b"mine")
    with staged.tree() as tree:
        volume.import_tree(tree, replace=True)
    staged.give_back()
    assert volume.lookup(1, b"large").size == 10 * MIB
    assert volume.usage().overhead_bytes < MIB
    volume.check_invariants()


def test_what_an_import_unpacked_is_charged_while_it_is_prepared() -> None:
    volume = MemoryVolume(24 * MIB, max_memory=24 * MIB)
    file(volume, b"mine", b"x")
    staged = volume.new_stage()
    for number in range(10):
        file(staged, b"large%d" % number, os.urandom(MIB))
    with staged.tree() as tree, volume.tree():
        preparation = volume.preparation(tree, replace=True)
        for _ in preparation.steps():
            assert 10 * MIB < memory_of(volume) < 13 * MIB
        assert preparation.is_valid
        volume.import_prepared(preparation)
    staged.give_back()
    assert volume.lookup(1, b"large9").size == MIB
    assert memory_of(volume) < 11 * MIB
    volume.check_invariants()


def test_an_overlay_charges_what_it_remembers_of_below(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"name{number}").touch()
    volume = OverlayVolume(str(tmp_path), max_memory=64 * MIB)
    before = volume.usage().overhead_bytes
    assert len(list(volume.readdir(1, 0))) == 502
    listed = volume.usage().overhead_bytes
    assert listed - before > 500 * 500
    for number in range(500):
        volume.lookup(1, b"name%d" % number)
    assert volume.usage().overhead_bytes - listed > 500 * 500
    volume.check_invariants()


# -- the default ---------------------------------------------------------------------------------------


def machine(root: Path, membership: str, limits: dict[str, str]) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for place, limit in limits.items():
        path = root / "sys/fs/cgroup" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit)
    return str(root)


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "300000000\n"}, 300_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "200000000\n", "a/memory.max": "300000000\n"}, 200_000_000),
        ("0::/\n", {"memory.max": "400000000\n"}, 400_000_000),
        ("0::/../elsewhere\n", {"memory.max": "400000000\n"}, 400_000_000),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "500000000\n"}, 500_000_000),
        (
            "5:cpu,memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.limit_in_bytes": "600000000\n",
            },
            600_000_000,
        ),
    ],
)
def test_the_smallest_limit_of_the_cgroups_counts(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int
) -> None:
    assert available_memory(machine(tmp_path, membership, limits)) == expected


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(machine(tmp_path, "0::/a\nrubbish\n", {"a/memory.max": "max\n"})) == total
    assert available_memory(str(tmp_path / "nothing")) == total


def test_what_is_free_is_what_the_cgroup_leaves_without_file_pages_that_can_be_dropped(tmp_path: Path) -> None:
    newer = machine(
        tmp_path / "2",
        "0::/a/b\n",
        {
            "a/memory.max": f"{500 * MIB}\n",
            "a/memory.current": f"{420 * MIB}\n",
            "a/memory.stat": f"anon {300 * MIB}\nactive_file {30 * MIB}\ninactive_file {90 * MIB}\n",
            "a/b/memory.max": "max\n",
            "a/b/memory.current": f"{400 * MIB}\n",
        },
    )
    assert free_memory(newer) == 200 * MIB
    older = machine(
        tmp_path / "1",
        "4:memory:/a\n",
        {
            "memory/a/memory.limit_in_bytes": f"{500 * MIB}\n",
            "memory/a/memory.usage_in_bytes": f"{420 * MIB}\n",
            "memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {90 * MIB}\ntotal_active_file {30 * MIB}\n",
        },
    )
    assert free_memory(older) == 200 * MIB
    (tmp_path / "1" / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  102400 kB\n")
    assert free_memory(older) == 100 * MIB
    assert free_memory(str(tmp_path / "nothing")) is None


def test_an_import_names_the_limit_that_it_reaches() -> None:
    full = MemoryVolume()
    file(full, b"a", bytes(2 * MIB))
    file(full, b"b")
    for limits, message in (
        (MemoryVolume(MIB), r"1,048,576 bytes \(--max-bytes\)"),
        (MemoryVolume(None, 2), r"2 inodes \(--max-inodes\)"),
        (MemoryVolume(max_memory=MIB), r"1,048,576 bytes of memory \(--max-memory\)"),
    ):
        with full.tree() as tree, pytest.raises(OSError, match=f"may hold {message}"):
            limits.import_tree(tree, replace=False)


@pytest.mark.parametrize("is_lent", [False, True])
def test_what_is_reserved_is_charged_until_the_end_and_never_beyond_the_limit(is_lent: bool) -> None:
    volume = MemoryVolume(max_memory=8 * MIB)
    reader = volume
    if is_lent:
        reader = volume.new_stage()
    before = volume.usage().overhead_bytes
    with reader.reserving() as reserve:
        reserve(3 * MIB)
        reserve(2 * MIB)
        assert volume.usage().overhead_bytes - before >= 5 * MIB - 4096
        with pytest.raises(OSError, match="No space") as refused:
            reserve(4 * MIB)
        assert refused.value.errno == errno.ENOSPC
    assert volume.usage().overhead_bytes - before < 4096
    if is_lent:
        reader.give_back()
    assert volume.usage().overhead_bytes == before
    volume.check_invariants()


def test_without_a_limit_everything_can_be_reserved() -> None:
    volume = MemoryVolume()
    before = volume.usage().overhead_bytes
    with volume.reserving() as reserve:
        reserve(1 << 40)
    assert volume.usage().overhead_bytes == before


@pytest.mark.parametrize("per_file", [1, 10, 1_000])
@pytest.mark.parametrize("value_bytes", [1, 16, 100])
def test_what_small_attributes_take_is_charged(volume: MakeVolume, value_bytes: int, per_file: int) -> None:
    made = volume(64 * MIB)
    file(made, b"first")
    gc.collect()
    tracemalloc.start()
    try:
        charged = made._ledger.total
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1_000 // per_file):
            inode = file(made, b"%d" % number)
            for each in range(per_file):
                made.setxattr(inode, b"user.%d" % each, bytes(value_bytes), 0)
        assert tracemalloc.get_traced_memory()[0] - before < made._ledger.total - charged
    finally:
        tracemalloc.stop()
