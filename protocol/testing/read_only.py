"""ReadOnlyContract: the behaviour of a `Filesystem` that cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

import pytest

from protocol.filesystem import Filesystem, SnapshotableFilesystem
from protocol.testing.filesystem import FilesystemSuite, contents

# The content of the filesystem under test.
READ_ONLY_CONTENTS: Final = {"file": b"content\n", "directory": None, "directory/inner": b"inner\n"}

_CHANGES: Final[dict[str, Callable[[Any], object]]] = {
    "write": lambda filesystem: filesystem.write("file", "x"),
    "write new": lambda filesystem: filesystem.write("new", "x", mode="create"),
    "append": lambda filesystem: filesystem.write("file", "x", mode="append"),
    "write_bytes": lambda filesystem: filesystem.write_bytes("file", b"x"),
    "open_write": lambda filesystem: filesystem.open_write("file"),
    "delete": lambda filesystem: filesystem.delete("file"),
    "delete a directory": lambda filesystem: filesystem.delete("directory", recursive=True),
    "delete what is missing": lambda filesystem: filesystem.delete("missing"),
    "mkdir": lambda filesystem: filesystem.mkdir("new"),
}


class ReadOnlyContract(FilesystemSuite):
    """The contract of a read-only `Filesystem`.  `filesystem` is read-only and contains READ_ONLY_CONTENTS."""

    def test_it_reports_that_it_is_read_only(self, filesystem: Filesystem) -> None:
        assert filesystem.read_only is True

    @pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
    def test_every_change_is_refused_and_changes_nothing(
        self, filesystem: Filesystem, change: Callable[[Any], object]
    ) -> None:
        with pytest.raises(PermissionError) as caught:
            change(filesystem)

        assert caught.value.errno == errno.EROFS
        assert caught.value.filename in {"file", "new", "directory", "missing"}
        assert contents(filesystem) == READ_ONLY_CONTENTS

    def test_everything_can_be_read(self, filesystem: Filesystem) -> None:
        assert contents(filesystem) == READ_ONLY_CONTENTS
        assert filesystem.read("file").content == "content\n"
        assert filesystem.read_bytes("directory/inner").content == b"inner\n"
        assert filesystem.stat("file").size_bytes == 8
        assert [match.path for match in filesystem.glob("*")] == ["directory/inner", "file"]
        assert [match.path for match in filesystem.grep("inner")] == ["directory/inner"]
        with filesystem.open_text("file") as reader:
            assert list(reader) == ["content\n"]

    def test_a_restore_is_a_change(self, filesystem: Filesystem) -> None:
        if not isinstance(filesystem, SnapshotableFilesystem):
            return  # it has none
        snapshot = filesystem.snapshot()

        with pytest.raises(PermissionError) as caught:
            filesystem.restore(snapshot)

        assert caught.value.errno == errno.EROFS
