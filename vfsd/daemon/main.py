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
from vfsd.daemon.starting import RunKept, note_failed_restart, run, serve_kept
from vfsd.machine import logs
from vfsd.wire.options import MountOptions, Ready, decode_options


def foreground(options: MountOptions, *, ready: Callable[[Ready], None] | None = None) -> None:
    """Run the daemon in this process until it is unmounted; it logs to standard error.

    `ready` is called when the mount answers.  OSError or ValueError if the daemon cannot start.
    """
    credentials.hide()
    # A test runs this module without an engine.
    from vfsd.daemon.daemon import run_daemon  # noqa: PLC0415
    from vfsd.daemon.keeper.descriptor_store import kept_by_systemd  # noqa: PLC0415

    logs.configure(options.log.log_level, options.log.log_format)
    kept = kept_by_systemd(options)
    started_by = "systemd" if os.environ.get("NOTIFY_SOCKET") else "vfsd mount --foreground"
    serve = functools.partial(run_daemon, started_by=started_by, starter=os.getppid(), kept=kept, is_foreground=True)
    is_resumed = kept is not None and kept.resumed is not None
    try:
        run(options, ready or (lambda _: None), serve, continues=is_resumed)
    except Exception as error:
        if is_resumed:
            note_failed_restart(options, error)
        raise


def main(arguments: list[str], run_daemon: RunKept) -> int:
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
