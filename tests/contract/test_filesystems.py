"""The filesystem suites over every backend of ours."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol import Filesystem, HostFilesystem, HostMount, InMemoryFilesystem, SnapshotableFilesystem, VolumeFilesystem
from protocol.backends.host import HostVolume
from protocol.backends.memory import MemoryVolume
from protocol.testing import (
    ArchiveContract,
    FilesystemContract,
    ReadOnlyContract,
    SnapshotContract,
    StreamingContract,
)
from protocol.testing.read_only import READ_ONLY_CONTENTS
from protocol.types import FileStat


class PlainVolume:
    """A volume without snapshots: its filesystem takes archives instead."""

    def __init__(self) -> None:
        self._memory = MemoryVolume()
        self.capabilities = replace(self._memory.capabilities, snapshots=False)

    def __getattr__(self, name: str) -> object:
        if name in {"take_snapshot", "restore_snapshot", "import_tree", "tree"}:
            raise AttributeError(name)
        return getattr(self._memory, name)


def in_memory(_directory: Path) -> SnapshotableFilesystem:
    return InMemoryFilesystem()


def on_host(directory: Path) -> SnapshotableFilesystem:
    (directory / "root").mkdir()
    return HostFilesystem(directory / "root")


def over_plain_volume(_directory: Path) -> SnapshotableFilesystem:
    return VolumeFilesystem(PlainVolume())  # type: ignore[arg-type]  # its methods are found when they are called


def over_host_volume(directory: Path) -> SnapshotableFilesystem:
    (directory / "root").mkdir()
    return VolumeFilesystem(HostVolume(os.fsencode(directory / "root")))


BACKENDS = pytest.mark.parametrize(
    "make",
    [in_memory, on_host, over_plain_volume, over_host_volume],
    ids=["memory", "host", "plain-volume", "host-volume"],
)


class Backend:
    @pytest.fixture
    def filesystem(
        self, make: Callable[[Path], SnapshotableFilesystem], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[SnapshotableFilesystem]:
        made = make(tmp_path_factory.mktemp("backend"))
        yield made
        if isinstance(made, VolumeFilesystem) and isinstance(made.volume, HostVolume):
            made.volume.check_invariants()
            made.volume.close()


@BACKENDS
class TestFilesystem(Backend, FilesystemContract):
    pass


@BACKENDS
class TestStreaming(Backend, StreamingContract):
    pass


@BACKENDS
class TestSnapshots(Backend, SnapshotContract):
    pass


@BACKENDS
class TestArchives(Backend, ArchiveContract):
    pass


@pytest.mark.parametrize("backend", ["memory", "host"])
class TestReadOnly(ReadOnlyContract):
    @pytest.fixture
    def filesystem(self, backend: str, tmp_path: Path) -> Filesystem:
        for path, content in sorted(READ_ONLY_CONTENTS.items()):
            if content is None:
                (tmp_path / path).mkdir()
            else:
                (tmp_path / path).write_bytes(content)
        if backend == "host":
            return HostFilesystem(tmp_path, read_only=True)
        return InMemoryFilesystem(mounts=[HostMount(tmp_path)], read_only=True)


Call = Callable[[SnapshotableFilesystem], Any]

NAMES = st.sampled_from(["a", "b", "link", "up", "loop", "..", ".", "", "n" * 81])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
DATA = st.sampled_from([b"", b"one\ntwo", b"three\r\n", b"\xff\n", b"x" * 70_000])
NUMBERS = st.one_of(st.none(), st.integers(-2, 3))
MODES = st.sampled_from(["create", "overwrite", "append", "other"])


def write(path: str, data: bytes, mode: Any, parents: bool) -> Call:
    return lambda filesystem: filesystem.write_bytes(path, data, mode=mode, create_parents=parents)


def stream(path: str, chunks: list[bytes], mode: Any, fails: bool) -> Call:
    def call(filesystem: SnapshotableFilesystem) -> Any:
        with filesystem.open_write(path, mode=mode) as writer:
            written = writer.write_all(chunks)
            if fails:
                raise ValueError("the caller's")
        return written, writer.path

    return call


def mkdir(path: str, parents: bool, exist_ok: bool) -> Call:
    return lambda filesystem: filesystem.mkdir(path, parents=parents, exist_ok=exist_ok)


def delete(path: str, recursive: bool) -> Call:
    return lambda filesystem: filesystem.delete(path, recursive=recursive)


def read(path: str, offset: int | None, limit: int | None) -> Call:
    return lambda filesystem: (
        filesystem.read(path, offset=offset or 0, limit=limit),
        filesystem.read_bytes(path, offset=offset or 0, limit=limit),
    )


def look(path: str) -> Call:
    return lambda filesystem: (
        filesystem.exists(path),
        filesystem.is_file(path),
        filesystem.is_dir(path),
        filesystem.stat(path),
        filesystem.list(path),
    )


def search(path: str, pattern: str) -> Call:
    return lambda filesystem: (list(filesystem.glob(pattern, path=path)), list(filesystem.grep("o", path=path)))


CALLS = st.one_of(
    st.builds(write, PATHS, DATA, MODES, st.booleans()),
    st.builds(stream, PATHS, st.lists(DATA, max_size=2), MODES, st.booleans()),
    st.builds(mkdir, PATHS, st.booleans(), st.booleans()),
    st.builds(delete, PATHS, st.booleans()),
    st.builds(read, PATHS, NUMBERS, NUMBERS),
    st.builds(look, PATHS),
    st.builds(search, PATHS, st.sampled_from(["*", "**/a", "{a,b}", "a/*", "["])),
)


def answer(call: Call, filesystem: SnapshotableFilesystem) -> object:
    """What a caller sees: the value, or the error in full; without what differs for good reason."""
    try:
        return comparable(call(filesystem))
    except (OSError, ValueError, TypeError) as error:
        return type(error), str(error), getattr(error, "errno", None), getattr(error, "filename", None)


def comparable(value: Any) -> Any:
    if isinstance(value, FileStat):
        return replace(value, created_at=None, modified_at=None, mode=value.mode & 0o170111)
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    return value


@pytest.fixture(scope="module")
def with_symlinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a state that calls alone cannot make."""
    root = tmp_path_factory.mktemp("symlinks")
    (root / "a").mkdir()
    (root / "a" / "b").write_text("one\ntwo\n")
    (root / "b").write_text("content")
    for name, target in {"link": "a", "up": "../outside", "loop": "loop"}.items():
        (root / name).symlink_to(target)
        (root / "a" / name).symlink_to(target)
    path = tmp_path_factory.mktemp("archive") / "state.zip"
    HostFilesystem(root).export_archive(path)
    return path


@given(st.lists(CALLS, min_size=1, max_size=12))
@pytest.mark.slow
def test_memory_and_host_answer_every_call_alike(with_symlinks: Path, calls: list[Call]) -> None:
    directory = tempfile.mkdtemp(prefix="vfsd-agree-")
    try:
        memory, host = InMemoryFilesystem(), HostFilesystem(directory)
        for filesystem in (memory, host):
            filesystem.import_archive(with_symlinks)
        snapshots = [filesystem.snapshot() for filesystem in (memory, host)]
        for call in calls:
            assert answer(call, memory) == answer(call, host)
        assert tree(memory) == tree(host)
        for filesystem, snapshot in zip((memory, host), snapshots, strict=True):
            filesystem.restore(snapshot)
        assert tree(memory) == tree(host)
        memory.volume.check_invariants()  # type: ignore[attr-defined]
    finally:
        shutil.rmtree(directory)


def tree(filesystem: SnapshotableFilesystem) -> dict[str, Any]:
    """Everything that is there; a symlink is not gone into."""
    found: dict[str, Any] = {}
    for entry in filesystem.list():
        found[entry.path] = comparable(entry)
        if entry.is_directory and not entry.is_symlink:
            for inner in filesystem.glob("**", path=entry.path):
                found[inner.path] = filesystem.read_bytes(inner.path).content
    return found
