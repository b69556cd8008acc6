"""The method `save`: put a state into the snapshot store on disk, from where a client can upload it.

The client drops a state that was saved for it alone.  Runs on the serving loop, except `_taken` and `_drop_unread`.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Final

import trio
from msgspec.structs import replace

from protocol.store import Store, TreeSource
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.handlers.snapshots import required
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import CountedTree
from vfsd.daemon.snapshots.base import BASE, STAGED_PREFIX, SnapshotService, free_name, in_bytes
from vfsd.daemon.snapshots.threads import in_thread
from vfsd.wire.options import WorkspaceOptions
from vfsd.wire.snapshot_messages import SaveParams, SaveResult

_ATTEMPTS: Final = 16


def save_method(snapshots: SnapshotService | None, options: WorkspaceOptions, mounted: MountedVolume) -> Handler:
    """Return the handler.  It fails with EOPNOTSUPP for a workspace without snapshots."""

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
