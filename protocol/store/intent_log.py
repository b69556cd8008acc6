"""RestoreIntentLog: records the restore that is running, so that it can be completed after a crash."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.linux.regular_file import read_regular, write_atomically
from protocol.store.format.packs import DamagedError

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout


class InterruptedRestore(msgspec.Struct, frozen=True):
    """An incomplete restore, as the intent log records it: each path has its old or its new state.

    To complete it, restore `snapshot` (and `paths`) again.  To undo it, restore `safety`, the state before; None if
    the restore took no safety snapshot.  `previous` is an earlier incomplete restore that this one does not complete.
    """

    snapshot: str
    paths: tuple[bytes, ...]
    remove: bool
    safety: str | None
    token: str
    tokens: tuple[str, ...]  # of earlier attempts, whose temporary files may still exist
    started_ns: int
    previous: InterruptedRestore | None = None
    directories: tuple[bytes, ...] | None = None  # see `RestoreRequest`

    def ends(self, other: InterruptedRestore) -> bool:
        """Whether this restore, once complete, also completes `other`."""
        if not self.paths and self.directories is None:
            return True
        return (self.snapshot, self.paths, self.directories) == (other.snapshot, other.paths, other.directories)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(InterruptedRestore)


class RestoreIntentLog:
    """The intent log of a workspace; its file is called `journal`."""

    def __init__(self, layout: Layout, workspace: str) -> None:
        self._path = os.path.join(layout.workspace(workspace), "journal")

    def read(self) -> InterruptedRestore | None:
        """The running or interrupted restore, if any.  DamagedError."""
        try:
            return _decoder.decode(read_regular(self._path))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            damage = "the record of an interrupted restore is damaged: restore a snapshot without paths"
            raise DamagedError(damage, self._path) from None

    def write(self, entry: InterruptedRestore) -> None:
        """Record a restore before its first change; durable, as a power failure may leave some changes on disk."""
        write_atomically(self._path, _encoder.encode(entry), durable=True)

    def close(self, entry: InterruptedRestore) -> None:
        """Remove the record of a restore, after all of its changes are durable."""
        if entry.previous is not None and not entry.ends(entry.previous):
            write_atomically(self._path, _encoder.encode(entry.previous), durable=True)
        else:
            # Not synced: if a power failure brings the log back, the restore that it asks for changes nothing.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
