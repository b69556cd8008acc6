"""Bases: snapshots in a store that are kept for as long as a fork, a merge or a frozen overlay needs them.

A *frozen* overlay (`vfsd mount --frozen`) is over a snapshot of its directory.  While the overlay runs, its lease keeps
the snapshot (`protocol.store.trees`), with or without a name.  A journal needs the name, because the next mount finds
the snapshot by it.

Invariants:

- The base of a frozen overlay has a name as long as a journal of the workspace exists.
- Without a journal, the daemon drops the name when it ends.  If the daemon was killed, the first of these drops it: a
  frozen mount of the directory, a fork or mount of host:DIR, or `vfsd store gc`.
- With --journal-dir, nothing finds the journal.  So the base is of the kind "user", and only the end of this
  workspace, or of its journal, drops it.

Threading: any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from protocol.journal.directory import drop_journal, has_journal, read_identity
from protocol.store import Store
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.snapshots.base import (
    FROZEN_TAG,
    MERGED_TAG,
    is_fork_base,
    is_frozen_base,
    is_merge_base,
)
from vfsd.machine.directories import bases_of_journals
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import read_record
from vfsd.operations.forks import StateId

_logger = logging.getLogger(__name__)
_BASES_WAIT_S: Final = 1.0


def drop_unused_bases(store: Store, key: str, keep: Collection[str] = (), only: StateId | None = None) -> list[str]:
    """Drop the snapshots of workspace `key` that were kept for forks, merges or frozen overlays that have ended.

    Bases of forks in `keep` stay; with `only`, drop just that base.  Return the names of the dropped snapshots.
    Snapshots that cannot be dropped now are left for the next call.
    """
    dropped: list[str] = []
    try:
        infos = store.snapshots(key)
        found = [info for info in infos if is_fork_base(info) and only in (None, StateId.of(info))]
        bases = {info.name for info in found}.difference(keep)

        def unneeded(workspace: str, infos: Sequence[SnapshotInfo], needed: Mapping[str, str]) -> Sequence[str]:
            if workspace != key:
                return ()
            dropped.extend(info.name for info in infos if info.name in bases and info.name not in needed)
            return list(dropped)

        if bases:
            store.prune(unneeded, wait_s=_BASES_WAIT_S, journals=bases_of_journals)
        for info in infos:
            target = None if not is_merge_base(info) else read_record((info.tag or "").removeprefix(MERGED_TAG))
            if is_merge_base(info) and (target is None or not target.alive):
                store.drop(key, info.name)
                dropped.append(info.name)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno != errno.EBUSY:
            log_failure(_logger, "dropping the snapshots of forks", error, path=store.directory, level=logging.WARNING)
    return dropped


# -- frozen overlays ---------------------------------------------------------------------------------
def drop_unused_frozen(store: Store, *, wait_s: float) -> None:
    """Drop the bases that killed daemons of frozen overlays left.  EBUSY if the store is in use for `wait_s`."""

    def unneeded(_workspace: str, infos: Sequence[SnapshotInfo], needed: Mapping[str, str]) -> list[str]:
        return [each.name for each in infos if is_frozen_base(each) and is_fork_base(each) and each.name not in needed]

    if any(is_frozen_base(info) for infos in store.workspaces().values() for info in infos):
        store.prune(unneeded, wait_s=wait_s, journals=bases_of_journals)


def drop_frozen(store: Store, workspace: str, fingerprint: str) -> None:
    """Drop the base of the frozen overlay `workspace`, unless a journal needs it.  Log what fails."""
    try:
        if fingerprint in bases_of_journals():
            return
        for key, infos in store.workspaces().items():
            for info in infos:
                is_its_own = is_frozen_base(info) and info.tag == f"{FROZEN_TAG}{workspace}"
                if is_its_own and store.fingerprint(key, info.name) == fingerprint:
                    store.drop(key, info.name)
    except FileNotFoundError:
        pass  # another process has dropped it
    except OSError as error:
        log_failure(_logger, "dropping the base of an overlay", error, path=store.directory, level=logging.WARNING)


def drop_journal_and_base(directory: str) -> None:
    """Remove the journal in `directory`, as `drop_journal`, and then the base of a frozen overlay."""
    identity: Mapping[str, str | int] = {}
    with contextlib.suppress(OSError):  # a damaged one is removed, too
        identity = read_identity(directory) if has_journal(directory) else {}
    drop_journal(directory)
    if "below" in identity:
        with Store() as store:
            drop_frozen(store, str(identity.get("workspace")), str(identity["below"]))
