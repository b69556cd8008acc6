"""The daemon as a process: which error its start raises, and signals during the start."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

import pytest
import trio

from vfsd.daemon.starting import run
from vfsd.wire.options import BackendSpec, MountOptions, Ready


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
