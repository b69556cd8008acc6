"""Helpers of several openers: limits, cache timeouts, the store of snapshots, recovery of a killed `apply`."""

from __future__ import annotations

import errno
import logging
import os
import resource
from typing import TYPE_CHECKING, Final

from protocol.backends.overlay.intent_log import recover
from protocol.store import Store
from vfsd.daemon.snapshots.store_restore import Stored, interrupted
from vfsd.machine.logs import log_failure
from vfsd.machine.mountinfo import mounts_at

if TYPE_CHECKING:
    from protocol.linux.beneath import DirectoryReference
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_HOST_CACHE_TIMEOUT_S: Final = 1.0


def cache_timeout_s(options: MountOptions) -> float:
    """Return how long the kernel may cache what other programs can change."""
    timeout_s = options.kernel.cache_timeout_s
    return _HOST_CACHE_TIMEOUT_S if timeout_s is None else timeout_s


def allow_open_files() -> None:
    """Raise this process's limit of open files to the hard limit; a host volume keeps up to half as many open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def directory_of(options: MountOptions) -> DirectoryReference:
    """Return the directory that the backend names: its path, or the descriptor that another daemon had of it."""
    argument = os.fsencode(options.workspace.backend.argument)
    return argument if options.anchor is None else options.anchor


def check_outside(options: MountOptions, store: Store) -> None:
    """Raise ValueError for a store that the mount would hide."""
    mountpoint = real_mountpoint(options.workspace.mountpoint)
    if os.path.commonpath((os.path.realpath(store.directory), mountpoint)) == mountpoint:
        raise ValueError(f"the store {store.directory} is inside the mountpoint {options.workspace.mountpoint}")


def real_mountpoint(path: str) -> str:
    """Return the path without symlinks.  If it is mounted already, by a daemon that died, it is not asked."""
    while True:
        above, name = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(above), name)
        if mounts_at(path):
            return path
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # it is no symlink
            return path


def describe_interrupted(stored: Stored) -> str | None:
    """Describe a restore that was interrupted, and how to finish or undo it; None if there is none."""
    try:
        found = interrupted(stored)
    except (OSError, ValueError) as error:
        # An unreadable store prevents snapshots, not the mount.
        _logger.warning("the snapshot store cannot be read: %s", error, extra={"path": stored.store.directory})
        return None
    if found is None:
        return None
    _logger.warning("%s", found.describe(), extra={"operation": "mount"})
    return found.describe()


def recover_apply(options: MountOptions) -> str | None:
    """Finish or undo a killed `apply` into the backend's directory; return a sentence about it, if there was one.

    A daemon that takes over from another one leaves that to the user, because the other one may go on.
    """
    if options.below is not None:
        return None
    directory = options.workspace.backend.argument
    try:
        found = recover(directory_of(options))
    except OSError as error:
        # EBUSY: that apply is still running.  No other failure here prevents the mount.
        if error.errno == errno.EBUSY:
            return None
        log_failure(_logger, "finishing an interrupted apply", error, path=directory, level=logging.WARNING)
        return f"{directory}: an interrupted apply could not be finished: {error.filename or ''}: {error.strerror}"
    if found is None:
        return None
    _logger.warning("%s", found, extra={"path": directory, "workspace": options.workspace.name})
    return f"{directory}: {found}"
