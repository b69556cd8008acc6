"""The first changes between two states, for a page that appears before all changes are counted.

The daemon sends the changes in the order of their paths while it compares the states.  As soon as the lines of the page
are there, the page waits only for `soon_s` more; then the comparison is cancelled.

Threading: the event loop.  A `_Window` belongs to one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec

from protocol.types import ChangeCounts
from vfsd.client.requests import RemoteCall
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffParams, DiffResult
from vfsd.web.sources import WorkspaceSource


@dataclass(slots=True)
class FirstChanges:
    """A part of the list of changes.  `counts` is None if counting takes longer; `has_more`: others follow."""

    records: list[ChangeRecord] = field(default_factory=list)
    counts: ChangeCounts | None = None
    has_more: bool = False


async def first_changes(
    source: WorkspaceSource, a: str | None, b: str | None, path: str, start: int, most: int, soon_s: float | None
) -> FirstChanges:
    """Return up to `most` of the changes from state `a` to state `b` at or below `path`, without the first `start`.

    Waits for the lines of the list, and up to `soon_s` in all for the counts; None: as long as they take.  Errors as
    for `WorkspaceSource.run`.
    """
    found = FirstChanges()
    with anyio.CancelScope() as scope:
        began = anyio.current_time()

        def cut() -> None:
            scope.deadline = began + (math.inf if soon_s is None else soon_s)

        params = DiffParams(a=a, b=b, paths=[path] if path else [], stream=True)
        window = _Window(found, start, most, cut)
        call: RemoteCall[DiffResult] = RemoteCall("diff", params, on_output=window.feed)
        found.counts = (await source.run(call)).counts
    return found


class _Window:
    """Takes the lines of a stream of `ChangeRecord`s that follow the first `start`; decodes no others."""

    def __init__(self, found: FirstChanges, start: int, most: int, on_full: Callable[[], None]) -> None:
        self._found: Final = found
        self._most: Final = most
        self._on_full: Final = on_full
        self._to_skip = start
        self._rest = b""
        self._decode: Final = msgspec.json.Decoder(ChangeRecord).decode

    def feed(self, output: bytes) -> None:
        """Take the next piece of the output, which may end within a line."""
        if self._found.has_more:
            return
        *lines, self._rest = (self._rest + output).split(b"\n")
        skipped = min(self._to_skip, len(lines))
        self._to_skip -= skipped
        wanted = self._most - len(self._found.records)
        following = lines[skipped:]
        self._found.records += map(self._decode, following[:wanted])
        if len(following) > wanted:
            self._found.has_more = True
            self._rest = b""
            self._on_full()
