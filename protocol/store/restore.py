"""Restore: makes a target what a stored state is, touching nothing but what differs.

Path by path, in the order of `protocol.diff.tree_diff.changes`; a directory gets its metadata when everything below it
is done.  At any moment each path has its old or its new state; only where a directory replaces something else, or is
replaced by it, the path is absent for a moment.

Threading: any one thread; the workspace's lock keeps other restores away.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from protocol.diff.tree_diff import Change, ChangeKind, outermost
from protocol.errors import os_error
from protocol.store.directory.target import ChangedMeanwhileError, DirectoryTarget
from protocol.store.format.layout import NO_SPACE
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, entry_of

if TYPE_CHECKING:
    from protocol.store.directory.statcache import CachedDirectory
    from protocol.store.format.blobs import Blobs
    from protocol.store.format.records import StoredSnapshot
    from protocol.store.trees import MerkleTree
    from protocol.tree import TreeEntry

__all__ = ["Plan", "Problem", "RestoreRequest", "RestoredChanges", "Step", "apply", "plan"]

_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class Problem:
    """A path that is not as it was to be, and why."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Restore `paths` (empty: everything) from `snapshot`.

    `safety` is the name of a new snapshot of the state before the restore, tagged `safety_tag`; None: do not take one.
    Without `remove`, entries that the snapshot lacks stay.
    """

    snapshot: str
    paths: tuple[bytes, ...] = ()
    _: KW_ONLY
    safety: str | None
    safety_tag: str | None = None
    remove: bool = True


@dataclass(frozen=True, slots=True)
class RestoredChanges:
    """What a restore has changed, in the order of `protocol.diff.tree_diff.changes`; and what it could not.

    A path with a problem is among `changes` only where something of it was changed.
    """

    changes: tuple[Change, ...]
    safety: StoredSnapshot | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(slots=True)
class Step:
    """One path to change: the row that is there (None: nothing) and that is to be there, and what is below."""

    path: bytes
    old: Row | None
    new: Row | None
    kind: ChangeKind | None  # None: only a directory's mtime, which is no change of its own
    below: list[Step] = field(default_factory=list)
    _entry: TreeEntry | None = None

    def entry(self) -> TreeEntry | None:
        """What is to be there."""
        if self._entry is None and self.new is not None:
            self._entry = entry_of(self.new, self.path)
        return self._entry


@dataclass(slots=True)
class Plan:
    """All that is to be changed."""

    steps: list[Step]  # the root, if anything; else the outermost paths
    problems: list[Problem]

    def changes(self) -> list[Change]:
        """The changes in the order of `protocol.diff.tree_diff.changes`, for which a directory's mtime is no change."""
        return [_change(step, step.kind) for step in self._all_steps() if step.kind is not None]

    def touched(self) -> list[Change]:
        """The directories of which the restore sets only the mtime, as "metadata" changes."""
        return [
            _change(step, "metadata")
            for step in self._all_steps()
            if step.kind is None and step.old and step.new and step.old.mtime_ns != step.new.mtime_ns
        ]

    def count(self) -> int:
        """How many changes there are."""
        return sum(step.kind is not None for step in self._all_steps())

    def _all_steps(self) -> Iterator[Step]:
        pending = list(reversed(self.steps))
        while pending:
            step = pending.pop()
            yield step
            pending += reversed(step.below)


def _change(step: Step, kind: ChangeKind) -> Change:
    old = None if step.old is None else entry_of(step.old, step.path)
    return Change(step.path, kind, old, step.entry())


# -- what there is to do ---------------------------------------------------------------------------
class _Links:
    """Which paths are names of one file, in one tree; found out when it is first asked."""

    def __init__(self, tree: MerkleTree) -> None:
        self._tree = tree
        self._paths: dict[int, list[bytes]] | None = None

    def of(self, path: bytes, row: Row) -> frozenset[bytes]:
        """All names of the file at `path`."""
        link = row.more.link
        if not link:
            return frozenset((path,))
        if self._paths is None:
            self._paths = {}
            pending = [(b"", self._tree.root)]
            while pending:
                above, directory = pending.pop()
                prefix = above + b"/" if above else b""
                for below in self._readable_rows(directory):
                    if stat.S_ISDIR(below.mode):
                        pending.append((prefix + below.name, below))
                    elif below.rare is not None and below.rare.link:
                        self._paths.setdefault(below.rare.link, []).append(prefix + below.name)
        return frozenset(self._paths.get(link, (path,)))

    def _readable_rows(self, directory: Row) -> list[Row]:
        """The rows of a directory; none where its listing is damaged, which the plan has as a problem."""
        try:
            return self._tree.rows(directory.content)
        except DamagedError:
            return []


def plan(live: MerkleTree, wanted: MerkleTree, paths: Sequence[bytes] = (), *, remove: bool = True) -> Plan:
    """What to do so that `live`, at and below `paths` or everywhere, becomes `wanted`.

    Without `remove`, what only `live` has stays.  FileNotFoundError for a path that is in neither.
    """
    return _Planner(live, wanted, remove=remove).plan(paths)


class _Planner:
    def __init__(self, live: MerkleTree, wanted: MerkleTree, *, remove: bool) -> None:
        self._live = live
        self._wanted = wanted
        self._remove = remove
        self._live_links = _Links(live)
        self._wanted_links = _Links(wanted)
        self._problems: list[Problem] = []

    def plan(self, paths: Sequence[bytes]) -> Plan:
        steps = []
        scopes = outermost(paths) if paths else [b""]
        for scope in scopes:
            old, new = _row(self._live, scope), _row(self._wanted, scope)
            if old is None and new is None:
                raise os_error(errno.ENOENT, os.fsdecode(scope))
            step = self._step(scope, old, new)
            if step is not None:
                steps.append(self._with_parents(step) if scope else step)
        return Plan(steps, self._problems)

    def _with_parents(self, step: Step) -> Step:
        """A path whose directories are not there yet brings them with it."""
        above = step.path.rpartition(b"/")[0]
        while above and step.new is not None:
            row = _row(self._live, above)
            if row is not None and row.is_dir:
                break
            new = _row(self._wanted, above)
            kind: ChangeKind = "added" if row is None else "type"
            step = Step(above, row, new, kind, [step])
            above = above.rpartition(b"/")[0]
        return step

    def _step(self, path: bytes, old: Row | None, new: Row | None) -> Step | None:
        try:
            return self._compared(path, old, new)
        except DamagedError as error:  # a listing's
            self._problems.append(Problem(path, _left(error)))
            return None

    def _compared(self, path: bytes, old: Row | None, new: Row | None) -> Step | None:
        if old == new or (new is None and not self._remove):
            return None
        for row in (old, new):
            if row is not None and row.more.state:
                self._problems.append(Problem(path, "could not be read, or is another mount: left alone"))
                return None
        if old is None or new is None or stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
            kind: ChangeKind = "added" if old is None else "removed" if new is None else "type"
            step = Step(path, old, new, kind)
            if new is not None and new.is_dir:
                step.below = [
                    below
                    for row in self._wanted.rows(new.content)
                    if (below := self._step(_join(path, row.name), None, row)) is not None
                ]
            elif old is not None and old.is_dir:
                step.below = self._removals(path, old)
            return step
        if new.is_dir:
            return self._directory(path, old, new)
        kind_of = self._kind(path, old, new)
        return None if kind_of is None else Step(path, old, new, kind_of)

    def _removals(self, path: bytes, directory: Row) -> list[Step]:
        """All below a directory that has to go."""
        found = []
        for row in self._live.rows(directory.content):
            here = _join(path, row.name)
            if row.more.state:
                self._problems.append(Problem(here, "could not be read, or is another mount: left alone"))
                continue
            try:
                below = self._removals(here, row) if row.is_dir else []
            except DamagedError as error:
                self._problems.append(Problem(here, _left(error)))
                continue
            found.append(Step(here, row, None, "removed", below))
        return found

    def _directory(self, path: bytes, old: Row, new: Row) -> Step | None:
        below: list[Step] = []
        if old.content != new.content:
            there = {row.name: row for row in self._live.rows(old.content)}
            wanted = {row.name: row for row in self._wanted.rows(new.content)}
            for name in sorted(there.keys() | wanted.keys()):
                was, to_be = there.get(name), wanted.get(name)
                if was != to_be and (step := self._step(_join(path, name), was, to_be)) is not None:
                    below.append(step)
        kind: ChangeKind | None = None
        if (old.mode, old.uid, old.gid, old.more.xattrs) != (new.mode, new.uid, new.gid, new.more.xattrs):
            kind = "metadata"
        if kind is None and not below and old.mtime_ns == new.mtime_ns:
            return None
        return Step(path, old, new, kind, below)

    def _kind(self, path: bytes, old: Row, new: Row) -> ChangeKind | None:
        if (old.content, old.size, old.more.rdev) != (new.content, new.size, new.more.rdev):
            return "modified"
        if (old.mode, old.uid, old.gid, old.mtime_ns, old.more.xattrs) != (
            new.mode, new.uid, new.gid, new.mtime_ns, new.more.xattrs,
        ):  # fmt: skip
            return "metadata"
        # The same but for link counts and inode numbers: a change only where the names are of other files.
        if self._live_links.of(path, old) != self._wanted_links.of(path, new):
            return "metadata"
        return None


def _left(error: DamagedError) -> str:
    return f"{error.strerror}: left as it is"


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _row(tree: MerkleTree, path: bytes) -> Row | None:
    try:
        return tree.row(path)
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise


# -- doing it --------------------------------------------------------------------------------------
def apply(
    todo: Plan,
    target: DirectoryTarget,
    live: MerkleTree,
    wanted: MerkleTree,
    blobs: Blobs,
    known: CachedDirectory | None,
    keep_going: Callable[[int, int], None],
) -> tuple[list[Change], list[Problem]]:
    """Do it; what was changed, and what could not be.  `keep_going` hears of (changes done, of how many)."""
    run = _Run(target, live, wanted, blobs, known, keep_going, todo.count())
    for step in todo.steps:
        run.step(step)
    return run.changed(todo), todo.problems + run.problems


class _Run:
    def __init__(
        self,
        target: DirectoryTarget,
        live: MerkleTree,
        wanted: MerkleTree,
        blobs: Blobs,
        known: CachedDirectory | None,
        keep_going: Callable[[int, int], None],
        total: int,
    ) -> None:
        self._target = target
        self._live = live
        self._wanted = wanted
        self._live_links = _Links(live)
        self._wanted_links = _Links(wanted)
        self._blobs = blobs
        self._known = known
        self._keep_going = keep_going
        self._total = total
        self._done: set[bytes] = set()
        self.problems: list[Problem] = []

    def changed(self, todo: Plan) -> list[Change]:
        """What of the plan was done."""
        return [change for change in todo.changes() if change.path in self._done]

    def step(self, step: Step) -> None:
        """Do one step and what is below it."""
        try:
            self._do(step)
        except DamagedError as error:
            self.problems.append(Problem(step.path, _left(error)))
        except ChangedMeanwhileError:
            self.problems.append(Problem(step.path, "changed since the restore began: left as it is"))
        except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
            self.problems.append(Problem(step.path, f"{error.strerror}: left as it is"))
        except OSError as error:
            if error.errno in NO_SPACE and error.filename is None:
                raise OSError(error.errno, error.strerror, os.fsdecode(step.path)) from None
            if error.errno not in {errno.ENOTEMPTY, errno.EXDEV, errno.EBUSY, errno.ELOOP}:
                raise
            reason = "has files made since" if error.errno == errno.ENOTEMPTY else error.strerror
            self.problems.append(Problem(step.path, f"{reason}: left as it is"))

    def _do(self, step: Step) -> None:
        if step.new is None:
            return self._remove(step)
        if step.kind == "type" and step.new.is_file:
            self._blobs.verify(step.new.content)  # before a directory goes to make room for it
        if step.old is not None and step.kind == "type":
            self._make_room(step, step.old, step.new)
        if step.new.is_dir:
            return self._directory(step)
        self._leaf(step)
        return None

    def _tell(self, step: Step) -> None:
        self._done.add(step.path)
        self._keep_going(len(self._done), self._total)

    def _directory(self, step: Step) -> None:
        assert step.new is not None
        entry = step.entry()
        assert entry is not None
        is_new = step.old is None or not step.old.is_dir
        if is_new:
            self._target.make_directory(entry)
            self._tell(step)
        for below in step.below:
            self.step(below)
        self._note(step.path, self._target.set_metadata(entry, None))
        if not is_new and step.kind is not None:
            self._tell(step)

    def _leaf(self, step: Step) -> None:
        new = step.new
        assert new is not None
        old = step.old if step.old is not None and not step.old.is_dir else None
        entry = step.entry()
        assert entry is not None
        expected = self._expected(step.path) if old is not None else None
        if old is not None and step.kind == "metadata" and self._may_set_in_place(step.path, old, new):
            lacking = self._target.set_metadata(entry, expected)
        elif (other := self._other_name(step.path, new)) is not None:
            lacking = self._target.put_link(entry, other, expected)
        elif new.is_file:
            lacking = self._target.put_file(entry, partial(self._blobs.copy, new.content, entry.size), expected)
        else:
            lacking = self._target.put_special(entry, expected)
        self._note(step.path, lacking)
        self._tell(step)

    def _may_set_in_place(self, path: bytes, old: Row, new: Row) -> bool:
        """Whether no name sees it that is not to be one of this file's: neither in the tree nor outside."""
        if not old.more.link:
            return not new.more.link or self._other_name(path, new) is None
        names = self._live_links.of(path, old)
        return names == self._wanted_links.of(path, new) and old.more.nlink == len(names)

    def _other_name(self, path: bytes, new: Row) -> bytes | None:
        """A name that has, or is to keep, the inode that is to be at `path` too."""
        if not new.more.link:
            return None
        names = self._wanted_links.of(path, new)
        for other in sorted(names):
            if other == path:
                continue
            if other in self._done:
                return other
            row = _row(self._live, other)
            if row is None or row.is_dir or self._wanted.row(other).mode & ~0o7777 != row.mode & ~0o7777:
                continue
            if row == self._wanted.row(other):
                return other
            others = self._live_links.of(other, row)
            if row.content == new.content and others <= names and row.more.nlink in {1, len(others)}:
                return other
        return None

    def _note(self, path: bytes, lacking: list[str]) -> None:
        self.problems += (Problem(path, reason) for reason in lacking)

    # -- taking away ---------------------------------------------------------------------------
    def _remove(self, step: Step) -> None:
        assert step.old is not None
        for below in step.below:
            self.step(below)
        expected = None if step.old.is_dir else self._expected(step.path)
        self._target.remove(step.path, expected, directory=step.old.is_dir)
        self._tell(step)

    def _make_room(self, step: Step, old: Row, new: Row) -> None:
        """Where a directory is to take the place of something else, or the other way round; a rename does the rest."""
        if old.is_dir:
            for below in step.below:
                self.step(below)
            self._target.remove(step.path, None, directory=True)
        elif new.is_dir:
            self._target.remove(step.path, self._expected(step.path), directory=False)

    def _expected(self, path: bytes) -> bytes | None:
        """As what a path was seen when the live state was taken in."""
        return None if self._known is None else self._known.key_at(path)
