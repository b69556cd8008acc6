"""SnapshotService: the snapshots of a workspace, as the control socket uses them.

Two implementations.  `VolumeSnapshots`: the volume itself holds the snapshots (memory, overlay); each change is one
step on the serving loop.  `StoreSnapshots`: a content-addressed store on disk holds them (host, container); the work
runs in a thread.

Both guarantee:

- dirty pages of shared mappings are in a state before it is kept, replaced or exported;
- one change at a time (`MountedVolume.change_lock`); the kernel's caches are invalidated before the answer;
- a restore or an import first keeps a safety snapshot, and is a step of the undo history (`history`).  If it fails, the
  state before it is restored and the safety snapshot dropped; if that fails too, the error names the command to run.
  If it changes nothing, it leaves neither a safety snapshot nor a step;
- the answer covers this change alone, whatever programs write meanwhile.  After the change is made, no later failure
  turns the answer into an error: it is logged, or reported in `Outcome.problems`.

Threading: methods are called, and contexts entered and left, on the serving loop.  Worker threads call the
`CallObserver`.  When the client disconnects, work stops unless it has begun to change something.
"""

from __future__ import annotations

import errno
import functools
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec
import trio

from protocol.diff.tree_diff import Change
from protocol.errors import SnapshotNotFoundError
from protocol.tree import ByteProgress, Tree
from protocol.types import ChangeCounts
from protocol.values import Value
from protocol.volume_extensions import SnapshotInfo, SnapshotKind, externally_changed, snapshotable
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.history import PrunedRecord, UndoHistory
from vfsd.operations.forks import MergedState

if TYPE_CHECKING:
    from vfsd.daemon.mounted_volume import MountedVolume
    from vfsd.daemon.snapshots.archives import Origin
    from vfsd.daemon.snapshots.store_restore import Stored

BASE: Final = ""  # the name of the lower layer's state; no snapshot has an empty name
SAFETY_PREFIX: Final = "safety-"
STAGED_PREFIX: Final = "archive-"  # the content of an archive that is being imported
SNAPSHOT_PREFIX: Final = "snap-"
FORK_PREFIX: Final = "fork-"
FORK_TAG: Final = "forked as "
FROZEN_PREFIX: Final = "frozen-"  # of a directory, below an overlay with a base that does not change
FROZEN_TAG: Final = "below "
MERGED_PREFIX: Final = "merged-"
MERGED_TAG: Final = "merged into "
MERGING: Final = "a merge of "  # the tag of a staged state that a merge puts in place
OVERLAY: Final = "overlay "  # before the name of a frozen overlay that is merged
_PATHS_SHOWN: Final = 5
_TAG_CHARACTERS: Final = 200
_NO_CHANGES: Final = ChangeCounts()
_logger = logging.getLogger(__name__)


class Staged(Value):
    """The content of an archive or of another workspace, which was checked and can be put in place.

    `name` is used in messages, `label` in the undo history; `total_bytes` is the size of the regular files.
    """

    name: str
    label: str
    tree: Tree
    files: int
    total_bytes: int

    def step(self, *, replace: bool) -> str:
        """The name in the undo history of the step that puts it in place."""
        return f"{'restore' if replace else 'import'} {self.label}"


class Outcome(Value):
    """The result of a restore or an import.

    `source`: the snapshot that the live state was made from.  `safety`: the snapshot of the state before; None if
    nothing changed.  `counts` covers all changes, `changes` lists the first of them.  `problems`: paths that could not
    be restored, with the reason.  `step`: the step that was undone or redone.  `expired`: safety snapshots that were
    dropped because no step led to them and they were too many or too old.  `older`: how many files got other content
    and an earlier mtime (`protocol.diff.tree_diff.went_back`).
    """

    source: str
    safety: str | None
    counts: ChangeCounts = _NO_CHANGES
    changes: Sequence[Change] = ()
    problems: Mapping[bytes, str] = msgspec.field(default_factory=dict)
    step: str | None = None
    expired: Sequence[SnapshotInfo] = ()
    undo_steps: int = 0
    redo_steps: int = 0
    older: int = 0

    @property
    def truncated(self) -> bool:
        """Whether `changes` is incomplete."""
        return self.counts.total > len(self.changes)


class Dropped(Value):
    """The effect of dropping snapshots on the undo history.

    `steps`: for each dropped snapshot that was a state of the history, the number of redos (positive) or undos
    (negative) that led to it.  `history`: the history after the drop.
    """

    steps: Mapping[str, int]
    history: UndoHistory


class Interrupted(Value):
    """A restore that a daemon began and did not complete.

    `source`: the snapshot to restore, below `paths` if there are any.  `safety`: the snapshot of the state before.
    `description` replaces the snapshot's name in messages.
    """

    source: str
    safety: str | None
    paths: tuple[bytes, ...] = ()
    description: str = ""

    def describe(self) -> str:
        """One sentence: what was interrupted, and the commands that complete it or undo it."""
        undo = "`vfsd restore --undo` goes back to before it" if self.safety else "the state before it was not kept"
        shown = [path.decode("utf-8", "backslashreplace") for path in self.paths]
        finish = f"`{shlex.join(['vfsd', 'restore', self.source, *shown])}` finishes it"
        if len(shown) > _PATHS_SHOWN:
            finish = f"`vfsd restore {self.source} PATH...`, with its {len(shown):,} paths, finishes it"
        name = self.description or f"a restore of {self.source!r}"
        return f"{name} was interrupted, and part of it is done: {finish}, {undo}"


class CallObserver:
    """The client's side of a running call (`vfsd.daemon.control.calls.CallContext`).  This one: no client waits for it.

    Any thread.
    """

    def raise_if_cancelled(self) -> None:
        """CallCancelledError if the client disconnected or cancelled the call."""

    def commit(self) -> None:
        """Declare that the call is about to change something: from now on it cannot be cancelled."""

    def progress_nowait(self, done: int, total: int, unit: Literal["files", "bytes"], /) -> None:
        """Report progress; `total` is 0 if it is not known."""


UNOBSERVED: Final = CallObserver()


def in_bytes(observer: CallObserver) -> ByteProgress:
    """Return a progress callback for work on archives that reports to `observer` and stops with it."""

    def report(done_bytes: int, total_bytes: int) -> None:
        observer.raise_if_cancelled()
        observer.progress_nowait(done_bytes, total_bytes, "bytes")

    return report


class LiveState(Value):
    """An immutable view of the live state.  `mark`: of the volume at that moment, if the volume has marks."""

    tree: Tree
    mark: int = 0


class NewState(Value):
    """A state to put in place: what `tree` has at and below `paths`, and the metadata of `directories`.

    It was computed from `before`, and differs from it by `changes`.  `source` is used in messages.  `merged` is what is
    merged into that state.
    """

    before: LiveState
    tree: Tree
    changes: Sequence[Change]
    paths: Sequence[bytes]
    directories: Sequence[bytes]
    source: str
    merged: Sequence[MergedState]


CheckState: TypeAlias = Callable[[Tree | None], None]
"""Called directly before a change, with the live state; None: it is the state that the change was computed from.  It
may raise to change nothing."""


CheckStep: TypeAlias = Callable[[SnapshotInfo], None]
"""Called before an undo or a redo, with the snapshot that it goes to and no other change in between.  It may raise to
change nothing."""


class StoredState(NamedTuple):
    """Snapshot `name` of the workspace `key` in the store `directory`.  The caller drops it, if `is_temporary`."""

    directory: str
    key: str
    name: str
    is_temporary: bool = False


class SnapshotService(Protocol):
    """The snapshots of one workspace.  A name without a snapshot raises SnapshotNotFoundError.

    The two implementations inherit from it, with what both have in common.

    `merges` says which states of other workspaces were merged into which state.  `needed_by_others` returns which of
    some snapshots other workspaces need, by name; expired safety snapshots among them stay.  Any thread.
    """

    merges: MergeLog
    needed_by_others: Callable[[Sequence[SnapshotInfo]], Collection[str]] = staticmethod(lambda _infos: ())

    @property
    def has_base(self) -> bool:
        """Whether there is a lower layer, whose state has the name BASE."""
        return False

    async def interrupted(self) -> Interrupted | None:
        """Return the restore that was interrupted, if there is one."""
        return None

    async def unfinished(self) -> str | None:
        """Return one sentence on an interrupted restore or apply, and on how to complete it; None: there is none."""
        ...

    async def take(
        self, name: str | None, tag: str | None, observer: CallObserver, *, kind: SnapshotKind = "user"
    ) -> SnapshotInfo:
        """Keep the present state under `name`; None generates a name.  SnapshotExistsError, ENOSPC.

        The volume may drop snapshots of the kind "automatic" to free memory.
        """
        ...

    async def infos(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        ...

    async def _all(self) -> Sequence[SnapshotInfo]:
        """As `infos`, with those that hold the content of an import."""
        return await self.infos()

    async def change_counts(self, newest: int | None = None) -> Mapping[str, ChangeCounts]:
        """Count the changes of each snapshot, or of the `newest` ones, against the one before it."""
        while True:
            try:
                return await self._count_changes(await self.infos(), newest)
            except SnapshotNotFoundError:  # dropped meanwhile, for example the base of a fork that ended
                continue

    async def _count_changes(self, infos: Sequence[SnapshotInfo], newest: int | None) -> Mapping[str, ChangeCounts]: ...

    async def drop(self, names: Sequence[str]) -> Dropped:
        """Drop the snapshots `names`; if one does not exist, drop none.  Open trees stay readable."""
        ...

    async def check_below(self) -> None:
        """Notice changes of files below an overlay, so that a comparison names them."""
        return

    async def drop_unused_bases(self, keep: Collection[str] = ()) -> None:  # noqa: ARG002
        """Drop the snapshots in a store, but those in `keep`, that were only needed by workspaces that have ended."""
        return

    def collect_pruned(self) -> Sequence[SnapshotInfo]:
        """Return the snapshots that the volume dropped to free memory since the last call."""
        return ()

    def pruned_records(self) -> Sequence[PrunedRecord]:
        """Return the records that a successor of this daemon needs of them."""
        return ()

    async def restore(
        self, name: str, paths: Sequence[bytes], observer: CallObserver, *, touch: bool = False
    ) -> Outcome:
        """Make the live state (below `paths`, or all of it) equal to snapshot `name`, or to BASE.

        Here and below, `touch` gives the files whose content changed one present mtime instead of the recorded ones.
        """
        ...

    async def undo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        """Go one step back in the history, keeping the live state for `redo`.  ENOENT at its beginning.

        After an interrupted restore, go to the state before it.
        """
        ...

    async def redo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        """Go one step forward in the history, keeping the live state for `undo`.  ENOENT at its end."""
        ...

    async def history(self) -> UndoHistory:
        """Return the undo history."""
        ...

    def staged(self, origin: Origin, observer: CallObserver) -> AbstractAsyncContextManager[Staged]:
        """Check the content of `origin` against its hashes and the workspace's limits.  ArchiveError, OSError."""
        ...

    async def put(
        self, staged: Staged, paths: Sequence[bytes], observer: CallObserver, *, replace: bool, touch: bool = False
    ) -> Outcome:
        """Put `staged` into the live state; see `SnapshotableVolume.import_tree`."""
        ...

    def tree(self, name: str | None, observer: CallObserver) -> AbstractAsyncContextManager[Tree]:
        """Open a tree of snapshot `name`, of BASE, or of the live state (None).  A worker thread may read it.

        If other programs can change the live state directly, a file may have newer content when it is read.
        """
        ...

    async def stored_state(self, name: str | None, observer: CallObserver) -> StoredState | None:  # noqa: ARG002
        """Return where a store on disk has snapshot `name`; None: a new temporary snapshot of the live state.

        None if the snapshots are not in a store.
        """
        return None

    def frozen(self, observer: CallObserver) -> AbstractAsyncContextManager[LiveState]:
        """Open the live state at this moment, whose content does not change while it is read."""
        ...

    def to_save(self, name: str | None, observer: CallObserver) -> AbstractAsyncContextManager[Tree]:
        """Open a tree of snapshot `name`, or of the live state at this moment (None), for a snapshot elsewhere.

        Its entries have their inode numbers and ctimes, where these are known.
        """
        ...

    async def put_merged(
        self, new: NewState, step: str, observer: CallObserver, check: CheckState, *, touch: bool = False
    ) -> Outcome:
        """Make the live state equal to `new` at its paths, as a step with the name `step`, if `check` allows it."""
        ...

    async def note_merged(self, merged: Sequence[MergedState]) -> None:
        """Record what is merged into the live state, which a merge did not need to change."""
        self.merges.record(max((info.serial for info in await self._all()), default=0), merged)


def open_snapshots(
    mounted: MountedVolume,
    stored: Stored | None,
    history: UndoHistory | None = None,
    merges: MergeLog | None = None,
    pruned: Sequence[PrunedRecord] = (),
) -> SnapshotService | None:
    """Return the volume's own snapshots, or those in `stored`; None if the backend has neither.

    `history` and `merges` are those of the workspace that this one was forked from.  `pruned`: of the daemon before.
    """
    # Start-up: only one of the two is needed.
    volume = snapshotable(mounted.volume)
    if volume is not None:
        from vfsd.daemon.snapshots.volume import VolumeSnapshots  # noqa: PLC0415

        return VolumeSnapshots(mounted, volume, history, merges, pruned)
    changed = externally_changed(mounted.volume)
    if stored is not None and changed is not None:
        from vfsd.daemon.snapshots.stored import StoreSnapshots  # noqa: PLC0415

        return StoreSnapshots(mounted, changed, stored)
    return None


def check_names(names: Sequence[str], infos: Sequence[SnapshotInfo]) -> None:
    """SnapshotNotFoundError for the first of `names` that no snapshot has."""
    existing = {info.name for info in infos}
    for name in names:
        if name not in existing:
            raise SnapshotNotFoundError(name)


def state_at(history: UndoHistory, infos: Sequence[SnapshotInfo], position: int) -> SnapshotInfo:
    """Return the snapshot at `position`.  ENOENT beyond the ends of the history."""
    if not 0 <= position < len(history.states):
        if history.is_cut_before if position < 0 else history.is_cut_after:
            way = "earlier" if position < 0 else "later"
            reason = (
                f"the {way} states were dropped because memory was needed (--max-memory): the snapshots that are left"
                " can be restored by name"
            )
        elif position < 0:
            reason = "there is no earlier restore, import, merge, adoption, apply or discard: there is nothing to undo"
        else:
            reason = "nothing was undone since the last step: there is nothing to redo"
        raise FileNotFoundError(errno.ENOENT, reason)
    return next(info for info in infos if info.serial == history.states[position].serial)


def log_expired(expired: Sequence[SnapshotInfo]) -> None:
    """Log that safety snapshots were dropped."""
    for info in expired:
        _logger.info("dropped %s, which no undo step needs any more", info.name, extra={"operation": "restore"})


def free_name(prefix: str, taken: Sequence[SnapshotInfo]) -> str:
    """Return `prefix` with a number higher than that of every snapshot in `taken`."""
    ends = [info.name[len(prefix) :] for info in taken if info.name.startswith(prefix)]
    return f"{prefix}{max((int(end) for end in ends if end.isascii() and end.isdigit()), default=0) + 1}"


def no_lower_layer() -> OSError:
    """Return the error for an operation that needs a lower layer."""
    return OSError(errno.EOPNOTSUPP, "only a workspace with the backend overlay:DIR has a directory below it")


def fork_tag(name: str, mountpoint: str) -> str:
    """Return the tag of a snapshot that is taken for a fork."""
    tag = f"{FORK_TAG}{name} at {mountpoint}"
    return tag.encode("utf-8", "backslashreplace").decode()[:_TAG_CHARACTERS]


def is_fork_base(info: SnapshotInfo) -> bool:
    """Return whether a snapshot was taken for a fork, or for a frozen overlay."""
    is_fork = info.name.startswith(FORK_PREFIX) and (info.tag or "").startswith(FORK_TAG)
    return info.kind == "automatic" and (is_fork or is_frozen_base(info))


def is_frozen_base(info: SnapshotInfo) -> bool:
    """Return whether a snapshot was taken for a frozen overlay."""
    return info.name.startswith(FROZEN_PREFIX) and (info.tag or "").startswith(FROZEN_TAG)


def is_merge_base(info: SnapshotInfo) -> bool:
    """Return whether a snapshot is a state that was merged into another workspace."""
    return info.kind == "automatic" and info.name.startswith(MERGED_PREFIX) and (info.tag or "").startswith(MERGED_TAG)


def is_reserved(name: str) -> bool:
    """Whether only vfsd itself may give a snapshot this name."""
    return name.startswith(SAFETY_PREFIX) or is_staged(name)


def is_staged(name: str) -> bool:
    """Whether a snapshot of this name holds the content of an archive that is being imported."""
    return name.startswith(STAGED_PREFIX) and name.removeprefix(STAGED_PREFIX).isdigit()


P = ParamSpec("P")
T = TypeVar("T")

_ANSWERS_AT_ONCE: Final = 40  # of all clients together; further ones wait
_answer_threads: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("answer threads")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a worker thread.  The loop waits for its end even if it is cancelled."""
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs))


async def in_answer_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`in_thread` for long answers: a client that does not read blocks a thread, but none of trio's default limiter.

    Those serve the mount, for example with the syncfs(2) before each snapshot.
    """
    try:
        limiter = _answer_threads.get()
    except LookupError:  # the first one of this trio.run
        limiter = trio.CapacityLimiter(_ANSWERS_AT_ONCE)
        _answer_threads.set(limiter)
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs), limiter=limiter)


@asynccontextmanager
async def entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter `manager` in a worker thread, because that may wait for a lock or read a whole archive."""
    value = await in_thread(manager.__enter__)
    error: BaseException | None = None
    try:
        yield value
    except BaseException as raised:
        error = raised
        raise
    finally:
        manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def required(snapshots: SnapshotService | None) -> SnapshotService:
    """Return `snapshots`.  OSError (EOPNOTSUPP) if the backend has none."""
    if snapshots is None:
        raise OSError(
            errno.EOPNOTSUPP,
            "this backend has no snapshots: use memory, overlay:DIR, host:DIR, container:NAME, image:REF or"
            " exec:COMMAND",
        )
    return snapshots
