"""The methods that work on content, by name, and those of the workspace as a whole: `compact`, `policy` and `save`.

They import the archive, store, search and diff code, so the daemon imports this module after the mount answers
(`vfsd.daemon.preload`).

Threading: the serving loop, except `_taken` and `_drop_unread`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from typing import Final

import trio
from msgspec.structs import replace

from protocol.store import Store, TreeSource
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.calls import CallContext, Handler
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.fork import ForkMethod
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.control.handlers.log import AuditMethods
from vfsd.daemon.control.handlers.merge import MergeMethods, MergeSource
from vfsd.daemon.control.handlers.snapshots import SnapshotMethods, required
from vfsd.daemon.control.handlers.trees import TreeMethods
from vfsd.daemon.control.handlers.unmount import UnmountMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.merging.other import OtherWorkspaces
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import CountedTree
from vfsd.daemon.snapshots.base import BASE, STAGED_PREFIX, SnapshotService, free_name, in_bytes
from vfsd.daemon.snapshots.threads import in_thread
from vfsd.daemon.upgrading.giving import OldDaemon, Upgrade
from vfsd.daemon.upkeep import Compaction
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import SaveParams, SaveResult
from vfsd.operations.workspace import CompactResult, PolicyParams, PolicyResult
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.option_rules import OptionError, check_policy_size
from vfsd.wire.options import WorkspaceOptions

_ATTEMPTS: Final = 16
_NO_POLICY = (
    "this workspace was mounted without a policy, so programs may have mapped its files unasked: mount it with"
    " --protect or --hide to set one and tighten it later"
)


def compact_method(mounted: MountedVolume, forks: Forks) -> Handler:
    """Replace the journal by an image of the present state.  EOPNOTSUPP for a workspace without a journal."""

    async def compact(_params: Empty, _call: CallContext) -> CompactResult:
        compaction = Compaction.of(mounted, forks)
        if compaction is None:
            raise OSError(errno.EOPNOTSUPP, "this workspace has no journal: mount it with --persist to keep one")
        return CompactResult(*await compaction.compact())

    return compact


def policy_method(mounted: MountedVolume) -> Handler:
    """Show the policy, and tighten it.  Adding patterns fails with EOPNOTSUPP for a workspace without a policy."""

    async def policy(params: PolicyParams, call: CallContext) -> PolicyResult:
        protect, hide = ([os.fsdecode(from_wire_path(each)) for each in some] for some in (params.protect, params.hide))
        found = mounted.policy
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
                open_files = await found.tighten(protect, hide, mounted)
            except OptionError as error:
                reason = error.message({"protect": "--protect", "hide": "--hide"})
                raise OSError(errno.EINVAL, reason) from None
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error)) from None
        now = found.options
        shown, hidden = ([wire_path(os.fsencode(each)) for each in some] for some in (now.protect, now.hide))
        return PolicyResult(shown, hidden, list(map(wire_path, open_files)))

    return policy


def _check_tightens(patterns: Sequence[str]) -> None:
    for each in patterns:
        if each.startswith("!"):
            reason = f"the pattern {each} would take something back, and a policy can only be tightened"
            raise OSError(errno.EINVAL, f"{reason}: give such patterns to `vfsd mount`")


def save_method(snapshots: SnapshotService | None, options: WorkspaceOptions, mounted: MountedVolume) -> Handler:
    """Put a state into the snapshot store on disk, from where a client can upload it.

    The client drops a state that was saved for it alone.  EOPNOTSUPP for a workspace without snapshots.
    """

    async def save(params: SaveParams, call: CallContext) -> SaveResult:
        service = required(snapshots)
        if params.snapshot == BASE:
            raise OSError(errno.EINVAL, "the lower layer of an overlay is not a snapshot: name one, or none", BASE)
        stored = await service.stored_state(params.snapshot, call)
        if stored is not None:
            saved = SaveResult(*stored)
            with trio.CancelScope(shield=True):
                await in_thread(_drop_unread, saved, call)
            return saved
        name = params.snapshot
        infos = {info.name: info for info in await service.infos()}
        info = infos.get(name) if name is not None else None
        async with service.to_save(name, call) as tree:
            source = TreeSource(await in_thread(CountedTree, tree, in_bytes(call)))
            with Store(options.store) as store:
                key = f"{options.backend.kind}:{options.mountpoint}"
                saved = await in_thread(_taken, store, key, source, info, call)
        return replace(saved, hidden=mounted.left_out_of(tree))

    return save


def _taken(store: Store, key: str, source: TreeSource, info: SnapshotInfo | None, call: CallContext) -> SaveResult:
    """Take a snapshot under a free name.  Another client of this workspace may save a state at the same moment."""
    for _ in range(_ATTEMPTS - 1):
        name = free_name(STAGED_PREFIX, store.snapshots(key))
        try:
            if info is None:
                store.take(key, name, source)
            else:
                store.take(key, name, source, tag=info.tag, created_ns=info.created_ns)
        except FileExistsError:
            continue
        saved = SaveResult(store.directory, key, name, is_temporary=True)
        _drop_unread(saved, call)
        return saved
    raise OSError(errno.EBUSY, "other clients save states of this workspace: repeat the command")


def _drop_unread(saved: SaveResult, call: CallContext) -> None:
    """If the call was cancelled meanwhile, drop what was saved for it alone: nobody learns its name."""
    if saved.is_temporary and call.cancelled:
        with Store(saved.directory) as store, contextlib.suppress(FileNotFoundError):
            store.drop(saved.workspace, saved.name)
        call.raise_if_cancelled()


class MethodGroups:
    """The groups of methods of one workspace.  `snapshots` is None if its backend has none."""

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
        self._unmount = UnmountMethods(mounted, snapshots, options, commands, forks, daemon.removal.wait)
        source = MergeSource(mounted, snapshots, options, forks)
        others = OtherWorkspaces(mounted.volume, source.lineage, source.tree, forks.temporary)
        self.handlers: Mapping[str, Handler] = {
            "unsaved": self._unmount.unsaved,
            "unmount": self._unmount.unmount,
            "compact": compact_method(mounted, forks),
            "upgrade": Upgrade(daemon, mounted, snapshots, commands).upgrade,
            "policy": policy_method(mounted),
            "save": save_method(snapshots, options, mounted),
            "fork": ForkMethod(mounted, snapshots, forks).fork,
            **SnapshotMethods(mounted, snapshots, options, forks).handlers(),
            **TreeMethods(mounted, snapshots, options, forks.base, others).handlers(),
            **source.handlers(),
            **MergeMethods(mounted, source, options, others).handlers(),
            **AuditMethods(audit, snapshots).handlers(),
            **FsMethods(mounted, options, commands, snapshots).handlers(),
            **ExecMethods(commands).handlers(),
        }

    @property
    def unmounts_to_answer(self) -> int:
        """Unmounts that were made and whose answers are not sent yet."""
        return self._unmount.to_answer
