"""The opener of `overlay`: a volume in memory on top of a directory, an archive, or a stored snapshot."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.host_lower import HostLower, MachineLower, directory_fingerprint
from protocol.backends.overlay.tree_lower import TreeLower
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError, shown
from protocol.journal.directory import has_journal
from protocol.linux.portable import proc_path
from protocol.store import Store
from protocol.store.trees import root_of
from protocol.tree import ByteProgress, no_progress
from vfsd.daemon.backends.persistence import recorded_below
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.backends.stored import check_outside, directory_of, intent_log_of, real_mountpoint, recover_apply
from vfsd.daemon.snapshots.archives import archive, read_origin
from vfsd.daemon.snapshots.base import FROZEN_PREFIX, FROZEN_TAG, free_name, is_frozen_base
from vfsd.daemon.snapshots.bases import drop_frozen, drop_unused_bases
from vfsd.daemon.snapshots.store_restore import Stored, applying
from vfsd.machine.directories import journal_directory, unused_journal
from vfsd.machine.logs import log_failure
from vfsd.machine.resources import default_max_memory
from vfsd.wire.options import BackendSpec, Below

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import Lower
    from protocol.store.trees import MountedSnapshot
    from protocol.volume_extensions import SnapshotInfo, SnapshotKind
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_CACHE_BYTES: Final = 32 << 20
_CACHE_SHARE: Final = 8  # of --max-memory, at most
_INDEX_SHARE: Final = 2
_LOWER_SHARE: Final = 2  # the lower layer may take half of the memory limit
_MIB: Final = 1 << 20
_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ATTEMPTS: Final = 5


def open_overlay(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    recovered = None
    if options.workspace.backend.lower_layer == "directory":
        recovered = recover_apply(options)
    base = _FrozenBase(options, progress) if _is_frozen(options) else None
    lower, held = _open_lower(options, limit) if base is None else (base.lower, base.held)
    close_lower = lower.close if base is None else base.close
    if lower.memory_bytes > limit // _LOWER_SHARE:
        close_lower()
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
            close_lower()
            raise
    volume.read_only = options.workspace.read_only
    notes = [note for note in (recovered, found, lower.notice, *(base.notes if base else ())) if note is not None]
    return Backend(
        volume,
        tidy=volume.tidy,
        close=functools.partial(_close, volume, close_lower),
        recovered="; ".join(notes) or None,
        held=held,
        anchor=lower.root_fd if base is None else base.root,
        reopening=lower.reopening,
        open_directory=None if base is None else base.open_directory,
    )


def _close(volume: OverlayVolume, close_lower: Callable[[], None]) -> None:
    if volume.journal is not None:
        from vfsd.daemon.backends.persistence import end_journal  # noqa: PLC0415 (few mounts have a journal)

        end_journal(volume)
    close_lower()


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

        mountpoint = real_mountpoint(options.workspace.mountpoint)
        parts = machine_parts(mountpoint)
        given = (options.workspace.store, options.journal.journal_dir)
        closed = [*parts.closed, mountpoint, *(os.path.realpath(path) for path in given if path)]
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


# -- a frozen base ----------------------------------------------------------------------------------
def _is_frozen(options: MountOptions) -> bool:
    """Return whether the base is a snapshot of the directory, as `options` or the journal of the overlay say.

    ValueError for --frozen with the journal of an overlay over the directory itself.
    """
    if options.workspace.backend.lower_layer != "directory":
        return False
    recorded = recorded_below(options)
    is_snapshot = root_of(recorded.fingerprint) is not None
    if options.content.frozen and recorded.fingerprint and not is_snapshot:
        raise ValueError(
            f"the journal of {options.workspace.name} is of an overlay that shows what changes in {recorded.argument}:"
            " mount it without --frozen, or give this one another --name or --journal-dir"
        )
    return options.content.frozen or is_snapshot


class _FrozenBase:
    """The snapshot of the directory that `options` name: the one of the journal, or a new one.

    Takes as long as a scan of the directory.  OSError, ValueError.
    """

    def __init__(self, options: MountOptions, progress: ByteProgress) -> None:
        self.options = options
        self.notes: list[str] = []
        directory = options.workspace.backend.argument
        self.root = os.dup(options.anchor) if options.anchor is not None else os.open(directory, _ROOT)
        try:
            self._mounted = self._opened(progress)
        except BaseException:
            os.close(self.root)
            raise
        self.held = (self._mounted.lease_descriptor,)
        self.lower = TreeLower(
            self._mounted,
            f"the snapshot of {directory}",
            fingerprint=self._mounted.fingerprint,
            memory_bytes=self._mounted.memory_bytes,
            close=self._mounted.close,
        )
        self.lower.reopening = directory_fingerprint(self.root).encode()

    def open_directory(self) -> Backend:
        """See `Backend`."""
        # Start-up: only frozen overlays need it.
        from vfsd.daemon.backends.stored import open_host  # noqa: PLC0415

        workspace = replace(
            self.options.workspace,
            backend=BackendSpec("host", os.fsdecode(os.readlink(proc_path(self.root)))),
            read_only=False,
        )
        options = replace(self.options, workspace=workspace, anchor=self.root, below=Below(""))
        return open_host(options, no_progress)

    def _opened(self, progress: ByteProgress) -> MountedSnapshot:
        recorded, argument, directory = recorded_below(self.options)
        if directory not in {b"", directory_fingerprint(self.root).encode()}:
            place, name = self.options.workspace.backend.argument, self.options.workspace.name
            raise ValueError(
                f"the journal of {name} is of a frozen overlay over {argument}, and {place} is not that one: mount it"
                " over that one, or give this one another --name or --journal-dir"
            )
        backend = self.open_directory()
        stored = backend.stored
        assert stored is not None, "that of a directory"
        try:
            self._finish_apply(stored)
            return self._recorded(stored, recorded) if recorded else self._taken(stored, progress)
        finally:
            backend.close()

    def _finish_apply(self, stored: Stored) -> None:
        """Complete an apply that was interrupted.  If that fails, the mount says so."""
        place = self.options.workspace.backend.argument
        try:
            with applying(stored, None) as finished:
                self.notes += [] if finished is None else [f"{place}: {finished}"]
        except OSError as error:
            log_failure(_logger, "finishing an interrupted apply", error, path=place, level=logging.WARNING)
            self.notes.append(f"{place}: an interrupted apply could not be finished: {error.strerror}")

    def _taken(self, stored: Stored, progress: ByteProgress) -> MountedSnapshot:
        """Take a snapshot, again if another mount of the directory takes its name, or drops it before it is used."""
        drop_unused_bases(stored.store, stored.key)
        name, journal = self.options.workspace.name, self.options.journal
        kind: SnapshotKind = "user" if journal.persist and journal.journal_dir is not None else "automatic"
        for attempts_left in reversed(range(_ATTEMPTS)):
            taken = free_name(f"{FROZEN_PREFIX}{name}-", stored.store.snapshots(stored.key))
            try:
                info = stored.store.take(
                    stored.key,
                    taken,
                    stored.source,
                    tag=f"{FROZEN_TAG}{name}",
                    kind=kind,
                    unreadable="skip",
                    progress=lambda files, _bytes: progress(files, 0),
                )
                mounted = stored.store.mounted(stored.key, taken)
            except (SnapshotExistsError, SnapshotNotFoundError):
                if not attempts_left:
                    raise
                continue
            self.notes += _incomplete(info)
            return mounted
        raise AssertionError("the last attempt returns or raises")

    def _recorded(self, stored: Stored, fingerprint: str) -> MountedSnapshot:
        """Open the snapshot that the journal, or the predecessor, had below the overlay."""
        store = stored.store
        for key, infos in store.workspaces().items():  # the directory may have been moved
            for info in filter(is_frozen_base, infos):
                if store.fingerprint(key, info.name) == fingerprint:
                    return store.mounted(key, info.name)
        mounted = store.mounted_again(fingerprint)
        if mounted is None:
            name = self.options.workspace.name
            reason = (
                f"the store {store.directory} lacks the snapshot of {self.options.workspace.backend.argument} that the"
                f" journal of {name} is over: `vfsd persisted drop {name}` removes the journal"
            )
            raise FileNotFoundError(errno.ENOENT, reason)
        return mounted

    def close(self) -> None:
        """Close the layer, and drop the snapshot unless a journal needs it."""
        self.lower.close()
        os.close(self.root)
        journal = self.options.journal
        directory = journal.journal_dir or journal_directory(self.options.workspace.name)
        if not (journal.persist and has_journal(directory)):
            with Store(self.options.workspace.store) as store:
                drop_frozen(store, self.options.workspace.name, self.lower.fingerprint)


def _incomplete(info: SnapshotInfo) -> Iterator[str]:
    """Say which files cannot be read in the workspace, and which may be wrong."""
    for paths, what in (
        (info.unreadable, "could not be read"),
        (info.unstable, "changed while it was read, and may mix old and new content"),
    ):
        if paths:
            more = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
            yield f"{shown(paths[0])}{more} {what}"


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
