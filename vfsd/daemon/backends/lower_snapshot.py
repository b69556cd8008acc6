"""Opens a snapshot that is stored on this host as the lower layer of an overlay."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from protocol.backends.overlay.tree_lower import TreeLower
from protocol.errors import SnapshotNotFoundError
from protocol.store import Store
from vfsd.daemon.backends.persistence import recorded_below
from vfsd.daemon.backends.shared import check_outside

if TYPE_CHECKING:
    from protocol.store.mounted import MountedSnapshot
    from vfsd.wire.options import MountOptions


def open_snapshot(options: MountOptions) -> tuple[TreeLower, int]:
    """Open the snapshot that "overlay:snapshot:NAME[@DIRECTORY]" names, and return it with the descriptor of its lease.

    OSError, ValueError.

    With a directory it is a snapshot of the workspace host:DIRECTORY, with a URL one that was pulled from there, else
    one of the only workspace in the store that has one of this name.
    """
    named = options.workspace.backend.snapshot
    assert named is not None
    name, directory = named
    store = Store(options.workspace.store)
    check_outside(options, store)
    try:
        mounted, key = _mounted(options, store, name, directory)
    except BaseException:
        store.close()
        raise
    lower = TreeLower(
        mounted,
        f"the snapshot {name} of {key}",
        fingerprint=mounted.fingerprint,
        memory_bytes=mounted.memory_bytes,
        close=mounted.close,
    )
    return lower, mounted.lease_descriptor


def _mounted(options: MountOptions, store: Store, name: str, directory: str | None) -> tuple[MountedSnapshot, str]:
    """Return the snapshot, and what has it.

    If it was dropped, or another one has got its name, while a daemon had it mounted that this one replaces, then
    the lease of that daemon still has it.
    """
    recorded = recorded_below(options).fingerprint
    try:
        if options.origin is not None:
            key = options.origin.workspace
        else:
            key = _key(directory) if directory else _only_workspace(store, name)
        try:
            mounted = store.mounted(key, name)
        except SnapshotNotFoundError:
            raise _missing(name, f"{key} has no snapshot", store) from None
    except (FileNotFoundError, ValueError):
        again = store.mounted_again(recorded)
        if again is None:
            raise
        return again, "a workspace that dropped it"
    if recorded not in {"", mounted.fingerprint} and (again := store.mounted_again(recorded)) is not None:
        mounted.close_lease()
        return again, key
    return mounted, key


def _missing(name: str, who_has_none: str, store: Store) -> FileNotFoundError:
    given = "" if store.directory == Store().directory else f" --store {store.directory}"
    advice = f"`vfsd store list{given}` shows all snapshots, and `vfsd store list WORKSPACE{given}` those of one"
    return FileNotFoundError(errno.ENOENT, f"{who_has_none} {name!r} in the store {store.directory}; {advice}")


def _key(origin: str) -> str:
    """Return the key of the workspace host:DIRECTORY, or of the object store that a snapshot was pulled from."""
    return origin if "://" in origin else f"host:{os.path.realpath(origin)}"


def _only_workspace(store: Store, name: str) -> str:
    """Return the key of the only workspace that has a snapshot `name`.  FileNotFoundError; ValueError if several do."""
    keys = store.workspaces_with(name)
    if not keys:
        raise _missing(name, "no workspace has a snapshot", store)
    if len(keys) > 1:
        directories = [key.removeprefix("host:") for key in keys if key.startswith("host:") or "://" in key]
        example = f"overlay:snapshot:{name}@{directories[0]}" if directories else f"overlay:snapshot:{name}@DIRECTORY"
        raise ValueError(f"{len(keys)} workspaces have a snapshot {name} ({', '.join(keys)}): write {example}")
    return keys[0]
