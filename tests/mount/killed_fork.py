"""A daemon that is killed at one step of a fork: $VFSD_TEST_STEP names it.

python -m tests.mount.killed_fork OPTIONS_FD REPORT_FD WHY
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vfsd.daemon import daemon
from vfsd.daemon.forks import process
from vfsd.daemon.forks.forks import StartedFork
from vfsd.daemon.main import main
from vfsd.machine import runtime

SOURCE_STEPS: Final = ("source before fork(2)", "source after fork(2)", "source while the fork mounts")
FORK_STEPS: Final = ("fork before its mount", "fork after its mount", "fork after its record")
NO_DESCRIPTOR: Final = "no descriptor of the fork"
WAITING: Final = "fork waits before its mount"  # until the file $VFSD_TEST_GO exists


def kill_at(step: str) -> None:
    """Have this process, or its fork, killed at `step`."""
    source = os.getpid()

    def killing(call: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if step.startswith("fork") and os.getpid() == source:
                return call(*args, **kwargs)
            if after:
                call(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("killed")

        return run

    patched: dict[str, tuple[object, str, bool]] = {
        SOURCE_STEPS[0]: (os, "fork", False),
        SOURCE_STEPS[1]: (process, "_let_go", False),
        SOURCE_STEPS[2]: (StartedFork, "ready", False),
        FORK_STEPS[0]: (daemon, "mount_engine", False),
        FORK_STEPS[1]: (daemon, "mount_engine", True),
        FORK_STEPS[2]: (runtime, "write_record", True),
    }
    if step == NO_DESCRIPTOR:
        os.pidfd_open = no_descriptor
    elif step == WAITING:
        daemon.mount_engine = waiting(daemon.mount_engine, source)
    else:
        where, name, after = patched[step]
        setattr(where, name, killing(getattr(where, name), after=after))


def waiting(call: Callable[..., Any], source: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        go = os.environ["VFSD_TEST_GO"]
        if os.getpid() != source:
            Path(go + ".waits").touch()
            while not os.path.exists(go):
                time.sleep(0.01)
        return call(*args, **kwargs)

    return run


def no_descriptor(_pid: int, _flags: int = 0) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


if __name__ == "__main__":
    kill_at(os.environ["VFSD_TEST_STEP"])
    sys.exit(main(sys.argv[1:], functools.partial(daemon.run_daemon, started_by="a test")))
