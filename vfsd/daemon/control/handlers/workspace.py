"""The methods that work on content, and those of the workspace as a whole: `compact`, `policy`, `save`, and its end.

They import the archive, store, search and diff code, so the daemon imports this module after the mount answers
(`vfsd.daemon.preload`).

`unsaved` and `unmount`: a daemon's memory ends with it, so the changes of a memory workspace that were not exported are
lost, and those of an overlay that were not applied.  If there are any, an unmount without `discard` is refused
(ENOTEMPTY), unless it passes the token of an `unsaved` answer and nothing changed since that answer.  The check is
repeated directly before umount(2).  If a program changes something after that check and closes its files before
umount(2), the change is lost and the answer reports it (`changed_late`).

The container of image:REF ends with its workspace, and its snapshots stay on disk.  Such an unmount is refused if the
container has files that neither the newest snapshot has nor the newest one of another kind.  Files that a
program writes after that comparison are not found.

A fork that has not changed since it was made loses nothing as long as its source runs: the source was in that state.
A fork loses nothing either if it was merged and has not changed since, as long as the target runs and did not undo it.

Threading: the serving loop, except `SavedStates._take`, `_serial` and `_drop_left`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio
from msgspec.structs import replace

from protocol.diff.tree_diff import Change, changes, count
from protocol.errors import SnapshotNotFoundError
from protocol.journal.directory import remove_files
from protocol.store import Store, TreeSource
from protocol.tree import Tree, names_in, unfiltered
from protocol.types import ChangeCounts
from protocol.volume_durability import journaled
from protocol.volume_extensions import SnapshotableVolume, SnapshotInfo, overlaid, snapshotable
from vfsd.daemon.attached import needs_mount
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.calls import CallContext, handlers_of
from vfsd.daemon.control.handlers.changes import TreeMethods, time_text
from vfsd.daemon.control.handlers.conflicts import ConflictsMethods
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.forks import ForkMethod, MergeMethods, MergeSource
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.control.handlers.log import LogMethods
from vfsd.daemon.control.handlers.revert import RevertMethods
from vfsd.daemon.control.handlers.snapshots import SnapshotMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.forks.forks import Forks, has_state
from vfsd.daemon.merging.other import OtherWorkspaces, call_peer
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import CountedTree
from vfsd.daemon.snapshots.base import (
    BASE,
    MERGED_TAG,
    STAGED_PREFIX,
    SnapshotService,
    free_name,
    in_bytes,
    in_thread,
    is_merge_base,
    required,
)
from vfsd.daemon.upgrading.giving import Upgrade
from vfsd.daemon.upkeep import Compaction
from vfsd.machine import mounts
from vfsd.machine.logs import log_failure
from vfsd.machine.processes import holders
from vfsd.machine.runtime import read_record
from vfsd.operations.declaration import Empty, Peer
from vfsd.operations.forks import StateId
from vfsd.operations.snapshots import SaveParams, SaveResult
from vfsd.operations.workspace import (
    CompactResult,
    PolicyParams,
    PolicyResult,
    UnmountParams,
    UnmountResult,
    UnsavedResult,
)
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.option_rules import OptionError, check_policy_size
from vfsd.wire.options import WorkspaceOptions

if TYPE_CHECKING:
    from vfsd.daemon.daemon import Daemon

_ATTEMPTS: Final = 16
_logger = logging.getLogger(__name__)
_NO_POLICY = (
    "this workspace was mounted without a policy, so programs may have mapped its files unasked: mount it with"
    " --protect or --hide to set one and tighten it later"
)


class WorkspaceMethods:
    """The methods of one workspace that work on content.  `snapshots` is None if its backend has none."""

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        commands: Commands,
        forks: Forks,
        audit: Audit,
        daemon: Daemon,
    ) -> None:
        self._mounted = mounted
        self._forks = forks
        self._unmount = UnmountMethods(mounted, snapshots, options, commands, forks, daemon.removal.wait)
        source = MergeSource(mounted, snapshots, options, forks)
        others = OtherWorkspaces(mounted.volume, source.own_lineage, source.tree, forks.temporary)
        trees = TreeMethods(mounted, snapshots, options, forks.base, others, daemon.backend.open_directory)
        self.handlers: Final = handlers_of(
            self,
            self._unmount,
            Upgrade(daemon, mounted, snapshots, commands),
            ForkMethod(mounted, snapshots, forks),
            SnapshotMethods(mounted, snapshots, options, forks),
            trees,
            source,
            MergeMethods(mounted, source, options, others),
            ConflictsMethods(source, others, trees.apply),
            RevertMethods(mounted, snapshots, options, audit),
            LogMethods(audit, snapshots),
            FsMethods(mounted, options, commands, snapshots),
            ExecMethods(commands),
            SavedStates(mounted, snapshots, options),
        )

    @property
    def unmounts_to_answer(self) -> int:
        """Unmounts that were made and whose answers are not sent yet."""
        return self._unmount.to_answer

    async def compact(self, _params: Empty, _call: CallContext) -> CompactResult:
        """Replace the journal by an image of the present state.  EOPNOTSUPP for a workspace without a journal."""
        compaction = Compaction.of(self._mounted, self._forks)
        if compaction is None:
            raise OSError(errno.EOPNOTSUPP, "this workspace has no journal: mount it with --persist to keep one")
        return CompactResult(*await compaction.compact())

    async def policy(self, params: PolicyParams, call: CallContext) -> PolicyResult:
        """Show the policy, and tighten it.  Adding patterns fails with EOPNOTSUPP for a workspace without a policy."""
        protect, hide = ([os.fsdecode(from_wire_path(each)) for each in some] for some in (params.protect, params.hide))
        found = self._mounted.policy
        if self._mounted.is_attached and (protect or hide):
            raise needs_mount("a policy", "`vfsd mount DIR --backend host:DIRECTORY --protect PATTERN` enforces one")
        if found is None:
            if protect or hide:
                raise OSError(errno.EOPNOTSUPP, _NO_POLICY)
            return PolicyResult([], [])
        open_files: list[bytes] = []
        if protect or hide:
            _check_tightens((*protect, *hide))
            now = found.options
            try:
                check_policy_size(
                    {"protect": (*now.protect, *protect), "hide": (*now.hide, *hide)},
                )
                call.commit()
                open_files = await found.tighten(protect, hide, self._mounted)
            except OptionError as error:
                reason = error.message({"protect": "--protect", "hide": "--hide"})
                raise OSError(errno.EINVAL, reason) from None
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error)) from None
        now = found.options
        shown, hidden = ([wire_path(os.fsencode(each)) for each in some] for some in (now.protect, now.hide))
        return PolicyResult(shown, hidden, list(map(wire_path, open_files)))


def _check_tightens(patterns: Sequence[str]) -> None:
    for each in patterns:
        if each.startswith("!"):
            reason = f"the pattern {each} would take something back, and a policy can only be tightened"
            raise OSError(errno.EINVAL, f"{reason}: give such patterns to `vfsd mount`")


class SavedStates:
    """The method `save`: put a state into the snapshot store on disk, from where a client can upload it.

    The client drops a state that was saved for it alone.  If the client is killed before, the daemon does.
    """

    def __init__(self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._options = options

    async def save(self, params: SaveParams, call: CallContext) -> SaveResult:
        """Save a state.  EOPNOTSUPP for a workspace without snapshots."""
        service = required(self._snapshots)
        if params.snapshot == BASE:
            raise OSError(errno.EINVAL, "the lower layer of an overlay is not a snapshot: name one, or none", BASE)
        stored = await service.stored_state(params.snapshot, call)
        if stored is not None:
            saved = SaveResult(*stored)
        else:
            name = params.snapshot
            info = next((each for each in await service.infos() if each.name == name), None)
            async with service.to_save(name, call) as tree:
                source = TreeSource(await in_thread(CountedTree, tree, in_bytes(call)))
                saved = replace(await in_thread(self._take, source, info), hidden=self._mounted.left_out_of(tree))
        if saved.is_temporary:
            with trio.CancelScope(shield=True):
                await self._drop_with_client(saved, call)
        return saved

    def _take(self, source: TreeSource, info: SnapshotInfo | None) -> SaveResult:
        """Take a snapshot under a free name.  Another client of this workspace may save a state at the same moment."""
        key = f"{self._options.backend.kind}:{self._options.mountpoint}"
        tag, created_ns = (None, None) if info is None else (info.tag, info.created_ns)
        with Store(self._options.store) as store:
            for _ in range(_ATTEMPTS - 1):
                name = free_name(STAGED_PREFIX, store.snapshots(key))
                with contextlib.suppress(FileExistsError):
                    store.take(key, name, source, tag=tag, created_ns=created_ns)
                    return SaveResult(store.directory, key, name, is_temporary=True)
        raise OSError(errno.EBUSY, "other clients save states of this workspace: repeat the command")

    async def _drop_with_client(self, saved: SaveResult, call: CallContext) -> None:
        """Drop `saved` when the process of the client ends; now if the call was cancelled: nobody learns its name."""
        serial = await in_thread(_serial, saved)
        if call.cancelled:
            await in_thread(_drop_left, saved, serial)
            call.raise_if_cancelled()
        if not isinstance(call.client, int):  # a process in another pid namespace
            return
        try:
            process = os.pidfd_open(call.client)
        except ProcessLookupError:
            await in_thread(_drop_left, saved, serial)
            return

        async def drop() -> None:
            try:
                await trio.lowlevel.wait_readable(process)
                await in_thread(_drop_left, saved, serial)
            finally:
                os.close(process)

        self._mounted.in_background(drop)


def _serial(saved: SaveResult) -> int:
    with Store(saved.directory) as store:
        return store.snapshot(saved.workspace, saved.name).serial


def _drop_left(saved: SaveResult, serial: int) -> None:
    """Drop `saved` if it is still there, and not another state of that name."""
    try:
        with Store(saved.directory) as store:
            if store.snapshot(saved.workspace, saved.name).serial == serial:
                store.drop(saved.workspace, saved.name)
    except SnapshotNotFoundError:
        pass
    except OSError as error:
        log_failure(_logger, "dropping a state that was saved for a client", error, path=saved.directory)


_COUNTED: Final = 10_000  # changes of an overlay; beyond it the answer says "at least"
_TARGET_ANSWERS_S: Final = 5.0
_COPIES_S: Final = 1.0  # how long the kernel may take to close the connection after an unmount
_CHECKS: Final = 5  # to find a state without unsaved changes while programs change the workspace and change it back


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """The content that an unmount would lose in the state `mark`.  `counts`: the changes of an overlay."""

    mark: int
    snapshots: tuple[int, ...]  # serials of the snapshots that a user named
    counts: ChangeCounts | None = None
    truncated: bool = False
    is_any: bool = False

    @property
    def token(self) -> str:
        """Identifies the state, so that an unmount with this token discards exactly this state."""
        return "-".join(map(str, (self.mark, len(self.snapshots), max(self.snapshots, default=0))))


class UnmountMethods:
    """The end of one workspace.

    `wait_removed` waits, after the unmount, until what was made for the workspace is removed, and returns what stays.
    """

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        commands: Commands,
        forks: Forks,
        wait_removed: Callable[[], Awaitable[str | None]],
    ) -> None:
        self._wait_removed = wait_removed
        self._mounted = mounted
        # Of image:REF: where the files are that its container may lack at the end.
        self._kept = snapshots if options.backend.kind == "image" else None
        self._volume = snapshotable(mounted.volume)  # others keep their files
        self._overlaid = overlaid(mounted.volume)
        self._options = options
        self._commands = commands
        self._forks = forks
        self.to_answer = 0  # unmounts that were made and whose answers are not sent yet

    # -- what would be lost ------------------------------------------------------------------------
    async def unsaved(self, _params: Empty, call: CallContext) -> UnsavedResult:
        """Report what an unmount would lose now, with a token to discard exactly that."""
        volume = self._volume
        if self._kept is not None:
            return await self._beyond_snapshots(self._kept, call)
        if volume is None or self._journal() is not None:
            return UnsavedResult(unsaved=False, token="")
        await self._mounted.write_back()
        found = await self._find(volume, call)
        usage = volume.usage() if self._overlaid is None else None
        return UnsavedResult(
            unsaved=found.is_any,
            token=found.token,
            files=None if usage is None else usage.files,
            size_bytes=None if usage is None else usage.size_bytes,
            changes=found.counts,
            truncated=found.truncated,
            snapshots=len(found.snapshots),
            saved_at=None if volume.saved_ns is None else time_text(volume.saved_ns),
        )

    async def _find(self, volume: SnapshotableVolume, call: CallContext, at_most: int = _COUNTED) -> _Unsaved:
        """Find what the live state would lose, counting at most `at_most` changes of an overlay."""
        mark, named = volume.mark(), _named(volume)
        if volume.is_saved or await self._is_as_forked(volume, named, call) or await self._is_merged(volume, call):
            return _Unsaved(mark, named)
        if self._overlaid is None:
            usage = volume.usage()
            is_empty = not usage.files and (usage.directories or 0) <= 1 and not named
            return _Unsaved(mark, named, is_any=not is_empty)
        with self._overlaid.base_tree() as base, volume.tree() as live:
            try:
                found = await trio.to_thread.run_sync(_changes, base, live, call, at_most + 1)
            except OSError as error:  # in the lower directory, for example: assume that there are changes
                log_failure(_logger, "comparing with the directory below", error, level=logging.WARNING)
                return _Unsaved(mark, named, is_any=True)
        return _Unsaved(mark, named, count(found[:at_most]), len(found) > at_most, is_any=bool(found or named))

    async def _beyond_snapshots(
        self, snapshots: SnapshotService, call: CallContext, at_most: int = _COUNTED
    ) -> UnsavedResult:
        """Find what the container of an image has and no snapshot has, counting at most `at_most` changes.

        Compares with the newest snapshot of each kind, because after a restore the newest one has the state before it.
        Reports the one that differs least.
        """
        await self._mounted.write_back()
        saved = UnsavedResult(unsaved=False, token="")
        found: list[UnsavedResult] = []
        try:
            for info in {info.kind: info for info in await snapshots.infos()}.values():
                async with snapshots.tree(info.name, call) as base, snapshots.tree(None, call) as live:
                    trees = unfiltered(base), unfiltered(live)
                    changed = await trio.to_thread.run_sync(_changes, *trees, call, at_most + 1)
                if not changed:
                    return saved
                counts, taken = count(changed[:at_most]), time_text(info.created_ns)
                is_more = len(changed) > at_most
                found.append(UnsavedResult(True, "", None, None, counts, is_more, saved_at=taken, since=info.name))
            if not found:
                async with snapshots.tree(None, call) as live:
                    is_empty = not await trio.to_thread.run_sync(names_in, unfiltered(live), b"")
                return saved if is_empty else UnsavedResult(unsaved=True, token="")
        except OSError as error:  # such as EIO: the container does not run
            _logger.info("the container cannot be compared with its snapshots: %s", error)
            return UnsavedResult(unsaved=True, token="", problem=error.strerror or str(error))
        return min(found, key=lambda each: (each.changes or ChangeCounts()).total)

    async def _is_as_forked(self, volume: SnapshotableVolume, named: tuple[int, ...], call: CallContext) -> bool:
        """Return whether this is a fork of a running workspace, and nothing changed here since it was made."""
        base = self._forks.base_of_source
        if base is None or not has_state(volume, base) or any(serial > base.serial for serial in named):
            return False
        return await self._is_as_in(volume, base.name, call)

    async def _is_merged(self, volume: SnapshotableVolume, call: CallContext) -> bool:
        """Return whether this is a fork, and a running workspace has taken over its present state completely."""
        base = self._forks.base
        if base is None or any(serial > base.serial for serial in _named(volume)):
            return False
        states = {StateId.of(info): info for info in volume.snapshots() if is_merge_base(info)}
        for tag in {info.tag for info in states.values()}:
            for state in await self._merged_into((tag or "").removeprefix(MERGED_TAG)):
                if state in states and await self._is_as_in(volume, states[state].name, call):
                    return True
        return False

    async def _merged_into(self, target: str) -> list[StateId]:
        """Return the states of this workspace that workspace `target`, if it runs, has taken over completely."""
        record = read_record(target)
        if record is None or not record.alive:
            return []
        try:
            with trio.fail_after(_TARGET_ANSWERS_S):
                peer = Peer(record.name, wire_path(os.fsencode(record.socket)))
                there = (await call_peer(peer, "lineage", Empty())).merged
        except (OSError, trio.TooSlowError) as error:
            _logger.info("cannot tell whether %s has all changes: %s", target, error)
            return []
        return [each.state for each in there if each.instance == self._forks.instance and not each.repositories]

    async def _is_as_in(self, volume: SnapshotableVolume, name: str, call: CallContext) -> bool:
        """Return whether the live state is that of snapshot `name`."""
        try:
            with volume.tree(name) as before, volume.tree() as live:
                return not await trio.to_thread.run_sync(_changes, before, live, call, 1)
        except OSError as error:  # the snapshot was dropped, or the lower directory cannot be read
            log_failure(_logger, f"comparing with {name}", error, level=logging.WARNING)
            return False

    async def _check(self, volume: SnapshotableVolume, params: UnmountParams, call: CallContext) -> int:
        """OSError (ENOTEMPTY) if something would be lost; else return the mark of the state that was checked."""
        await self._mounted.write_back()
        if params.token is not None:
            mark = _mark_of(params.token, volume)
            if mark is not None and not volume.changed_since(mark):
                return mark
        found = await self._find(volume, call, at_most=1)
        if found.is_any:
            await self._check_not_held(params)
            changed = "changed meanwhile, and " if params.token is not None else ""
            what = "unexported changes" if self._overlaid is None else "unapplied changes"
            if found.counts == ChangeCounts():
                what = "snapshots, which end with it"
            reason = f"{self._options.name} {changed}holds {what}: save them, or discard them explicitly"
            raise OSError(errno.ENOTEMPTY, reason)
        return found.mark

    async def _check_kept(self, snapshots: SnapshotService, params: UnmountParams, call: CallContext) -> None:
        """OSError (ENOTEMPTY) if the container of an image has files that no snapshot has."""
        if (await self._beyond_snapshots(snapshots, call, at_most=1)).unsaved:
            await self._check_not_held(params)
            reason = f"the container of {self._options.name} has files that no snapshot has: save or discard them"
            raise OSError(errno.ENOTEMPTY, reason)

    async def _check_not_held(self, params: UnmountParams) -> None:
        """Raise EBUSY if the mount is used: the answer is not about changes that no unmount would lose."""
        if not params.lazy and await self._holders():
            raise await trio.to_thread.run_sync(mounts.busy_error, self._options.mountpoint)

    # -- the end -----------------------------------------------------------------------------------
    async def unmount(self, params: UnmountParams, call: CallContext) -> UnmountResult:
        """Unmount, and end the daemon."""
        mountpoint, volume = self._options.mountpoint, self._volume
        if self._mounted.is_attached:
            return await self._leave_directory(params, call)
        journal = None if params.drop_journal else self._journal()
        checked = None if params.discard or journal is not None else volume
        mark = 0 if checked is None else await self._check(checked, params, call)
        if self._kept is not None and not params.discard and params.token is None:
            await self._check_kept(self._kept, params, call)
        await self._mounted.wait_unused()
        # Where the kernel refuses by itself no search is needed, which takes long next to many processes.  But then the
        # sandbox would be gone already.
        held = await self._holders(unseen_by_umount=not self._commands.has_sandbox)
        if not params.lazy:
            self._commands.check_idle()
            if held:
                # The kernel would allow it if they are in another mount namespace (`vfsd run`), and what they write
                # afterwards would be lost.
                raise OSError(errno.EBUSY, f"busy: held by {'; '.join(held)}", mountpoint)
        call.commit()
        # The daemon ends as soon as the mount is gone; it waits for this answer (see `vfsd.daemon.daemon`).
        self.to_answer += 1
        call.after_answer(self._answered)
        await self._commands.leave()
        if checked is not None:
            mark = await self._check_again(checked, mark, params, call)
        named = () if volume is None or journal is not None else _named(volume)
        is_used = False
        if params.lazy:
            held, is_used = await self._detach(held)
        else:
            await trio.to_thread.run_sync(mounts.unmount, mountpoint)
        left = await self._drop_journal() if params.drop_journal else None
        changed_late = checked is not None and checked.changed_since(mark)
        if not is_used:
            self._mounted.in_background(self._end_serving)
        return UnmountResult(
            wire_path(os.fsencode(mountpoint)),
            params.lazy,
            held,
            len(named),
            changed_late,
            None if journal is None else wire_path(os.fsencode(journal)),
            left if is_used or left is not None else await self._wait_removed(),
        )

    async def _leave_directory(self, params: UnmountParams, call: CallContext) -> UnmountResult:
        """End the daemon of an attached directory, which stays as it is."""
        async with self._mounted.change_lock:  # a restore is completed first
            call.commit()
            self.to_answer += 1
            call.after_answer(self._answered)
            self._mounted.engine.stop()
        return UnmountResult(wire_path(os.fsencode(self._options.mountpoint)), params.lazy, [])

    async def _drop_journal(self) -> str | None:
        """Remove the files of the journal, which the daemon has open until it ends.  Return a sentence if that fails.

        A daemon that a keeper starts after a death then finds no journal, and gives the mount up.
        """
        volume = journaled(self._mounted.volume)
        if volume is None:
            return None
        directory = volume.journal_status().directory
        try:
            await trio.to_thread.run_sync(remove_files, directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            log_failure(_logger, "removing the journal", error, path=directory)
            return f"the journal {directory} could not be removed ({error.strerror}): `vfsd persisted drop` removes it"
        return None

    async def _detach(self, held: list[str]) -> tuple[list[str], bool]:
        """Unmount, lazily if the workspace is used; return who uses it, and whether anybody does.

        `held`: the users that umount(2) does not see, or with a sandbox all users.  To find all takes 0.2 s with 100
        processes, so umount(2) is asked first.
        """
        mountpoint = self._options.mountpoint
        if not held and await trio.to_thread.run_sync(mounts.unmount_unused, mountpoint):
            return [], False
        if not self._commands.has_sandbox:
            held = await self._holders()
        await trio.to_thread.run_sync(functools.partial(mounts.unmount, mountpoint, lazy=True))
        return held, True

    def _journal(self) -> str | None:
        """The directory of the journal that keeps the content; None if nothing does."""
        volume = journaled(self._mounted.volume)
        status = None if volume is None else volume.journal_status()
        return None if status is None or status.failure is not None else status.directory

    async def _end_serving(self) -> None:
        """End the engine if it still serves shortly after the unmount.

        The kernel keeps the connection open while another mount namespace (of a service, a sandbox) has a copy of the
        mount. Nobody can reach the workspace by its name any more, so the daemon would never end. This is common while
        containers start: each start copies all mounts for a moment.
        """
        await trio.sleep(_COPIES_S)  # cancelled when the engine ends by itself
        _logger.info(
            "the mount still exists in another mount namespace; accesses there fail from now on",
            extra={"operation": "unmount", "path": self._options.mountpoint},
        )
        self._mounted.engine.stop()

    async def _holders(self, *, unseen_by_umount: bool = False) -> list[str]:
        """Describe the processes, other than the daemon, that hold the mount; see `holders`."""
        find = functools.partial(holders, self._options.mountpoint, unseen_by_umount=unseen_by_umount)
        found = await trio.to_thread.run_sync(find)
        return [holder.describe() for holder in found if holder.pid != os.getpid()]

    async def _check_again(
        self, volume: SnapshotableVolume, mark: int, params: UnmountParams, call: CallContext
    ) -> int:
        """Repeat `_check` if the state changed since `mark`.  Return the mark of the state at the return."""
        for _ in range(_CHECKS):
            await self._mounted.write_back()
            if not volume.changed_since(mark):
                return mark
            mark = await self._check(volume, params, call)
        reason = f"{self._options.name} changed again after each of {_CHECKS} checks: end the programs that write"
        raise OSError(errno.EAGAIN, reason)

    def _answered(self) -> None:
        self.to_answer -= 1


def _changes(base: Tree, live: Tree, call: CallContext, at_most: int) -> list[Change]:
    """List the first differences.  Any thread."""
    found = []
    for change in islice(changes(base, live, keep_going=call.raise_if_cancelled), at_most):
        call.raise_if_cancelled()
        found.append(change)
    return found


def _named(volume: SnapshotableVolume) -> tuple[int, ...]:
    """The serials of the snapshots that a user named."""
    return tuple(info.serial for info in volume.snapshots() if info.kind == "user")


def _mark_of(token: str, volume: SnapshotableVolume) -> int | None:
    """The mark in `token`; None if the named snapshots changed since the token was issued."""
    mark = token.partition("-")[0]
    if not mark.isdecimal() or _Unsaved(int(mark), _named(volume)).token != token:
        return None
    return int(mark)
