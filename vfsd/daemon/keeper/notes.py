"""Notes of a daemon for the next one, in the memory that a keeper and its daemon share: what was set while it ran.

A journal has the policy, too, but `host:` and `container:` have no journal, and labels are in none.

Invariant: the notes of before a change, or those of after it, can be read at every moment.  There are two slots, and a
change writes to the older one; the CRC shows whether it is complete.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import Any, Final

from vfsd.kernel.engines.native.abandoned import SHARED_BYTES

_SLOT_BYTES: Final = 2 << 20  # more than all patterns and labels take
_HEADER: Final = "{:020} {:010} {:010}\n"  # the number of the change, the length and the CRC of the JSON text
_HEADER_BYTES: Final = 43
_SLOTS: Final = (SHARED_BYTES, SHARED_BYTES + _SLOT_BYTES)


class Notes:
    """The notes behind the shared memory in the file `memory_fd`."""

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._number, self._values = max(map(self._read, _SLOTS), key=lambda found: found[0])

    def _read(self, slot: int) -> tuple[int, dict[str, Any]]:
        words = os.pread(self._memory_fd, _HEADER_BYTES, slot).split()
        if len(words) == 3 and all(map(bytes.isdigit, words)):  # not zeros, or nothing
            number, length, crc = map(int, words)
            data = os.pread(self._memory_fd, length, slot + _HEADER_BYTES)
            if zlib.crc32(data) == crc:
                return number, json.loads(data)
        return 0, {}

    def get(self, key: str) -> Any:
        """Return what this daemon, or the one before it, has set; None if nothing was."""
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Note a value of JSON for the next daemon.  OSError if there is no memory for it, or it is too large."""
        values = {**self._values, key: value}
        data = json.dumps(values).encode()  # which keeps the lone surrogates of bytes that are not UTF-8
        number = self._number + 1
        if len(data) > _SLOT_BYTES - _HEADER_BYTES:
            raise OSError(errno.E2BIG, f"{len(data)} bytes are too many for the notes of a daemon")
        header = _HEADER.format(number, len(data), zlib.crc32(data)).encode()
        os.pwrite(self._memory_fd, header + data, _SLOTS[number % 2])
        self._number, self._values = number, values
