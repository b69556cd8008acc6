"""System calls that Python's os module lacks."""

from __future__ import annotations

import os
import subprocess

import pytest

from protocol.linux.syscalls import filesystem_type


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_the_type_of_a_file_system_is_that_of_stat(path: str) -> None:
    wanted = subprocess.run(["stat", "-f", "-c", "%t", path], check=True, capture_output=True, text=True).stdout
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert filesystem_type(descriptor) == int(wanted, 16)
    finally:
        os.close(descriptor)


def test_the_type_of_no_file_system_is_unknown() -> None:
    assert filesystem_type(-1) == 0
