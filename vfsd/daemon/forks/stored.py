"""Forks of a workspace whose snapshots are in a store: overlays over a stored snapshot, in daemons of their own.

The source's daemon starts the fork's daemon in a new interpreter.  That daemon takes a lease on the snapshot
(`protocol.store.trees`), so it stays readable whatever is dropped.  Until then the source holds a lease.

Invariant: a snapshot that was taken for a fork is in the store as long as a fork is mounted over it.  It is dropped by
the daemon of the last such fork when that ends, or, if that was killed, by a daemon of the source: when it reaps the
process, makes the next fork, or is mounted again (`vfsd.daemon.snapshots.bases.drop_unused_bases`).

Threading: the serving loop.  The store is used in worker threads.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final

import trio
from msgspec.structs import replace

from protocol.store import Store
from protocol.volume_extensions import SnapshotInfo, snapshotable
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.forks.forks import Forks, Origin, StartedFork, wait_upgraded
from vfsd.daemon.forks.process import SYSTEMD_VARIABLES
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.resume import Resume
from vfsd.daemon.snapshots.base import FORK_PREFIX, FORK_TAG, fork_tag, free_name, in_thread
from vfsd.daemon.snapshots.bases import drop_unused_bases
from vfsd.daemon.snapshots.store_restore import Stored
from vfsd.daemon.snapshots.stored import StoreSnapshots
from vfsd.machine.daemon_start import start_interpreter
from vfsd.machine.logs import log_path, open_log
from vfsd.operations.forks import Ancestor, ForkParams, StateId
from vfsd.wire.options import (
    BackendSpec,
    JournalOptions,
    KernelOptions,
    MountOptions,
    Ready,
    StoredOrigin,
    declared_options,
)

if TYPE_CHECKING:
    from vfsd.daemon.backends.registry import Backend

_DAEMON_MODULE: Final = "vfsd.daemon.main"
_MERGED_SENT: Final = 50  # the options of a daemon fit in a pipe


class StoredForks:
    """The forks of the workspace that is mounted with `options`.  `forks`: what it has in common with other forks."""

    def __init__(self, options: MountOptions, stored: Stored, snapshots: StoreSnapshots, forks: Forks) -> None:
        self.options = options
        self._stored = stored
        self._snapshots = snapshots
        self._instance = forks.instance
        self._nursery = forks.nursery
        self._naming = trio.Lock()
        self._starting = forks.starting

    async def fork(self, params: ForkParams, mountpoint: str, call: CallContext) -> tuple[Ready, SnapshotInfo]:
        """Mount an overlay over a snapshot; return when it answers, and the snapshot."""
        await self._snapshots.drop_unused_bases(self._starting)
        if params.snapshot is not None:
            base = await in_thread(self._stored.store.snapshot, self._stored.key, params.snapshot)
        else:
            async with self._naming:
                base_name = free_name(FORK_PREFIX, await self._snapshots.infos())
                tag = fork_tag(params.name, mountpoint)
                base = await self._snapshots.take(base_name, tag, call, kind="automatic")
        self._starting.append(base.name)
        try:
            lease = await in_thread(self._stored.store.lease, self._stored.key, base.name)
            try:
                call.commit()
                ready = await self._start(params.name, mountpoint, base).ready()
            finally:
                lease.close()
        except BaseException:
            self._starting.remove(base.name)
            with trio.CancelScope(shield=True):
                await self._snapshots.drop_unused_bases(self._starting)
            raise
        self._starting.remove(base.name)
        return ready, base

    def _start(self, name: str, mountpoint: str, base: SnapshotInfo) -> StartedFork:
        options = fork_options(self.options, name, mountpoint, self._origin(base))
        why = f"a fork of {self.options.workspace.name}"
        log_fd, _ = open_log(log_path(name))
        report_fd, child_report_fd = os.pipe()
        try:
            process = start_interpreter(
                _DAEMON_MODULE, options, child_report_fd, log_fd, why, without=SYSTEMD_VARIABLES
            )
        except BaseException:
            os.close(report_fd)
            raise
        finally:
            os.close(child_report_fd)
            os.close(log_fd)
        self._nursery.start_soon(self._reap, name, process, os.pidfd_open(process.pid))
        return StartedFork(report_fd, os.pidfd_open(process.pid), process.pid, mountpoint, log_path(name))

    def _origin(self, base: SnapshotInfo) -> StoredOrigin:
        source = Ancestor(self._instance, self.options.workspace.name, StateId.of(base))
        merged = self._snapshots.merges.at(base.serial)[-_MERGED_SENT:]
        return StoredOrigin(source, self._stored.key, tuple(merged))

    async def _reap(self, name: str, process: subprocess.Popen[bytes], pidfd: int) -> None:
        """Wait for a fork's end, so that it does not remain as a zombie; drop a base that no fork has any more."""
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
            process.poll()
        await self._snapshots.drop_unused_bases(self._starting)
        if await wait_upgraded(name, process.pid, self._instance):
            await self._snapshots.drop_unused_bases(self._starting)


def drop_base(options: MountOptions) -> None:
    """At the end of a fork with these options, drop its base from the store if nothing else is mounted over it."""
    assert options.origin is not None
    with Store(options.workspace.store) as store:
        drop_unused_bases(store, options.origin.workspace, only=options.origin.source.left_at)


def fork_options(options: MountOptions, name: str, mountpoint: str, origin: StoredOrigin) -> MountOptions:
    """Return the options of a fork: those of the source that apply to an overlay over a snapshot."""
    backend = options.workspace.backend
    directory = backend.argument if backend.kind == "host" else ""
    over = BackendSpec("overlay").with_snapshot(origin.source.left_at.name, directory)
    values = options.values() | {"backend": over, "name": name, "mountpoint": mountpoint}
    if options.is_attached:
        values["engine"] = KernelOptions().engine
    for each, (_, option) in declared_options().items():
        if option.scope is not None and not option.scope.allows(values):
            values[each] = option.default
    return replace(MountOptions.of(**values), journal=JournalOptions(), origin=origin)


def opened_origin(given: StoredOrigin, backend: Backend) -> Origin:
    """Return what a fork over a stored snapshot starts with.  Its first snapshot is that state, under the same name."""
    volume = snapshotable(backend.volume)
    assert volume is not None, "an overlay has snapshots"
    source, left_at = given.source, given.source.left_at
    taken = volume.take_snapshot(left_at.name, tag=f"{FORK_TAG}this workspace", kind="automatic")
    merges = MergeLog()
    merges.record(0, list(given.merged))
    resume = Resume(
        merges=merges.encoded().decode(),
        source=source.name,
        base=left_at.name,
        ancestors=(source,),
        twin=(StateId.of(taken), left_at),
    )
    return Origin(resume, backend, None, os.getppid())
