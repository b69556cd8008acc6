"""`fork`: make a workspace that starts as a copy of this one.

Threading: the serving loop.  Between the snapshot and fork(2) nothing awaits, so both have the same state.  A workspace
whose snapshots are in a store is not copied: `vfsd.daemon.forks.stored` mounts an overlay over such a snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import trio

from protocol.errors import SnapshotNotFoundError, shown
from protocol.volume_durability import journaled
from protocol.volume_extensions import ForkableVolume, SnapshotInfo
from vfsd.daemon.control.calls import CallContext, absolute_path
from vfsd.daemon.forks.forks import Forks, Steps
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import FORK_PREFIX, SnapshotService, fork_tag, free_name, required
from vfsd.machine import mounts
from vfsd.machine.runtime import read_record
from vfsd.operations.merge import StateId
from vfsd.operations.workspace import ForkParams, ForkResult
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.options import NAME_PATTERN, Ready

if TYPE_CHECKING:
    from vfsd.daemon.forks.stored import StoredForks
    from vfsd.daemon.snapshots.store_restore import Stored

_PATHS_SHOWN: Final = 3
_ENTRIES_SEEN: Final = 1000  # at the top of a fork, to find links that lead out of it
_LINKS_SHOWN: Final = 5


class ForkMethod:
    """The method `fork` of one workspace."""

    def __init__(self, mounted: MountedVolume, snapshots: SnapshotService | None, forks: Forks) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._forks = forks
        self._stored_forks: StoredForks | None = None

    async def fork(self, params: ForkParams, call: CallContext) -> ForkResult:
        """Fork, and return when the fork's mount answers."""
        made = await self._fork(params, call)
        made.warnings += await trio.to_thread.run_sync(_links, absolute_path(made.mountpoint), self._mounted.mountpoint)
        return made

    async def _fork(self, params: ForkParams, call: CallContext) -> ForkResult:
        if not NAME_PATTERN.fullmatch(params.name):
            raise InvalidParamsError(f"not a workspace name: {params.name!r}")
        mountpoint = absolute_path(params.mountpoint)
        snapshots = required(self._snapshots)
        if self._forks.stored is None:
            _ = self._forks.volume  # raises if it cannot be forked
        if (mountpoint + "/").startswith(self._mounted.mountpoint.rstrip("/") + "/"):
            raise OSError(errno.EINVAL, "a fork cannot be mounted inside its source", mountpoint)
        record = read_record(params.name)
        if record is not None and record.alive:
            reason = f"a workspace named {record.name!r} is mounted at {record.mountpoint}; give the fork another name"
            raise FileExistsError(errno.EEXIST, reason)
        # The fork checks it again; an error here leaves nothing behind.
        await trio.to_thread.run_sync(mounts.check_mountpoint, mountpoint)
        if self._forks.stored is not None:
            ready, info = await self._over_snapshot(self._forks.stored, snapshots).fork(params, mountpoint, call)
            return _result(ready, info.name, [*ready.warnings, *_incomplete(info)])
        volume = self._forks.volume
        made = started = None  # the base, if this call took it
        try:
            async with self._mounted.change_lock:
                await self._mounted.write_back()
                steps = Steps(await snapshots.history(), snapshots.merges)
                call.commit()  # what follows takes some milliseconds, and undoes itself if it fails
                if params.snapshot is None:
                    base = made = _take_base(volume, fork_tag(params.name, mountpoint))
                else:
                    base = StateId.of(volume.snapshot(params.snapshot))
                started = self._forks.start(
                    params.name, mountpoint, base, steps, restores_base=made is None, keeps_base=made is not None
                )
            ready = await started.ready()
        except BaseException:
            if made is not None and started is None:  # else it is dropped when the process has ended
                with contextlib.suppress(SnapshotNotFoundError):
                    volume.drop_snapshot(made.name)
            raise
        warnings = list(ready.warnings)
        if journaled(self._mounted.volume) is not None:
            warnings.append(
                "unlike its source, the fork has neither a journal nor a keeper: if its daemon dies, what was not"
                " merged is lost"
            )
        return _result(ready, base.name, warnings)

    def _over_snapshot(self, stored: Stored, snapshots: SnapshotService) -> StoredForks:
        # Start-up: few workspaces need these modules.
        from vfsd.daemon.forks.stored import StoredForks  # noqa: PLC0415
        from vfsd.daemon.snapshots.stored import StoreSnapshots  # noqa: PLC0415

        if self._stored_forks is None:
            assert isinstance(snapshots, StoreSnapshots), "the snapshots are in `stored`"
            forks = self._forks
            self._stored_forks = StoredForks(forks.source_options, stored, snapshots, forks)
        self._stored_forks.options = self._forks.source_options  # a policy may have been tightened
        return self._stored_forks


def _result(ready: Ready, base: str, warnings: Sequence[str]) -> ForkResult:
    place, socket = (wire_path(os.fsencode(path)) for path in (ready.mountpoint, ready.socket))
    return ForkResult(ready.name, place, socket, ready.pid, ready.engine, base, list(warnings))


def _incomplete(base: SnapshotInfo) -> Iterator[str]:
    """Say which files the fork lacks, and which may be wrong in it."""
    for paths, what in (
        (base.unreadable, "could not be read, and {} not in the fork"),
        (base.unstable, "changed while {} read, and may mix old and new content in the fork"),
    ):
        if paths:
            named = ", ".join(map(shown, paths[:_PATHS_SHOWN])) + (", ..." if len(paths) > _PATHS_SHOWN else "")
            files = f"{len(paths)} files" if len(paths) > 1 else "1 file"
            many = len(paths) > 1
            verb = ("are" if many else "is") if paths is base.unreadable else ("they were" if many else "it was")
            yield f"{files} {what.format(verb)}: {named}"


def _links(fork: str, source: str) -> list[str]:
    """Say what at the top of a fork leads to the source, or to a git repository outside.  Nothing below is searched.

    Opens files of the source's mount only: the process of another fork that is made at this moment closes what it
    inherits of that, and would keep the mount of this fork busy.
    """
    from protocol.merge.git import first_line  # noqa: PLC0415 (start-up)

    found = []
    try:
        with os.scandir(source) as entries:
            top = sorted(itertools.islice(entries, _ENTRIES_SEEN), key=lambda entry: entry.name)
    except OSError:
        return []
    for name in ("", *(entry.name for entry in top if entry.is_dir(follow_symlinks=False))):
        git = os.path.join(source, name, ".git")
        with contextlib.suppress(OSError, ValueError):
            kind, _, gitdir = first_line(git).partition(": ")
            is_inside = not os.path.isabs(gitdir) and _is_in(os.path.join(source, name, gitdir), source)
            is_in_fork = os.lstat(os.path.join(fork, name, ".git")).st_size == os.lstat(git).st_size
            if kind == "gitdir" and is_in_fork and not is_inside:
                found.append(
                    f"{shown(os.fsencode(name or '.'))} is a linked git work tree: commits in the fork land in the"
                    f" repository that has {shown(os.fsencode(gitdir))}, as those of the source"
                )
    for entry in top:
        with contextlib.suppress(OSError):
            if entry.is_symlink() and _is_in(os.readlink(os.path.join(fork, entry.name)), source):
                found.append(
                    f"the symlink {shown(os.fsencode(entry.name))} in the fork leads into the source, {source}"
                )
    return found[:_LINKS_SHOWN] + [f"and {len(found) - _LINKS_SHOWN:,} more"] * (len(found) > _LINKS_SHOWN)


def _is_in(path: str, directory: str) -> bool:
    return (os.path.normpath(path) + "/").startswith(directory.rstrip("/") + "/")


def _take_base(volume: ForkableVolume, tag: str) -> StateId:
    """Take the snapshot that both workspaces have in common."""
    name = free_name(FORK_PREFIX, volume.snapshots())
    return StateId.of(volume.take_snapshot(name, tag=tag, kind="automatic"))
