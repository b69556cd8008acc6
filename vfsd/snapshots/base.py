"""Snapshots: what the control socket asks of the snapshots of a workspace, whoever keeps them.

There are two implementations.  `VolumeSnapshots` are the volume's own (memory, overlay): each is one step on the
serving loop.  `StoreSnapshots` are kept in a content-addressed store on disk (host directories, and whatever else
can be read and written as files): work in a thread, which takes as long as there is to do.

Both keep to this:

- what programs have written to shared mappings is in a state before it is kept, replaced or left;
- only one change beside the mount is made at a time (`Served.changing`), and the kernel knows of it when its caller
  is answered: then no program can see the state before;
- a restore or an import keeps the state before as a safety snapshot.  One that fails leaves that state, and no
  safety snapshot for what did not happen; where it could not be put back, the error says how to.

Threading: every method is called, and every context entered and left, on the serving loop.  A `Watch` is asked and told
in worker threads.  Nobody waiting any more ends the work, where that tears nothing.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from protocol.archive import Progress
from protocol.diff import Change, Counts
from protocol.tree import Tree
from protocol.volume import SnapshotInfo, SnapshotKind
from vfsd.snapshots.archives import Origin

__all__ = [
    "BASE",
    "SAFETY_PREFIX",
    "SAFETY_SNAPSHOTS_KEPT",
    "SNAPSHOT_PREFIX",
    "STAGED_PREFIX",
    "UNWATCHED",
    "Interrupted",
    "Outcome",
    "Snapshots",
    "Staged",
    "Watch",
    "free_name",
    "in_bytes",
    "is_reserved",
    "is_staged",
    "nothing_below",
]

BASE: Final = ""  # the name of what is below an overlay; no snapshot has an empty one
SAFETY_PREFIX: Final = "safety-"
STAGED_PREFIX: Final = "archive-"  # the content of an archive on its way into the workspace
SNAPSHOT_PREFIX: Final = "snap-"
SAFETY_SNAPSHOTS_KEPT: Final = 10
_PATHS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Staged:
    """Content from elsewhere, checked, ready to be put in place; `total_bytes` is that of the regular files.

    `name` is what errors call it.
    """

    name: str
    tree: Tree
    files: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A restore or an import that is done: `safety` names the state before.

    `changes` is what leads from that to the state now; None where comparing the two costs no more.
    `problems` says of paths that are not as they were to be why that is.
    """

    safety: str
    changes: Sequence[Change] | None = None
    problems: Mapping[bytes, str] = field(default_factory=dict)


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


class Watch(Protocol):
    """Who waits for a snapshot or a restore: a `vfsd.control.call.Call`.  Any thread."""

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


UNWATCHED: Final[Watch] = _Unwatched()  # for what goes on whoever waits


def in_bytes(watch: Watch) -> Progress:
    """`watch` for work on archives."""

    def tell(done_bytes: int, total_bytes: int) -> None:
        watch.raise_if_cancelled()
        watch.progress_nowait(done_bytes, total_bytes, "bytes")

    return tell


class Snapshots(Protocol):
    """The snapshots of one workspace.  SnapshotNotFoundError for a name that there is not."""

    @property
    def has_base(self) -> bool:
        """Whether there is a state below, named BASE, to compare with and to go back to."""
        ...

    async def interrupted(self) -> Interrupted | None:
        """The restore that is half done, if there is one."""
        ...

    async def take(
        self, name: str | None, tag: str | None, watch: Watch, *, kind: SnapshotKind = "user"
    ) -> SnapshotInfo:
        """Keep the state as it is now under `name` (None: one made up).  SnapshotExistsError, ENOSPC.

        One that is "automatic" may be dropped where memory is short.
        """
        ...

    async def infos(self) -> Sequence[SnapshotInfo]:
        """All of them, oldest first."""
        ...

    async def change_counts(self) -> Mapping[str, Counts]:
        """What each changed against the one before it."""
        ...

    async def drop(self, name: str) -> None:
        """Forget one; the others stay, and who reads it goes on."""
        ...

    async def restore(self, name: str, paths: Sequence[bytes], watch: Watch) -> Outcome:
        """Make the live state (below `paths`, or all) as it was at `name`, or BASE."""
        ...

    def staged(self, origin: Origin, watch: Watch) -> AbstractAsyncContextManager[Staged]:
        """What `origin` has, checked and within the workspace's limits.  ArchiveError, OSError."""
        ...

    async def put(self, staged: Staged, paths: Sequence[bytes], watch: Watch, *, replace: bool) -> Outcome:
        """Put what is staged in place, as `SnapshotableVolume.import_tree` does."""
        ...

    def tree(self, name: str | None, watch: Watch = UNWATCHED) -> AbstractAsyncContextManager[Tree]:
        """A tree of snapshot `name`, of BASE, or of the live state (None).  A worker thread may read it.

        Of a live state that others change too, a file's content may be a later one by the time that it is read.
        """
        ...

    def frozen(self, watch: Watch) -> AbstractAsyncContextManager[Tree]:
        """A tree of the live state at this moment, which nobody changes: for what takes long to read."""
        ...


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
