"""Archives for the tests: trees compared, and hostile archives built record by record."""

from __future__ import annotations

import io
import json
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.archive import open_archive, write_archive
from protocol.archive import records as zr
from protocol.tree import Tree, TreeEntry, filled

CREATED_NS = 1_700_000_000_000_000_000
FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755
SYMLINK = stat.S_IFLNK | 0o777


def archive_of(tree: Tree, **options: object) -> bytes:
    file = io.BytesIO()
    write_archive(tree, file, created_ns=CREATED_NS, **options)  # type: ignore[arg-type]
    return file.getvalue()


def facts(tree: Tree) -> list[tuple[object, ...]]:
    """All that an archive must keep of a tree, in walk order."""
    links = defaultdict(list)
    entries = list(tree.walk())
    for entry in entries:
        if entry.inode and not entry.is_dir:
            links[entry.inode].append(entry.path)
    return [
        (
            entry.path, oct(entry.mode), entry.size if entry.is_file else 0, entry.mtime_ns, entry.uid, entry.gid,
            entry.rdev, entry.target, dict(entry.xattrs), links.get(entry.inode, [entry.path]),
            b"".join(filled(tree.chunks(entry.path))) if entry.is_file else b"",
        )
        for entry in entries
    ]  # fmt: skip


def facts_of_archive(data: bytes) -> list[tuple[object, ...]]:
    with open_archive(io.BytesIO(data)) as tree:
        return facts(tree)


@dataclass
class Raw:
    """One entry to be written as told, true or not."""

    name: bytes
    data: bytes = b""
    mode: int = FILE
    method: int = zr.STORED
    flags: int = zr.FLAG_UTF8
    size: int | None = None  # declared
    crc: int | None = None
    local_name: bytes | None = None
    version: int = 20
    offset: int | None = None  # of the local header, as the central directory says
    local: bool = True


def deflated(name: bytes, content: bytes, **options: object) -> Raw:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = deflate.compress(content) + deflate.flush()
    values = {"size": len(content), "crc": zlib.crc32(content)} | options
    return Raw(name, data, method=zr.DEFLATED, **values)  # type: ignore[arg-type]


def zip_of(entries: Iterable[Raw]) -> bytes:
    body, directory = bytearray(), bytearray()
    count = 0
    for raw in entries:
        size = len(raw.data) if raw.size is None else raw.size
        crc = zlib.crc32(raw.data) if raw.crc is None else raw.crc
        local_name = raw.name if raw.local_name is None else raw.local_name
        offset = len(body) if raw.offset is None else raw.offset
        common = (raw.version, raw.flags, raw.method, 0, 0x21, crc, len(raw.data), size)
        if raw.local:
            body += zr.LOCAL.pack(zr.SIGNATURE_LOCAL, *common, len(local_name), 0) + local_name + raw.data
        directory += zr.CENTRAL.pack(
            zr.SIGNATURE_CENTRAL, zr.MADE_BY_UNIX, *common, len(raw.name), 0, 0, 0, 0, raw.mode << 16, offset
        )
        directory += raw.name
        count += 1
    end = zr.END.pack(zr.SIGNATURE_END, 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + end)


def manifest(files: int = 0, total: int = 0, **keys: object) -> Raw:
    values = {"version": "1", "created_at": "2026-01-01T00:00:00Z", "file_count": files, "total_bytes": total} | keys
    return Raw(b"manifest.json", json.dumps(values).encode())


def archive(*entries: Raw, **keys: object) -> bytes:
    """An archive of `entries` with a manifest whose counts are right."""
    files = [raw for raw in entries if raw.name[-1:] != b"/" and stat.S_ISREG(raw.mode)]
    total = sum(len(raw.data) if raw.size is None else raw.size for raw in files)
    return zip_of([manifest(len(files), total, **keys), *entries])


def special(path: bytes, mode: int, **values: object) -> tuple[TreeEntry, bytes]:
    return TreeEntry(path, mode, **values), b""  # type: ignore[arg-type]
