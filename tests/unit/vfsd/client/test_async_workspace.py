"""`AsyncWorkspace` on asyncio and on trio: what a cancelled call reports, and that no call blocks the loop.

Against the control socket of a daemon without a mount.  `test_workspace.py` compares the results with `Workspace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from tests.support.fake_workspace import FakeDaemon, on_its_directory
from vfsd import AsyncWorkspace
from vfsd.client import async_connection, results
from vfsd.client.async_workspace import AsyncFilesystem
from vfsd.client.filesystem import WorkspaceFilesystem
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffParams
from vfsd.wire.messages import Exchange
from vfsd.wire.options import MountOptions, Ready

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@pytest.fixture
def daemon(daemon: FakeDaemon) -> FakeDaemon:
    daemon.snapshots["base"] = {}
    return daemon


class Gate:
    """A restore of the daemon that waits: `entered` is set when it has begun, `release` lets it continue."""

    def __init__(self, daemon: FakeDaemon, *, commits: bool) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.drops_client = False
        self._commits = commits
        self._restore = daemon.do_restore
        daemon.do_restore = self._wait  # type: ignore[method-assign]

    async def _wait(self, params: Any, call: Any) -> Any:
        if self._commits:
            call.commit()
        self.entered.set()
        # As in the daemon, where the work is one step of the loop or runs in a thread.
        with trio.CancelScope(shield=self._commits):
            while not self.release.is_set():
                await trio.sleep(0.005)
            if self.drops_client:
                call.drop_client("the test wants it")
            return await self._restore(params, call)

    async def wait_entered(self) -> None:
        while not self.entered.is_set():
            await anyio.sleep(0.005)


async def cancelled_restore(gate: Gate, ws: AsyncWorkspace, *, release_after: bool) -> list[str]:
    """Cancel a restore when the daemon has begun it; return the notes of the cancellation."""
    notes: list[str] = []

    async def restore(scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await ws.restore("base")
            except anyio.get_cancelled_exc_class() as error:
                notes.extend(error.__notes__)
                raise

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(restore, scope)
        await gate.wait_entered()
        scope.cancel()
        if release_after:
            await anyio.sleep(0.1)
            gate.release.set()
    return notes


# -- what became of a cancelled call ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("outcome", "note"),
    [
        ("stopped", "the restore was stopped: nothing was changed"),
        ("completed", "it was too late to stop the restore: the restore is complete"),
        ("continues", "the daemon completes the restore in the background"),
        ("unknown", "the restore may or may not be completed"),
        ("failed", "the restore failed: no space"),
    ],
)
def test_a_cancelled_restore_says_what_became_of_it(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, outcome: str, note: str
) -> None:
    async def fail(params: Any, call: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    gate = Gate(daemon, commits=outcome != "stopped")
    gate.drops_client = outcome == "unknown"
    if outcome == "continues":
        monkeypatch.setattr(async_connection, "ANSWER_S", 0.1)
    if outcome == "failed":
        gate._restore = fail

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        assert ws.last_cancelled is None
        (said,) = await cancelled_restore(gate, ws, release_after=outcome not in {"stopped", "continues"})
        assert note in said
        assert ws.last_cancelled is not None
        expected = "stopped" if outcome == "failed" else outcome
        assert (ws.last_cancelled.method, ws.last_cancelled.outcome) == ("restore", expected)
        gate.release.set()
        with anyio.fail_after(20):
            while daemon.live and outcome in {"completed", "continues"}:
                await anyio.sleep(0.01)

    run(body)
    assert daemon.live == {b"a.txt": b"one\n"} or outcome not in {"stopped", "failed"}


def test_a_call_that_only_reads_is_left_at_once(daemon: FakeDaemon, run: Run) -> None:
    daemon.silent = True

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        with anyio.move_on_after(0.1) as scope:
            await ws.diff("base")
        assert scope.cancelled_caught
        assert ws.last_cancelled is None

    run(body)


def test_every_way_of_asyncio_to_cancel_cancels_the_call(daemon: FakeDaemon) -> None:
    daemon.silent = True

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ws.restore("base")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ws.snapshot("one"), 0.05)
        task = asyncio.ensure_future(ws.drop("base"))
        await asyncio.sleep(0.05)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.value.__notes__ == ["the removal was stopped: the snapshot is still there"]
        assert ws.last_cancelled is not None
        assert (ws.last_cancelled.method, ws.last_cancelled.outcome) == ("drop", "stopped")

    asyncio.run(body())
    assert daemon.live == {b"a.txt": b"one\n"}
    assert list(daemon.snapshots) == ["base"]


def test_a_second_cancel_of_asyncio_does_not_wait(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_connection, "ANSWER_S", 1_000.0)
    gate = Gate(daemon, commits=True)

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        task = asyncio.ensure_future(ws.restore("base"))
        await gate.wait_entered()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.1)
        assert task.cancelled()
        assert ws.last_cancelled is not None
        assert ws.last_cancelled.outcome == "continues"
        gate.release.set()

    asyncio.run(body())


# -- the loop goes on -------------------------------------------------------------------------------
class Ticker:
    """Counts the turns of the loop while its block runs."""

    def __init__(self) -> None:
        self.turns = 0

    @contextlib.asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick)
            yield
            tasks.cancel_scope.cancel()

    async def _tick(self) -> None:
        while True:
            self.turns += 1
            await anyio.sleep(0)

    def wait_for_turns(self) -> None:
        """Wait until the loop has turned ten times.  On the loop's own thread it never does."""
        until, limit_s = self.turns + 10, time.monotonic() + 10
        while self.turns < until:
            assert time.monotonic() < limit_s, "the loop stands still: this ran on its thread"
            time.sleep(0.001)


@pytest.fixture
def ticker() -> Ticker:
    return Ticker()


def many_changes(count: int) -> list[ChangeRecord]:
    return [ChangeRecord(f"directory/file-{number}", "added", "file", None, 1) for number in range(count)]


@pytest.mark.extended
def test_the_loop_turns_while_a_large_answer_is_decoded_and_converted(
    daemon: FakeDaemon, run: Run, ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.forced_changes = many_changes(30_000)
    seen: list[str] = []
    convert, take = results.CONVERTERS["Diff"], Exchange.take

    def converting(*args: Any) -> Any:
        ticker.wait_for_turns()
        seen.append("converted")
        return convert(*args)

    def taking(self: Exchange, line: bytes) -> object:
        if len(line) > async_connection._LARGE_BYTES:
            ticker.wait_for_turns()
            seen.append("decoded")
        return take(self, line)

    monkeypatch.setattr(results, "CONVERTERS", {**results.CONVERTERS, "Diff": converting})
    monkeypatch.setattr(Exchange, "take", taking)

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        async with ticker.ticking():
            assert len((await ws.diff("base")).changes) == 30_000
            # One line of some megabytes, as no method of `AsyncWorkspace` asks for today.
            answer = await ws._client.call("diff", DiffParams(a="base"))
            assert len(answer.changes) == 30_000

    run(body)
    assert seen == ["converted", "decoded"]


def test_the_loop_turns_while_files_are_read_and_written(
    daemon: FakeDaemon, run: Run, ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(daemon.mountpoint)
    (place / "a.txt").write_text("one\n")
    called: list[str] = []

    def slow(name: str) -> Callable[..., Any]:
        method = getattr(WorkspaceFilesystem, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            ticker.wait_for_turns()
            called.append(name)
            return method(*args, **kwargs)

        return wrapper

    calls: dict[str, tuple[Any, ...]] = {
        "__init__": (), "read": ("a.txt",), "read_bytes": ("a.txt",), "exists": ("a.txt",), "is_file": ("a.txt",),
        "is_dir": ("a.txt",), "stat": ("a.txt",), "list": (), "glob": ("*",), "grep": ("one",), "write": ("b", "x"),
        "write_bytes": ("b", b"x"), "mkdir": ("d",), "delete": ("d",), "open_read": ("a.txt",), "open_write": ("c",),
        "open_text": ("a.txt",),
    }  # fmt: skip
    for name in calls:
        monkeypatch.setattr(WorkspaceFilesystem, name, slow(name))

    async def body() -> None:
        ws = on_its_directory(await AsyncWorkspace.attach("demo"))
        async with ticker.ticking():
            for name, args in list(calls.items())[1:]:
                result = await getattr(ws.async_filesystem, name)(*args)
                if name.startswith("open_"):
                    await result.close()

    run(body)
    assert set(calls) <= set(called)
    public = {name for name in vars(AsyncFilesystem) if not name.startswith("_")}
    daemon_calls = {"snapshot", "get", "restore", "export_archive", "import_archive"}
    assert public == (set(calls) - {"__init__"}) | daemon_calls | {"is_read_only"}


def test_the_loop_turns_while_a_workspace_is_mounted_and_unmounted(
    daemon: FakeDaemon, run: Run, ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_options: MountOptions, **_: object) -> Ready:
        ticker.wait_for_turns()
        return Ready(daemon.name, daemon.mountpoint, daemon.socket, daemon.pid, "native")

    monkeypatch.setattr("vfsd.client.launch.launch", launch)

    async def body() -> None:
        async with ticker.ticking(), AsyncWorkspace.mount(daemon.mountpoint):
            pass

    run(body)
    assert daemon.ended


def test_the_first_call_imports_nothing_on_the_loop() -> None:
    code = """
import asyncio, sys, threading
from vfsd import AsyncWorkspace
here = threading.get_ident()
class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == here and watching:
            print(name)
watching = False
sys.meta_path.insert(0, Watch())
async def main():
    global watching
    watching = True
    try:
        await AsyncWorkspace.attach("nothing")
    except FileNotFoundError:
        watching = False
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""


# -- cancelled work in threads --------------------------------------------------------------------------
def test_a_mount_that_is_cancelled_is_unmounted(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Event(), threading.Event()

    def launch(_options: MountOptions, **_: object) -> Ready:
        entered.set()
        release.wait(30)
        return Ready(daemon.name, daemon.mountpoint, daemon.socket, daemon.pid, "native")

    monkeypatch.setattr("vfsd.client.launch.launch", launch)

    async def mounted() -> AsyncWorkspace:
        return await AsyncWorkspace.mount(daemon.mountpoint)

    async def body() -> None:
        task = asyncio.ensure_future(mounted())
        while not entered.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert daemon.unmounted


def test_a_write_in_progress_is_waited_for_before_a_transaction_is_undone(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    restore = daemon.do_restore

    async def restoring(params: Any, call: Any) -> Any:
        order.append("restored")
        return await restore(params, call)

    def write(self: WorkspaceFilesystem, path: str, content: str) -> None:
        order.append("begun")
        time.sleep(0.3)
        order.append("written")

    monkeypatch.setattr(daemon, "do_restore", restoring)
    monkeypatch.setattr(WorkspaceFilesystem, "write", write)

    async def body() -> None:
        ws = on_its_directory(await AsyncWorkspace.attach("demo"))
        await ws.async_filesystem.is_read_only()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), ws.transaction() as t:
                await ws.async_filesystem.write("a", "x")
        assert t.state == "restored"

    asyncio.run(body())
    assert order == ["begun", "written", "restored"]


def test_work_that_no_thread_has_begun_is_not_done(run: Run) -> None:
    done: list[int] = []

    async def body() -> None:
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = 1
        release = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(async_connection.finish, functools.partial(release.wait, 30))
            await anyio.sleep(0.05)
            with anyio.move_on_after(0.05) as scope:
                await async_connection.finish(lambda: done.append(1))
            assert scope.cancelled_caught
            release.set()
        await async_connection.finish(lambda: done.append(2))

    run(body)
    assert done == [2]


def test_an_error_in_a_thread_is_raised(run: Run) -> None:
    async def body() -> None:
        with pytest.raises(ZeroDivisionError):
            await async_connection.finish(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await async_connection.abandon(lambda: 1 // 0)

    run(body)


# -- transactions -----------------------------------------------------------------------------------
def test_async_transactions_nest_and_another_task_cannot_begin_one(daemon: FakeDaemon, run: Run) -> None:
    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")

        async def other(entered: anyio.Event, leave: anyio.Event) -> None:
            async with ws.transaction("of a task"):
                entered.set()
                await leave.wait()

        async with anyio.create_task_group() as tasks:
            entered, leave = anyio.Event(), anyio.Event()
            tasks.start_soon(other, entered, leave)
            await entered.wait()
            with pytest.raises(RuntimeError, match="'of a task'"):
                async with ws.transaction():
                    pass
            leave.set()
        with contextlib.suppress(ZeroDivisionError):
            async with ws.transaction() as outer:
                daemon.live[b"outer"] = b""
                async with ws.transaction() as inner:
                    daemon.live[b"inner"] = b""
                assert inner.state == "kept"
                raise ZeroDivisionError
        assert outer.undone is not None
        assert outer.undone.counts.removed == 2
        ws._transactions.check_invariants()

    run(body)
    assert [name for name in daemon.snapshots if name.startswith("transaction-")] == []


def test_a_transaction_that_is_cancelled_at_its_entry_leaves_no_snapshot(daemon: FakeDaemon, run: Run) -> None:
    entered = threading.Event()
    take = daemon.do_snapshot

    async def slow(params: Any, call: Any) -> Any:
        call.commit()
        entered.set()
        await trio.sleep(0.2)
        return await take(params, call)

    daemon.do_snapshot = slow  # type: ignore[method-assign]

    async def body() -> None:
        ws = await AsyncWorkspace.attach("demo")
        async with anyio.create_task_group() as tasks:

            async def begin() -> None:
                async with ws.transaction():
                    raise AssertionError("the block does not begin")

            tasks.start_soon(begin)
            while not entered.is_set():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        assert ws.last_cancelled is not None
        assert ws.last_cancelled.outcome == "completed"

    run(body)
    assert list(daemon.snapshots) == ["base"]
