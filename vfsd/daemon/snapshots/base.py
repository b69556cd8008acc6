"""SnapshotService: what the control socket asks of the snapshots of a workspace, whoever keeps them.

There are two implementations.  `VolumeSnapshots` are the volume's own (memory, overlay): each is one step on the
serving loop.  `StoreSnapshots` are kept in a content-addressed store on disk (host directories, and whatever else
can be read and written as files): work in a thread, which takes as long as there is to do.

Both keep to this:

- what programs have written to shared mappings is in a state before it is kept, replaced or left;
- only one change beside the mount is made at a time (`Served.changing`), and the kernel knows of it when its caller
  is answered: then no program can see the state before;
- a restore or an import keeps the state before as a safety snapshot, and is a step of the history (`history`).  One
  that fails leaves that state, and no safety snapshot for what did not happen; where it could not be put back, the
  error says how to.  One that changes nothing keeps none and is no step;
- what is answered is about this change alone, whatever programs write meanwhile.  Once the change is made, nothing
  turns the answer into an error: what else fails is logged, or named in `Outcome.problems`.

Threading: every method is called, and every context entered and left, on the serving loop.  Worker threads call the
`CallObserver`.  When its client is gone, work that can stop without leaving half a change stops.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from protocol.archive import ByteProgress
from protocol.diff.tree_diff import DiffCounts
from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree
from protocol.volume import SnapshotInfo, SnapshotKind
from vfsd.daemon.snapshots.archives import Origin
from vfsd.daemon.snapshots.history import UndoHistory
from vfsd.daemon.snapshots.listed import NOTHING, Listed

__all__ = [
    "BASE",
    "SAFETY_PREFIX",
    "SNAPSHOT_PREFIX",
    "STAGED_PREFIX",
    "UNOBSERVED",
    "CallObserver",
    "Dropped",
    "Interrupted",
    "Outcome",
    "SnapshotService",
    "Staged",
    "check_names",
    "free_name",
    "in_bytes",
    "is_reserved",
    "is_staged",
    "log_expired",
    "name_at",
    "nothing_below",
]

BASE: Final = ""  # the name of what is below an overlay; no snapshot has an empty one
SAFETY_PREFIX: Final = "safety-"
STAGED_PREFIX: Final = "archive-"  # the content of an archive on its way into the workspace
SNAPSHOT_PREFIX: Final = "snap-"
_PATHS_SHOWN: Final = 5
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """Content from elsewhere, checked, ready to be put in place; `total_bytes` is that of the regular files.

    `name` is what errors call it.
    """

    name: str
    tree: Tree
    files: int
    total_bytes: int

    def step(self, *, replace: bool) -> str:
        """What a history calls the step that puts it in place."""
        return f"{'restore' if replace else 'import'} {os.path.basename(self.name)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A restore or an import that is done: `safety` names the state before, None where nothing was changed.

    `listed` is what it changed.  `problems` says which paths could not be made what they were to be, and why.
    `source` is the snapshot that the live state is made from, `step` the step that was undone or redone.
    `expired` are safety snapshots that were dropped, since nobody could go back to them by steps any more and they
    were too many or too old.  `undo_steps` and `redo_steps` say how far one can go now.
    """

    source: str
    safety: str | None
    listed: Listed = NOTHING
    problems: Mapping[bytes, str] = field(default_factory=dict)
    step: str | None = None
    expired: Sequence[SnapshotInfo] = ()
    undo_steps: int = 0
    redo_steps: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """What dropping snapshots did to the steps of the history.

    `steps` maps each dropped snapshot that undos (below 0) or redos (above 0) led to to their number; `history` is
    without them.
    """

    steps: Mapping[str, int]
    history: UndoHistory


def check_names(names: Sequence[str], infos: Sequence[SnapshotInfo]) -> None:
    """SnapshotNotFoundError for the first of `names` that no snapshot has."""
    there = {info.name for info in infos}
    for name in names:
        if name not in there:
            raise SnapshotNotFoundError(name)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A restore that a daemon began and did not end.

    `source` is the snapshot that it was to, `paths` what it was limited to, `safety` holds the state before, and `what`
    is it in words.
    """

    source: str
    safety: str | None
    paths: tuple[bytes, ...] = ()
    what: str = ""

    def describe(self) -> str:
        """What was found, and what to do."""
        undo = "`vfsd restore --undo` goes back to before it" if self.safety else "the state before it was not kept"
        shown = [path.decode("utf-8", "backslashreplace") for path in self.paths]
        finish = f"`{shlex.join(['vfsd', 'restore', self.source, *shown])}` finishes it"
        if len(shown) > _PATHS_SHOWN:
            finish = f"`vfsd restore {self.source} PATH...`, with its {len(shown):,} paths, finishes it"
        return (
            f"{self.what or f'a restore of {self.source!r}'} was interrupted, and part of it is done: {finish}, {undo}"
        )


class CallObserver(Protocol):
    """Who waits for a snapshot or a restore: a `vfsd.daemon.control.call_context.CallContext`.  Any thread."""

    def raise_if_cancelled(self) -> None:
        """CallCancelledError when nobody does any more."""
        ...

    def commit(self) -> None:
        """Declare that something is about to be changed: after that no request to cancel is followed."""
        ...

    def progress_nowait(self, done: int, total: int, unit: Literal["files", "bytes"], /) -> None:
        """Tell how far it is; `total` 0 where that is not known."""
        ...


class _Unwatched:
    def raise_if_cancelled(self) -> None:
        pass

    def commit(self) -> None:
        pass

    def progress_nowait(self, done: int, total: int, unit: Literal["files", "bytes"], /) -> None:
        pass


UNOBSERVED: Final[CallObserver] = _Unwatched()  # for what goes on whoever waits


def in_bytes(watch: CallObserver) -> ByteProgress:
    """`watch` for work on archives."""

    def tell(done_bytes: int, total_bytes: int) -> None:
        watch.raise_if_cancelled()
        watch.progress_nowait(done_bytes, total_bytes, "bytes")

    return tell


class SnapshotService(Protocol):
    """The snapshots of one workspace.  SnapshotNotFoundError for a name that there is not."""

    @property
    def has_base(self) -> bool:
        """Whether there is a state below, named BASE, to compare with and to go back to."""
        ...

    async def interrupted(self) -> Interrupted | None:
        """The restore that is half done, if there is one."""
        ...

    async def take(
        self, name: str | None, tag: str | None, watch: CallObserver, *, kind: SnapshotKind = "user"
    ) -> SnapshotInfo:
        """Keep the state as it is now under `name` (None: one made up).  SnapshotExistsError, ENOSPC.

        One that is "automatic" may be dropped where memory is short.
        """
        ...

    async def infos(self) -> Sequence[SnapshotInfo]:
        """All of them, oldest first."""
        ...

    async def change_counts(self) -> Mapping[str, DiffCounts]:
        """What each changed against the one before it."""
        ...

    async def drop(self, names: Sequence[str]) -> Dropped:
        """Forget all of `names`, or none where one of them does not exist.  Readers of a dropped snapshot go on."""
        ...

    def collect_pruned(self) -> Sequence[SnapshotInfo]:
        """The snapshots that were dropped for lack of memory since the last call, for the next answer to name."""
        ...

    async def restore(self, name: str, paths: Sequence[bytes], watch: CallObserver) -> Outcome:
        """Make the live state (below `paths`, or all) as it was at `name`, or BASE."""
        ...

    async def undo(self, watch: CallObserver) -> Outcome:
        """Go one step back in the history; the live state is kept there, for `redo`.  ENOENT at its beginning.

        Where a restore was interrupted, the step is to the state before that one.
        """
        ...

    async def redo(self, watch: CallObserver) -> Outcome:
        """Go one step forward in the history; the live state is kept there, for `undo`.  ENOENT at its end."""
        ...

    async def history(self) -> UndoHistory:
        """The steps, and where the live state is among them."""
        ...

    def staged(self, origin: Origin, watch: CallObserver) -> AbstractAsyncContextManager[Staged]:
        """What `origin` has, checked and within the workspace's limits.  ArchiveError, OSError."""
        ...

    async def put(self, staged: Staged, paths: Sequence[bytes], watch: CallObserver, *, replace: bool) -> Outcome:
        """Put what is staged in place, as `SnapshotableVolume.import_tree` does."""
        ...

    def tree(self, name: str | None, watch: CallObserver = UNOBSERVED) -> AbstractAsyncContextManager[Tree]:
        """A tree of snapshot `name`, of BASE, or of the live state (None).  A worker thread may read it.

        Of a live state that others change too, a file's content may be a later one by the time that it is read.
        """
        ...

    def frozen(self, watch: CallObserver) -> AbstractAsyncContextManager[Tree]:
        """A tree of the live state at this moment, which nobody changes: for what takes long to read."""
        ...


def name_at(history: UndoHistory, infos: Sequence[SnapshotInfo], position: int) -> str:
    """The snapshot of the state at `position`, which is to be gone to.  ENOENT where there is no such state."""
    if not 0 <= position < len(history.states):
        if history.is_cut_before if position < 0 else history.is_cut_after:
            way = "earlier" if position < 0 else "later"
            reason = (
                f"the {way} states were dropped because memory was needed (--max-memory): `vfsd snapshots` lists the"
                " snapshots that are left, to be restored by name"
            )
        elif position < 0:
            reason = "there is no earlier restore, import or apply: there is nothing to undo"
        else:
            reason = "nothing was undone since the last restore, import or apply: there is nothing to redo"
        raise FileNotFoundError(errno.ENOENT, reason)
    return next(info.name for info in infos if info.serial == history.states[position].serial)


def log_expired(expired: Sequence[SnapshotInfo]) -> None:
    """Write to the log that these safety snapshots were dropped."""
    for info in expired:
        _logger.info("dropped %s, which no step needs any more", info.name, extra={"operation": "restore"})


def free_name(prefix: str, taken: Sequence[SnapshotInfo]) -> str:
    """The prefix with a number above all that are there."""
    ends = [info.name[len(prefix) :] for info in taken if info.name.startswith(prefix)]
    return f"{prefix}{max((int(end) for end in ends if end.isascii() and end.isdigit()), default=0) + 1}"


def nothing_below() -> OSError:
    """The error for BASE where there is none."""
    return OSError(errno.EOPNOTSUPP, "only a workspace with the backend overlay:DIR has something below it")


def is_reserved(name: str) -> bool:
    """Whether a name is vfsd's own to give."""
    return name.startswith(SAFETY_PREFIX) or is_staged(name)


def is_staged(name: str) -> bool:
    """Whether a snapshot of that name is an archive's content on its way into the workspace."""
    return name.startswith(STAGED_PREFIX) and name.removeprefix(STAGED_PREFIX).isdigit()
