"""A mounted archive: random reads in little memory, and entries that are not what the archive says."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from protocol.archive import MountedArchive
from protocol.archive import records as zr
from protocol.errors import ArchiveError
from protocol.tree import names_in
from tests.unit.protocol.archive.archives import SYMLINK, Raw, archive, deflated

LARGE = random.Random(3).randbytes(1 << 20) + bytes(2 << 20) + b"end"
CRC = zlib.crc32(LARGE)


def mounted(tmp_path: Path, *entries: Raw) -> MountedArchive:
    place = tmp_path / "a.zip"
    place.write_bytes(archive(*entries))
    return MountedArchive(str(place), cache_bytes=1 << 20)


def test_any_part_of_any_entry_is_read_with_a_small_cache(tmp_path: Path) -> None:
    contents = {b"stored": LARGE, b"one": LARGE + b"1", b"two": b"2" + LARGE, b"small": b"s" * 1000, b"none": b""}
    entries = [
        Raw(b"files/" + name, data) if name == b"stored" else deflated(b"files/" + name, data)
        for name, data in contents.items()
    ]
    tree = mounted(tmp_path, *entries)
    chance = random.Random(5)
    for _ in range(300):
        name = chance.choice(list(contents))
        offset, size = chance.randrange(len(LARGE) + 10), chance.choice((0, 1, 4096, 131_072, 300_000))
        assert tree.read(name, offset, size) == contents[name][offset : offset + size]
    tree.close()


@pytest.mark.parametrize(
    "entry",
    [
        deflated(b"files/a", LARGE, crc=5),
        deflated(b"files/a", LARGE, size=len(LARGE) - 1),
        deflated(b"files/a", LARGE, size=len(LARGE) + 1),
        deflated(b"files/a", LARGE, size=len(LARGE) + (5 << 20)),
        Raw(b"files/a", LARGE, crc=5),
        Raw(b"files/a", zlib.compress(LARGE, wbits=-15)[:-2], method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", zlib.compress(LARGE, wbits=-15) + b"!", method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", b"\xff" * 5000, method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", b"1", crc=5),
        deflated(b"files/a", b"1" * 99, size=98),
        deflated(b"files/a", b"1" * 99, size=100),
        Raw(b"files/a", b"1", local_name=b"files/b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offset", [0, 90, (1 << 20) + 5])
def test_an_entry_that_is_not_what_it_declares_is_never_read(tmp_path: Path, entry: Raw, offset: int) -> None:
    tree = mounted(tmp_path, Raw(b"files/_", b"good"), entry, Raw(b"files/z", b"good"))
    assert tree.entry(b"a").is_file
    for _ in range(2):
        if offset < tree.entry(b"a").size:
            with pytest.raises(ArchiveError):
                tree.read(b"a", offset, 10)
    assert tree.read(b"_", 0, 10) == tree.read(b"z", 0, 10) == b"good"
    tree.close()


def test_a_symlink_is_checked_when_it_is_looked_at(tmp_path: Path) -> None:
    tree = mounted(tmp_path, Raw(b"files/bad", b"x\0y", SYMLINK), Raw(b"files/good", b"target", SYMLINK))
    assert tree.entry(b"good").target == b"target"
    assert names_in(tree, b"") == [b"bad", b"good"]
    with pytest.raises(ArchiveError, match="NUL"):
        tree.entry(b"bad")
    tree.close()


def test_the_memory_that_the_index_takes_is_announced(tmp_path: Path) -> None:
    place = tmp_path / "a.zip"
    place.write_bytes(archive(*(Raw(b"files/%d" % number, b"x") for number in range(1000))))
    announced: list[int] = []
    MountedArchive(str(place), reserve=announced.append).close()
    assert sum(announced) > 1000 * 1000

    def refuse(_: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        MountedArchive(str(place), reserve=refuse)
