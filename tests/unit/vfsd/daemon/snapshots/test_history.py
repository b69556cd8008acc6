"""The history of undo and redo, against a list of states and a cursor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.snapshots.base import state_at
from vfsd.daemon.snapshots.history import LOOSE_KEPT, LOOSE_KEPT_DAYS, STEPS_KEPT, HistoryState, UndoHistory, expired

_DAY_NS = 24 * 3600 * 10**9


def info(serial: int, *, created_ns: int = 0, kind: str = "safety", tag: str | None = None) -> SnapshotInfo:
    return SnapshotInfo(f"{kind}-{serial}", serial, created_ns, 1, 1, 1, tag, kind)  # type: ignore[arg-type]


def stepped(count: int) -> UndoHistory:
    history = UndoHistory()
    for number in range(1, count + 1):
        history = history.stepped(number, f"restore r{number}")
    return history


actions = st.lists(
    st.tuples(st.sampled_from(["step", "step", "undo", "undo", "redo", "drop", "prune"]), st.integers(0, 1000))
)


@given(actions)
def test_it_goes_where_a_list_of_states_and_a_cursor_go(chosen: list[tuple[str, int]]) -> None:
    history = UndoHistory()
    states: list[int | None] = [None]
    cursor = 0
    for serial, (action, number) in enumerate(chosen, 1):
        if action == "step":
            history = history.stepped(serial, f"step {serial}")
            states = [*states[:cursor], serial, None][-(STEPS_KEPT + 1) :]
            cursor = len(states) - 1
        elif action == "undo" and cursor > 0:
            assert history.undo_steps == cursor
            states[cursor] = serial
            cursor -= 1
            history = history.moved(cursor, serial)
        elif action == "redo" and cursor < len(states) - 1:
            assert history.redo_steps == len(states) - 1 - cursor
            states[cursor] = serial
            cursor += 1
            history = history.moved(cursor, serial)
        elif action == "drop" and (kept := [at for at, state in enumerate(states) if state is not None]):
            at = kept[number % len(kept)]
            history = history.among(history.serials() - {states[at]})  # type: ignore[arg-type]
            if at == cursor:
                states[at] = None  # the live state has it still
            else:
                del states[at]
                cursor -= at < cursor
        elif action == "prune" and (kept := [at for at, state in enumerate(states) if state is not None]):
            at = kept[number % len(kept)]
            history = history.cut({states[at]})  # type: ignore[arg-type]
            if at == cursor:
                states[at] = None
            elif at < cursor:
                states, cursor = states[at + 1 :], cursor - at - 1
                assert history.is_cut_before
            else:
                states = states[:at]
                assert history.is_cut_after
        history.check()
        assert [state.serial for state in history.states] == states
        assert history.position == cursor
        assert UndoHistory.decoded(history.encoded()) == replace(history, is_cut_before=False, is_cut_after=False)


def test_the_step_between_two_states_is_named_from_both_sides() -> None:
    history = stepped(2)
    assert history.step_between(1) == "restore r2"
    back = history.moved(1, 3)
    assert (back.step_between(0), back.step_between(2)) == ("restore r1", "restore r2")


def test_at_most_fifty_steps_are_kept() -> None:
    history = stepped(STEPS_KEPT + 7)
    history.check()
    assert history.undo_steps == STEPS_KEPT
    assert history.states[0] == HistoryState(8, "restore r8")


def test_no_step_goes_over_a_state_that_was_dropped_for_lack_of_memory() -> None:
    history = stepped(4).moved(3, 5).moved(2, 6)  # states 1, 2, 3 (here), 6, 5
    cut = history.cut({1, 6})
    assert [state.serial for state in cut.states] == [2, 3]
    assert (cut.undo_steps, cut.redo_steps, cut.is_cut_before, cut.is_cut_after) == (1, 0, True, True)
    with pytest.raises(FileNotFoundError, match="the later states were dropped because memory was needed"):
        state_at(cut, [], cut.position + 1)
    further = cut.stepped(7, "restore r").moved(1, 8).moved(0, 9)
    with pytest.raises(FileNotFoundError, match="the earlier states were dropped because memory was needed"):
        state_at(further, [], -1)
    assert not further.is_cut_after
    assert stepped(2).cut({99}) == stepped(2)


def test_what_is_no_history_is_none() -> None:
    for data in (
        b"",
        b"{}",
        b"\0" * 50,
        b'{"version":1,"position":3,"states":[[null,null]]}',
        UndoHistory().encoded()[:-3],
    ):
        assert UndoHistory.decoded(data) is None
    assert UndoHistory.decoded(b'{"version":9,"position":0,"states":[[null,null]]}') is None


def test_safety_snapshots_of_an_earlier_version_are_its_steps() -> None:
    history = UndoHistory.of_snapshots([info(1, kind="user"), info(2), info(5, tag="before restore x")])
    history.check()
    assert [state.serial for state in history.states] == [2, 5, None]
    assert history.undo_steps == 2


def test_loose_snapshots_expire_by_number_and_by_age_and_none_that_a_step_needs() -> None:
    now_ns = 1000 * _DAY_NS
    history = stepped(3)
    needed = [info(serial) for serial in (1, 2, 3)]  # very old, all of them
    loose = [info(serial, created_ns=now_ns - _DAY_NS) for serial in range(10, 10 + LOOSE_KEPT + 2)]
    users = [info(serial, kind="user") for serial in (100, 101)]
    gone = expired([*needed, *loose, *users], history, now_ns)
    assert [each.serial for each in gone] == [10, 11]
    old = info(50, created_ns=now_ns - (LOOSE_KEPT_DAYS + 1) * _DAY_NS)
    assert expired([*needed, old, *users], history, now_ns) == [old]
    assert expired([*needed, old, *users], history, now_ns, keep={old.name}) == []
