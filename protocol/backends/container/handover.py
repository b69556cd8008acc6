"""Handover of a container's directory to another process, under the same kernel and in the same run of the container.

Invariants: what the old process gives is of the volume that it serves.  If the container stops meanwhile, `files` and
`rest` raise OSError, so the old process goes on.  The kernel has numbers of this run only, so the numbers of the map
are those of the volume.

Threading: the serving loop in the old process; the new one uses the volume in one thread at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from protocol.backends.container.inode_map import DentryKey
from protocol.values import Value

if TYPE_CHECKING:
    from protocol.backends.container.inode_map import InodeMap
    from protocol.volume_durability import GivenState, JournalEnd, TakenState


class _Rest(Value):
    """The rest of the volume's state, and the inodes of the map: number, type bits, lookups, held, dentries."""

    volume: bytes
    inodes: list[tuple[int, int, int, int, list[DentryKey]]]


class ContainerGiving:
    """The state `given` of the volume of one run.  See `protocol.volume_durability.GivenState`.

    `is_served`: whether that volume is still connected.
    """

    has_image = False
    lock_fd = None

    def __init__(self, given: GivenState, run: str, inode_map: InodeMap, is_served: Callable[[], bool]) -> None:
        self.start: JournalEnd = given.start
        self.below = _in_run(run, given.below)
        self._given = given
        self._map = inode_map
        self._is_served = is_served

    def log_fd(self) -> int:
        return self._given.log_fd()

    def position(self) -> JournalEnd:
        return self._given.position()

    def write_image(self, descriptor: int) -> None:
        """Nothing: the log has everything."""

    def files(self) -> Iterator[tuple[int, int]]:
        self._check()
        for each in self._given.files():
            self._check()  # the loop may have run since the last one
            yield each

    def rest(self) -> bytes:
        self._check()
        files = (file for file in self._map if file is not self._map.root)
        inodes = [(file.number, file.kind, file.lookups, file.held, file.dentries) for file in files]
        return msgspec.msgpack.encode(_Rest(self._given.rest(), inodes))

    def end(self) -> None:
        self._given.end()

    def _check(self) -> None:
        if not self._is_served():
            raise OSError(errno.EIO, "the container stopped during the upgrade, which was given up: try again")


class ContainerTaking:
    """The new process's side, over that of the volume.  See `protocol.volume_durability.TakenState`.

    `resume` enters what the volume says into the map, for an old process that gives only the volume's state.
    """

    def __init__(self, taken: TakenState, run: str, inode_map: InodeMap, resume: Callable[[], None]) -> None:
        self.below = _in_run(run, taken.below)
        self._taken = taken
        self._map = inode_map
        self._resume = resume

    def read(self, image_fd: int, log_fd: int, start: JournalEnd) -> None:
        self._taken.read(image_fd, log_fd, start)

    def follow(self, end: int) -> None:
        self._taken.follow(end)

    def take_files(self, files: Mapping[int, int]) -> None:
        self._taken.take_files(files)

    def complete(self, rest: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(rest, type=_Rest)
        except msgspec.ValidationError:  # of format 2
            self._taken.complete(rest)
            self._resume()
            return
        self._taken.complete(found.volume)
        for number, kind, lookups, held, dentries in found.inodes:
            file = self._map.resume(number, kind, lookups, held)
            for dentry in dentries:
                self._map.put(file, dentry)


def _in_run(run: str, below: str) -> str:
    """Identify the directory `below` in the run `run` of a container."""
    return f"container {run}, {below}"
