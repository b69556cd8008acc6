"""The opener of `host`: a directory of this host, whose snapshots are in a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from protocol.backends.host import HostVolume
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.tree import ByteProgress
from vfsd.daemon.backends.base import Backend
from vfsd.daemon.backends.recovery import recover_apply
from vfsd.daemon.backends.shared import allow_open_files, cache_timeout_s, check_outside, describe_interrupted
from vfsd.daemon.snapshots.stored import Stored

if TYPE_CHECKING:
    from vfsd.wire.options import MountOptions


def open_host(options: MountOptions, _progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    directory = options.workspace.backend.argument
    stored = _stored_host(options, directory)
    found = filter(None, (recover_apply(options, directory), describe_interrupted(stored)))
    recovered = "; ".join(found) or None
    allow_open_files()
    volume = HostVolume(os.fsencode(directory), read_only=options.workspace.read_only)
    return Backend(volume, cache_timeout_s(options), volume.tidy, volume.close, recovered=recovered, stored=stored)


def _stored_host(options: MountOptions, directory: str) -> Stored:
    """Return the stored snapshots of a directory.  ValueError for a given store that is inside the directory."""
    real, given_store = os.path.realpath(directory), options.workspace.store
    store = Store(given_store)
    source = DirectorySource(real)
    if given_store is not None:
        # If the user's default store is inside, the mount works and only snapshots are refused.
        try:
            store.check_apart(source.identity)
        except OSError as error:
            raise ValueError(f"the store {given_store} is inside {directory}, whose snapshots it keeps") from error
    check_outside(options, store)
    return Stored(store, f"host:{real}", source, DirectoryTarget(real))
