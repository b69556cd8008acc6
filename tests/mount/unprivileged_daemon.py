"""A daemon whose user may do nothing special: `python -m ... MOUNTPOINT DIRECTORY NAME ENGINE UID`, started by root.

Root makes the mount, since not everybody may open /dev/fuse everywhere; all else is done as that user.
"""

from __future__ import annotations

import ctypes
import encodings.ascii
import encodings.idna  # noqa: F401 -- here: the interpreter may lie where that user may not look
import os
import sys
from typing import Any

from vfsd.client.arguments import mount_options
from vfsd.daemon import daemon
from vfsd.daemon.main import foreground

PR_SET_DUMPABLE = 4


def main() -> None:
    place, directory, name, engine, uid = sys.argv[1:]
    user = int(uid)
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    mount_engine = daemon.mount_engine

    def mount_as_root(*arguments: Any) -> Any:
        os.seteuid(0)
        mounted = mount_engine(*arguments)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec: /proc/self is its own again
        return mounted

    daemon.mount_engine = mount_as_root  # type: ignore[assignment]
    options = mount_options(place, f"host:{directory}", name=name, engine=engine, allow_other=True)  # type: ignore[arg-type]
    foreground(options, ready=lambda _: print("ready", flush=True))


if __name__ == "__main__":
    main()
