"""A daemon that gets SIGTERM when its mount is made, before its starter knows that.  Started as `vfsd.daemon.main`."""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

import trio

from vfsd.daemon import daemon
from vfsd.daemon.main import main


async def wait_answering(_daemon: daemon._Daemon, _mounted: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await trio.sleep_forever()


if __name__ == "__main__":
    daemon._Daemon._wait_answering = wait_answering  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:], functools.partial(daemon.run_daemon, started_by="a test")))
