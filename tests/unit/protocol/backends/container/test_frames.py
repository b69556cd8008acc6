"""The frames between vfsd and a helper: what was packed is unpacked, and lies are not kept."""

from __future__ import annotations

import ast
import errno
import os
import struct
import subprocess
import sys
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
)
from protocol.backends.container.agent.replies import Frame, FrameDecoder
from protocol.backends.container.helper.wire import HEADER, MAGIC, MAX_BODY_BYTES, Op, WireError, pack, unpack

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


class Helper:
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
def helper(tmp_path: Path) -> Helper:
    (tmp_path / "outside").write_text("not yours")
    (tmp_path / "root" / "d").mkdir(parents=True)
    (tmp_path / "root" / "d" / "f").write_text("inside")
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    return Helper(tmp_path / "root")


def test_no_name_and_no_path_leads_the_helper_out_of_its_directory(helper: Helper) -> None:
    for name in (b"..", b"d/..", b"../outside", b"/etc/passwd", b"link/outside", b"d/f", b"", b"a\0b"):
        for op in (Op.UNLINK, Op.RMDIR, Op.MKDIR, Op.MKNOD):
            more = {Op.MKDIR: (0o755, 0, 0, 0), Op.MKNOD: (0o100644, 0, 0, 0, 0)}.get(op, ())
            assert helper.ask(op, (1, *more), (name,))[0] in (errno.EINVAL, errno.ENOTEMPTY, errno.EEXIST), (op, name)
        assert helper.ask(Op.RENAME, (1, 1, 0, 0, 0), (b"d", name))[0] == errno.EINVAL
        if name != b"..":  # which, of the root, is the root
            assert helper.ask(Op.LOOKUP, (1,), (name,))[0] == errno.EINVAL
    for path in (b"..", b"../outside", b"d/../../outside", b"link/outside", b"/etc/passwd", b"d//f"):
        for op, numbers in ((Op.TREE_READ, (0, 10)), (Op.TREE_ENTRY, ()), (Op.TREE_WALK, ())):
            assert helper.ask(op, numbers, (path,))[0] in (errno.EINVAL, errno.ELOOP, errno.ENOTDIR), (op, path)
    assert helper.ask(Op.TREE_READ, (0, 10), (b"d/f",)) == (0, [b"inside"])
    assert helper.close() == 0


def test_the_helper_answers_what_makes_no_sense_with_an_error_and_goes_on(helper: Helper) -> None:
    assert helper.ask(12345)[0] == errno.ENOSYS
    assert helper.ask(Op.LOOKUP)[0] == errno.EINVAL
    assert helper.ask(Op.LOOKUP, (1, 2, 3), (b"d",))[0] == errno.EINVAL
    assert helper.ask(Op.READ, (1, 0, 10))[0] == errno.EISDIR
    assert helper.ask(Op.READ, (2**62, 0, 10))[0] == errno.ENOENT
    helper.send(HEADER.pack(3, 9, Op.LOOKUP) + b"???")
    assert helper.reply()[:2] == (9, errno.EBADMSG)
    assert helper.ask(Op.STATFS)[0] == 0
    assert helper.close() == 0


def test_the_helper_ends_with_its_standard_input_and_with_a_frame_without_end(tmp_path: Path) -> None:
    helper = Helper(tmp_path)
    assert helper.close() == 0

    helper = Helper(tmp_path)
    helper.send(HEADER.pack(2**32 - 1, 1, Op.WRITE))
    assert helper.process.wait(60) != 0
    helper.close()


def test_the_helper_cannot_be_made_to_import_what_lies_in_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "struct.py").write_text("raise SystemExit(77)")
    program = helper_program(str(tmp_path))
    process = subprocess.run(
        helper_command(program, sys.executable), input=program, cwd=tmp_path, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, MAGIC)
