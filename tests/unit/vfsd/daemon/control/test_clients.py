"""The clients, blocking and async, against a real server: one suite; the async one runs on asyncio and on trio."""

from __future__ import annotations

import errno
import json
import pickle
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from protocol.types import ChangeCounts
from tests.support.suites import one_of
from tests.unit.vfsd.daemon.control.conftest import serving
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.connection import ControlClient, ControlError
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.control.connection import ConnectionLimits
from vfsd.operations.declaration import ChangeRecord, Empty
from vfsd.operations.snapshots import DiffParams, DiffResult, DropParams, DropResult, ExportParams, ExportResult
from vfsd.wire.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    OPERATION_FAILED,
    InvalidParamsError,
    ProgressReport,
)


class BlockingSubject:
    """`ControlClient` in a worker thread, so that the server's loop goes on."""

    def __init__(self, path: str, timeout_s: float | None = None) -> None:
        self._client = ControlClient(path, timeout_s=timeout_s)

    async def call(self, method: str, params: Any = None, **callbacks: Any) -> Any:
        return await trio.to_thread.run_sync(partial(self._client.call, method, params, **callbacks))

    def close(self) -> None:
        self._client.close()


class TrioSubject(AsyncControlClient):
    """Has no connection between its calls."""

    def close(self) -> None:
        pass


class AsyncioSubject:
    """`AsyncControlClient` on an asyncio loop of its own, in a worker thread."""

    def __init__(self, path: str, timeout_s: float | None = None) -> None:
        self._client = AsyncControlClient(path, timeout_s=timeout_s)

    async def call(self, method: str, params: Any = None, **callbacks: Any) -> Any:
        call = partial(self._client.call, method, params, **callbacks)
        return await trio.to_thread.run_sync(partial(anyio.run, call, backend="asyncio"))

    def close(self) -> None:
        pass


Subject = type[BlockingSubject] | type[TrioSubject] | type[AsyncioSubject]


subject = one_of([BlockingSubject, TrioSubject, AsyncioSubject], ids=["blocking", "trio", "asyncio"])


async def test_a_call_gives_the_typed_result(path: str, subject: Subject) -> None:
    async def export(params: ExportParams, call: CallContext) -> ExportResult:
        return ExportResult(params.path, 1, 2, 3)

    async with serving(path, {"export": export}):
        client = subject(path)
        assert await client.call("export", ExportParams("/x")) == ExportResult("/x", 1, 2, 3)
        assert await client.call("ping") == Empty()
        client.close()


async def test_progress_and_output_reach_their_callbacks_in_order(path: str, subject: Subject) -> None:
    async def diff(params: DiffParams, call: CallContext) -> DiffResult:
        for piece in range(10):
            await call.output(bytes([piece]) * 300_000)
        call.progress_nowait(10, 10, "files")
        await trio.lowlevel.checkpoint()
        return DiffResult("a", None, ChangeCounts(), [])

    pieces: list[bytes] = []
    told: list[ProgressReport] = []
    async with serving(path, {"diff": diff}):
        client = subject(path)
        await client.call("diff", DiffParams(mode="patch"), on_output=pieces.append, on_progress=told.append)
        # Without callbacks the same goes by unseen.
        await client.call("diff", DiffParams(mode="patch"))
        client.close()
    assert b"".join(pieces) == b"".join(bytes([piece]) * 300_000 for piece in range(10))
    assert [(progress.done, progress.total, progress.unit) for progress in told] == [(10, 10, "files")]


async def test_a_result_of_any_size_arrives(path: str, subject: Subject) -> None:
    changes = [ChangeRecord(f"directory/file-{number}", "added", "file") for number in range(50_000)]

    async def diff(params: DiffParams, call: CallContext) -> DiffResult:
        return DiffResult("a", None, ChangeCounts(), changes)

    async with serving(path, {"diff": diff}):
        client = subject(path)
        assert (await client.call("diff")).changes == changes
        client.close()


@pytest.mark.parametrize(
    ("number", "builtin"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EEXIST, FileExistsError),
        (errno.EACCES, PermissionError),
        (errno.ENOTDIR, NotADirectoryError),
        (errno.EISDIR, IsADirectoryError),
        (errno.ENOSPC, OSError),
        (errno.EOPNOTSUPP, OSError),
    ],
)
async def test_an_error_is_of_the_class_python_has_for_its_errno(
    path: str, subject: Subject, number: int, builtin: type[OSError]
) -> None:
    async def drop(params: DropParams, call: CallContext) -> Empty:
        raise OSError(number, "it failed", b"na\xffme")

    async with serving(path, {"drop": drop}):
        client = subject(path)
        with pytest.raises(builtin) as caught:
            await client.call("drop", DropParams("x"))
        assert await client.call("ping") == Empty()
        client.close()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, builtin)
        assert isinstance(error, ControlError)
        assert (error.code, error.errno, error.filename) == (OPERATION_FAILED, number, "na\udcffme")
        assert str(error) == "it failed: na\\xffme"


async def test_an_error_without_errno_keeps_its_code_and_text(path: str, subject: Subject) -> None:
    async with serving(path):
        client = subject(path)
        with pytest.raises(ControlError, match=r"^no such method: status$") as caught:
            await client.call("status")
        client.close()
    assert (caught.value.code, caught.value.errno, caught.value.filename) == (METHOD_NOT_FOUND, None, None)


async def test_a_refused_argument_is_a_value_error(path: str, subject: Subject) -> None:
    async def reject(params: DropParams, call: CallContext) -> Empty:
        raise InvalidParamsError("no such thing")

    async with serving(path, {"drop": reject}):
        client = subject(path)
        with pytest.raises(ValueError, match=r"^drop: no such thing$") as caught:
            await client.call("drop", DropParams("x"))
        client.close()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, ControlError)
        assert isinstance(error, ValueError)
        assert (error.code, error.errno, error.filename) == (INVALID_PARAMS, errno.EINVAL, None)
        assert str(error) == "drop: no such thing"


async def test_an_answer_of_another_version_is_a_clear_error(path: str, subject: Subject) -> None:
    async def export(params: ExportParams, call: CallContext) -> Empty:
        return Empty()

    async with serving(path, {"export": export}):
        client = subject(path)
        with pytest.raises(ControlError, match=r"another version.*path") as caught:
            await client.call("export", ExportParams("/x"))
        client.close()
    assert caught.value.code == INTERNAL_ERROR


async def test_no_daemon_is_a_clear_error(path: str, subject: Subject) -> None:
    with pytest.raises(ConnectionRefusedError, match=f"no daemon answers at {path}: it is not running"):
        await subject(path).call("ping")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(ConnectionRefusedError, match=f"no daemon answers at {path}: it is not running"):
        await subject(path).call("ping")


async def test_a_daemon_that_goes_away_in_mid_call_is_a_clear_error(path: str, subject: Subject) -> None:
    started = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        started.set()
        await trio.sleep_forever()
        raise AssertionError

    client = subject(path)
    caught = []

    async def use() -> None:
        with pytest.raises(ConnectionError, match="went away before it answered 'drop'") as error:
            await client.call("drop", DropParams("x"))
        caught.append(error.value)

    async with trio.open_nursery() as nursery, serving(path, {"drop": drop}):
        nursery.start_soon(use)
        await started.wait()
    client.close()
    assert len(caught) == 1


async def test_a_client_outlives_the_daemon_it_was_connected_to(path: str, subject: Subject) -> None:
    client = subject(path)
    for _ in range(3):
        async with serving(path):
            assert await client.call("ping") == Empty()
    client.close()


async def test_a_refused_connection_says_why_and_the_next_call_connects_anew(path: str, subject: Subject) -> None:
    release = trio.Event()

    async def wait(params: DropParams, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": wait}, limits=ConnectionLimits(connections=1)) as server:
        first, second = subject(path), subject(path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.call, "drop", DropParams("x"))
            while not server.connections:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.01)
            with pytest.raises(ControlError, match=r"all 1 connections.*in use") as caught:
                # Larger than the socket's buffer: it cannot be sent whole to a server that has closed.
                await second.call("drop", DropParams("x" * 900_000))
            assert caught.value.errno == errno.EBUSY
            release.set()
        first.close()
        while server.connections:
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert await second.call("ping") == Empty()
        second.close()


async def test_a_client_whose_idle_connection_was_dropped_calls_once_more_without_noticing(
    path: str, subject: Subject
) -> None:
    calls: list[str] = []

    async def drop(params: DropParams, call: CallContext) -> Empty:
        calls.append(params.name)
        return Empty()

    async with serving(path, {"drop": drop}, limits=ConnectionLimits(connections=2)) as server:
        clients = [subject(path) for _ in range(4)]
        for number in range(3):
            for index, client in enumerate(clients):
                await client.call("drop", DropParams(f"{number}/{index}"))
                assert server.connections <= 3  # one of them may be closing
        for client in clients:
            client.close()
    assert calls == [f"{number}/{index}" for number in range(3) for index in range(4)]


async def test_a_request_that_crosses_the_closing_of_an_idle_connection_is_sent_again(
    workdir: Path, subject: Subject
) -> None:
    """The server of this test says that it closes only after it has the request, which a drop in time can look like."""
    received = []

    async def serve(listener: trio.SocketListener) -> None:
        for answer in (b'"method":"closing","params":{}', b'"id":%d,"result":{}'):
            stream = await listener.accept()
            line = await stream.receive_some()
            received.append(json.loads(line)["method"])
            answered = answer % json.loads(line)["id"] if b"%d" in answer else answer
            await stream.send_all(b'{"jsonrpc":"2.0",' + answered + b"}\n")
            await stream.aclose()

    path = str(workdir / "fake.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
        bound.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, trio.SocketListener(trio.socket.from_stdlib_socket(bound)))
            client = subject(path)
            assert await client.call("ping") == Empty()
            client.close()
    assert received == ["ping", "ping"]


async def test_silence_ends_a_call_after_the_timeout(path: str, subject: Subject) -> None:
    started, cancelled = trio.Event(), trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with serving(path, {"drop": drop}):
        while not started.is_set():  # the time may be over before the server begins
            client = subject(path, timeout_s=0.05)
            with pytest.raises(TimeoutError, match=r"no answer to 'drop' .* for 0.05 s"):
                await client.call("drop", DropParams("x"))
            client.close()
        await cancelled.wait()


async def test_leaving_a_call_by_an_exception_cancels_it_and_the_client_goes_on(path: str, subject: Subject) -> None:
    cancelled = trio.Event()

    async def diff(params: DiffParams, call: CallContext) -> DiffResult:
        try:
            while True:
                await call.output(b"piece")
        finally:
            cancelled.set()

    def stop(piece: bytes) -> None:
        raise BrokenPipeError("nobody reads the patch")

    async with serving(path, {"diff": diff}):
        client = subject(path)
        with pytest.raises(BrokenPipeError, match="nobody reads"):
            await client.call("diff", on_output=stop)
        await cancelled.wait()
        assert await client.call("ping") == Empty()
        client.close()


async def test_a_wrong_call_is_the_callers_error_and_sends_nothing(path: str, subject: Subject) -> None:
    client = subject(path)
    with pytest.raises(ValueError, match="no such method: 'nonsense'"):
        await client.call("nonsense")
    with pytest.raises(TypeError, match="drop takes DropParams, not ExportParams"):
        await client.call("drop", ExportParams("/x"))


async def test_a_path_longer_than_a_socket_address_is_no_obstacle(
    path: str, subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("d") / ("x" * 120)
    directory.mkdir()
    async with serving(f"{directory}/x.sock"):
        client = subject(f"{directory}/x.sock")
        assert await client.call("ping") == Empty()
        client.close()
    assert list(directory.iterdir()) == []


async def test_the_trio_client_runs_calls_side_by_side(path: str) -> None:
    both = trio.Event()
    here = 0

    async def drop(params: DropParams, call: CallContext) -> Empty:
        nonlocal here
        here += 1
        if here == 20:
            both.set()
        await both.wait()
        return Empty()

    client = AsyncControlClient(path)
    async with serving(path, {"drop": drop}), trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(client.call, "drop", DropParams("x"))


async def test_cancelling_one_call_of_the_trio_client_leaves_the_others(path: str) -> None:
    started, cancelled, release = trio.Event(), trio.Event(), trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        if params.name == "stays":
            await release.wait()
            return Empty()
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    results = []

    async def stay(client: AsyncControlClient) -> None:
        results.append(await client.call("drop", DropParams("stays")))

    client = AsyncControlClient(path)
    async with serving(path, {"drop": drop}), trio.open_nursery() as nursery:
        nursery.start_soon(stay, client)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(client.call, "drop", DropParams("goes"))
                await started.wait()
                scope.cancel()
        await cancelled.wait()
        release.set()
    assert results == [DropResult()]


async def test_the_trio_client_awaits_callbacks_that_want_it(path: str) -> None:
    async def diff(params: DiffParams, call: CallContext) -> DiffResult:
        await call.output(b"piece")
        return DiffResult("a", None, ChangeCounts(), [])

    pieces = []

    async def keep(piece: bytes) -> None:
        await trio.lowlevel.checkpoint()
        pieces.append(piece)

    client = AsyncControlClient(path)
    async with serving(path, {"diff": diff}):
        await client.call("diff", on_output=keep)
    assert pieces == [b"piece"]


def test_the_blocking_client_loads_no_loop() -> None:
    code = (
        "import sys, vfsd.client.workspace, vfsd.machine.runtime; sys.exit(bool({'trio', 'anyio'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
