"""What an unmount waits for: threads of the daemon that have files open on the mount."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from protocol.backends.memory import MemoryVolume
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.starting import run
from vfsd.kernel.engines.base import Engine
from vfsd.kernel.inotify import Replay
from vfsd.wire.options import BackendSpec, MountOptions, Ready


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


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.machine.logs.configure", lambda *_: None)


async def _fails(options: MountOptions, *, ready: Callable[[Ready], None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        raise PermissionError(errno.EACCES, "no", options.workspace.mountpoint)


def test_a_failed_start_raises_the_error_itself_not_a_group() -> None:
    with pytest.raises(PermissionError) as caught:
        run(MountOptions.of("/m", "m"), lambda _: None, _fails)
    assert caught.value.filename == "/m"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_a_start_that_makes_a_container_undoes_it_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(signal, "raise_signal", steps.append)

    async def starts(_options: MountOptions, *, ready: Callable[[Ready], None]) -> None:
        del ready
        try:
            os.kill(os.getpid(), number)
            await trio.sleep_forever()
        finally:
            steps.append("undone")

    run(MountOptions.of("/m", "m", backend=BackendSpec.split("image:x")), lambda _: None, starts, continues=False)
    assert steps == ["undone", number]
