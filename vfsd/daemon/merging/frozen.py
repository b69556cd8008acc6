"""`vfsd apply` of a frozen overlay: merge its changes into the directory that its base was taken of.

This is a three-way merge: the base is that of the overlay, ours is the directory as it is now, theirs is the live
state.  The code that merges into a workspace host:DIR puts the result in place.  So each file is replaced atomically,
and changes that programs make in the directory meanwhile are not overwritten.  The next merge completes one that was
interrupted.  Each merge is an undo step of the directory (`vfsd attach DIR`, `vfsd restore --undo`).

Afterwards the overlay's base also has the changes that the directory took over from theirs.  In git it is the same:
after a merge, the base of the next merge has the changes of the merged branch.  The workspace still does not see what
changed in the directory.

Threading: the serving loop; the merge runs in a worker thread, on immutable trees.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.diff.tree_diff import Change, changes, is_at_or_below
from protocol.tree import Tree
from protocol.volume_extensions import ApplyConflict, OverlaidVolume
from vfsd.daemon.attached import NoEngine
from vfsd.daemon.merging.plan import Plan, keep_going_of, plan_of, put, retried
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import OVERLAY, SnapshotService, entered, in_answer_thread, in_thread, open_snapshots
from vfsd.daemon.snapshots.store_restore import applying
from vfsd.kernel.inotify import Replay
from vfsd.wire.messages import from_wire_path

if TYPE_CHECKING:
    from vfsd.daemon.backends.registry import Backend
    from vfsd.daemon.control.calls import CallContext
    from vfsd.daemon.snapshots.store_restore import Stored
    from vfsd.operations.forks import ConflictRecord
    from vfsd.operations.forks import Conflicts as Policy


@dataclass(slots=True)
class Merged:
    """Implements `protocol.volume_extensions.ApplyResult`.  `marked`: files that may have conflict markers."""

    changes: list[Change]
    conflicts: list[ApplyConflict]
    problems: list[ApplyConflict]
    repositories: list[bytes]
    is_written: bool = False
    marked: Sequence[bytes] = ()
    recovery: str | None = None
    error: BaseException | None = None


class FrozenApply:
    """Applies the frozen overlay `volume` of the workspace `name`, which `mounted` serves.

    `open_directory`: see `vfsd.daemon.backends.registry.Backend`.
    """

    def __init__(
        self, mounted: MountedVolume, volume: OverlaidVolume, open_directory: Callable[[], Backend], name: str
    ) -> None:
        self._mounted = mounted
        self._volume = volume
        self._open = open_directory
        self._name = name

    async def apply(
        self, paths: Sequence[bytes], policy: Policy, call: CallContext, *, dry_run: bool, touch: bool
    ) -> Merged:
        """Merge the changes at and below `paths`; none: all.  The caller holds the `change_lock` of the workspace.

        EBUSY if programs keep changing the same paths of the directory, or a restore of it was interrupted.
        """
        async with AsyncExitStack() as stack:
            stored, directory = await stack.enter_async_context(self._directory())
            recovery = None
            if not dry_run:
                recovery = await stack.enter_async_context(entered(applying(stored, call.raise_if_cancelled)))
            unfinished = await directory.unfinished()
            if unfinished is not None:
                reason = f"in the directory, {unfinished}; `vfsd attach` it first"
                raise OSError(errno.EBUSY, reason, stored.key.removeprefix("host:"))

            async def attempt() -> Merged:
                return await self._attempt(directory, paths, policy, call, dry_run=dry_run, touch=touch)

            merged = await retried(attempt)
        merged.recovery = recovery
        return merged

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[tuple[Stored, SnapshotService]]:
        """Open the directory as a workspace without a mount.  OSError, ValueError."""
        backend = await in_thread(self._open)
        stored, volume = backend.stored, backend.volume
        assert stored is not None, "that of a directory"
        try:
            place = stored.key.removeprefix("host:")
            nursery, replay = self._mounted.nursery, Replay(volume, place)
            mounted = MountedVolume(volume, NoEngine(), replay, place, nursery, name=self._name, is_attached=True)
            directory = open_snapshots(mounted, stored)
            assert directory is not None, "those in the store"
            yield stored, directory
        finally:
            backend.close()
            stored.store.close()

    async def _attempt(
        self,
        directory: SnapshotService,
        paths: Sequence[bytes],
        policy: Policy,
        call: CallContext,
        *,
        dry_run: bool,
        touch: bool,
    ) -> Merged:
        volume = self._volume
        async with directory.frozen(call) as view:
            with volume.base_tree() as base, volume.tree() as theirs:
                plan, found, every = await in_answer_thread(self._plan, base, view.tree, theirs, paths, policy, call)
                conflicts = [ApplyConflict(from_wire_path(each.path), _words(each)) for each in plan.conflicts]
                merged = Merged(list(plan.changes), conflicts, [], list(plan.repositories), marked=plan.marked)
                if self._mounted.policy is not None:
                    self._mounted.policy.check(plan.changes, "apply")
                if dry_run or plan.refuses:
                    return merged
                if plan.changes:
                    before = directory.merges.now
                    new = plan.state(view, f"{OVERLAY}{self._name}", before)
                    outcome = await put(new, directory, f"apply {self._name}", before, call, touch=touch)
                    if outcome is not None:
                        merged.problems = [ApplyConflict(path, reason) for path, reason in outcome.problems.items()]
                else:
                    call.commit()
                merged.is_written = True
                left = frozenset([*plan.repositories, *(each.path for each in merged.problems)])
                settled = [change for change in found if not is_at_or_below(change.path, left)]
                volume.merged(theirs, settled, every.difference(change.path for change in settled))
        return merged

    @staticmethod
    def _plan(
        base: Tree, ours: Tree, theirs: Tree, paths: Sequence[bytes], policy: Policy, call: CallContext
    ) -> tuple[Plan, list[Change], set[bytes]]:
        """Return the merge, the workspace's changes in it, and the paths of all changes.  Runs in a worker thread."""
        # Start-up: the first call on the control socket does not wait for this import.
        from protocol.merge.three_way import merge  # noqa: PLC0415

        keep_going = keep_going_of(call)
        done = merge(base, ours, theirs, paths=paths, policy=policy, keep_going=keep_going)
        every = list(changes(base, theirs, keep_going=keep_going))
        scopes = frozenset(paths or [b""])
        found = [change for change in every if is_at_or_below(change.path, scopes)]
        return plan_of(done, policy, done.repositories), found, {change.path for change in every}


def _words(conflict: ConflictRecord) -> str:
    """Describe a conflict as a clause after its path."""
    kept = f"; the version of the workspace is in {conflict.kept_as}" if conflict.kept_as else ""
    return f"is in conflict ({conflict.reason}): {conflict.detail}{kept}"
