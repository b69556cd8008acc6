"""The steps of a daemon before it mounts: open the backend, wrap what the engine serves, find name and mountpoint free.

Threading: `opened` on the loop, `recover` in a worker thread, the others in either.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import trio
from msgspec.structs import replace

from protocol.linux.regular_file import open_regular
from protocol.volume_durability import journaled, recoverable
from protocol.volume_extensions import CacheInvalidation, overlaid, snapshotable
from vfsd.daemon import attached
from vfsd.daemon.backends.registry import Backend, open_backend
from vfsd.daemon.forks.forks import Origin
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.directory import SnapshotDirectory, open_directory
from vfsd.kernel.engines.base import EngineSettings, ResumedMount
from vfsd.machine import mounts, runtime

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.daemon.keeper.keeping import Kept
    from vfsd.daemon.policy.service import Policy
    from vfsd.daemon.upgrading.taking import Successor
    from vfsd.wire.options import MountOptions

_LOST: Final = "the content and the snapshots of that workspace are lost"


def resumed_mount(kept: Kept | None, successor: Successor | None) -> ResumedMount | None:
    """Return the mount to continue."""
    if successor is not None:
        return ResumedMount(successor.device, successor.resume.negotiated.encode(), resend=False)
    if kept is None or kept.resumed is None:
        return None
    negotiated = kept.resume.negotiated.encode()
    return ResumedMount(kept.resumed.descriptor, negotiated, resend=True, memory_fd=kept.memory_fd)


async def opened(
    options: MountOptions, origin: Origin | None, successor: Successor | None, kept: Kept | None
) -> tuple[Backend, Origin | None]:
    """Return the backend, and what a fork starts with."""
    if successor is not None:
        backend = await successor.open(options, kept)
        return backend, successor.origin(backend)
    if origin is None:
        anchor, given = None, options
        if kept is not None and kept.resumed is not None:
            # Start-up: few daemons continue a mount.
            from vfsd.daemon.backends.persistence import check_continued  # noqa: PLC0415

            await trio.to_thread.run_sync(check_continued, options)
            if options.workspace.backend.kind in {"container", "image"}:
                from vfsd.daemon.backends.stored import wait_for_service  # noqa: PLC0415

                await wait_for_service(options.container.podman_url)
            anchor = kept.resumed.anchor
            given = replace(options, anchor=anchor, is_continued=True)
        elif options.workspace.backend.kind == "image":
            from vfsd.daemon.backends.stored import pull_missing  # noqa: PLC0415

            await pull_missing(options)
        backend = await trio.to_thread.run_sync(open_backend, given, _unless_cancelled)
        if anchor is not None:
            os.close(anchor)
        if options.origin is not None:
            # Start-up: few mounts are forks.
            from vfsd.daemon.forks.stored import opened_origin  # noqa: PLC0415

            try:
                origin = opened_origin(options.origin, backend)
            except BaseException:
                backend.close()
                raise
        return backend, origin
    volume, resume = snapshotable(origin.backend.volume), origin.resume
    if origin.restores_base and volume is not None:
        volume.restore_snapshot(resume.base)
        over = overlaid(volume)
        if over is not None:
            over.lose_changed(resume.base)
        merges = resume.merge_log or MergeLog()
        merges.record(volume.snapshots()[-1].serial, merges.at(volume.snapshot(resume.base).serial))
        origin = replace(origin, resume=replace(resume, merges=merges.encoded().decode()))
    return origin.backend, origin


def engine_settings(options: MountOptions, backend: Backend) -> EngineSettings:
    """Return what `options` and the backend ask of the engine."""
    return EngineSettings(
        options.workspace.mountpoint,
        options.workspace.name,
        read_only=options.workspace.read_only,
        allow_other=options.kernel.allow_other,
        cache_timeout_s=backend.cache_timeout_s,
        xattrs=options.kernel.xattrs,
        wakeups=options.kernel.wakeups,
        write_back=options.kernel.cache == "writeback",
    )


def connected(backend: Backend, kept: Kept | None) -> CacheInvalidation:
    """Have the volume serve the kernel; return what the caches of a kernel that it served before may have wrong."""
    is_known = kept is not None and kept.resumed is not None
    volume, journal = recoverable(backend.volume), journaled(backend.volume)
    if kept is not None and volume is not None:
        volume.keep_log(kept.log, is_known=is_known)
    return CacheInvalidation() if journal is None else journal.connect(is_known=is_known)


class Served(NamedTuple):
    """The subject of the engine: `volume`, which is that of the backend under the policy and with `.snapshots`."""

    volume: Volume
    policy: Policy | None
    directory: SnapshotDirectory | None
    note: str | None  # for the user


def to_serve(options: MountOptions, backend: Backend, *, is_continued: bool) -> Served:
    """Put the policy and `.snapshots` of the mount around the backend's volume.  OSError, ValueError."""
    policy, note, directory = None, None, None
    if options.policy.protect or options.policy.hide or options.content.exclude or options.journal.persist:
        # Start-up: few mounts have a policy.
        from vfsd.daemon.policy.service import open_policy  # noqa: PLC0415

        policy, note = open_policy(options, backend.volume, is_continued=is_continued)
    shown = options.kernel.snapshot_directory
    if shown != "off" and not options.is_attached:
        is_visible = shown == "visible"
        directory = open_directory(
            backend.volume, backend.stored, is_visible=is_visible, policy=policy, is_continued=is_continued
        )
    volume = backend.volume if policy is None else policy.volume
    return Served(volume if directory is None else directory.volume, policy, directory, note)


def _unless_cancelled(_done_bytes: int, _total_bytes: int) -> None:
    """Progress callback that stops reading the archive if the start is cancelled."""
    trio.from_thread.check_cancelled()


@contextmanager
def alone() -> Iterator[None]:
    """Exclude other starts of this user, so that two daemons do not find the same mountpoint free."""
    path = os.path.join(runtime.ensure_socket_dir(), ".starting")
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def recover(options: MountOptions) -> str | None:
    """Check that name and mountpoint are free; clear a dead daemon's mount, and return a sentence about it.

    FileExistsError for a name in use; otherwise as `mounts.check_mountpoint`, or `attached.check_free`.
    """
    record = runtime.read_record(options.workspace.name)
    if record is not None and (record.alive or record.is_kept):
        reason = f"a workspace named {record.name!r} is mounted at {record.mountpoint}; give --name another name"
        raise FileExistsError(errno.EEXIST, reason)
    if options.is_attached:
        attached.check_free(options)
        return None
    dead = mounts.check_mountpoint(options.workspace.mountpoint)
    if dead is None:
        return None
    left = runtime.read_records()
    if options.journal.persist and any(
        each.name == options.workspace.name and each.mountpoint == options.workspace.mountpoint and each.journal
        for each in left
    ):
        # Start-up: few daemons take the place of a dead one.
        from vfsd.daemon.backends.persistence import check_continued  # noqa: PLC0415

        check_continued(options)
    mounts.clear_dead_mount(options.workspace.mountpoint)
    mounts.check_mountpoint(options.workspace.mountpoint)
    found = [record for record in left if record.mountpoint == options.workspace.mountpoint]
    why = found[0].failure if found else None
    died = f"the daemon of {dead.describe()} had died" + (f" ({why})" if why else "")
    if found and found[0].name == options.workspace.name:
        if found[0].journal and options.journal.persist:
            return died if why else None  # this mount continues it, and says that its daemon had died
        if options.workspace.backend.kind == "image" and str(options.workspace.backend) == found[0].backend:
            return died  # the backend says where its content is
    costs = [record.content_after_crash for record in found]
    return f"{died}: {costs[0] if costs else _LOST}"
