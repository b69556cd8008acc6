"""A fork is refused before the process is copied, and leaves nothing: no table of shared memory, and no base."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from protocol.backends.memory import MemoryVolume
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.forks import process
from vfsd.daemon.forks.forks import Forks, Steps
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.history import UndoHistory
from vfsd.operations.forks import StateId
from vfsd.wire.options import MountOptions


async def run(*_: object, **__: object) -> None:
    pytest.fail("a fork runs")


def test_a_fork_that_the_memory_could_not_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = MemoryVolume()
    base = volume.take_snapshot("base")
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40 if name == "SC_PAGE_SIZE" else real(name))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            forks = Forks(MountOptions.of("/nowhere", "work"), Backend(volume), "native", nursery, run, None)
            with pytest.raises(OSError, match="as much memory as its source") as raised:
                forks.start(
                    "try",
                    "/nowhere/try",
                    StateId.of(base),
                    Steps(UndoHistory(), MergeLog()),
                    restores_base=False,
                    keeps_base=True,
                )
            assert raised.value.errno == errno.ENOMEM
            assert not forks.shares_memory
            assert not forks.is_base(base)
            assert forks.count == 0
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_fork_that_the_memory_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    process.check_memory()
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40 if name == "SC_PAGE_SIZE" else real(name))
    with pytest.raises(OSError, match="as much memory as its source") as raised:
        process.check_memory()
    assert raised.value.errno == errno.ENOMEM
