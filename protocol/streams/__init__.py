"""streams: read and write files in chunks, with bounded memory.

Byte streams come first; text streams decode them.  A stream is used by one thread at a time and must be closed: it is a
context manager.  A file that is deleted while it is read can be read to its end.
"""

from protocol.streams.contract import STREAM_CHUNK_BYTES, ByteReader, ByteWriter, TextReader
from protocol.streams.files import (
    FileReader,
    FileTextReader,
    FileWriter,
    PositionedDecoder,
    SeekableContent,
    check_encoding,
)

__all__ = [
    "STREAM_CHUNK_BYTES",
    "ByteReader",
    "ByteWriter",
    "FileReader",
    "FileTextReader",
    "FileWriter",
    "PositionedDecoder",
    "SeekableContent",
    "TextReader",
    "check_encoding",
]
