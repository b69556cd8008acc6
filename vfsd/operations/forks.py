"""The operations that merge: make, merge and adopt a fork, revert a range of states; and the calls between two daemons.

A client calls `merge` or `adopt` on the target.  The target's daemon then calls `lineage` and `changes` on the other
workspace's daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from protocol.types import ChangeCounts
from protocol.values import Value
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

if TYPE_CHECKING:
    from protocol.volume_extensions import SnapshotInfo

Conflicts = Literal["fail", "ours", "theirs", "markers"]


class ForkParams(Params):
    """Parameters of `fork`: the fork's name and its mountpoint, an empty directory.

    `snapshot`: fork that state; None: the present one.
    """

    name: str
    mountpoint: str
    snapshot: str | None = None


class ForkResult(msgspec.Struct):
    """Result of `fork`: the new workspace.  `base` is the snapshot of both that is their common state."""

    name: str
    mountpoint: str
    socket: str
    pid: int
    engine: str
    base: str
    warnings: list[str] = []


class MergeParams(Params):
    """Parameters of `merge`: take over the changes that `fork` has made since the last merge, or since the fork.

    `paths` limits the merge to these paths.  `dry_run` reports without changing anything.  `conflicts` says what
    happens to paths that both workspaces changed: "fail" changes nothing if there is any.  `tool`: the name of a merge
    driver in the global git configuration of the daemon's user, which merges the texts that both changed.
    """

    fork: Peer
    paths: list[str] = []
    conflicts: Conflicts = "fail"
    dry_run: bool = False
    touch: bool = False  # as in RestoreParams
    tool: str | None = None


class ConflictRecord(msgspec.Struct, omit_defaults=True):
    """A path that both workspaces changed.  `detail` is a line for people.

    `kept_as`: with the policy "markers", the path that has the fork's version.
    """

    path: str
    reason: str
    detail: str
    kept_as: str | None = None


class PlanResult(msgspec.Struct, kw_only=True):
    """What the results of `merge`, `adopt` and `revert` have in common; see `MergeResult`."""

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


class MergeResult(PlanResult, kw_only=True):
    """Result of `merge` and of `adopt`.

    `applied` is False for a dry run, and if conflicts prevented the merge: then nothing was changed, and `changes` are
    those without the conflicts.
    `counts` covers all changes, `changes` lists the first CHANGES_LISTED.  `safety_snapshot` is the state before; None
    if nothing was changed.
    `base` is the newest snapshot that both workspaces have completely: the changes of both sides are counted from it,
    except at paths that were merged by themselves since.  It is empty if `adopt` with `force` found none.
    """

    fork: str
    base: str


class RevertParams(Params):
    """Parameters of `revert`: undo the changes from the snapshot `since` to the snapshot `until`, and keep later ones.

    `until`: None is the live state.  `tool_call` and `session` limit it to the changes of one call of an agent's tool,
    or of all calls of a session; then `since` may be None, for the oldest state.  `paths` limits it to these paths.
    `conflicts` says what happens to paths that were changed again since, as in MergeParams: "theirs" takes the older
    state.
    """

    since: str | None = None
    until: str | None = None
    tool_call: str | None = None
    session: str | None = None
    paths: list[str] = []
    conflicts: Conflicts = "fail"
    dry_run: bool = False
    touch: bool = False  # as in RestoreParams


class RangeRecord(msgspec.Struct):
    """The states before and after changes that are undone.

    `until`: null is the live state.  `since`: "" is the directory below an overlay.
    """

    since: str
    until: str | None


class RevertResult(PlanResult, kw_only=True):
    """Result of `revert`.  `reverted` describes what was undone, `ranges` are the states, the newest first.

    `warnings`: why a range may have changes of other programs, too.  The rest is as for `merge`.
    """

    reverted: str
    ranges: list[RangeRecord]
    warnings: list[str] = []


class ConflictsParams(Params):
    """Parameters of `conflicts`: compare the workspace and the `forks` with each other."""

    forks: list[Peer] = []


class PairRecord(msgspec.Struct, omit_defaults=True):
    """Two workspaces, and the paths that both changed since the state that a merge of one into the other starts from.

    `paths` lists the first CHANGES_LISTED of them, `shared` counts all.  `conflicts` are those of a merge,
    `repositories` the git repositories that both changed.  `problem`: why the two could not be compared.
    """

    a: str
    b: str
    shared: int
    paths: list[str]
    conflicts: list[ConflictRecord]
    repositories: list[str] = []
    problem: str | None = None


class BelowRecord(msgspec.Struct):
    """A path of an overlay that an apply would not write, and the reason: another program changed it below, too."""

    path: str
    reason: str


class ConflictsResult(msgspec.Struct):
    """Result of `conflicts`: the names of the workspaces, this one first, and each pair of them.

    `below`: what conflicts with the directory below an overlay; null for other workspaces.
    """

    workspaces: list[str]
    pairs: list[PairRecord]
    below: list[BelowRecord] | None = None


class AdoptParams(Params):
    """Parameters of `adopt`: make the workspace equal to `fork`.

    Changes of the workspace that `fork` does not have are conflicts, and nothing is changed, unless `force` is set.
    """

    fork: Peer
    force: bool = False
    dry_run: bool = False
    touch: bool = False  # as in RestoreParams


# -- between daemons -------------------------------------------------------------------------------
class StateId(Value):
    """A state that is kept as a snapshot."""

    name: str
    serial: int
    created_ns: int

    @classmethod
    def of(cls, info: SnapshotInfo) -> StateId:
        return cls(info.name, info.serial, info.created_ns)

    @property
    def age(self) -> tuple[int, int]:
        """A key that sorts states, also those of different workspaces, the oldest one first."""
        return self.created_ns, self.serial


class Ancestor(Value):
    """A workspace that another one descends from, and the state at which they parted.

    `instance` is an identifier of the daemon, `name` the name of the workspace.
    """

    instance: str
    name: str
    left_at: StateId = msgspec.field(name="state")


class MergedState(Value):
    """A state of the workspace `instance` whose changes were merged.

    `repositories`: both sides changed these, and the branches of that workspace could not be fetched.
    """

    instance: str
    name: str
    state: StateId
    repositories: tuple[bytes, ...] = ()


class Lineage(Value):
    """Result of `lineage`: what a workspace descends from, the first one first, and what was merged into it.

    `merged` also has the states of the workspace itself that were merged into others and that its live state comes
    from.  `states` are the identities of its snapshots.
    """

    instance: str
    name: str
    ancestors: tuple[Ancestor, ...]
    merged: tuple[MergedState, ...]
    states: tuple[StateId, ...]


class ChangesParams(Params, kw_only=True):
    """Parameters of `changes`: send what the live state has changed.  Without `fork_point`, send everything.

    The output is a delta from `fork_point` to `base`, if there is one, and one to the live state.  `max_bytes` bounds
    them together: ENOSPC.

    With `merge_into`, the name of a workspace, the state that was sent is kept as a snapshot.  Earlier ones for that
    workspace are dropped, except for those in `keep`, by serial.
    """

    fork_point: StateId | None = None
    base: StateId | None = None
    max_bytes: int
    merge_into: str | None = None
    keep: list[int] = []


class ChangesResult(msgspec.Struct):
    """Result of `changes`: the snapshot of the state that was sent, if it was kept."""

    state: StateId | None = None


class DropMergedParams(Params):
    """Parameters of `drop_merged`: drop the states that were kept for merges into the workspace `target`.

    Those in `keep`, by serial, stay.
    """

    target: str
    keep: list[int] = []


_FORK: Final = ("the fork", "no fork was made", "the fork is mounted; `vfsd unmount` removes it")
_MERGE: Final = ("the merge", UNCHANGED, f"the merge is complete{UNDO_HINT}")
_REVERT: Final = ("the revert", UNCHANGED, f"the revert is complete{UNDO_HINT}")
_ADOPTION: Final = ("the adoption", UNCHANGED, f"the adoption is complete{UNDO_HINT}")
OPERATIONS: Final = (
    Operation("fork", ForkParams, ForkResult, *_FORK),
    Operation("merge", MergeParams, MergeResult, *_MERGE, audited=True),
    Operation("revert", RevertParams, RevertResult, *_REVERT, audited=True),
    Operation("adopt", AdoptParams, MergeResult, *_ADOPTION, audited=True),
    Operation("conflicts", ConflictsParams, ConflictsResult, reads=True),
    Operation("lineage", Empty, Lineage),
    Operation("changes", ChangesParams, ChangesResult),
    Operation("drop_merged", DropMergedParams, Empty),
)
