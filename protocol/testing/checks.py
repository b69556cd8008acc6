"""Helpers of the suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protocol.filesystem import Filesystem


class FilesystemSuite:
    """Base of the suites over a filesystem.  A subclass overrides the fixture `filesystem`."""

    @pytest.fixture
    def filesystem(self) -> Any:
        raise NotImplementedError("override the fixture `filesystem`")


@contextmanager
def raises_os_error(kind: type[OSError], path: str) -> Iterator[None]:
    """Check that the block raises `kind`, with an errno and the normalised `path` as its file name."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.errno, f"{caught.value!r} has no errno"
    assert caught.value.filename == path


def contents(filesystem: Filesystem, path: str = ".") -> dict[str, bytes | None]:
    """Return everything below `path`: the content of each file, None for each directory."""
    found: dict[str, bytes | None] = {}
    for entry in filesystem.list(path):
        if entry.is_directory:
            found[entry.path] = None
            found.update(contents(filesystem, entry.path))
        else:
            with filesystem.open_read(entry.path) as reader:
                found[entry.path] = reader.read()
    return found
