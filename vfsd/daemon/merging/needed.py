"""Which snapshots of a workspace other running workspaces need, to be merged with it.

The record of each running workspace has its lineage, so no daemon is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.merging.lineage import Ancestor, Lineage, StateId, fork_point
from vfsd.daemon.merging.records import state_id
from vfsd.daemon.snapshots.base import MERGED_TAG, is_merge_base
from vfsd.machine.runtime import WorkspaceRecord, read_records


def needed_states(here: Lineage, infos: Iterable[SnapshotInfo]) -> Mapping[StateId, list[str]]:
    """Return the names of the workspaces that need a state of `here`, by state.  `infos` are snapshots of `here`."""
    found: dict[StateId, list[str]] = {}
    running = [record for record in read_records() if record.alive]
    for record in running:
        state = fork_point(here, _lineage(record)) if record.instance not in ("", here.instance) else None
        if state is not None:
            found.setdefault(state, []).append(record.name)
    names = {record.name for record in running}
    for info in infos:
        target = (info.tag or "").removeprefix(MERGED_TAG)
        if is_merge_base(info) and target in names:
            found.setdefault(StateId.of(info), []).append(target)
    return found


def _lineage(record: WorkspaceRecord) -> Lineage:
    ancestors = tuple(Ancestor(each.instance, each.name, state_id(each.state)) for each in record.ancestors)
    return Lineage(record.instance, record.name, ancestors, (), ())
