"""StreamingContract: the streams of every `Filesystem`."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import pytest

from protocol.filesystem import Filesystem
from protocol.streams import ByteReader, ByteWriter, TextReader
from protocol.testing.filesystem import FilesystemSuite, contents, raises_os_error

_CHUNK_BYTES: Final = 64 * 1024
_MEGABYTE: Final = 1 << 20
_FILE_BYTES: Final = 40 * _MEGABYTE  # larger than what a stream may hold
_HELD_BYTES: Final = 8 * _MEGABYTE

_OPEN: Final = pytest.mark.parametrize(
    "opener",
    [
        lambda filesystem: filesystem.open_read("file"),
        lambda filesystem: filesystem.open_text("file"),
        lambda filesystem: filesystem.open_write("file"),
        lambda filesystem: filesystem.open_write("file", mode="append"),
        lambda filesystem: filesystem.open_write("new", mode="create"),
    ],
    ids=["read", "text", "overwrite", "append", "create"],
)
# The calls of all kinds of streams that need the open file.
_CALLS: Final[dict[str, Callable[[Any], object]]] = {
    "read": lambda stream: stream.read(),
    "readline": lambda stream: stream.readline(),
    "lines": lambda stream: stream.lines(),
    "chunks": lambda stream: stream.chunks(),
    "seek": lambda stream: stream.seek(0),
    "position": lambda stream: stream.position,
    "__iter__": iter,
    "__enter__": lambda stream: stream.__enter__(),
    "write": lambda stream: stream.write(b"x"),
    "write_all": lambda stream: stream.write_all([b"x"]),
}


class _Bytes:
    """ByteReader and ByteWriter."""

    def test_a_reader_reports_its_file_and_its_position(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("d/file", b"0123456789")

        with filesystem.open_read("/d/./file") as reader:
            assert isinstance(reader, ByteReader)
            assert (reader.path, reader.size, reader.position) == ("d/file", 10, 0)
            assert reader.read(4) == b"0123"
            assert reader.position == 4
            assert reader.read(0) == b""
            assert reader.read() == b"456789"
            assert reader.read() == b""
            assert (reader.position, reader.size) == (10, 10)

    def test_a_reader_seeks_from_start_position_and_end(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"0123456789")

        with filesystem.open_read("file") as reader:
            assert (reader.seek(3), reader.read(2)) == (3, b"34")
            assert (reader.seek(-1, os.SEEK_CUR), reader.read(2)) == (4, b"45")
            assert (reader.seek(-2, os.SEEK_END), reader.read(5)) == (8, b"89")
            assert (reader.seek(100), reader.read(5)) == (100, b"")

    def test_a_reader_refuses_invalid_arguments(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"0123456789")

        with filesystem.open_read("file") as reader:
            reader.seek(5)
            for offset, whence in ((-1, os.SEEK_SET), (-6, os.SEEK_CUR), (-11, os.SEEK_END), (0, 3)):
                with pytest.raises(ValueError, match=r"seek|whence"):
                    reader.seek(offset, whence)
            with pytest.raises(ValueError, match="size"):
                reader.read(-2)
            with pytest.raises(ValueError, match="size"):
                reader.chunks(0)
            assert reader.position == 5

    def test_chunks_have_the_requested_size_and_join_to_the_file(self, filesystem: Filesystem) -> None:
        data = os.urandom(3 * _CHUNK_BYTES + 17)
        filesystem.write_bytes("file", data)

        with filesystem.open_read("file") as reader:
            assert [len(chunk) for chunk in reader] == [_CHUNK_BYTES] * 3 + [17]
            reader.seek(1)
            chunks = list(reader.chunks(1_000))

        assert b"".join(chunks) == data[1:]
        assert {len(chunk) for chunk in chunks[:-1]} == {1_000}

    def test_a_writer_counts_what_it_writes(self, filesystem: Filesystem) -> None:
        with filesystem.open_write("/d/./file") as writer:
            assert isinstance(writer, ByteWriter)
            assert (writer.path, writer.bytes_written) == ("d/file", 0)
            assert writer.write(b"one ") == 4
            assert writer.write_all(part for part in (b"two ", bytearray(b"three "), memoryview(b"four"))) == 14
            assert writer.bytes_written == 18

        assert filesystem.read_bytes("d/file").content == b"one two three four"

    def test_an_append_counts_only_what_it_adds(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "before ")

        with filesystem.open_write("file", mode="append") as writer:
            writer.write(b"after")
            assert writer.bytes_written == 5

        assert filesystem.read("file").content == "before after"

    def test_an_overwritten_file_is_the_old_one_until_its_writer_closes(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with filesystem.open_write("file") as writer:
            writer.write(b"new")
            assert filesystem.read("file").content == "old"

        assert filesystem.read("file").content == "new"
        assert contents(filesystem) == {"file": b"new"}

    def test_a_file_that_is_being_created_exists_from_the_start(self, filesystem: Filesystem) -> None:
        with filesystem.open_write("file", mode="create"), raises_os_error(FileExistsError, "file"):
            filesystem.open_write("file", mode="create")

    def test_appended_data_stays_when_the_writer_fails(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "a")

        with contextlib.suppress(ZeroDivisionError), filesystem.open_write("file", mode="append") as writer:
            writer.write(b"b")
            raise ZeroDivisionError

        assert filesystem.read("file").content == "ab"

    def test_a_reader_continues_in_a_deleted_file(self, filesystem: Filesystem) -> None:
        data = os.urandom(3 * _CHUNK_BYTES)
        filesystem.write_bytes("d/file", data)

        with filesystem.open_read("d/file") as reader:
            start = reader.read(10)
            filesystem.delete("d", recursive=True)
            assert start + reader.read() == data
            assert reader.size == len(data)

        assert contents(filesystem) == {}

    def test_a_reader_continues_in_the_old_file_after_an_overwrite(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old content")

        with filesystem.open_read("file") as reader:
            filesystem.write("file", "new")
            assert reader.read() == b"old content"


class _Text:
    """TextReader."""

    def test_lines_are_read_one_by_one_and_counted_from_zero(self, filesystem: Filesystem) -> None:
        filesystem.write("/d/file", "one\ntwo\r\n\nlast")

        with filesystem.open_text("d/file") as reader:
            assert isinstance(reader, TextReader)
            assert (reader.path, reader.encoding, reader.line_number) == ("d/file", "utf-8", 0)
            assert [(reader.readline(), reader.line_number) for _ in range(5)] == [
                ("one\n", 1),
                ("two\r\n", 2),
                ("\n", 3),
                ("last", 4),
                ("", 4),
            ]

    def test_lines_are_iterated_with_their_ends_or_stripped(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "  one \t\r\ntwo\x0b\x85\u2028still two\n")

        with filesystem.open_text("file") as reader:
            assert list(reader) == ["  one \t\r\n", "two\x0b\x85\u2028still two\n"]
        with filesystem.open_text("file") as reader:
            assert list(reader.lines(strip=True)) == ["  one", "two\x0b\x85\u2028still two"]

    def test_text_is_read_by_characters(self, filesystem: Filesystem) -> None:
        text = "ä€\U0001f600\n" * 50_000
        filesystem.write("file", text)

        with filesystem.open_text("file") as reader:
            parts = [reader.read(6), reader.readline(), reader.read(70_001), reader.read(), reader.read()]
            assert reader.line_number == 50_000

        assert [len(part) for part in parts[:3]] == [6, 2, 70_001]
        assert "".join(parts) == text

    def test_a_line_longer_than_a_chunk_is_one_line(self, filesystem: Filesystem) -> None:
        line = "é" * (2 * _CHUNK_BYTES) + "\n"
        filesystem.write("file", line * 2)

        with filesystem.open_text("file") as reader:
            assert list(reader) == [line, line]

    @pytest.mark.parametrize("start", [0, 5, _CHUNK_BYTES - 1, 3 * _CHUNK_BYTES + 7])
    def test_undecodable_text_is_an_error_with_its_position(self, filesystem: Filesystem, start: int) -> None:
        filesystem.write_bytes("file", b"x" * start + b"\xe9\n")

        with filesystem.open_text("file") as reader, pytest.raises(UnicodeDecodeError) as caught:
            reader.read()

        assert (caught.value.start, caught.value.end, caught.value.object) == (start, start + 1, b"\xe9")

    def test_lines_before_undecodable_text_are_read(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", "é\nb\nc".encode() + b"\xe9\nd\n")

        with filesystem.open_text("file") as reader:
            assert [reader.readline(), reader.readline()] == ["é\n", "b\n"]
            for _ in range(2):
                with pytest.raises(UnicodeDecodeError) as caught:
                    reader.readline()
                assert caught.value.start == 6

    def test_a_file_that_ends_within_a_character_is_an_error_with_its_position(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"x" * _CHUNK_BYTES + "€".encode()[:2])

        with filesystem.open_text("file") as reader, pytest.raises(UnicodeDecodeError) as caught:
            list(reader)

        assert caught.value.start == _CHUNK_BYTES

    def test_another_encoding_can_be_named(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", "é\nü\n".encode("latin-1"))

        with filesystem.open_text("file", encoding="latin-1") as reader:
            assert (reader.encoding, list(reader)) == ("latin-1", ["é\n", "ü\n"])
        with pytest.raises(ValueError, match="no-such"):
            filesystem.open_text("file", encoding="no-such")


class StreamingContract(_Bytes, _Text, FilesystemSuite):
    """The contract of streams.  `filesystem` is new, empty and writable."""

    @_OPEN
    def test_a_stream_is_closed_by_its_context_and_may_be_closed_again(
        self, filesystem: Filesystem, opener: Callable[[Filesystem], Any]
    ) -> None:
        filesystem.write("file", "x\n")

        with opener(filesystem) as stream:
            assert not stream.closed

        assert stream.closed
        stream.close()

    @_OPEN
    def test_a_closed_stream_does_nothing(self, filesystem: Filesystem, opener: Callable[[Filesystem], Any]) -> None:
        filesystem.write("file", "x\n")
        stream = opener(filesystem)
        stream.close()

        # Of the type: a property of a closed stream raises.
        for call in [call for name, call in _CALLS.items() if hasattr(type(stream), name)]:
            with pytest.raises(ValueError, match="I/O operation on closed file"):
                call(stream)

    def test_streams_of_a_large_file_hold_little_memory(self, filesystem: Filesystem) -> None:
        # Incompressible, and one object, so that the content in an in-memory backend takes little memory.
        block = os.urandom(_MEGABYTE)
        with filesystem.open_write("large") as writer:
            writer.write_all([block] * (_FILE_BYTES // _MEGABYTE))

        tracemalloc.start()
        try:
            with filesystem.open_read("large") as reader:
                size = sum(len(chunk) for chunk in reader)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert size == _FILE_BYTES
        assert peak < _HELD_BYTES
