"""Clients that break the rules: each loses its own connection at most, and nobody else notices."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import socket
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.rights import needs_root
from tests.unit.vfsd.daemon.control.conftest import Peer, peer, serving
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.control.connection import ConnectionLimits
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import DropParams
from vfsd.wire.messages import INVALID_PARAMS, INVALID_REQUEST, MAX_LISTED, MAX_REQUEST_BYTES, OPERATION_FAILED

CLOSING = {"jsonrpc": "2.0", "method": "closing", "params": {}}
LIMITS = ConnectionLimits(idle_s=600, stall_s=30)


async def assert_others_are_served(path: str) -> None:
    async with peer(path) as other:
        assert await other.is_alive()


async def test_a_line_that_is_too_long_is_refused_and_the_connection_closed(path: str) -> None:
    async with serving(path), peer(path) as client:
        with pytest.raises(trio.BrokenResourceError):
            await client.stream.send_all(bytes(16 * MAX_REQUEST_BYTES))
        error = await client.error()
        assert (error["code"], str(MAX_REQUEST_BYTES) in error["message"]) == (INVALID_REQUEST, True)
        assert await client.receive() is None
        await assert_others_are_served(path)


@pytest.mark.parametrize(("extra", "is_served"), [(0, True), (1, False)])
async def test_a_line_may_be_exactly_as_long_as_the_limit(path: str, extra: int, is_served: bool) -> None:
    request = json.dumps({"jsonrpc": "2.0", "method": "ping", "id": 1}).encode()
    async with serving(path), peer(path) as client:
        await client.send(request.ljust(MAX_REQUEST_BYTES + extra))
        message = await client.receive() or {}
        assert ("result" in message) is is_served


async def test_garbage_gets_errors_and_no_more(path: str) -> None:
    noise = random.Random(1).randbytes(300_000)
    async with serving(path), peer(path) as client:
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                while (message := await client.receive()) is not None:
                    assert "error" in message

            nursery.start_soon(read)
            await client.stream.send_all(noise)
            await client.stream.send_eof()
        await assert_others_are_served(path)


async def test_a_flood_of_blank_lines_is_passed_over(path: str) -> None:
    async with serving(path), peer(path) as client:
        await client.stream.send_all(b"\n" * 200_000 + b" \r\n")
        assert await client.is_alive()


async def test_a_client_that_stops_in_mid_line_is_let_go(path: str, clock: trio.testing.MockClock) -> None:
    async with serving(path, limits=LIMITS) as server, peer(path) as client:
        for _ in range(2):  # a request may take its time
            await client.stream.send_all(b'{"jsonrpc": "2.0",')
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(599)
            await client.stream.send_all(b'"method": "ping", "id": 1}\n')
            assert "result" in (await client.receive() or {})
        await client.stream.send_all(b"{")
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(600)
        assert await client.receive() == CLOSING
        assert await client.receive() is None
        await trio.testing.wait_all_tasks_blocked()
        assert server.connections == 0


async def test_a_client_that_asks_nothing_is_let_go(path: str, clock: trio.testing.MockClock) -> None:
    async with serving(path, limits=LIMITS) as server, peer(path) as client:
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(600)
        assert await client.receive() == CLOSING
        assert await client.receive() is None
        await trio.testing.wait_all_tasks_blocked()
        assert server.connections == 0


async def test_a_client_that_waits_for_a_long_call_is_not_idle(path: str, clock: trio.testing.MockClock) -> None:
    release = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": drop}, limits=LIMITS), peer(path) as client:
        await client.call("drop", name="x")
        for _ in range(10):
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(600)
        release.set()
        assert "result" in (await client.receive() or {})
        assert await client.is_alive()


async def test_a_client_that_never_reads_is_dropped(
    path: str, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = trio.Event()

    async def check(params: Any, call: CallContext) -> Empty:
        try:
            while True:
                await call.output(bytes(100_000))
        finally:
            cancelled.set()

    async with serving(path, {"check": check}, limits=LIMITS) as server, peer(path) as client:
        await client.call("check")
        await trio.testing.wait_all_tasks_blocked()
        await assert_others_are_served(path)
        clock.jump(30)
        await cancelled.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert server.connections == 0
    (record,) = caplog.records
    assert "did not read" in record.getMessage()


async def test_a_client_that_asks_and_never_reads_costs_a_bounded_amount(path: str) -> None:
    async def snapshots(params: Any, call: CallContext) -> Any:
        return {"snapshots": ["x" * 1_000_000]}

    async with serving(path, {"snapshots": snapshots}, limits=LIMITS), peer(path) as client:
        tracemalloc.start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_forever, client)
                await trio.testing.wait_all_tasks_blocked(0.2)
                used, _ = tracemalloc.get_traced_memory()
                await assert_others_are_served(path)
                nursery.cancel_scope.cancel()
        finally:
            tracemalloc.stop()
    assert used < 2 * LIMITS.calls_at_once * 1_000_000


async def send_forever(client: Peer) -> None:
    request = json.dumps({"jsonrpc": "2.0", "method": "snapshots", "id": 1}).encode() + b"\n"
    while True:
        await client.stream.send_all(request * 1000)


async def test_clients_that_vanish_in_mid_line_leave_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(path) as server:
        for text in (b"", b"{", b'{"jsonrpc": "2.0", "method": "ping", "id": 1}', b"x" * 500_000):
            async with peer(path) as client:
                await client.stream.send_all(text)
        await assert_others_are_served(path)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert server.connections == 0
    assert caplog.records == []


async def test_clients_that_vanish_before_their_answer_leave_nothing(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as server:
        for _ in range(50):
            async with peer(path) as client:
                for number in range(20):
                    await client.call("ping", number)
        await assert_others_are_served(path)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert server.connections == 0
    assert caplog.records == []


async def test_a_hundred_clients_at_once_are_all_served(path: str) -> None:
    waiting, all_here = 0, trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        nonlocal waiting
        waiting += 1
        if waiting == 100:
            all_here.set()
        await all_here.wait()  # answered only when all hundred are being served
        return Empty()

    async def use() -> None:
        async with peer(path) as client:
            await client.call("drop", name="x")
            assert "result" in (await client.receive() or {})
            for _ in range(10):
                assert await client.is_alive()

    async with serving(path, {"drop": drop}), trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(use)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Both ends of a thousand connections are this process's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_thousand_idle_connections_lock_nobody_out(
    path: str, many_descriptors: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Some have half a request; the oldest are dropped, and learn that what they ask now is not run."""
    async with serving(path, limits=ConnectionLimits(connections=50)) as server:
        clients = []
        for number in range(1000):
            clients.append(client := Peer(await trio.open_unix_socket(path)))
            if number % 3 == 0:
                await client.stream.send_all(b'{"jsonrpc": "2.0", "method": ')
            if number % 50 == 0:
                await assert_others_are_served(path)
        for client in clients[:900]:
            assert await client.receive() == CLOSING
            assert await client.receive() is None
            await client.stream.aclose()
        assert server.connections <= 51
        await assert_others_are_served(path)
        for client in clients[900:]:
            await client.stream.aclose()
        while server.connections:
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert caplog.records == []


async def test_connections_that_run_calls_are_kept_and_one_more_is_refused_until_one_is_idle(path: str) -> None:
    release = trio.Event()

    async def wait(params: Any, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": wait}, limits=ConnectionLimits(connections=5)) as server:
        clients = [Peer(await trio.open_unix_socket(path)) for _ in range(5)]
        for client in clients:
            await client.call("drop", name="x")
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(10):
            async with peer(path) as refused:
                error = await refused.error()
                assert (error["code"], error["data"]["errno"]) == (OPERATION_FAILED, "EBUSY")
                assert "all 5 connections" in error["message"]
        assert server.connections == 5
        release.set()
        for client in clients:
            assert (await client.receive() or {})["result"] == {}
        await assert_others_are_served(path)
        for client in clients:
            await client.stream.aclose()


async def test_calls_that_never_end_leave_connections_for_others(path: str) -> None:
    async def follow(params: Any, call: CallContext) -> Empty:
        await trio.sleep_forever()
        raise AssertionError

    async with serving(path, {"watch": follow}, limits=ConnectionLimits(connections=5, followed_calls=4)):
        followers = [Peer(await trio.open_unix_socket(path)) for _ in range(4)]
        for client in followers:
            await client.call("watch")
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with peer(path) as refused:
            await refused.call("watch")
            error = await refused.error()
            assert (error["code"], error["data"]["errno"]) == (OPERATION_FAILED, "EBUSY")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await assert_others_are_served(path)
        await followers.pop().stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        followers.append(Peer(await trio.open_unix_socket(path)))
        await followers[-1].call("watch")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await assert_others_are_served(path)
        for client in followers:
            await client.stream.aclose()


async def test_without_free_descriptors_calls_are_answered(path: str) -> None:
    async def read(params: Any, call: CallContext) -> Empty:
        with open(os.devnull, "rb"):
            return Empty()

    async with serving(path, {"check": read}):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        highest = max(client.fileno() for client in clients)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        held = []
        answers = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for client in clients:
                client.connect(path)
                client.sendall(b'{"jsonrpc": "2.0", "method": "check", "id": 1}\n')
                client.setblocking(False)
                asked = trio.socket.from_stdlib_socket(client)
                with trio.fail_after(30):
                    answers.append(json.loads(await asked.recv(4096)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        assert [answer.get("result", answer) for answer in answers] == [{}] * 40
        await assert_others_are_served(path)
        for client in clients:
            client.close()


async def test_a_call_that_finds_no_descriptor_says_so_and_names_the_limit(path: str) -> None:
    async def read(params: Any, call: CallContext) -> Empty:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/some/file")

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(path, {"check": read}), peer(path) as client:
        await client.call("check")
        error = await client.error()
        assert error["data"] == {"errno": "EMFILE", "path": "/some/file"}
        assert f"may have {soft:,} files open" in error["message"]


async def test_a_thread_that_cannot_be_started_is_an_error(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def read(params: Any, call: CallContext) -> Empty:
        raise RuntimeError("can't start new thread")  # as threading.Thread.start does

    async with serving(path, {"check": read}), peer(path) as client:
        await client.call("check")
        error = await client.error()
        assert (error["data"]["errno"], "ulimit -u" in error["message"]) == ("EAGAIN", True)
    assert caplog.records == []


STRANGER = """
import contextlib, os, socket, sys
sock = socket.socket(socket.AF_UNIX)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock.connect("s")
with contextlib.suppress(OSError):  # refused before it could ask
    sock.sendall(b'{"jsonrpc": "2.0", "method": "ping", "id": 1}\\n')
    sock.shutdown(socket.SHUT_WR)
data = b""
with contextlib.suppress(ConnectionResetError):  # closed with our request unread
    while piece := sock.recv(65536):
        data += piece
sys.stdout.buffer.write(data)
"""


@needs_root
@pytest.mark.parametrize("is_allowed", [False, True])
async def test_another_user_is_refused_by_uid(
    workdir: Path, is_allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(workdir / "s")
    called = trio.Event()

    async def ping(params: Any, call: CallContext) -> Empty:
        called.set()
        return Empty()

    allowed = frozenset({0, 65534}) if is_allowed else None
    async with serving(path, {"ping": ping}, allowed_uids=allowed):
        # The uid alone is to stop it.
        os.chmod(path, 0o666)
        os.chmod(workdir, 0o755)
        result = await trio.run_process([sys.executable, "-c", STRANGER], capture_stdout=True, cwd=workdir)
    (answer,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert called.is_set() is is_allowed
    assert ("result" in answer) is is_allowed
    if not is_allowed:
        assert answer["id"] is None
        assert answer["error"]["data"]["errno"] == "EACCES"
        assert "65534" in answer["error"]["message"]
        assert "65534" in caplog.text


async def test_a_request_may_list_only_so_much_and_the_error_says_how_much(path: str) -> None:
    async def drop(params: DropParams, call: CallContext) -> Empty:
        return Empty()

    async with serving(path, {"drop": drop}), peer(path) as client:
        await client.call("drop", 7, name="x", also=["a"] * MAX_LISTED)
        assert "result" in (await client.receive() or {})
        await client.call("drop", 8, name="x", also=["a"] * (MAX_LISTED + 1))
        error = await client.error()
        assert error["code"] == INVALID_PARAMS
        assert f"`also` has {MAX_LISTED + 1:,} elements, at most {MAX_LISTED:,} are allowed" in error["message"]
        assert await client.is_alive()


async def test_large_requests_have_a_number_of_places_and_small_ones_always_find_room(path: str) -> None:
    started, release = trio.Event(), trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        started.set()
        await release.wait()
        return Empty()

    large = "x" * 400_000
    limits = ConnectionLimits(large_calls=1, stall_s=0.2)
    async with serving(path, {"drop": drop}, limits=limits), peer(path) as first:
        await first.call("drop", 1, name=large)
        await started.wait()
        async with peer(path) as second:
            with contextlib.suppress(trio.BrokenResourceError):  # refused before it was all sent
                await second.call("drop", 2, name=large)
            error = await second.error()
            assert (error["code"], error["data"]["errno"]) == (OPERATION_FAILED, "EBUSY")
        await assert_others_are_served(path)
        async with peer(path) as waiting:
            release.set()
            await waiting.call("drop", 3, name=large)
            assert "result" in (await waiting.receive() or {})
        assert "result" in (await first.receive() or {})


@pytest.mark.parametrize("ending", ["in mid-line", "in mid-call"])
async def test_a_place_for_a_large_request_is_given_back_however_its_connection_ends(path: str, ending: str) -> None:
    started = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        if params.name.startswith("wait"):
            started.set()
            await trio.sleep_forever()
        return Empty()

    async with serving(path, {"drop": drop}, limits=ConnectionLimits(large_calls=1)) as server:
        for _ in range(3):
            async with peer(path) as client:
                if ending == "in mid-line":
                    await client.stream.send_all(b"x" * 400_000)
                    await trio.testing.wait_all_tasks_blocked()
                else:
                    await client.call("drop", name="wait".ljust(400_000))
                    await started.wait()
            while server.connections:
                await trio.sleep(0.01)
        async with peer(path) as client:
            await client.call("drop", 1, name="x" * 400_000)
            assert "result" in (await client.receive() or {})
