from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from typing import Any

import pytest
import trio
import trio.testing

from tests.unit.vfsd.daemon.control.conftest import peer, serving
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.control.connection import ConnectionLimits
from vfsd.operations.declaration import Empty
from vfsd.operations.snapshots import DropParams
from vfsd.wire.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    OPERATION_FAILED,
    PARSE_ERROR,
    InvalidParamsError,
)


def failing(error: BaseException) -> Any:
    async def handler(params: Any, call: CallContext) -> Empty:
        raise error

    return handler


async def test_a_request_is_answered_with_its_id(path: str) -> None:
    async with serving(path), peer(path) as client:
        for request_id in (7, "seven", None, 2**70):
            await client.call("ping", request_id)
            assert await client.receive() == {"jsonrpc": "2.0", "id": request_id, "result": {}}


async def test_parameters_arrive_typed_and_may_be_left_out(path: str) -> None:
    seen = []

    async def drop(params: DropParams, call: CallContext) -> Empty:
        seen.append(params)
        return Empty()

    async with serving(path, {"drop": drop}), peer(path) as client:
        await client.call("drop", name="snap-1")
        await client.receive()
        await client.send({"jsonrpc": "2.0", "method": "ping", "id": 2})
        assert await client.receive() == {"jsonrpc": "2.0", "id": 2, "result": {}}
    assert seen == [DropParams("snap-1")]


async def test_answers_come_in_the_order_of_completion(path: str) -> None:
    release = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": drop}), peer(path) as client:
        await client.call("drop", "slow", name="x")
        await client.call("ping", "quick")
        assert (await client.receive() or {})["id"] == "quick"
        release.set()
        assert (await client.receive() or {})["id"] == "slow"


async def test_a_connection_runs_no_more_calls_at_once_than_its_limit(path: str) -> None:
    running, most, release = 0, 0, trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return Empty()

    async with serving(path, {"drop": drop}, limits=ConnectionLimits(calls_at_once=3)), peer(path) as client:
        for number in range(20):
            await client.call("drop", number, name="x")
        async with peer(path) as other:
            assert await other.is_alive()
        await trio.testing.wait_all_tasks_blocked()
        release.set()
        answered = {(await client.receive() or {})["id"] for _ in range(20)}
    assert (answered, most) == (set(range(20)), 3)


async def test_a_client_that_only_closed_its_writing_side_gets_all_answers(path: str) -> None:
    release = trio.Event()

    async def drop(params: DropParams, call: CallContext) -> Empty:
        await release.wait()
        return Empty()

    async with serving(path, {"drop": drop}), peer(path) as client:
        await client.call("drop", 1, name="x")
        await client.stream.send_eof()
        await trio.testing.wait_all_tasks_blocked()
        release.set()
        assert await client.receive() == {"jsonrpc": "2.0", "id": 1, "result": {}}
        assert await client.receive() is None


async def test_the_last_request_needs_no_newline(path: str) -> None:
    async with serving(path), peer(path) as client:
        await client.stream.send_all(b'{"jsonrpc":"2.0","method":"ping","id":1}')
        await client.stream.send_eof()
        assert await client.receive() == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"{",
        b'{"jsonrpc": "2.0", "method": "ping", "id": 1',
        b'{"jsonrpc": "2.0", "method": "ping", "id": 1} {}',
        b'{"jsonrpc": 1, "method": garbage',
        b"\x00\xff\xfe",
        b'"\xff"',
        b'{"jsonrpc":"2.0","method":"ping","params":' + b"[" * 500_000,
        b"[" * 500_000,
    ],
)
async def test_what_is_not_json_is_a_parse_error_and_the_next_line_is_served(path: str, line: bytes) -> None:
    async with serving(path), peer(path) as client:
        await client.send(line)
        message = await client.receive()
        assert message is not None
        assert (message["id"], message["error"]["code"]) == (None, PARSE_ERROR)
        assert await client.is_alive()


@pytest.mark.parametrize(
    ("value", "request_id"),
    [
        (1, None),
        ("ping", None),
        (None, None),
        ({}, None),
        ({"jsonrpc": "1.0", "method": "ping", "id": 4}, 4),
        ({"jsonrpc": "2.0", "method": 5, "id": "five"}, "five"),
        ({"jsonrpc": "2.0", "id": 6}, 6),
        ({"jsonrpc": "2.0", "method": "ping", "id": {}}, None),
        ({"jsonrpc": "2.0", "method": "ping", "id": True}, None),
        ({"jsonrpc": "2.0", "method": "ping", "id": 1.5}, None),
    ],
)
async def test_json_that_is_no_request_is_an_invalid_request(path: str, value: Any, request_id: Any) -> None:
    async with serving(path), peer(path) as client:
        await client.send(value)
        message = await client.receive()
        assert message is not None
        assert (message["id"], message["error"]["code"]) == (request_id, INVALID_REQUEST)
        assert await client.is_alive()


@pytest.mark.parametrize("batch", [[], [1, 2], [{"jsonrpc": "2.0", "method": "ping", "id": 1}]])
async def test_a_batch_is_refused_as_one_invalid_request(path: str, batch: list[Any]) -> None:
    async with serving(path), peer(path) as client:
        await client.send(batch)
        error = await client.error()
        assert error["code"] == INVALID_REQUEST
        assert "one request per line" in error["message"]
        assert await client.is_alive()


@pytest.mark.parametrize("method", ["status", "nonsense", "", "progress"])
async def test_a_method_that_is_not_served_is_not_found(path: str, method: str) -> None:
    async with serving(path), peer(path) as client:
        await client.call(method)
        error = await client.error()
        assert (error["code"], method in error["message"]) == (METHOD_NOT_FOUND, True)


@pytest.mark.parametrize(
    ("params", "says"),
    [({}, "name"), ({"name": 1}, "$.name"), ({"name": "x", "more": 1}, "more"), (["x"], "array"), (None, "null")],
)
async def test_wrong_parameters_are_named(path: str, params: Any, says: str) -> None:
    async with serving(path, {"drop": failing(AssertionError("called"))}), peer(path) as client:
        await client.send({"jsonrpc": "2.0", "method": "drop", "id": 1, "params": params})
        error = await client.error()
        assert error["code"] == INVALID_PARAMS
        assert says in error["message"]


async def test_a_handler_can_refuse_parameters_that_make_no_sense(path: str) -> None:
    async with serving(path, {"drop": failing(InvalidParamsError("a before b"))}), peer(path) as client:
        await client.call("drop", name="x")
        assert await client.error() == {"code": INVALID_PARAMS, "message": "drop: a before b"}


async def test_a_notification_is_carried_out_and_never_answered(path: str) -> None:
    seen = []

    async def drop(params: DropParams, call: CallContext) -> Empty:
        seen.append(params.name)
        call.progress_nowait(1, 2, "files")
        await trio.lowlevel.checkpoint()
        await call.output(b"x")
        return Empty()

    async with serving(path, {"drop": drop, "check": failing(OSError(errno.EIO, "bad"))}), peer(path) as client:
        await client.send(
            {"jsonrpc": "2.0", "method": "drop", "params": {"name": "a"}},
            {"jsonrpc": "2.0", "method": "check"},
            {"jsonrpc": "2.0", "method": "drop", "params": {}},
            {"jsonrpc": "2.0", "method": "nonsense"},
        )
        await trio.testing.wait_all_tasks_blocked()
        assert await client.is_alive()
    assert seen == ["a"]


@pytest.mark.parametrize(
    ("error", "message", "data"),
    [
        (
            FileNotFoundError(errno.ENOENT, "no such snapshot", "snap-9"),
            "no such snapshot: snap-9",
            ("ENOENT", "snap-9"),
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", ("ENOSPC", None)),
        (OSError(errno.EIO, "bad", b"a\xff\\b"), "bad: a\\xff\\\\b", ("EIO", "a\\xff\\\\b")),
        (OSError(errno.EIO, "bad", "a\udcff"), "bad: a\\xff", ("EIO", "a\\xff")),
        (OSError(errno.EBADF, "bad", 5), "bad", ("EBADF", None)),
        (OSError(errno.EIO, "bad", "a" * 6000), f"bad: {'a' * 100} ... {'a' * 100}", ("EIO", "a" * 6000)),
        (OSError("something \udcff"), "something \\udcff", None),
        (NotImplementedError("not yet"), "not yet", ("EOPNOTSUPP", None)),
        (MemoryError(), os.strerror(errno.ENOMEM), ("ENOMEM", None)),
        (ExceptionGroup("in a nursery", [OSError(errno.EIO, "bad")]), "bad", ("EIO", None)),
    ],
)
async def test_an_expected_failure_carries_errno_and_path(
    path: str, error: Exception, message: str, data: tuple[str, str | None] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path, {"check": failing(error)}), peer(path) as client:
        await client.call("check")
        answer = await client.error()
    told = answer.get("data") or {}
    assert (answer["code"], answer["message"]) == (OPERATION_FAILED, message)
    assert (told.get("errno"), told.get("path")) == (data or (None, None))
    assert caplog.records == []


@pytest.mark.parametrize("error", [RuntimeError("bug"), ValueError("x"), ExceptionGroup("two", [OSError(), OSError()])])
async def test_an_unexpected_failure_is_logged_once_with_its_traceback(
    path: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path, {"check": failing(error)}), peer(path) as client:
        await client.call("check")
        assert (await client.error())["code"] == INTERNAL_ERROR
        assert await client.is_alive()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error


class Large:
    """Something that a call holds in a variable."""


# What a function encloses is checked for an error that is not logged: pytest keeps the traceback of one that is.
@pytest.mark.parametrize(
    ("error", "is_enclosed"),
    [(OSError(errno.EINVAL, "refused"), False), (OSError(errno.EINVAL, "refused"), True), (RuntimeError("x"), False)],
)
async def test_a_call_that_fails_leaves_nothing_of_what_it_held(path: str, error: Exception, is_enclosed: bool) -> None:
    held: list[weakref.ref[Large]] = []

    def read(_enclosed: Large | None) -> None:
        large = Large()
        held.append(weakref.ref(large))
        try:
            int("no number")
        except ValueError:
            raise type(error)(*error.args) from None

    async def check(params: Empty, call: CallContext) -> Empty:
        large = Large()
        held.append(weakref.ref(large))
        enclosed = large if is_enclosed else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, lambda: read(enclosed))
        return Empty()

    async with serving(path, {"check": check}), peer(path) as client:
        gc.disable()
        try:
            for _ in range(3):
                await client.call("check")
                await client.error()
                assert await client.is_alive()
            assert len(held) == 6
            assert [large for large in held if large() is not None] == []
        finally:
            gc.enable()


async def test_a_result_that_cannot_be_written_as_json_is_an_internal_error(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(params: Empty, call: CallContext) -> object:
        return object()

    async with serving(path, {"check": check}), peer(path) as client:
        await client.call("check")
        assert (await client.error())["code"] == INTERNAL_ERROR
    assert len(caplog.records) == 1
