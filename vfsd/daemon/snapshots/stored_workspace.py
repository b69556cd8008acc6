"""A workspace whose snapshots are in a store: where they are, a restore that was interrupted, and the bases of forks.

Threading: any thread; `interrupted` and `drop_unused_bases` block.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.store import DirectoryTarget, Source, Store
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.merging.lineage import StateId
from vfsd.daemon.snapshots.base import MERGED_TAG, Interrupted, is_fork_base, is_merge_base, is_staged
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import read_record

_logger = logging.getLogger(__name__)
_BASES_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a backend's snapshots are kept, and how its files are read and written.

    `key` names the workspace in the store; the same files always have the same key.
    """

    store: Store
    key: str
    source: Source
    target: DirectoryTarget


def interrupted(stored: Stored) -> Interrupted | None:
    """Return the restore that was interrupted, if there is one."""
    found = stored.store.interrupted(stored.key)
    if found is None:
        return None
    if not is_staged(found.snapshot):
        return Interrupted(found.snapshot, found.safety, found.paths)
    try:
        description = stored.store.snapshot(stored.key, found.snapshot).tag or ""
    except FileNotFoundError:
        description = ""
    # Without paths: a restore of staged content resumes with those of the intent log.
    return Interrupted(found.snapshot, found.safety, (), description)


def drop_unused_bases(store: Store, key: str, keep: Collection[str] = (), only: StateId | None = None) -> list[str]:
    """Drop the snapshots of workspace `key` that were kept for forks, or merges into them, that have ended.

    Of the states that were forked, those in `keep` stay, and with `only` all but that one.  Return their names.
    What cannot be dropped now is left for the next call.
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
            store.prune(unneeded, wait_s=_BASES_WAIT_S)
        for info in infos:
            target = None if not is_merge_base(info) else read_record((info.tag or "").removeprefix(MERGED_TAG))
            if is_merge_base(info) and (target is None or not target.alive):
                store.drop(key, info.name)
                dropped.append(info.name)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno != errno.EBUSY:
            log_failure(_logger, "dropping the snapshots of forks", error, path=store.directory, level=logging.WARNING)
    return dropped
