"""The old daemon of an upgrade, after it has given the workspace away."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable

import pytest
import trio

from vfsd.daemon.upgrading.giving import NewDaemon
from vfsd.daemon.upgrading.messages import Channel, Failed


@pytest.mark.parametrize(
    "end", [lambda theirs: theirs.send(Failed("no memory")), lambda theirs: theirs.close()], ids=["fails", "dies"]
)
def test_a_new_daemon_that_does_not_serve_and_has_no_keeper_is_ended(end: Callable[[Channel], None]) -> None:
    trio.run(_wait_for_serving, end)


async def _wait_for_serving(end: Callable[[Channel], None]) -> None:
    ours, theirs = (Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    process = subprocess.Popen(["sleep", "600"])
    new = NewDaemon(process, ours)
    new._pidfd = os.pidfd_open(process.pid)
    end(theirs)
    try:
        with trio.fail_after(60):
            assert not await new.is_serving()
        assert process.returncode is not None
    finally:
        process.kill()
        process.wait()
        os.close(new._pidfd)
        ours.close()
        theirs.close()
