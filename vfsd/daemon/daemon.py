"""The daemon's lifecycle: from the mount to the unmount.

Threading: everything runs on one trio loop.  Calls that may use the mount (unmounting, reading an archive, stat) run in
worker threads, because the loop serves the mount.

Start: clear what a dead daemon left; open the backend and read the archive; mount; bind the socket, which fails for the
second of two daemons with one name; serve; wait until the mount answers; write the record; report to the starter.  If a
step fails, the steps before it are undone.  End: the file system is unmounted (after a signal, through the control
socket or by another program); the engine returns; an unmount that came through the socket is answered; socket and
record are removed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import trio
from msgspec.structs import replace

import vfsd
from protocol.volume_durability import journaled
from protocol.volume_extensions import CacheInvalidation
from vfsd.daemon import preload
from vfsd.daemon.attached import NoEngine
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.control.connection import ControlServer
from vfsd.daemon.control.methods import Methods, Start
from vfsd.daemon.exec.commands import Commands, choose_commands
from vfsd.daemon.forks.forks import Forks, Origin
from vfsd.daemon.keeper.sd_notify import Notifier
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.opening import (
    Served,
    alone,
    connected,
    engine_settings,
    opened,
    recover,
    resumed_mount,
    to_serve,
)
from vfsd.daemon.resume import Resume
from vfsd.daemon.snapshots.base import open_snapshots
from vfsd.daemon.starting import note_failed_restart
from vfsd.daemon.upkeep import STACKS_SIGNAL, Compaction, MemoryTrim, Removal, dump_threads_on_signal, write_task_stacks
from vfsd.kernel.engines.choice import mount_engine, resume_engine
from vfsd.kernel.inotify import Replay
from vfsd.kernel.invalidation import invalidate_kernel_caches
from vfsd.machine import interpreter, mounts, runtime
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.wire.options import Ready, encode_options

if TYPE_CHECKING:
    from vfsd.daemon.audit.processes import GivenLabel
    from vfsd.daemon.keeper.keeping import Kept
    from vfsd.daemon.snapshots.base import SnapshotService
    from vfsd.daemon.upgrading.taking import Successor
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions, PolicyOptions

_logger = logging.getLogger(__name__)

# After a signal, programs that hold a busy mount have this long before the daemon ends.
_LINGER_S: Final = 5.0
_ANSWER_S: Final = 5.0  # how long the daemon waits for the client to read the answer to its unmount
_ANSWER_POLL_S: Final = 0.01
_TIDY_S: Final = 1.0
# How long each daemon of a keeper, which gives up after some of them, tries to reach the other end of `exec:`.
_RECONNECT_S: Final = 60.0
_RECONNECT_FIRST_S: Final = 0.5
# The helper has ended, there is none, or it is another version's: none of this changes.
_LASTING: Final = frozenset({errno.ESRCH, errno.ESTALE, errno.EPROTO, errno.EPROTONOSUPPORT})


async def run_daemon(
    options: MountOptions,
    *,
    ready: Callable[[Ready], None],
    started_by: str,
    starter: int = 0,
    origin: Origin | None = None,
    kept: Kept | None = None,
    successor: Successor | None = None,
    is_foreground: bool = False,
) -> None:
    """Mount a workspace and serve it until it is unmounted; call `ready` when the mount answers.

    `started_by` is what `vfsd status` says, `starter` the id of the process that started this one.
    `origin`: what a fork starts with; else the backend is opened.  `kept`: the keeper of this daemon, and the mount to
    continue with if this is a replacement.  `successor`: what this daemon takes over in an upgrade.
    `is_foreground`: the program that started this process waits for its end.

    If the start fails, everything is undone: OSError, ArchiveError, ValueError, or a group of them.
    """
    interpreter.set_up(f"vfsd:{options.workspace.name}")
    # Before the archive is read, which may take minutes, and again under the lock that excludes other starts.
    recovered = None
    if origin is None and successor is None and (kept is None or kept.resumed is None):
        recovered = await trio.to_thread.run_sync(recover, options)
    backend, origin = await opened(options, origin, successor, kept)
    starting = contextlib.ExitStack()

    def started(report: Ready) -> None:
        starting.close()
        ready(report)

    engine: Engine
    try:
        resumed = resumed_mount(kept, successor)
        settings = engine_settings(options, backend)
        replay = Replay(backend.volume, options.workspace.mountpoint)
        audit = Audit(options, backend.volume, starter=starter, is_fork=origin is not None)
        resume = _resume(origin, kept, successor)
        audit.keep_labels(resume.labels, functools.partial(_note_labels, kept))
        stale = CacheInvalidation() if successor is not None else connected(backend, kept)
        served = to_serve(options, backend, is_continued=resumed is not None)
        if resumed is not None:
            engine = resume_engine(served.volume, settings, replay, resumed)
        else:
            starting.enter_context(alone())
            recovered = recover(options) or recovered
            if origin is not None and origin.family is not None:
                origin.family.join()
            if options.is_attached:
                engine = NoEngine()
            else:
                engine = mount_engine(options.kernel.engine, served.volume, settings, replay)
                starting.close()  # other starts find the mount, but of an attached directory only the record
    except BaseException:
        starting.close()
        backend.close()
        raise
    if kept is not None and kept.resumed is not None:
        started_by = f"its keeper, because the daemon before it died ({started_by} started the first one)"
    audit.observe(engine)
    start = _Start(started_by, starter, resume, origin, kept, stale, successor, is_foreground)
    daemon = Daemon(options, engine, backend, replay, served, audit, start)
    try:
        await daemon.run(started, "; ".join(filter(None, (recovered, backend.recovered, served.note))) or None)
    finally:
        starting.close()
        # After a crash the dead mount stays, as after a SIGKILL, until the next start clears it and reports it.
        # Without it programs would write to the empty directory, and a sync job would copy the emptiness.
        await _close(options, None if daemon.leaves_mount else engine, backend, audit)


def _resume(origin: Origin | None, kept: Kept | None, successor: Successor | None) -> Resume:
    """Return what another daemon has handed on to this one."""
    if successor is not None:
        return successor.resume
    if origin is not None:
        return origin.resume
    return Resume() if kept is None else kept.resume


def _note_labels(kept: Kept | None, labels: list[GivenLabel]) -> None:
    if kept is not None:
        kept.keep(labels=tuple(labels))


async def _close(options: MountOptions, engine: Engine | None, backend: Backend, audit: Audit) -> None:
    """Unmount `engine`, and give up what the daemon holds.  Without `engine` the mount stays."""
    if engine is not None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(engine.unmount)
    backend.close()
    audit.close()
    if options.origin is not None:
        from vfsd.daemon.forks.stored import drop_base  # noqa: PLC0415 (start-up: few mounts are forks)

        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(drop_base, options)


class _Start(NamedTuple):
    """How the daemon was started, and what it continues: see `run_daemon`.

    `stale`: what the kernel's caches may have wrong.
    """

    by: str
    starter: int
    resume: Resume
    origin: Origin | None
    kept: Kept | None
    stale: CacheInvalidation
    successor: Successor | None
    is_foreground: bool


class Daemon:
    """A mounted workspace while it is served.

    `upgraded_from`: the version of the daemon that this one replaced in an upgrade; None if there was none.
    """

    server: ControlServer
    forks: Forks

    def __init__(
        self,
        options: MountOptions,
        engine: Engine,
        backend: Backend,
        replay: Replay,
        served: Served,
        audit: Audit,
        start: _Start,
    ) -> None:
        kept, successor = start.kept, start.successor
        self._start = start
        self._policy = served.policy
        self._run_fork = functools.partial(run_daemon, starter=start.starter)
        if served.policy is not None:
            # With the rules that were added at run time: an upgrade, and forks, start from these options.
            options = replace(options, policy=served.policy.options)
        self.options = options
        self.engine = engine
        self.kept = kept
        self.starter = start.starter
        self.is_foreground = start.is_foreground
        self.upgraded_from = None if successor is None else successor.version
        self._is_handed_over = False
        self._written: WorkspaceRecord | None = None
        self._end: Callable[[], object] = lambda: None
        self._lost_keeper: Callable[[], tuple[str, str] | None] = lambda: None
        self.audit = audit
        self._snapshot_directory = served.directory
        self.backend = backend
        self._replay = replay
        self._notifier = Notifier.from_environment() if kept is None else kept.notifier
        self._commands = Commands(options.workspace.name)
        self._engine_ended = trio.Event()
        self.removal = Removal(backend.discard)
        self._imported = trio.Event()
        self._answers = self._continues = successor is not None or (kept is not None and kept.resumed is not None)
        self._unmounted = False

    @property
    def leaves_mount(self) -> bool:
        """Whether the mount outlives this daemon, which crashed or handed the workspace over."""
        return self._is_handed_over or (self._answers and not self._unmounted)

    async def run(self, ready: Callable[[Ready], None], recovered: str | None) -> None:
        """Serve until the file system is unmounted."""
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        socket = runtime.socket_path(self.options.workspace.name)
        record: WorkspaceRecord | None = None
        successor = self._start.successor
        try:
            async with trio.open_nursery() as nursery:
                self._end = nursery.cancel_scope.cancel
                mounted = await self._mounted(nursery)
                snapshots, methods = self._methods(mounted, nursery, started_at)
                given = None if successor is None else successor.socket
                self.server = ControlServer(socket, methods.handlers(), given=given)
                if successor is not None:
                    await successor.wait_go(self.kept)
                    record = self._written_record(socket, started_at)
                    successor.serving()
                    if self.backend.connection is not None:
                        self.backend.connection.transport.begin()
                    await self._take_over_snapshots(nursery)
                    nursery.start_soon(self._serve, methods, nursery)
                await nursery.start(self.server.serve)
                await nursery.start(self._handle_signals, mounted)
                nursery.start_soon(self._feed_watchdog)
                self._lost_keeper = lambda: methods.lost_keeper
                self._start_upkeep(mounted, nursery)
                if successor is None:
                    await self._take_over_snapshots(nursery)
                    nursery.start_soon(self._serve, methods, nursery)
                await self._wait_answering(mounted)
                await nursery.start(self._commands.attend)
                record = record or self._written_record(socket, started_at)
                # Raises if the starter is gone.  An error up to here undoes the mount; a later one is a crash.
                ready(self._report(socket, recovered))
                self._answers = True
                self.backend.keep()
                nursery.start_soon(self._import_rest)
                if self.backend.stored is not None and snapshots is not None:
                    nursery.start_soon(self.forks.attend_stored, snapshots.drop_unused_bases)
                nursery.start_soon(self.forks.attend_bases)
                self._announce()
        finally:
            if not self.leaves_mount:
                await self._leave()
            if record is not None and not self.leaves_mount:
                runtime.remove_record(record)

    async def _mounted(self, nursery: trio.Nursery) -> MountedVolume:
        container = self.backend.connection
        if container is not None:
            container.transport.is_left = lambda: self.leaves_mount
            attend = functools.partial(container.attend, functools.partial(invalidate_kernel_caches, self.engine))
            await self._connect(functools.partial(nursery.start, self.removal.connect, attend))
        workspace = self.options.workspace
        return MountedVolume(
            self.backend.volume,
            self.engine,
            self._replay,
            workspace.mountpoint,
            nursery,
            container,
            cache=self.options.kernel.cache,
            snapshot_directory=self._snapshot_directory,
            policy=self._policy,
            name=workspace.name,
            is_attached=self.options.is_attached,
        )

    async def _connect(self, connect: Callable[[], Awaitable[None]]) -> None:
        """Connect the volume.

        Programs wait for a daemon that continues a mount.  So if it cannot reach the other end of `exec:`, it tries
        again for a while, and the record of the dead daemon says why.
        """
        workspace, kept = self.options.workspace, self.kept
        pause_s, end = _RECONNECT_FIRST_S, trio.current_time() + _RECONNECT_S
        while True:
            try:
                return await connect()
            except OSError as error:
                is_continued = kept is not None and kept.resumed is not None and kept.early_signal() is None
                is_lasting = workspace.backend.kind != "exec" or error.errno in _LASTING
                if not is_continued or is_lasting or trio.current_time() + pause_s > end:
                    raise
                log_failure(_logger, "reaching the other end", error, level=logging.WARNING)
                note_failed_restart(self.options, error, f"; it is tried again in {pause_s:g} s")
            await trio.sleep(pause_s)
            pause_s *= 2

    def _methods(
        self, mounted: MountedVolume, nursery: trio.Nursery, started_at: str
    ) -> tuple[SnapshotService | None, Methods]:
        """Return the snapshots of the workspace, and the methods of its control socket."""
        options, origin, successor, resume = self.options, self._start.origin, self._start.successor, self._start.resume
        snapshots = open_snapshots(mounted, self.backend.stored, resume.history, resume.merge_log, resume.pruned)
        self._commands = commands = choose_commands(options, self.backend.container, snapshots, mounted.root.open)
        start = Start(started_at, self._start.by, origin, self.kept)
        given, family = (None, None) if successor is None else (resume, successor.family)
        run = self._run_fork
        self.forks = forks = Forks(options, self.backend, self.engine.name, nursery, run, origin, given, family)
        if snapshots is not None:
            snapshots.needed_by_others = forks.needed
        imported = self._imported.wait
        return snapshots, Methods(
            mounted, snapshots, options.workspace, start, commands, forks, imported, self.audit, self
        )

    def _report(self, socket: str, recovered: str | None) -> Ready:
        workspace, engine = self.options.workspace, self.engine
        warnings = tuple(engine.warnings)
        return Ready(workspace.name, workspace.mountpoint, socket, os.getpid(), engine.name, recovered, warnings)

    def _announce(self) -> None:
        """Log, and tell systemd, that the mount is served."""
        mountpoint = self.options.workspace.mountpoint
        for warning in self.engine.warnings:
            _logger.warning("%s", warning, extra={"operation": "mount"})
        self._notifier.ready(f"serving {mountpoint}")
        if self.options.is_attached:
            _logger.info("attached", extra={"operation": "mount", "path": mountpoint})
            return
        _logger.info(
            "%s, served by the %s engine",
            "continued the mount" if self._continues else "mounted",
            self.engine.name,
            extra={"operation": "mount", "path": mountpoint},
        )  # fmt: skip

    async def _take_over_snapshots(self, nursery: trio.Nursery) -> None:
        if self._continues and self._snapshot_directory is not None:
            await self._snapshot_directory.take_over(self.engine, nursery)

    def _start_upkeep(self, mounted: MountedVolume, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._tidy)
        nursery.start_soon(self.audit.attend)
        compaction = Compaction.of(mounted, self.forks)
        if compaction is not None:
            nursery.start_soon(compaction.attend)
        if self._policy is not None:
            self._policy.on_tightened = self._use_policy
            nursery.start_soon(self._policy.attend, self.engine)

    def _use_policy(self, policy: PolicyOptions) -> None:
        """Give forks, and a daemon that an upgrade starts, the policy that holds now."""
        self.options = replace(self.options, policy=policy)
        self.forks.use_policy(policy)
        if self.kept is not None:
            self.kept.keep(options=encode_options(self.options).decode())

    async def _wait_answering(self, mounted: MountedVolume) -> None:
        """Wait for an answer of the loop, which serves already; or correct what a dead daemon left in the kernel."""
        if not self._answers:
            await trio.to_thread.run_sync(os.stat, mounted.mountpoint, abandon_on_cancel=True)
        else:
            await mounted.invalidate_caches(self._start.stale)

    async def _import_rest(self) -> None:
        """Import in a thread what the mount did not need to answer; the methods of the control socket wait for it."""
        # The daemon's end waits for the thread: an interpreter that ends within an import of C++ code can abort.
        await trio.to_thread.run_sync(preload.import_rest, self.options.workspace.backend.kind)
        gc.freeze()  # as `interpreter.set_up` does with the modules that were imported before the mount
        self._imported.set()

    async def _serve(self, methods: Methods, nursery: trio.Nursery) -> None:
        """Serve until the file system is unmounted; then cancel everything else."""
        try:
            await self.engine.serve()
        finally:
            self._engine_ended.set()
        self._unmounted = True
        _logger.info("unmounted", extra={"operation": "unmount", "path": self.options.workspace.mountpoint})
        self._notifier.stopping()
        await self.removal.run(self._commands.end, is_used=self._answers)
        with trio.move_on_after(_ANSWER_S):
            while methods.unmounts_to_answer:
                await trio.sleep(_ANSWER_POLL_S)
        nursery.cancel_scope.cancel()

    def _written_record(self, socket: str, started_at: str) -> WorkspaceRecord:
        """Have the keeper keep the mount, and write the record."""
        if self.kept is not None:
            self.kept.begin(self.engine, self.backend, self.options)
        self._written = record = self._record(socket, started_at)
        runtime.write_record(record)
        return record

    # -- an upgrade --------------------------------------------------------------------------------
    def write_record(self) -> None:
        """Write the record of the workspace, which another daemon may have replaced."""
        if self._written is not None:
            runtime.write_record(self._written)

    def leave(self, successor: int) -> None:
        """End this process, and leave the mount to another daemon.  `successor`: its keeper, if it has one."""
        self._is_handed_over = True
        if self.kept is None:  # else the keeper does
            self._notifier.successor(successor)
        self._end()

    def _record(self, socket: str, started_at: str) -> WorkspaceRecord:
        pid = os.getpid()
        journal, kept = journaled(self.backend.volume), self.kept
        return WorkspaceRecord(
            name=self.options.workspace.name,
            mountpoint=self.options.workspace.mountpoint,
            pid=pid,
            pid_start_ticks=runtime.process_start_ticks(pid) or 0,
            backend=str(self.options.workspace.backend),
            started_at=started_at,
            version=vfsd.__version__,
            socket=socket,
            forked_from=None if self._start.origin is None else self._start.origin.source,
            journal=None if journal is None else journal.journal_status().directory,
            instance=self.forks.instance,
            ancestors=tuple(self.forks.ancestors),
            keeper=kept.pid if kept is not None and kept.is_kept else None,
            keeper_start_ticks=kept.start_ticks if kept is not None and kept.is_kept else 0,
            store_options=tuple(self.options.remote.store_options),
            replaces=0 if self._start.successor is None else self._start.successor.replaces,
            upgraded_from=self.upgraded_from or "",
        )

    # -- the end -------------------------------------------------------------------------------
    async def _handle_signals(
        self, mounted: MountedVolume, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Unmount on the first SIGTERM, SIGINT or SIGHUP; end at once on the second.  Log the stacks on SIGUSR1."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STACKS_SIGNAL) as signals:
            dump_threads_on_signal()
            task_status.started()
            early = None if self.kept is None else self.kept.early_signal()
            if early is not None:
                os.kill(os.getpid(), early)
            async with trio.open_nursery() as nursery:
                async for number in signals:
                    if number == STACKS_SIGNAL:
                        write_task_stacks()
                        continue
                    _logger.info("%s", signal.Signals(number).name, extra={"operation": "signal"})
                    if nursery.child_tasks:
                        _logger.warning("a second signal: ending at once", extra={"operation": "unmount"})
                        self.engine.stop()
                        return
                    nursery.start_soon(self._unmount, mounted)

    async def _unmount(self, mounted: MountedVolume) -> None:
        """Unmount; if the mount is busy, log who holds it, detach it lazily, and give the programs time to finish."""
        self._notifier.stopping("unmounting")
        if self.options.is_attached:
            async with mounted.change_lock:  # a restore is completed first
                self.engine.stop()
            return
        mountpoint = self.options.workspace.mountpoint
        await mounted.wait_unused()
        await self._leave()
        try:
            # Abandoned if cancelled: after a second signal the kernel may wait for a loop that has ended.
            await trio.to_thread.run_sync(mounts.unmount, mountpoint, abandon_on_cancel=True)
        except OSError as error:
            # The error for a busy mount names the processes that hold it.
            log_failure(_logger, "unmount", error, path=mountpoint, level=logging.WARNING)
            await self._detach()
        with trio.move_on_after(_LINGER_S):
            await self._engine_ended.wait()
        if not self._engine_ended.is_set():
            _logger.warning(
                "programs still use the mount after %g s: ending the daemon, so that their requests fail", _LINGER_S,
                extra={"operation": "unmount", "path": mountpoint},
            )  # fmt: skip
            self.engine.stop()
        await trio.sleep_forever()  # `_serve` cancels this

    async def _leave(self) -> None:
        """End the commands that run in the workspace, and remove the sandbox."""
        try:
            with trio.CancelScope(shield=True):
                await self._commands.leave()
        except OSError as error:
            log_failure(_logger, "removing the sandbox", error, level=logging.WARNING)

    async def _detach(self) -> None:
        mountpoint = self.options.workspace.mountpoint
        detach = functools.partial(mounts.unmount, mountpoint, lazy=True)
        try:
            await trio.to_thread.run_sync(detach, abandon_on_cancel=True)
        except OSError as error:
            log_failure(_logger, "unmount --lazy", error, path=mountpoint)
        else:
            _logger.info("detached lazily", extra={"operation": "unmount", "path": mountpoint})

    async def _tidy(self) -> None:
        """Do the upkeep about once a second.  One that fails, for lack of descriptors for example, ends nothing."""
        memory = MemoryTrim(self.backend.volume)
        has_failed = False
        while True:
            await trio.sleep(_TIDY_S)
            try:
                await self._tidy_once(memory)
                has_failed = False
            except OSError as error:
                if not has_failed:
                    log_failure(_logger, "upkeep", error, level=logging.WARNING)
                has_failed = True

    async def _tidy_once(self, memory: MemoryTrim) -> None:
        """Call the upkeep of the backend, the record and the log, and return freed memory."""
        self.backend.tidy()
        self._tidy_record()
        self.audit.tidy()
        if self._snapshot_directory is not None:
            await self._snapshot_directory.refresh(self.engine)
        await memory.check()

    def _tidy_record(self) -> None:
        """Have the record say what `vfsd status` says of the keeper: `vfsd doctor` asks no daemon."""
        record, lost = self._written, self._lost_keeper()
        # While another daemon takes over, the record is that of one or the other.
        if record is None or record.lost_keeper == lost or self.kept is None or self.kept.is_released:
            return
        self._written = record = replace(record, lost_keeper=lost)
        runtime.write_record(record)

    async def _feed_watchdog(self) -> None:
        """Notify systemd's watchdog that the loop runs."""
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is None:
            return
        while True:
            self._notifier.watchdog()
            await trio.sleep(interval_s)
