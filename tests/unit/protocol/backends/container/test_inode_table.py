"""The helper's table of inodes, when the process has no descriptor left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from protocol.backends.container.helper import inode_table
from protocol.backends.container.helper.inode_table import AgentInode, AgentInodeTable


class FullAbove:
    """The module os, in which `open` fails while more than `most` kept descriptors are open."""

    def __init__(self, table: AgentInodeTable, most: int) -> None:
        self._table = table
        self._most = most
        self.attempts = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path: bytes, flags: int, dir_fd: int | None = None) -> int:
        self.attempts += 1
        if len(self._table._open) > self._most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.open(path, flags, dir_fd=dir_fd)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[AgentInodeTable, list[AgentInode]]:
    """A table with ten open files, and one that is not open."""
    table = AgentInodeTable(os.fsencode(tmp_path))
    found = []
    for number in range(11):
        place = tmp_path / str(number)
        place.touch()
        found.append(table.enter(table.root, os.fsencode(place.name), place.stat()))
    for node in found[:10]:
        table.handle(node)
    return table, found


def test_what_is_kept_open_makes_room_for_what_is_opened(
    nodes: tuple[AgentInodeTable, list[AgentInode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, found = nodes
    full = FullAbove(table, 2)
    monkeypatch.setattr(inode_table, "os", full)
    assert os.fstat(table.handle(found[10]).fd).st_ino == found[10].key[1]
    assert full.attempts == 3  # with 10, 5 and 2 kept open


def test_an_open_that_never_succeeds_ends(
    nodes: tuple[AgentInodeTable, list[AgentInode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, found = nodes
    full = FullAbove(table, -1)
    monkeypatch.setattr(inode_table, "os", full)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
        table.handle(found[10])
    assert caught.value.errno == errno.EMFILE
    assert full.attempts < 10
