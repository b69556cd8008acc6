"""Return freed memory to the system after a peak.

The content of a volume lives in the heap of the C library, which keeps what is freed between two blocks that are in
use: after 20 snapshots of a file of 64 MiB were dropped, 1.3 GiB stayed resident (python -m bench.memory).
malloc_trim(3) returns whole free pages anywhere in the heap.  A volume in memory that is near its limit does not wait
for this check (`protocol.backends.memory.ledger`).

Threading: `MemoryTrim.check` runs on the serving loop; the trim itself in a worker thread, because it takes about a
tenth of a second for each GiB that it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

from protocol.linux.syscalls import resident_bytes, trim_heap
from protocol.volume import Volume
from protocol.volume_extensions import snapshotable

_MIB: Final = 1 << 20
# A trim that returned little is not repeated: what it left is in pages that are partly in use.
_GROWN_BYTES: Final = 32 * _MIB
_UNUSED_BYTES: Final = 96 * _MIB  # the interpreter and its modules are 40 to 70 MiB of it
_UNUSED_SHARE: Final = 8  # of the content: what rounding and fragmentation cost
_PAUSE_S: Final = 5.0  # memory that is freed and used again within seconds stays


class MemoryTrim:
    """Decides when to trim: resident memory is far above what the volume accounts for, and grew since the last trim."""

    def __init__(
        self,
        volume: Volume,
        *,
        resident_bytes: Callable[[], int] = resident_bytes,
        trim: Callable[[], object] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._volume = snapshotable(volume)
        self._resident_bytes = resident_bytes
        self._trim = trim
        self._clock = clock
        self._least_bytes = self._resident_bytes()  # since the last trim
        self._not_before = 0.0

    async def check(self) -> None:
        """Trim if it is worth it.  Call it about once a second."""
        if self.is_due():
            await trio.to_thread.run_sync(self._trim)
            self._least_bytes = self._resident_bytes()
            self._not_before = self._clock() + _PAUSE_S

    def is_due(self) -> bool:
        """Whether a trim would probably return memory."""
        volume = self._volume
        if volume is None or self._clock() < self._not_before:
            return False
        resident = self._resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident - self._least_bytes < _GROWN_BYTES:
            return False
        usage = volume.usage()
        if usage.live_bytes is None:
            return False  # it holds its content elsewhere, or does not know
        used = usage.live_bytes + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)
        return resident - used >= _UNUSED_BYTES + used // _UNUSED_SHARE
