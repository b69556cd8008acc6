"""The contract suites of `protocol.testing` on a mount: each test has a directory of its own on one mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import HostFilesystem, InMemoryFilesystem
from protocol.testing.read_only import READ_ONLY_CONTENTS

__all__ = ["OnMount", "read_only_archive"]


class OnMount:
    """Add this to the bases of a suite, in a module with the fixture `shared`: the path of a mount."""

    @pytest.fixture
    def filesystem(self, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> HostFilesystem:
        root = shared / tmp_path_factory.mktemp("test").name  # a name that no other test has
        root.mkdir()
        return HostFilesystem(root)


def read_only_archive(directory: Path) -> Path:
    """An archive in `directory` with what `ReadOnlyContract` expects."""
    content = InMemoryFilesystem()
    for path, data in READ_ONLY_CONTENTS.items():
        content.mkdir(path) if data is None else content.write_bytes(path, data)
    content.export_archive(directory / "content.zip")
    return directory / "content.zip"
