"""Plan the steps that make a target equal to a tree.

`plan` compares the target's present state with the wanted tree and gives the steps in an order that any target can
execute one by one:

1. "remove" below a directory that becomes something else, the deepest first, so that the directory is empty then;
2. in the order of `Tree.walk`: "directory", "put", "link", and "metadata" of non-directories.  A directory
   exists before anything in it is made; the file that a "link" names is complete before the link is made;
3. "remove" of everything else that must go, the deepest first.  A full disk stops the plan before this step, and an
   entry that was not removed needs no space to be restored;
4. "metadata" of directories, the deepest first, because every change in a directory moves its mtime.

Paths that are equal get no step.  A file gets other metadata only if all its other names become names of the same
wanted file, and are planned; otherwise "put" replaces it, so that no other name changes with it.

A target implements `Target`; `execute` calls it.  Each target documents what it guarantees for one step (atomic
replacement, a check that nothing has changed since the plan was made, staging of content).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from protocol.diff.tree_diff import (
    ChangeKind,
    Comparison,
    compare,
    entry_or_none,
    has_links,
    is_at_or_below,
    is_below,
    missing_above,
)
from protocol.tree import Tree, TreeEntry

StepKind: TypeAlias = Literal["remove", "directory", "put", "link", "metadata"]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a target.

    - "remove": remove `old`; a directory is empty by then.
    - "directory": make the directory `new`, in place of `old` if that is not None.
    - "put": make the file, symlink or special file `new`, in place of `old` if that is not None; `old` may be an empty
      directory.
    - "link": make `new.path` a further name of the file at `other`, in place of `old` if that is not None.
    - "metadata": give `old`, or the directory that an earlier step made, the metadata of `new`.

    `change` is the kind of `tree_diff.Change`, for reports: at most one step of a path has one.  None if only a
    directory's mtime differs; "metadata" if only the names of a file differ.
    """

    kind: StepKind
    path: bytes
    old: TreeEntry | None
    new: TreeEntry | None
    change: ChangeKind | None = None
    other: bytes = b""


class Target(Protocol):
    """The target of a plan: one method for each kind of step (see `Step`)."""

    def remove(self, old: TreeEntry) -> None: ...

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None: ...

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None: ...

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None: ...

    def set_metadata(self, new: TreeEntry) -> None: ...


def execute(steps: Iterable[Step], target: Target) -> None:
    """Execute `steps` on `target`, in order."""
    for step in steps:
        new, old = step.new, step.old
        if new is None:
            assert old is not None
            target.remove(old)
        elif step.kind == "directory":
            target.make_directory(new, old)
        elif step.kind == "put":
            target.put(new, old)
        elif step.kind == "link":
            target.link(new, step.other, old)
        else:
            target.set_metadata(new)


def plan(
    live: Tree,
    wanted: Tree,
    *,
    paths: Sequence[bytes] = (),
    remove: bool = True,
    whole_directories: bool = False,
    links: bool = True,
) -> list[Step]:
    """Return the steps that make the target with the state `live` equal to `wanted`, at and below `paths`.

    Without `paths`, everywhere.  `remove=False` keeps entries that `wanted` lacks, except below a directory that
    becomes something else.

    `whole_directories` is for a target that removes a directory with everything in it: entries below it get no steps of
    their own.  `links=False` is for a target without hard links: each name is a file of its own.
    FileNotFoundError for a path that is in neither tree.
    """
    found = list(_relevant(compare(live, wanted, paths=paths), links=links))
    if links and any(has_links(one.old) or has_links(one.new) for one in found):
        # `Tree.touched` need not name paths whose only difference is which of them are names of one file.
        found = list(_relevant(compare(live, wanted, paths=paths, every_path=True), links=True))
    names = (live.walk(), wanted.walk()) if links else ((), ())
    return _Plan(found, live, wanted, names, frozenset(paths), remove, whole_directories).steps()


def plan_comparisons(
    found: Sequence[Comparison],
    live: Tree,
    wanted: Tree,
    entries: tuple[Iterable[TreeEntry], Iterable[TreeEntry]],
    *,
    paths: Sequence[bytes] = (),
    remove: bool = True,
) -> list[Step]:
    """`plan` for trees that the caller has compared: `found` has, in order, the paths that differ in anything.

    A path that is not in `found` is left alone.  `entries` are those of `live` and of `wanted`, read only if some file
    in `found` has several names.
    """
    return _Plan(found, live, wanted, entries, frozenset(paths), remove).steps()


def _relevant(compared: Iterable[Comparison], *, links: bool) -> Iterator[Comparison]:
    for one in compared:
        old, new = one.old, one.new
        moved_mtime = old is not None and new is not None and old.mtime_ns != new.mtime_ns
        if one.kind is not None or moved_mtime or (links and (has_links(old) or has_links(new))):
            yield one


@dataclass
class _Plan:
    found: Sequence[Comparison]
    live: Tree
    wanted: Tree
    entries: tuple[Iterable[TreeEntry], Iterable[TreeEntry]]
    paths: AbstractSet[bytes]
    remove: bool
    whole_directories: bool = False

    def __post_init__(self) -> None:
        self._comparisons = {one.path: one for one in self.found}
        is_linked = any(has_links(one.old) or has_links(one.new) for one in self.found)
        self._live_names, self._wanted_names = map(_names, self.entries) if is_linked else ({}, {})
        self._kept: dict[int, tuple[bytes, TreeEntry | None]] = {}  # wanted inode -> the name that the others link to

    def steps(self) -> list[Step]:
        """See `plan`."""
        obstacles, removals = self._removals()
        made = list(self._missing_parents())
        made += filter(None, map(self._step, self.found))
        steps = [*obstacles, *made, *removals]
        changed = {step.path for step in steps if step.kind != "metadata"}
        return [*steps, *self._directories_metadata(changed, made)]

    def _removals(self) -> tuple[list[Step], list[Step]]:
        """Removals below directories that become something else, and all others; the deepest first."""
        top: bytes | None = None  # a directory that goes, or becomes something else
        top_is_replaced = False
        obstacles: list[Step] = []
        removals: list[Step] = []
        for one in self.found:
            is_below_top = top is not None and is_below(one.path, top)
            is_due = not self.whole_directories if is_below_top else self.remove
            if one.kind == "removed" and is_due:
                step = Step("remove", one.path, one.old, None, one.kind)
                (obstacles if is_below_top and top_is_replaced else removals).append(step)
            if one.kind in {"removed", "type"} and one.old is not None and one.old.is_dir and not is_below_top:
                top = one.path if self.remove or one.kind == "type" else None
                top_is_replaced = one.kind == "type"
        return obstacles[::-1], removals[::-1]

    def _missing_parents(self) -> Iterator[Step]:
        """The directories above `paths` that the target lacks."""
        for made in missing_above(self.live, self.wanted, self.paths):
            yield Step("directory", made.path, made.old, made.new, made.kind)

    def _step(self, one: Comparison) -> Step | None:
        old, new = one.old, one.new
        if new is None:
            return None
        if new.is_dir:
            return Step("directory", one.path, old, new, one.kind) if one.kind in {"added", "type"} else None
        change = one.kind or "metadata"
        names = self._wanted_names.get(new.inode, []) if has_links(new) else []
        if old is not None and one.kind is None:
            present = self._live_names.get(old.inode, []) if has_links(old) else []
            if (present or [one.path]) == (names or [one.path]):
                return None
        if len(names) > 1:
            kept, kept_old = self._keeper(new, names)
            if kept != one.path:
                if old is None or kept_old is None or old.inode != kept_old.inode or old.inode == 0:
                    return Step("link", one.path, old, new, change, kept)
                return None if one.kind is None else Step("metadata", one.path, old, new, change)
        if old is None or one.kind == "modified" or not self._can_keep_inode(one, names):
            return Step("put", one.path, old, new, change)
        return Step("metadata", one.path, old, new, change) if one.kind == "metadata" else None

    def _keeper(self, new: TreeEntry, names: Sequence[bytes]) -> tuple[bytes, TreeEntry | None]:
        """The name that further names of the wanted file `new` link to, and its present entry if it keeps its inode.

        That is a name that has the right content already, if there is one; else the first one in the plan.  Names
        that the plan leaves alone and those outside `paths` come first, because no step could link them.
        """
        found = self._kept.get(new.inode)
        if found is None:
            planned = [name for name in names if name in self._comparisons]
            others = [name for name in names if name not in self._comparisons]
            found = next(filter(None, map(self._in_place, [*others, *planned])), None)
            if found is None:
                found = (planned[0], None)  # "put" replaces the inode: the others are linked anew
            self._kept[new.inode] = found
        return found

    def _is_planned(self, path: bytes) -> bool:
        return not self.paths or is_at_or_below(path, self.paths)

    def _in_place(self, path: bytes) -> tuple[bytes, TreeEntry] | None:
        """`path` and its present entry, if its inode can be kept and its content is right."""
        old = entry_or_none(self.live, path)
        if old is None:
            return None
        if path not in self._comparisons:  # stays as it is; planned names that must not share its inode are put anew
            one = next(compare(self.live, self.wanted, paths=[path], every_path=True))
            shared = self._live_names.get(old.inode, []) if one.new is not None else []
            names = self._wanted_names.get(one.new.inode, []) if one.new is not None else []
            is_usable = all(name == path or name in names or self._is_planned(name) for name in shared)
            return (path, old) if one.kind is None and is_usable else None
        one = self._comparisons[path]
        if one.new is None or one.kind not in {None, "metadata"}:
            return None
        return (path, old) if self._can_keep_inode(one, self._wanted_names[one.new.inode]) else None

    def _can_keep_inode(self, one: Comparison, names: Sequence[bytes]) -> bool:
        """Whether the inode at the path can become the wanted file, whose names are `names`."""
        old, new = one.old, one.new
        if old is None or new is None or one.kind in {"added", "type"} or old.rdev != new.rdev:
            return False
        if not has_links(old):
            return True
        present = self._live_names.get(old.inode, [])
        # Names outside of `paths` can share it only if nothing of it changes.
        return old.nlink <= len(present) and all(
            name == one.path
            or (name in names and (one.kind is None or self._is_planned(name)))
            or self._is_removed(name)
            for name in present
        )

    def _is_removed(self, path: bytes) -> bool:
        return self.remove and path in self._comparisons and self._comparisons[path].kind == "removed"

    def _directories_metadata(self, changed: set[bytes], made: Sequence[Step]) -> Iterator[Step]:
        """Steps for directories that were made, or whose metadata differ or are moved by the other steps."""
        due = {step.path: step for step in made if step.kind == "directory"}
        for path in changed:
            above = path.rpartition(b"/")[0]
            if path and above not in due and self._is_planned(above) and self._wanted_has_directory(above):
                due[above] = Step("metadata", above, None, self.wanted.entry(above))
        for one in self.found:
            if one.new is not None and one.new.is_dir:
                due[one.path] = Step("metadata", one.path, one.old, one.new)
        for path in sorted(due, key=lambda path: path.split(b"/"), reverse=True):
            is_change = path in self._comparisons and self._comparisons[path].kind == "metadata"
            yield Step("metadata", path, due[path].old, due[path].new, "metadata" if is_change else None)

    def _wanted_has_directory(self, path: bytes) -> bool:
        entry = entry_or_none(self.wanted, path)
        return entry is not None and entry.is_dir


def _names(entries: Iterable[TreeEntry]) -> dict[int, list[bytes]]:
    """The paths of each file that has several, by inode number."""
    found: dict[int, list[bytes]] = {}
    for entry in entries:
        if has_links(entry):
            found.setdefault(entry.inode, []).append(entry.path)
    return found
