"""The methods `log`, `watch` and `label` of the control socket.

Threading: handlers run on the serving loop; entries are filtered and encoded in worker threads.  The log holds closed
entries, which do not change, and those of writes that go on, whose numbers may grow while they are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from protocol.diff.tree_diff import PathScope
from protocol.errors import SnapshotNotFoundError
from vfsd.daemon.audit.log import Entry, time_text
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.calls import CallContext, tree_paths
from vfsd.daemon.control.handlers.changes import OutputPieces
from vfsd.daemon.snapshots.base import SnapshotService, in_answer_thread, in_thread
from vfsd.operations.declaration import Empty
from vfsd.operations.workspace import LabelParams, LogParams, LogResult, Overflow, WatchParams
from vfsd.wire.messages import InvalidParamsError

_LABEL_CHARACTERS: Final = 200
_AT_ONCE: Final = 256  # entries that are encoded before a watch sends them


class LogMethods:
    """The methods of one workspace."""

    def __init__(self, audit: Audit, snapshots: SnapshotService | None) -> None:
        self._audit = audit
        self._file = audit.file
        self._snapshots = snapshots

    async def log(self, params: LogParams, call: CallContext) -> LogResult:
        log = self._audit.kept_log()
        asked_ns = await self._since_ns(params)
        wanted = await _filter(params, asked_ns)
        entries, dropped, since = list(log.entries()), log.dropped, log.complete_since_ns
        pieces = OutputPieces(call.output_from_thread)

        def send() -> int:
            count = 0
            for entry in entries:
                call.raise_if_cancelled()
                if wanted(entry):
                    pieces.write(msgspec.json.encode(entry.record()) + b"\n")
                    count += 1
            pieces.flush()
            return count

        count = await in_answer_thread(send)
        file = self._file
        return LogResult(
            count,
            dropped,
            time_text(since),
            0 if file is None else file.missing,
            None if file is None else file.problem,
            begins_late=asked_ns is not None and asked_ns < since,
            logged=len(entries),
        )

    async def watch(self, params: WatchParams, call: CallContext) -> Empty:
        log = self._audit.kept_log()
        since_ns = await self._since_ns(params)
        wanted, has_start = await _filter(params, since_ns), since_ns is not None
        # No await between the two: an entry is in one of them.  Those of writes that go on follow when they end.
        follower = log.follow(wanted)
        going_on = {id(entry) for entry in log.going_on()}
        earlier = [entry for entry in log.entries() if id(entry) not in going_on] if has_start else []
        try:
            await call.output(b"\n")
            for start in range(0, len(earlier), _AT_ONCE):
                await self._send(earlier[start : start + _AT_ONCE], call, wanted)
            del earlier
            while True:
                await self._send(await follower.take(), call)
        finally:
            log.unfollow(follower)

    async def _send(
        self, found: Sequence[Entry | Overflow], call: CallContext, wanted: Callable[[Entry], bool] | None = None
    ) -> None:
        for start in range(0, len(found), _AT_ONCE):
            lines = await in_answer_thread(_encoded, found[start : start + _AT_ONCE], wanted)
            if lines:
                await call.output(lines)

    async def _since_ns(self, params: LogParams) -> int | None:
        """Return the time from which a client asked for entries; None for all.  SnapshotNotFoundError."""
        if params.since is None:
            return params.since_ns
        taken = await self._taken_ns(params.since)
        if taken is None and params.since_ns is None:
            raise SnapshotNotFoundError(params.since)
        return params.since_ns if taken is None else taken

    async def _taken_ns(self, name: str) -> int | None:
        """When the snapshot `name` was taken; None if there is none."""
        infos = () if self._snapshots is None else await self._snapshots.infos()
        return next((info.created_ns for info in infos if info.name == name), None)

    async def label(self, params: LabelParams, call: CallContext) -> Empty:
        pid = params.pid if params.pid is not None else call.client
        if not isinstance(pid, int):
            raise InvalidParamsError("label: the caller is in another pid namespace; give `pid`")
        label = None if params.label is None else " ".join(params.label.split())[:_LABEL_CHARACTERS]
        self._audit.set_label(pid, label or None)
        return Empty()


async def _filter(params: LogParams, since_ns: int | None) -> Callable[[Entry], bool]:
    """Return a function that tells whether a client asked for an entry."""
    scope = await in_thread(PathScope, await tree_paths(params.paths))
    by = params.by

    def wanted(entry: Entry) -> bool:
        return (
            (since_ns is None or entry.until_ns >= since_ns)
            and (not scope or entry.is_within(scope))
            and (by is None or entry.is_by(by))
        )

    return wanted


def _encoded(found: Iterable[Entry | Overflow], wanted: Callable[[Entry], bool] | None) -> bytes:
    records = (
        one.record() if isinstance(one, Entry) else one
        for one in found
        if wanted is None or not isinstance(one, Entry) or wanted(one)
    )
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
