"""The filesystem suites over a real mount, on each engine: an agent's calls see what every tool sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import Filesystem, HostFilesystem
from protocol.errors import NotMountedError
from protocol.testing import (
    ArchiveContract,
    FilesystemContract,
    ReadOnlyContract,
    SnapshotContract,
    StreamingContract,
)
from tests.support.contracts_on_mounts import OnMount, read_only_archive
from vfsd.client.workspace import Workspace


@pytest.fixture(scope="module", params=["native", "pyfuse3"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One mount for all tests: some hundred of them need no daemon each."""
    place = tmp_path_factory.mktemp("shared") / "mount"
    with Workspace.mount(place, engine=request.param, name=f"contract-{request.param}"):
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
