"""A daemon that is killed once, at one step of the first request with one opcode.

Started as `vfsd.daemon.main`.  $VFSD_TEST_OPCODE is the name of the opcode, $VFSD_TEST_STEP one of STEPS, and
$VFSD_TEST_FLAG a file that exists until the daemon is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import struct
import sys
from typing import Any

from vfsd.daemon import daemon
from vfsd.daemon.main import main
from vfsd.kernel.engines.native.session import NativeEngine
from vfsd.kernel.engines.native.wire import Opcode

STEPS = ("read", "recorded", "replied")


def die_once() -> None:
    try:
        os.unlink(os.environ["VFSD_TEST_FLAG"])
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(opcode: Opcode, step: str) -> None:
    """Have the engine kill its process at `step` of the first request with `opcode`."""
    respond, send = NativeEngine._respond, NativeEngine._send

    def is_chosen(engine: NativeEngine) -> bool:
        found = struct.unpack_from("=I", engine._buffer, 4)[0]
        return bool(found == opcode or (found, opcode) == (Opcode.COPY_FILE_RANGE_64, Opcode.COPY_FILE_RANGE))

    def dying_respond(engine: NativeEngine, *arguments: Any) -> None:
        if step == "read" and is_chosen(engine):
            die_once()
        respond(engine, *arguments)

    def dying_send(engine: NativeEngine, *arguments: Any) -> None:
        if step == "recorded" and is_chosen(engine):
            die_once()
        send(engine, *arguments)
        if step == "replied" and is_chosen(engine):
            die_once()

    NativeEngine._respond, NativeEngine._send = dying_respond, dying_send  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_at(Opcode[os.environ["VFSD_TEST_OPCODE"]], os.environ["VFSD_TEST_STEP"])
    sys.exit(main(sys.argv[1:], functools.partial(daemon.run_daemon, started_by="a test")))
