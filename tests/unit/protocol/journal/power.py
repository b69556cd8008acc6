"""A file below a log that loses, at a simulated power failure, what was not synced."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import BinaryIO

from protocol.journal.log import LogFile
from protocol.journal.records import Buffer

SECTOR_BYTES = 512


class UnreliableFile(LogFile):
    """Holds a file in memory: `synced` is what the disk has, and `present` what a reader of the page cache sees.

    Both end where the last write ended.  Up to the sizes, zeros follow.
    """

    def __init__(self, content: bytes) -> None:
        self.synced = bytearray(content)
        self.present = bytearray(content)
        self.synced_size = self.size = len(content)
        self.fails = False
        self.is_read_only = False  # a write is cut

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        self.present.extend(bytes(max(0, offset - len(self.present))))
        if self.is_read_only:
            self.present[offset : offset + len(data) // 2] = data[: len(data) // 2]
            raise OSError(30, "Read-only file system")
        self.present[offset : offset + len(data)] = data
        self.size = max(self.size, len(self.present))
        return len(data)

    def allocate(self, offset: int, length: int) -> None:
        self.size = max(self.size, offset + length)

    def reader(self) -> BinaryIO:
        return io.BytesIO(self.present)

    def truncate(self, length: int) -> None:
        del self.present[length:]
        self.size = length

    def overwrites_in_place(self) -> bool:
        return True

    def sync(self) -> None:
        if self.fails:
            raise OSError(5, "Input/output error")
        self.synced, self.synced_size = bytearray(self.present), self.size

    def close(self) -> None:
        pass

    def after_power_failure(self, choice: random.Random) -> bytes:
        """Return what the disk has: of the sectors written since the last sync, any may be new or old."""
        size = choice.choice((self.synced_size, self.size))
        length = min(size, max(len(self.synced), len(self.present)))  # only zeros follow
        old, new = bytes(self.synced[:length]).ljust(length, b"\0"), bytes(self.present[:length]).ljust(length, b"\0")
        sectors = range(0, length, SECTOR_BYTES)
        written = b"".join(choice.choice((old, new))[at : at + SECTOR_BYTES] for at in sectors)
        return written.ljust(size, b"\0")
