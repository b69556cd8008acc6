"""Summarize changes for a person: first the files that may have to be read, then one line for each directory that is
new, removed, ignored by git, or a repository.

An agent's work is often a few files among thousands of `.git/objects` and `.venv`.  A directory is ignored as git
decides it: by the `.gitignore` files of the directories above, and by `.git/info/exclude`.  For an overlay these are
read in the directory below, so that a program that runs in the overlay cannot add patterns that hide its own changes.
A file that is modified or removed, and that only a pattern for files ignores (`*.env`), is shown as a file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import click
import msgspec

from protocol.adapters.git_patterns import GitPatterns
from vfsd.cli.common import output
from vfsd.cli.common.changes import ChangeSpool, show_stat
from vfsd.cli.common.output import counted
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import ProblemRecord
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.options import BackendSpec

_PATTERN_BYTES_MAX: Final = 1 << 20
_ORDER: Final = ("new", "removed", "ignored", "git")


class ChangeGroup(msgspec.Struct):
    """Changes that one line stands for: those at `path`, a directory with a slash at its end, or an ignored file.

    The numbers are those of files; of directories, if there are only directories.
    """

    path: str
    kind: Literal["new", "removed", "ignored", "git"]
    added: int = 0
    modified: int = 0
    removed: int = 0
    lines_added: int = 0

    def describe(self) -> str:
        """Say what changed: "1,690 new, ignored"."""
        numbers = ((self.added, "new"), (self.modified, "modified"), (self.removed, "removed"))
        words = [f"{number:,} {word}" for number, word in numbers if number]
        words += ["ignored"] if self.kind == "ignored" else []
        words += [f"{counted(self.lines_added, 'insertion')}(+)"] if self.kind == "new" and self.lines_added else []
        return ", ".join(words)


class Summary(msgspec.Struct):
    """The changes that are shown one by one, and the groups of the others."""

    files: list[ChangeRecord]
    groups: list[ChangeGroup]

    @property
    def paths(self) -> list[str]:
        """The paths of all lines, in the order of `show`."""
        return [change.path for change in self.files] + [group.path.rstrip("/") for group in self.groups]

    @property
    def left_out_of_patches(self) -> list[str]:
        """Patterns, in gitignore's syntax, of what a patch for a person leaves out."""
        names = [from_wire_path(group.path) for group in self.groups if group.kind in {"ignored", "git"}]
        return ["/" + re.sub(r"([\\*?\[ ])", r"\\\1", name.decode()) for name in names if _is_text(name)]

    def of_files(self, problems: Iterable[ProblemRecord]) -> list[ProblemRecord]:
        """Return the problems of the changes that are shown one by one."""
        shown = {change.path for change in self.files}
        return [problem for problem in problems if problem.path in shown]

    def show(self) -> None:
        """Print a line for each file and group, and the totals."""
        groups = [
            (output.show_path(group.path), click.style(group.describe(), dim=group.kind in {"ignored", "git"}))
            for group in self.groups
        ]
        grouped = sum(group.added + group.modified + group.removed for group in self.groups)
        show_stat(self.files, len(self.files), groups=groups, grouped=grouped)


def summarize(changes: ChangeSpool | Iterable[ChangeRecord], rules: IgnoreRules) -> Summary:
    """Summarize `changes`, which are iterated twice."""
    whole: dict[bytes, Literal["new", "removed"]] = {}
    for change in changes:
        if change.type == "directory" and change.change in {"added", "removed"}:
            whole[from_wire_path(change.path)] = "new" if change.change == "added" else "removed"
    files: list[ChangeRecord] = []
    groups: dict[bytes, ChangeGroup] = {}
    members: dict[bytes, list[ChangeRecord]] = {}  # of a group with one member, which is shown itself
    for change in changes:
        path = from_wire_path(change.path)
        found = _group_of(path, change, whole, rules)
        if found is None:
            files.append(change)
            continue
        place, kind = found
        is_itself = place == path and change.type != "directory"
        group = groups.setdefault(place, ChangeGroup(wire_path(place) + ("" if is_itself else "/"), kind))
        _count(group, change, members.setdefault(place, []))
    for place, group in list(groups.items()):
        alone = members[place]
        if group.kind in {"new", "removed"} and len(alone) == 1:
            files.append(alone[0])
            del groups[place]
    files.sort(key=lambda change: change.path)
    return Summary(files, sorted(groups.values(), key=lambda group: (_ORDER.index(group.kind), group.path)))


def _count(group: ChangeGroup, change: ChangeRecord, members: list[ChangeRecord]) -> None:
    """Add a change to its group.  `members` gets the first two files or, if there are none, directories."""
    is_directory = change.type == "directory"
    if members and is_directory and members[0].type != "directory":
        return
    if members and not is_directory and members[0].type == "directory":
        members.clear()
        group.added = group.modified = group.removed = 0
    if len(members) < 2:
        members.append(change)
    name = {"added": "added", "removed": "removed"}.get(change.change, "modified")
    setattr(group, name, getattr(group, name) + 1)
    group.lines_added += change.lines_added or 0


def _group_of(
    path: bytes, change: ChangeRecord, whole: dict[bytes, Literal["new", "removed"]], rules: IgnoreRules
) -> tuple[bytes, Literal["new", "removed", "ignored", "git"]] | None:
    """Return the path and the kind of the group that a change belongs to; None if it is shown as a file."""
    is_directory = change.type == "directory"
    directories = list(_directories(path, is_directory))
    for directory in directories:
        if directory.rpartition(b"/")[2] == b".git":
            return directory, "git"
        if rules.ignores(directory, is_directory=True):
            return directory, "ignored"
    if not is_directory and change.change == "added" and rules.ignores(path, is_directory=False):
        return path, "ignored"
    return next(((directory, whole[directory]) for directory in directories if directory in whole), None)


def _directories(path: bytes, is_directory: bool) -> Iterator[bytes]:
    """Iterate over the directories that `path` is in, the topmost first, and `path` if it is one."""
    at = path.find(b"/")
    while at >= 0:
        yield path[:at]
        at = path.find(b"/", at + 1)
    if is_directory:
        yield path


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def rules_for(record: WorkspaceRecord) -> IgnoreRules:
    """Return the rules for the changes of a workspace."""
    below = BackendSpec.split(record.backend)
    return IgnoreRules(below.argument if below.lower_layer == "directory" else record.mountpoint)


class IgnoreRules:
    """The rules of the `.gitignore` files in `root`, below it, and above it up to the top of the repository.

    Source: gitignore(5).  The user's global patterns (`core.excludesFile`) are not read.
    """

    def __init__(self, root: str) -> None:
        self._root = os.fsencode(root)
        self._prefix = b""  # the path of `root` from the top of its repository
        top = self._root
        while top != b"/" and not os.path.lexists(os.path.join(top, b".git")):
            top = os.path.dirname(top)
        if top not in (b"/", self._root):
            self._prefix = os.path.relpath(self._root, top) + b"/"
            self._root = top
        self._lists: dict[bytes, list[GitPatterns]] = {}
        self._answers: dict[bytes, bool] = {}  # of directories

    def ignores(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether git ignores `path`, relative to the root, if it tracks nothing there.

        The caller has checked the directories above it.
        """
        if not is_directory:
            return self._decide(self._prefix + path, is_directory=False)
        if path not in self._answers:
            self._answers[path] = self._decide(self._prefix + path, is_directory=True)
        return self._answers[path]

    def _decide(self, path: bytes, *, is_directory: bool) -> bool:
        """The nearest `.gitignore` with a matching pattern decides."""
        above, at = path, len(path)
        while True:
            at = above.rfind(b"/")
            above = path[:at] if at >= 0 else b""
            relative = path[at + 1 :]
            for patterns in self._patterns(above):
                verdict = patterns.verdict(relative, is_directory=is_directory)
                if verdict is not None:
                    return verdict
            if at < 0:
                return False

    def _patterns(self, directory: bytes) -> list[GitPatterns]:
        """Return the patterns of a directory, the deciding list first."""
        found = self._lists.get(directory)
        if found is None:
            place = os.path.join(self._root, directory)
            files = [os.path.join(place, b".gitignore")]
            files += [] if directory else [os.path.join(place, b".git/info/exclude")]
            found = self._lists[directory] = [patterns for file in files if (patterns := _read_patterns(file))]
        return found


def _read_patterns(file: bytes) -> GitPatterns:
    """Read a file of patterns; without those that git does not understand.  None of them if it cannot be read."""
    lines: list[str] = []
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return GitPatterns(lines)
    with open(descriptor, encoding="utf-8", errors="surrogateescape") as opened:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            lines = opened.read(_PATTERN_BYTES_MAX).split("\n")
    usable = []
    for line in lines:
        try:
            GitPatterns([line.rstrip("\r")])
        except ValueError:
            continue
        usable.append(line.rstrip("\r"))
    return GitPatterns(usable)
