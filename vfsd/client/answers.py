"""Convert the daemon's answers to the values of `vfsd.client.results`.

A value has the fields of the message that it is made from, with Python's types: paths as `str`, times as aware
datetimes, lists of (path, reason) records as mappings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

import msgspec

from vfsd.client import results
from vfsd.operations.declaration import ChangeRecord, ExpiredRecord, RepositoryRecord
from vfsd.operations.merge import ConflictRecord
from vfsd.operations.snapshots import DiffResult, ProblemRecord
from vfsd.operations.workspace import ForkResult, StatusResult
from vfsd.wire.handshake import Ready
from vfsd.wire.messages import from_wire_path

_PIECE_BYTES: Final = 64 * 1024
_change_records = msgspec.json.Decoder(ChangeRecord)


def _unchanged(value: Any) -> Any:
    return value


def _path(wire: str) -> str:
    if wire.isascii() and "\\" not in wire and "\0" not in wire:
        return wire  # a conversion of 10,000 changes takes a quarter of the time
    return os.fsdecode(from_wire_path(wire))


def _paths(wire: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_path, wire))


def _changes(records: Iterable[ChangeRecord]) -> tuple[results.Change, ...]:
    return tuple(
        results.Change(
            _path(record.path),
            record.change,
            record.type,
            record.old_size,
            record.new_size,
            None if record.linked_to is None else _path(record.linked_to),
            None if record.unlinked_from is None else _path(record.unlinked_from),
        )
        for record in records
    )


def _reasons(records: Iterable[ProblemRecord]) -> dict[str, str]:
    return {_path(record.path): record.reason for record in records}


def _expired(records: Iterable[ExpiredRecord]) -> dict[str, datetime]:
    return {record.name: datetime.fromisoformat(record.created_at) for record in records}


def _repositories(records: Iterable[RepositoryRecord]) -> dict[str, results.Repository]:
    return {_path(each.path): results.Repository(each.detail, each.refs, tuple(each.commands)) for each in records}


# Field name -> conversion.  Other fields are taken as they are.
_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "path": _path,
    "mountpoint": _path,
    "directory": _path,
    "unstable": _paths,
    "protect": _paths,
    "hide": _paths,
    "open_files": _paths,
    "unreadable": _paths,
    "holders": tuple,
    "created_at": datetime.fromisoformat,
    "changes": _changes,
    "problems": _reasons,
    "omitted": _reasons,
    "skipped": _reasons,
    "conflicts": _reasons,
    "expired": _expired,
    "repositories": _repositories,
}


def _convert(kind: type[Any], **others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a `kind` of a message; `others` are conversions of its own."""
    conversions = {**_CONVERSIONS, **others}
    names = [(each.name, conversions.get(each.name, _unchanged)) for each in fields(kind)]

    def convert(answer: Any) -> Any:
        return kind(**{name: to(getattr(answer, name)) for name, to in names})

    return convert


def _records(output: bytes) -> Iterator[ChangeRecord]:
    """Decode the records in `output` piece by piece: other threads, such as an event loop, run in between."""
    start = 0
    while start < len(output):
        end = output.find(b"\n", start + _PIECE_BYTES) + 1 or len(output)
        yield from _change_records.decode_lines(memoryview(output)[start:end])
        start = end


def _diff(answer: DiffResult, output: bytes) -> results.Diff:
    changes = _changes(_records(output)) if output else _changes(answer.changes)
    return results.Diff(
        a=answer.a,
        b=answer.b,
        counts=answer.counts,
        changes=changes,
        truncated=answer.truncated,
        problems=_reasons(answer.problems),
    )


def _patch(answer: DiffResult, output: bytes) -> results.Patch:
    problems, omitted = _reasons(answer.problems), _reasons(answer.omitted)
    return results.Patch(output, counts=answer.counts, problems=problems, omitted=omitted)


def _merged_conflicts(records: Iterable[ConflictRecord]) -> dict[str, results.Conflict]:
    return {
        _path(each.path): results.Conflict(
            each.reason, each.detail, None if each.kept_as is None else _path(each.kept_as)
        )
        for each in records
    }


def _status(answer: StatusResult) -> results.Status:
    values = msgspec.structs.asdict(answer)
    values |= {"mountpoint": _path(answer.mountpoint), "started_at": datetime.fromisoformat(answer.started_at)}
    return results.Status(**values)


def _ready(answer: ForkResult) -> Ready:
    mountpoint, socket = _path(answer.mountpoint), _path(answer.socket)
    return Ready(answer.name, mountpoint, socket, answer.pid, answer.engine, warnings=tuple(answer.warnings))


CONVERTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "Snapshot": _convert(results.Snapshot, changes=_unchanged),
    "Merged": _convert(results.Merged, conflicts=_merged_conflicts),
    "Diff": _diff,
    "Patch": _patch,
    "Status": _status,
    "Ready": _ready,
    **{
        kind.__name__: _convert(kind)
        for kind in (
            results.Applied,
            results.Exported,
            results.Imported,
            results.Policy,
            results.Restored,
            results.Unmounted,
            results.Upgraded,
        )
    },
}
