"""The messages of the control socket for merging: the calls of a client, and those between two daemons.

A client calls `merge` or `adopt` on the target.  The target's daemon then calls `lineage` and `changes` on the other
workspace's daemon.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from protocol.types import ChangeCounts
from vfsd.operations.declaration import (
    UNCHANGED,
    UNDO_HINT,
    ChangeRecord,
    Empty,
    ExpiredRecord,
    Operation,
    Params,
    Peer,
    RepositoryRecord,
)

Conflicts = Literal["fail", "ours", "theirs", "markers"]


class MergeParams(Params):
    """Parameters of `merge`: take over the changes that `fork` has made since the last merge, or since the fork.

    `paths` limits the merge to these paths.  `dry_run` reports without changing anything.  `conflicts` says what
    happens to paths that both workspaces changed: "fail" changes nothing if there is any.
    """

    fork: Peer
    paths: list[str] = []
    conflicts: Conflicts = "fail"
    dry_run: bool = False
    touch: bool = False  # as in RestoreParams


class ConflictRecord(msgspec.Struct, omit_defaults=True):
    """A path that both workspaces changed.  `detail` is a line for people.

    `kept_as`: with the policy "markers", the path that has the fork's version.
    """

    path: str
    reason: str
    detail: str
    kept_as: str | None = None


class MergeResult(msgspec.Struct):
    """Result of `merge` and of `adopt`.

    `base` is the newest snapshot that both workspaces have completely: the changes of both sides are counted from it,
    except at paths that were merged by themselves since.  It is empty if `adopt` with `force` found none.
    `applied` is False for a dry run, and if conflicts prevented the merge: then nothing was changed, and `changes` are
    those without the conflicts.
    `counts` covers all changes, `changes` lists the first CHANGES_LISTED.  `safety_snapshot` is the state before; None
    if nothing was changed.
    """

    fork: str
    base: str
    applied: bool
    counts: ChangeCounts
    changes: list[ChangeRecord]
    conflicts: list[ConflictRecord] = []
    truncated: bool = False
    safety_snapshot: str | None = None
    expired: list[ExpiredRecord] = []
    undo_steps: int = 0
    older: int = 0  # as in RestoreResult
    repositories: list[RepositoryRecord] = []


class AdoptParams(Params):
    """Parameters of `adopt`: make the workspace equal to `fork`.

    Changes of the workspace that `fork` does not have are conflicts, and nothing is changed, unless `force` is set.
    """

    fork: Peer
    force: bool = False
    dry_run: bool = False
    touch: bool = False  # as in RestoreParams


# -- between daemons -------------------------------------------------------------------------------
class StateRecord(msgspec.Struct, frozen=True):
    """A state that is kept as a snapshot: see `vfsd.daemon.merging.lineage.StateId`."""

    name: str
    serial: int
    created_ns: int


class AncestorRecord(msgspec.Struct, frozen=True):
    """A state of another workspace at which two workspaces parted."""

    instance: str
    name: str
    state: StateRecord


class MergedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state of another workspace that was merged; see `vfsd.daemon.merging.lineage.MergedState`."""

    instance: str
    name: str
    state: StateRecord
    repositories: tuple[str, ...] = ()


class LineageResult(msgspec.Struct, frozen=True):
    """Result of `lineage`: see `vfsd.daemon.merging.lineage.Lineage`."""

    instance: str
    name: str
    ancestors: list[AncestorRecord]
    merged: list[MergedRecord]
    states: list[StateRecord]


class ChangesParams(Params, kw_only=True):
    """Parameters of `changes`: send what the live state has changed.  Without `fork_point`, send everything.

    The output is a delta from `fork_point` to `base`, if there is one, and one to the live state.  `max_bytes` bounds
    them together: ENOSPC.

    With `merge_into`, the name of a workspace, the state that was sent is kept as a snapshot.  Earlier ones for that
    workspace are dropped, except for those in `keep`, by serial.
    """

    fork_point: StateRecord | None = None
    base: StateRecord | None = None
    max_bytes: int
    merge_into: str | None = None
    keep: list[int] = []


class ChangesResult(msgspec.Struct):
    """Result of `changes`: the snapshot of the state that was sent, if it was kept."""

    state: StateRecord | None = None


class DropMergedParams(Params):
    """Parameters of `drop_merged`: drop the states that were kept for merges into the workspace `target`.

    Those in `keep`, by serial, stay.
    """

    target: str
    keep: list[int] = []


_MERGE: Final = ("the merge", UNCHANGED, f"the merge is complete{UNDO_HINT}")
_ADOPTION: Final = ("the adoption", UNCHANGED, f"the adoption is complete{UNDO_HINT}")
OPERATIONS: Final = (
    Operation("merge", MergeParams, MergeResult, *_MERGE, audited=True),
    Operation("adopt", AdoptParams, MergeResult, *_ADOPTION, audited=True),
    Operation("lineage", Empty, LineageResult),
    Operation("changes", ChangesParams, ChangesResult),
    Operation("drop_merged", DropMergedParams, Empty),
)
