"""The processes of a command in a container: how they are found, signalled and killed.

A command's processes are found by a mark in their environment (MARK=...), which children inherit; by their session and
their parents; and, in a container of vfsd's own, as orphans: a process that a command left behind, in any session and
environment, is a child of the container's first process.

There are two ways: from outside, through this machine's /proc, if the container is on this machine and its processes
may be signalled; else by a POSIX shell in the container that uses only builtins, so that it needs one process and no
programs of the image.  Only the first way works if the container may have no more processes (a fork bomb at its
limit).  Source: proc_pid_stat(5), proc_pid_environ(5).

`CommandProcesses` uses the second way if /proc of this machine does not show the container's processes (a remote
service, or missing rights).  In a container of vfsd's own (`owned`), orphans without the mark are killed too; if such a
container cannot start that shell (a fork bomb at the process limit), it is restarted: its files stay, and every command
in it ends.

Limits: in a container that is not vfsd's, a process with a new session, a new parent *and* a new environment
survives.  A killed daemon kills nothing: the next daemon of a workspace in the same container, on this machine, kills
what the dead daemon's commands left (`kill_abandoned`).

Threading: `ContainerProcesses` blocks; any thread may call it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from protocol.backends.container.podman.exec_stream import exec_status
from protocol.backends.container.podman.ownership import has_died, this_daemon
from protocol.backends.container.podman.service import Container, ContainerNotFoundError
from protocol.backends.container.podman.spec import ContainerState

MARK: Final = "VFSD_EXEC"
DAEMON: Final = "VFSD_EXEC_DAEMON"  # the daemon that runs the command
_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.2
_GONE: Final = ("Z", "X")

# Arguments: the mark, and 1 if orphans belong to the command.  Exit status 0: no process is left.
# Stops all processes before it kills them: a killed process makes room for a new one, a stopped one does not.
KILL_SCRIPT: Final = r"""
each() {
  found=0
  read -r line < /proc/1/stat; set -- "$1" "$2" "$3" ${line##*) }; own=$7
  for place in /proc/[0-9]*; do
    pid=${place#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = "$$" ] && continue
    line=; { read -r line < "$place/stat"; } 2>/dev/null || continue
    set -- "$1" "$2" "$3" ${line##*) }
    case $4 in Z|X) continue;; esac
    hit=0
    [ "$3" = 1 ] && [ "$5" = 1 ] && [ "$7" != "$own" ] && hit=1
    while IFS= read -r line || [ -n "$line" ]; do
      case $line in *"$2"*) hit=1;; esac
      line=
    done 2>/dev/null < "$place/environ"
    [ $hit = 1 ] && { found=$((found + 1)); kill "-$1" "$pid" 2>/dev/null; }
  done
}
rounds=0
while [ $rounds -lt 50 ]; do
  each STOP "$1" "$2" 2>/dev/null
  each KILL "$1" "$2" 2>/dev/null
  [ $found = 0 ] && exit 0
  rounds=$((rounds + 1))
done
exit 1
"""

# Arguments: a signal's number, the mark.  The command itself is the process whose parent is outside the container.
SIGNAL_SCRIPT: Final = r"""
for place in /proc/[0-9]*; do
  pid=${place#/proc/}
  line=; { read -r line < "$place/stat"; } 2>/dev/null || continue
  set -- "$1" "$2" ${line##*) }
  [ "$4" = 0 ] && [ "$pid" != "$$" ] || continue
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in *"$2"*) kill "-$1" "-$5" 2>/dev/null;; esac
    line=
  done 2>/dev/null < "$place/environ"
done
"""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    state: str
    parent: int
    group: int
    session: int


def _process(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Process(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def _entry(mark: str) -> bytes:
    return b"\0" + mark.encode() + b"\0"


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


class ContainerProcesses:
    """The processes of a container in the state `state`."""

    def __init__(self, state: ContainerState) -> None:
        self._id = state.id.encode()
        self._init = state.pid
        self._is_paused = state.paused
        self._namespace = self._namespace_of(state.pid)
        self._ours = self._namespace_of(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether the container is on this machine and its processes may be inspected."""
        # A forwarded socket leads to another machine, where the pid means another process.
        return self._init > 0 and self._namespace is not None and self._is_in_group(self._init)

    @staticmethod
    def _namespace_of(pid: int) -> str | None:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            return None

    def _is_inside(self, pid: int) -> bool:
        # Called for every process of the machine: reading a link is faster than reading a file.
        namespace = self._namespace_of(pid)
        if self._namespace != self._ours and namespace in {self._namespace, self._ours}:
            return namespace == self._namespace
        # A nested namespace, or the container shares this one: only the cgroup identifies the process.
        return self._is_in_group(pid)

    def _is_in_group(self, pid: int) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup", "rb") as file:
            return self._id in file.read()
        return False

    def _all(self) -> list[_Process]:
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == self._init:
                continue
            pid = int(name)
            process = _process(pid) if self._is_inside(pid) else None
            if process is not None and process.state not in _GONE:
                found.append(process)
        return found

    def find(self, mark: str, *, with_orphans: bool = False) -> set[int]:
        """The pids of the command's processes, by `mark` ("NAME=VALUE") in the environment."""
        there = self._all()
        wanted = _entry(mark)
        of_session: set[int] = set()
        init = _process(self._init)
        found = {process.pid for process in there if wanted in _environment(process.pid)}
        if with_orphans and init is not None:
            orphans = (one for one in there if one.parent == self._init and one.session != init.session)
            found |= {process.pid for process in orphans}
        while True:
            of_session |= {process.session for process in there if process.pid in found}
            more = {one.pid for one in there if one.parent in found or one.session in of_session} - found
            if not more:
                return found
            found |= more

    def values(self, mark: str, name: str) -> dict[str, str]:
        """The value of the variable `name` for each value of the variable `mark`, over all processes."""
        found = {}
        for process in self._all():
            entries = _environment(process.pid).decode(errors="replace").split("\0")
            variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if mark in variables and name in variables:
                found[variables[mark]] = variables[name]
        return found

    def signal(self, mark: str, number: int) -> None:
        """Send a signal to the process group of the command itself, whose parent is outside the container."""
        there = self._all()
        inside = {process.pid for process in there} | {self._init}
        wanted = _entry(mark)
        for process in there:
            if process.parent not in inside and wanted in _environment(process.pid):
                with contextlib.suppress(OSError):
                    os.killpg(process.group, number)

    def kill(self, mark: str, *, with_orphans: bool, timeout_s: float) -> bool:
        """Kill all; False if some are left after `timeout_s`, or at once if the container is paused.

        The processes of a paused container start no others, and end when it is unpaused.
        """
        deadline = time.monotonic() + (0 if self._is_paused else timeout_s)
        pause_s = _PAUSE_S
        while found := self.find(mark, with_orphans=with_orphans):
            # Stop all before killing: a killed process makes room for a new one.
            stopped: set[int] = set()
            while found - stopped and time.monotonic() < deadline:
                self._signal(found - stopped, signal.SIGSTOP)
                stopped |= found
                found = self.find(mark, with_orphans=with_orphans)
            self._signal(stopped | found, signal.SIGKILL)
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _signal(self, pids: Iterable[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    # The pid may have been reused meanwhile.
                    if self._is_inside(pid):
                        signal.pidfd_send_signal(descriptor, number)
                finally:
                    os.close(descriptor)


_logger = logging.getLogger(__name__)

_KILL_S: Final = 10.0
_SHELL_S: Final = 5.0


def _visible_processes(container: Container) -> ContainerProcesses | None:
    """The container's processes, if this machine's /proc shows them."""
    if not container.service.is_local:
        return None
    state = container.inspect()
    outside = ContainerProcesses(state)
    return outside if outside.is_here else None


def kill_abandoned(container: Container) -> None:
    """Kill the processes of commands whose daemons have died.  Blocks.  OSError."""
    outside = _visible_processes(container)
    if outside is None:
        return
    for value, daemon in outside.values(MARK, DAEMON).items():
        if has_died(daemon):
            _logger.info("killing processes that a dead daemon's command left", extra={"operation": "exec"})
            outside.kill(f"{MARK}={value}", with_orphans=False, timeout_s=_KILL_S)


class CommandProcesses:
    """The processes of one command in `container`."""

    def __init__(self, container: Container, *, owned: bool) -> None:
        self._container = container
        self._owned = owned
        self._value = secrets.token_hex(16)

    @property
    def env(self) -> Mapping[str, str]:
        """The mark, as variables for the command's environment."""
        return {MARK: self._value, DAEMON: this_daemon()}

    @property
    def _mark(self) -> str:
        return f"{MARK}={self._value}"

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group; a no-op after the command has ended."""
        if not await trio.to_thread.run_sync(self._signal_from_outside, number):
            await self._in_shell(SIGNAL_SCRIPT, str(number), self._mark)

    async def kill(self, *, is_alone: bool) -> None:
        """Kill all; `is_alone`: no other command runs in the container.  OSError if processes remain."""
        # An orphan may belong to another running command.
        orphans = self._owned and is_alone
        if await trio.to_thread.run_sync(self._kill_from_outside, orphans):
            return
        if await self._in_shell(KILL_SCRIPT, self._mark, str(int(orphans))):
            return
        if not self._owned:
            raise OSError(errno.EBUSY, f"processes in the container {self._container.name} cannot be killed")
        await trio.to_thread.run_sync(self._restart)

    async def is_paused(self) -> bool:
        """Whether the container is paused: killed processes end when it is unpaused."""
        try:
            return (await trio.to_thread.run_sync(self._container.inspect)).paused
        except OSError:
            return False

    # -- from outside: in a worker thread ------------------------------------------------------------
    def _signal_from_outside(self, number: int) -> bool:
        outside = _visible_processes(self._container)
        if outside is not None:
            outside.signal(self._mark, number)
        return outside is not None

    def _kill_from_outside(self, orphans: bool) -> bool:
        try:
            outside = _visible_processes(self._container)
        except ContainerNotFoundError:
            return True  # its processes are gone too
        return outside is not None and outside.kill(self._mark, with_orphans=orphans, timeout_s=_KILL_S)

    # -- from inside ---------------------------------------------------------------------------------
    async def _in_shell(self, script: str, *arguments: str) -> bool:
        """Run a script in the container; whether it succeeded or the container is not running."""
        argv = ["/bin/sh", "-c", script, "sh", *arguments]
        try:
            with trio.fail_after(_SHELL_S):
                return await exec_status(self._container.service, self._container.id, argv, user="0") == 0
        except trio.TooSlowError:
            return False
        except OSError as error:
            return error.errno in {errno.ENOTCONN, errno.ENOENT}  # not running, so no process is left

    def _restart(self) -> None:
        self._container.kill()
        self._container.start()
