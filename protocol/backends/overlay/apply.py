"""OverlayApply: writes the changes of an overlay into its lower directory.

Check: before anything is written, every path to be replaced or removed must still be as the overlay first saw it, and
a path to be made must not exist.  A path that already has its new state counts as done, so running an interrupted
apply again completes it.

Write: stage all new entries, commit the steps to the intent log, execute them.  Directories are made, files are renamed
into place (the old entry of a path that changes its type is removed first), then paths are removed, and attributes of
directories are set last.  At any moment each path has its old or its new state.  If the process is killed, the next
one that opens the intent log brings the whole directory to its old or its new state (see `intent_log`).

Invariant, without `force`: content that another program wrote below after the workspace first changed the path is never
replaced or removed.  The base holds the identity that the workspace showed at that moment (see `OverlayState.refresh`
and `OverlayState.own`).  A run reads it once, before anything else, and compares it with the directory when it looks
for conflicts and when it plans a step; the step compares with the planned state right before it renames or removes.
A file whose content is partly lost, because it was changed below, cannot be written: `force` leaves it out.
A directory that another program removed or replaced is a conflict, and `force` makes it anew for what is written in it.
A directory is removed only if this run removes all its entries.  If others are in it, hidden ones or those of other
programs, it is a conflict, and `force` keeps the directory: so no step fails because a directory is not empty, unless
an entry appears after the check.

Before a file below is replaced, content that snapshots still need is kept (`LowerFile.keep`).

The steps do not come from `protocol.diff.plan`: they are logged with the identities that they expect, all content is
staged before the first step, and attributes of files change last, because the other steps compare the file, under its
other names, with its old identity.

Threading: any one thread, on immutable trees; no other apply runs at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from protocol.backends.overlay.inode import LowerContent, OverlayInode, lower_files
from protocol.backends.overlay.intent_log import (
    ApplyIntentLog,
    Recovered,
    Step,
    Steps,
    has_intent_log,
    intent_log,
    place,
    set_attributes,
)
from protocol.backends.overlay.lower import ChangedBelowError, Identity, LowerStat, identity, is_gone
from protocol.diff.tree_diff import (
    Change,
    changes,
    entry_or_none,
    has_links,
    is_at_or_below,
    is_below,
    same_bytes,
    walk_order,
)
from protocol.linux.portable import Handle
from protocol.linux.syscalls import syncfs
from protocol.merge.git import has_nothing_staged
from protocol.merge.repositories import Repositories
from protocol.merge.sides import Trees, metadata_of
from protocol.tree import TreeEntry
from protocol.volume_extensions import ApplyConflict

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import SnapshotTree
    from protocol.backends.overlay.volume import OverlayVolume

_CHUNK_BYTES: Final = 1 << 20
_FEW_FILES: Final = 64  # files; more than that are synced by one syncfs(2)
_PERMISSIONS: Final = 0o7777
_Identities = dict[bytes, Identity | None]
_DENIED: Final = "is a directory below in which this user may not create or remove files: `chmod u+w` it there"
_READ_ONLY: Final = "is a directory of a file system that is mounted read-only: `mount -o remount,rw` it"
_SOMETHING_ELSE: Final[Identity] = (0, 0, 0, 0, 0)  # no file has this identity


@dataclass(slots=True)
class Applied:
    """A `protocol.volume_extensions.ApplyResult`: the changes to write, the conflicts, and what the run left below.

    With conflicts and without `force` nothing is written.  With `force`, directories that must be kept are no changes.
    """

    changes: list[Change] = field(default_factory=list)
    parents: set[bytes] = field(default_factory=set)  # new directories that are written without everything below them
    names: set[bytes] = field(default_factory=set)  # all names, of the files that were written, that are as in `live`
    conflicts: list[ApplyConflict] = field(default_factory=list)
    problems: list[ApplyConflict] = field(default_factory=list)  # left out although `force` is set
    identities: _Identities = field(default_factory=dict)  # by path, of the paths that were written
    error: BaseException | None = None
    renewed: dict[tuple[int, int], Identity] = field(default_factory=dict)  # by (st_dev, st_ino): new ctime
    recovered: Recovered | None = None  # an apply that was killed earlier
    repositories: list[bytes] = field(
        default_factory=list
    )  # changed below, too, so they and their changes are left out

    @property
    def recovery(self) -> str | None:
        return None if self.recovered is None else str(self.recovered)


class OverlayApply:
    """Implements `protocol.volume_extensions.ApplyRun`: one apply of `volume` from the tree `base` to the tree `live`.

    Both trees stay open as long as the run is used.
    """

    def __init__(
        self,
        volume: OverlayVolume,
        base: SnapshotTree,
        live: SnapshotTree,
        paths: Sequence[bytes],
        *,
        force: bool,
        dry_run: bool,
    ) -> None:
        self._volume = volume
        self._lower = volume.directory
        self._root = self._lower.fd
        self._device = os.fstat(self._root).st_dev
        self._base = base
        self._live = live
        self._paths = paths
        self._scopes = frozenset(paths)
        self._identities = dict(volume.identities)  # those that earlier runs left, by path
        self._force = force
        self._dry_run = dry_run
        self._keep_going: Callable[[], None] = lambda: None
        self._changed: set[bytes] = set()
        self._expectations: _Identities = {}
        self._done: set[bytes] = set()
        self._in_place: set[bytes] = set()  # files below that only get other attributes
        # The inodes whose ctime this run changes, with their identity before.
        # The values that `_touch` recorded: an open descriptor or the current identity, and the identity before.
        self._touched: dict[tuple[int, int], tuple[Handle | Identity, Identity]] = {}
        self._linked: set[tuple[int, int]] = set()  # inodes whose staged links are put in place later
        self._times: dict[tuple[int, int], int] = {}  # the mtime that this run gives to an inode
        self._staged: dict[bytes, bytes] = {}  # path -> where its new entry is staged

    def write(self, keep_going: Callable[[], None], before: Callable[[], None] = lambda: None) -> Applied:
        """See `protocol.volume_extensions.ApplyRun`.  `before` runs before each change on the disk.  EBUSY, OSError.

        First finishes or undoes an apply that was killed (`Applied.recovered`); a dry run does not.  `Applied.error` is
        the error that stopped the run after that; each path then has its old or its new state.
        """
        self._keep_going = keep_going
        self._lower.close_directories()  # another program may have replaced a directory since
        found = list(changes(self._base, self._live, paths=self._paths, keep_going=keep_going))
        result = Applied(found)
        if self._paths:
            result.changes = found = self._completed(found, result)
        if self._dry_run:
            self._check(result)
        elif found or has_intent_log(self._root, self._lower.intent_log):
            above = self._lower.intent_log.rpartition(b"/")[0]
            if self._refusal(above) is not None:
                top = os.readlink(f"/proc/self/fd/{self._root}")
                raise PermissionError(errno.EACCES, _DENIED, os.path.join(top, os.fsdecode(above)).rstrip("/"))
            with intent_log(self._root, before, self._lower.intent_log) as begun:
                result.recovered = begun.recover()
                self._check(result)
                if not result.conflicts or self._force:
                    self._write(result.changes, begun, result)
        return result

    def _completed(self, found: Sequence[Change], result: Applied) -> list[Change]:
        """Add the new directories above the named paths.

        NotADirectoryError if a file below must be replaced by a directory that is not named.
        """
        every = {change.path: change for change in changes(self._base, self._live, keep_going=self._keep_going)}
        chosen = {change.path for change in found}
        for change in found:
            parts = change.path.split(b"/") if change.new is not None else []
            for above in (b"/".join(parts[:end]) for end in range(1, len(parts))):
                if above not in every or above in chosen:
                    continue
                old = every[above].old
                if old is None:
                    chosen.add(above)
                    result.parents.add(above)
                elif not old.is_dir:
                    reason = f"not a directory below the overlay; apply it together with {os.fsdecode(change.path)!r}"
                    raise NotADirectoryError(errno.ENOTDIR, reason, os.fsdecode(above))
        return [change for change in every.values() if change.path in chosen]

    def finish(self, result: Applied) -> None:
        pending = self._changed - {change.path for change in result.changes}
        for change in result.changes:
            if change.new is not None and has_links(change.new):
                result.names.update(name for name in self._live.names_of(change.new.inode) if name not in pending)
        for name in result.names.difference(result.identities):
            expected = self._expected(name)
            if expected is not None:
                result.identities[name] = expected
        self._volume.applied(self._live, result)
        if not (self._paths or result.error or result.repositories):
            self._volume.mark_saved(self._live)

    def _write(self, found: Sequence[Change], begun: ApplyIntentLog, result: Applied) -> None:
        try:
            self._execute(found, begun)
        except BaseException as error:  # noqa: BLE001 -- the caller raises it, after noting what was done
            result.error = error
        self._lower.close_directories()  # those that this run removed
        try:
            begun.clear()
        except BaseException as error:  # noqa: BLE001 -- the same; what this run wrote is noted in both cases
            result.error = result.error or error
        for change in found:
            if result.error is None or change.path in self._done:
                result.identities[change.path] = self._identity_left(change)
        result.renewed = self._renewed()

    # -- looking for conflicts -----------------------------------------------------------------------------
    def _stat(self, path: bytes) -> LowerStat | None:
        try:
            return self._lower.stat(path)
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def _expected(self, path: bytes) -> Identity | None:
        """Return the identity at `path` when this run first asked: the base may follow a change below meanwhile."""
        if path in self._identities:
            return self._identities[path]
        if path not in self._expectations:
            version = self._base.find(path) if entry_or_none(self._base, path) else None
            live = self._live.find(path) if entry_or_none(self._live, path) else None
            if version is not None and live is not None and live.inode == version.inode:
                # After discard and undo the base may follow the lower file to a state that these changes never saw.
                version = live
            self._expectations[path] = version.lower.identity if isinstance(version, OverlayInode) else None
        return self._expectations[path]

    def _check(self, result: Applied) -> None:
        """Set the conflicts of `result`.  With `force`, also its `problems`, and the changes that will be written."""
        kept, left = self._kept_directories(result.changes)
        found = [conflict for change in result.changes if (conflict := self._conflict(change)) is not None]
        reason = "is no directory any more: another program removed or replaced it"
        gone = [ApplyConflict(path, reason) for path in self._missing_directories(result.changes)]
        denied = self._denied(result.changes)
        refused = list({each.path: each for each in denied.values()}.values())
        result.conflicts = sorted([*found, *left, *gone, *refused], key=lambda conflict: conflict.path.split(b"/"))
        if result.conflicts:
            self._leave_repositories(result)
        if self._force:
            lost = {change.path for change in result.changes if self._is_lost(change)}
            reason = "was changed by another program, and the parts that the workspace did not write are lost"
            result.problems = [ApplyConflict(path, f"{reason}: `vfsd discard` it") for path in sorted(lost)]
            result.problems += [
                ApplyConflict(path, f"{os.fsdecode(each.path)!r} {each.reason}") for path, each in denied.items()
            ]
            left_out = kept | lost | denied.keys()
            written = [self._made_again(change) for change in result.changes if change.path not in left_out]
            missing = self._missing_directories(written)
            made = [Change(path, "added", None, self._live.entry(path)) for path in missing]
            result.changes = sorted([*written, *made], key=lambda change: walk_order(change.path))
            result.parents |= missing

    def _made_again(self, change: Change) -> Change:
        """Return a change of a path that another program removed below as one that adds it."""
        is_gone = change.new is not None and change.old is not None and self._stat(change.path) is None
        return replace(change, kind="added", old=None) if is_gone else change

    def _denied(self, found: Sequence[Change]) -> dict[bytes, ApplyConflict]:
        """Return the paths that this process may not change, each with the directory that denies it.

        If only attributes of a file change, no right to its directory is needed.
        """
        denied = {}
        reasons: dict[bytes, str | None] = {}
        for change in found:
            there = self._stat(change.path)
            stays = there is not None and change.new is not None and change.new.is_dir and stat.S_ISDIR(there.st_mode)
            above = change.path if stays else change.path.rpartition(b"/")[0]
            while above and not ((below := self._stat(above)) and stat.S_ISDIR(below.st_mode)):
                above = above.rpartition(b"/")[0]  # not made yet
            if above not in reasons:
                reasons[above] = self._refusal(above)
            reason = reasons[above]
            if reason == _READ_ONLY or (reason and change.path and not stays and not self._is_same_file(change)):
                denied[change.path] = ApplyConflict(above, reason)
        return denied

    def _refusal(self, directory: bytes) -> str | None:
        """Return why this process may not write into a directory.

        If the file system of the intent log is read-only, that is an error of its own.
        """
        handle, _ = place(self._root, directory + b"/" if directory else b"")
        if os.fstatvfs(handle.fd).f_flag & os.ST_RDONLY:
            log, _ = place(self._root, self._lower.intent_log)
            return None if os.fstatvfs(log.fd).f_flag & os.ST_RDONLY else _READ_ONLY
        return None if os.access(handle.path, os.W_OK | os.X_OK, effective_ids=True) else _DENIED

    def _missing_directories(self, found: Sequence[Change]) -> set[bytes]:
        """Return the directories above new entries that are neither in the directory below nor made by a change."""
        made = {change.path for change in found if change.new is not None and change.new.is_dir}
        checked: set[bytes] = set()
        missing = set()
        for change in found:
            above = change.path.rpartition(b"/")[0]
            while change.new is not None and above and above not in checked:
                checked.add(above)
                there = self._stat(above)
                if above not in made and (there is None or not stat.S_ISDIR(there.st_mode)):
                    missing.add(above)
                above = above.rpartition(b"/")[0]
        return missing

    def _is_lost(self, change: Change) -> bool:
        """Return whether a file cannot be written because parts of its content were only below."""
        if change.new is None or not change.new.is_file or change.path in self._done:
            return False
        content = self._live.find(change.path).content
        if not isinstance(content, LowerContent) or not content.needs_lower or self._is_same_file(change):
            return False
        try:
            next(content.lower.ranges(0, content.limit), None)
        except ChangedBelowError:
            return True
        return False

    def _leave_repositories(self, result: Applied) -> None:
        """Leave out of `result` the git repositories that another program changed below, too.

        `git status`, and git when it makes an object that exists, change no repository.
        """
        repositories = Repositories(Trees(self._base, self._live, self._live, self._keep_going))
        of = {each.path: repositories.of(each.path) for each in result.conflicts}
        changed = {change.path: change for change in result.changes}
        anew = {
            path for path, place in of.items() if place is not None and self._is_written_anew(changed.get(path), place)
        }
        left = frozenset(place for path, place in of.items() if place is not None and path not in anew)
        result.repositories = sorted(left)
        result.conflicts = [each for each in result.conflicts if of[each.path] not in left and each.path not in anew]
        result.changes = [
            change
            for change in result.changes
            if not is_at_or_below(change.path, left)
            and not (change.new is None and any(is_below(place, change.path) for place in left))
            and not (change.path in anew and change.kind == "metadata")
        ]

    def _is_written_anew(self, change: Change | None, repository: bytes) -> bool:
        """Whether a conflict in a repository is only about times, or about an index in which nothing is staged."""
        if change is None or change.old is None or change.new is None:
            return False
        there = self._stat(change.path)
        if there is None or not stat.S_ISREG(there.st_mode):
            return False
        if change.kind == "metadata" and change.new.is_file:
            entries = (change.old, change.new)
            return metadata_of(change.old) == metadata_of(change.new) and all(
                (there.st_size, there.st_mode) == (each.size, each.mode) for each in entries
            )
        directory, _, name = change.path.rpartition(b"/")
        if name != b"index" or not is_at_or_below(directory, {repository}):
            return False
        root = f"/proc/{os.getpid()}/fd/{self._root}/"
        if not has_nothing_staged(root + os.fsdecode(repository), root + os.fsdecode(directory), self._keep_going):
            return False
        self._identities[change.path] = identity(there)
        return True

    def _kept_directories(self, found: Sequence[Change]) -> tuple[set[bytes], list[ApplyConflict]]:
        """Return the directories that cannot be removed, and for each the first entry that only the directory has."""
        kept: set[bytes] = set()
        left: list[ApplyConflict] = []
        removed = {change.path for change in found if change.new is None}
        for change in reversed(found):  # a directory after its entries
            if change.new is not None and change.new.is_dir:
                continue
            there = self._stat(change.path)
            if there is not None and self._lower.is_closed(change.path):
                kept.add(change.path)
                removed.discard(change.path)
                left.append(ApplyConflict(change.path, "is left out of the overlay, and stays as it is"))
                continue
            if there is None or not stat.S_ISDIR(there.st_mode):
                continue
            entries = {change.path + b"/" + entry.name: entry.kind for entry in self._lower.scan(change.path)}
            others = sorted(entries.keys() - removed)
            if others:
                kept.add(change.path)
                removed.discard(change.path)
                others = [path for path in others if path not in kept]  # those have a conflict of their own
                left += [self._left(path, entries[path] == stat.S_IFDIR) for path in others[:1]]
        return kept, left

    def _left(self, path: bytes, is_directory: bool) -> ApplyConflict:
        is_hidden = self._volume.path_filter.hides(path, is_directory=is_directory)
        what = "is hidden from the workspace" if is_hidden else "was created by another program"
        return ApplyConflict(path, f"{what}, so its directory cannot be removed")

    def _conflict(self, change: Change) -> ApplyConflict | None:
        if is_at_or_below(change.path, {self._lower.intent_log}):
            return ApplyConflict(change.path, "has the name of the intent log that an apply keeps there")
        there = self._stat(change.path)
        if self._is_done(change, there):
            self._done.add(change.path)
            return None
        expected = self._expected(change.path)
        if expected is None and (change.old is None or change.path in self._identities):
            if there is None:
                return None
            if change.new is not None and change.new.is_dir and stat.S_ISDIR(there.st_mode):
                return None
            return ApplyConflict(change.path, "was created by another program")
        if there is None:
            return ApplyConflict(change.path, "was removed by another program")
        is_changed = not self._is_unchanged(change, there)
        return ApplyConflict(change.path, "was changed by another program") if is_changed else None

    def _is_unchanged(self, change: Change, there: LowerStat) -> bool:
        now = identity(there)
        expected = self._expected(change.path)
        if expected is None:
            return False
        if stat.S_ISDIR(there.st_mode):
            # A new directory may get the inode number of a removed file.
            was_directory = change.old is None or change.old.is_dir or change.path in self._identities
            return was_directory and now[:2] == expected[:2]
        return now == expected or (now[:2] in self._touched and now[:4] == expected[:4])

    def _is_done(self, change: Change, there: LowerStat | None) -> bool:
        """Return whether the path already has its new state, from an interrupted run."""
        new = change.new
        if new is None or there is None:
            return new is None and there is None
        same = stat.S_IFMT(there.st_mode) == stat.S_IFMT(new.mode) and (there.st_mode & _PERMISSIONS) == (
            new.mode & _PERMISSIONS
        )
        if not same or (there.st_uid, there.st_gid) != (new.uid, new.gid):
            return False
        if (self._lower.xattrs(change.path) or {}) != dict(new.xattrs):
            return False
        if new.is_dir:
            return True
        if change.has_other_links and change.old is not None and not self._has_links(change, there):
            return False
        if there.st_mtime_ns != new.mtime_ns or there.st_rdev != new.rdev:
            return False
        if new.is_symlink:
            return self._lower.readlink(change.path) == new.target
        return not new.is_file or (there.st_size == new.size and self._has_content(change.path))

    def _has_links(self, change: Change, there: LowerStat) -> bool:
        """Return whether it is a name of the file that it was linked with, or no longer one of its old file."""
        other = self._stat(change.linked or change.unlinked or b"")
        is_same = other is not None and (other.st_dev, other.st_ino) == (there.st_dev, there.st_ino)
        return is_same == (change.linked is not None)

    def _has_content(self, path: bytes) -> bool:
        directory, name = place(self._root, path)
        file = Handle(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd))
        below = iter(partial(os.read, file.fd, _CHUNK_BYTES), b"")
        try:
            return same_bytes(self._live.chunks(path, _CHUNK_BYTES), below, self._keep_going)
        except ChangedBelowError:
            return False

    # -- staging -----------------------------------------------------------------------------------
    def _execute(self, found: Sequence[Change], begun: ApplyIntentLog) -> None:
        """Stage, commit and execute the changes."""
        # All changes, not only those that this run writes.
        self._changed = {change.path for change in changes(self._base, self._live)}
        todo = [change for change in found if change.path not in self._done]
        self._in_place = {change.path for change in todo if self._is_same_file(change)}
        try:
            plan = list(self._plan(todo, begun))
            self._sync_staged()
            begun.commit(plan)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            reason = f"{error.strerror} for the changes; nothing was applied"
            raise OSError(error.errno, reason, os.readlink(f"/proc/self/fd/{self._root}")) from error
        for change in todo:
            self._keep(change)
        steps = Steps(self._root, self._touch, self._settle)
        for step in plan:
            begun.before()
            if not steps.run(step):
                raise ChangedBelowError(step.path)
            if step.do != "remove":
                self._done.add(step.path)
        steps.sync()
        begun.done()

    def _plan(self, todo: Sequence[Change], begun: ApplyIntentLog) -> Iterator[Step]:
        in_place = []
        for change in todo:
            if change.new is not None:
                self._keep_going()
                for step in self._put(change, change.new, begun):
                    # Last: the other steps compare the file, under its other names, with its old identity.
                    if step.do == "attributes":
                        in_place.append(step)
                        if step.seen is not None and step.attributes is not None:
                            self._times[step.seen[:2]] = step.attributes.mtime_ns
                    else:
                        yield step
        yield from self._removals(todo)
        yield from in_place
        for change in reversed(todo):
            if change.new is not None and change.new.is_dir:
                yield Step("attributes", change.path, attributes=change.new)

    def _removals(self, todo: Sequence[Change]) -> Iterator[Step]:
        for change in reversed(todo):
            if change.new is None:
                there = self._stat(change.path)
                if there is not None:
                    self._check_again(change, there)
                    yield Step("remove", change.path, identity(there))

    def _put(self, change: Change, new: TreeEntry, begun: ApplyIntentLog) -> Iterator[Step]:
        there = self._stat(change.path)
        seen = None if there is None else identity(there)
        if there is not None and not (new.is_dir and stat.S_ISDIR(there.st_mode)):
            self._check_again(change, there)
        if new.is_dir:
            yield Step("directory", change.path, seen)
        elif change.path in self._in_place:
            yield Step("attributes", change.path, seen, attributes=new)
        else:
            if there is not None and stat.S_ISDIR(there.st_mode):
                yield from self._removals(list(changes(self._base, self._live, paths=[change.path]))[1:])
            yield Step("leaf", change.path, seen, self._stage(new, begun))

    def _is_same_file(self, change: Change) -> bool:
        """Return whether only attributes differ, and all names of the file get them and are among the named paths."""
        old, new, there = change.old, change.new, self._stat(change.path)
        if change.kind != "metadata" or change.has_other_links or old is None or new is None or there is None:
            return False
        names = self._live.names_of(new.inode)
        every = (*names, *self._base.names_of(old.inode))
        if self._paths and not all(is_at_or_below(name, self._scopes) for name in every):
            return False
        return old.inode == new.inode and there.st_nlink in (1, len(names)) and not stat.S_ISDIR(there.st_mode)

    def _check_again(self, change: Change, there: LowerStat) -> None:
        """Raise ChangedBelowError if the path was changed since the check for conflicts."""
        if self._force or self._is_unchanged(change, there):
            return
        raise ChangedBelowError(change.path)

    def _stage(self, new: TreeEntry, begun: ApplyIntentLog) -> bytes:
        directory, name, staged = begun.stage(new.path)
        if not self._link_other(directory, name, new):
            self._make(directory, name, new)
        self._staged[new.path] = staged
        return staged

    def _link_other(self, directory: Handle, name: bytes, new: TreeEntry) -> bool:
        """Stage the entry as a link to another name of its file, in place or staged; False if there is none."""
        if new.nlink < 2:
            return False
        for other in self._live.paths(self._live.find(new.path)):
            is_ready = other in self._done or other in self._staged or other in self._in_place
            if other == new.path or (other in self._changed and not is_ready):
                continue
            if other not in self._staged and other not in self._done and not self._has_expected(other):
                continue
            source, other_name = place(self._root, self._staged.get(other, other))
            self._touch(source, other_name)
            there = os.stat(other_name, dir_fd=source.fd, follow_symlinks=False)
            self._linked.add((there.st_dev, there.st_ino))
            with contextlib.suppress(OSError):  # EXDEV, EMLINK: make a separate file instead
                os.link(other_name, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd, follow_symlinks=False)
                return True
        return False

    def _has_expected(self, path: bytes) -> bool:
        """Return whether the file at `path` is still the one that the workspace shows there."""
        there, expected = self._stat(path), self._expected(path)
        return there is not None and expected is not None and identity(there)[:4] == expected[:4]

    def _make(self, directory: Handle, name: bytes, new: TreeEntry) -> None:
        flags = os.O_PATH
        if new.is_symlink:
            os.symlink(new.target, name, dir_fd=directory.fd)
        elif new.is_file:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        else:
            os.mknod(name, new.mode, new.rdev, dir_fd=directory.fd)
        handle = Handle(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory.fd))
        if new.is_file:
            self._write_content(handle.fd, new)
        set_attributes(handle.fd, new)
        if new.is_file and (len(self._staged) < _FEW_FILES or os.fstat(handle.fd).st_dev != self._device):
            os.fsync(handle.fd)

    def _write_content(self, descriptor: int, new: TreeEntry) -> None:
        content = self._live.find(new.path).content
        for start, length in content.data_ranges(new.size) if content is not None else ():
            for offset in range(start, start + length, _CHUNK_BYTES):
                self._keep_going()
                data = self._live.read(new.path, offset, min(_CHUNK_BYTES, start + length - offset))
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offset + done)
        os.ftruncate(descriptor, new.size)

    def _sync_staged(self) -> None:
        if len(self._staged) >= _FEW_FILES:
            syncfs(self._root)

    # -- identities of the lower files -------------------------------------------------------------
    def _keep(self, change: Change) -> None:
        """Keep the old content of a file that is about to be replaced readable for the workspace and its snapshots."""
        if change.old is None or not change.old.is_file:
            return
        there = self._stat(change.path)
        if there is None or change.path in self._in_place:
            return
        for file in lower_files(self._base.find(change.path)):
            with contextlib.suppress(ChangedBelowError):  # with `force`: the old content was lost before
                file.keep()

    def _touch(self, directory: Handle, name: bytes) -> None:
        """Record an inode whose ctime is about to change, so that `_renewed` has its identity after that."""
        handle = Handle(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        there = os.fstat(handle.fd)
        key = (there.st_dev, there.st_ino)
        held, before = self._touched.get(key, (None, identity(there)))
        self._touched[key] = held if isinstance(held, Handle) else handle, before
        self._lower.moving.add(key)

    def _settle(self, key: tuple[int, int]) -> None:
        """Close the descriptor of a touched inode after a step, because a process may not have descriptors for all of
        them.  A later step that touches the inode opens it again.  An inode with staged links stays open.
        """
        held, before = self._touched.get(key, (None, None))
        if isinstance(held, Handle) and before is not None and key not in self._linked:
            self._touched[key] = identity(os.fstat(held.fd)), before

    def _renewed(self) -> dict[tuple[int, int], Identity]:
        """Return the current identities of the inodes whose ctime this run, and no other program, changed."""
        found = {}
        for key, (held, before) in self._touched.items():
            now = identity(os.fstat(held.fd)) if isinstance(held, Handle) else held
            if now[:3] == before[:3] and now[3] in (before[3], self._times.get(key)):
                found[key] = now
        return found

    def _identity_left(self, change: Change) -> Identity | None:
        """Return the identity that this run left at a path; `_SOMETHING_ELSE` if another program changed it since."""
        try:
            there = self._stat(change.path)
        except PermissionError:  # below a directory that this run made unsearchable for its own user
            return _SOMETHING_ELSE
        new = change.new
        if there is None:
            return None
        if new is None or stat.S_IFMT(there.st_mode) != stat.S_IFMT(new.mode):
            return _SOMETHING_ELSE
        if not new.is_dir and there.st_mtime_ns != new.mtime_ns:
            return _SOMETHING_ELSE
        return _SOMETHING_ELSE if new.is_file and there.st_size != new.size else identity(there)
