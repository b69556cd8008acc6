"""What an unmount waits for: threads of the daemon that have files open on the mount."""

from __future__ import annotations

from typing import cast

import pytest
import trio
from trio.testing import MockClock

from protocol.backends.memory import MemoryVolume
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.kernel.engines.base import Engine
from vfsd.kernel.inotify import Replay


class Replays:
    """Replays one after the other; each takes `duration_s` unless it is dropped."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._dropped = trio.Event()
        self._turn = trio.Lock()
        self.complete = 0

    async def run(self) -> None:
        async with self._turn:
            with trio.move_on_after(self._duration_s) as waiting:
                await self._dropped.wait()
            self.complete += waiting.cancelled_caught

    def drop(self) -> None:
        self._dropped.set()


@pytest.mark.parametrize(("duration_s", "are_complete"), [(0.5, True), (60, False)])
def test_an_unmount_waits_for_replays_but_not_for_long(duration_s: float, are_complete: bool) -> None:
    async def main() -> None:
        replays = Replays(duration_s)
        async with trio.open_nursery() as nursery:
            mounted = MountedVolume(MemoryVolume(), cast("Engine", None), cast("Replay", replays), "/nowhere", nursery)
            running = 0

            async def replay() -> None:
                nonlocal running
                with mounted.using_mount():
                    running += 1
                    await replays.run()
                    running -= 1

            for _ in range(5):
                nursery.start_soon(replay)
            await trio.testing.wait_all_tasks_blocked()
            await mounted.wait_unused()
            assert running == 0
        assert (replays.complete == 5) is are_complete

    trio.run(main, clock=MockClock(autojump_threshold=0))
