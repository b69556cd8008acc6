"""The fork server as a process: `python -m vfsd.daemon.keeper LOCK_FD SOCKET`, as `vfsd.client.fork_server` starts it.

LOCK_FD is the lock that excludes a second server at the path SOCKET, locked by the process that starts this one.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from protocol.linux import credentials


def main(lock_fd: int, path: str) -> int:
    """Serve; in a forked process, run its daemon.  Return the exit status."""
    started_ns = time.time_ns()
    os.set_inheritable(lock_fd, False)
    credentials.hide()
    environment = dict(os.environ)
    # Deferred: the files must not change after `started_ns`.
    from vfsd.daemon import preload  # noqa: PLC0415
    from vfsd.daemon.keeper import child  # noqa: PLC0415
    from vfsd.daemon.keeper.loaded_files import LoadedFiles  # noqa: PLC0415
    from vfsd.daemon.keeper.server import ForkServer  # noqa: PLC0415
    from vfsd.machine.memory_limits import KilledFirst  # noqa: PLC0415
    from vfsd.machine.process_properties import process_properties  # noqa: PLC0415

    preload.preload()
    preload.import_rest()
    preload.build_decoders()
    os.umask(0o077)
    KilledFirst()  # it has no work to do
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page
    forked = ForkServer(path, lambda: process_properties(environment), LoadedFiles(started_ns)).serve()
    return 0 if forked is None else child.run(forked)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
