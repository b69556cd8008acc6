"""The methods that work on content, by name, and those of the workspace as a whole: `compact`, `policy` and `save`.

They import the archive, store, search and diff code, so the daemon imports this module after the mount answers
(`vfsd.daemon.preload`).

Threading: the serving loop, except `SavedStates._take`, `_serial` and `_drop_left`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from typing import Final

import trio
from msgspec.structs import replace

from protocol.errors import SnapshotNotFoundError
from protocol.store import Store, TreeSource
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.calls import CallContext, handlers_of
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.fork import ForkMethod
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.control.handlers.log import LogMethods
from vfsd.daemon.control.handlers.merge import MergeMethods, MergeSource
from vfsd.daemon.control.handlers.snapshots import SnapshotMethods, required
from vfsd.daemon.control.handlers.trees import TreeMethods
from vfsd.daemon.control.handlers.unmount import UnmountMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.merging.other import OtherWorkspaces
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import CountedTree
from vfsd.daemon.snapshots.base import BASE, STAGED_PREFIX, SnapshotService, free_name, in_bytes, in_thread
from vfsd.daemon.upgrading.giving import OldDaemon, Upgrade
from vfsd.daemon.upkeep import Compaction
from vfsd.machine.logs import log_failure
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import SaveParams, SaveResult
from vfsd.operations.workspace import CompactResult, PolicyParams, PolicyResult
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.option_rules import OptionError, check_policy_size
from vfsd.wire.options import WorkspaceOptions

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
        daemon: OldDaemon,
    ) -> None:
        self._mounted = mounted
        self._forks = forks
        self._unmount = UnmountMethods(mounted, snapshots, options, commands, forks, daemon.removal.wait)
        source = MergeSource(mounted, snapshots, options, forks)
        others = OtherWorkspaces(mounted.volume, source.own_lineage, source.tree, forks.temporary)
        self.handlers: Final = handlers_of(
            self,
            self._unmount,
            Upgrade(daemon, mounted, snapshots, commands),
            ForkMethod(mounted, snapshots, forks),
            SnapshotMethods(mounted, snapshots, options, forks),
            TreeMethods(mounted, snapshots, options, forks.base, others),
            source,
            MergeMethods(mounted, source, options, others),
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
