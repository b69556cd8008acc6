"""Transactions: what a block did is undone if it raises, and what happens if that fails.

Against the control socket of a daemon without a mount; tests/mount/test_transactions.py has real ones.
"""
# ruff: noqa: PT012 (the block of a transaction that raises is what these tests are about)

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_workspace import FakeDaemon
from vfsd import AsyncWorkspace, Workspace
from vfsd.client.transaction import Transaction
from vfsd.operations.snapshots import ProblemRecord


@pytest.fixture
def ws(daemon: FakeDaemon) -> Iterator[Workspace]:
    workspace = Workspace.attach("demo")
    yield workspace
    workspace._transactions.check_invariants()
    assert workspace._transactions._open == []


def user_snapshots(daemon: FakeDaemon) -> list[str]:
    return [name for name in daemon.snapshots if not name.startswith("before-")]


def failing(daemon: FakeDaemon, method: str, error: Callable[[], BaseException]) -> None:
    """Let every further call of `method` fail."""

    async def fail(params: Any, call: Any) -> Any:
        raise error()

    setattr(daemon, f"do_{method}", fail)


class Stop(Exception):
    pass


def test_a_block_that_ends_keeps_its_changes(ws: Workspace, daemon: FakeDaemon) -> None:
    with ws.transaction("call 7") as t:
        assert (t.state, daemon.tags[t.snapshot]) == ("open", "call 7")
        daemon.live[b"a.txt"] = b"two\n"

    assert daemon.live == {b"a.txt": b"two\n"}
    assert (t.state, t.undone, daemon.snapshots) == ("kept", None, {})


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_block_that_raises_is_undone_and_the_exception_continues(
    ws: Workspace, daemon: FakeDaemon, kind: type[BaseException]
) -> None:
    error = kind()

    with pytest.raises(kind) as caught, ws.transaction() as t:
        daemon.live[b"a.txt"] = b"two\n"
        daemon.live[b"new"] = b""
        raise error

    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert daemon.live == {b"a.txt": b"one\n"}
    assert t.state == "restored"
    assert t.undone is not None
    assert [(change.path, change.change) for change in t.undone.changes] == [("a.txt", "modified"), ("new", "removed")]
    assert t.undone.counts.total == 2
    assert user_snapshots(daemon) == []


def test_transactions_nest_and_each_says_what_it_undid(ws: Workspace, daemon: FakeDaemon) -> None:
    with contextlib.suppress(ZeroDivisionError), ws.transaction("outer") as outer:
        daemon.live[b"outer"] = b""
        with contextlib.suppress(Stop), ws.transaction("inner") as inner:
            daemon.live[b"inner"] = b""
            raise Stop
        assert set(daemon.live) == {b"a.txt", b"outer"}
        with ws.transaction("kept"):
            daemon.live[b"kept"] = b""
        raise ZeroDivisionError

    assert set(daemon.live) == {b"a.txt"}
    assert [change.path for change in inner.undone.changes] == ["inner"]  # type: ignore[union-attr]
    assert [change.path for change in outer.undone.changes] == ["kept", "outer"]  # type: ignore[union-attr]


Program: TypeAlias = "list[tuple[str, Any]]"
PROGRAMS = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.just("write"), st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=2)))
        | st.tuples(st.just("remove"), st.sampled_from([b"a", b"b", b"c"]))
        | st.tuples(st.sampled_from(["fails", "ends"]), inner),
        max_size=5,
    ),
    max_leaves=8,
)


def run(program: Program, live: dict[bytes, bytes]) -> None:
    """The model: a block that fails restores a copy."""
    for what, detail in program:
        if what == "write":
            live[detail[0]] = detail[1]
        elif what == "remove":
            live.pop(detail, None)
        else:
            before = dict(live)
            run(detail, live)
            if what == "fails":
                live.clear()
                live.update(before)


def run_in_transactions(program: Program, daemon: FakeDaemon, ws: Workspace) -> None:
    for what, detail in program:
        ws._transactions.check_invariants()
        if what == "write":
            daemon.live[detail[0]] = detail[1]
        elif what == "remove":
            daemon.live.pop(detail, None)
        else:
            with contextlib.suppress(Stop), ws.transaction() as t:
                run_in_transactions(detail, daemon, ws)
                if what == "fails":
                    raise Stop
            assert t.state == ("restored" if what == "fails" else "kept")


@settings(max_examples=25, deadline=None)
@given(program=PROGRAMS)
def test_any_nesting_leaves_what_copies_would_leave(program: Program, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected: dict[bytes, bytes] = {}
    run(program, expected)
    with FakeDaemon("model", str(tmp_path_factory.mktemp("model"))) as daemon:
        run_in_transactions(program, daemon, Workspace.attach("model"))
        assert daemon.live == expected
        assert user_snapshots(daemon) == []


# -- failures ---------------------------------------------------------------------------------------
def test_a_restore_that_fails_does_not_hide_the_exception(ws: Workspace, daemon: FakeDaemon) -> None:
    failing(daemon, "restore", lambda: OSError(errno.ENOSPC, "no space"))

    with pytest.raises(Stop) as caught, ws.transaction("call 7") as t:
        daemon.live[b"a.txt"] = b"two\n"
        raise Stop

    (note,) = caught.value.__notes__
    assert "('call 7') may not be undone (" in note
    assert f"`vfsd restore {t.snapshot}`" in note
    assert (t.state, t.undone, user_snapshots(daemon)) == ("failed", None, [t.snapshot])


def test_paths_that_could_not_be_restored_are_noted(ws: Workspace, daemon: FakeDaemon) -> None:
    daemon.problems = [ProblemRecord("b.txt", "another program changed it")]

    with pytest.raises(Stop) as caught, ws.transaction() as t:
        raise Stop

    assert caught.value.__notes__ == [f"1 path could not be restored by {t}: b.txt (another program changed it)"]
    assert t.undone is not None
    assert t.undone.problems == {"b.txt": "another program changed it"}


def test_a_daemon_that_ended_is_an_error_of_a_block_that_did_not_raise(workdir: Path) -> None:
    ended = contextlib.ExitStack()
    ended.enter_context(FakeDaemon("gone", str(workdir)))
    ws = Workspace.attach("gone")

    with (
        pytest.raises(
            ConnectionError, match=r"the daemon ended during transaction-.*changes that only it held are lost"
        ),
        ws.transaction() as t,
    ):
        ended.close()

    assert t.state == "failed"


def test_a_daemon_that_ended_is_a_note_of_a_block_that_raised(workdir: Path) -> None:
    ended = contextlib.ExitStack()
    ended.enter_context(FakeDaemon("gone", str(workdir)))
    ws = Workspace.attach("gone")

    with pytest.raises(Stop) as caught, ws.transaction():
        ended.close()
        raise Stop

    assert "may not be undone (no daemon answers" in caught.value.__notes__[0]


def test_an_interrupt_during_the_restore_continues_with_the_blocks_exception_as_context(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = ws.transaction()
    send = t._run

    def interrupted(call: Any) -> Any:
        if call.method == "restore":
            raise KeyboardInterrupt
        return send(call)

    monkeypatch.setattr(t, "_run", interrupted)
    error = Stop()

    with pytest.raises(KeyboardInterrupt) as caught, t:
        raise error

    assert caught.value.__context__ is error
    assert "may not be undone (KeyboardInterrupt)" in error.__notes__[0]
    assert t.state == "failed"


def test_an_interrupt_during_the_entry_leaves_no_snapshot(ws: Workspace, daemon: FakeDaemon) -> None:
    t = ws.transaction()
    send = t._run

    def interrupted(call: Any) -> Any:
        answer = send(call)
        if call.method == "snapshot":
            raise KeyboardInterrupt
        return answer

    t._run = interrupted

    with pytest.raises(KeyboardInterrupt), t:
        raise AssertionError("the block does not begin")

    assert daemon.snapshots == {}


def test_an_entry_that_fails_is_the_daemons_error_and_the_block_does_not_begin(
    ws: Workspace, daemon: FakeDaemon
) -> None:
    failing(daemon, "snapshot", lambda: OSError(errno.EOPNOTSUPP, "no snapshots"))

    with pytest.raises(OSError, match="no snapshots") as caught, ws.transaction():
        raise AssertionError("the block does not begin")

    assert caught.value.errno == errno.EOPNOTSUPP
    assert [method for method, _ in daemon.requests] == ["snapshot"]


def test_a_snapshot_that_somebody_dropped_is_a_warning(ws: Workspace, daemon: FakeDaemon) -> None:
    with pytest.warns(RuntimeWarning, match=r"of transaction-\w+ were kept, and its snapshot is gone"):  # noqa: SIM117
        with ws.transaction() as t:
            daemon.snapshots.clear()
    assert t.state == "kept"

    with pytest.raises(Stop) as caught, ws.transaction() as t:
        daemon.snapshots.clear()
        raise Stop
    assert "no such snapshot" in caught.value.__notes__[0]
    assert t.state == "failed"


def test_a_snapshot_that_cannot_be_dropped_is_a_warning_or_a_note(ws: Workspace, daemon: FakeDaemon) -> None:
    failing(daemon, "drop", lambda: OSError(errno.EIO, "the disk"))

    with pytest.warns(RuntimeWarning, match="its snapshot could not be dropped"), ws.transaction() as t:
        pass
    assert t.state == "kept"
    with pytest.raises(Stop) as caught, ws.transaction() as t:
        raise Stop
    assert "was undone; its snapshot could not be dropped" in caught.value.__notes__[0]
    assert t.state == "restored"


# -- threads ----------------------------------------------------------------------------------------
def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in another thread, and return or raise what it does."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    ((is_value, value),) = outcome
    if not is_value:
        raise value
    return value


def test_another_threads_snapshot_stays_and_can_be_restored(ws: Workspace, daemon: FakeDaemon) -> None:
    with contextlib.suppress(Stop), ws.transaction():
        daemon.live[b"new"] = b"x"
        in_thread(lambda: ws.snapshot("of a thread"))
        raise Stop
    assert set(daemon.live) == {b"a.txt"}

    ws.restore("of a thread")

    assert set(daemon.live) == {b"a.txt", b"new"}


def test_another_thread_cannot_begin_a_transaction_meanwhile(ws: Workspace, daemon: FakeDaemon) -> None:
    def begin() -> Transaction:
        with ws.transaction() as t:
            return t

    with ws.transaction("mine"):
        with pytest.raises(RuntimeError, match=r"another thread or task has transaction-.*'mine'.* open"):
            in_thread(begin)
        assert begin().state == "kept"
    assert in_thread(begin).state == "kept"
    assert daemon.snapshots == {}


def test_another_thread_cannot_begin_one_before_the_restore_is_complete(ws: Workspace, daemon: FakeDaemon) -> None:
    def begin() -> None:
        with ws.transaction():
            pass

    t = ws.transaction()
    send = t._run

    def restoring(call: Any) -> Any:
        if call.method == "restore":
            with pytest.raises(RuntimeError, match="another thread or task"):
                in_thread(begin)
        return send(call)

    t._run = restoring

    with pytest.raises(Stop), t:
        raise Stop

    assert t.state == "restored"
    in_thread(begin)


def test_a_transaction_is_entered_once(ws: Workspace) -> None:
    t = ws.transaction()
    with t, pytest.raises(RuntimeError, match="entered before"), t:
        pass
    with pytest.raises(RuntimeError, match="entered before"), t:
        pass


def test_an_inner_transaction_that_outlives_the_outer_one_does_not_bring_its_changes_back(
    ws: Workspace, daemon: FakeDaemon
) -> None:
    for fails in (True, False):
        outer, inner = ws.transaction(), ws.transaction()
        outer.__enter__()
        daemon.live[b"outer"] = b""
        inner.__enter__()
        outer.__exit__(Stop, Stop(), None)
        if fails:
            error = Stop()
            inner.__exit__(Stop, error, None)
            assert "an outer transaction was restored" in error.__notes__[0]
        else:
            with pytest.raises(RuntimeError, match="an outer transaction was restored"):
                inner.__exit__(None, None, None)
        assert set(daemon.live) == {b"a.txt"}
        assert user_snapshots(daemon) == []


# -- the async twin ---------------------------------------------------------------------------------
def test_an_async_block_that_is_cancelled_is_undone(ws: Workspace, daemon: FakeDaemon) -> None:
    async def body() -> None:
        workspace = await AsyncWorkspace.attach("demo")
        async with workspace.transaction("kept"):
            daemon.live[b"kept"] = b""
        with trio.CancelScope() as scope:
            async with workspace.transaction() as t:
                daemon.live[b"new"] = b""
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert t.state == "restored"

    trio.run(body)

    assert set(daemon.live) == {b"a.txt", b"kept"}
    assert user_snapshots(daemon) == []
