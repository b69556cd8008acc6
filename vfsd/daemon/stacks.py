"""SIGUSR1 has a daemon write to its log where each of its threads and tasks is: for a daemon that seems to hang.

Threading: `faulthandler` writes the stacks of the threads from its C signal handler, so they appear even if no Python
code runs any more.  The serving loop, if it still runs, then calls `write_task_stacks`.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from typing import Final

import trio

STACKS_SIGNAL: Final = signal.SIGUSR1
_LOG_FD: Final = 2  # a fork of the daemon has its own log there


def dump_threads_on_signal() -> None:
    """Have STACKS_SIGNAL write the stacks of all threads, and then call the handler that the signal has now."""
    faulthandler.unregister(STACKS_SIGNAL)  # in a fork it counts as registered, although trio has set its own handler
    faulthandler.register(STACKS_SIGNAL, file=_LOG_FD, all_threads=True, chain=True)


def write_task_stacks() -> None:
    """Write a line for each task of the running loop, nested as their nurseries are, and a line for each frame."""
    root = trio.lowlevel.current_root_task()
    if root is not None:
        sys.stderr.write("Tasks:\n" + "\n".join(_lines(root, "  ")) + "\n")
        sys.stderr.flush()


def _lines(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}{task.name}"
    for frame, line in task.iter_await_frames():
        yield f"{indent}    {frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from _lines(child, indent + "  ")
