"""Optional parts of a volume, beyond inodes: snapshots, imports, a lower layer, forks, changes from outside.

Each protocol belongs to a capability (`protocol.volume.VolumeCapabilities`).  A caller asks with the functions at the
end of this module, never with isinstance: a volume that wraps another one has all methods, and declares what works.

Threading: as in `protocol.volume`; what other threads may do says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

import msgspec

from protocol.values import Value
from protocol.volume import Volume

if TYPE_CHECKING:
    from protocol.diff.tree_diff import Change
    from protocol.tree import Tree

SnapshotKind: TypeAlias = Literal["user", "safety", "automatic"]
TAG_MAX_BYTES: Final = 1024  # of a snapshot's tag in UTF-8


class SnapshotInfo(Value):
    """An immutable, named state of a volume.

    `serial` increases with every snapshot of the volume and is never given again.  `kind` is "safety" for one that
    vfsd took before a restore or an import, so that it can be undone, and "automatic" for one that it took after a
    command or a tool call.  Where memory is short, those of these two kinds are dropped.
    """

    name: str
    serial: int
    created_ns: int
    files: int  # inodes that are no directories
    directories: int
    size_bytes: int  # sum of the sizes of regular files, each inode once
    tag: str | None = None
    kind: SnapshotKind = "user"
    unstable: tuple[bytes, ...] = ()  # files that changed while they were read: they may mix old and new content
    unreadable: tuple[bytes, ...] = ()  # paths that could not be read, and are not in the snapshot


class EntryChange(NamedTuple):
    """The name `name` in directory `parent` referred to inode `old` (0: it did not exist) and refers to `new` now."""

    parent: int
    name: bytes
    old: int
    new: int


class InodeChange(NamedTuple):
    """Inode `inode` was changed in place: its content if `content`, else its attributes only."""

    inode: int
    content: bool


class CacheInvalidation(Value):
    """Changes that did not come through the mount, for which the kernel's caches have to be invalidated.

    `paths` maps every directory that is a parent in `entries`, and every inode in `inodes` that has a name, to one of
    its paths in the new state, relative to the root (b"" is the root).  `modes` has the mode of every inode that is
    `old` or `new` in `entries`, and of those in `inodes`.
    """

    entries: Sequence[EntryChange] = ()
    inodes: Sequence[InodeChange] = ()
    paths: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    modes: Mapping[int, int] = msgspec.field(default_factory=dict)


class VolumeUsage(Value):
    """Size, memory use and limits of a volume.  None: not known, or no limit."""

    files: int | None = None  # live inodes that are no directories
    directories: int | None = None
    size_bytes: int | None = None  # sum of the sizes of regular files, each inode once
    used_bytes: int | None = None  # counted against `max_bytes`
    max_bytes: int | None = None
    max_inodes: int | None = None
    live_bytes: int | None = None  # memory of the live state
    snapshot_bytes: int | None = None  # memory that only snapshots hold
    overhead_bytes: int | None = None  # memory that is reserved, lent, or used for what is known of a lower layer
    max_memory: int | None = None  # limit of these three together
    pruned: int | None = None  # snapshots dropped to free memory
    changed_below: int | None = None  # files of a lower layer that changed since the volume first read them
    # Of a lower layer in an object store.
    source: str | None = None  # its URL, with the name of the snapshot
    fetched_bytes: int | None = None  # received from there
    prefetch: str | None = None  # how far it is
    fetch_failure: str | None = None  # why the last fetch failed; None if it succeeded
    cache_failure: str | None = None  # why the cache of what was fetched cannot be written
    inode_failure: str | None = None  # where a stored snapshot's inode numbers and ctimes are lost, and why


class VolumeChanges(Protocol):
    """The result of a `SnapshotableVolume.changes` block."""

    @property
    def invalidation(self) -> CacheInvalidation:
        """The changes of the block; empty until the block ends."""
        ...


@runtime_checkable
class SnapshotableVolume(Volume, Protocol):
    """A volume with snapshots of its own (capability `snapshots`).

    The caller makes all calls on the serving loop; no method awaits.
    """

    on_pruned: Callable[[SnapshotInfo], None] | None
    """Called with each snapshot that the volume drops to free memory.  A volume that never does so never calls it."""

    def usage(self) -> VolumeUsage:
        """Return size, memory use and limits.  O(1).  `files`, `directories` and `size_bytes` are never None."""
        ...

    def has_lookups(self, inode: int) -> bool:
        """Whether the kernel has looked `inode` up and not forgotten it; False for a freed inode.

        A change that does not come through the mount invalidates the kernel's caches of these inodes only.
        """
        ...

    # -- snapshots ---------------------------------------------------------------------------
    def take_snapshot(self, name: str, *, tag: str | None = None, kind: SnapshotKind = "user") -> SnapshotInfo:
        """Keep the current state under `name`.  O(1).  SnapshotExistsError, ENAMETOOLONG, ENOSPC."""
        ...

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        ...

    def snapshot(self, name: str) -> SnapshotInfo:
        """Return one snapshot.  SnapshotNotFoundError."""
        ...

    def drop_snapshot(self, name: str) -> None:
        """Drop snapshot `name`; others are not affected, open trees stay readable.  SnapshotNotFoundError."""
        ...

    def keeping(self, *names: str) -> AbstractContextManager[None]:
        """Inside the block, do not drop the snapshots `names` to free memory."""
        ...

    def tree(self, name: str | None = None) -> AbstractContextManager[Tree]:
        """Open a read-only tree of snapshot `name`, or of the live state at this moment.

        Another thread may read the tree while the volume continues; enter and leave the block on the loop.
        """
        ...

    # -- changes that do not come through the mount ------------------------------------------
    def restore_snapshot(self, name: str, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to snapshot `name`.

        O(what changed since).  Open files stay usable; unchanged files are not touched.  Later snapshots stay and can
        be restored.  ENOENT if a path is in neither state.
        """
        ...

    def import_tree(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Put the content of `tree` into the live state, all or nothing.

        With `replace` the state (below `paths`, or all of it) becomes equal to `tree`: what `tree` lacks is
        removed, what is equal is not touched.  Without, entries that `tree` lacks stay.
        """
        ...

    def changes(self) -> AbstractContextManager[VolumeChanges]:
        """Make several calls as one change: if the block raises, all of them are undone.  It must not await."""
        ...

    # -- unsaved changes ---------------------------------------------------------------------
    def mark(self) -> int:
        """Return a number for the current state, to pass to `changed_since`.  O(1)."""
        ...

    def changed_since(self, mark: int) -> bool:
        """Whether anything reachable by a path was written since `mark`, even if it has the same value.  O(1)."""
        ...

    def mark_saved(self, tree: Tree | None = None) -> None:
        """Record that the state in `tree` is stored elsewhere; None: the live state.  Other trees are ignored."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether the live state has not changed since the state recorded by `mark_saved`."""
        ...

    @property
    def saved_ns(self) -> int | None:
        """The time of the last `mark_saved`, in nanoseconds since the epoch; None: never."""
        ...


# -- optional parts, by capability -----------------------------------------------------------------


class ImportStage(Protocol):
    """Memory in which the content of an import is unpacked before it becomes part of a volume.

    A worker thread may use it; `give_back` ends it.
    """

    def usage(self) -> VolumeUsage:
        """Size and limits of what was unpacked."""
        ...

    def reserving(self) -> AbstractContextManager[Callable[[int], None]]:
        """A function that reserves a number of bytes of memory until the block ends.  It raises ENOSPC."""
        ...

    def fill(self, tree: Tree, reserved: Any = None) -> None:
        """Unpack `tree`, once.  `reserved` is a result of `PreparingVolume.reserve_inodes`.  ENOSPC."""
        ...

    def tree(self) -> AbstractContextManager[Tree]:
        """Open a read-only tree of the content."""
        ...

    def give_back(self) -> None:
        """Return the memory to the volume."""
        ...


class StagingVolume(SnapshotableVolume, Protocol):
    """A volume that lends memory for the content of an import (capability `staged_imports`).

    Without it, `import_tree` reads the content directly from its source.
    """

    def new_stage(self) -> ImportStage:
        """Make an empty stage with this volume's limits.  Any thread."""
        ...

    def import_tree(
        self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = (), directories: Sequence[bytes] | None = None
    ) -> CacheInvalidation:
        """See `SnapshotableVolume.import_tree`.

        With `directories`, these directories get the metadata that they have in `tree`, and what is in them stays; then
        empty `paths` mean none, not all.
        """
        ...


class ImportPreparation(Protocol):
    """The new entries of an `import_tree`, built before they become visible."""

    def steps(self) -> Iterator[int]:
        """Build in small steps; each yields the number of entries that it built.  ENOSPC."""
        ...

    @property
    def is_valid(self) -> bool:
        """Whether everything that was built can still take its place."""
        ...

    def discard(self) -> Iterator[None]:
        """Remove what was built, in small steps."""
        ...


class PreparingVolume(StagingVolume, Protocol):
    """A volume that can build an import in small steps, so that the mount answers meanwhile.

    Capability `prepared_imports`.  Without it, an import is one call of `import_tree`.
    """

    def reserve_inodes(self, count: int) -> Any:
        """Reserve `count` inode numbers for a stage, whose inodes the import then moves instead of copying them."""
        ...

    def preparation(
        self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = (), directories: Sequence[bytes] | None = None
    ) -> ImportPreparation:
        """Prepare an `import_tree` with these arguments.  Take no snapshot until it is imported or discarded."""
        ...

    def import_prepared(self, preparation: Any) -> CacheInvalidation:
        """Do the `import_tree` that a valid `preparation` is for.  An error leaves the state as it was."""
        ...


class ApplyConflict(Value):
    """A path of the lower layer that another program changed, or that prevents the removal of its directory."""

    path: bytes
    reason: str


class ApplyResult(Protocol):
    """The changes that an apply wrote to the lower layer, or would write, and those that it left out."""

    changes: list[Change]
    conflicts: list[ApplyConflict]
    problems: list[ApplyConflict]  # paths that cannot be written, with `force` either
    error: BaseException | None  # what stopped it; some changes may be written
    repositories: list[bytes]  # git repositories that both sides changed, which are in neither of the above

    @property
    def recovery(self) -> str | None:
        """A sentence on an earlier, interrupted apply that this one completed or rolled back."""
        ...


class ApplyRun(Protocol):
    """One apply of an `OverlaidVolume`."""

    def write(self, keep_going: Callable[[], None]) -> ApplyResult:
        """Check for conflicts and write.  A worker thread.  `keep_going` may raise until the first change is made."""
        ...

    def finish(self, result: Any) -> None:
        """Record in the volume what `write` returned.  The serving loop."""
        ...


class OverlaidVolume(SnapshotableVolume, Protocol):
    """A volume whose live state covers a directory, its lower layer (capability `lower_layer`)."""

    on_change: Callable[[CacheInvalidation], None] | None
    """Called, from any thread, when a file of the lower layer changed; the caller invalidates the kernel's caches."""

    in_thread: Callable[[Callable[[], object]], Awaitable[object]] | None
    """Runs a function in a worker thread.  If it is set, `read_pieces` may return an awaitable, for a slow read."""

    def serve_here(self) -> None:
        """Have calls in this thread raise NotReadyError where they would have to wait for the network."""
        ...

    def invalidation_done(self, invalidation: CacheInvalidation) -> None:
        """Serve the new content of what `on_change` was called with: the kernel's caches are invalidated."""
        ...

    @property
    def apply_interrupted(self) -> bool:
        """Whether an apply was interrupted; the next one completes it or rolls it back."""
        ...

    def check_below(self) -> None:
        """Notice files of the lower layer that other programs changed, if few enough were read.  A worker thread."""
        ...

    def following_tree(self, name: str) -> AbstractContextManager[Tree]:
        """Open a tree of snapshot `name` in which files that other programs changed below are as they are now.

        For the base of a merge: what changed below both sides is no change of either.
        """
        ...

    def unchanged_ctime(self, inode: int) -> int | None:
        """Return the ctime of a file that has no changes over the lower layer, else None.

        With this ctime, the file is still unchanged if its mtime is set.
        """
        ...

    def lose_changed(self, name: str) -> None:
        """Make live files unreadable that other programs changed below since snapshot `name`, which was restored."""
        ...

    def base_tree(self) -> AbstractContextManager[Tree]:
        """Open a read-only tree of the lower layer, in the state in which the volume first read it."""
        ...

    def discard(self, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to the lower layer.  ENOENT."""
        ...

    def applying(self, paths: Sequence[bytes], *, force: bool, dry_run: bool) -> AbstractContextManager[ApplyRun]:
        """Write the live state of this moment (below `paths`, or all of it) to the lower layer.

        With conflicts nothing is written, unless `force`.  Enter and leave the block on the loop.
        """
        ...

    def merged(self, tree: Any, found: Sequence[Change], pending: Collection[bytes]) -> None:
        """Make the base equal to `tree`, a view of the live state, at the paths of the changes `found`.

        Another directory has these changes now.  `pending` are the paths at which the base still differs from `tree`.
        """
        ...


class ExternallyChangedVolume(Volume, Protocol):
    """A volume over files that a restore changes directly (capability `external_changes`).

    All calls are made on the serving loop, between which a worker thread changes the files.
    """

    def hold(self, paths: Iterable[bytes]) -> None:
        """Keep the open files at `paths` usable: they are about to be changed.  May be called repeatedly."""
        ...

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        """Update the volume for `changes` below it, and return what the kernel has to invalidate.

        A change that did not happen is ignored.  May be called repeatedly, each time with a part of the changes.
        """
        ...

    def release(self) -> None:
        """End what `hold` began: all changes were passed to `invalidation_of`."""
        ...


class CheckableVolume(Volume, Protocol):
    """A volume that can verify its own state (capability `self_check`)."""

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself.  Checks everything."""
        ...


class SharedLimit(Protocol):
    """A limit of memory that a volume shares with its copies in other processes.

    `bases`: snapshots that copies have as well, so that dropping them frees nothing.
    """

    bases: set[str]

    def wrote(self, count: int) -> bool:
        """Note that `count` bytes of content are written; return whether `has_room` need not be asked yet."""
        ...

    def has_room(self, total: int, count: int) -> bool:
        """Whether there is room for `count` more bytes.  `total` is what the volume accounts for now.  Any thread."""
        ...

    def room(self, total: int) -> int | None:
        """About how many more bytes there is room for, at least 0; None: no limit.  `total` as for `has_room`."""
        ...

    def forking(self) -> AbstractContextManager[object]:
        """A block around fork(2) in which no other thread is inside a call."""
        ...

    def forked(self) -> None:
        """In the forked process: begin without what its parent has taken."""
        ...


class ForkableVolume(SnapshotableVolume, Protocol):
    """A volume that a copy of the process can serve after fork(2) (capability `forkable`): each has its own state."""

    def share_limit(self, limit: SharedLimit | None) -> None:
        """From now on refuse with ENOSPC what needs memory that `limit` has no room for; also in copies of the process.

        None: no copy of the process is left.  Removing, shortening, dropping and restoring are never refused.
        """
        ...

    def forking(self) -> AbstractContextManager[None]:
        """Inside the block, on the thread that calls fork(2), no other thread changes the state.

        The serving loop must be at rest.  The block ends in both processes.
        """
        ...

    def forked(self) -> None:
        """In the new process: drop what belonged to the old one's kernel and threads.

        That is: lookups, inodes without links, open views, and memory lent to imports.
        """
        ...


def snapshotable(volume: Volume) -> SnapshotableVolume | None:
    """Return `volume` if it declares `snapshots`, else None."""
    return cast(SnapshotableVolume, volume) if volume.capabilities.snapshots else None


def forkable(volume: Volume) -> ForkableVolume | None:
    """Return `volume` if it declares `forkable`."""
    return cast(ForkableVolume, volume) if volume.capabilities.forkable else None


def overlaid(volume: Volume) -> OverlaidVolume | None:
    """Return `volume` if it declares `lower_layer`."""
    return cast(OverlaidVolume, volume) if volume.capabilities.lower_layer else None


def externally_changed(volume: Volume) -> ExternallyChangedVolume | None:
    """Return `volume` if it declares `external_changes`."""
    return cast(ExternallyChangedVolume, volume) if volume.capabilities.external_changes else None


def staging(volume: Volume) -> StagingVolume | None:
    """Return `volume` if it declares `staged_imports`."""
    return cast(StagingVolume, volume) if volume.capabilities.staged_imports else None


def preparing(volume: Volume) -> PreparingVolume | None:
    """Return `volume` if it declares `prepared_imports`."""
    return cast(PreparingVolume, volume) if volume.capabilities.prepared_imports else None


def checkable(volume: Volume) -> CheckableVolume | None:
    """Return `volume` if it declares `self_check`."""
    return cast(CheckableVolume, volume) if volume.capabilities.self_check else None
