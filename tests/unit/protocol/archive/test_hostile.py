"""Hostile archives are refused, each for its own reason, with the entry named, opened or mounted."""

from __future__ import annotations

import base64
import errno
import io
import os
import random
import stat
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.archive import ArchiveLimits, MountedArchive, open_archive
from protocol.archive import records as zr
from protocol.errors import ArchiveError
from protocol.tree import names_in
from tests.support.trees import DictTree
from tests.unit.protocol.archive.archives import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Raw,
    archive,
    archive_of,
    deflated,
    facts,
    facts_of_archive,
    manifest,
    zip_of,
)
from tests.unit.protocol.archive.test_archive import rich_tree


def refusal(data: bytes, limits: ArchiveLimits | None = None) -> ArchiveError:
    with pytest.raises(ArchiveError) as caught, open_archive(io.BytesIO(data), limits=limits):
        pytest.fail("the archive was accepted")
    return caught.value


def test_the_archives_of_these_tests_are_good_but_for_what_is_wrong_with_them() -> None:
    data = archive(
        Raw(b"files/d/", mode=DIRECTORY), Raw(b"files/d/a", b"12"), deflated(b"files/b", b"3" * 99),
        Raw(b"files/s", b"target", SYMLINK),
    )  # fmt: skip
    assert [fact[0] for fact in facts_of_archive(data)] == [b"", b"b", b"d", b"d/a", b"s"]


DEEP = "files/" + "d/" * 50 + "f"
FIFO = stat.S_IFIFO | 0o600
TWO = (Raw(b"files/a", bytes(600)), Raw(b"files/b", bytes(600)))
FIFOS = [{"path": f"{number}", "mode": FIFO} for number in range(30)]


@pytest.mark.parametrize(
    ("data", "limits", "reason", "entry"),
    [
        (archive(Raw(b"")), {}, "empty name", None),
        (archive(Raw(b"files/a", b"1"), Raw(b"files/b"), Raw(b"files/a", b"2")), {}, "two entries", "files/a"),
        (zip_of([manifest(), manifest()]), {}, "two entries", "manifest.json"),
        (archive(Raw(b"files/a", b"1"), Raw(b"files/a/", mode=DIRECTORY)), {}, "file and a directory", "files/a/"),
        (archive(Raw(b"files/p/x"), entries=[{"path": "p", "mode": FIFO}]), {}, "below an entry that", "files/p/x"),
        (archive(Raw(b"files/", mode=SYMLINK)), {}, "impossible mode", "files/"),
        (archive(entries=[{"path": "", "mode": FIFO}]), {}, "root is not a directory", "files/"),
        (archive(Raw(b"files/b", b"x" * 99, local=False, offset=10**6)), {}, "the central directory", "files/b"),
        (archive(Raw(b"files/a"), entries=[{"path": "a"}, {"path": "a", "uid": 5}]), {}, "two records", "a"),
        (zip_of([]), {}, "no manifest.json", None),
        (zip_of([Raw(b"manifest.json", b"{}", SYMLINK)]), {}, "malformed", "manifest.json"),
        (archive(names="rot13"), {}, "unknown kind", "manifest.json"),
        (archive(padding="x" * 5000), {"manifest_bytes": 4000}, "larger than 4000", "manifest.json"),
        (archive(*(Raw(b"files/%d" % n) for n in range(20))), {"entries": 20}, "21 entries", None),
        (archive(Raw(DEEP.encode())), {"entries": 20}, "imply too many", DEEP),
        (archive(Raw(DEEP.encode())), {"names_bytes": 1000}, "imply too many", DEEP),
        (archive(entries=FIFOS), {"entries": 20}, "more than 20 entries", None),
        (archive(*TWO), {"total_bytes": 1000}, "more than 1000 bytes", "files/b"),
        (archive(deflated(b"files/a", b"x" * 99, size=1 << 30)), {}, "more than 1100 times", "files/a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_archive_that_contradicts_itself_or_exceeds_a_limit_is_refused(
    data: bytes, limits: dict[str, int], reason: str, entry: str | None
) -> None:
    error = refusal(data, ArchiveLimits(**limits))
    assert (reason in error.strerror, error.entry) == (True, entry)


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"files/../x", '".." component'),
        (b"../x", '".." component'),
        (b"files/a/..", '".." component'),
        (b"..", '".." component'),
        (b"/etc/passwd", "absolute"),
        (b"files//etc/passwd", "empty component"),
        (b"files/a//b", "empty component"),
        (b"files/a//", "empty component"),
        (b"files/./a", '"." component'),
        (b"files/a/.", '"." component'),
        (b"files/a\0b", "NUL"),
        (b"outside", "outside of files/"),
        (b"files", "outside of files/"),
        (b"C:\\x", "outside of files/"),
        (b"manifest.json/", "outside of files/"),
        (b"files/" + b"x" * 256, "component longer than 255"),
        (b"files/\xff", "marked as UTF-8"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: bytes, reason: str) -> None:
    mode = DIRECTORY if name.endswith(b"/") else FILE
    error = refusal(archive(Raw(name, mode=mode)))
    assert reason in error.strerror
    assert error.entry == name.decode("utf-8", "backslashreplace")


def test_a_backslash_is_a_character_like_any_other() -> None:
    data = archive(Raw(b"files/..\\..\\x"), Raw(b"files/a\\b/c"))
    assert [fact[0] for fact in facts_of_archive(data)] == [b"", b"..\\..\\x", b"a\\b", b"a\\b/c"]


@pytest.mark.parametrize("name", ["%2e%2e", "%2F", "%00", "%41", "%", "%f", "%zz", "%+1", "%ff"])
def test_an_escaped_name_that_no_path_has_is_refused(name: str) -> None:
    error = refusal(archive(Raw(b"files/" + name.encode()), names="percent"))
    assert "not escaped" in error.strerror
    assert error.entry == f"files/{name}"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("top", "reason"),
    [(Raw(b"files/a", b"/etc", SYMLINK), "below a symlink"), (Raw(b"files/a", b"1"), "not a directory")],
)
def test_an_entry_below_what_is_no_directory_is_refused(top: Raw, reason: str, order: int) -> None:
    error = refusal(archive(*[top, Raw(b"files/a/b/passwd")][::order]))
    assert (reason in error.strerror, error.entry) == (True, "files/a/b/passwd")


# -- entries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Raw(b"files/a", b"1", crc=5), "bad CRC"),
        (deflated(b"files/a", b"1" * 99, crc=5), "bad CRC"),
        (deflated(b"files/a", b"1" * 99, size=98), "larger than it declares"),
        (deflated(b"files/a", b"1" * 99, size=100), "fewer bytes than the archive says"),
        (deflated(b"files/a", b"1" * 99, size=0), "larger than it declares"),
        (Raw(b"files/a", b"\xff\xff\xff", method=zr.DEFLATED), "damaged"),
        (Raw(b"files/a", b"", method=zr.DEFLATED), "truncated"),
        (Raw(b"files/a", zlib.compress(b"x" * 999, wbits=-15)[:-2], method=zr.DEFLATED, size=999), "truncated"),
        (Raw(b"files/a", zlib.compress(b"x", wbits=-15) + b"!", method=8, size=1, crc=zlib.crc32(b"x")), "after its"),
        (Raw(b"files/a", b"1", size=2), "two sizes differ"),
        (Raw(b"files/a", b"1", flags=0x801), "encrypted"),
        (Raw(b"files/a", b"1", flags=0x840), "encrypted"),
        (Raw(b"files/a", b"1", flags=0x2800), "encrypted"),
        (Raw(b"files/a", b"1", method=12), "unsupported method 12"),
        (Raw(b"files/a", b"1", method=99), "unsupported method 99"),
        (Raw(b"files/a", b"1", version=200), "unknown ZIP version"),
        (Raw(b"files/a", b"1", local_name=b"files/b"), "another name"),
        (Raw(b"files/a", b"1", local_name=b"files/aa"), "another name"),
        (Raw(b"files/a", b"1", flags=0x808), "belong to no entry"),
        (Raw(b"files/a", b"", SYMLINK), "target is empty"),
        (Raw(b"files/a", b"x" * 4096, SYMLINK), "longer than 4095"),
        (Raw(b"files/a", b"x\0y", SYMLINK), "NUL"),
        (Raw(b"files/a", b"", stat.S_IFIFO | 0o600), "impossible mode"),
        (Raw(b"files/a", b"", stat.S_IFBLK | 0o600), "impossible mode"),
        (Raw(b"files/a", b"", 0o170644), "impossible mode"),
        (Raw(b"files/a", b"", DIRECTORY), "impossible mode"),
        (Raw(b"files/a/", b"", FILE), "impossible mode"),
        (Raw(b"files/a/", b"x", DIRECTORY), "directory with content"),
    ],
)  # fmt: skip
def test_a_damaged_or_unreadable_entry_is_refused(entry: Raw, reason: str) -> None:
    error = refusal(archive(Raw(b"files/_", b"good"), entry, Raw(b"files/z", b"good")))
    assert reason in error.strerror
    assert error.entry == entry.name.decode()


def test_entries_that_share_data_are_refused() -> None:
    kernel = deflated(b"files/kernel", bytes(100_000))
    first = len(zip_of([manifest(2, 200_000)])) - zr.CENTRAL.size - len("manifest.json") - zr.END.size
    twin = Raw(
        kernel.name, kernel.data, method=8, size=kernel.size, crc=kernel.crc, local=False, offset=first
    )  # fmt: skip
    twin.name = b"files/twin"
    error = refusal(zip_of([manifest(2, 200_000), kernel, twin]))
    assert ("overlaps" in error.strerror, error.entry) == (True, "files/twin")


def test_an_entry_quoted_within_another_is_refused() -> None:
    inner = zip_of([Raw(b"files/inner", b"1")])
    inner = inner[: zr.LOCAL.size + len("files/inner") + 1]
    outer = Raw(b"files/outer", inner)
    at = len(zip_of([manifest(2, len(inner) + 1)])) - zr.CENTRAL.size - len("manifest.json") - zr.END.size
    at += zr.LOCAL.size + len("files/outer")
    error = refusal(zip_of([manifest(2, len(inner) + 1), outer, Raw(b"files/inner", b"1", local=False, offset=at)]))
    assert ("overlaps" in error.strerror, error.entry) == (True, "files/inner")


def test_bytes_that_belong_to_no_entry_are_refused() -> None:
    hidden = archive(Raw(b"files/a", b"1"), Raw(b"files/hidden", b"2"))
    one = zip_of([manifest(1, 1), Raw(b"files/a", b"1")])
    end = zr.END.unpack(one[-zr.END.size :])
    directory = one[end[6] : end[6] + end[5]]
    body = one[: end[6]] + b"unseen bytes"
    tail = zr.END.pack(zr.SIGNATURE_END, 0, 0, 2, 2, len(directory), len(body), 0)
    assert "belong to no entry" in refusal(body + directory + tail).strerror
    assert refusal(b"#!/bin/sh\n" + hidden)
    assert refusal(hidden + b"junk")


# -- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"P", b"hello world, this is no archive" * 9, b"\x1f\x8b" + bytes(99)])
def test_what_is_no_zip_is_refused(data: bytes) -> None:
    assert "not a ZIP archive" in refusal(data).strerror


def test_an_archive_that_changes_after_it_was_opened_is_noticed() -> None:
    text = b"".join(b"line %d\n" % n for n in range(200_000))
    data = io.BytesIO(archive_of(DictTree({b"f": text, b"stored": os.urandom(1000)})))
    with open_archive(data) as tree:
        data.truncate(20_000)
        for _ in range(2):
            with pytest.raises(ArchiveError):
                tree.read(b"f", len(text) - 10, 10)
        with pytest.raises(ArchiveError):
            list(tree.chunks(b"stored"))


def test_every_truncation_is_refused() -> None:
    data = archive_of(DictTree({b"a": b"x" * 500, b"b/c": b"y"}))
    for size in range(len(data)):
        assert refusal(data[:size])
    assert "truncated" in refusal(data[: len(data) // 2]).strerror


@pytest.mark.parametrize("name", ["plain.txt", "files/a.txt"])
def test_a_plain_zip_is_refused_with_a_word_on_what_to_do(name: str) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as plain:
        plain.writestr(name, "hello")
    error = refusal(file.getvalue())
    assert "no manifest.json" in error.strerror
    assert "unzip" in error.strerror


def test_what_cannot_be_an_archive_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ArchiveError, match="regular file"), open_archive(path):
            pass
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as pipe, open(write_end, "wb"), pytest.raises(ArchiveError), open_archive(pipe):
        pass
    with pytest.raises(FileNotFoundError), open_archive(tmp_path / "none"):
        pass
    with pytest.raises(IsADirectoryError), open_archive(tmp_path):
        pass


# -- bombs -------------------------------------------------------------------------------------


def test_an_entry_that_expands_too_much_is_refused() -> None:
    data = archive(deflated(b"files/bomb", bytes(1_000_000)))
    limits = ArchiveLimits(ratio=100, ratio_from_bytes=500_000)
    error = refusal(data, limits)
    assert ("more than 100 times" in error.strerror, error.entry) == (True, "files/bomb")
    assert facts_of_archive(data)


def test_a_manifest_of_many_small_values_is_refused_in_little_memory() -> None:
    text = b'{"version":"1","created_at":"2026-01-01","file_count":0,"total_bytes":0,"hard_links":['
    text += b"[]," * 3_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        error = refusal(zip_of([deflated(b"manifest.json", text)]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ("more values" in error.strerror, error.entry) == (True, "manifest.json")
    assert peak < 3 * len(text)


def test_a_manifest_whose_unknown_keys_are_larger_than_entries_can_need_is_refused_before_it_is_decompressed() -> None:
    large = archive(padding="x" * (70 << 20))
    tracemalloc.start()
    try:
        error = refusal(large)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ("larger than its entries can need" in error.strerror, error.entry) == (True, "manifest.json")
    assert peak < 4 << 20


def test_what_the_manifest_takes_is_reserved_before_it_takes_it() -> None:
    data = archive(padding="x" * (4 << 20))
    reserved: list[int] = []

    def reserve(count: int) -> None:
        reserved.append(count)
        if len(reserved) == refused_at:
            raise OSError(errno.ENOSPC, "no room")

    for refused_at in (1, 2):
        reserved.clear()
        tracemalloc.start()
        try:
            with pytest.raises(OSError, match="no room"), open_archive(io.BytesIO(data), reserve=reserve):
                pytest.fail("the archive was accepted")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(reserved) == refused_at
        assert peak < sum(reserved[: refused_at - 1]) + (2 << 20)
    refused_at = 0
    reserved.clear()
    with open_archive(io.BytesIO(data), reserve=reserve):
        assert sum(reserved) >= 4 << 20


def test_an_entry_that_lies_about_its_size_is_stopped_in_fixed_memory() -> None:
    data = archive(deflated(b"files/bomb", bytes(64 << 20), size=10))
    tracemalloc.start()
    try:
        error = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "larger than it declares" in error.strerror
    assert peak < 4 << 20


# -- the manifest ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2", "1.0", "", 1, None, ["1"], {"major": 1}])
def test_an_unknown_version_is_refused_whatever_else_there_is(version: object) -> None:
    error = refusal(archive(version=version, entries="of another shape"))
    assert ("unknown version" in error.strerror, error.entry) == (True, "manifest.json")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"\xff", b'"1"', b"{}", b'{"version":"1"}', b"[" * 100_000, b'{"version":' * 50_000,
        b'{"version":"1","created_at":"2026-01-01T00:00:00Z","file_count":0,"total_bytes":0.5}',
        b'{"version":"1","created_at":"2026-01-01T00:00:00Z","file_count":true,"total_bytes":0}',
        b'{"version":"1","created_at":"2026-01-01T00:00:00Z","file_count":' + b"9" * 10_000 + b',"total_bytes":0}',
        b'{"version":"1","created_at":"yesterday","file_count":0,"total_bytes":0}',
        b'{"version":"1","created_at":5,"file_count":0,"total_bytes":0}',
        b'{"version":"1","created_at":"2026-01-01","file_count":-1,"total_bytes":0}',
        b'{"version":"1","created_at":"2026-01-01","file_count":0,"total_bytes":0,"x":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_refused(text: bytes) -> None:
    error = refusal(zip_of([Raw(b"manifest.json", text)]))
    assert ("malformed" in error.strerror, error.entry) == (True, "manifest.json")


@pytest.mark.parametrize(("files", "total"), [(0, 1), (2, 1), (1, 0), (1, 2), (0, 0)])
def test_counts_that_contradict_the_content_are_refused(files: int, total: int) -> None:
    error = refusal(zip_of([manifest(files, total), Raw(b"files/a", b"1")]))
    assert ("the manifest says" in error.strerror, error.entry) == (True, "manifest.json")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"path": "a", "mode": 0o644}, "impossible mode"),
        ({"path": "a", "mode": 0o170644}, "impossible mode"),
        ({"path": "a", "mode": FILE | 1 << 16}, "impossible mode"),
        ({"path": "a", "mode": -1}, "impossible mode"),
        ({"path": "a", "mode": DIRECTORY}, "contradicts the entry's type"),
        ({"path": "a", "mode": SYMLINK}, "contradicts the entry's type"),
        ({"path": "a", "mode": stat.S_IFCHR | 0o666, "rdev": 259}, "contradicts the entry's type"),
        ({"path": "a", "mode": FILE, "rdev": 259}, "not a device node"),
        ({"path": "dev", "mode": stat.S_IFCHR | 0o666, "rdev": -1}, "out of range"),
        ({"path": "dev", "mode": stat.S_IFCHR | 0o666, "rdev": 1 << 64}, "out of range"),
        ({"path": "a", "uid": -1}, "owner out of range"),
        ({"path": "a", "gid": 1 << 32}, "owner out of range"),
        ({"path": "a", "uid": 4294967295}, "owner out of range"),
        ({"path": "a", "gid": 4294967295}, "owner out of range"),
        ({"path": "dev", "mode": stat.S_IFCHR | 0o666, "rdev": 1 << 32}, "out of range"),
        ({"path": "a", "mtime_ns": 10**40}, "mtime out of range"),
        ({"path": "a", "mtime_ns": (2**63 - 1) * 10**9}, "mtime out of range"),
        ({"path": "a", "mtime_ns": -(2**63) * 10**9}, "mtime out of range"),
        ({"path": "a", "mtime_ns": 67_768_036_191_676_800 * 10**9}, "mtime out of range"),
        ({"path": "x/" * 40_000 + "x", "mode": stat.S_IFIFO}, "longer than 65528"),
        ({"path": "none", "mode": FILE}, "not in the archive"),
        ({"path": "none", "mode": SYMLINK}, "not in the archive"),
        ({"path": "none"}, "not in the archive"),
        ({"path": "../x", "mode": stat.S_IFIFO}, "malformed"),
        ({"path": "/x", "mode": stat.S_IFIFO}, "malformed"),
        ({"path": "x/", "mode": stat.S_IFIFO}, "malformed"),
        ({"path": "x\0", "mode": stat.S_IFIFO}, "malformed"),
        ({"path": "x" * 256, "mode": stat.S_IFIFO}, "malformed"),
        ({"path": "a", "xattrs": {"user.x": b64(bytes(65_537))}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"x": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"user": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"user.": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {".x": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"USER.x": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"system.x": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"btrfs.compression": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"system.posix_acl_access": b64(b"no ACL")}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"user.\0": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"%41": ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {"n" * 256: ""}}, "impossible xattr"),
        ({"path": "a", "xattrs": {f"user.{n:0200}": "" for n in range(400)}}, "too many xattrs"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_true_is_refused(record: dict[str, object], reason: str) -> None:
    error = refusal(archive(Raw(b"files/a", b"1"), entries=[record]))
    assert reason in error.strerror
    assert error.entry == record["path"]


@pytest.mark.parametrize(
    "keys",
    [
        {"entries": {}}, {"entries": [[]]}, {"entries": [{}]}, {"entries": [{"path": 5}]}, {"hard_links": "ab"},
        {"entries": [{"path": "a", "mtime_ns": "1"}]}, {"entries": [{"path": "a", "xattrs": {"user.x": "!"}}]},
        {"hard_links": [[1, 2]]}, {"names": 5}, {"entries": [{"path": "a", "mtime_ns": 1.5}]},
        {"entries": [{"path": "a", "mtime_ns": True}]}, {"entries": [{"path": "a", "uid": 0.5}]},
    ],
)  # fmt: skip
def test_optional_keys_of_the_wrong_type_are_refused(keys: dict[str, object]) -> None:
    error = refusal(archive(Raw(b"files/a", b"1"), **keys))
    assert ("malformed" in error.strerror, error.entry) == (True, "manifest.json")


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([["a", "none"]], "not in the archive"),
        ([["a", "d"]], "hard link to a directory"),
        ([["a", "a"]], "twice"),
        ([["a", "same"], ["same", "a"]], "twice"),
        ([["a", "longer"]], "differ"),
        ([["a", "link"]], "differ"),
        ([["a", "other"]], "differ"),
        ([["a", "owned"]], "differ"),
        ([["link", "link2"]], "differ"),
        ([["a", "../a"]], "malformed"),
    ],
)
def test_hard_links_that_cannot_be_are_refused(groups: list[list[str]], reason: str) -> None:
    entries = (
        Raw(b"files/a", b"1"), Raw(b"files/same", b"1"), Raw(b"files/other", b"2"), Raw(b"files/longer", b"12"),
        Raw(b"files/owned", b"1"), Raw(b"files/link", b"1", SYMLINK), Raw(b"files/link2", b"2", SYMLINK),
        Raw(b"files/d/", mode=DIRECTORY),
    )  # fmt: skip
    error = refusal(archive(*entries, hard_links=groups, entries=[{"path": "owned", "uid": 5}]))
    assert reason in error.strerror
    assert error.entry
    assert error.entry.removeprefix("files/") in {path for group in groups for path in group}


def test_hard_links_of_equal_crc_and_other_content_are_refused() -> None:
    # Both have the CRC of four zero bytes after their own: found by solving for the last four.
    first, second = b"first one!", b"second one"
    forged = [data + patch(data) for data in (first, second)]
    assert zlib.crc32(forged[0]) == zlib.crc32(forged[1])
    error = refusal(archive(Raw(b"files/a", forged[0]), Raw(b"files/b", forged[1]), hard_links=[["a", "b"]]))
    assert ("differ" in error.strerror, error.entry) == (True, "files/b")


def patch(data: bytes) -> bytes:
    """The four bytes that make the CRC of `data` plus them 0xFFFFFFFF (its register 0)."""
    return struct.pack("<I", zlib.crc32(data) ^ 0xFFFFFFFF)


# -- damage at random --------------------------------------------------------------------------

TREE = rich_tree()
GOOD = archive_of(TREE)
FACTS = facts(TREE)

flips = st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=4)


def check_damaged(data: bytes) -> None:
    """Damage is seen, or harmless: never another tree, another exception, or a lot of memory."""
    try:
        found = facts_of_archive(data)
    except ArchiveError:
        return
    assert found == FACTS


@settings(max_examples=10 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(flips)
def test_flipped_bytes_are_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, mask in changes:
        data[at] ^= mask
    check_damaged(bytes(data))


@settings(max_examples=4 * settings().max_examples)
@given(st.integers(0, len(GOOD)), st.integers(0, 200), st.binary(max_size=40))
def test_a_piece_cut_out_or_put_in_is_refused_or_harmless(at: int, cut: int, put: bytes) -> None:
    check_damaged(GOOD[:at] + put + GOOD[at + cut :])


# Values that are nearly right, in the places where they are looked at.
numbers = st.one_of(
    st.sampled_from(
        [0, 1, -1, FILE, DIRECTORY, SYMLINK, stat.S_IFIFO, stat.S_IFCHR | 0o600, 2**16, 2**31, 2**32, 2**63]
    ),
    st.integers(-(2**80), 2**80),
)
texts = st.one_of(
    st.sampled_from(["", "a", "d", "d/b", "s", "new", "d/new", "..", "%FF", "%25", "a/x"]), st.text(max_size=5)
)
junk = st.one_of(
    numbers, texts, st.none(), st.floats(allow_nan=False, allow_infinity=False), st.lists(texts, max_size=2)
)
records = st.fixed_dictionaries(
    {"path": texts},
    optional={
        "mode": numbers,
        "mtime_ns": numbers,
        "uid": numbers,
        "gid": numbers,
        "rdev": numbers,
        "xattrs": st.dictionaries(texts, st.binary(max_size=3).map(b64), max_size=2) | junk,
    },
)
manifests = st.fixed_dictionaries(
    {},
    optional={
        "entries": st.lists(records | junk, max_size=3),
        "hard_links": st.lists(st.lists(texts, max_size=3), max_size=2) | junk,
        "names": st.sampled_from(["percent", None]) | junk,
        "created_at": texts,
        "file_count": st.just(2) | junk,
        "more": junk,
    },
)
raws = st.builds(
    Raw,
    texts.map(lambda text: b"files/" + text.encode()) | st.binary(max_size=9),
    st.binary(max_size=9),
    mode=st.sampled_from([0, 0o644, FILE, DIRECTORY, SYMLINK]) | st.integers(0, 0xFFFF),
    method=st.sampled_from([0, 8]) | st.integers(0, 0xFFFF),
    flags=st.sampled_from([0, 8, 0x800, 0x808]) | st.integers(0, 0xFFFF),
    size=st.none() | st.integers(0, 2**32 - 1),
    crc=st.none() | st.integers(0, 2**32 - 1),
    offset=st.none() | st.integers(0, 2**32 - 1),
    local=st.booleans(),
)
BASE = (Raw(b"files/a", b"1"), Raw(b"files/d/b", b"1"), Raw(b"files/s", b"target", SYMLINK))


@pytest.mark.extended
@settings(max_examples=10 * settings().max_examples)
@given(manifests)
def test_whatever_the_manifest_says_the_archive_is_read_or_refused(keys: dict[str, object]) -> None:
    check_read_or_refused(archive(*BASE, **keys))


@pytest.mark.extended
@settings(max_examples=10 * settings().max_examples)
@given(st.lists(raws, max_size=3))
def test_whatever_the_entries_are_the_archive_is_read_or_refused(entries: list[Raw]) -> None:
    check_read_or_refused(archive(*BASE, *entries))


def check_read_or_refused(data: bytes) -> None:
    try:
        found = facts_of_archive(data)
    except ArchiveError:
        return
    # What is accepted can be written, and is the same again.
    with open_archive(io.BytesIO(data)) as tree:
        assert facts_of_archive(archive_of(tree)) == found


@pytest.mark.slow
def test_no_flip_in_the_records_takes_much_memory() -> None:
    directory = GOOD.index(zr.SIGNATURE_CENTRAL)
    tracemalloc.start()
    try:
        for at in range(directory, len(GOOD), 3):
            data = bytearray(GOOD)
            data[at] ^= 0x80
            check_damaged(bytes(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


SMALL = archive(Raw(b"files/a", b"1"))
SMALL_END = len(SMALL) - zr.END.size
SMALL_DIRECTORY = SMALL.index(zr.SIGNATURE_CENTRAL)
SMALL_LOCAL = SMALL.rindex(zr.SIGNATURE_LOCAL)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (SMALL_END + 4, "one part of several"),
        (SMALL_END + 6, "one part of several"),
        (SMALL_END + 8, "one part of several"),
        (SMALL_END + 12, "not where it should be"),
        (SMALL_END + 16, "not where it should be"),
        (SMALL_DIRECTORY, "central directory is malformed"),
        (SMALL_DIRECTORY + 28, "central directory is malformed"),
        (SMALL_DIRECTORY + 34, "another part of several"),
        (SMALL_LOCAL, "no local header"),
        (SMALL_LOCAL + 6, "contradicts the central directory"),
        (SMALL_LOCAL + 8, "contradicts the central directory"),
        (SMALL_LOCAL + 14, "contradicts the central directory"),
        (SMALL_LOCAL + 18, "contradicts the central directory"),
        (SMALL_LOCAL + 22, "contradicts the central directory"),
        (SMALL_LOCAL + 28, "overlaps"),
    ],
)
def test_records_that_contradict_each_other_are_refused(at: int, reason: str) -> None:
    data = bytearray(SMALL)
    data[at] ^= 2 if at != SMALL_DIRECTORY + 28 else 0x80
    assert reason in refusal(bytes(data)).strerror


LARGE = random.Random(3).randbytes(1 << 20) + bytes(2 << 20) + b"end"
CRC = zlib.crc32(LARGE)


def mounted(tmp_path: Path, *entries: Raw) -> MountedArchive:
    place = tmp_path / "a.zip"
    place.write_bytes(archive(*entries))
    return MountedArchive(str(place), cache_bytes=1 << 20)


def test_any_part_of_any_entry_is_read_with_a_small_cache(tmp_path: Path) -> None:
    contents = {b"stored": LARGE, b"one": LARGE + b"1", b"two": b"2" + LARGE, b"small": b"s" * 1000, b"none": b""}
    entries = [
        Raw(b"files/" + name, data) if name == b"stored" else deflated(b"files/" + name, data)
        for name, data in contents.items()
    ]
    tree = mounted(tmp_path, *entries)
    chance = random.Random(5)
    for _ in range(300):
        name = chance.choice(list(contents))
        offset, size = chance.randrange(len(LARGE) + 10), chance.choice((0, 1, 4096, 131_072, 300_000))
        assert tree.read(name, offset, size) == contents[name][offset : offset + size]
    tree.close()


@pytest.mark.parametrize(
    "entry",
    [
        deflated(b"files/a", LARGE, crc=5),
        deflated(b"files/a", LARGE, size=len(LARGE) - 1),
        deflated(b"files/a", LARGE, size=len(LARGE) + 1),
        deflated(b"files/a", LARGE, size=len(LARGE) + (5 << 20)),
        Raw(b"files/a", LARGE, crc=5),
        Raw(b"files/a", zlib.compress(LARGE, wbits=-15)[:-2], method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", zlib.compress(LARGE, wbits=-15) + b"!", method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", b"\xff" * 5000, method=zr.DEFLATED, size=len(LARGE), crc=CRC),
        Raw(b"files/a", b"1", crc=5),
        deflated(b"files/a", b"1" * 99, size=98),
        deflated(b"files/a", b"1" * 99, size=100),
        Raw(b"files/a", b"1", local_name=b"files/b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offset", [0, 90, (1 << 20) + 5])
def test_an_entry_that_is_not_what_it_declares_is_never_read(tmp_path: Path, entry: Raw, offset: int) -> None:
    tree = mounted(tmp_path, Raw(b"files/_", b"good"), entry, Raw(b"files/z", b"good"))
    assert tree.entry(b"a").is_file
    for _ in range(2):
        if offset < tree.entry(b"a").size:
            with pytest.raises(ArchiveError):
                tree.read(b"a", offset, 10)
    assert tree.read(b"_", 0, 10) == tree.read(b"z", 0, 10) == b"good"
    tree.close()


def test_a_symlink_is_checked_when_it_is_looked_at(tmp_path: Path) -> None:
    tree = mounted(tmp_path, Raw(b"files/bad", b"x\0y", SYMLINK), Raw(b"files/good", b"target", SYMLINK))
    assert tree.entry(b"good").target == b"target"
    assert names_in(tree, b"") == [b"bad", b"good"]
    with pytest.raises(ArchiveError, match="NUL"):
        tree.entry(b"bad")
    tree.close()


def test_the_memory_that_the_index_takes_is_announced(tmp_path: Path) -> None:
    place = tmp_path / "a.zip"
    place.write_bytes(archive(*(Raw(b"files/%d" % number, b"x") for number in range(1000))))
    announced: list[int] = []
    MountedArchive(str(place), reserve=announced.append).close()
    assert sum(announced) > 1000 * 1000

    def refuse(_: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        MountedArchive(str(place), reserve=refuse)
