"""The opener of `overlay`: a volume in memory on top of a directory, an archive, or a stored snapshot."""

from __future__ import annotations

import errno
import functools
import logging
import os
from typing import TYPE_CHECKING, Final

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.host_lower import HostLower, MachineLower
from protocol.backends.overlay.tree_lower import TreeLower
from protocol.errors import SnapshotNotFoundError
from protocol.store import Store
from protocol.tree import ByteProgress
from vfsd.daemon.backends.persistence import recorded_below
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.backends.stored import check_outside, directory_of, intent_log_of, recover_apply
from vfsd.daemon.snapshots.archives import archive, read_origin
from vfsd.machine.directories import unused_journal
from vfsd.machine.resources import default_max_memory

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import Lower
    from protocol.store.trees import MountedSnapshot
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_CACHE_BYTES: Final = 32 << 20
_CACHE_SHARE: Final = 8  # of --max-memory, at most
_INDEX_SHARE: Final = 2
_LOWER_SHARE: Final = 2  # the lower layer may take half of the memory limit
_MIB: Final = 1 << 20


def open_overlay(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    recovered = None
    if options.workspace.backend.lower_layer == "directory":
        recovered = recover_apply(options)
    lower, held = _open_lower(options, limit)
    if lower.memory_bytes > limit // _LOWER_SHARE:
        lower.close()
        least = f"--max-memory {_LOWER_SHARE * lower.memory_bytes // _MIB + 1}M"
        raise OSError(errno.ENOMEM, f"the layer below the overlay takes {lower.memory_bytes // _MIB} MiB: use {least}")
    volume = OverlayVolume(
        lower,
        options.limits.max_bytes or limit,
        options.limits.max_inodes,
        include=options.content.include,
        exclude=options.content.exclude,
        max_memory=limit,
    )

    def begin() -> None:
        if options.content.archive is not None:
            with read_origin(archive(options.content.archive), volume, progress).tree() as tree:
                volume.import_tree(tree, replace=False)

    if not options.journal.persist:
        begin()
        volume.mark_saved()
        found = unused_journal(options.workspace.name)
    else:
        # Deferred: few mounts have a journal.
        from vfsd.daemon.backends.persistence import keep_journal  # noqa: PLC0415

        try:
            found = keep_journal(options, volume, begin, below=lower.fingerprint, reopening=lower.reopening)
        except BaseException:
            lower.close()
            raise
    volume.read_only = options.workspace.read_only
    notes = [note for note in (recovered, found, lower.notice) if note is not None]
    return Backend(
        volume,
        tidy=volume.tidy,
        close=functools.partial(_close, volume),
        recovered="; ".join(notes) or None,
        held=held,
        anchor=lower.root_fd,
        reopening=lower.reopening,
    )


def _close(volume: OverlayVolume) -> None:
    if volume.journal is not None:
        from vfsd.daemon.backends.persistence import end_journal  # noqa: PLC0415 (few mounts have a journal)

        end_journal(volume)
    volume.lower.close()


def _open_lower(options: MountOptions, limit: int) -> tuple[Lower, tuple[int, ...]]:
    """Return the layer, and the descriptors of `Backend.held`."""
    backend = options.workspace.backend
    if backend.lower_layer == "snapshot":
        lower, lease = _open_snapshot(options)
        return lower, (lease,)
    if backend.lower_layer == "remote":
        from vfsd.daemon.backends.lower_remote import open_remote  # noqa: PLC0415 (start-up: few overlays)

        return open_remote(options), ()
    if backend.lower_layer == "archive":
        return _open_archive(backend.argument, limit), ()
    if backend.argument == "/":
        from vfsd.machine.whole_machine import machine_parts  # noqa: PLC0415 (start-up: few overlays)

        parts = machine_parts(options.workspace.mountpoint)
        given = (options.workspace.mountpoint, options.workspace.store, options.journal.journal_dir)
        closed = [*parts.closed, *(os.path.realpath(path) for path in given if path)]
        overlaid, closed_names = (
            [os.fsencode(path.lstrip("/")) for path in paths] for paths in (parts.overlaid, closed)
        )
        return MachineLower(directory_of(options), overlaid, closed_names, intent_log_of(options)), ()
    return HostLower(directory_of(options)), ()


def _open_archive(path: str, max_memory: int) -> TreeLower:
    """Open the archive at `path`.  ArchiveError; OSError, ENOMEM if its index needs half of `max_memory` or more."""
    from protocol.archive.mounted import MountedArchive  # noqa: PLC0415 (start-up: few overlays)

    def reserve(count: int) -> None:
        if count > max_memory // _INDEX_SHARE:
            advice = f"its index takes {count >> 20} MiB for a moment: give the workspace more --max-memory"
            raise OSError(errno.ENOMEM, advice, path)

    mounted = MountedArchive(path, reserve=reserve, cache_bytes=min(_CACHE_BYTES, max_memory // _CACHE_SHARE))
    noticed: set[str] = set()

    def check() -> None:
        problem = mounted.problem()
        if problem is not None and problem not in noticed:
            noticed.add(problem)
            _logger.warning("the archive below the overlay %s", problem, extra={"path": path})

    return TreeLower(
        mounted,
        path,
        fingerprint=mounted.fingerprint,
        memory_bytes=mounted.memory_bytes,
        check=check,
        close=mounted.close,
    )


def _open_snapshot(options: MountOptions) -> tuple[TreeLower, int]:
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

    If it was dropped while the predecessor had it mounted, or a later snapshot has its name, then the lease of the
    predecessor still has it.
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
