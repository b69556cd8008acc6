"""The timeline of a workspace: its states, each with the changes since the state before it.  No I/O.

for step in timeline(await workspace.snapshots()):
    if step.before is not None:
        found = await workspace.diff(step.before, step.name, complete=False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from vfsd.client.requests import RemoteCall
from vfsd.client.results import ChangeKind, Snapshot
from vfsd.wire.messages import ChangeRecord, DiffParams

_decode = msgspec.json.Decoder(ChangeRecord).decode_lines


@dataclass(frozen=True, slots=True)
class Step:
    """A state of the workspace: `snapshot`, or the live state if that is None.

    `before` is the name of the snapshot that the state's changes are counted from; None for the first state.
    """

    snapshot: Snapshot | None
    before: str | None

    @property
    def name(self) -> str | None:
        """The name of the state, as `Workspace.diff` takes it: None is the live state."""
        return None if self.snapshot is None else self.snapshot.name


def timeline(snapshots: Sequence[Snapshot]) -> list[Step]:
    """Return the states, newest first; the first one is the live state.  `snapshots` are ordered oldest first."""
    states: list[Snapshot | None] = [*snapshots, None]
    befores = [None, *(snapshot.name for snapshot in snapshots)]
    return [Step(state, before) for state, before in zip(states, befores, strict=True)][::-1]


@dataclass(frozen=True, slots=True)
class Mark:
    """How a directory entry differs between two states.

    `change` is its own change, if there is one.  `below` is the number of changes below it.  `type` is its file type.
    """

    change: ChangeKind | None
    type: str
    below: int = 0


def marks(a: str | None, b: str | None, directory: str) -> RemoteCall[Mapping[str, Mark]]:
    """Build the request for the entries of `directory` that differ between the states `a` and `b`, by name.

    `a` and `b` are as for `Workspace.diff`; the directory and the names are wire paths.  All changes are counted, in
    memory proportional to the entries of the directory that differ.
    """
    collector = _Marks(directory)
    params = DiffParams(a=a, b=b, paths=[directory] if directory else [], stream=True)
    return RemoteCall("diff", params, lambda _: collector.found, on_output=collector.feed)


class _Marks:
    """Counts the changes in a stream of `ChangeRecord`s by the entry of a directory that they are at or below."""

    def __init__(self, directory: str) -> None:
        self.found: Final[dict[str, Mark]] = {}
        self._cut = len(directory) + 1 if directory else 0
        self._rest = b""

    def feed(self, output: bytes) -> None:
        """Take the next piece of the output, which may end within a line."""
        lines, newline, self._rest = (self._rest + output).rpartition(b"\n")
        for record in _decode(lines + newline) if lines else ():
            name, slash, _ = record.path[self._cut :].partition("/")
            if not name:
                continue  # the directory itself
            mark = self.found.get(name)
            if not slash:
                self.found[name] = Mark(record.change, record.type, 0 if mark is None else mark.below)
            elif mark is None:
                self.found[name] = Mark(None, "directory", 1)
            else:
                self.found[name] = Mark(mark.change, mark.type, mark.below + 1)
