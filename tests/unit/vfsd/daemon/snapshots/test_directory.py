"""Snapshots that are read through `.snapshots`: few are open at a time, and each can be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from protocol.backends.memory import MemoryVolume
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.testing.volume.driver import Driver
from protocol.tree import Tree, names_in
from vfsd.daemon.snapshots.directory import OPEN_STATES, StoreStates, VolumeStates
from vfsd.daemon.snapshots.store_restore import Stored

MANY = 3 * OPEN_STATES


def test_few_snapshots_of_a_volume_are_open_at_a_time_and_each_is_read() -> None:
    volume = MemoryVolume()
    fs, tree, open_names = Driver(volume), volume.tree, []

    @contextmanager
    def counted(name: str | None = None) -> Iterator[Tree]:
        with tree(name) as opened:
            open_names.append(name)
            try:
                yield opened
            finally:
                open_names.remove(name)

    volume.tree = counted  # type: ignore[method-assign]
    for number in range(MANY):
        fs.file(b"%d" % number)
        volume.take_snapshot(str(number))
    states = VolumeStates(volume)
    for _ in range(2):
        for number, info in enumerate(states.infos(), 1):
            assert len(states.using(info, lambda state: names_in(state, b""))) == number
            assert 0 < len(open_names) <= OPEN_STATES
    trio.run(states.close_unused, ())
    assert open_names == []


def test_few_snapshots_of_a_store_are_open_at_a_time_and_each_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    with Store(tmp_path / "store") as store:
        source = DirectorySource(directory)
        for number in range(MANY):
            (directory / str(number)).touch()
            store.take("w", str(number), source)
        states = StoreStates(Stored(store, "w", source, DirectoryTarget(directory)), lambda tree: tree)

        async def read() -> None:
            open_files = []
            for number, info in enumerate(await states.infos(), 1):
                assert len(await states.using(info, lambda state: names_in(state, b""))) == number
                open_files.append(len(os.listdir("/proc/self/fd")))
            assert max(open_files) < open_files[OPEN_STATES - 1] + OPEN_STATES  # each one that is open has some
            await states.close_unused(())
            assert len(os.listdir("/proc/self/fd")) < open_files[0]

        trio.run(read)
