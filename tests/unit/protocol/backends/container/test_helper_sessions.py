"""A helper that several processes use, one after the other: what is cut, what comes again, and when it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.container.agent.helper_transport import helper_command, helper_program, relay_program
from protocol.backends.container.helper.sessions import address
from protocol.backends.container.helper.wire import (
    GO,
    HEADER,
    JOIN,
    KEY,
    MAGIC,
    NO_HELPER,
    RELAY_MAGIC,
    Op,
    pack,
    unpack,
)
from tests.support.rights import needs_root
from tests.support.waiting import wait_until

ROOT = 1
NAME, SECRET = os.urandom(8), os.urandom(16)
Reply = tuple[int, int, tuple[int, ...], list[bytes]]


class Stream:
    """A stream to a helper: what its requests are written to, and its replies read from."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._last = 0

    def send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._requests, data) :]

    def read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            ready, _, _ = select.select([self._replies], [], [], 60)
            assert ready, "no output within a minute"
            more = os.read(self._replies, length - len(data))
            assert more, f"the output ends after {data!r}"
            data += more
        return data

    def reply(self) -> Reply:
        length, number, code = HEADER.unpack(self.read(HEADER.size))
        return (number, code, *unpack(self.read(length)))

    def call(self, op: int, *numbers: int, strings: tuple[bytes, ...] = (), key: int = 0) -> Reply:
        self._last += 1
        self.send(pack(self._last, op, numbers, strings, key))
        reply = self.reply()
        assert reply[0] == self._last
        return reply

    def close(self) -> None:
        for descriptor in (self._requests, self._replies):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = -1


class Process(Stream):
    """A helper, or a relay to one, with its standard streams."""

    def __init__(self, program: bytes, magic: bytes) -> None:
        theirs_in, requests = os.pipe()
        replies, theirs_out = os.pipe()
        command = helper_command(program, sys.executable)
        self.popen = subprocess.Popen(command, stdin=theirs_in, stdout=theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        super().__init__(requests, replies)
        self.send(program)
        assert self.read(len(magic)) == magic

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.close()


class Joined(Stream):
    """What a relay does, without a process: it hands two pipes over."""

    def __init__(self) -> None:
        theirs_in, requests = os.pipe()
        replies, theirs_out = os.pipe()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address(NAME))
        socket.send_fds(self._connection, [JOIN.pack(SECRET, 60)], [theirs_in, theirs_out, 2])
        os.close(theirs_in)
        os.close(theirs_out)
        super().__init__(requests, replies)
        assert self.read(len(MAGIC)) == MAGIC

    def end(self) -> None:
        self._connection.close()
        self.close()


class Helper:
    """A helper of `directory` that holds, and the streams that were opened to it.  `before`: what it does first."""

    def __init__(self, directory: Path, hold_s: int = 60, before: bytes = b"") -> None:
        self.first = Process(before + helper_program(str(directory)), MAGIC)
        self._opened: list[Process | Joined] = [self.first]
        self.first.call(Op.HOLD, hold_s, strings=(NAME, SECRET))

    def relay(self, secret: bytes = SECRET) -> Process:
        relay = Process(relay_program(NAME, secret, 60), RELAY_MAGIC)
        self._opened.append(relay)
        return relay

    def joined(self) -> Joined:
        joined = Joined()
        self._opened.append(joined)
        return joined

    def end(self) -> None:
        for each in self._opened:
            each.end()


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Helper]:
    made = Helper(tmp_path)
    yield made
    made.end()


def mkdir(name: bytes, key: int = 0) -> bytes:
    return pack(7, Op.MKDIR, (ROOT, 0o755, os.geteuid(), os.getegid(), 0), (name,), key)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left open"])
def test_a_request_that_was_cut_at_any_byte_is_not_executed(helper: Helper, tmp_path: Path, is_closed: bool) -> None:
    request = mkdir(b"made", key=9)
    before = helper.first
    for length in range(len(request)):
        before.send(request[:length])
        if is_closed:
            before.close()
        following = helper.joined()
        assert following.call(Op.GETATTR, ROOT)[1] == 0
        assert names(tmp_path) == [], length
        if not is_closed:
            with contextlib.suppress(BrokenPipeError):  # the helper reads it, or has closed the stream
                before.send(request[length:])
            assert following.call(Op.GETATTR, ROOT)[1] == 0
            assert names(tmp_path) == [], length
            before.close()
        before = following


def test_a_reply_that_was_read_up_to_any_byte_comes_again(helper: Helper, tmp_path: Path) -> None:
    before = helper.first
    length = len(mkdir(b"x"))
    number, at = 0, 0
    while at < length:
        name = b"d%d" % at
        before.send(mkdir(name, key=at + 1))
        before.read(at)
        wait_until(lambda name=name: name.decode() in os.listdir(tmp_path))  # type: ignore[misc]
        before.close()
        before = helper.joined()
        before.send(mkdir(name, key=at + 1))
        _, code, numbers, _ = before.reply()
        assert code == 0
        number = numbers[0]
        assert (tmp_path / name.decode()).stat().st_ino == number
        assert before.call(Op.GETATTR, number)[1] == 0
        at += 1
    _, code, _, _ = before.call(Op.MKDIR, ROOT, 0o755, 0, 0, 0, strings=(b"d0",), key=1000)
    assert code == 17, "another request of the same kind is executed"


def test_what_is_repeated_has_a_lookup_of_its_own(helper: Helper, tmp_path: Path) -> None:
    helper.first.send(mkdir(b"d", key=5))
    number = helper.first.reply()[2][0]
    helper.first.close()
    following = helper.joined()
    following.send(mkdir(b"d", key=5))
    assert following.reply()[2][0] == number
    _, _, (more,), (known,) = following.call(Op.KNOWN, 0)
    assert more == 0
    assert known[:24] == b"".join(part.to_bytes(8, "little") for part in (number, 0o040000, 2))
    assert names(tmp_path) == ["d"]


def test_a_call_that_is_still_executed_is_answered_when_it_is_done(helper: Helper, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    number = helper.first.call(Op.LOOKUP, ROOT, strings=(b"file",))[2][0]
    request = pack(3, Op.WRITE, (number, 0, 0), (b"x" * (1 << 20),), 77)
    helper.first.send(request)
    following = helper.joined()
    following.send(pack(8, Op.WRITE, (number, 0, 0), (b"x" * (1 << 20),), 77))
    _, code, numbers, _ = following.reply()
    assert (code, numbers) == (0, (1 << 20,))


# Waits before it makes a directory, while there is a file GATE, as with a slow disk.
SLOW_MKDIR = """\
import os, time
def slow(*given, make=os.mkdir, **named):
    while os.path.exists({gate!r}):
        time.sleep(0.01)
    return make(*given, **named)
os.mkdir = slow
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Helper, Path]]:
    (tmp_path / "served").mkdir()
    (gate := tmp_path / "gate").touch()
    made = Helper(tmp_path / "served", before=SLOW_MKDIR.format(gate=str(gate)).encode())
    yield made, gate
    made.end()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left open"])
def test_a_daemon_can_wait_for_the_changes_of_a_stream_that_was_cut(slow: tuple[Helper, Path], is_closed: bool) -> None:
    helper, gate = slow
    helper.first.send(mkdir(b"made", key=5) + pack(8, Op.GETATTR, (ROOT,)))
    assert helper.first.reply()[:2] == (8, 0), "it is answered while the change before it is under way"
    if is_closed:
        helper.first.close()
    following = helper.joined()
    following.send(pack(1, Op.SETTLE) + pack(2, Op.GETATTR, (ROOT,)))
    assert following.reply()[:2] == (2, 0), "other requests are answered meanwhile"
    assert names(gate.with_name("served")) == []
    gate.unlink()
    assert following.reply()[:2] == (1, 0)
    assert names(gate.with_name("served")) == ["made"]
    assert following.call(Op.SETTLE)[1] == 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left open"])
def test_a_lock_ends_with_its_stream_and_not_before_the_changes_of_the_stream(
    slow: tuple[Helper, Path], is_closed: bool
) -> None:
    helper, gate = slow
    directory = os.open(gate.with_name("served"), os.O_RDONLY)
    helper.first.send(pack(6, Op.LOCK, (ROOT,)) + mkdir(b"made", key=5) + pack(8, Op.GETATTR, (ROOT,)))
    assert [helper.first.reply()[:2] for _ in range(2)] == [(6, 0), (8, 0)]
    if is_closed:
        helper.first.close()
    following = helper.joined()
    following.call(Op.GETATTR, ROOT)
    with pytest.raises(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    gate.unlink()
    fcntl.flock(directory, fcntl.LOCK_EX)
    assert names(gate.with_name("served")) == ["made"]
    assert following.call(Op.LOCK, ROOT)[1] == errno.EAGAIN
    os.close(directory)
    assert [
        following.call(op, *numbers)[1] for op, numbers in ((Op.LOCK, (ROOT,)), (Op.LOCK, (ROOT,)), (Op.UNLOCK, ()))
    ] == [0] * 3


def test_what_the_kernel_has_is_forgotten(helper: Helper, tmp_path: Path) -> None:
    helper.first.send(mkdir(b"d", key=5))
    helper.first.reply()
    helper.first.send(pack(0, Op.ANSWERED, (), (KEY.pack(5),)))
    helper.first.call(Op.GETATTR, ROOT)
    helper.first.close()
    following = helper.joined()
    following.send(mkdir(b"d", key=5))
    assert following.reply()[1] == 17
    assert names(tmp_path) == ["d"]


def test_a_wrong_secret_and_silent_relays_disturb_nobody(helper: Helper) -> None:
    wrong = helper.relay(b"-" * 16)
    wrong.send(GO)
    assert wrong.popen.wait(60) == 0
    with pytest.raises(AssertionError, match="the output ends"):
        wrong.read(1)
    waiting = [helper.relay() for _ in range(2)]
    assert helper.first.call(Op.GETATTR, ROOT)[1] == 0
    waiting[1].send(GO)
    assert waiting[1].read(len(MAGIC)) == MAGIC
    assert waiting[1].call(Op.GETATTR, ROOT)[1] == 0


STRANGER = """
import os, socket, sys
if sys.argv[1] != str(os.geteuid()):
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
theirs_in, requests = os.pipe()
replies, theirs_out = os.pipe()
try:
    socket.send_fds(connection, [{join!r}], [theirs_in, theirs_out, 2])
except OSError:
    pass  # refused already
os.close(theirs_in), os.close(theirs_out)
sys.stdout.buffer.write(os.read(replies, 100))  # until nobody has the other end
"""


@needs_root
@pytest.mark.parametrize("uid", [0, 65534])
def test_another_user_cannot_join_a_helper_with_its_secret(helper: Helper, uid: int) -> None:
    script = STRANGER.format(address=address(NAME), join=JOIN.pack(SECRET, 60))
    command = [sys.executable, "-I", "-c", script, str(uid)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout
    if uid == 0:
        assert answer == MAGIC, "the helper's own user can"
    else:
        assert answer == b""
        assert helper.first.call(Op.GETATTR, ROOT)[1] == 0


def test_open_files_without_a_name_stay_open(helper: Helper, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    number = helper.first.call(Op.LOOKUP, ROOT, strings=(b"file",))[2][0]
    assert helper.first.call(Op.UNLINK, ROOT, strings=(b"file",), key=1)[1] == 0
    helper.first.close()
    following = helper.joined()
    assert following.call(Op.READ, number, 0, 100)[3] == [b"content"]


@pytest.mark.parametrize("hold_s", [0, 1])
def test_the_helper_ends_when_nobody_joins(tmp_path: Path, hold_s: int) -> None:
    helper = Helper(tmp_path, hold_s)
    try:
        helper.first.close()
        assert helper.first.popen.wait(60) == 0
        relay = subprocess.run(
            helper_command(program := relay_program(NAME, SECRET, 1), sys.executable),
            input=program, capture_output=True, check=False,
        )  # fmt: skip
        assert (relay.returncode, relay.stdout) == (3, NO_HELPER)
        assert relay.stderr == b"the helper that has the files open has ended\n"
    finally:
        helper.end()


def test_the_helper_ends_at_once_when_it_is_asked(helper: Helper) -> None:
    following = helper.relay()
    following.send(GO + pack(0, Op.END))
    assert helper.first.popen.wait(60) == 0
    assert following.popen.wait(60) == 0
