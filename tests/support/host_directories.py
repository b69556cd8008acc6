"""Directories of the host to try the host backend on: a tmpfs with limits of its own, and its clock."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.testing import Clock
from tests.support.rights import need_root

__all__ = ["HostClock", "mounted_tmpfs"]


@contextmanager
def mounted_tmpfs(place: Path, *, max_bytes: int | None = None, max_inodes: int | None = None) -> Iterator[Path]:
    """A tmpfs of so many bytes and inodes, mounted at `place`; unmounted at the end.  Needs root."""
    need_root()
    place.mkdir()
    options = f"mode=755,uid=0,gid=0,size={max_bytes or 1 << 30},nr_inodes={max_inodes or 1_000_000}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "vfsd-test", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class _OrLater(int):
    """A time that is equal to itself and to all that come after it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(other) >= int(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


class HostClock(Clock):
    """The host's clock in the place of a virtual one: it cannot be set, but one can wait until it has gone on."""

    def __init__(self, probe: Path) -> None:
        super().__init__()
        self._probe = probe

    def _now(self) -> int:
        self._probe.touch()
        return os.stat(self._probe).st_mtime_ns

    def tick(self) -> int:
        """A time later than that of anything that was done before; what is done from now on has it, or a later one."""
        before = self._now()
        while (now := self._now()) <= before:
            pass
        return _OrLater(now)
