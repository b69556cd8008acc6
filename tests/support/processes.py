"""Processes that a test watches from outside.

A file of /proc that was opened while its process lived is read with ESRCH once the process has been reaped.
"""

import os
import select
import signal
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that nobody has reaped yet (a zombie) has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # After the command's name, which may contain anything (proc_pid_stat(5)).
    return text.rpartition(")")[2].split()[0] not in "ZX"


def kill(*pids: int) -> None:
    """Send SIGKILL to these processes, in this order, and wait until all their threads have ended.

    A killed process is a zombie as soon as its first thread has ended; the others may still have files open.
    """
    ends = [os.pidfd_open(pid) for pid in pids]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for end in ends:
            select.select([end], [], [])
    finally:
        for end in ends:
            os.close(end)


def children(pid: int) -> list[int]:
    """The child processes of all threads of a process; none if it has ended."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                found += [int(child) for child in (task / "children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that has ended
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def child_running(pid: int, word: str) -> int:
    """The child process whose command line has `word`; there must be exactly one."""
    (found,) = [child for child in children(pid) if word in _command_line(child)]
    return found


def running(program: Path) -> list[int]:
    """The processes that were started as `program`."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if _command_line(pid)[:1] == [str(program)]]


def _command_line(pid: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
