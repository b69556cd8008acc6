"""RootVolume: the host backend's volume below a container's root, where programs are executed that the mount wrote.

The host backend keeps a written file open for the next write.  A file that is open for writing cannot be executed
(ETXTBSY), and "write it here, run it inside" is the purpose of a container's workspace.  So a file stays open for
writing only until the serving loop is idle: during consecutive writes and about a millisecond longer, less than it
takes to start anything in the container.  (A program that writes there itself holds its file open longer.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

from protocol.backends.host import HostVolume
from protocol.backends.host.attributes import HostAttributes
from protocol.volume import AttributeChanges

__all__ = ["RootVolume", "Soon"]

Soon: TypeAlias = Callable[[], None]
P = ParamSpec("P")
T = TypeVar("T")


def _then_closing_writers(method: Callable[Concatenate[RootVolume, P], T]) -> Callable[Concatenate[RootVolume, P], T]:
    """`method`, after which the files that it opened for writing are closed, at once or soon."""

    @functools.wraps(method)
    def call(volume: RootVolume, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(volume, *args, **options)
        finally:
            volume.wrote()

    return call


class RootVolume(HostVolume):
    """A HostVolume that closes files opened for writing, by `close_writers`.

    `soon` asks the serving loop to call it; without `soon`, each call that writes closes its file at its end.
    """

    def __init__(self, path: str | bytes, *, read_only: bool = False, soon: Soon | None = None) -> None:
        super().__init__(path, read_only=read_only)
        self._soon = soon
        self._is_due = False

    def wrote(self) -> None:
        """Close the files that are open for writing, or ask the loop to do it soon."""
        if self._soon is None:
            self.close_writers()
        elif not self._is_due:
            self._is_due = True
            self._soon()

    def close_writers(self) -> None:
        """Close the files that are open for writing."""
        self._is_due = False
        self._descriptors.close_writers()

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        """See `protocol.volume.Volume`, as for all that follow."""
        if changes.size is None:
            return super().setattr(inode, changes)
        return self._set_size(inode, changes)

    _set_size = _then_closing_writers(HostVolume.setattr)

    mknod = _then_closing_writers(HostVolume.mknod)
    tmpfile = _then_closing_writers(HostVolume.tmpfile)
    write = _then_closing_writers(HostVolume.write)
    fallocate = _then_closing_writers(HostVolume.fallocate)
    copy_range = _then_closing_writers(HostVolume.copy_range)

    def check_invariants(self) -> None:
        """Check HostVolume's invariants, and that no file stays open for writing."""
        super().check_invariants()
        assert self._is_due or not any(node.writable for node in self._table)
