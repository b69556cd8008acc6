"""The methods of the control socket, by name; and those that concern the workspace as a whole.

Threading: handlers run on the serving loop.  Long work (diff, export, reading an archive) runs in a worker thread on an
immutable tree; `vfsd.daemon.snapshots` makes the changes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio
from msgspec.structs import asdict

import vfsd
from protocol.volume import extended
from protocol.volume_durability import journaled
from protocol.volume_extensions import VolumeUsage, checkable, snapshotable
from vfsd.daemon.audit.service import Audit, working_for
from vfsd.daemon.control.calls import CallContext, Handler, handlers_of
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.forks.forks import Forks, Origin
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.machine.directories import disk_use
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.declaration import Empty, Operation
from vfsd.operations.workspace import StatusResult
from vfsd.wire.messages import wire_path
from vfsd.wire.options import WorkspaceOptions

if TYPE_CHECKING:
    from vfsd.daemon.control.handlers.workspace import WorkspaceMethods
    from vfsd.daemon.daemon import Daemon
    from vfsd.daemon.keeper.keeping import Kept

# The errors of a mount whose container is not connected, or whose root directory could not be examined.
_LOST: Final = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN})


class Start(NamedTuple):
    """When (ISO 8601 in UTC) and by what the daemon was started, what it was forked from, and its keeper."""

    at: str
    by: str
    origin: Origin | None
    kept: Kept | None


class Methods:
    """All methods of one workspace.  `snapshots` is None if its backend has none.

    `wait_imported` returns when the modules that only these methods need are imported.  Until then the serving loop
    imports none of them itself: another thread does.
    """

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        start: Start,
        commands: Commands,
        forks: Forks,
        wait_imported: Callable[[], Awaitable[None]],
        audit: Audit,
        daemon: Daemon,
    ) -> None:
        self._daemon = daemon
        self._mounted = mounted
        self._audit = audit
        self._commands = commands
        self._snapshots = snapshots
        self._options = options
        self._start = start
        self._forks = forks
        self._wait_imported = wait_imported
        self._own: Final = handlers_of(self)
        self._groups: WorkspaceMethods | None = None

    @property
    def unmounts_to_answer(self) -> int:
        """Unmounts that were made and whose answers are not sent yet."""
        return 0 if self._groups is None else self._groups.unmounts_to_answer

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each operation."""
        return {name: functools.partial(self._answer, operation) for name, operation in OPERATIONS.items()}

    async def _answer(self, operation: Operation, params: Any, call: CallContext) -> Any:
        """Run the handler of `operation`, attribute what it changes to the client, and wait for the disk."""
        log = self._audit.log if operation.audited else None
        try:
            with contextlib.nullcontext() if log is None else working_for(log, operation.name, call.client):
                if operation.is_of_daemon:
                    return await self._own[operation.name](params, call)
                groups = self._groups or await self._import_groups()
                result = await groups.handlers[operation.name](params, call)
                await self._sync()
        except OSError as error:
            container = self._mounted.container
            if container is None or container.is_connected or not _is_of_mount(error, self._mounted.mountpoint):
                raise
            # Not the mount's bare error, but what to do.
            raise OSError(errno.EIO, await container.advice()) from error
        if self._start.kept is not None:
            self._start.kept.answered()
        return result

    async def _sync(self) -> None:
        """Return when everything that was recorded until now is on disk: `--fsync always`.

        The serving loop serves other requests meanwhile.
        """
        volume = self._mounted.volume
        # Without a journal if an unmount, or an upgrade, has ended it.
        wait = extended(volume).unsynced(of_request=False) if volume.capabilities.journal else None
        if wait is not None:
            try:
                await wait()
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise OSError(error.errno, f"it was done, but the journal could not be synced ({reason})") from error

    async def _import_groups(self) -> WorkspaceMethods:
        await self._wait_imported()
        # Start-up: the mount answers before this is imported.
        from vfsd.daemon.control.handlers.workspace import WorkspaceMethods  # noqa: PLC0415

        if self._groups is None:  # several calls may have waited
            self._groups = WorkspaceMethods(
                self._mounted, self._snapshots, self._options, self._commands, self._forks, self._audit, self._daemon
            )
        return self._groups

    async def ping(self, _params: Empty, _call: CallContext) -> Empty:
        return Empty()

    async def check(self, _params: Empty, _call: CallContext) -> Empty:
        volume = checkable(self._mounted.volume)
        if volume is not None:
            volume.check_invariants()
        if self._audit.log is not None:
            self._audit.log.check_invariants()
        return Empty()

    @property
    def lost_keeper(self) -> tuple[str, str] | None:
        """Why the keeper could not restart this daemon any more, and what to do; None if it could."""
        container = self._mounted.container
        if self._start.kept is None or container is None or not container.was_restarted:
            return None
        kind, is_agent = self._options.backend.kind, container.transport_name == "agent"
        ended = "the command ended and runs again" if kind == "exec" else "the container was restarted"
        if kind != "exec" and is_agent:
            ended += ", or the helper in it"
        again = "unmount and mount again when no program uses it"
        if kind == "image":  # whose container the unmount removes
            again = "take a snapshot, unmount and mount again, and restore it"
        if is_agent:
            held = "files that programs still use were removed or replaced meanwhile"
            return f"{ended}, and {held}", f"close them, or {again}"
        return ended, again

    @property
    def _keeper(self) -> str | None:
        container, lost = self._mounted.container, self.lost_keeper
        if lost is not None:
            is_for_now = container is not None and container.transport_name == "agent"  # files may be closed
            return f"none {'now' if is_for_now else 'any more'}: {'; '.join(lost)}"
        if self._start.kept is not None:
            return self._start.kept.state
        has_none = self._options.backend.kind in {"container", "image", "exec"} and self._options.keeper
        return "none for this engine: if the daemon dies, mount the workspace again" if has_none else None

    async def status(self, _params: Empty, _call: CallContext) -> StatusResult:
        options, engine, snapshots = self._options, self._mounted.engine, self._snapshots
        volume, container = snapshotable(self._mounted.volume), self._mounted.container
        remote = container if options.backend.kind == "exec" else None
        # Other volumes would have to walk the whole tree.
        usage = VolumeUsage() if volume is None else volume.usage()
        origin = self._start.origin
        journaling = journaled(self._mounted.volume)
        journal = None if journaling is None else journaling.journal_status()
        memory = await trio.to_thread.run_sync(_memory) if self._forks.shares_memory else {}
        on_disk = await trio.to_thread.run_sync(disk_use)
        return StatusResult(
            name=options.name,
            mountpoint=wire_path(os.fsencode(options.mountpoint)),
            backend=wire_path(os.fsencode(str(options.backend))),
            engine=engine.name,
            pid=os.getpid(),
            version=vfsd.__version__,
            started_at=self._start.at,
            started_by=self._start.by,
            keeper=self._keeper,
            forked_from=None if origin is None else origin.source,
            base=None if origin is None else origin.base,
            frozen=self._daemon.backend.open_directory is not None,
            shared_memory=memory.get("Shared"),
            private_memory=memory.get("Private"),
            read_only=options.read_only,
            snapshots=None if snapshots is None else len(await snapshots.infos()),
            requests=engine.requests,
            cache=self._mounted.cache,
            engine_reason=engine.fallback_reason,
            wakeups=engine.wakeups,
            journal=None if journal is None else wire_path(os.fsencode(journal.directory)),
            fsync=None if journal is None else journal.fsync,
            journal_bytes=None if journal is None else journal.size_bytes,
            journal_unsynced_bytes=None if journal is None else journal.unsynced_bytes,
            journal_failure=None if journal is None else journal.failure,
            journal_uncompacted=self._mounted.uncompacted,
            journals_bytes=on_disk.journals_bytes,
            store_bytes=on_disk.store_bytes,
            interrupted=None if snapshots is None else await snapshots.unfinished(),
            commands=self._commands.where,
            container=None if container is None or container is remote else await container.describe(),
            transport=None if container is None else container.transport_name,
            connected=None if container is None else container.is_connected,
            remote=None if remote is None else "connected" if remote.is_connected else await remote.advice(),
            **asdict(usage),
        )


def _is_of_mount(error: OSError, mountpoint: str) -> bool:
    """Whether the kernel or the volume raised `error`: an error with a text of its own says more than the advice."""
    if error.errno is None or error.strerror not in (None, os.strerror(error.errno)):
        return False
    # os.path.isdir(mountpoint) is False on EIO, which is reported as ENOENT or ENOTDIR.
    return error.errno in _LOST or error.filename == mountpoint


def _memory() -> dict[str, int]:
    """The bytes of this process's memory that are "Shared" with other processes, and "Private".  Any thread."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        sizes = [line.split()[:2] for line in file if line.startswith(("Shared_", "Private_"))]
    totals: dict[str, int] = {}
    for name, size in sizes:
        kind = name.partition("_")[0]
        totals[kind] = totals.get(kind, 0) + int(size) * 1024
    return totals
