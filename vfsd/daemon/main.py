"""A daemon as a process: `python -m vfsd.daemon.main OPTIONS_FD REPORT_FD WHY`, as `vfsd.client.launch` starts it.

WHY is why no fork server started it, or empty.

Reads the options from one inherited descriptor, runs the daemon, and reports on the other that the mount answers, or
why it does not.  Both are pipes, so the options are not in the process list, and the starter reads EOF if the daemon
dies.  If the starter dies first, the second pipe reports an error: the start is cancelled and undone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from protocol.linux import credentials
from vfsd.daemon.keeper import keeping
from vfsd.daemon.keeper.keeping import Kept
from vfsd.daemon.starting import RunDaemon, restart_kept, run, serve_kept
from vfsd.machine import logs
from vfsd.wire.options import MountOptions, Ready, decode_options


def foreground(options: MountOptions, *, ready: Callable[[Ready], None] | None = None) -> None:
    """Run the daemon in this process until it is unmounted; it logs to standard error.

    In a unit of systemd this process, the main one, becomes the keeper, and runs the daemon in a child process.

    `ready` is called when the mount answers.  OSError or ValueError if the daemon cannot start.
    """
    credentials.hide()
    # A test runs this module without an engine.
    from vfsd.daemon.daemon import run_daemon  # noqa: PLC0415

    logs.configure(options.log.log_level, options.log.log_format)
    is_managed = bool(os.environ.get("NOTIFY_SOCKET"))
    started_by = "systemd" if is_managed else "vfsd mount --foreground"
    serve = functools.partial(run_daemon, started_by=started_by, starter=os.getppid(), is_foreground=True)

    def start(kept: Kept | None) -> int:
        run(options, ready or (lambda _: None), functools.partial(serve, kept=kept), continues=False)
        return 0

    if is_managed and keeping.is_wanted(options):
        sys.exit(keeping.Keeper(options).run(start, restart_kept(options, serve), lambda: None))
    start(None)


def main(arguments: list[str], run_daemon: RunDaemon) -> int:
    """Return the exit status: 0 after a clean unmount, 1 if the start or the daemon failed."""
    options_fd, report_fd = (int(argument) for argument in arguments[:2])
    with open(options_fd, "rb") as file:
        options = decode_options(file.read())
    return serve_kept(options, report_fd, run_daemon)


if __name__ == "__main__":
    from vfsd.daemon.daemon import run_daemon

    *_, why = sys.argv
    started_by = f"a new interpreter: {why}" if why else "a new interpreter"
    sys.exit(main(sys.argv[1:], functools.partial(run_daemon, started_by=started_by, starter=os.getppid())))
