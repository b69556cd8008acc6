"""The filesystem suites over mounts, on each engine: an agent's calls see what every tool sees; also of an object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import Filesystem, HostFilesystem, InMemoryFilesystem
from protocol.errors import NotMountedError
from protocol.paths import CallLimits
from protocol.testing import (
    ArchiveContract,
    FilesystemContract,
    ReadOnlyContract,
    SnapshotContract,
    StreamingContract,
)
from tests.support.contracts_on_mounts import OnMount, read_only_archive
from vfsd.client.workspace import Workspace


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((engine, holds_object), id=f"{engine}{', object' * holds_object}", marks=marks)
        for engine, marks in (("native", ()), ("pyfuse3", pytest.mark.extended))
        for holds_object in (False, True)
    ],
)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One mount for all tests: of a workspace in memory, or of an object of this process."""
    place = tmp_path_factory.mktemp("shared") / "mount"
    engine, holds_object = request.param
    options: dict[str, Any] = {"engine": engine, "name": f"contract-{engine}-{holds_object}"}
    if holds_object:
        # One level more than the suites ask for: each test has a directory of its own.
        options["filesystem"] = InMemoryFilesystem(limits=CallLimits(depth=17))
    with Workspace.mount(place, **options):
        yield place


@pytest.fixture(scope="module", params=["native", "pyfuse3"])
def shared_read_only(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("read-only")
    place, archive = directory / "mount", read_only_archive(directory)
    name = f"contract-ro-{request.param}"
    with Workspace.mount(place, engine=request.param, name=name, archive=archive, read_only=True):
        yield place


class TestFilesystem(OnMount, FilesystemContract):
    pass


class TestStreaming(OnMount, StreamingContract):
    pass


class TestSnapshots(OnMount, SnapshotContract):
    pass


class TestArchives(OnMount, ArchiveContract):
    pass


class TestReadOnly(ReadOnlyContract):
    @pytest.fixture
    def filesystem(self, shared_read_only: Path) -> Filesystem:
        return HostFilesystem(shared_read_only)


def test_the_mountpoint_itself_is_a_filesystem(workdir: Path) -> None:
    place = workdir / "mount"
    with Workspace.mount(place, name=workdir.name):
        filesystem = HostFilesystem(place)
        filesystem.write("a/b", "seen by everybody")
        snapshot = filesystem.snapshot()
        (place / "a" / "b").write_text("changed by a tool")
        assert filesystem.read("a/b").content == "changed by a tool"

        filesystem.restore(snapshot)

        assert (place / "a" / "b").read_text() == "seen by everybody"
        assert filesystem.root == str(place)
    # It holds nothing open: the mount could be taken away.  It never works on the directory below.
    with pytest.raises(NotMountedError):
        filesystem.list()
