"""Policy: the policy of one mount while it is served; `tighten` adds patterns at run time.

`HiddenTree` is a state without what the policy hides; `check` refuses a change by the daemon itself.

A policy can only be tightened, because every program of the same user can reach the control socket.  The steps of
`tighten`, which holds the workspace's `change_lock`:

1. write back pages that programs made dirty while they were allowed to;
2. record the patterns in the journal, so that a daemon that continues the mount has them;
3. add the patterns: from now on no call gets around them;
4. invalidate in the kernel each name that is hidden now, with the content behind it, and the pages of each protected
   file that a program has open for writing.

A program that has such a file mapped can change the kernel's pages again.  The kernel asks only when it writes them
back; `attend` drops them once a second, and at once when a write was refused.

Threading: the serving loop; invalidations run in worker threads.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import trio

from protocol.adapters.trees import FilteredTree
from protocol.diff.tree_diff import Change, Pair, candidate_pairs, compare_pairs
from protocol.errors import DeniedByPolicyError, os_error, shown
from protocol.tree import Tree, TreeEntry
from protocol.volume import ROOT_INODE, Answer, Volume
from protocol.volume_durability import journaled
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange
from vfsd.daemon.policy.rules import Name, PolicyRules, walk
from vfsd.daemon.policy.volume import PolicyVolume
from vfsd.kernel.engines.base import repeated
from vfsd.kernel.invalidation import invalidate_kernel_caches
from vfsd.machine.logs import log_failure
from vfsd.wire.options import PolicyOptions

if TYPE_CHECKING:
    from vfsd.daemon.mounted_volume import MountedVolume
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_NOTE: Final = "policy"
_ROUND_S: Final = 1.0
_PATHS_SHOWN: Final = 3
_ADVICE: Final = "; nothing was changed; name other paths only, or change these below the mount"


class Policy:
    """`volume` is what to serve in place of the workspace's own volume."""

    def __init__(self, volume: Volume, protect: Sequence[str], hide: Sequence[str], *, is_continued: bool) -> None:
        """`is_continued`: the kernel knows files from an earlier daemon.  OSError for a volume without paths."""
        if not volume.capabilities.paths:
            raise OSError(
                errno.EOPNOTSUPP,
                "this backend does not tell the paths of files, so it cannot enforce --protect and --hide",
            )
        self.rules = PolicyRules(volume, protect, hide)
        self.volume = PolicyVolume(volume, self.rules)
        self.volume.on_refused_write = self._refused
        self._own = volume
        self._changed_pages: set[int] = set()
        self._wanted = trio.Event()
        self.on_tightened: Callable[[PolicyOptions], None] = lambda _options: None
        """Called with the policy of forks that are made from now on."""
        if is_continued:
            self.rules.has_linked = self.volume.is_tightened = True

    @property
    def options(self) -> PolicyOptions:
        """The patterns as options of a mount."""
        return PolicyOptions(self.rules.protect_patterns, self.rules.hide_patterns)

    # -- what the daemon itself reads and changes --------------------------------------------------------
    def shown(self, tree: Tree) -> Tree:
        """Return `tree` without what is hidden."""
        return HiddenTree(tree, self.rules) if self.rules.hiding else tree

    def left_out_of(self, tree: Tree) -> int:
        """Return how many hidden names a walk of a result of `shown` has left out."""
        return len(tree.left_out) if isinstance(tree, HiddenTree) else 0

    def check(self, found: Iterable[Change], attempt: str) -> None:
        """Raise DeniedByPolicyError if the policy refuses one of these changes, with the paths that it protects.

        A hidden path is counted and not named.
        """
        protected: list[bytes] = []
        hidden = 0
        for change in found:
            before, after = (
                None if entry is None else _reason(self.rules, entry) for entry in (change.old, change.new)
            )
            if "hidden" in {before, after}:
                hidden += 1
            elif "protected" in {before, after} or after == "symlink":
                protected.append(change.path)
        if not protected and not hidden:
            return
        parts = []
        only = protected[0] if len(protected) == 1 and not hidden else None  # the error names it
        if only is not None:
            parts.append("a protected path")
        elif protected:
            listed = ", ".join(map(shown, protected[:_PATHS_SHOWN])) + (
                ", ..." if len(protected) > _PATHS_SHOWN else ""
            )
            parts.append(f"{len(protected):,} protected path{'s' * (len(protected) > 1)} ({listed})")
        if hidden:
            parts.append(f"{hidden:,} hidden path{'s' * (hidden > 1)}")
        reason = f"the policy of this workspace refuses it, because it would change {' and '.join(parts)}"
        raise DeniedByPolicyError(attempt, only, reason + _ADVICE)

    def check_trees(
        self,
        old: Tree,
        new: Tree,
        attempt: str,
        *,
        paths: Sequence[bytes] = (),
        keep_going: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise DeniedByPolicyError if the daemon must not make `new` of `old`, below `paths`.  Neither is filtered.

        The content of what the policy may refuse is compared: an archive may have a file of the same size and mtime.
        """
        rules = self.rules

        def is_guarded(pair: Pair) -> bool:
            keep_going()
            return any(entry is not None and _reason(rules, entry) is not None for entry in pair)

        def changes() -> Iterator[Change]:
            pairs = filter(is_guarded, candidate_pairs(old, new, paths=paths, keep_going=keep_going))
            for one in compare_pairs(old, new, pairs):
                if one.new is not None and one.new.nlink > 1 and not one.new.is_dir:
                    rules.has_linked = True
                if one.kind is not None:
                    yield Change(one.path, one.kind, one.old, one.new)

        self.check(changes(), attempt)

    # -- tightening --------------------------------------------------------------------------------------
    async def tighten(
        self,
        protect: Sequence[str],
        hide: Sequence[str],
        mounted: MountedVolume,
    ) -> list[bytes]:
        """Add patterns; return the protected files that programs still have open for writing.  ValueError, OSError."""
        added = PolicyRules(self._own, (*self.rules.protect_patterns, *protect), (*self.rules.hide_patterns, *hide))
        async with mounted.change_lock:
            await mounted.write_back()
            self._note(PolicyOptions(added.protect_patterns, added.hide_patterns))
            self.rules.add(protect, hide)
            self.volume.is_tightened = True
            self.on_tightened(self.options)
            await invalidate_kernel_caches(mounted.engine, await self._hidden_names())
            if hide:
                await mounted.snapshots_hidden()
            open_files = await self._open_protected()
            await self._drop_pages(mounted.engine, open_files)
        return sorted(filter(None, map(self.rules.protected_path, open_files)))

    def _note(self, options: PolicyOptions) -> None:
        journal = journaled(self._own)
        if journal is not None:
            journal.note(_NOTE, encoded(options))

    async def _hidden_names(self) -> CacheInvalidation:
        """All names that are hidden, for the kernel to forget; those below a hidden directory as well."""
        await repeated(self.rules.collect)  # other names of hidden files
        entries: list[EntryChange] = []
        hidden: set[bytes] = set()  # directories

        def visit(name: Name) -> bool:
            above = name.path.rpartition(b"/")[0]
            if above in hidden or self.rules.hides_here(name) or self.rules.is_known_hidden(name.inode):
                entries.append(EntryChange(name.parent, name.name, name.inode, 0))
                if name.is_directory:
                    hidden.add(name.path)
            return True

        def find() -> Answer[None]:
            entries.clear()
            hidden.clear()
            return walk(self._own, ROOT_INODE, visit)

        await repeated(find)
        # The names in a directory before the directory, whose name leads to them.
        entries.reverse()
        return CacheInvalidation(entries, [InodeChange(entry.old, content=True) for entry in entries])

    async def _open_protected(self) -> list[int]:
        return [
            inode
            for inode in tuple(self.volume.writers)
            if await repeated(functools.partial(self.rules.protects_inode, inode))
        ]

    # -- pages of refused writes -------------------------------------------------------------------------
    def _refused(self, inode: int) -> None:
        self._changed_pages.add(inode)
        self._wanted.set()

    async def attend(self, engine: Engine) -> None:
        """Until cancelled, drop pages from the kernel's cache that programs changed and must not change."""
        while True:
            with trio.move_on_after(_ROUND_S):
                await self._wanted.wait()
            self._wanted = trio.Event()
            changed, self._changed_pages = self._changed_pages, set()
            try:
                if self.volume.is_tightened and self.volume.writers:
                    changed.update(await self._open_protected())
                await self._drop_pages(engine, changed)
            except Exception as error:  # noqa: BLE001 -- the mount goes on; the next round tries it again
                log_failure(_logger, "dropping pages of refused writes", error, level=logging.WARNING)

    async def _drop_pages(self, engine: Engine, inodes: Iterable[int]) -> None:
        await invalidate_kernel_caches(
            engine, CacheInvalidation(inodes=[InodeChange(inode, content=True) for inode in inodes])
        )


def encoded(options: PolicyOptions) -> bytes:
    """Encode a policy for a journal."""
    return json.dumps([options.protect, options.hide]).encode()


def decoded(data: bytes | None) -> PolicyOptions:
    """Decode a policy from a journal; without one it is empty."""
    protect, hide = json.loads(data) if data else ((), ())
    return PolicyOptions(tuple(protect), tuple(hide))


def open_policy(options: MountOptions, volume: Volume, *, is_continued: bool) -> tuple[Policy | None, str | None]:
    """Return the policy that `options` ask for, and a sentence for the user.

    A daemon that continues a mount has what was added at run time, from the journal or in `options`.  A new mount has
    what its own options say; the sentence names what the mount before it protected or hid in addition.
    """
    protect, hide = options.policy.protect, options.policy.hide
    if options.workspace.backend.kind == "overlay":
        hide = _joined(hide, options.content.exclude)
    journal = journaled(volume)
    noted = decoded(None if journal is None else journal.notes.get(_NOTE))
    if is_continued:
        protect, hide = _joined(protect, noted.protect), _joined(hide, noted.hide)
    policy = Policy(volume, protect, hide, is_continued=is_continued) if protect or hide else None
    now = PolicyOptions() if policy is None else policy.options
    if journal is not None and not is_continued and encoded(now) != encoded(noted):
        journal.note(_NOTE, encoded(now))
    return policy, _dropped(noted, now)


def _joined(patterns: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    """Return `patterns` with those of `more` that are not among them."""
    return (*patterns, *(each for each in more if each not in patterns))


def _dropped(before: PolicyOptions, now: PolicyOptions) -> str | None:
    gone = [f"--protect {shown(os.fsencode(each))}" for each in before.protect if each not in now.protect]
    gone += [f"--hide {shown(os.fsencode(each))}" for each in before.hide if each not in now.hide]
    if not gone:
        return None
    return f"the last mount of this workspace had a policy that this one does not have: {' '.join(gone)}"


class HiddenTree(FilteredTree):
    """`tree` without what `rules` hide, by any of a file's names."""

    def __init__(self, tree: Tree, rules: PolicyRules) -> None:
        super().__init__(tree, lambda path, is_directory: rules.hides(path, is_directory=is_directory))
        self._rules = rules
        self._linked: tuple[int, frozenset[int]] | None = None  # the version of the rules; files with a hidden name
        self.left_out: set[bytes] = set()
        """The names that were left out so far, without those below hidden directories."""

    def _is_shown(self, entry: TreeEntry) -> bool:
        return entry.nlink <= 1 or entry.is_dir or entry.inode not in self._hidden_inodes()

    def _hidden_inodes(self) -> frozenset[int]:
        """The files with several names, at least one of them hidden; the first call walks the tree."""
        version = self._rules.version
        if self._linked is None or self._linked[0] != version:
            found = set()
            for entry in self._tree.walk():
                if entry.nlink > 1 and not entry.is_dir and self._rules.hides(entry.path, is_directory=False):
                    found.add(entry.inode)
            self._linked = version, frozenset(found)
        return self._linked[1]

    def entry(self, path: bytes) -> TreeEntry:
        entry = super().entry(path)
        if not self._is_shown(entry):
            raise os_error(errno.ENOENT, shown(path))
        return entry

    def _shows(self, entry: TreeEntry) -> bool:
        shows = super()._shows(entry) and self._is_shown(entry)
        if not shows:
            self.left_out.add(entry.path)
        return shows


def _reason(rules: PolicyRules, entry: TreeEntry) -> str | None:
    """Return why the policy refuses a change that makes `entry`; None if it does not."""
    if rules.hides(entry.path, is_directory=entry.is_dir):
        return "hidden"
    if rules.protects(entry.path, is_directory=entry.is_dir):
        return "protected"
    return "symlink" if stat.S_ISLNK(entry.mode) and rules.refuses_symlink(entry.path) else None
