"""Which state two workspaces have in common, and what was merged into which state."""

from __future__ import annotations

import errno

import pytest

from vfsd.daemon.merging.lineage import BaseState, MergeLog, find_bases, with_merged
from vfsd.operations.forks import Ancestor, Lineage, MergedState, StateId


def state(serial: int, name: str = "s") -> StateId:
    return StateId(f"{name}-{serial}", serial, serial * 1000)


SOURCE = Lineage("s", "source", (), (), tuple(state(number) for number in range(1, 9)))


def fork(instance: str, left_at: int, *more: StateId, merged: tuple[MergedState, ...] = ()) -> Lineage:
    inherited = tuple(state(number) for number in range(1, left_at + 1))
    return Lineage(instance, instance, (Ancestor("s", "source", state(left_at)),), merged, (*inherited, *more))


def test_a_fork_and_its_source_parted_at_the_fork_point() -> None:
    for here, other in ((SOURCE, fork("f", 5)), (fork("f", 5), SOURCE)):
        assert find_bases(here, other).base.state == state(5)


def test_forks_of_one_source_parted_at_the_older_fork_point() -> None:
    assert find_bases(fork("f", 5), fork("g", 3)).base.state == state(3)
    grandchild = Lineage(
        "h", "h", (Ancestor("s", "source", state(3)), Ancestor("g", "g", state(20))), (), fork("g", 3).states
    )
    assert find_bases(fork("f", 5), grandchild).base.state == state(3)


def test_forks_that_left_their_source_at_one_state_parted_there() -> None:
    assert find_bases(fork("f", 5), fork("g", 5)).base.state == state(5)
    grandchild = Lineage(
        "h", "h", (Ancestor("s", "source", state(5)), Ancestor("g", "g", state(20))), (), fork("g", 5).states
    )
    assert find_bases(fork("f", 5), grandchild).base.state == state(5)
    assert find_bases(grandchild, fork("f", 5)).base.state == state(5)


def test_the_state_that_was_merged_last_is_the_base() -> None:
    other = fork("f", 5, state(7, "merged"), state(9, "merged"))
    here = Lineage("s", "source", (), (MergedState("f", "f", state(9, "merged")),), SOURCE.states)
    found = find_bases(here, other)
    assert (found.base, found.fork_point) == (BaseState(state(9, "merged"), True), state(5))
    own = fork("f", 5, state(7, "merged"), state(9, "merged"), merged=(MergedState("f", "f", state(9, "merged")),))
    found = find_bases(own, here)
    assert found.base == BaseState(state(9, "merged"), False)
    assert find_bases(other, here).base.state == state(5), "an undo went back to before the state that was merged"


def test_there_is_no_base_without_a_common_state() -> None:
    stranger = Lineage("x", "stranger", (), (), SOURCE.states)
    with pytest.raises(OSError, match="no state in common") as raised:
        find_bases(SOURCE, stranger)
    assert raised.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="into itself"):
        find_bases(SOURCE, SOURCE)


def test_a_base_that_is_not_kept_any_more_is_named() -> None:
    other = fork("f", 5)
    pruned = Lineage("s", "source", (), (), SOURCE.states[5:])
    with pytest.raises(FileNotFoundError, match=r"parted \(s-5\) is not kept any more in 'source'"):
        find_bases(pruned, other)
    merged = Lineage("s", "source", (), (MergedState("f", "f", state(9, "merged")),), SOURCE.states)
    with pytest.raises(FileNotFoundError, match=r"merged last \(merged-9\) is not kept any more in 'f'"):
        find_bases(merged, other)


def test_a_snapshot_has_what_was_merged_when_it_was_taken() -> None:
    log = MergeLog()
    one, two = (MergedState("f", "f", state(number, "merged")) for number in (3, 6))
    log.record(4, [one])
    log.record(7, [two])
    assert [log.at(serial) for serial in (4, 5, 7, 8)] == [(), (one,), (one,), (two,)]
    log.record(9, log.at(5))  # a restore of snapshot 5
    assert log.now == (one,)
    assert log.serials_of("f") == {3, 6}
    log.drop_events(8)
    assert [log.at(serial) for serial in (8, 10)] == [(two,), (one,)]
    log.drop_events(20)
    assert (log.now, log.serials_of("f")) == ((one,), {3})


def test_what_was_merged_is_known_to_a_later_daemon_also_if_serials_are_given_again() -> None:
    kept: list[tuple[bytes, bool]] = []
    log = MergeLog(keep=lambda data, with_next: kept.append((data, with_next)))
    one = MergedState("f", "f", state(3, "merged"))
    log.record(4, [one])
    log.record(9, [], with_next=True)
    assert [with_next for _, with_next in kept] == [False, True]
    later = MergeLog(kept[-1][0], newest_serial=5)  # snapshots 6 to 9 were dropped
    assert [later.at(serial) for serial in (4, 5, 6)] == [(), (one,), ()]
    assert MergeLog(b"damaged").now == ()
    # An earlier version also recorded merges that were limited to paths.
    assert MergeLog(kept[0][0].replace(b'"repositories":[]', b'"paths":["YQ=="]')).now == ()
    assert MergeLog(kept[0][0].replace(b'"repositories":[]', b'"paths":[]')).now == (one,)


def test_what_was_merged_into_the_other_workspace_comes_with_it() -> None:
    old, new = (MergedState("g", "g", state(number)) for number in (2, 4))
    other = fork("f", 5, merged=(new,))
    here = Lineage("s", "source", (), (old,), ())
    assert with_merged(here, other, state(8)) == (new, MergedState("f", "f", state(8)))
    here = Lineage("s", "source", (), (new,), ())
    assert with_merged(here, fork("f", 5, merged=(old,)), state(8))[0] == new


def test_a_state_without_the_branches_of_a_repository_is_a_base_in_one_direction_only() -> None:
    other = fork("f", 5, state(9, "merged"), merged=(MergedState("f", "f", state(9, "merged")),))
    here = Lineage("s", "source", (), with_merged(SOURCE, other, state(9, "merged"), [b".git"]), SOURCE.states)
    assert find_bases(here, other).base == BaseState(state(9, "merged"), of_other=True)
    assert find_bases(other, here).base.state == state(5)
