"""Mountpoints that vfsd makes itself, in the runtime directory; they are removed after the unmount."""

from __future__ import annotations

import contextlib
import errno
import os

from vfsd.machine.journals import journal_directory
from vfsd.machine.runtime import ensure_socket_dir, socket_dir, unique_name
from vfsd.machine.selection import PLACES


def make_place(base: str, outside: str) -> str:
    """Make an empty directory for a mount, and return its path.

    Its last component is a name that neither a workspace nor a journal has.

    `base` is the beginning of the name.  `outside` is a directory that the mount will show, so the mountpoint must not
    be in it: OSError (EINVAL).
    """
    parent = os.path.join(ensure_socket_dir(), PLACES)
    real = os.path.realpath(parent)
    if os.path.commonpath((real, os.path.realpath(outside))) == os.path.realpath(outside):
        reason = "it contains vfsd's runtime directory: set $VFSD_RUNTIME_DIR to a directory outside of it"
        raise OSError(errno.EINVAL, reason, outside)
    os.makedirs(parent, mode=0o700, exist_ok=True)

    def is_taken(name: str) -> bool:  # also by an earlier run whose journal was kept
        return os.path.lexists(journal_directory(name)) or os.path.lexists(os.path.join(parent, name))

    while True:
        path = os.path.join(parent, unique_name(f"/{base}", is_taken))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path


def is_own_place(path: str) -> bool:
    """Return whether vfsd made the mountpoint `path`."""
    directory = socket_dir()
    return os.path.dirname(path) in {os.path.join(each, PLACES) for each in (directory, os.path.realpath(directory))}


def remove_place(path: str) -> None:
    """Remove the mountpoint `path` if vfsd made it and nothing is mounted there or in it."""
    if is_own_place(path):
        with contextlib.suppress(OSError):
            os.rmdir(path)
