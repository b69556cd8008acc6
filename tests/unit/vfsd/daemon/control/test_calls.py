"""What a running call can do: progress, output, being cancelled, and acting after its answer."""

from __future__ import annotations

import base64
import threading
from typing import Any

import pytest
import trio
import trio.testing

from tests.unit.vfsd.daemon.control.conftest import peer, ping, serving
from vfsd.daemon.control.calls import CallCancelledError, CallContext
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import DropParams, ExportParams, ExportResult

EXPORTED = ExportResult("/x", 1, 2, 3)


def progress(message: dict[str, Any] | None) -> tuple[int, int, str]:
    assert message is not None
    assert message["method"] == "progress"
    params = message["params"]
    assert params["id"] == 1
    return params["done"], params["total"], params["unit"]


async def test_progress_reaches_the_client_while_the_call_runs(path: str) -> None:
    release = trio.Event()

    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        call.progress_nowait(3, 10, "files")
        await trio.lowlevel.checkpoint()
        await release.wait()
        return EXPORTED

    async with serving(path, {"export": export}), peer(path) as client:
        await client.call("export", path="/x")
        assert progress(await client.receive()) == (3, 10, "files")
        release.set()
        assert (await client.receive() or {})["result"]["files"] == 1


async def test_of_many_figures_the_newest_win_and_the_last_come_before_the_answer(
    path: str, clock: trio.testing.MockClock
) -> None:
    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        for done in range(10_001):
            call.progress_nowait(done, 10_000, "bytes")
            await trio.lowlevel.checkpoint()
        return EXPORTED

    async with serving(path, {"export": export}), peer(path) as client:
        await client.call("export", path="/x")
        figures = []
        while "result" not in (message := await client.receive() or {"result": "missing"}):
            figures.append(progress(message)[0])
    # The clock stands still: one message when it began, and the last figures with the answer.
    assert figures[-1] == 10_000
    assert len(figures) <= 2


async def test_figures_are_sent_again_when_a_tenth_of_a_second_has_passed(
    path: str, clock: trio.testing.MockClock
) -> None:
    proceed = [trio.Event(), trio.Event()]

    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        for done, event in enumerate(proceed):
            call.progress_nowait(done, 0, "files")
            await event.wait()
        await trio.sleep_forever()
        raise AssertionError

    async with serving(path, {"export": export}), peer(path) as client:
        await client.call("export", path="/x")
        assert progress(await client.receive())[0] == 0
        proceed[0].set()
        await trio.testing.wait_all_tasks_blocked()
        assert not client.has_something_to_read()
        clock.jump(0.1)
        assert progress(await client.receive())[0] == 1


async def test_a_worker_thread_reports_progress_without_being_held_up(path: str) -> None:
    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        def work() -> None:
            for done in range(100_000):
                call.progress_nowait(done + 1, 100_000, "files")

        await trio.to_thread.run_sync(work)
        return EXPORTED

    async with serving(path, {"export": export}), peer(path) as client:
        await client.call("export", path="/x")
        figures = []
        while "result" not in (message := await client.receive() or {"result": "missing"}):
            figures.append(progress(message)[0])
    assert figures == sorted(set(figures))
    assert figures[-1] == 100_000


async def test_progress_does_not_wait_for_a_client_that_does_not_read(path: str) -> None:
    finished = trio.Event()

    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        await trio.to_thread.run_sync(work, call)
        finished.set()
        return EXPORTED

    def work(call: CallContext) -> None:
        for done in range(10_000):
            call.progress_nowait(done, 0, "files")

    async def diff(params: Any, call: CallContext) -> Empty:
        while True:
            await call.output(bytes(100_000))

    async with serving(path, {"export": export, "diff": diff}), peer(path) as client:
        await client.call("diff", 0)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await client.call("export", path="/x")
        await finished.wait()


@pytest.mark.parametrize("size", [0, 1, 192 * 1024, 3_000_001])
async def test_output_arrives_whole_and_in_order_before_the_answer(path: str, size: int) -> None:
    data = bytes(index % 251 for index in range(size))

    async def from_loop(params: Any, call: CallContext) -> Empty:
        await call.output(data)
        return Empty()

    async def from_thread(params: Any, call: CallContext) -> Empty:
        await trio.to_thread.run_sync(call.output_from_thread, data)
        return Empty()

    async with serving(path, {"check": from_loop, "drop": from_thread}), peer(path) as client:
        for method, params in (("check", {}), ("drop", {"name": "x"})):
            await client.call(method, **params)
            got = b""
            while "result" not in (message := await client.receive() or {"result": "missing"}):
                assert message["method"] == "output"
                got += base64.b64decode(message["params"]["data"])
            assert got == data


async def test_output_waits_for_a_client_that_is_behind(path: str) -> None:
    sent = 0

    async def check(params: Any, call: CallContext) -> Empty:
        nonlocal sent
        for _ in range(1000):
            await call.output(bytes(100_000))
            sent += 1
        return Empty()

    async with serving(path, {"check": check}), peer(path) as client:
        await client.call("check")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert sent < 20  # what the kernel's socket buffer takes, and a line or two
        while "result" not in (await client.receive() or {"result": "missing"}):
            pass
    assert sent == 1000


async def test_a_call_is_cancelled_when_its_client_disconnects(path: str) -> None:
    started, cancelled = trio.Event(), trio.Event()
    seen = []

    async def check(params: Any, call: CallContext) -> Empty:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            seen.append(call.cancelled)
            cancelled.set()
        return Empty()

    async with serving(path, {"check": check}) as server:
        async with peer(path) as client:
            await client.call("check")
            await started.wait()
        await cancelled.wait()
        async with peer(path) as other:
            assert await other.is_alive()
            assert server.connections == 1
    assert seen == [True]


async def test_calls_are_cancelled_although_more_requests_wait_unread(path: str) -> None:
    started, cancelled = trio.Event(), trio.Event()

    async def check(params: Any, call: CallContext) -> Empty:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        return Empty()

    async with serving(path, {"check": check}):
        async with peer(path) as client:
            # More than run at once: the server has stopped reading.
            await client.send(*({"jsonrpc": "2.0", "method": "check", "id": number} for number in range(500)))
            await started.wait()
        await cancelled.wait()


@pytest.mark.parametrize("end", ["client leaves", "server stops"])
async def test_a_thread_sees_that_nobody_waits_any_more(path: str, end: str, caplog: pytest.LogCaptureFixture) -> None:
    started, ended, gone = trio.Event(), trio.Event(), threading.Event()

    async def check(params: Any, call: CallContext) -> Empty:
        def work() -> None:
            trio.from_thread.run_sync(started.set)
            try:
                while True:
                    call.raise_if_cancelled()
            except CallCancelledError:
                gone.set()
                raise

        try:
            await trio.to_thread.run_sync(work)
        finally:
            ended.set()
        return Empty()

    async with serving(path, {"check": check}), peer(path) as client:
        await client.call("check")
        await started.wait()
        if end == "client leaves":
            await client.stream.aclose()
            await ended.wait()
            # Else the end of the block cancels the server while the client is still there.
    assert gone.is_set()
    assert caplog.records == []


@pytest.mark.parametrize("end", ["client leaves", "server stops"])
async def test_a_thread_that_waits_for_its_client_to_read_ends(path: str, end: str) -> None:
    started, ended, errors = trio.Event(), trio.Event(), []

    async def check(params: Any, call: CallContext) -> Empty:
        def work() -> None:
            trio.from_thread.run_sync(started.set)
            try:
                while True:
                    call.output_from_thread(bytes(100_000))
            except BaseException as error:
                errors.append(type(error))
                raise

        try:
            await trio.to_thread.run_sync(work)
        finally:
            ended.set()
        return Empty()

    async with serving(path, {"check": check}), peer(path) as client:
        await client.call("check")
        await started.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        if end == "client leaves":
            await client.stream.aclose()
            await ended.wait()
            # Else the end of the block cancels the server while the client is still there.
    assert errors == [CallCancelledError]


async def test_what_follows_an_answer_happens_when_the_client_has_it(path: str) -> None:
    stopped = trio.Event()

    async def unmount(params: Any, call: CallContext) -> Empty:
        call.after_answer(stopped.set)
        await call.output(b"x")
        assert not stopped.is_set()
        return Empty()

    async with trio.open_nursery() as nursery, serving(path, {"check": unmount}):
        async with peer(path) as client:
            await client.call("check")
            await stopped.wait()
            assert (await client.receive() or {})["method"] == "output"
            assert (await client.receive() or {})["result"] == {}
        nursery.cancel_scope.cancel()


async def test_what_follows_an_answer_happens_also_without_a_client(path: str) -> None:
    stopped, started = trio.Event(), trio.Event()

    async def check(params: Any, call: CallContext) -> Empty:
        call.after_answer(stopped.set)
        started.set()
        await trio.sleep_forever()
        return Empty()

    async with serving(path, {"check": check}):
        async with peer(path) as client:
            await client.call("check")
            await started.wait()
        await stopped.wait()


async def test_a_failing_after_answer_is_logged_and_harms_nobody(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def drop(params: DropParams, call: CallContext) -> Empty:
        call.after_answer(lambda: 1 // 0)
        return await ping(Empty(), call)

    async with serving(path, {"drop": drop}), peer(path) as client:
        await client.call("drop", name="x")
        assert (await client.receive() or {})["result"] == {}
        assert await client.is_alive()
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_outlives_the_loop_is_told_and_its_progress_is_ignored(path: str) -> None:
    calls = []

    async def drop(params: DropParams, call: CallContext) -> Empty:
        calls.append(call)
        return Empty()

    async def main() -> None:
        async with serving(path, {"drop": drop}), peer(path) as client:
            await client.call("drop", name="x")
            await client.receive()

    trio.run(main)
    calls[0].progress_nowait(1, 2, "files")
    with pytest.raises(CallCancelledError):
        calls[0].output_from_thread(b"x")
