"""statx and regular_file: waiting for a file's next timestamp, and files that are replaced in one step."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from protocol.linux import statx
from protocol.linux.regular_file import write_atomically
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import needs_root


def test_a_file_that_is_changed_after_the_wait_has_a_later_ctime(tmp_path: Path) -> None:
    for number in range(20):
        file = tmp_path / str(number)
        file.touch()
        before_ns = file.stat().st_ctime_ns
        statx.outlast_tick(before_ns)
        assert statx.file_clock_ns() > before_ns
        os.chmod(file, 0o600 if number % 2 else 0o640)
        assert file.stat().st_ctime_ns > before_ns


@pytest.mark.parametrize("ahead_s", [1, 3600])
def test_a_ctime_of_another_machines_clock_is_not_waited_for(ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("it waits"))
    statx.outlast_tick(statx.file_clock_ns() + ahead_s * 10**9)


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
