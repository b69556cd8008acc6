"""Random operations on one file, compared with a copy of its content in memory after each.

The idea is that of Apple's and SGI's fsx: reads, writes, mappings, truncations, holes and copies of ranges of random
places and lengths hit each other's edges, so a wrong byte is found by the next read of its place.
"""

from __future__ import annotations

import collections
import mmap
import os
import random
from pathlib import Path
from typing import Final

from protocol.linux.portable import fallocate

_SIZE_MAX: Final = 320 << 10  # three blocks of a volume in memory
_LENGTH_MAX: Final = 70 << 10
_KEPT_OPERATIONS: Final = 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


class FileExerciser:
    """Changes the file `path`, which it makes, at random.  AssertionError for a wrong byte; OSError."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._choice = random.Random(seed)
        self._model = bytearray()
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_OPERATIONS)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._operations = (
            self.read, self.read_mapping, self.write, self.write, self.write_mapping, self.append, self.truncate,
            self.allocate, self.punch, self.copy, self.reopen, self.drop_pages, self.sync,
        )  # fmt: skip

    def run(self, count: int) -> None:
        """Make `count` random operations."""
        for _ in range(count):
            self._choice.choice(self._operations)()
            self._check_size()

    def close(self) -> None:
        """Compare the whole file, and close it."""
        self.drop_pages()
        self._compare(0, os.pread(self._file, _SIZE_MAX + 1, 0), len(self._model))
        os.close(self._file)

    # -- places --------------------------------------------------------------------------------------
    def _range(self, limit: int) -> tuple[int, int]:
        """Choose an offset and a length, at least 1, that end at `limit` at most; some are at pages' edges."""
        offset = self._choice.randrange(limit)
        if self._choice.randrange(4) == 0:
            offset -= offset % mmap.PAGESIZE
        length = min(self._choice.choice((1, 100, mmap.PAGESIZE, 9_000, _LENGTH_MAX)), limit - offset)
        return offset, self._choice.randint(1, length)

    def _grow(self, size: int) -> None:
        self._model.extend(bytes(max(0, size - len(self._model))))

    def _note(self, text: str) -> None:
        self._last.append(text)

    # -- operations ----------------------------------------------------------------------------------
    def read(self) -> None:
        offset, length = self._range(_SIZE_MAX)
        self._note(f"read {length} at {offset}")
        self._compare(offset, os.pread(self._file, length, offset), length)

    def read_mapping(self) -> None:
        if self._model:
            offset, length = self._range(len(self._model))
            self._note(f"read {length} at {offset} through a mapping")
            with mmap.mmap(self._file, 0, prot=mmap.PROT_READ) as mapping:
                self._compare(offset, mapping[offset : offset + length], length)

    def write(self) -> None:
        self._write(*self._range(_SIZE_MAX))

    def append(self) -> None:
        size = len(self._model)
        if size < _SIZE_MAX:
            self._write(size, self._choice.randint(1, min(_LENGTH_MAX, _SIZE_MAX - size)))

    def _write(self, offset: int, length: int) -> None:
        self._note(f"write {length} at {offset}")
        data = self._choice.randbytes(length)
        assert os.pwrite(self._file, data, offset) == length, self._story()
        self._put(offset, data)

    def write_mapping(self) -> None:
        if self._model:
            offset, length = self._range(len(self._model))
            self._note(f"write {length} at {offset} through a mapping")
            data = self._choice.randbytes(length)
            with mmap.mmap(self._file, 0) as mapping:
                mapping[offset : offset + length] = data
                if self._choice.randrange(2):
                    mapping.flush()
            self._put(offset, data)

    def _put(self, offset: int, data: bytes) -> None:
        self._grow(offset)
        self._model[offset : offset + len(data)] = data

    def truncate(self) -> None:
        size = self._choice.randrange(_SIZE_MAX)
        self._note(f"truncate to {size}")
        os.ftruncate(self._file, size)
        self._grow(size)
        del self._model[size:]

    def allocate(self) -> None:
        offset, length = self._range(_SIZE_MAX)
        keeps_size = bool(self._choice.randrange(2))
        self._note(f"allocate {length} at {offset}{', the size stays' * keeps_size}")
        fallocate(self._file, _KEEP_SIZE * keeps_size, offset, length)
        if not keeps_size:
            self._grow(offset + length)

    def punch(self) -> None:
        offset, length = self._range(_SIZE_MAX)
        self._note(f"punch a hole of {length} at {offset}")
        fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, offset, length)
        end = min(offset + length, len(self._model))
        self._model[offset:end] = bytes(max(0, end - offset))

    def copy(self) -> None:
        """Copy a range of the file to another place; the two do not overlap."""
        if not self._model:
            return
        source, length = self._range(len(self._model))
        target = self._choice.randrange(_SIZE_MAX - length)
        if abs(source - target) < length:
            return
        self._note(f"copy {length} from {source} to {target}")
        copied = 0
        while copied < length:  # the kernel may copy less
            count = os.copy_file_range(self._file, self._file, length - copied, source + copied, target + copied)
            assert count, self._story()
            copied += count
        self._put(target, bytes(self._model[source : source + length]))

    def reopen(self) -> None:
        self._note("close and open")
        os.close(self._file)
        self._file = os.open(self._path, os.O_RDWR)

    def drop_pages(self) -> None:
        """Have the next read ask the volume."""
        self._note("drop the cached pages")
        os.fsync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        os.fdatasync(self._file)

    # -- checks --------------------------------------------------------------------------------------
    def _compare(self, offset: int, found: bytes, length: int) -> None:
        expected = self._model[offset : offset + length]
        if found != expected:
            places = (place for place, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
            wrong = offset + next(places, min(len(found), len(expected)))
            lengths = f"{len(found)} bytes read, {len(expected)} expected"
            raise AssertionError(f"{self._path}: wrong from byte {wrong} ({lengths})\n{self._story()}")

    def _check_size(self) -> None:
        size = os.fstat(self._file).st_size
        assert size == len(self._model), f"size {size}, not {len(self._model)}\n{self._story()}"

    def _story(self) -> str:
        return "the last operations:\n" + "\n".join(self._last)
