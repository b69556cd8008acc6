"""Lineage: which states two workspaces have in common, and which changes of one are in the other already.

A state has an identity, which a fork inherits with its snapshots: name, serial and time of the snapshot (`StateId`).
The ancestors of a workspace are its source, the source of that, and so on; an `Ancestor` also has its state when the
next workspace was forked from it.  The fork point of two workspaces is the older of the two states at which their lines
left their last common ancestor.

The base of a merge is the newest state that is in the history of both:

- the fork point;
- a state of the other workspace that was merged into this one;
- a state of this workspace that was merged into the other one.

A merge that was limited to some paths is in no history: a later one compares these paths again.

A fork over a stored snapshot has the fork point as its first snapshot, which has the identity of the stored one, too.

A workspace with a journal keeps its identity, its snapshots and its `MergeLog` there, so it has the same lineage when
it is mounted again.

`MergeLog` records the second and the third kind.  The merged changes are a property of a state: after `restore --undo`
of a merge, or of what followed a state of the third kind, these states do not count any more.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import msgspec

from protocol.values import Value
from vfsd.operations.forks import Lineage, MergedState, StateId

MERGED_KEPT: Final = 200  # merged states that are remembered, the newest ones


class _KeptState(MergedState):
    """As in the log of an earlier version, which also recorded merges that were limited to `paths`."""

    paths: tuple[bytes, ...] = ()


class BaseState(Value):
    """A state that both workspaces have in their history.

    `of_other`: it is a snapshot of the other workspace, not of this one.
    """

    state: StateId
    of_other: bool


class Bases(Value):
    """The states that a merge starts from.

    `fork_point`: the state that both workspaces have as a snapshot.  `base`: the newest state that both have in their
    history, which is the fork point or a later one.
    """

    fork_point: StateId
    base: BaseState


def find_bases(here: Lineage, other: Lineage) -> Bases:
    """Return the base of a merge of `other` into `here`.

    OSError: EINVAL if both are one workspace or have no state in common; ENOENT if the base was dropped.
    """
    if here.instance == other.instance:
        raise OSError(errno.EINVAL, f"{here.name!r} cannot be merged into itself: name a fork of it")
    parted = fork_point(here, other)
    if parted is None:
        raise OSError(
            errno.EINVAL,
            f"{here.name!r} and {other.name!r} have no state in common: neither is a fork of the other, and they are"
            " not forks of one workspace",
        )
    for lineage in (here, other):
        _check_kept(parted, lineage, f"the state in which {here.name!r} and {other.name!r} parted")
    common = [BaseState(parted, of_other=False), *_taken(here, other), *_given(here, other)]
    base = max(common, key=lambda each: each.state.age)
    if base.of_other:
        _check_kept(base.state, other, f"the state of {other.name!r} that was merged last")
    elif base.state != parted:
        _check_kept(base.state, here, f"the state of {here.name!r} that was merged last into {other.name!r}")
    return Bases(parted, base)


def _taken(here: Lineage, other: Lineage) -> Iterator[BaseState]:
    """The states of `other` that were merged into `here`."""
    return (BaseState(each.state, of_other=True) for each in here.merged if each.instance == other.instance)


def _given(here: Lineage, other: Lineage) -> Iterator[BaseState]:
    """The states of `here` that were merged into `other`, as far as `here` has not been restored to older ones."""
    own = {each.state for each in here.merged if each.instance == here.instance}
    for each in other.merged:
        # A repository whose branches are missing there must not count as unchanged here.
        if each.instance == here.instance and each.state in own and not each.repositories:
            yield BaseState(each.state, of_other=False)


def fork_point(here: Lineage, other: Lineage) -> StateId | None:
    """Return the state at which the lines of two workspaces parted; None if they have no ancestor in common."""
    mine, its = here.ancestors, other.ancestors
    common = 0
    while common < min(len(mine), len(its)) and mine[common] == its[common]:
        common += 1
    left = [_left(lineage, common) for lineage in (here, other)]
    if left[0][0] != left[1][0]:
        return mine[common - 1].left_at if common else None  # forks that left their last common ancestor at one state
    states = [state for _, state in left if state is not None]
    return min(states, key=lambda state: state.serial, default=None)


def _left(lineage: Lineage, at: int) -> tuple[str, StateId | None]:
    """The workspace at position `at` of a lineage, and the state at which it was left (None: not at all)."""
    if at < len(lineage.ancestors):
        return lineage.ancestors[at].instance, lineage.ancestors[at].left_at
    return lineage.instance, None


def _check_kept(state: StateId, lineage: Lineage, what: str) -> None:
    if state not in lineage.states:
        raise OSError(
            errno.ENOENT,
            f"{what} ({state.name}) is not kept any more in {lineage.name!r}, so a merge cannot tell the changes of one"
            f" side from those of the other: it was dropped, or memory was needed (--max-memory); `vfsd adopt --force`"
            " works without it",
        )


class MergeLog:
    """Which states of other workspaces were merged into which state of this one.

    Each event says what is in the live state from a serial on: a snapshot with a higher serial was taken later.
    `kept` is what `keep` was called with last, by an earlier daemon.  `keep` is called with every change, and with
    whether that is to be kept together with the next change of the volume.  `newest_serial`: that of the newest
    snapshot, if serials above it may be given again.
    """

    def __init__(
        self,
        kept: bytes | None = None,
        keep: Callable[[bytes, bool], object] = lambda _data, _with_next: None,
        newest_serial: int | None = None,
    ) -> None:
        self._keep = keep
        self._events: list[tuple[int, tuple[MergedState, ...]]] = [(0, ())]
        if kept is not None:
            with contextlib.suppress(msgspec.DecodeError):  # damaged by a power failure: merges begin at the fork point
                events = msgspec.json.decode(kept, type=list[tuple[int, tuple[_KeptState, ...]]])
                self._events = [(since, tuple(_wholes(merged))) for since, merged in events] or self._events
        if newest_serial is not None:
            self._events = [(min(since, newest_serial), merged) for since, merged in self._events]

    def encoded(self) -> bytes:
        """Encode the log; a new one takes it as `kept`."""
        return msgspec.json.encode(self._events)

    @property
    def now(self) -> tuple[MergedState, ...]:
        """The states that were merged into the live state."""
        return self._events[-1][1]

    def at(self, serial: int) -> tuple[MergedState, ...]:
        """The states that were merged into the snapshot `serial`."""
        return next(merged for since, merged in reversed(self._events) if since < serial or since == 0)

    def record(self, serial: int, merged: Sequence[MergedState], *, with_next: bool = False) -> None:
        """Record the merged states that the live state has now; `serial` is that of the last snapshot taken before.

        `with_next`: it is so only after the change that the caller makes next.
        """
        if tuple(merged) != self.now:
            self._events.append((serial, tuple(merged)))
            self._keep(self.encoded(), with_next)

    def drop_events(self, oldest_serial: int) -> None:
        """Drop the events that no snapshot from `oldest_serial` on needs."""
        needed = [at for at, (since, _) in enumerate(self._events) if since < oldest_serial]
        if needed and needed[-1] > 0:
            self._events = [(0, self._events[needed[-1]][1]), *self._events[needed[-1] + 1 :]]
            self._keep(self.encoded(), False)

    def serials_of(self, instance: str) -> Collection[int]:
        """The serials of the states of workspace `instance` that the live state or a snapshot contains."""
        return {each.state.serial for _, merged in self._events for each in merged if each.instance == instance}


def with_merged(
    here: Lineage, other: Lineage, state: StateId, repositories: Sequence[bytes] = ()
) -> tuple[MergedState, ...]:
    """Add to what is merged into `here` a state of `other`, without `repositories`, and what was merged into that.

    Of each other workspace, the newest state is kept.  All states of `here` are kept.
    """
    inherited = [each for each in other.merged if each.instance != other.instance]
    merged = MergedState(other.instance, other.name, state, tuple(repositories))
    found: dict[object, MergedState] = {}
    for each in sorted((*inherited, *here.merged, merged), key=lambda each: each.state.age):
        found[each.state if each.instance == here.instance else each.instance] = each
    return tuple(sorted(found.values(), key=lambda each: each.state.age)[-MERGED_KEPT:])


def _wholes(kept: Sequence[_KeptState]) -> Iterator[MergedState]:
    """Leave out what was merged at some paths only."""
    return (MergedState(each.instance, each.name, each.state, each.repositories) for each in kept if not each.paths)
