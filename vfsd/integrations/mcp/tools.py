"""The tools that the server offers: those of `protocol.tools`, of snapshots, restore, revert, diff, log; and resources.

The files of the workspace are resources: vfsd://NAME/PATH, percent-encoded.  The list is bounded, because a workspace
may have a million files: it has the first LISTED files by path that the tool `glob` finds.  Every other file can be
read, too.

This module does not import the SDK: `ServedTool` has what the protocol needs, in plain values.
"""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, unquote_to_bytes, urlsplit

import msgspec
from msgspec import Meta

from protocol.tool_messages import GlobParams, Params
from protocol.tools import TOOLS, Tool
from protocol.tools.base import json_schema, parsed, printable
from protocol.types import ChangeCounts
from vfsd.client.connection import ControlError
from vfsd.client.log import LoggedChange
from vfsd.client.requests import OnProgress, RemoteCall
from vfsd.client.results import Change, Diff, Patch, Restored, Reverted, Snapshot
from vfsd.integrations.mcp.session import Session
from vfsd.machine.text import change_line, count_words, counted, link_note, older_note, with_slash
from vfsd.operations.fs import FsReadParams, FsReadResult
from vfsd.operations.workspace import StatusResult, nameless
from vfsd.wire.messages import wire_path

PATCH_BYTES: Final = 256 * 1024  # of a patch, for a model: as much as the shell tool shows of a stream
_PATHS_SHOWN: Final = 100
_COMMAND_CHARACTERS: Final = 100
_Name = Annotated[str, Meta(min_length=1)]
_Paths = Annotated[tuple[str, ...], Meta(description="Only these files and directories; everything if left out.")]


@dataclass(frozen=True, slots=True)
class Hints:
    """A tool's annotations, as the protocol defines them.

    `destructive`: it may remove or replace something.  `idempotent`: a second call with the same arguments changes
    nothing more.  `open_world`: it may reach what is outside of the workspace.
    """

    title: str
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False


@dataclass(frozen=True, slots=True)
class ServedTool:
    """One tool.  `run` takes the parsed parameters and returns the text for the model, or raises OSError, ValueError.

    `executes`: it needs a workspace that runs commands.  `writes`: it needs one that is not read-only.
    """

    name: str
    description: str
    params: type[Params]
    hints: Hints
    run: Callable[[Any, Session, OnProgress], Awaitable[str]]
    executes: bool = False
    writes: bool = False

    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return json_schema(self.params)

    async def call(self, arguments: Mapping[str, Any], session: Session, on_progress: OnProgress) -> str:
        """Parse `arguments` and run the tool.  ValueError says what is wrong with them.

        `on_progress` may be a coroutine function; it is called if the daemon reports progress.
        """
        return await self.run(parsed(arguments, self.params), session, on_progress)


# -- files and commands ----------------------------------------------------------------------------
def _of_protocol(tool: Tool[Any, Any], hints: Hints) -> ServedTool:
    async def run(params: Any, session: Session, _on_progress: OnProgress) -> str:
        return tool.render(await session.run_tool(params))

    writes = not hints.read_only and not tool.executes
    return ServedTool(tool.name, tool.description, tool.params, hints, run, executes=tool.executes, writes=writes)


_HINTS: Final = {
    "ls": Hints("List a directory", read_only=True),
    "read_file": Hints("Read a file", read_only=True),
    "write_file": Hints("Write a file", destructive=True),  # not idempotent: it can append
    "edit_file": Hints("Edit a file", destructive=True),
    "glob": Hints("Find files by name", read_only=True),
    "grep": Hints("Search in files", read_only=True),
    "rm": Hints("Delete", destructive=True, idempotent=True),
    "shell": Hints("Run a shell command", destructive=True, open_world=True),
    "python": Hints("Run a Python program", destructive=True, open_world=True),
}


# -- snapshots -------------------------------------------------------------------------------------
class SnapshotToolParams(Params, frozen=True):
    name: Annotated[_Name | None, Meta(description="A name for it; by default snap-1, snap-2 and so on.")] = None
    tag: Annotated[str | None, Meta(description="A remark that the list of snapshots shows.")] = None


async def _snapshot(params: SnapshotToolParams, session: Session, on_progress: OnProgress) -> str:
    requests = await session.requests()
    taken = await session.send(requests.snapshot(params.name, tag=params.tag, on_progress=on_progress))
    lines = [f"Took snapshot {taken.name} ({_size(taken)})"]
    lines += _some([f"(could not be read: {path})" for path in taken.unreadable])
    lines += _some([f"(changed while it was read: {path})" for path in taken.unstable])
    return "\n".join(lines)


class SnapshotsToolParams(Params, frozen=True):
    limit: Annotated[int, Meta(ge=1, description="At most this many, the newest ones.")] = _PATHS_SHOWN


async def _snapshots(params: SnapshotsToolParams, session: Session, _on_progress: OnProgress) -> str:
    found = await session.send((await session.requests()).snapshots())
    lines = [_snapshot_line(snapshot) for snapshot in found[-params.limit :]]
    if len(found) > len(lines):
        lines.insert(0, f"({len(found) - len(lines)} older ones; ask for more with a larger limit)")
    return "\n".join(lines) or "no snapshots"


def _snapshot_line(snapshot: Snapshot) -> str:
    words = [snapshot.name, snapshot.created_at.isoformat(timespec="seconds"), _size(snapshot)]
    words += [] if snapshot.changes is None else [count_words(snapshot.changes)]
    words += [] if snapshot.kind == "user" else [f"({snapshot.kind})"]
    return "  ".join([*words, *([snapshot.tag] if snapshot.tag else [])])


def _size(snapshot: Snapshot) -> str:
    return f"{snapshot.files} files, {snapshot.directories} directories, {snapshot.size_bytes} bytes"


class RestoreToolParams(Params, frozen=True):
    snapshot: Annotated[_Name | None, Meta(description="The snapshot to restore.")] = None
    undo: Annotated[
        bool,
        Meta(description="Undo the last restore, import, merge, adoption, apply or discard; needs no snapshot."),
    ] = False
    paths: _Paths = ()
    dry_run: Annotated[bool, Meta(description="Only say what would change.")] = False
    touch: Annotated[
        bool, Meta(description="Give files whose content changes the present mtime, so that build tools notice them.")
    ] = False


async def _restore(params: RestoreToolParams, session: Session, on_progress: OnProgress) -> str:
    requests = await session.requests()
    if (params.snapshot is None) != params.undo:
        raise ValueError("give either `snapshot`, as the tool snapshots lists them, or `undo`")
    if params.snapshot is None:
        call = requests.undo(params.paths, dry_run=params.dry_run, touch=params.touch, on_progress=on_progress)
    else:
        call = requests.restore(
            params.snapshot, params.paths, dry_run=params.dry_run, touch=params.touch, on_progress=on_progress
        )
    restored = await session.send(call)
    return "\n".join(_restored_lines(params, restored))


def _restored_lines(params: RestoreToolParams, restored: Restored) -> list[str]:
    if not restored.counts.total and not restored.problems:
        return [f"Nothing to change: everything is as in {restored.source}"]
    done = f"undid {restored.step}" if params.undo and restored.step else f"restored {restored.source}"
    lines = [f"Would have {done}:" if params.dry_run else f"{done.capitalize()}:", count_words(restored.counts)]
    lines += _change_lines(restored.changes, restored.counts, _PATHS_SHOWN)
    lines += _some([f"(could not be restored: {path}: {reason})" for path, reason in restored.problems.items()])
    if restored.older:
        lines.append(f"({older_note(restored.older, 'undo, and the same with `touch`')})")
    if restored.safety_snapshot is not None:
        way = "restore it by this name" if params.undo else "undo brings it back"
        lines.append(f"The state before is kept as {restored.safety_snapshot}; {way}.")
    return lines


class RevertToolParams(Params, frozen=True):
    since: Annotated[_Name | None, Meta(description="The snapshot before the changes.")] = None
    until: Annotated[_Name | None, Meta(description="The snapshot after them; by default the present state.")] = None
    tool_call: Annotated[str | None, Meta(description="Instead: the id of a tool call that the hooks kept.")] = None
    session: Annotated[str | None, Meta(description="Instead: the id of a session, for all its calls.")] = None
    paths: _Paths = ()
    conflicts: Annotated[
        Literal["fail", "ours", "theirs", "markers"],
        Meta(
            description="For what was changed again since: change nothing, keep the present version, take the older"
            " one, or write both with conflict markers."
        ),
    ] = "fail"
    dry_run: Annotated[bool, Meta(description="Only say what would change.")] = False


async def _revert(params: RevertToolParams, session: Session, on_progress: OnProgress) -> str:
    values = msgspec.structs.asdict(params)
    found: Reverted = await session.send((await session.requests()).revert(**values, on_progress=on_progress))
    lines = [f"({each})" for each in found.warnings]
    if found.conflicts and not found.applied and not params.dry_run:
        lines.append(f"Nothing was changed: {counted(len(found.conflicts), 'conflict')}")
    elif not found.counts.total:
        lines.append(f"Nothing to change: {found.reverted} has no changes that are still here")
    else:
        lines += [
            f"{'Would have reverted' if params.dry_run else 'Reverted'} {found.reverted}:",
            count_words(found.counts),
        ]
        lines += _change_lines(found.changes, found.counts, _PATHS_SHOWN)
    lines += _some([f"(conflict: {path}: {each.reason}, {each.detail})" for path, each in found.conflicts.items()])
    lines += [f"({path}: {each.detail})" for path, each in found.repositories.items()]
    if found.older:
        lines.append(f"({older_note(found.older, 'touch(1) what has to be built')})")
    if found.safety_snapshot is not None:
        lines.append(f"The state before is kept as {found.safety_snapshot}; undo brings it back.")
    return "\n".join(lines)


# -- diff ------------------------------------------------------------------------------------------
class DiffToolParams(Params, frozen=True):
    since: Annotated[_Name | None, Meta(description="A snapshot; by default the newest one.")] = None
    until: Annotated[_Name | None, Meta(description="A later snapshot; by default the present state.")] = None
    paths: _Paths = ()
    patch: Annotated[bool, Meta(description="Give the changed lines, as `git diff` does.")] = False
    limit: Annotated[int, Meta(ge=1, description="List at most this many paths.")] = 1_000


async def _diff(params: DiffToolParams, session: Session, _on_progress: OnProgress) -> str:
    requests = await session.requests()
    if params.patch:
        return _patch_text(await session.send(requests.patch(params.since, params.until, params.paths)))
    found: Diff = await session.send(requests.diff(params.since, params.until, params.paths))
    head = f"From {found.a} to {found.b or 'the present state'}: {count_words(found.counts)}"
    return "\n".join([head, *_change_lines(found.changes, found.counts, params.limit)])


def _patch_text(patch: Patch) -> str:
    text = patch[:PATCH_BYTES].decode("utf-8", "replace")
    if len(patch) > PATCH_BYTES:
        text += f"\n(the first {PATCH_BYTES} of {len(patch)} bytes; ask for some paths only)"
    return text or "no changes"


def _change_lines(changes: tuple[Change, ...], counts: ChangeCounts, limit: int) -> list[str]:
    lines = [
        change_line(change.change, with_slash(change.path, change.type))
        + link_note(change.linked_to, change.unlinked_from)
        for change in changes[:limit]
    ]
    if counts.total > len(lines):
        lines.append(f"(the first {len(lines)} of {counts.total} paths)")
    return lines


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _PATHS_SHOWN
    return [*lines[:_PATHS_SHOWN], *([f"(and {more} more)"] if more > 0 else [])]


# -- the log ---------------------------------------------------------------------------------------
class LogToolParams(Params, frozen=True):
    paths: _Paths = ()
    since: Annotated[_Name | None, Meta(description="Only changes since this snapshot.")] = None
    by: Annotated[
        _Name | None, Meta(description="Only changes by this process id or program, and by what it started.")
    ] = None
    limit: Annotated[int, Meta(ge=1, description="At most this many, the newest ones.")] = _PATHS_SHOWN


async def _log(params: LogToolParams, session: Session, _on_progress: OnProgress) -> str:
    requests = await session.requests()
    found = await session.send(requests.log(*params.paths, since=params.since, by=params.by))
    lines = [_log_line(change) for change in found[-params.limit :]]
    if len(found) > len(lines):
        lines.insert(0, f"({len(found) - len(lines)} older ones; ask for more with a larger limit)")
    return "\n".join(lines) or "no changes"


def _log_line(change: LoggedChange) -> str:
    if change.path is not None:
        place = change.path or "."
    else:
        place = f"{change.count} paths" if change.paths else nameless(change.attempt)
    place += f" -> {change.to}" if change.to is not None else ""
    process = change.process
    command = "(the kernel)" if process is None else " ".join(process.command) or process.name
    if len(command) > _COMMAND_CHARACTERS:
        command = command[:_COMMAND_CHARACTERS] + "..."
    kind = change.change if change.attempt is None else f"denied {change.attempt}"
    words = [change.time.isoformat(timespec="seconds"), kind, place]
    words += [] if change.bytes_written is None else [f"{change.bytes_written} bytes"]
    words += [f"by {'' if process is None else f'{process.pid} '}{command}"]
    return printable("  ".join([*words, *([f"({change.label})"] if change.label else [])]))


# -- the table -------------------------------------------------------------------------------------
_WORKSPACE_TOOLS: Final = (
    ServedTool(
        "snapshot",
        "Take a snapshot of the whole workspace, in constant time, before a step that you may want to undo.",
        SnapshotToolParams,
        Hints("Take a snapshot"),
        _snapshot,
    ),
    ServedTool(
        "snapshots",
        "List the snapshots, oldest first: name, time, size, changes since the one before, remark.",
        SnapshotsToolParams,
        Hints("List snapshots", read_only=True),
        _snapshots,
    ),
    ServedTool(
        "restore",
        "Make the workspace, or some paths, equal to a snapshot, whatever changed the files since. The state before "
        "is kept, and undo brings it back.",
        RestoreToolParams,
        Hints("Restore a snapshot", destructive=True),
        _restore,
        writes=True,
    ),
    ServedTool(
        "revert",
        "Undo what changed between two snapshots, or in one tool call or session, and keep everything later. The state "
        "before is kept, and undo of the tool restore brings it back.",
        RevertToolParams,
        Hints("Revert changes", destructive=True),
        _revert,
        writes=True,
    ),
    ServedTool(
        "diff",
        "List the paths that changed since a snapshot (A added, M modified, D removed, T another type, m attributes "
        "only), or give them as a patch.",
        DiffToolParams,
        Hints("Show changes", read_only=True),
        _diff,
    ),
    ServedTool(
        "log",
        "List which program changed what, and when, the oldest first: time, change, path, process, what it belongs to.",
        LogToolParams,
        Hints("Show who changed what", read_only=True),
        _log,
    ),
)

SERVED_TOOLS: Final[Mapping[str, ServedTool]] = {
    tool.name: tool
    for tool in (*(_of_protocol(TOOLS[name], hints) for name, hints in _HINTS.items()), *_WORKSPACE_TOOLS)
}


def served_for(status: StatusResult | None) -> list[ServedTool]:
    """Return the tools that work in a workspace of this `status`; all tools if it is unknown (None)."""
    return [
        tool
        for tool in SERVED_TOOLS.values()
        if status is None
        or ((status.commands is not None or not tool.executes) and not (status.read_only and tool.writes))
    ]


def describe_error(error: Exception) -> str:
    """Describe a failure in a text for the model, which has the path and not Python's "[Errno 2]"."""
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, ControlError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return printable(text or type(error).__name__)


# -- resources -------------------------------------------------------------------------------------
SCHEME: Final = "vfsd"
LISTED: Final = 500
READ_BYTES: Final = 1024 * 1024  # of one resource


@dataclass(frozen=True, slots=True)
class File:
    """A file in the list."""

    uri: str
    name: str
    mime_type: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file, and its type if its name tells it."""

    content: bytes
    mime_type: str | None

    @property
    def text(self) -> str | None:
        """The content as text; None if it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            return None


async def resource_template(session: Session) -> str:
    """Return the URI template of all files (RFC 6570)."""
    return f"{_root((await session.record()).name)}{{+path}}"


async def list_resources(session: Session) -> list[File]:
    """Return the first LISTED files.  Hidden directories, node_modules and the like are left out, as `glob` does."""
    found = await session.run_tool(GlobParams(pattern="*", limit=LISTED))
    root = _root((await session.record()).name)
    return [
        File(root + quote(os.fsencode(path)), printable(path), mimetypes.guess_type(path)[0]) for path in found.paths
    ]


async def read_resource(session: Session, uri: str) -> Content:
    """Return the content of the file at `uri`.

    FileNotFoundError and other OSErrors as for `fs.read`; ValueError for a URI of something else, and for a file that
    is longer than READ_BYTES.
    """
    path = file_path(uri, (await session.record()).name)
    pieces: list[bytes] = []
    # One byte more than is returned, so that a file that grows meanwhile is found out.
    message = FsReadParams(path=wire_path(path), limit=READ_BYTES + 1, as_bytes=True)
    page: FsReadResult = await session.send(RemoteCall("fs.read", message, on_output=pieces.append))
    content = b"".join(pieces)
    if len(content) > READ_BYTES:
        limit = f"a resource has at most {READ_BYTES} bytes"
        raise ValueError(f"{uri} has {page.total} bytes, and {limit}: read it in pages with the tool read_file")
    return Content(content, mimetypes.guess_type(os.fsdecode(path))[0])


def file_path(uri: str, workspace: str) -> bytes:
    """Return the path that `uri` names in `workspace`, relative to its root.  ValueError for another URI."""
    try:
        parts = urlsplit(uri)
        path = unquote_to_bytes(parts.path).lstrip(b"/")
        # The case of the name does not matter: URI libraries write the host in lower case.
        is_ours = parts.scheme == SCHEME and parts.netloc.casefold() == workspace.casefold()
    except ValueError:
        is_ours, path = False, b""
    if not is_ours or not path or parts.query or parts.fragment or b"\0" in path:
        raise ValueError(f"{printable(uri)} is not a file of this server: its resources are {_root(workspace)}PATH")
    return path


def _root(workspace: str) -> str:
    return f"{SCHEME}://{workspace}/"
