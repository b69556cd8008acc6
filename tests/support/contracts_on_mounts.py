"""The contract suites of `protocol.testing` on a mount: each test has a directory of its own on one mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import HostFilesystem

__all__ = ["OnMount"]


class OnMount:
    """Add this to the bases of a suite, in a module with the fixture `shared`: the path of a mount."""

    @pytest.fixture
    def filesystem(self, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> HostFilesystem:
        root = shared / tmp_path_factory.mktemp("test").name  # a name that no other test has
        root.mkdir()
        return HostFilesystem(root)
