"""Daemons that start well or badly, as the workspace's name says: what `vfsd.client.launch` starts in its tests.

A good one, "fine", ends when the file that `archive` names exists.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable

import pyfuse3
import trio

from tests.unit.vfsd.machine.tiny_fuse import OneDirectory
from vfsd.daemon import main as daemon_process
from vfsd.wire.options import MountOptions, Ready


async def fine(options: MountOptions, ready: Callable[[Ready], None]) -> None:
    facts = {
        "cwd": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "argv": sys.argv,
    }
    print(json.dumps(facts), flush=True)
    ready(Ready(options.workspace.name, options.workspace.mountpoint, "/socket", os.getpid(), "fake", "a sentence"))
    while not os.path.exists(str(options.content.archive)):
        await trio.sleep(0.01)


async def hang(*, stubborn: bool) -> None:
    """Never get ready; a `stubborn` one does not end on SIGTERM either."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"pid {os.getpid()}", flush=True)
    await trio.sleep_forever()


async def run_daemon(options: MountOptions, *, ready: Callable[[Ready], None]) -> None:
    match options.workspace.name:
        case "fine":
            await fine(options, ready)
        case "fails":
            raise FileNotFoundError(errno.ENOENT, "there is no such place", options.workspace.mountpoint)
        case "refuses":
            raise ValueError("that makes no sense")
        case "crashes":
            raise RuntimeError("a bug")
        case "dies":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "babbles":
            os.write(int(sys.argv[2]), b"nonsense\n")
            await trio.sleep_forever()
        case "hangs":
            await hang(stubborn=True)
        case "waits":
            await hang(stubborn=False)
        case "mounts-and-hangs":
            mount_options = set(pyfuse3.default_options) | {f"fsname=vfsd:{options.workspace.name}", "subtype=vfsd"}
            pyfuse3.init(OneDirectory(), options.workspace.mountpoint, mount_options)
            await hang(stubborn=True)


if __name__ == "__main__":
    sys.exit(daemon_process.main(sys.argv[1:], run_daemon))
