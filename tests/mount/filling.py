"""The contents that take the most memory for what a quota of pages would count, made through a mount until it is full.

Each kind is a function of a directory and a workspace, and yields after each step; a step that does not fit raises
ENOSPC.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from vfsd.client.workspace import Workspace

__all__ = ["KINDS", "fill", "remove_all"]

BLOCK: Final = 128 * 1024
_random: Final = random.Random(12)
Kind = Callable[[Path, Workspace], Iterator[None]]


def _file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def _sparse(root: Path, _: Workspace) -> Iterator[None]:
    """One byte at the end of each block."""
    file = _file(root / "sparse")
    try:
        for number in range(1 << 20):
            os.pwrite(file, b"x", number * BLOCK + BLOCK - 1)
            yield
    finally:
        os.close(file)


def _scattered(root: Path, _: Workspace) -> Iterator[None]:
    """Single bytes anywhere."""
    file = _file(root / "scattered")
    try:
        while True:
            os.pwrite(file, b"x", _random.randrange(1 << 33))
            yield
    finally:
        os.close(file)


def _large_xattrs(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        path = root / f"x{number}"
        path.touch()
        os.setxattr(path, "user.large", _random.randbytes(60_000))
        yield


def _small_xattrs(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 22):
        path = root / f"x{number // 100}"  # a change copies all attributes of a file
        path.touch()
        os.setxattr(path, f"user.{number}", b"%d" % number)
        yield


def _symlinks(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        (root / f"s{number}").symlink_to(_random.randbytes(2040).hex() + str(number)[:10])
        yield


def _long_names(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        os.mknod(root / f"{number:0255}")
        yield


def _hard_links(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        first = root / f"{number // 100:0255}"
        if number % 100:
            os.link(first, root / f"{number:0254}l")
        else:
            os.mknod(first)
        yield


def _directories(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        (root / f"d{number}").mkdir()
        yield


def _one_byte_files(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        (root / f"f{number}").write_bytes(b"x")
        yield


def _orphans(root: Path, _: Workspace) -> Iterator[None]:
    """Files that are open and have no name: some large ones, since descriptors are few."""
    files: list[int] = []
    try:
        while True:
            file = _file(root / "orphan")
            files.append(file)
            os.unlink(root / "orphan")
            os.write(file, _random.randbytes(1 << 20))
            if os.fstat(file).st_size < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield
    finally:
        for each in files:
            os.close(each)


def _reserved(root: Path, _: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        file = _file(root / f"r{number}")
        try:
            os.posix_fallocate(file, 0, 1 << 20)
        finally:
            os.close(file)
        yield


def _snapshots(root: Path, workspace: Workspace) -> Iterator[None]:
    """Named ones with long tags and nothing in them."""
    del root
    for number in range(1 << 20):
        workspace.snapshot(f"s{number}", tag="\U0001f600" * 250)
        yield


def _snapshots_with_blocks(root: Path, workspace: Workspace) -> Iterator[None]:
    """Named ones, each with blocks that were changed since."""
    path = root / "file"
    path.write_bytes(_random.randbytes(64 * BLOCK))
    file = _file(path)
    try:
        for number in range(1 << 20):
            workspace.snapshot(f"s{number}")
            for _ in range(8):
                os.pwrite(file, b"x", _random.randrange(64 * BLOCK))
            yield
    finally:
        os.close(file)


def _deleted_under_snapshots(root: Path, workspace: Workspace) -> Iterator[None]:
    for number in range(1 << 20):
        (root / "file").write_bytes(_random.randbytes(8 * BLOCK))
        workspace.snapshot(f"s{number}")
        (root / "file").unlink()
        yield


def _renames_under_snapshots(root: Path, workspace: Workspace) -> Iterator[None]:
    for number in range(500):
        os.mknod(root / f"{number}-{0:0240}")
    for turn in range(1 << 20):
        workspace.snapshot(f"s{turn}")
        for number in range(500):
            os.rename(root / f"{number}-{turn:0240}", root / f"{number}-{turn + 1:0240}")
            yield


KINDS: Final[Mapping[str, Kind]] = {
    kind.__name__.strip("_"): kind
    for kind in (
        _sparse, _scattered, _large_xattrs, _small_xattrs, _symlinks, _long_names, _hard_links, _directories,
        _one_byte_files, _orphans, _reserved, _snapshots, _snapshots_with_blocks, _deleted_under_snapshots,
        _renames_under_snapshots,
    )
}  # fmt: skip


def fill(kind: str, workspace: Workspace) -> int:
    """Make content of one kind until there is no room; how many steps that were.  OSError other than ENOSPC."""
    steps = 0
    try:
        for _ in KINDS[kind](Path(workspace.path), workspace):
            steps += 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return steps
    raise AssertionError(f"{kind} never filled the workspace")


def remove_all(root: Path) -> None:
    """Remove everything, as rm -rf does."""
    for directory, directories, files in os.walk(root, topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        for name in directories:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)
