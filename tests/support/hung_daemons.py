"""End a daemon that hangs at the end of a test: the test fails, shows the daemon's stacks, and the session goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import process_start_ticks

__all__ = ["end_watch"]

# A test that timed out has no time limit for its end any more.
_PATIENCE_S = 60.0
_ENDS_S = 40.0


@contextlib.contextmanager
def end_watch() -> Iterator[Callable[[Workspace], None]]:
    """Yield a function that starts the clock for the end of a workspace; kill its daemon if the block takes longer."""
    watches: list[threading.Timer] = []
    freed: list[str] = []

    def begin(workspace: Workspace) -> None:
        pid = workspace.pid
        watch = threading.Timer(_PATIENCE_S, _kill, (workspace.name, pid, process_start_ticks(pid), freed))
        watch.daemon = True
        watches.append(watch)
        watch.start()

    try:
        yield begin
    finally:
        for watch in watches:
            watch.cancel()
        for name in freed:  # in pytest's summary: such a hang is a defect that is not mended yet
            warnings.warn(f"the daemon of {name} hung at its end until it got a signal", ResourceWarning, stacklevel=2)


def _kill(name: str, pid: int, start_ticks: int | None, freed: list[str]) -> None:
    """Show where the daemon waits, and kill it unless it then ends by itself.

    pyfuse3's loop can wait in a read(2) that another request has to end; the signal ends it, too.
    """
    if process_start_ticks(pid) != start_ticks:
        return
    freed.append(name)
    os.kill(pid, signal.SIGUSR1)
    for _ in range(int(_ENDS_S)):
        time.sleep(1)
        if process_start_ticks(pid) != start_ticks:
            return
    with contextlib.suppress(OSError):
        log = Path(log_path(name)).read_text(errors="replace")
        print(f"the daemon of {name} hangs, and is killed; its log:\n{log}", file=sys.stderr)
        for task in Path(f"/proc/{pid}/task").iterdir():
            print(f"{task.name}: {(task / 'stack').read_text()}", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
