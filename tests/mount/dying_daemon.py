"""A daemon that is killed at one step of a request.

Started as `vfsd.daemon.main`.  $VFSD_TEST_FLAG names a file.  If it exists, it says at which of STEPS of the first
request with which opcode the daemon dies, for example "MKDIR recorded", and is removed then.
"""

from __future__ import annotations

import functools
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from vfsd.daemon import daemon
from vfsd.daemon.main import main
from vfsd.kernel.engines.native import session
from vfsd.kernel.engines.native.session import NativeEngine
from vfsd.kernel.engines.native.wire import Opcode

STEPS = ("read", "recorded", "replied")


def die_if(opcode: int, step: str) -> None:
    path = Path(os.environ["VFSD_TEST_FLAG"])
    try:
        name, at = path.read_text().split()
    except FileNotFoundError:
        return
    opcodes = {Opcode[name]} | ({Opcode.COPY_FILE_RANGE_64} if name == "COPY_FILE_RANGE" else set())
    if at == step and opcode in opcodes:
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def die_at_steps() -> None:
    """Have the engine look for its step at each request."""
    respond, send = NativeEngine._respond, vars(session)["send_reply"]
    asked: dict[int, int] = {}  # the opcodes of the requests that are not answered, by `unique`

    def dying_respond(engine: NativeEngine, *arguments: Any) -> None:
        opcode, unique = struct.unpack_from("=IQ", engine._buffer, 4)
        asked[unique] = opcode
        die_if(opcode, "read")
        respond(engine, *arguments)

    def dying_send(descriptor: int, unique: int, message: Any) -> None:
        opcode = asked.pop(unique, 0)
        die_if(opcode, "recorded")
        send(descriptor, unique, message)
        die_if(opcode, "replied")

    for place, name, dying in ((NativeEngine, "_respond", dying_respond), (session, "send_reply", dying_send)):
        setattr(place, name, dying)


if __name__ == "__main__":
    die_at_steps()
    sys.exit(main(sys.argv[1:], functools.partial(daemon.run_daemon, started_by="a test")))
