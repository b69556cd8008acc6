"""Files that are replaced in one step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from protocol.linux.regular_file import write_atomically
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import needs_root


@needs_root
def test_a_full_disk_is_reported_with_the_path_and_changes_nothing(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", max_bytes=64 * 1024) as small:
        path = str(small / "file")
        write_atomically(path, b"old", durable=False)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_atomically(path, bytes(128 * 1024), durable=False)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, path)
        assert Path(path).read_bytes() == b"old"
        assert os.listdir(small) == ["file"]
