"""A daemon in the foreground that fails for no good reason at SIGUSR1: `python -m ... MOUNTPOINT NAME ENGINE`."""

from __future__ import annotations

import signal
import sys
from typing import Any

import trio

from vfsd.daemon import daemon
from vfsd.daemon.main import foreground
from vfsd.wire.options import MountOptions


class Crashing:
    """An engine that serves until the signal, and then raises."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def serve(self) -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._engine.serve)
                async for _ in signals:
                    raise RuntimeError("a bug")


def main() -> None:
    place, name, engine = sys.argv[1:]
    mount_engine = daemon.mount_engine
    daemon.mount_engine = lambda *arguments: Crashing(mount_engine(*arguments))  # type: ignore[assignment,misc]
    options = MountOptions.of(place, name, engine=engine)
    foreground(options, ready=lambda _: print("ready", flush=True))


if __name__ == "__main__":
    main()
