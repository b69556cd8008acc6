"""The filesystem suites over a mounted object of this process: what a Filesystem can hold, its mount holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import InMemoryFilesystem
from protocol.paths import CallLimits
from protocol.testing import ArchiveContract, FilesystemContract, SnapshotContract, StreamingContract
from tests.support.contracts_on_mounts import OnMount
from vfsd.client.workspace import Workspace


@pytest.fixture(scope="module", params=["native", "pyfuse3"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One mount for all tests."""
    place = tmp_path_factory.mktemp("shared") / "mount"
    # One level more than the suites ask for: each test has a directory of its own.
    mounted = InMemoryFilesystem(limits=CallLimits(depth=17))
    with Workspace.mount(place, filesystem=mounted, engine=request.param, name=f"object-contract-{request.param}"):
        yield place


class TestFilesystem(OnMount, FilesystemContract):
    pass


class TestStreaming(OnMount, StreamingContract):
    pass


class TestSnapshots(OnMount, SnapshotContract):
    pass


class TestArchives(OnMount, ArchiveContract):
    pass
