"""The filesystem suites over every backend of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
