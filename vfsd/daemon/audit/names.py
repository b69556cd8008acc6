"""Names: paths of inodes, as they are when a change is reported.

Looking a path up takes as long as the rest of an entry.  So the paths of directories, and of files that were just made,
are kept until something is renamed or removed.  That is possible only for a volume that nothing else changes
(`VolumeCapabilities.snapshots`), and while no call of the control socket changes it (`Names.suspended`).

Threading: the serving loop.  No method awaits.

Invariants (`check_invariants`): at most `_KEPT` paths of each kind are kept, each the one that the volume tells, and
each kept file has one name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from protocol.volume import Attributes, NamedVolume, Volume

_KEPT: Final = 256
_KEPT_BYTES: Final = 512  # a longer path is not kept
_PATH_BYTES: Final = 4096


class Names:
    """The paths of the inodes of `volume`, in at most about _PATH_BYTES each, and how many names an inode has."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._path_of: Callable[[int], bytes | None] = lambda _inode: None  # a volume may not know paths
        if volume.capabilities.paths:
            self._path_of = cast("NamedVolume", volume).path_of
        self._is_kept = volume.capabilities.snapshots
        self._suspensions = 0
        self._above: dict[int, bytes] = {}  # by directory: its path, with a slash unless it is the root
        self._made: dict[int, bytes] = {}  # by inode: the path under which it was made, which is its only name

    def below(self, parent: int, name: bytes) -> bytes | None:
        """Return the path of `name` in directory `parent`."""
        above = self._above.get(parent)
        if above is None:
            path = self.of(parent)
            if path is None:
                return None
            above = path + b"/" if path else path
            if self._is_kept and len(above) <= _KEPT_BYTES:
                if len(self._above) >= _KEPT:
                    self._above.clear()
                self._above[parent] = above
        return above + name

    def of(self, inode: int) -> bytes | None:
        """Return a path of `inode`; None if it has no name."""
        path = self._path_of(inode)
        return path if path is None or len(path) <= _PATH_BYTES else shortened(path)

    def find(self, inode: int) -> tuple[bytes | None, int]:
        """A path of `inode`, None if it has no name, and how many names it has: 1 if the volume does not tell."""
        made = self._made.get(inode)
        return (self.of(inode), self._count(inode)) if made is None else (made, 1)

    def _count(self, inode: int) -> int:
        if not self._volume.capabilities.snapshots:
            return 1
        try:
            # A volume with snapshots returns results, never awaitables.
            found = cast("Attributes", self._volume.getattr(inode))
        except OSError:
            return 0
        return max(found.nlink, 1)

    # -- changes of names ------------------------------------------------------------------------------
    def made(self, parent: int, name: bytes, inode: int) -> bytes | None:
        """Note that file `inode` was made in directory `parent`; return its path."""
        above = self._above.get(parent)
        path = self.below(parent, name) if above is None else above + name
        if self._is_kept and path is not None:
            made = self._made
            if len(made) >= _KEPT:
                made.clear()
            if len(path) <= _KEPT_BYTES:
                made[inode] = path
        return path

    def linked_or_unlinked(self) -> None:
        """Note that a file got or lost a name."""
        self._made.clear()

    def moved(self) -> None:
        """Note that a directory may have another path."""
        self._made.clear()
        self._above.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, keep no paths: something changes the volume without a report of each name."""
        self._suspensions += 1
        self._is_kept = False
        self.moved()
        try:
            yield
        finally:
            self._suspensions -= 1
            self._is_kept = not self._suspensions and self._volume.capabilities.snapshots

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert max(len(self._above), len(self._made)) <= _KEPT
        assert self._is_kept or not (self._above or self._made)
        for inode, above in self._above.items():
            path = self._path_of(inode)
            assert path is not None
            assert above == (path + b"/" if path else b"")
        for inode, made in self._made.items():
            assert made == self._path_of(inode)
            assert cast("Attributes", self._volume.getattr(inode)).nlink == 1


def shortened(path: bytes) -> bytes:
    """Leave out the middle of a path that is longer than any system call takes (PATH_MAX, linux/limits.h)."""
    return path if len(path) <= _PATH_BYTES else path[: _PATH_BYTES // 2] + b"/.../" + path[-_PATH_BYTES // 2 :]
