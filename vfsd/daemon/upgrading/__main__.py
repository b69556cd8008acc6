"""The new daemon of an upgrade as a process: `python -m vfsd.daemon.upgrading CHANNEL_FD`, as the old one starts it.

It inherits the old daemon's environment, limits, namespaces and log, and becomes the keeper of the new daemon if the
workspace is to have one.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import sys

import vfsd
from protocol.linux import credentials
from vfsd.daemon import preload
from vfsd.daemon.daemon import run_daemon
from vfsd.daemon.keeper import keeping
from vfsd.daemon.keeper.keeping import Kept
from vfsd.daemon.resume import FORMAT
from vfsd.daemon.starting import restart_kept, run
from vfsd.daemon.upgrading.messages import (
    Begin,
    Channel,
    Failed,
    Hello,
    PeerEndedError,
    TakeOverError,
)
from vfsd.daemon.upgrading.taking import Successor
from vfsd.machine import logs
from vfsd.wire.options import decode_options

_logger = logging.getLogger(__name__)


def main(channel_fd: int) -> int:
    """Take over and serve.  Return the exit status: 0 after a clean unmount, 1 if something failed."""
    os.set_inheritable(channel_fd, False)
    credentials.hide()  # from a daemon of an earlier version
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        channel.send(Hello(vfsd.__version__, FORMAT))
        preload.preload()
        preload.import_rest()
        select.select([channel], [], [])
        begin, descriptors = channel.receive_now()
        if not isinstance(begin, Begin):
            return 1
        credentials.take(begin.credentials)
        successor = Successor(channel, begin, *descriptors)
        options = decode_options(begin.options.encode())
    except PeerEndedError:
        return 1
    except (ValueError, TakeOverError) as error:
        channel.send(Failed(f"cannot read the handover: {error}"))
        return 1
    logs.configure(options.log.log_level, options.log.log_format)

    def start(kept: Kept | None) -> int:
        serve = functools.partial(run_daemon, started_by=successor.started_by, starter=successor.starter, kept=kept)
        try:
            run(options, lambda _: None, functools.partial(serve, successor=successor))
        except Exception as error:  # noqa: BLE001 (reported, and logged with its traceback)
            logs.log_failure(_logger, "upgrade", error)
            successor.failed(error)
            return 1
        return 0

    if not keeping.is_wanted(options):
        return start(None)
    run_again = functools.partial(run_daemon, started_by=successor.started_by, starter=successor.starter)
    return keeping.Keeper(options).run(start, restart_kept(options, run_again), successor.close)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
