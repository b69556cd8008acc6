"""End a daemon that hangs at the end of a test: the test fails, shows the daemon's stacks, and the session goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import process_start_ticks

__all__ = ["end_watch"]

# A test that timed out has no time limit for its end any more.
_PATIENCE_S = 60.0
_STACKS_S = 5.0  # in which the daemon writes where its threads and tasks are


@contextlib.contextmanager
def end_watch(patience_s: float = _PATIENCE_S, stacks_s: float = _STACKS_S) -> Iterator[Callable[[Workspace], None]]:
    """Yield a function that starts the clock for the end of a workspace; kill its daemon if the block takes longer."""
    watches: list[threading.Timer] = []
    hung: list[str] = []

    def begin(workspace: Workspace) -> None:
        pid = workspace.pid
        watch = threading.Timer(patience_s, _kill, (workspace.name, pid, process_start_ticks(pid), stacks_s, hung))
        watch.daemon = True
        watches.append(watch)
        watch.start()

    try:
        yield begin
    finally:
        for watch in watches:
            watch.cancel()
            watch.join()
        if hung:
            raise AssertionError(f"hung at their end, and were killed: {', '.join(hung)}; the output has their stacks")


def _kill(name: str, pid: int, start_ticks: int | None, stacks_s: float, hung: list[str]) -> None:
    """Show where the daemon waits, and kill it."""
    if process_start_ticks(pid) != start_ticks:
        return
    hung.append(name)
    print(f"the daemon of {name} hangs, and is killed", file=sys.stderr)
    with contextlib.suppress(OSError):
        # Before the signal, which ends a system call.
        for task in Path(f"/proc/{pid}/task").iterdir():
            print(f"{task.name}: {(task / 'stack').read_text()}", file=sys.stderr)
    with contextlib.suppress(OSError):
        log = Path(log_path(name))
        os.kill(pid, signal.SIGUSR1)
        time.sleep(stacks_s)
        print(f"its log:\n{log.read_text(errors='replace')}", file=sys.stderr)
    if process_start_ticks(pid) == start_ticks:
        os.kill(pid, signal.SIGKILL)
