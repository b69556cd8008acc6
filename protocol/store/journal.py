"""RestoreJournal: what says, after a death, that a restore was under way, and how to end it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.store.format.layout import read_regular, write_atomically

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout

__all__ = ["Interrupted", "RestoreEntry", "RestoreJournal"]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A restore that did not come to its end: each path is what it was or what it was to be.

    To finish it, restore `snapshot` (and `paths`) again.  To undo it, restore `safety`, which has the state before;
    None where none was wanted.
    """

    snapshot: str
    paths: tuple[bytes, ...]
    safety: str | None
    started_ns: int


class RestoreEntry(msgspec.Struct, frozen=True):
    """As it is written down.  `previous` is an earlier one that this restore does not end."""

    snapshot: str
    paths: tuple[bytes, ...]
    remove: bool
    safety: str | None
    token: str
    tokens: tuple[str, ...]  # of earlier tries, whose temporary files may be there too
    started_ns: int
    previous: RestoreEntry | None = None

    def ends(self, other: RestoreEntry) -> bool:
        """Whether the state that `other` left half done is whole once this one is done."""
        return not self.paths or (self.snapshot, self.paths) == (other.snapshot, other.paths)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RestoreEntry)


class RestoreJournal:
    """The journal of a workspace."""

    def __init__(self, layout: Layout, workspace: str) -> None:
        self._path = os.path.join(layout.workspace(workspace), "journal")

    def read(self) -> RestoreEntry | None:
        """What is under way, or was when somebody died."""
        try:
            return _decoder.decode(read_regular(self._path))
        except (FileNotFoundError, msgspec.DecodeError):  # cut short by a power failure
            return None

    def write(self, entry: RestoreEntry) -> None:
        """Before the first change.  Durable, since a power failure may leave some of the changes on the disk."""
        write_atomically(self._path, _encoder.encode(entry), durable=True)

    def close(self, entry: RestoreEntry) -> None:
        """After the last change, when all of them are durable."""
        if entry.previous is not None and not entry.ends(entry.previous):
            write_atomically(self._path, _encoder.encode(entry.previous), durable=True)
        else:
            self.forget()

    def forget(self) -> None:
        """Let the state be as it is.

        Not synced: a journal that a power failure brings back asks for a restore that has nothing to do.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
