"""The fork server as a process: `python -m vfsd.daemon.keeper LOCK_FD SOCKET`, as `vfsd.client.launch` starts it.

LOCK_FD is the lock that excludes a second server at the path SOCKET, locked by the process that starts this one.
"""

from __future__ import annotations

import gc
import os
import sys
import time


def main(lock_fd: int, path: str) -> int:
    """Serve; in a forked process, run its daemon.  Return the exit status."""
    started_ns = time.time_ns()
    os.set_inheritable(lock_fd, False)
    environment = dict(os.environ)
    # Deferred: the files must not change after `started_ns`.
    from vfsd.daemon import preload  # noqa: PLC0415
    from vfsd.daemon.keeper import fork_server  # noqa: PLC0415
    from vfsd.machine.daemon_start import process_kind  # noqa: PLC0415

    preload.preload()
    preload.import_rest()
    preload.build_decoders()
    kind, files = process_kind(environment), fork_server.LoadedFiles(started_ns)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page
    connection = fork_server.serve(path, lambda: process_kind(environment) == kind and not files.changed())
    if connection is None:
        return 0
    os.close(lock_fd)
    return fork_server.run(connection)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
