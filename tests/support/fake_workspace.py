"""A daemon without a mount: the real control socket, over a state that is a dict of paths to contents.

It runs in a thread of the test's process and leaves a record as a daemon does, so the command line and the
Python API find it as they find a real one.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import trio

from protocol.errors import ArchiveError, SnapshotExistsError, SnapshotNotFoundError
from protocol.linux.syscalls import mount_of
from protocol.types import ChangeCounts
from vfsd.client.workspace import WorkspaceBase
from vfsd.daemon.control.connection import ControlServer
from vfsd.machine.runtime import (
    WorkspaceRecord,
    ensure_socket_dir,
    process_start_ticks,
    remove_record,
    socket_path,
    write_record,
)
from vfsd.operations import snapshots as sm
from vfsd.operations.declaration import ChangeRecord, Empty
from vfsd.operations.workspace import LogEntry, LogResult, ProcessRecord, StatusResult, UnmountParams, UnmountResult
from vfsd.wire import messages as m

State = dict[bytes, bytes]
W = TypeVar("W", bound=WorkspaceBase)
CREATED_AT = "2026-01-02T03:04:05Z"


def on_its_directory(workspace: W) -> W:
    """Let `workspace.filesystem` work on the directory where nothing is mounted, as if it were the mount."""
    directory = os.open(workspace.path, os.O_PATH)
    workspace._mount_id = mount_of(directory)
    os.close(directory)
    return workspace


def changes_between(old: State, new: State) -> list[ChangeRecord]:
    found = []
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path), new.get(path)
        if before != after:
            kind = "added" if before is None else "removed" if after is None else "modified"
            sizes = (None if side is None else len(side) for side in (before, after))
            found.append(ChangeRecord(m.wire_path(path), kind, "file", *sizes))
    return found


def count(changes: list[ChangeRecord]) -> ChangeCounts:
    kinds = [change.change for change in changes]
    added, removed = kinds.count("added"), kinds.count("removed")
    return ChangeCounts(added, len(kinds) - added - removed, removed)


async def streamed(params: Any, changes: list[ChangeRecord], call: Any) -> list[ChangeRecord]:
    """Send `changes` ahead of the answer, in odd pieces, if that is asked for; what is left for the answer."""
    if not params.stream:
        return changes
    lines = b"".join(msgspec.json.encode(change) + b"\n" for change in changes)
    for start in range(0, len(lines), 1_000):
        await call.output(lines[start : start + 1_000])
    return []


@dataclass
class FakeDaemon:
    """Use as a context manager.  `live` is what the workspace holds, `requests` what was asked, in order."""

    name: str
    mountpoint: str
    live: State = field(default_factory=dict)
    snapshots: dict[str, State] = field(default_factory=dict)
    tags: dict[str, str | None] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    patch: list[bytes] = field(default_factory=lambda: [b"--- a/x\n", b"+++ b/x\n"])
    holders: list[str] = field(default_factory=list)
    archives: dict[str, State] = field(default_factory=dict)
    forced_changes: list[ChangeRecord] | None = None  # what diff answers instead, where set
    problems: list[sm.ProblemRecord] = field(default_factory=list)  # of restores and patches
    diffed: threading.Event = field(default_factory=threading.Event)  # a diff has been sent
    omitted: list[sm.ProblemRecord] = field(default_factory=list)  # of patches
    unreadable: list[str] = field(default_factory=list)  # in snapshots
    silent: bool = False  # takes requests and never answers
    undo_to: str | None = None
    authors: list[tuple[str, int]] | None = field(default_factory=list)  # of log entries, all now; None: no log
    log_dropped: int = 0
    drop_before_diff: str | None = None  # a snapshot that another client drops first
    unmounted: bool = False
    asked: threading.Event = field(default_factory=threading.Event)  # set by the first request

    @property
    def socket(self) -> str:
        return socket_path(self.name)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process that stands for the daemon's is gone."""
        return self._process.poll() is not None

    @property
    def record(self) -> WorkspaceRecord:
        ticks = process_start_ticks(self.pid)
        assert ticks is not None
        return WorkspaceRecord(
            name=self.name,
            mountpoint=self.mountpoint,
            pid=self.pid,
            pid_start_ticks=ticks,
            backend="memory",
            started_at=CREATED_AT,
            version="0.1.0",
            socket=self.socket,
        )

    def __enter__(self) -> Self:
        # What callers take for the daemon's process, and may wait for; it ends when its input does.
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        ensure_socket_dir()
        started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve, started), daemon=True)
        self._thread.start()
        assert started.wait(10), "the fake daemon did not start"
        self._record = self.record
        write_record(self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        remove_record(self._record)
        self._end()
        self._process.wait(10)
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _serve(self, started: threading.Event) -> None:
        methods = {name.removeprefix("do_"): self._recorded(name) for name in dir(self) if name.startswith("do_")}
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(self.socket, methods).serve)
                started.set()

    def _recorded(self, name: str) -> Any:
        method = name.removeprefix("do_")

        async def handle(params: Any, call: Any) -> Any:
            self.requests.append((method, params))
            self.asked.set()
            if self.silent:
                await trio.sleep_forever()
            return await getattr(self, name)(params, call)

        return handle

    # -- the methods ------------------------------------------------------------------------------
    def _record_of(self, name: str) -> sm.SnapshotRecord:
        state = self.snapshots[name]
        return sm.SnapshotRecord(
            name=name,
            created_at=CREATED_AT,
            files=len(state),
            directories=1,
            size_bytes=sum(map(len, state.values())),
            kind="safety" if name.startswith("before-") else "user",
            tag=self.tags.get(name),
        )

    def _state(self, name: str | None) -> State:
        if name is None:
            return self.live
        if name not in self.snapshots:
            raise SnapshotNotFoundError(name)
        return self.snapshots[name]

    async def do_ping(self, params: Any, call: Any) -> Empty:
        return Empty()

    async def do_status(self, params: Any, call: Any) -> StatusResult:
        size = sum(map(len, self.live.values()))
        return StatusResult(
            name=self.name,
            mountpoint=m.wire_path(os.fsencode(self.mountpoint)),
            backend="memory",
            engine="pyfuse3",
            pid=self.pid,
            version="0.1.0",
            started_at=CREATED_AT,
            read_only=False,
            files=len(self.live),
            directories=1,
            size_bytes=size,
            used_bytes=size,
            max_bytes=None,
            max_inodes=None,
            snapshots=len(self.snapshots),
            requests=7,
        )

    async def do_snapshot(self, params: sm.SnapshotParams, call: Any) -> sm.SnapshotRecord:
        name = params.name or f"snap-{len(self.snapshots) + 1}"
        if name in self.snapshots:
            raise SnapshotExistsError(name)
        self.snapshots[name] = dict(self.live)
        self.tags[name] = params.tag
        record = self._record_of(name)
        record.unreadable = self.unreadable
        return record

    async def do_snapshots(self, params: sm.SnapshotsParams, call: Any) -> sm.SnapshotsResult:
        records, before = [], State()
        for name, state in self.snapshots.items():
            record = self._record_of(name)
            if params.changes:
                record.changes = count(changes_between(before, state))
            records.append(record)
            before = state
        return sm.SnapshotsResult(records)

    async def do_log(self, params: Any, call: Any) -> LogResult:
        if self.authors is None:
            raise OSError(errno.EOPNOTSUPP, "the workspace was mounted with --no-audit")
        for name, count in self.authors:
            process = ProcessRecord(1, name)
            for number in range(count):
                entry = LogEntry(number, "2026-06-02T03:04:05Z", "write", "x", 1, process=process)
                await call.output(msgspec.json.encode(entry) + b"\n")
        return LogResult(sum(count for _, count in self.authors), self.log_dropped, CREATED_AT)

    async def do_drop(self, params: sm.DropParams, call: Any) -> sm.DropResult:
        names = list(dict.fromkeys([params.name, *params.also]))
        for name in names:
            self._state(name)
        for name in names:
            del self.snapshots[name]
        return sm.DropResult(names)

    async def do_restore(self, params: sm.RestoreParams, call: Any) -> sm.RestoreResult:
        source = params.source
        name = self.undo_to if isinstance(source, sm.Undo) else getattr(source, "name", None)
        if isinstance(source, sm.FromArchive):
            name, target = source.path, self._archive(source.path)
        elif name is None:
            raise FileNotFoundError(errno.ENOENT, "there is no restore to undo")
        else:
            target = self._state(name)
        target = self._limited(target, params.paths)
        changes = changes_between(self.live, target)
        safety = None
        counts = count(changes)
        if params.dry_run:
            changes = await streamed(params, changes, call)
        else:
            safety = self._keep_state()
            self.live = dict(target)
        return sm.RestoreResult(name, safety, counts, changes, problems=self.problems)

    def _limited(self, target: State, wire_paths: list[str]) -> State:
        """The live state with `wire_paths`, and what is below, as in `target`."""
        if not wire_paths:
            return target

        def meant(path: bytes) -> bool:
            wanted = [m.from_wire_path(text) for text in wire_paths]
            return any(path == one or path.startswith(one + b"/") for one in wanted)

        kept = {path: content for path, content in self.live.items() if not meant(path)}
        return kept | {path: content for path, content in target.items() if meant(path)}

    def _keep_state(self) -> str:
        name = f"before-{len(self.snapshots) + 1}"
        self.snapshots[name] = dict(self.live)
        self.undo_to = name
        return name

    async def do_diff(self, params: sm.DiffParams, call: Any) -> sm.DiffResult:
        self.snapshots.pop(self.drop_before_diff or "", None)
        a = params.a or next(reversed(self.snapshots), None)
        if a is None:
            raise FileNotFoundError(errno.ENOENT, "there is no snapshot to compare with")
        old, new = self._state(a), self._state(params.b)
        if params.mode == "patch":
            for piece in self.patch:
                await call.output(piece)
        changes = changes_between(old, self._limited_between(old, new, params.paths))
        if self.forced_changes is not None:
            changes = self.forced_changes
        listed = [] if params.mode == "patch" else await streamed(params, changes, call)
        self.diffed.set()
        return sm.DiffResult(a, params.b, count(changes), listed, problems=self.problems, omitted=self.omitted)

    def _limited_between(self, old: State, new: State, wire_paths: list[str]) -> State:
        live, self.live = self.live, old
        try:
            return self._limited(new, wire_paths)
        finally:
            self.live = live

    def _archive(self, wire: str) -> State:
        path = os.fsdecode(m.from_wire_path(wire))
        if path not in self.archives:
            raise ArchiveError("not a ZIP archive", path)
        return self.archives[path]

    async def do_export(self, params: sm.ExportParams, call: Any) -> sm.ExportResult:
        state = self._state(params.snapshot)
        path = os.fsdecode(m.from_wire_path(params.path))
        if path in self.archives and not params.overwrite:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        call.progress_nowait(1, 2, "files")
        await trio.lowlevel.checkpoint()
        self.archives[path] = dict(state)
        total = sum(map(len, state.values()))
        return sm.ExportResult(params.path, len(state), total, total + 100)

    async def do_import(self, params: sm.ImportParams, call: Any) -> sm.ImportResult:
        content = self._archive(params.path)
        target = self.live | content
        counts = count(changes_between(self.live, target))
        safety = self._keep_state()
        self.live = target
        return sm.ImportResult(params.path, len(content), sum(map(len, content.values())), safety, counts)

    async def do_unmount(self, params: UnmountParams, call: Any) -> UnmountResult:
        if self.holders and not params.lazy:
            raise OSError(errno.EBUSY, f"busy: held by {', '.join(self.holders)}", self.mountpoint)
        self.unmounted = True
        call.after_answer(self._end)
        return UnmountResult(m.wire_path(os.fsencode(self.mountpoint)), params.lazy, self.holders)
