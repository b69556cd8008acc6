"""The archive of a tree: what it keeps, and who can read it."""

from __future__ import annotations

import errno
import io
import itertools
import json
import operator
import os
import random
import shutil
import stat
import subprocess
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.archive import ArchiveSummary, export_archive, open_archive, write_archive, zipwriter
from protocol.archive.write import select
from protocol.archive.zipwriter import STREAM_BYTES
from protocol.errors import ArchiveError
from protocol.tree import CHUNK_BYTES, Chunk, Hole, Tree, TreeEntry, filled, names_in, sparse
from tests.support.foreign_files import NOT_REGULAR, plant
from tests.support.trees import DictTree
from tests.unit.protocol.archive.archives import (
    CREATED_NS,
    DIRECTORY,
    FILE,
    Raw,
    archive,
    archive_of,
    facts,
    facts_of_archive,
    special,
)

NS = 1_000_000_000


def rich_tree(*, reverse: bool = False) -> DictTree:
    """Something of every kind."""
    when = CREATED_NS + 123_456_789
    linked = TreeEntry(b"", FILE | stat.S_ISUID, mtime_ns=when, uid=1, nlink=2, inode=900)
    items: dict[bytes, object] = {
        b"plain.txt": b"hello\n",
        b"empty": b"",
        b"empty dir": None,
        b"a/b/c/deep": b"x" * 70_000,
        b"a-b": b"sorts between a and a/b as a path, after a as a name",
        b"link": "a/b",
        b"dangling": "/nowhere/\u00e9",
        b"caf\xc3\xa9 \xf0\x9f\x90\x8d": b"utf-8",
        b"new\nline": b"1",
        b"quote\"'`$\\back": b"2",
        b"percent%41": b"3",
        b"one": (linked, b"shared"),
        b"a/two": (linked, b"shared"),
        b"attrs": (
            TreeEntry(
                b"", FILE, mtime_ns=when, uid=1000, gid=2**32 - 2, xattrs={b"user.b": b"\0\xff", b"user.%\xfe": b""}
            ),
            b"data",
        ),
        b"no-permission": (TreeEntry(b"", stat.S_IFREG, mtime_ns=-5), b"secret"),
        b"sticky": (TreeEntry(b"", stat.S_IFDIR | 0o1777, mtime_ns=4_000_000_000 * NS), b""),
        b"far-future": (TreeEntry(b"", FILE, mtime_ns=10**12 * NS), b""),
        b"fifo": special(b"fifo", stat.S_IFIFO | 0o600, mtime_ns=when),
        b"socket": special(b"socket", stat.S_IFSOCK | 0o700),
        b"null": special(b"null", stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3)),
        b"disk": special(b"disk", stat.S_IFBLK | 0o660, rdev=os.makedev(259, 70_000), xattrs={b"user.x": b"y"}),
    }
    pairs = sorted(items.items(), reverse=reverse)
    tree = DictTree(dict(pairs))  # type: ignore[arg-type]
    tree.by_path[b""] = replace(
        tree.by_path[b""], mode=stat.S_IFDIR | 0o2750, mtime_ns=77, uid=5, xattrs={b"user.r": b"1"}
    )
    if reverse:
        tree.by_path = dict(reversed(tree.by_path.items()))
    return tree


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path, f"these tests need the tool {name!r}: apt-get install {name}"
    return path


# -- what an archive keeps ---------------------------------------------------------------------


ODD_NAMES = [b"\xff", b"%FF", b"\xfe", b"%", b"%25", b"caf\xe9/\x80%\n", b"caf\xc3\xa9", b"\xed\xb2\x80", b"%C3%A9"]
LINKED_SYMLINK = (TreeEntry(b"", stat.S_IFLNK | 0o777, 3, nlink=2, inode=70, target=b"abc"), b"")
LINKED_FIFO = (TreeEntry(b"", stat.S_IFIFO | 0o600, nlink=2, inode=71), b"")


@pytest.mark.parametrize(
    ("tree", "level"),
    [
        *((rich_tree(), level) for level in (0, 1, 6, 9)),
        (DictTree(), 6),
        (DictTree({name: name for name in ODD_NAMES} | {b"\xff-fifo": special(b"", stat.S_IFIFO | 0o600)}), 6),
        (DictTree({b"s1": LINKED_SYMLINK, b"s2": LINKED_SYMLINK, b"f1": LINKED_FIFO, b"f2": LINKED_FIFO}), 6),
    ],
)
def test_everything_of_a_tree_comes_back(tree: DictTree, level: int) -> None:
    assert facts_of_archive(archive_of(tree, level=level)) == facts(tree)


def test_the_deepest_and_longest_paths_come_back() -> None:
    tree = DictTree({b"/".join([b"d"] * 2048): b"deep", b"\xff" * 255: b"long", b"n" * 255 + b"/f": b""})
    assert len(max(tree.by_path, key=len)) == 4095
    # The plain tree's own walk is quadratic at such a depth; its entries are as good.
    with open_archive(io.BytesIO(archive_of(Flat(tree)))) as read:
        assert {entry.path for entry in read.walk()} == set(tree.by_path)
        assert read.read(b"/".join([b"d"] * 2048), 0, 9) == b"deep"


class Flat:
    """A tree that walks in no particular order."""

    def __init__(self, tree: DictTree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> object:
        return getattr(self._tree, name)

    def walk(self) -> Iterator[TreeEntry]:
        return iter(self._tree.by_path.values())


def chain(depth: int, component: bytes = b"d") -> list[TreeEntry]:
    """A root and `depth` directories, each within the one before."""
    path, entries = b"", [TreeEntry(b"", DIRECTORY)]
    for _ in range(depth):
        path = path + b"/" + component if path else component
        entries.append(TreeEntry(path, DIRECTORY))
    return entries


class Listed:
    """A tree without any content."""

    def __init__(self, entries: Sequence[TreeEntry]) -> None:
        self.by_path = entries

    def walk(self) -> Iterator[TreeEntry]:
        return iter(self.by_path)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return b""


def exported(entries: Sequence[TreeEntry]) -> tuple[ArchiveSummary, list[bytes]]:
    """The summary of an archive of `entries`, and the paths that are read from it."""
    file = io.BytesIO()
    summary = write_archive(Listed(entries), file, skip_too_long=True, level=1)  # type: ignore[arg-type]
    with open_archive(file) as tree:
        return summary, [entry.path for entry in tree.walk()]


def test_paths_longer_than_the_kernel_takes_at_once_come_back() -> None:
    entries = [*chain(200, b"n" * 200), TreeEntry(b"z", FILE)]
    assert len(entries[-2].path) > 40_000
    summary, paths = exported(entries)
    assert summary.skipped == {}
    assert paths == sorted(entry.path for entry in entries)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("component", "depth"), [(b"n" * 250, 300), (b"%" * 250, 300), (b"\xff" * 250, 120), (b"\xc3\xa9" * 100, 400)]
)
@pytest.mark.slow
def test_a_path_longer_than_any_zip_name_is_left_out_and_named_and_the_rest_is_there(
    component: bytes, depth: int
) -> None:
    entries = [*chain(depth, component), TreeEntry(b"zzz", FILE)]
    summary, paths = exported(entries)
    assert paths == sorted(paths)
    assert b"zzz" in paths
    [left_out] = summary.skipped
    assert left_out.rpartition(b"/")[0] in paths
    assert {entry.path for entry in entries} - set(paths) == {
        e.path for e in entries if len(e.path) >= len(left_out)
    } - {b"zzz"}
    assert "too long for an archive" in summary.skipped[left_out]


def test_a_path_of_exactly_the_longest_name_is_kept() -> None:
    entries = chain(327, b"n" * 199)
    room = 65_535 - len("files/") - len(entries[-1].path) - 1
    longest = TreeEntry(entries[-1].path + b"/" + b"f" * (room - 1), DIRECTORY)
    summary, paths = exported([*entries, longest])
    assert (len(b"files/" + longest.path + b"/"), summary.skipped, longest.path in paths) == (65_535, {}, True)
    summary, paths = exported([*entries, replace(longest, path=longest.path + b"f")])
    assert list(summary.skipped) == [longest.path + b"f"]


def test_a_chain_of_short_names_stays_within_what_a_reader_accepts() -> None:
    selection = select(chain(3000), all_names_bytes=1_000_000)
    kept = selection.entries[-1].path
    assert sum(len(entry.path) for entry in selection.entries) <= 1_000_000
    assert (len(kept) + 4) ** 2 >= 2 * 1_000_000  # as deep as the bound allows
    assert list(selection.skipped) == [kept + b"/d"]


def test_without_leave_to_skip_a_path_that_is_too_long_fails_the_archive_by_name() -> None:
    file = io.BytesIO()
    with pytest.raises(OSError, match="too long for an archive") as caught:
        write_archive(Listed(chain(400, b"n" * 250)), file)  # type: ignore[arg-type]
    assert (caught.value.errno, file.getvalue()) == (errno.ENAMETOOLONG, b"")


def test_what_only_one_file_system_has_and_times_that_no_clock_shows_do_not_spoil_an_archive() -> None:
    odd = {b"btrfs.compression": b"zstd", b"system.nfs4_acl": b"\0", b"nothing": b"", b"user.kept": b"1"}
    many = {b"user.%0200d" % number: b"" for number in range(400)}
    entries = [
        TreeEntry(b"", DIRECTORY),
        TreeEntry(b"a", FILE, xattrs=odd, mtime_ns=(2**63 - 1) * NS),
        TreeEntry(b"b", FILE, xattrs=many, mtime_ns=-(2**63) * NS),
    ]
    file = io.BytesIO()
    summary = write_archive(Listed(entries), file, skip_too_long=True)  # type: ignore[arg-type]
    with open_archive(file) as tree:
        assert dict(tree.entry(b"a").xattrs) == {b"user.kept": b"1"}
        assert dict(tree.entry(b"b").xattrs) == {}
        assert tree.entry(b"a").mtime_ns // NS == 67_768_036_191_676_799
        assert tree.entry(b"b").mtime_ns // NS == -67_768_040_609_740_800
    assert list(summary.skipped) == [b"b"]
    assert "extended attributes" in summary.skipped[b"b"]


def test_hard_linked_names_are_one_file_again_and_others_are_not() -> None:
    with open_archive(io.BytesIO(archive_of(rich_tree()))) as tree:
        one, two = tree.entry(b"one"), tree.entry(b"a/two")
        assert (one.inode, one.nlink) == (two.inode, 2)
        inodes = [entry.inode for entry in tree.walk()]
        assert 0 not in inodes
        assert len(set(inodes)) == len(inodes) - 1


names = st.binary(min_size=1, max_size=6).filter(lambda n: not set(n) & {0, 0x2F} and n not in (b".", b".."))
times = st.integers(-(2**62), 2**62)
xattr_names = st.builds(operator.add, st.sampled_from([b"user.", b"trusted.", b"security."]), names)
xattr_maps = st.dictionaries(xattr_names, st.binary(max_size=9), max_size=2)
contents = st.one_of(st.binary(max_size=50), st.builds(lambda b, n: b * n, st.binary(max_size=4), st.integers(0, 9000)))
files = st.builds(
    lambda mode, mtime, uid, xattrs, data: (TreeEntry(b"", stat.S_IFREG | mode, 0, mtime, uid, xattrs=xattrs), data),
    st.integers(0, 0o7777), times, st.integers(0, 2**32 - 2), xattr_maps, contents,
)  # fmt: skip
symlinks = st.binary(min_size=1, max_size=20).filter(lambda t: 0 not in t).map(
    lambda target: (TreeEntry(b"", stat.S_IFLNK | 0o777, len(target), target=target), b"")
)  # fmt: skip
specials = st.builds(
    lambda kind, mode, mtime: (TreeEntry(b"", kind | mode, 0, mtime), b""),
    st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK]), st.integers(0, 0o7777), times,
)  # fmt: skip
trees = st.recursive(
    st.one_of(files, symlinks, specials), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict))


def flat(nested: object, path: bytes = b"") -> dict[bytes, object]:
    if not isinstance(nested, dict):
        return {path: nested}
    found: dict[bytes, object] = {path: None} if path else {}
    for name, inner in nested.items():
        found |= flat(inner, path + b"/" + name if path else name)
    return found


@given(trees, st.integers(0, 9))
def test_any_tree_comes_back(nested: object, level: int) -> None:
    tree = DictTree(flat(nested))  # type: ignore[arg-type]
    assert facts_of_archive(archive_of(tree, level=level)) == facts(tree)


def test_an_archive_has_the_same_bytes_whichever_zeros_are_holes_and_however_chunks_are_cut() -> None:
    size = STREAM_BYTES
    content = b"x" + bytes(3 * size) + b"y" * 10 + bytes(2 * size) + b"z"

    class Cut(DictTree):
        """The content as a tree with holes has it."""

        def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:  # type: ignore[override]
            return itertools.chain.from_iterable(map(sparse, super().chunks(path, size)))

    archive = archive_of(Cut({b"f": content}))
    assert archive == archive_of(DictTree({b"f": content}))
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        assert file.read("files/f") == content
    with open_archive(io.BytesIO(archive)) as tree:
        chunks = list(tree.chunks(b"f"))
        assert b"".join(filled(chunks)) == content
        assert sum(len(chunk) for chunk in chunks if isinstance(chunk, Hole)) > 4 * size


# -- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "text"])
def test_reads_anywhere_in_a_file_give_what_is_there(kind: str) -> None:
    rng = random.Random(7)
    data = rng.randbytes(900_000) if kind == "random" else b"".join(b"line %d\n" % n for n in range(90_000))
    with open_archive(io.BytesIO(archive_of(DictTree({b"f": data, b"g": data[::-1]})))) as tree:
        for _ in range(40):
            offset, size = rng.randrange(len(data) + 10), rng.randrange(300_000)
            assert tree.read(b"f", offset, size) == data[offset : offset + size]
            assert tree.read(b"g", offset, 9) == data[::-1][offset : offset + 9]
        assert max(map(len, tree.chunks(b"f", 1000))) == 1000


def test_an_archive_tree_keeps_the_contract_of_trees() -> None:
    with open_archive(io.BytesIO(archive_of(rich_tree()))) as tree:
        assert isinstance(tree, Tree)
        assert names_in(tree, b"a") == [b"b", b"two"]
        assert [entry.path for entry in tree.walk(b"a")] == [b"a", b"a/b", b"a/b/c", b"a/b/c/deep", b"a/two"]
        assert tree.touched(tree) is None
        with pytest.raises(FileNotFoundError):
            tree.entry(b"a/none/at/all")
        with pytest.raises(NotADirectoryError):
            tree.entry(b"plain.txt/below")
        with pytest.raises(NotADirectoryError):
            names_in(tree, b"plain.txt")
        with pytest.raises(IsADirectoryError):
            tree.read(b"a", 0, 1)
        with pytest.raises(OSError, match="Invalid argument"):
            tree.chunks(b"link")


def test_an_archive_says_when_it_was_made_and_what_it_holds() -> None:
    with open_archive(io.BytesIO(archive_of(DictTree({b"a": b"12", b"b": b"345"})))) as tree:
        assert (tree.file_count, tree.total_bytes) == (2, 5)
        assert tree.created_at.timestamp() == CREATED_NS / NS


# -- the file ----------------------------------------------------------------------------------


def test_the_same_tree_gives_the_same_bytes() -> None:
    assert archive_of(rich_tree()) == archive_of(rich_tree(reverse=True))


def test_source_date_epoch_sets_the_time_and_an_argument_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    first, second = io.BytesIO(), io.BytesIO()
    write_archive(DictTree(), first)
    write_archive(DictTree(), second, created_ns=NS)
    assert created_at(first) == "1970-01-02T00:00:00Z"
    assert created_at(second) == "1970-01-01T00:00:01Z"


def created_at(file: io.BytesIO) -> str:
    with zipfile.ZipFile(file) as archive:
        return str(json.loads(archive.read("manifest.json"))["created_at"])


def test_a_source_date_epoch_that_is_no_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("yesterday", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
        with pytest.raises(OSError, match="SOURCE_DATE_EPOCH"):
            write_archive(DictTree(), io.BytesIO())


def test_the_manifest_comes_first_and_counts_files_and_bytes() -> None:
    with zipfile.ZipFile(io.BytesIO(archive_of(rich_tree()))) as archive:
        assert archive.namelist()[0] == "manifest.json"
        assert all(name.startswith("files/") for name in archive.namelist()[1:])
        manifest = json.loads(archive.read("manifest.json"))
        sizes = [i.file_size for i in archive.infolist()[1:] if stat.S_ISREG(i.external_attr >> 16)]
    assert manifest["version"] == "1"
    assert (manifest["file_count"], manifest["total_bytes"]) == (len(sizes), sum(sizes))


def test_the_summary_says_what_was_written() -> None:
    file = io.BytesIO()
    summary = write_archive(DictTree({b"d/a": b"12", b"d/e/b": b"345", b"l": "d"}), file)
    assert summary == ArchiveSummary(2, 2, 5, len(file.getvalue()))


def test_times_outside_of_what_dos_can_say_are_clamped() -> None:
    past, future = TreeEntry(b"", FILE, mtime_ns=0), TreeEntry(b"", FILE, mtime_ns=2**33 * NS)
    with zipfile.ZipFile(io.BytesIO(archive_of(DictTree({b"p": (past, b""), b"f": (future, b"")})))) as archive:
        assert archive.getinfo("files/p").date_time == (1980, 1, 1, 0, 0, 0)
        assert archive.getinfo("files/f").date_time == (2107, 12, 31, 23, 59, 58)


def test_progress_ends_with_everything_done() -> None:
    calls: list[tuple[int, int]] = []
    tree = DictTree({b"big": bytes(1_000_000), b"small": b"12"})
    write_archive(tree, io.BytesIO(), progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 2
    assert calls == sorted(calls)
    assert calls[-1] == (1_000_002, 1_000_002)


def test_a_pipe_gets_the_same_bytes_as_a_file(tmp_path: Path) -> None:
    tree = DictTree({b"big": random.Random(1).randbytes(1_000_000), b"small": b"x"})
    with (tmp_path / "out").open("wb") as out:
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out, bufsize=0)
        assert cat.stdin is not None
        with cat.stdin:
            write_archive(tree, cat.stdin, created_ns=CREATED_NS)  # type: ignore[arg-type]
        assert cat.wait() == 0
    assert (tmp_path / "out").read_bytes() == archive_of(tree)


def test_a_file_that_takes_only_a_part_of_each_write_gets_everything() -> None:
    class Grudging(io.BytesIO):
        def write(self, data: object) -> int:
            return super().write(bytes(data)[:1000])  # type: ignore[call-overload]

    file = Grudging()
    write_archive(rich_tree(), file, created_ns=CREATED_NS)
    assert file.getvalue() == archive_of(rich_tree())


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_file_that_is_not_as_large_as_its_entry_says_fails_the_archive(size: int, wrong: int) -> None:
    tree = DictTree({b"f": bytes(size)})
    tree.by_path[b"f"] = replace(tree.by_path[b"f"], size=size + wrong)
    if (size, wrong) == (10, -1):
        tree.content[b"f"] = b""  # a small file is asked for its size only
    with pytest.raises(OSError, match="changed while"):
        archive_of(tree)


# -- other readers -----------------------------------------------------------------------------


def test_unzip_accepts_and_extracts_it(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(archive_of(rich_tree()))
    tested = subprocess.run([tool("unzip"), "-t", "a.zip"], cwd=tmp_path, capture_output=True, check=False)
    assert tested.returncode == 0, tested.stdout
    environment = os.environ | {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}
    subprocess.run([tool("unzip"), "-q", "-^", "a.zip"], cwd=tmp_path, env=environment, check=True)
    root = tmp_path / "files"
    assert (root / "a/b/c/deep").read_bytes() == b"x" * 70_000
    assert (root / "caf\u00e9 \U0001f40d").read_bytes() == b"utf-8"
    assert (root / "new\nline").read_bytes() == b"1"
    assert (root / "quote\"'`$\\back").read_bytes() == b"2"
    assert (root / "one").read_bytes() == (root / "a/two").read_bytes() == b"shared"
    assert (root / "link").readlink() == Path("a/b")
    assert (root / "empty dir").is_dir()
    assert (root / "attrs").stat().st_mtime == CREATED_NS // NS, "whatever the time zone"
    assert stat.S_IMODE((root / "sticky").stat().st_mode) & 0o777 == 0o777
    assert stat.S_IMODE((root / "no-permission").stat().st_mode) == 0


def test_unzip_gets_every_file_also_where_names_are_not_utf8(tmp_path: Path) -> None:
    names = [b"\xff", b"%FF", b"a\xff", b"a"]
    (tmp_path / "a.zip").write_bytes(archive_of(DictTree({name: name for name in names})))
    subprocess.run([tool("unzip"), "-q", "a.zip"], cwd=tmp_path, check=True)
    assert sorted(path.read_bytes() for path in (tmp_path / "files").iterdir()) == sorted(names)


def test_an_archive_packed_again_by_zip_is_still_one(tmp_path: Path) -> None:
    tree = DictTree({b"d/caf\xc3\xa9": b"x" * 5000, b"link": "d", b"empty": b""})
    (tmp_path / "a.zip").write_bytes(archive_of(tree))
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    subprocess.run([tool("unzip"), "-q", "a.zip"], cwd=tmp_path, env=environment, check=True)
    subprocess.run([tool("zip"), "-qry", "b.zip", "manifest.json", "files"], cwd=tmp_path, env=environment, check=True)
    assert facts_of_archive((tmp_path / "b.zip").read_bytes()) == facts(tree)


def test_an_archive_by_zipfile_with_only_the_required_keys_is_read() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("files/d/a.txt", "hello")
        counts = {"version": "1", "created_at": "2026-01-01T00:00:00+00:00", "file_count": 1, "total_bytes": 5}
        archive.writestr("manifest.json", json.dumps(counts))
    with open_archive(file) as tree:
        assert [(entry.path, entry.mode) for entry in tree.walk()] == [
            (b"", DIRECTORY), (b"d", DIRECTORY), (b"d/a.txt", stat.S_IFREG | 0o600),
        ]  # fmt: skip
        assert tree.read(b"d/a.txt", 0, 99) == b"hello"


# -- export ------------------------------------------------------------------------------------


def test_what_has_no_owner_in_an_archive_belongs_to_the_user_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 5678)
    file = io.BytesIO(archive(Raw(b"files/d/file", b"content", mode=0o100640)))
    with open_archive(file) as tree:
        assert {(entry.path, entry.uid, entry.gid) for entry in tree.walk()} == {
            (path, 1234, 5678) for path in (b"", b"d", b"d/file")
        }


def test_an_export_leaves_only_the_archive(tmp_path: Path) -> None:
    old_mask = os.umask(0o027)
    try:
        summary = export_archive(rich_tree(), tmp_path / "a.zip", created_ns=CREATED_NS)
    finally:
        os.umask(old_mask)
    assert (tmp_path / "a.zip").read_bytes() == archive_of(rich_tree())
    assert summary.archive_bytes == (tmp_path / "a.zip").stat().st_size
    assert stat.S_IMODE((tmp_path / "a.zip").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.zip"]
    with open_archive(tmp_path / "a.zip") as tree:
        assert facts(tree) == facts(rich_tree())


def test_an_export_over_an_existing_file_is_refused_unless_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        export_archive(rich_tree(), path)
    assert path.read_bytes() == b"precious"
    export_archive(rich_tree(), path, overwrite=True, created_ns=CREATED_NS)
    assert path.read_bytes() == archive_of(rich_tree())
    assert os.listdir(tmp_path) == ["a.zip"]


def test_an_export_does_not_replace_a_file_that_appears_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with pytest.raises(FileExistsError):
        export_archive(rich_tree(), path, progress=lambda *_: path.write_bytes(b"precious") and None)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["a.zip"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_export_leaves_what_was_there(tmp_path: Path, overwrite: bool) -> None:
    if overwrite:
        (tmp_path / "a.zip").write_bytes(b"precious")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_archive(rich_tree(), tmp_path / "a.zip", overwrite=overwrite, progress=interrupt)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == (
        {"a.zip": b"precious"} if overwrite else {}
    )


def test_an_export_to_a_file_system_without_hard_links_works_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "FAT has no hard links")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / ("\u00e9" * 127)  # the longest name there can be
    export_archive(rich_tree(), path, created_ns=CREATED_NS)
    assert path.read_bytes() == archive_of(rich_tree())
    path.unlink()
    with pytest.raises(FileExistsError):
        export_archive(rich_tree(), path, progress=lambda *_: path.write_bytes(b"precious") and None)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == [path.name]


def test_an_export_into_a_missing_directory_or_onto_a_directory_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        export_archive(DictTree(), tmp_path / "none" / "a.zip")
    with pytest.raises(IsADirectoryError):
        export_archive(DictTree(), tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == []


# -- size --------------------------------------------------------------------------------------


class BigFile(DictTree):
    """A tree of one file whose content is made as it is read."""

    def __init__(self, size: int, pattern: bytes) -> None:
        super().__init__({b"big": b""})
        self.by_path[b"big"] = replace(self.by_path[b"big"], size=size)
        self._pattern = pattern

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        chunk = (self._pattern * (size // len(self._pattern) + 1))[:size]
        left = self.by_path[path].size
        while left:
            yield chunk[:left]
            left -= len(chunk[:left])


@pytest.mark.extended
@pytest.mark.slow
def test_a_file_past_4_gib_and_what_follows_it_come_back(tmp_path: Path) -> None:
    size = (4 << 30) + 5
    tree = BigFile(size, b"\0")
    tree.by_path[b"last"] = replace(tree.by_path[b"big"], path=b"last", size=3, inode=0)
    tree.content[b"last"] = b"end"
    with (tmp_path / "a.zip").open("wb") as file:
        write_archive(tree, file, level=1)
    with open_archive(tmp_path / "a.zip") as read:
        assert [(entry.path, entry.size) for entry in read.walk()] == [(b"", 0), (b"big", size), (b"last", 3)]
        assert read.read(b"last", 0, 9) == b"end"
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.getinfo("files/big").file_size == size
        assert archive.read("files/last") == b"end"


@pytest.mark.extended
def test_many_small_files_are_archived_in_fixed_memory() -> None:
    class Sink(io.RawIOBase):
        def write(self, data: object) -> int:
            return len(data)  # type: ignore[arg-type]

    class Small(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            return os.urandom(size)

    tree = Small({b"%d" % n: b"" for n in range(160)})
    for path, entry in tree.by_path.items():
        if entry.is_file:
            tree.by_path[path] = replace(entry, size=256 * 1024)
    tracemalloc.start()
    try:
        write_archive(tree, Sink())  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.extended
def test_more_entries_than_16_bits_can_count_come_back(tmp_path: Path) -> None:
    tree = DictTree()
    for n in range(66_000):
        tree.by_path[b"%05d" % n] = TreeEntry(b"%05d" % n, FILE)
    (tmp_path / "a.zip").write_bytes(data := archive_of(Flat(tree)))  # type: ignore[arg-type]
    with open_archive(io.BytesIO(data)) as read:
        assert read.file_count == len(names_in(read, b"")) == 66_000
    subprocess.run([tool("unzip"), "-tqq", "a.zip"], cwd=tmp_path, check=True)


def test_a_tree_too_large_for_any_reader_is_refused_at_once_with_its_largest_file() -> None:
    class Sparse(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            raise AssertionError("refused before anything is read")

    entry = TreeEntry(b"huge", FILE, size=10**15)
    tree = Sparse({b"small": b"x"})
    tree.walk = lambda: iter([TreeEntry(b"", DIRECTORY), entry, TreeEntry(b"small", FILE, size=1)])  # type: ignore[method-assign]
    file = io.BytesIO()
    with pytest.raises(OSError, match=r"1,000,000,000,000,000") as refused:
        write_archive(tree, file)
    assert refused.value.errno == errno.EFBIG
    assert refused.value.filename == "huge"
    assert file.getvalue() == b""


def test_the_threads_that_compress_give_way_to_the_one_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    pack = zipwriter._pack

    def noted(items: Sequence[zipwriter.Item], level: int) -> list[zipwriter._Packed]:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return pack(items, level)

    monkeypatch.setattr(zipwriter, "_pack", noted)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    archive_of(DictTree({b"f": b"content"}))
    assert seen == [min(mine + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_an_entry_of_no_known_kind_is_refused_by_name() -> None:
    tree = DictTree({b"odd": (TreeEntry(b"", 0o050644), b"")})
    with pytest.raises(OSError, match="mode 50644") as refused:
        write_archive(tree, io.BytesIO())
    assert refused.value.errno == errno.EINVAL
    assert refused.value.filename == "odd"


def test_what_is_no_archive_at_all_is_named(workdir: Path) -> None:
    (workdir / "text").write_text("no archive")
    with pytest.raises(ArchiveError, match="not a ZIP archive") as raised, open_archive(workdir / "text"):
        pass
    assert raised.value.filename == str(workdir / "text")


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_an_export_replaces_regular_files_only(tmp_path: Path, kind: str) -> None:
    plant(tmp_path / "a.zip", kind)
    before = os.lstat(tmp_path / "a.zip").st_ino
    if kind == "symlink":  # to a regular file: the link is replaced, the file is not
        export_archive(rich_tree(), tmp_path / "a.zip", overwrite=True)
        assert not zipfile.is_zipfile("/etc/hostname")
        return
    with pytest.raises(OSError, match="not a regular file"):
        export_archive(rich_tree(), tmp_path / "a.zip", overwrite=True)
    assert os.lstat(tmp_path / "a.zip").st_ino == before
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_a_full_disk_is_reported_with_the_path_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device for the archive, which was not written") as caught:
        export_archive(rich_tree(), tmp_path / "a.zip")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a.zip"))
    assert os.listdir(tmp_path) == []
