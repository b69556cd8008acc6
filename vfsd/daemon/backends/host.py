"""The opener of `host`: a directory of this host, whose snapshots are in a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from protocol.backends.host import HostVolume
from protocol.linux.portable import proc_path
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.tree import ByteProgress
from vfsd.daemon.backends.base import Backend
from vfsd.daemon.backends.recovery import recover_apply
from vfsd.daemon.backends.shared import (
    allow_open_files,
    cache_timeout_s,
    check_outside,
    describe_interrupted,
    directory_of,
)
from vfsd.daemon.snapshots.stored_workspace import Stored

if TYPE_CHECKING:
    from vfsd.wire.options import MountOptions


def open_host(options: MountOptions, _progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    recovered = recover_apply(options)
    allow_open_files()
    volume = HostVolume(directory_of(options), read_only=options.workspace.read_only)
    try:
        stored = _stored_host(options, volume.root_fd)
        recovered = "; ".join(filter(None, (recovered, describe_interrupted(stored)))) or None
    except BaseException:
        volume.close()
        raise
    return Backend(
        volume,
        cache_timeout_s(options),
        volume.tidy,
        volume.close,
        recovered=recovered,
        stored=stored,
        anchor=volume.root_fd,
    )


def _stored_host(options: MountOptions, root: int) -> Stored:
    """Return the stored snapshots of the directory `root`.  ValueError for a given store that is inside it."""
    directory, given_store = options.workspace.backend.argument, options.workspace.store
    store = Store(given_store)
    source = DirectorySource(root)
    if given_store is not None:
        # If the user's default store is inside, the mount works and only snapshots are refused.
        try:
            store.check_apart(source.identity)
        except OSError as error:
            raise ValueError(f"the store {given_store} is inside {directory}, whose snapshots it keeps") from error
    check_outside(options, store)
    return Stored(store, f"host:{_key(directory, root)}", source, DirectoryTarget(root))


def _key(directory: str, root: int) -> str:
    """Return the path that names the directory `root` in the store: the real one when it was mounted."""
    real = os.path.realpath(directory)
    if real == os.path.abspath(directory):
        return real  # also if another daemon has `root` from before it was moved
    try:
        is_same = os.path.samestat(os.stat(real), os.fstat(root))
    except OSError:
        is_same = False
    return real if is_same else os.fsdecode(os.readlink(proc_path(root)))  # a symlink changed
