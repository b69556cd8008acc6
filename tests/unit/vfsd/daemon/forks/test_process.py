"""What a fork is refused for before the process is copied."""

from __future__ import annotations

import errno
import os

import pytest

from vfsd.daemon.forks import process


def test_a_fork_that_the_memory_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    process.check_memory()
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40 if name == "SC_PAGE_SIZE" else real(name))
    with pytest.raises(OSError, match="as much memory as its source") as raised:
        process.check_memory()
    assert raised.value.errno == errno.ENOMEM
