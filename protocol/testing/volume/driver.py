"""Driver: calls a volume by path, with a virtual clock, for the contract suites."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Final, Protocol, cast

import pytest

from protocol.volume import ROOT_INODE, AttributeChanges, Attributes, Caller, DirectoryEntry, Volume

ALICE: Final = Caller(1000, 1000)
KEEP_SIZE: Final = 1  # linux/falloc.h
PUNCH_HOLE: Final = 2
PAGE_BYTES: Final = 4096


class Clock:
    """A virtual clock that only `tick` advances."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000 * 10**9

    def __call__(self) -> int:
        return self.now_ns

    def tick(self) -> int:
        """Advance by one second and return the new time."""
        self.now_ns += 10**9
        return self.now_ns


class MakeVolume(Protocol):
    """Makes a new, empty volume whose root belongs to 0:0 and has mode 0755."""

    def __call__(
        self, *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
    ) -> Volume: ...


class Driver:
    """A volume called by path; it keeps no lookups of new inodes.  For volumes that return results, not awaitables.

    Args:
        volume: what to call.
        caller: the user who makes files and directories, unless the call says another.
    """

    def __init__(self, volume: Volume, caller: Caller = ALICE) -> None:
        self.volume = volume
        self._caller = caller

    def at(self, path: bytes) -> int:
        """Return the inode number at `path`; keep no lookup."""
        number = ROOT_INODE
        for name in path.split(b"/") if path else ():
            number = cast("Attributes", self.volume.lookup(number, name)).inode
            self.volume.forget(number, 1)
        return number

    def _split(self, path: bytes) -> tuple[int, bytes]:
        parent, _, name = path.rpartition(b"/")
        return self.at(parent), name

    def stat(self, path: bytes | int) -> Attributes:
        return cast("Attributes", self.volume.getattr(path if isinstance(path, int) else self.at(path)))

    def _let_go(self, made: object) -> int:
        number = cast("Attributes", made).inode
        self.volume.forget(number, 1)
        return number

    def file(self, path: bytes, data: bytes = b"", mode: int = 0o644, caller: Caller | None = None) -> int:
        parent, name = self._split(path)
        number = self._let_go(self.volume.mknod(parent, name, stat.S_IFREG | mode, 0, caller or self._caller))
        if data:
            self.volume.write(number, 0, data)
        return number

    def directory(self, path: bytes, mode: int = 0o755, caller: Caller | None = None) -> int:
        parent, name = self._split(path)
        return self._let_go(self.volume.mkdir(parent, name, mode, caller or self._caller))

    def symlink(self, path: bytes, target: bytes) -> int:
        parent, name = self._split(path)
        return self._let_go(self.volume.symlink(parent, name, target, self._caller))

    def link(self, number: int, path: bytes) -> None:
        parent, name = self._split(path)
        self._let_go(self.volume.link(number, parent, name))

    def unlink(self, path: bytes) -> None:
        self.volume.unlink(*self._split(path))

    def rmdir(self, path: bytes) -> None:
        self.volume.rmdir(*self._split(path))

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        self.volume.rename(*self._split(old), *self._split(new), flags)

    def set(self, path: bytes | int, **changes: int | bool) -> Attributes:
        number = path if isinstance(path, int) else self.at(path)
        return cast("Attributes", self.volume.setattr(number, AttributeChanges(**changes)))  # type: ignore[arg-type]

    def hold(self, path: bytes) -> int:
        """Look `path` up and keep the lookup, as for an open file."""
        return cast("Attributes", self.volume.lookup(*self._split(path))).inode

    def read(self, path: bytes | int, offset: int = 0, size: int = 1 << 20) -> bytes:
        number = path if isinstance(path, int) else self.at(path)
        return bytes(cast("bytes", self.volume.read(number, offset, size)))

    def entries(self, path: bytes | int = b"", cookie: int = 0) -> Iterator[DirectoryEntry]:
        number = path if isinstance(path, int) else self.at(path)
        return cast("Iterator[DirectoryEntry]", self.volume.readdir(number, cookie))

    def names(self, path: bytes | int = b"") -> list[bytes]:
        """Return the sorted names in a directory, without the dots."""
        return sorted(entry.name for entry in self.entries(path) if entry.name not in (b".", b".."))


def fails(code: int) -> pytest.RaisesExc[OSError]:
    """Return a context in which an `OSError` with errno `code` must be raised."""
    return pytest.raises(OSError, check=lambda error: error.errno == code)


class VolumeSuite:
    """The fixtures of all parts of the contract."""

    @pytest.fixture
    def volume(self) -> MakeVolume:
        """Return the factory of the volumes to test; a subclass overrides this."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def fs(self, volume: MakeVolume, clock: Clock) -> Driver:
        return Driver(volume(clock=clock))
