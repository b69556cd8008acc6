"""`fork`: make a workspace that starts as a copy of this one.

Threading: the serving loop.  Between the snapshot and fork(2) nothing awaits, so both have the same state.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

import trio

from protocol.errors import SnapshotNotFoundError
from protocol.volume_extensions import ForkableVolume
from vfsd.daemon.control.call_context import CallContext
from vfsd.daemon.control.parameters import absolute_path
from vfsd.daemon.control.snapshot_methods import required
from vfsd.daemon.forks import Forks, Steps
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import FORK_PREFIX, FORK_TAG, SnapshotService, free_name
from vfsd.machine import mounts
from vfsd.machine.runtime import read_record
from vfsd.wire.messages import ForkParams, ForkResult, InvalidParamsError, wire_path
from vfsd.wire.options import NAME_PATTERN

_TAG_CHARACTERS: Final = 200


class ForkMethod:
    """The method `fork` of one workspace."""

    def __init__(self, mounted: MountedVolume, snapshots: SnapshotService | None, forks: Forks) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._forks = forks

    async def fork(self, params: ForkParams, call: CallContext) -> ForkResult:
        """Fork, and return when the fork's mount answers."""
        if not NAME_PATTERN.fullmatch(params.name):
            raise InvalidParamsError(f"not a workspace name: {params.name!r}")
        mountpoint = absolute_path(params.mountpoint)
        volume = self._forks.volume
        snapshots = required(self._snapshots)
        if (mountpoint + "/").startswith(self._mounted.mountpoint.rstrip("/") + "/"):
            raise OSError(errno.EINVAL, "a fork cannot be mounted inside its source", mountpoint)
        record = read_record(params.name)
        if record is not None and record.alive:
            reason = f"a workspace named {record.name!r} is mounted at {record.mountpoint}; give the fork another name"
            raise FileExistsError(errno.EEXIST, reason)
        # The fork checks it again; an error here leaves nothing behind.
        await trio.to_thread.run_sync(mounts.check_mountpoint, mountpoint)
        made = None  # the base, if this call took it
        try:
            async with self._mounted.change_lock:
                await self._mounted.write_back()
                steps = Steps(await snapshots.history(), snapshots.merges)
                call.commit()  # what follows takes some milliseconds, and undoes itself if it fails
                if params.snapshot is None:
                    base = made = _take_base(volume, f"{FORK_TAG}{params.name} at {mountpoint}")
                else:
                    base = volume.snapshot(params.snapshot).name
                started = self._forks.start(
                    params.name, mountpoint, base, steps, restores_base=made is None, keeps_base=made is not None
                )
            ready = await started.ready()
        except BaseException:
            if made is not None:
                with contextlib.suppress(SnapshotNotFoundError):  # dropped when the fork ended
                    volume.drop_snapshot(made)
            raise
        place, socket = (wire_path(os.fsencode(path)) for path in (ready.mountpoint, ready.socket))
        return ForkResult(ready.name, place, socket, ready.pid, ready.engine, base, list(ready.warnings))


def _take_base(volume: ForkableVolume, tag: str) -> str:
    """Take the snapshot that both workspaces have in common; return its name."""
    name = free_name(FORK_PREFIX, volume.snapshots())
    clean = tag.encode("utf-8", "backslashreplace").decode()
    volume.take_snapshot(name, tag=clean[:_TAG_CHARACTERS], kind="automatic")
    return name
