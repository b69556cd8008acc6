"""Cancelling a call: by request, by Ctrl-C and by SIGTERM; the answer says what became of the work, and is true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import trio
import trio.testing

from protocol.types import ChangeCounts
from tests.support.suites import one_of
from tests.unit.vfsd.daemon.control.conftest import peer, serving
from vfsd.client.connection import ControlClient
from vfsd.daemon.control.calls import CallContext, Handler
from vfsd.machine.runtime import (
    WorkspaceRecord,
    ensure_socket_dir,
    process_start_ticks,
    remove_record,
    socket_path,
    write_record,
)
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import DiffParams, DropParams, RestoreParams, RestoreResult

RESTORED = RestoreResult("s", "safety-1", ChangeCounts(), [])


class Restore:
    """A restore that waits before it commits to a change, or after that, as a thread or on the loop."""

    def __init__(self, *, in_thread: bool, commits: bool) -> None:
        self.is_running = trio.Event()
        self.go_on = trio.Event()
        self.is_changed = False
        self._in_thread = in_thread
        self._commits = commits

    async def __call__(self, params: RestoreParams, call: CallContext) -> RestoreResult:
        if self._commits:
            call.commit()
        self.is_running.set()
        if self._in_thread:
            await trio.to_thread.run_sync(self._wait, call)
        else:
            await self.go_on.wait()
        if not self._commits:
            call.commit()
        self.is_changed = True
        await trio.lowlevel.checkpoint()
        return RESTORED

    def _wait(self, call: CallContext) -> None:
        while not trio.from_thread.run_sync(self.go_on.is_set):
            if not self._commits:
                call.raise_if_cancelled()


in_thread = one_of([False, True], ids=["loop", "thread"])


async def test_a_call_that_has_changed_nothing_stops_and_says_so(path: str, in_thread: bool) -> None:
    restore = Restore(in_thread=in_thread, commits=False)
    async with serving(path, {"restore": restore}), peer(path) as client:
        await client.call("restore", 7, source={"type": "snapshot", "name": "s"})
        await restore.is_running.wait()
        await client.call("cancel", 8, id=7)
        answers = [await client.receive() or {}, await client.receive() or {}]
        by_id = {answer["id"]: answer for answer in answers}
        assert by_id[8]["result"] == {"state": "stopping"}
        assert by_id[7]["error"]["data"] == {"errno": "ECANCELED"}
        assert by_id[7]["error"]["message"] == "restore was cancelled: nothing was changed"
        assert not restore.is_changed
        assert await client.is_alive()


async def test_a_call_that_has_begun_to_change_something_is_completed(path: str, in_thread: bool) -> None:
    restore = Restore(in_thread=in_thread, commits=True)
    async with serving(path, {"restore": restore}), peer(path) as client:
        await client.call("restore", 7, source={"type": "snapshot", "name": "s"})
        await restore.is_running.wait()
        await client.call("cancel", 8, id=7)
        assert (await client.receive() or {})["result"] == {"state": "finishing"}
        restore.go_on.set()
        assert (await client.receive() or {})["result"]["safety_snapshot"] == "safety-1"
        assert restore.is_changed


async def test_other_calls_and_unknown_ones_are_left_alone(path: str) -> None:
    release = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": drop}), peer(path) as client, peer(path) as other:
        for one in (client, other):
            await one.call("drop", 7, name="x")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await client.call("cancel", 8, id=6)
        assert (await client.receive() or {})["result"] == {"state": "unknown"}
        await client.call("cancel", 9, id=7)
        await client.receive()
        await client.receive()
        await client.call("cancel", 10, nonsense=1)
        assert (await client.error())["code"] == -32602
        release.set()
        assert (await other.receive() or {})["result"] == {}


async def test_a_connection_whose_calls_are_all_in_use_still_takes_a_cancel(path: str) -> None:
    async def drop(params: DropParams, call: CallContext) -> Empty:
        await trio.sleep_forever()
        raise AssertionError

    async with serving(path, {"drop": drop}), peer(path) as client:
        for number in range(8):
            await client.call("drop", number, name="x")
        await client.call("cancel", "c", id=3)
        answers = [await client.receive() or {}, await client.receive() or {}]
        assert {answer["id"] for answer in answers} == {"c", 3}


# -- the command line ----------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def workspace(name: str, methods: Mapping[str, Handler]) -> AsyncIterator[None]:
    """What `vfsd -w name` takes for a workspace, served here."""
    ensure_socket_dir()
    pid = os.getpid()
    record = WorkspaceRecord(
        name=name,
        mountpoint="/nowhere",
        pid=pid,
        pid_start_ticks=process_start_ticks(pid) or 0,
        backend="memory",
        started_at="2026-01-01T00:00:00+00:00",
        version="0.1.0",
        socket=socket_path(name),
    )
    async with serving(record.socket, methods):
        write_record(record)
        try:
            yield
        finally:
            remove_record(record)


class Cli:
    """A `vfsd` that was started; `ended` waits for it."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def said(self, text: str) -> None:
        """Wait until standard error has `text`."""
        assert self._process.stderr is not None
        seen = b""
        while text.encode() not in seen:
            piece = await self._process.stderr.receive_some()
            assert piece, f"it ended: {seen!r}"
            seen += piece

    async def ended(self) -> tuple[int, str, str]:
        """The exit status, standard output, and what is left of standard error."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out = b"".join([piece async for piece in self._process.stdout])
        err = b"".join([piece async for piece in self._process.stderr])
        return await self._process.wait(), out.decode(), err.decode()


@contextlib.asynccontextmanager
async def vfsd(*words: str) -> AsyncIterator[Cli]:
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    async with trio.open_nursery() as nursery:
        run = trio.run_process
        process = await nursery.start(
            lambda task_status: run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                capture_stdout=False,
                check=False,
                task_status=task_status,
            )
        )
        yield Cli(process)


STOPPED = {
    ("restore", "s"): "stopped: nothing was changed",
    ("snapshot",): "stopped: no snapshot was taken",
    ("export", "/x.zip"): "stopped: no file was written",
    ("import", "/x.zip"): "stopped: nothing was changed",
    ("apply",): "stopped: nothing was written",
    ("discard",): "stopped: nothing was changed",
    ("drop", "s"): "stopped: the snapshot is still there",
}


@pytest.mark.parametrize("words", STOPPED, ids=lambda words: words[0])
async def test_control_c_stops_a_command_that_has_changed_nothing(words: tuple[str, ...]) -> None:
    is_running = trio.Event()

    async def wait(params: Any, call: CallContext) -> Empty:
        is_running.set()
        await trio.sleep_forever()
        raise AssertionError

    method = "restore" if words[0] == "discard" else words[0]
    async with workspace("demo", {method: wait}), vfsd(*words, "-w", "demo") as command:
        await is_running.wait()
        command.signal(signal.SIGINT)
        assert await command.ended() == (130, "", f"vfsd: error: {STOPPED[words]}\n")


@pytest.mark.extended
async def test_after_control_c_a_command_ends_although_what_it_waits_for_hangs() -> None:
    is_running, release = threading.Event(), threading.Event()

    async def wait(params: Any, call: CallContext) -> Empty:
        await trio.to_thread.run_sync(hang)
        raise AssertionError

    def hang() -> None:
        is_running.set()
        release.wait()

    async with workspace("demo", {"snapshot": wait}), vfsd("snapshot", "-w", "demo") as command:
        try:
            await trio.to_thread.run_sync(is_running.wait)
            command.signal(signal.SIGINT)
            await command.said("waiting for the daemon to stop the snapshot; press Ctrl-C again to leave at once")
            status, _, err = await command.ended()
        finally:
            release.set()
    assert status == 130
    assert "the daemon was asked to stop the snapshot: no snapshot was taken, unless it was complete before" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_with_json_the_document_says_that_nothing_was_changed(number: int, status: int) -> None:
    restore = Restore(in_thread=True, commits=False)
    async with workspace("demo", {"restore": restore}), vfsd("restore", "s", "-w", "demo", "--json") as command:
        await restore.is_running.wait()
        command.signal(number)
        ended, out, _ = await command.ended()
    assert ended == status
    assert json.loads(out)["error"] == {"message": "stopped: nothing was changed", "errno": "ECANCELED", "path": None}


async def test_a_command_that_was_too_late_to_stop_shows_its_answer_and_says_so() -> None:
    restore = Restore(in_thread=True, commits=True)
    async with workspace("demo", {"restore": restore}), vfsd("restore", "s", "-w", "demo") as command:
        await restore.is_running.wait()
        command.signal(signal.SIGINT)
        await command.said("the restore has begun and will be completed; press Ctrl-C again")
        restore.go_on.set()
        status, out, err = await command.ended()
    assert (status, "restored s" in out, "safety-1" in out) == (130, True, True)
    assert "it was too late to stop: the restore is complete; `vfsd restore --undo` takes it back" in err


async def test_a_second_control_c_leaves_and_the_daemon_goes_on() -> None:
    restore = Restore(in_thread=True, commits=True)
    async with workspace("demo", {"restore": restore}), vfsd("restore", "s", "-w", "demo", "--json") as command:
        await restore.is_running.wait()
        command.signal(signal.SIGINT)
        await command.said("has begun")
        command.signal(signal.SIGINT)
        status, out, _ = await command.ended()
        assert not restore.is_changed
        restore.go_on.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
    error = json.loads(out)["error"]
    assert (status, error["errno"]) == (130, "EINTR")
    assert "the daemon completes the restore in the background" in error["message"]


async def test_a_failure_after_control_c_is_reported_as_one() -> None:
    is_running, go_on = trio.Event(), trio.Event()

    async def restore(params: RestoreParams, call: CallContext) -> RestoreResult:
        call.commit()
        is_running.set()
        await go_on.wait()
        raise OSError(28, "No space left on device")

    async with workspace("demo", {"restore": restore}), vfsd("restore", "s", "-w", "demo") as command:
        await is_running.wait()
        command.signal(signal.SIGINT)
        await command.said("has begun")
        go_on.set()
        status, _, err = await command.ended()
    assert (status, err) == (1, "vfsd: error: No space left on device\n")


async def test_what_only_reads_ends_at_once(path: str) -> None:
    is_running, has_ended = trio.Event(), trio.Event()

    async def diff(params: DiffParams, call: CallContext) -> Empty:
        is_running.set()
        try:
            await trio.sleep_forever()
        finally:
            has_ended.set()
        raise AssertionError

    async with workspace("demo", {"diff": diff}), vfsd("diff", "-w", "demo") as command:
        await is_running.wait()
        command.signal(signal.SIGINT)
        assert await command.ended() == (130, "", "vfsd: error: interrupted\n")
        await has_ended.wait()


async def test_a_client_that_a_keyboard_interrupt_left_makes_further_calls(path: str) -> None:
    async def drop(params: DropParams, call: CallContext) -> Empty:
        call.progress_nowait(1, 2, "files")
        await trio.lowlevel.checkpoint()
        await trio.sleep_forever()
        raise AssertionError

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def use(call: Callable[..., Any]) -> None:
        with pytest.raises(KeyboardInterrupt):
            call("drop", DropParams("x"), on_progress=interrupt)
        assert call("ping") == Empty()

    async with serving(path, {"drop": drop}):
        client = ControlClient(path)
        await trio.to_thread.run_sync(use, client.call)
        client.close()
