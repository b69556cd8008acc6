"""The methods of the control socket, by name; and those that concern the workspace as a whole.

Threading: handlers run on the serving loop.  Long work (diff, export, reading an archive) runs in a worker thread on an
immutable tree; `vfsd.daemon.snapshots` makes the changes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import vfsd
from protocol.volume import VolumeUsage, checkable, snapshotable
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.exec_methods import ExecMethods
from vfsd.daemon.control.fs_methods import FsMethods
from vfsd.daemon.control.lost_container import with_advice
from vfsd.daemon.control.snapshot_methods import SnapshotMethods
from vfsd.daemon.control.tree_methods import TreeMethods
from vfsd.daemon.control.unmount_methods import UnmountMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.wire.messages import Empty, StatusResult, wire_path
from vfsd.wire.options import WorkspaceOptions


class Methods:
    """All methods of one workspace.  `snapshots` is None if its backend has none."""

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        started_at: str,
        commands: Commands,
    ) -> None:
        self._mounted = mounted
        self._commands = commands
        self._snapshots = snapshots
        self._options = options
        self._started_at = started_at
        self._unmount = UnmountMethods(mounted, options, commands)

    @property
    def unmounts_to_answer(self) -> int:
        """Unmounts that were made and whose answers are not sent yet."""
        return self._unmount.to_answer

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each method of `messages.METHODS`."""
        mounted, options = self._mounted, self._options
        handlers: dict[str, Handler] = {
            "ping": self._ping,
            "status": self._status,
            "check": self._check,
            "unsaved": self._unmount.unsaved,
            "unmount": self._unmount.unmount,
            **SnapshotMethods(self._snapshots, options).handlers(),
            **TreeMethods(mounted, self._snapshots, options).handlers(),
            **FsMethods(mounted, options, self._commands).handlers(),
            **ExecMethods(self._commands).handlers(),
        }
        return with_advice(handlers, mounted)

    async def _ping(self, _params: Empty, _call: CallContext) -> Empty:
        return Empty()

    async def _check(self, _params: Empty, _call: CallContext) -> Empty:
        volume = checkable(self._mounted.volume)
        if volume is not None:
            volume.check_invariants()
        return Empty()

    async def _status(self, _params: Empty, _call: CallContext) -> StatusResult:
        options, engine, snapshots = self._options, self._mounted.engine, self._snapshots
        volume, container = snapshotable(self._mounted.volume), self._mounted.container
        # Other volumes would have to walk the whole tree.
        usage = VolumeUsage() if volume is None else volume.usage()
        return StatusResult(
            name=options.name,
            mountpoint=wire_path(os.fsencode(options.mountpoint)),
            backend=str(options.backend),
            engine=engine.name,
            pid=os.getpid(),
            version=vfsd.__version__,
            started_at=self._started_at,
            read_only=options.read_only,
            snapshots=None if snapshots is None else len(await snapshots.infos()),
            requests=engine.requests,
            engine_reason=engine.fallback_reason,
            interrupted=None if snapshots is None else await snapshots.unfinished(),
            commands=self._commands.where,
            container=None if container is None else await container.describe(),
            transport=None if container is None else container.transport_name,
            connected=None if container is None else container.is_connected,
            **dataclasses.asdict(usage),
        )
