"""PolicyRules: which paths and files of one volume the policy protects and hides.

A path is protected or hidden if a pattern matches it or a directory above it (`protocol.adapters.git_patterns`).  A
file with several names is protected, or hidden, under all of them if one of them is.  The volume may not know all names
of a file, so the first time that it matters one walk collects the files that have a matching name.  That stays true
until `names_changed`: no program can make, move or remove a matching name, and the daemon does so only with what it
checks (`Policy.check`).

Invariants:

- rules are only added;
- `_protected` and `_hidden` have the inodes of all files with a matching name, or are None: to be collected;
- without a file of several names among those that were looked up, nothing is ever walked.

On a directory of the host other programs can link and move files; a walk is repeated before it refuses anything there.

Threading: the serving loop, except `hides` and `protects`, which any thread may call.
"""

from __future__ import annotations

import errno
import re
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from protocol.adapters.git_patterns import GitPatterns
from protocol.errors import os_error
from protocol.volume import ROOT_INODE, Answer, Attributes, DirectoryEntry, Volume, extended, then

_WALK_AGAIN_S: Final = 1.0
# vfsd writes files under such a name and renames them, also through the mount; a pattern such as `.*` is not for these.
# Source: protocol.adapters.plain_filesystem, protocol.store.directory.target.
_OWN: Final = re.compile(rb"(?:^|/)\.vfsd-(?:[0-9a-f]{16}|restore-[0-9a-f]+-[0-9]+)$")


class PolicyRules:
    """The rules over `volume`, which declares `paths`."""

    def __init__(self, volume: Volume, protect: Sequence[str], hide: Sequence[str]) -> None:
        """ValueError for an invalid pattern."""
        self._volume = volume
        self.path_of = extended(volume).path_of
        self._can_change_outside = volume.capabilities.external_changes
        self.has_linked = False  # whether a file with several names was looked up
        self._protected: dict[int, bytes] | None = None  # inodes, and their matching path
        self._hidden: dict[int, bytes] | None = None
        self._walked_s = 0.0
        self.version = 0
        self.protect_patterns: tuple[str, ...] = ()
        self.hide_patterns: tuple[str, ...] = ()
        self.add(protect, hide)

    def add(self, protect: Sequence[str], hide: Sequence[str]) -> None:
        """Add patterns at the end.  ValueError."""
        protected, hidden = _added(self.protect_patterns, protect), _added(self.hide_patterns, hide)
        protecting, hiding = GitPatterns(protected), GitPatterns(hidden)
        self.protecting, self.hiding = protecting, hiding
        self.protect_patterns, self.hide_patterns = protected, hidden
        self._links_refused = frozenset((*protecting.fixed_directories, *hiding.fixed_directories))
        self._protected = self._hidden = None
        self.version += 1

    # -- paths ---------------------------------------------------------------------------------------
    def protects(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is protected by this path."""
        return self.protecting.matches(path, is_directory=is_directory) and not _is_own(self.protecting, path)

    def hides(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is hidden by this path."""
        return self.hiding.matches(path, is_directory=is_directory) and not _is_own(self.hiding, path)

    def hides_here(self, name: Name) -> bool:
        """Whether an entry is hidden by this name; the caller knows that nothing above it is."""
        return _matches_here(self.hiding, name)

    def refuses_name(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether no entry may be made at `path`, whether one exists or not."""
        return self.protects(path, is_directory=is_directory) or self.hides(path, is_directory=is_directory)

    def refuses_symlink(self, path: bytes) -> bool:
        """Whether a symlink at `path` would stand where a pattern names a directory, and lead to another one."""
        return (
            path in self._links_refused or self.protects(path, is_directory=True) or self.hides(path, is_directory=True)
        )

    # -- inodes --------------------------------------------------------------------------------------
    def note(self, found: Attributes) -> None:
        """Take note of a file that was looked up."""
        if found.nlink > 1 and not stat.S_ISDIR(found.mode):
            self.has_linked = True

    def protects_inode(self, inode: int) -> Answer[bool]:
        """Whether a file or directory is protected under one of its names."""
        return self._matches_inode(inode, self.protecting, hidden=False)

    def hides_inode(self, inode: int) -> Answer[bool]:
        """Whether a file or directory is hidden under one of its names."""
        return self._matches_inode(inode, self.hiding, hidden=True)

    def _matches_inode(self, inode: int, patterns: GitPatterns, *, hidden: bool) -> Answer[bool]:
        path = self.path_of(inode)
        if path and not _is_own(patterns, path):
            if patterns.matches(path, is_directory=False):
                return True
            if patterns.has_directory_patterns and patterns.matches(path, is_directory=True):
                found = self._volume.getattr(inode)
                return then(found, lambda seen: stat.S_ISDIR(seen.mode))
        return self.has_matching_name(inode, hidden=hidden) if self.has_linked and patterns else False

    def has_matching_name(self, inode: int, *, hidden: bool) -> Answer[bool]:
        """Whether a file other than a directory has a protected name or, with `hidden`, a hidden one."""

        def answer(_: None) -> bool:
            found = self._hidden if hidden else self._protected
            return found is not None and inode in found

        if self._protected is None or self._hidden is None:
            return then(self.collect(), answer)
        if not answer(None):
            return False
        if self._can_change_outside and time.monotonic() > self._walked_s + _WALK_AGAIN_S:
            # A program may have renamed the file, or the inode number may be that of a later file.
            return then(self.collect(), answer)
        return True

    def protected_path(self, inode: int) -> bytes | None:
        """The path by which a protected file is protected, as far as it is known; else another path of it."""
        path = self.path_of(inode)
        if path is not None and self.protects(path, is_directory=False):
            return path
        return (self._protected or {}).get(inode, path)

    def names_changed(self) -> None:
        """Collect the files with a matching name again: a change by the daemon may have given them other names."""
        self._protected = self._hidden = None
        self.version += 1

    def is_known_hidden(self, inode: int) -> bool:
        """Whether a file is known to have a hidden name, without a walk."""
        return self._hidden is not None and inode in self._hidden

    def collect(self) -> Answer[None]:
        """Collect the files that have a matching name."""
        protected: dict[int, bytes] = {}
        hidden: dict[int, bytes] = {}
        inside: dict[bytes, tuple[bool, bool]] = {b"": (False, False)}  # directories: whether they match

        def visit(name: Name) -> bool:
            above = inside[name.path.rpartition(b"/")[0]]
            is_protected = above[0] or _matches_here(self.protecting, name)
            is_hidden = above[1] or self.hides_here(name)
            if name.is_directory:
                inside[name.path] = is_protected, is_hidden
            else:
                if is_protected:
                    protected[name.inode] = name.path
                if is_hidden:
                    hidden[name.inode] = name.path
            return True

        version = self.version

        def keep(_: None) -> Answer[None]:
            if version != self.version:  # tightened, or restored, while a coroutine walked
                return self.collect()
            self._protected, self._hidden = protected, hidden
            self._walked_s = time.monotonic()
            return None

        return then(walk(self._volume, ROOT_INODE, visit), keep)

    def moves_matching(self, directory: int, old: bytes, new: bytes) -> Answer[bool]:
        """Whether a directory's move from path `old` to `new` would move something protected, or change what is hidden.

        Everything below it counts.
        """
        found = [self._changes(old, new, is_directory=True)]

        def visit(name: Name) -> bool:
            if not found[0]:
                before, after = old + b"/" + name.path, new + b"/" + name.path
                found[0] = self._changes(before, after, is_directory=name.is_directory)
            return not found[0]

        if found[0]:
            return True
        return then(walk(self._volume, directory, visit), lambda _: found[0])

    def _changes(self, old: bytes, new: bytes, *, is_directory: bool) -> bool:
        return (
            self.protects(old, is_directory=is_directory)
            or self.protects(new, is_directory=is_directory)
            or self.hides(old, is_directory=is_directory) != self.hides(new, is_directory=is_directory)
        )


def _matches_here(patterns: GitPatterns, name: Name) -> bool:
    return patterns.matches_here(name.path, is_directory=name.is_directory) and _OWN.search(name.path) is None


def _is_own(patterns: GitPatterns, path: bytes) -> bool:
    """Whether `path` is a temporary name of vfsd's own, and nothing above it matches."""
    found = _OWN.search(path)
    return found is not None and not patterns.matches(path[: found.start()], is_directory=True)


def _added(patterns: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    """Add `more`, without those that hold already: that are there, with no `!` pattern after them."""
    for each in more:
        last = max((at for at, found in enumerate(patterns) if found.startswith("!")), default=-1)
        if each not in patterns[last + 1 :]:
            patterns = (*patterns, each)
    return patterns


T = TypeVar("T")
_DOTS = frozenset({b".", b".."})


class Name(NamedTuple):
    """One name: `path` is relative to where the walk began, `inode` what it leads to."""

    path: bytes
    parent: int
    name: bytes
    inode: int
    is_directory: bool


Visit = Callable[[Name], bool]
"""Called with each name, directories before what is in them: whether the walk goes down into this directory."""


def walk(volume: Volume, top: int, visit: Visit) -> Answer[None]:
    """Call `visit` for each name below directory `top`, which the caller holds by a lookup."""
    probe = volume.getattr(ROOT_INODE)
    if isinstance(probe, Awaitable):
        return _later(probe, _walk(volume, top, visit))
    _now(_walk(volume, top, visit))
    return None


async def _later(probe: Awaitable[object], work: Coroutine[Any, Any, None]) -> None:
    try:
        await probe
    except BaseException:
        work.close()
        raise
    await work


def _now(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise OSError(errno.EIO, "the volume answered the first call at once and a later one not")


async def _walk(volume: Volume, top: int, visit: Visit) -> None:
    waiting: list[tuple[int, bytes, bool]] = [(top, b"", False)]  # directories; whether the walk holds a lookup
    try:
        while waiting:
            directory, path, is_held = waiting.pop()
            try:
                await _list(volume, directory, path, visit, waiting)
            finally:
                if is_held:
                    volume.forget(directory, 1)
    finally:
        for directory, _, is_held in waiting:
            if is_held:
                volume.forget(directory, 1)


async def _list(
    volume: Volume, directory: int, path: bytes, visit: Visit, waiting: list[tuple[int, bytes, bool]]
) -> None:
    cookie = 0
    while True:
        answer = volume.readdir(directory, cookie)
        entries = list(await answer if isinstance(answer, Awaitable) else answer)
        if not entries:
            return
        cookie = entries[-1][3]
        for name, inode, mode, _ in map(DirectoryEntry._make, entries):
            if name in _DOTS:
                continue
            below = path + b"/" + name if path else name
            if not visit(Name(below, directory, name, inode, stat.S_ISDIR(mode))) or not stat.S_ISDIR(mode):
                continue
            try:
                found = volume.lookup(directory, name)
                number = (await found if isinstance(found, Awaitable) else found).inode
            except FileNotFoundError:
                continue  # another program removed it
            waiting.append((number, below, True))


def stale() -> OSError:
    """Return the error for a call on a file that became hidden while a program had it open."""
    return os_error(errno.ESTALE)
