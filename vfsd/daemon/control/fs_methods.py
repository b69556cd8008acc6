"""The `fs.` methods of the control socket: the agent's tools, on the state that the mount shows.

Threading: a method that reads runs in a worker thread, on an immutable tree of the live state, so the mount stays
responsive.  Clients take turns (`vfsd.daemon.control.turns`); long answers are encoded in slices, and between two
slices a cancelled call ends.
A method that writes is one step on the serving loop: the tool's function on the volume, inside
`SnapshotableVolume.changes`.  It is answered after the kernel's caches are invalidated.
If the volume has no immutable trees, the methods work on the mount itself, in a worker thread.

The methods see everything that programs wrote with write(2), but not the dirty pages of shared mappings: that would
take a syncfs(2) of the whole mount for each call (`MountedVolume.write_back`).  A snapshot does see them.  With a
write-back cache each call does take it, because the kernel may hold what write(2) wrote.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Final, TypeVar

import msgspec
import trio
from msgspec.structs import replace

from protocol.adapters.host import HostFilesystem
from protocol.adapters.path_filesystem.filesystem import PathFilesystem
from protocol.adapters.path_filesystem.tree_files import TreeFiles
from protocol.adapters.volume import VolumeFilesystem
from protocol.execution.executor import Command
from protocol.execution.runner import CommandLimits, OutputBuffer, feed_bytes
from protocol.filesystem import Filesystem
from protocol.paths import DEFAULT_LIMITS, CallLimitError, encode, normalise
from protocol.search.walk import CancelCheck, never_cancelled
from protocol.tool_messages import (
    EditFileParams,
    EditFileResult,
    GlobParams,
    GlobResult,
    GrepParams,
    GrepResult,
    RmParams,
    RmResult,
    UnreadablePath,
)
from protocol.tools import ToolContext
from protocol.tools.files import EDIT_FILE, RM, Entry, entries_of, entry_of, write_bytes
from protocol.tools.search import GLOB, GREP
from protocol.types import DEFAULT_READ_LINES, WriteResult
from protocol.volume import snapshotable
from vfsd.daemon.control.call_context import CallContext, Encoded, Handler
from vfsd.daemon.control.parameters import absolute_path, filesystem_path, host_text, working_directory
from vfsd.daemon.control.turns import Slices, Turns
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.wire.fs_messages import (
    FsEntry,
    FsExecParams,
    FsExecResult,
    FsLsParams,
    FsLsResult,
    FsReadParams,
    FsReadResult,
    FsStatParams,
    FsWriteParams,
)
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.options import WorkspaceOptions

COMMANDS_AT_ONCE: Final = 16  # of all clients together; further ones wait
_SHORT_LISTING: Final = 1_000  # entries; a longer listing takes turns with searches
_SLICE: Final = 256  # entries of an answer that are encoded in one step: less than a millisecond
_ANSWER_BYTES: Final = 16 << 20  # of an encoded list; a longer one is "truncated"

P = TypeVar("P", EditFileParams, GlobParams, GrepParams, RmParams)
T = TypeVar("T")


class FsMethods:
    """The `fs.` verbs of one workspace."""

    def __init__(self, mounted: MountedVolume, options: WorkspaceOptions, commands: Commands) -> None:
        self._mounted = mounted
        self._volume = snapshotable(mounted.volume)
        self._options = options
        self._commands = commands
        self._at_once = trio.Semaphore(COMMANDS_AT_ONCE)
        # Separate, so that reading a file does not wait for searches.
        self._quick = Turns(2)
        self._searches = Turns(2)
        self._slices = Slices()

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each method of `fs_messages.FS_METHODS`."""
        methods: dict[str, Handler] = {
            "fs.ls": self._ls,
            "fs.stat": self._stat,
            "fs.read": self._read,
            "fs.write": self._write,
            "fs.edit": self._edit,
            "fs.glob": self._glob,
            "fs.grep": self._grep,
            "fs.rm": self._rm,
            "fs.exec": self._exec,
        }
        return {name: _failing_with_errno(method) for name, method in methods.items()}

    # -- reading: in a thread, on a tree -------------------------------------------------------------
    async def _ls(self, params: FsLsParams, call: CallContext) -> Encoded:
        turns = self._quick if params.limit <= _SHORT_LISTING else self._searches
        return await self._read_in_turn(_list, params, call, turns)

    async def _stat(self, params: FsStatParams, call: CallContext) -> FsEntry:
        return _entry(await self._read_in_turn(_stat, filesystem_path(params.path), call, self._quick))

    async def _read(self, params: FsReadParams, call: CallContext) -> FsReadResult:
        content, page = await self._read_in_turn(_read, params, call, self._quick)
        self._quick.hold(call, len(content))
        await call.output(content)
        return page

    async def _glob(self, params: GlobParams, call: CallContext) -> Encoded:
        return await self._read_in_turn(_find_files, params, call, self._searches)

    async def _grep(self, params: GrepParams, call: CallContext) -> Encoded:
        return await self._read_in_turn(_find_lines, params, call, self._searches)

    async def _read_in_turn(
        self, read: Callable[[Any, ToolContext], T], params: Any, call: CallContext, turns: Turns
    ) -> T:
        """Call `read` in a worker thread when it is the client's turn, on the state of that moment."""
        async with turns.turn(call):
            found = await self._read_tree(functools.partial(read, params), call, turns.threads)
        if isinstance(found, Encoded):
            turns.hold(call, sum(map(len, found)))
        return found

    async def _read_tree(self, read: Callable[[ToolContext], T], call: CallContext, threads: trio.CapacityLimiter) -> T:
        volume = self._volume
        if volume is None:
            return await self._on_mount(read, call.raise_if_cancelled, threads)
        root = self._options.mountpoint

        def run() -> T:
            with self._slices.computing(call.raise_if_cancelled) as keep_going:
                files = PathFilesystem(TreeFiles(tree, root=root, keep_going=keep_going))
                return read(ToolContext(files, tree=lambda: nullcontext(tree), keep_going=keep_going))

        await self._mounted.write_back_cached()
        with volume.tree() as tree:
            # A cancelled call waits for the thread, which uses the tree.
            return await trio.to_thread.run_sync(run, limiter=threads)

    # -- changing: one step on the loop --------------------------------------------------------------
    async def _write(self, params: FsWriteParams, call: CallContext) -> WriteResult:
        content = params.content
        if (content is None) == (params.source is None):
            raise InvalidParamsError("fs.write takes one of: content, source")
        if content is None:
            assert params.source is not None
            content = await trio.to_thread.run_sync(_source, params.source)
        write = functools.partial(
            write_bytes,
            filesystem_path(params.path),
            content,
            mode=params.mode,
            create_parents=params.create_parents,
        )
        written = await self._change(write, call)
        return dataclasses.replace(written, path=_wire(written.path))

    async def _edit(self, params: EditFileParams, call: CallContext) -> EditFileResult:
        edited = await self._change(functools.partial(EDIT_FILE.run, _with_path(params)), call)
        return replace(edited, path=_wire(edited.path))

    async def _rm(self, params: RmParams, call: CallContext) -> RmResult:
        removed = await self._change(functools.partial(RM.run, _with_path(params)), call)
        return replace(removed, path=_wire(removed.path))

    async def _change(self, change: Callable[[ToolContext], T], call: CallContext) -> T:
        """Make `change`, all or nothing, and invalidate the kernel's caches."""
        volume = self._volume
        if volume is None:
            async with self._mounted.change_lock:
                call.commit()
                return await self._on_mount(change, never_cancelled)
        context = ToolContext(filesystem=VolumeFilesystem(volume, root=self._options.mountpoint))
        async with self._mounted.change_lock:
            await self._mounted.write_back_cached()
            call.commit()
            with volume.changes() as made:
                result = change(context)
            await self._mounted.invalidate(made.invalidation)
        return result

    async def _on_mount(
        self, work: Callable[[ToolContext], T], keep_going: CancelCheck, threads: trio.CapacityLimiter | None = None
    ) -> T:
        """Call `work` on the mount in a worker thread, as any program would.

        Each of its system calls is a step of its own, so other programs may make changes in between.
        """
        root, read_only = self._options.mountpoint, self._options.read_only

        def run() -> T:
            return work(ToolContext(HostFilesystem(root, read_only=read_only), keep_going=keep_going))

        with self._mounted.using_mount():
            return await trio.to_thread.run_sync(run, limiter=threads)

    # -- commands --------------------------------------------------------------------------------------
    async def _exec(self, params: FsExecParams, _call: CallContext) -> FsExecResult:
        command = Command(
            list(map(host_text, params.argv)),
            cwd=working_directory(params.cwd),
            env=params.env,
            has_input=bool(params.stdin),
        )
        output = OutputBuffer()
        async with self._at_once:
            done = await self._commands.run(
                command,
                CommandLimits(params.timeout_s, params.output_limit_bytes),
                on_output=output,
                feed=feed_bytes(params.stdin),
            )
        return FsExecResult(
            done.exit_status,
            output.stdout,
            output.stderr,
            done.timed_out,
            done.truncated,
            done.snapshot,
            done.snapshot_error,
        )


# -- functions that run in a worker thread ----------------------------------------------------------------------
def _list(params: FsLsParams, context: ToolContext) -> Encoded:
    path = filesystem_path(params.path)
    entries = (_entry(entry) for entry in entries_of(path, context))
    return _encoded_list(FsLsResult(_wire(normalise(path)), []), "entries", entries, params.limit, context.keep_going)


def _find_files(params: GlobParams, context: ToolContext) -> Encoded:
    found = GLOB.run(_with_path(params), context)
    paths = (_wire(path) for path in found.paths)
    result = replace(found, paths=[], unreadable=_wire_paths(found.unreadable))
    return _encoded_list(result, "paths", paths, params.limit, context.keep_going)


def _find_lines(params: GrepParams, context: ToolContext) -> Encoded:
    found = GREP.run(_with_path(params), context)
    matches = (replace(match, path=_wire(match.path)) for match in found.matches)
    result = replace(found, matches=[], unreadable=_wire_paths(found.unreadable))
    return _encoded_list(result, "matches", matches, params.limit, context.keep_going)


def _wire_paths(unreadable: Iterable[UnreadablePath]) -> tuple[UnreadablePath, ...]:
    return tuple(replace(each, path=_wire(each.path)) for each in unreadable)


def _encoded_list(
    result: FsLsResult | GlobResult | GrepResult,
    key: str,
    values: Iterable[object],
    limit: int,
    keep_going: CancelCheck,
) -> Encoded:
    """Encode `result` with up to `limit` of `values` as its list `key`; it is "truncated" if values remain.

    Encoded in slices, because the encoder holds the interpreter lock: 20,000 entries at once would delay the mount.
    """
    left, pieces, size = iter(values), Encoded(), 0
    while limit > 0 and size < _ANSWER_BYTES:
        keep_going()
        some = list(itertools.islice(left, min(limit, _SLICE)))
        if not some:
            break
        piece = msgspec.json.encode(some)[1:-1]
        pieces += [b",", piece] if pieces else [piece]
        limit -= len(some)
        size += len(piece)
    result = replace(result, truncated=result.truncated or next(left, None) is not None)
    head, _, tail = msgspec.json.encode(result).partition(b'"%s":[]' % key.encode())
    return Encoded([head, b'"%s":[' % key.encode(), *pieces, b"]", tail])


def _stat(path: str, context: ToolContext) -> Entry:
    try:
        return entry_of(context.filesystem.stat(path))
    except FileNotFoundError:
        # It may be a dangling symlink, which exists.
        assert context.tree is not None
        with context.tree() as tree:
            entry = tree.entry(encode(path))
        if not entry.is_symlink:
            raise
        return Entry(path=path, type="symlink", size_bytes=entry.size, mode=stat.S_IMODE(entry.mode), is_symlink=True)


def _read(params: FsReadParams, context: ToolContext) -> tuple[bytes, FsReadResult]:
    try:
        return _read_page(params, context)
    except CallLimitError:
        limit = f"a read is limited to {DEFAULT_LIMITS.read_bytes} bytes"
        raise ValueError(f"{limit}: use `--bytes --offset N --limit N`, or read the file in the mount") from None


def _read_page(params: FsReadParams, context: ToolContext) -> tuple[bytes, FsReadResult]:
    filesystem, path = context.filesystem, filesystem_path(params.path)
    if not params.as_bytes:
        try:
            return _read_lines(filesystem, path, params)
        except ValueError as error:
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            if params.offset or params.limit is not None:
                raise ValueError(f"{path} is not text, so it has no lines: read it as bytes") from None
    page = filesystem.read_bytes(path, offset=params.offset, limit=params.limit)
    result = FsReadResult(_wire(page.path), "bytes", page.offset, page.limit, page.size_bytes, page.truncated)
    return page.content, result


def _read_lines(filesystem: Filesystem, path: str, params: FsReadParams) -> tuple[bytes, FsReadResult]:
    limit = DEFAULT_READ_LINES if params.limit is None else params.limit
    page = filesystem.read(path, offset=params.offset, limit=limit)
    result = FsReadResult(_wire(page.path), "lines", page.offset, page.limit, page.total_lines, page.truncated)
    return page.content.encode(), result


def _source(wire: str) -> bytes:
    """Return the content of the host file to write."""
    path = absolute_path(wire)
    # O_NONBLOCK, because the open of a fifo waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        limit = DEFAULT_LIMITS.write_bytes
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"a write is limited to {limit} bytes: write the rest with --mode append, or in the mount")
    return content


# -- to and from the wire --------------------------------------------------------------------------------
def _failing_with_errno(handler: Handler) -> Handler:
    """Wrap `handler`: report its ValueErrors to the client as EINVAL."""

    @functools.wraps(handler)
    async def answer(params: Any, call: CallContext) -> Any:
        try:
            return await handler(params, call)
        except InvalidParamsError:
            raise
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None

    return answer


def _with_path(params: P) -> P:
    """`params` with their wire path decoded."""
    return replace(params, path=filesystem_path(params.path))


def _wire(path: str) -> str:
    return wire_path(encode(path))


def _entry(entry: Entry) -> FsEntry:
    return FsEntry(
        path=_wire(entry.path),
        type=entry.type,
        size_bytes=entry.size_bytes,
        mode=f"{entry.mode:04o}",
        modified_at=None if entry.modified_at is None else entry.modified_at.isoformat(),
        is_symlink=entry.is_symlink,
    )
