"""Daemons that are killed at one step of an upgrade: the old one, and the new one.

$VFSD_TEST_STEP names a file.  If it exists, it says at which message the process that sends it dies, for example
"before Begin" or "after Serving", and is removed then.  Started as `vfsd.daemon.main`, or as `vfsd.daemon.upgrading`
with the word "new" before the arguments.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vfsd.daemon import daemon
from vfsd.daemon.main import main
from vfsd.daemon.upgrading import __main__ as upgrading
from vfsd.daemon.upgrading.messages import Channel, Message

OF_OLD = ("Begin", "Follow", "Finish", "Go")
OF_NEW = ("Hello", "Loaded", "Followed", "Prepared", "Serving")


def die_if(step: str) -> None:
    path = Path(os.environ["VFSD_TEST_STEP"])
    try:
        if path.read_text() != step:
            return
        path.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_steps() -> None:
    """Have this process look for its step before and after each message that it sends."""
    send = Channel.send

    def dying_send(channel: Channel, message: Message, descriptors: Sequence[int] = ()) -> None:
        die_if(f"before {type(message).__name__}")
        send(channel, message, descriptors)
        die_if(f"after {type(message).__name__}")

    Channel.send = dying_send  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at_steps()
    if sys.argv[1] == "new":
        sys.exit(upgrading.main(int(sys.argv[2])))
    sys.exit(main(sys.argv[1:], functools.partial(daemon.run_daemon, started_by="a test")))
