"""Streams over content of any kind; what every filesystem's streams do is in protocol.testing.streaming."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.streams import FileReader, FileTextReader, FileWriter


class Buffer:
    """Content in memory that gives and takes at most `at_once` bytes a call, as a socket or a pipe might."""

    def __init__(self, data: bytes = b"", at_once: int = 1 << 30) -> None:
        self.data = bytearray(data)
        self.at_once = at_once
        self.closed = 0
        self.full_at = 1 << 60

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def write(self, offset: int, data: Any) -> int:
        if offset >= self.full_at:
            raise OSError(errno.ENOSPC, "full")
        part = bytes(data[: min(self.at_once, self.full_at - offset)])
        self.data[offset : offset + len(part)] = part
        return len(part)

    def close(self) -> None:
        self.closed += 1


@given(st.text(st.sampled_from("ab\nä€\r"), max_size=40), st.lists(st.integers(0, 5), max_size=20))
def test_any_mix_of_reads_gives_the_text(text: str, sizes: list[int]) -> None:
    reader = FileTextReader(FileReader("f", Buffer(text.encode())))

    parts = [reader.readline() if size == 0 else reader.read(size) for size in sizes]

    assert "".join(parts) + reader.read() == text
    assert reader.line_number >= text.count("\n")


@given(st.text(max_size=200), st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"]))
def test_text_is_read_in_every_encoding(text: str, encoding: str) -> None:
    with FileTextReader(FileReader("f", Buffer(text.encode(encoding))), encoding) as reader:
        assert reader.read() == text


@pytest.mark.parametrize("encoding", ["nonsense", "base64", "rot13"])
def test_what_is_no_text_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(ValueError, match=encoding):
        FileTextReader(FileReader("f", Buffer()), encoding)


def test_a_writer_goes_on_after_a_short_write() -> None:
    buffer = Buffer(b"before", at_once=2)

    with FileWriter("f", buffer, position=6) as writer:
        assert writer.write(b"0123456789") == 10

    assert (bytes(buffer.data), writer.bytes_written) == (b"before0123456789", 10)


def test_a_writer_that_runs_out_of_room_names_its_file_and_aborts() -> None:
    buffer, ends = Buffer(), []
    buffer.full_at = 5

    with (
        pytest.raises(OSError, match="full") as caught,
        FileWriter("f", buffer, abort=lambda: ends.append(1)) as writer,
    ):
        writer.write(b"0123456789")

    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "f")
    assert (writer.bytes_written, ends, buffer.closed) == (5, [1], 1)


def test_a_writer_whose_commit_fails_aborts_and_closes() -> None:
    def fail() -> None:
        raise OSError(errno.EISDIR, "in the way")

    buffer, ends = Buffer(), []
    writer = FileWriter("f", buffer, commit=fail, abort=lambda: ends.append(1))

    with pytest.raises(IsADirectoryError):
        writer.close()

    assert (writer.closed, ends, buffer.closed) == (True, [1], 1)
    writer.close()


def test_a_memoryview_of_wider_items_is_written_as_bytes() -> None:
    buffer = Buffer()

    with FileWriter("f", buffer) as writer:
        assert writer.write(memoryview(b"abcdefgh").cast("I")) == 8

    assert bytes(buffer.data) == b"abcdefgh"


def test_a_reader_follows_a_file_that_grows() -> None:
    buffer = Buffer(b"one")
    reader = FileReader("f", buffer)
    assert reader.read() == b"one"

    buffer.data += b" two"

    assert (reader.size, reader.read()) == (7, b" two")
    reader.close()
    buffer.data += b" three"
    assert reader.size == 7


def test_a_reader_closes_its_content_once() -> None:
    buffer = Buffer(b"x")
    reader = FileReader("f", buffer)

    reader.close()
    reader.close()

    assert buffer.closed == 1


def test_a_text_reader_closes_its_bytes() -> None:
    buffer = Buffer(b"x")

    FileTextReader(FileReader("f", buffer)).close()

    assert buffer.closed == 1
