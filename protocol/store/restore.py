"""Restore: makes a target equal to a stored state, changing only what differs.

Compares the two states by the digests of their listings, and executes the steps of `protocol.diff.plan`.  At any moment
each path has its old or its new state; only where a directory replaces something else, or the reverse, the path is
absent for a moment.  A path that cannot be compared or changed is left as it is and becomes a `Problem`.

Threading: any one thread; the workspace's lock excludes other restores.

The intent log of a workspace records the restore that is running, so that it can be completed after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.diff.plan import Step, execute, plan_comparisons
from protocol.diff.tree_diff import Change, Pair, compare_pairs, is_at_or_below, linked_changes, outermost, walk_order
from protocol.errors import os_error
from protocol.linux.regular_file import read_regular, write_atomically
from protocol.store.directory.target import ChangedMeanwhileError, DirectoryTarget
from protocol.store.format.layout import NO_SPACE
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, entry_of
from protocol.store.trees import MerkleTree, differing_rows

if TYPE_CHECKING:
    from protocol.store.directory.statcache import CachedDirectory
    from protocol.store.format.blobs import Blobs
    from protocol.store.format.layout import Layout
    from protocol.tree import TreeEntry
    from protocol.volume_extensions import SnapshotInfo


@dataclass(frozen=True, slots=True)
class Problem:
    """A path that could not be restored, or only in part, and why."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class RestoredChanges:
    """The result of a restore: its changes, in the order of `protocol.diff.tree_diff.changes`, and its problems.

    A path with a problem is among `changes` only if the restore changed something of it.
    """

    changes: tuple[Change, ...]
    safety: SnapshotInfo | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Restore `paths` (empty: everything) from `snapshot`.

    `safety` is the name of a new snapshot of the state before the restore, tagged `safety_tag`; None: do not take one.
    Without `remove`, entries that the snapshot lacks stay.  With `directories`, these directories get the metadata that
    they have in the snapshot, and what is in them stays; then empty `paths` mean none, and a path that is in neither
    state is no error.  With `touch_ns`, files whose content changes get this mtime instead of the recorded one, unless
    the restore is interrupted and resumed.
    """

    snapshot: str
    paths: tuple[bytes, ...] = ()
    _: KW_ONLY
    safety: str | None
    safety_tag: str | None = None
    remove: bool = True
    directories: tuple[bytes, ...] | None = None
    touch_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps, in the order of `protocol.diff.plan`, and the paths that are left alone.

    `live` is the state that the plan starts from.  `found` are the changes that `protocol.diff.tree_diff.changes`
    finds, and `only_links` the paths that differ in nothing but hard links, which need not be the paths of the steps.
    """

    steps: list[Step]
    problems: list[Problem]
    live: MerkleTree
    found: Mapping[bytes, Change]
    only_links: AbstractSet[bytes]

    def changes(self) -> list[Change]:
        """The changed paths in the order of `protocol.diff.tree_diff.changes`, which ignores a directory's mtime."""
        return _sorted(
            self.found.get(step.path) or Change(step.path, step.change, step.old, step.new)
            for step in self.steps
            if step.change
        )

    def reported(self, done: AbstractSet[bytes]) -> list[Change]:
        """The changes that a comparison finds after the steps of the paths `done`."""
        of_steps = [change for change in self.changes() if change.path in done - self.only_links]
        return _sorted([*of_steps, *(self.found[path] for path in self.only_links & self.found.keys())])

    def touched(self) -> list[Change]:
        """The directories that get only another mtime, as "metadata" changes."""
        return _sorted(
            Change(step.path, "metadata", step.old, step.new)
            for step in self.steps
            if step.change is None
            and step.old
            and step.new
            and step.old.is_dir
            and step.old.mtime_ns != step.new.mtime_ns
        )

    def count(self) -> int:
        """The number of changes."""
        return sum(step.change is not None for step in self.steps)


def _sorted(changes: Iterable[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: walk_order(change.path))


# -- planning --------------------------------------------------------------------------------------
def plan(live: MerkleTree, wanted: MerkleTree, request: RestoreRequest) -> Plan:
    """Plan the restore `request`, which makes `live` equal to `wanted`.

    FileNotFoundError for a path that is in neither.
    """
    problems: list[Problem] = []
    rows: dict[bytes, tuple[Row | None, Row | None]] = {}
    directories = request.directories
    for scope in outermost(request.paths) if request.paths or directories is not None else [b""]:
        old, new = _row(live, scope), _row(wanted, scope)
        if old is None and new is None and directories is None:
            raise os_error(errno.ENOENT, os.fsdecode(scope))
        rows |= {path: (old, new) for path, old, new in _differing(live, wanted, (scope, old, new), problems)}
    for path in directories or ():
        old, new = _row(live, path), _row(wanted, path)
        if old is not None and new is not None and old.is_dir and new.is_dir:
            rows[path] = old, new
    pairs: list[Pair] = [
        (None if old is None else entry_of(old, path), None if new is None else entry_of(new, path))
        for path, (old, new) in sorted(rows.items(), key=lambda item: walk_order(item[0]))
    ]
    found = list(compare_pairs(live, wanted, pairs))
    entries = (_readable_entries(live), _readable_entries(wanted))
    paths = request.paths or directories or ()
    steps = plan_comparisons(found, live, wanted, entries, paths=paths, remove=request.remove)
    if request.touch_ns is not None:
        steps = [_touched(step, request.touch_ns) for step in steps]
    changed = {change.path: change for change in linked_changes(live, wanted, found)}
    return Plan(steps, problems, live, changed, {one.path for one in found if one.kind is None})


def _touched(step: Step, time_ns: int) -> Step:
    """Return `step`, with the mtime `time_ns` if it gives a file other content."""
    if step.new is None or not step.new.is_file or step.change in (None, "metadata", "removed"):
        return step
    return replace(step, new=msgspec.structs.replace(step.new, mtime_ns=time_ns))


def _differing(
    live: MerkleTree, wanted: MerkleTree, top: tuple[bytes, Row | None, Row | None], problems: list[Problem]
) -> Iterator[tuple[bytes, Row | None, Row | None]]:
    """The paths at and below `top` whose rows differ, with both rows; a path that must be left alone is a problem.

    Reads no listing whose digest is the same in both trees.
    """
    pending = [top]
    while pending:
        path, old, new = pending.pop()
        if old == new:
            continue
        if any(row is not None and row.more.state for row in (old, new)):
            problems.append(Problem(path, "could not be read, or is another mount: left alone"))
            continue
        try:
            below = differing_rows(live, wanted, path, old, new)
        except DamagedError as error:
            problems.append(Problem(path, _left(error)))
            continue
        yield path, old, new
        pending += reversed(below)


def _readable_entries(tree: MerkleTree) -> Iterator[TreeEntry]:
    """All entries but those that cannot be read, in the order of a walk."""
    pending = [(b"", tree.root)]
    while pending:
        path, row = pending.pop()
        if row.more.state:
            continue
        yield entry_of(row, path)
        if row.is_dir:
            with contextlib.suppress(DamagedError):
                prefix = path + b"/" if path else b""
                pending += [(prefix + below.name, below) for below in reversed(tree.listed(path, row))]


def _left(error: DamagedError) -> str:
    return f"{error.strerror}: not restored"


def _row(tree: MerkleTree, path: bytes) -> Row | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return tree.row(path)
    return None


# -- executing -------------------------------------------------------------------------------------
@dataclass
class RestoreRun:
    """Executes a plan; implements `protocol.diff.plan.Target`.

    `scanned` is the directory as the scan saw it, if the source is a directory.  `progress` is called with
    (changes done, all changes).
    """

    plan: Plan
    target: DirectoryTarget
    wanted: MerkleTree
    blobs: Blobs
    scanned: CachedDirectory | None
    progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._skipped: set[bytes] = set()  # paths at and below which nothing more is done
        self._replaced: dict[bytes, bytes] = {}  # name to link to -> the name that took its part
        self._problems = list(self.plan.problems)

    def run(self) -> tuple[list[Change], list[Problem]]:
        """Execute all steps; one that fails adds a problem.  Return what was changed, and what could not be."""
        steps, total = self.plan.steps, self.plan.count()
        done: set[bytes] = set()
        for step in steps:
            if step.kind == "put" and step.old is not None and step.old.is_dir and step.new is not None:
                self._attempt(step, self._verify)  # before the directory goes to make room
        for step in steps:
            if not self._is_skipped(step.path) and self._attempt(step, self._execute) and step.change is not None:
                done.add(step.path)
                self.progress(len(done), total)
        problems = sorted(self._problems, key=lambda problem: walk_order(problem.path))
        return self.plan.reported(done), problems

    def _is_skipped(self, path: bytes) -> bool:
        return bool(self._skipped) and is_at_or_below(path, self._skipped)

    def _verify(self, step: Step) -> None:
        if step.new is not None and step.new.is_file:
            self.blobs.verify(self.wanted.row(step.path).content)

    def _execute(self, step: Step) -> None:
        execute([step], self)

    def _attempt(self, step: Step, act: Callable[[Step], None]) -> bool:
        """Whether `act` did not fail with an error of this path alone."""
        try:
            act(step)
        except DamagedError as error:
            reason = _left(error)
        except ChangedMeanwhileError:
            reason = "changed since the restore began: left as it is"
        except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
            reason = f"{error.strerror}: not restored"
        except OSError as error:
            if error.errno in NO_SPACE and error.filename is None:
                raise OSError(error.errno, error.strerror, os.fsdecode(step.path)) from None
            if error.errno not in {errno.ENOTEMPTY, errno.EXDEV, errno.EBUSY, errno.ELOOP}:
                raise
            why = "has files made since" if error.errno == errno.ENOTEMPTY else error.strerror
            reason = f"{why}: left as it is"
        else:
            return True
        self._problems.append(Problem(step.path, reason))
        if step.kind in {"directory", "put"}:
            self._skipped.add(step.path)
        return False

    # -- steps -----------------------------------------------------------------------------------
    def remove(self, old: TreeEntry) -> None:
        expected = None if old.is_dir else self._expected(old.path)
        self.target.remove(old.path, expected, directory=old.is_dir)

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None:
            self.remove(old)
        self.target.make_directory(new)

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None:
        expected = self._expected_after_removal(old)
        if new.is_file:
            content = partial(self.blobs.copy, self.wanted.row(new.path).content, new.size)
            self._note(new.path, self.target.put_file(new, content, expected))
        else:
            self._note(new.path, self.target.put_special(new, expected))

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None:
        other = self._replaced.get(other, other)
        if self._is_skipped(other):  # it could not be put: this name takes its part
            self._replaced[other] = new.path
            self.put(new, old)
        else:
            self._note(new.path, self.target.put_link(new, other, self._expected_after_removal(old)))

    def set_metadata(self, new: TreeEntry) -> None:
        self._note(new.path, self.target.set_metadata(new, None if new.is_dir else self._expected(new.path)))

    def _expected_after_removal(self, old: TreeEntry | None) -> bytes | None:
        """The entry that must be at the path before another is put there; a directory is removed first."""
        if old is None:
            return None
        if old.is_dir:
            self.remove(old)
            return None
        return self._expected(old.path)

    def _expected(self, path: bytes) -> bytes | None:
        """The state in which the scan saw the file at `path`."""
        return None if self.scanned is None else self.scanned.key_at(path)

    def _note(self, path: bytes, lacking: list[str]) -> None:
        self._problems += (Problem(path, reason) for reason in lacking)


# -- the intent log --------------------------------------------------------------------------------
class InterruptedRestore(msgspec.Struct, frozen=True):
    """An incomplete restore, as the intent log records it: each path has its old or its new state.

    To complete it, restore `snapshot` (and `paths`) again.  To undo it, restore `safety`, the state before; None if
    the restore took no safety snapshot.  `previous` is an earlier incomplete restore that this one does not complete.
    """

    snapshot: str
    paths: tuple[bytes, ...]
    remove: bool
    safety: str | None
    token: str
    tokens: tuple[str, ...]  # of earlier attempts, whose temporary files may still exist
    started_ns: int
    previous: InterruptedRestore | None = None
    directories: tuple[bytes, ...] | None = None  # see `RestoreRequest`

    def ends(self, other: InterruptedRestore) -> bool:
        """Whether this restore, once complete, also completes `other`."""
        if not self.paths and self.directories is None:
            return True
        return (self.snapshot, self.paths, self.directories) == (other.snapshot, other.paths, other.directories)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(InterruptedRestore)


class RestoreIntentLog:
    """The intent log of a workspace; its file is called `journal`."""

    def __init__(self, layout: Layout, workspace: str) -> None:
        self._path = os.path.join(layout.workspace(workspace), "journal")

    def read(self) -> InterruptedRestore | None:
        """The running or interrupted restore, if any.  DamagedError."""
        try:
            return _decoder.decode(read_regular(self._path))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            damage = "the record of an interrupted restore is damaged: restore a snapshot without paths"
            raise DamagedError(damage, self._path) from None

    def write(self, entry: InterruptedRestore) -> None:
        """Record a restore before its first change; durable, as a power failure may leave some changes on disk."""
        write_atomically(self._path, _encoder.encode(entry), durable=True)

    def close(self, entry: InterruptedRestore) -> None:
        """Remove the record of a restore, after all of its changes are durable."""
        if entry.previous is not None and not entry.ends(entry.previous):
            write_atomically(self._path, _encoder.encode(entry.previous), durable=True)
        else:
            # Not synced: if a power failure brings the log back, the restore that it asks for changes nothing.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
