"""Execute a command with descriptors as systemd passes them: `python -m tests.support.passed_descriptors FDS COMMAND`.

FDS are the numbers of the descriptors, separated by commas, or "-" for none.  They become 3 and the following numbers
(sd_listen_fds(3)).

A process of its own, and not a function between fork(2) and execve(2) in the test process: that process may have files
of the mount open, and wait for it.  A child that inherits such a file, even only until execve(2), sends a FUSE_FLUSH
when it closes the file, and would wait for the very daemon that it is to start.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_FIRST_PASSED: Final = 3  # SD_LISTEN_FDS_START


def main(passed: str, command: list[str]) -> None:
    """Execute `command` in this process."""
    descriptors = [] if passed == "-" else list(map(int, passed.split(",")))
    for at, descriptor in enumerate(descriptors, _FIRST_PASSED):
        os.dup2(descriptor, at)
    for descriptor in descriptors:
        os.close(descriptor)
    if descriptors:
        os.environ["LISTEN_PID"] = str(os.getpid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
