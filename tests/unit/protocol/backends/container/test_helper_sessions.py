"""The helper in a container: its frames, and its sessions, which daemons join one after the other."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.backends.container.agent.helper_transport import (
    HELPER_MODULES,
    RELAY_MODULES,
    helper_command,
    helper_program,
    helper_source,
    relay_program,
)
from protocol.backends.container.agent.replies import Frame, FrameDecoder
from protocol.backends.container.helper.sessions import address
from protocol.backends.container.helper.wire import (
    GO,
    HEADER,
    JOIN,
    KEY,
    MAGIC,
    MAX_BODY_BYTES,
    NO_HELPER,
    RELAY_MAGIC,
    Op,
    WireError,
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


NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(tuple)
STRINGS = st.lists(st.binary(max_size=200), max_size=10).map(tuple)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), NUMBERS, STRINGS)
def test_what_is_packed_is_unpacked(
    number: int, code: int, numbers: tuple[int, ...], strings: tuple[bytes, ...]
) -> None:
    frame = pack(number, code, numbers, strings)

    assert HEADER.unpack_from(frame) == (len(frame) - HEADER.size, number, code)
    assert unpack(frame[HEADER.size :]) == (numbers, list(strings))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_are_refused(body: bytes) -> None:
    try:
        numbers, strings = unpack(body)
    except WireError:
        return
    if body:
        assert pack(0, 0, numbers, tuple(strings))[HEADER.size :] == body


def test_a_body_that_announces_more_than_it_has_is_refused() -> None:
    for lie in (
        struct.pack("<HH", 60000, 0),
        struct.pack("<HH", 0, 60000),
        struct.pack("<HHI", 0, 1, 2**32 - 1),
        struct.pack("<HHII", 0, 2, 2**31, 2**31),
        struct.pack("<HHI", 0, 1, 0) + b"more",
        b"\0",
    ):
        with pytest.raises(WireError):
            unpack(lie)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), NUMBERS, STRINGS), max_size=6), st.integers(1, 50))
def test_frames_come_out_whole_whatever_pieces_they_come_in(
    frames: list[tuple[int, tuple[int, ...], tuple[bytes, ...]]], size: int
) -> None:
    sent = b"".join(pack(number, 0, numbers, strings) for number, numbers, strings in frames)
    decoder = FrameDecoder(lambda _number: MAX_BODY_BYTES)

    found: list[Frame] = []
    for at in range(0, len(sent), size):
        found += decoder.feed(sent[at : at + size])

    assert [(frame.number, *unpack(frame.body)) for frame in found] == [
        (number, numbers, list(strings)) for number, numbers, strings in frames
    ]


def test_a_frame_larger_than_was_asked_for_is_refused_by_its_header() -> None:
    decoder = FrameDecoder({7: 100}.__getitem__)

    with pytest.raises(WireError):
        list(decoder.feed(HEADER.pack(101, 7, 0)))


# -- the helper's side -------------------------------------------------------------------------
_SENT = {*HELPER_MODULES, *RELAY_MODULES}


def test_the_helper_is_written_in_the_language_of_python_3_6() -> None:
    for module in _SENT:
        ast.parse(helper_source(module), module, feature_version=(3, 6))


def test_the_helper_uses_the_standard_library_and_itself_only() -> None:
    for module in _SENT:
        for node in ast.walk(ast.parse(helper_source(module))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                assert name in _SENT or name.partition(".")[0] in sys.stdlib_module_names, (module, name)


class PlainHelper:
    """A helper that is spoken to frame by frame."""

    def __init__(self, directory: Path) -> None:
        program = helper_program(str(directory))
        self.process = subprocess.Popen(
            helper_command(program, sys.executable), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.send(program)
        assert self._read(len(MAGIC)) == MAGIC

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self.process.stdin.write(view) :]

    def _read(self, size: int) -> bytes:
        assert self.process.stdout is not None
        data = b""
        while len(data) < size:
            more = self.process.stdout.read(size - len(data))
            assert more, "it has ended"
            data += more
        return data

    def reply(self) -> tuple[int, int, tuple[int, ...], list[bytes]]:
        length, number, code = HEADER.unpack(self._read(HEADER.size))
        return (number, code, *unpack(self._read(length)))

    def ask(self, op: int, numbers: tuple[int, ...] = (), strings: tuple[bytes, ...] = ()) -> tuple[int, list[bytes]]:
        self.send(pack(1, op, numbers, strings))
        _, code, _, found = self.reply()
        return code, found

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(60)


@pytest.fixture
def plain_helper(tmp_path: Path) -> PlainHelper:
    (tmp_path / "outside").write_text("not yours")
    (tmp_path / "root" / "d").mkdir(parents=True)
    (tmp_path / "root" / "d" / "f").write_text("inside")
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    return PlainHelper(tmp_path / "root")


def test_no_name_and_no_path_leads_the_helper_out_of_its_directory(plain_helper: PlainHelper) -> None:
    for name in (b"..", b"d/..", b"../outside", b"/etc/passwd", b"link/outside", b"d/f", b"", b"a\0b"):
        for op in (Op.UNLINK, Op.RMDIR, Op.MKDIR, Op.MKNOD):
            more = {Op.MKDIR: (0o755, 0, 0, 0), Op.MKNOD: (0o100644, 0, 0, 0, 0)}.get(op, ())
            assert plain_helper.ask(op, (1, *more), (name,))[0] in (errno.EINVAL, errno.ENOTEMPTY, errno.EEXIST), (
                op,
                name,
            )
        assert plain_helper.ask(Op.RENAME, (1, 1, 0, 0, 0), (b"d", name))[0] == errno.EINVAL
        if name != b"..":  # which, of the root, is the root
            assert plain_helper.ask(Op.LOOKUP, (1,), (name,))[0] == errno.EINVAL
    for path in (b"..", b"../outside", b"d/../../outside", b"link/outside", b"/etc/passwd", b"d//f"):
        for op, numbers in ((Op.TREE_READ, (0, 10)), (Op.TREE_ENTRY, ()), (Op.TREE_WALK, ())):
            assert plain_helper.ask(op, numbers, (path,))[0] in (errno.EINVAL, errno.ELOOP, errno.ENOTDIR), (op, path)
    assert plain_helper.ask(Op.TREE_READ, (0, 10), (b"d/f",)) == (0, [b"inside"])
    assert plain_helper.close() == 0


def test_the_helper_answers_what_makes_no_sense_with_an_error_and_goes_on(plain_helper: PlainHelper) -> None:
    assert plain_helper.ask(12345)[0] == errno.ENOSYS
    assert plain_helper.ask(Op.LOOKUP)[0] == errno.EINVAL
    assert plain_helper.ask(Op.LOOKUP, (1, 2, 3), (b"d",))[0] == errno.EINVAL
    assert plain_helper.ask(Op.READ, (1, 0, 10))[0] == errno.EISDIR
    assert plain_helper.ask(Op.READ, (2**62, 0, 10))[0] == errno.ENOENT
    plain_helper.send(HEADER.pack(3, 9, Op.LOOKUP) + b"???")
    assert plain_helper.reply()[:2] == (9, errno.EBADMSG)
    assert plain_helper.ask(Op.STATFS)[0] == 0
    assert plain_helper.close() == 0


def test_the_helper_ends_with_its_standard_input_and_with_a_frame_without_end(tmp_path: Path) -> None:
    plain_helper = PlainHelper(tmp_path)
    assert plain_helper.close() == 0

    plain_helper = PlainHelper(tmp_path)
    plain_helper.send(HEADER.pack(2**32 - 1, 1, Op.WRITE))
    assert plain_helper.process.wait(60) != 0
    plain_helper.close()


def test_the_helper_cannot_be_made_to_import_what_lies_in_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "struct.py").write_text("raise SystemExit(77)")
    program = helper_program(str(tmp_path))
    process = subprocess.run(
        helper_command(program, sys.executable), input=program, cwd=tmp_path, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, MAGIC)
