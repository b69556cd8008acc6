"""Files that programs use while the daemon of their workspace is replaced: open, mapped, locked and being listed."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from tests.mount.programs import Program

_LISTED_FIRST = 100
_FILES = 1500  # more than one request for a listing returns
_NAMES = _FILES + 1


def make_files(root: Path) -> None:
    """Make what `in_use` uses."""
    (root / "dir" / "below").mkdir(parents=True)
    for number in range(_FILES):
        (root / "dir" / f"f{number}").touch()
    (root / "file").write_bytes(b"a" * 300_000)


class FilesInUse:
    """`program` has the current directory dir/below, and an exclusive flock(2) of `file`, which it calls `held`.

    `seen`: the names that the listing of `dir` has returned; they may be removed, and others may not.
    """

    def __init__(
        self, program: Program, file: BinaryIO, mapping: mmap.mmap, listing: Iterator[os.DirEntry[str]]
    ) -> None:
        self.program = program
        self.file = file
        self.mapping = mapping
        self.inode = os.fstat(file.fileno()).st_ino
        self._listing = listing
        self.seen = [next(listing).name for _ in range(_LISTED_FIRST)]

    def check(self, root: Path, directory: str = "dir") -> None:
        """Check that each use goes on, once `dir` has this name; makes below/new in it."""
        self.mapping[200_000:200_001] = b"c"
        self.mapping.flush()
        data = (root / "file").read_bytes()
        assert (len(data), data[:2], data[199_999:200_002]) == (300_000, b"ba", b"aca")
        assert self.program("os.getcwd()") == str(root / directory / "below")
        self.program("open('new', 'w').close()")
        assert (root / directory / "below" / "new").exists()
        with pytest.raises(BlockingIOError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.program("held.close()")
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (root / "file").stat().st_ino == os.fstat(self.file.fileno()).st_ino == self.inode
        self.seen += [entry.name for entry in self._listing]
        assert len(self.seen) == len(set(self.seen)) == _NAMES


@contextlib.contextmanager
def in_use(root: Path) -> Iterator[FilesInUse]:
    """Use the files of `make_files`; one byte is changed through the mapping."""
    with (
        Program() as program,
        (root / "file").open("r+b") as file,
        os.scandir(root / "dir") as listing,
        mmap.mmap(file.fileno(), 0) as mapping,
    ):
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        mapping[0:1] = b"b"
        yield FilesInUse(program, cast("BinaryIO", file), mapping, listing)
