"""At the quota: what a program gave back is there for its next call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt

ROUNDS = 3000


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])  # the pyfuse3 engine's docstring says what it cannot
def test_the_inode_of_an_unlinked_file_is_free_for_the_next(mount: MountIt) -> None:
    root = Path(mount(max_inodes=3).path)
    (root / "kept").touch()
    for number in range(ROUNDS):
        path = root / f"f{number}"
        path.touch()
        path.unlink()


@pytest.mark.write_through
def test_an_append_that_fits_in_part_is_made_once(mount: MountIt) -> None:
    root = Path(mount(max_bytes=8192).path)
    (root / "log").write_bytes(b"x" * 5000)
    with (root / "log").open("ab", 0) as file:
        assert file.write(b"y" * 5000) == 3192
        with pytest.raises(OSError, match="No space left"):
            file.write(b"z")
    assert (root / "log").read_bytes() == b"x" * 5000 + b"y" * 3192


@pytest.mark.parametrize("engine", ["native"])
def test_the_room_of_an_unlinked_file_is_free_for_the_next(mount: MountIt) -> None:
    root = Path(mount(max_bytes=1 << 20).path)
    for number in range(ROUNDS // 10):
        path = root / f"f{number}"
        path.write_bytes(bytes([number % 255 + 1]) * (1 << 20))
        assert os.stat(path).st_size == 1 << 20
        path.unlink()
