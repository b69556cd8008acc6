"""ContainerInit: the first process of a container on this machine, as /proc shows it.

A pid may have been reused, and Podman may run on another machine.  So this opens a pidfd first, and accepts what it
reads by number only if the process of the pidfd is still alive and is a child of the container's monitor.
"""

from __future__ import annotations

import errno
import os
import re
import select
from typing import Final

from protocol.backends.container.idmap import IdMap, parse_map
from protocol.backends.container.podman.state import ContainerState

_ROOT_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class ContainerInit:
    """`pidfd` becomes readable when the process ends.  `root` is an O_PATH descriptor of its root directory.

    `identity` is the same as long as the process runs.  `user` and `group` are the ids that it runs as, in the
    container's own ids.  `close` closes both descriptors.
    """

    def __init__(self, state: ContainerState) -> None:
        """OSError: EPERM for a process that may not be inspected, ESRCH for one that is not on this machine."""
        self.pidfd: Final = _open_pidfd(state)
        self.root = -1
        try:
            _check_is_of(state)
            self.root = _open_root(state)
            self.ids = IdMap(
                parse_map(_read(f"/proc/{state.pid}/uid_map")), parse_map(_read(f"/proc/{state.pid}/gid_map"))
            )
            status = _read(f"/proc/{state.pid}/status")
            self.user = self.ids.users.inside(_effective_id(status, "Uid"))
            self.group = self.ids.groups.inside(_effective_id(status, "Gid"))
            ticks = _read(f"/proc/{state.pid}/stat").rpartition(")")[2].split()[19:20]
            self.identity = f"{state.id} {state.pid} {''.join(ticks)}"
            self._check_alive(state)
        except BaseException:
            self.close()
            raise

    def _check_alive(self, state: ContainerState) -> None:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(0):
            raise ProcessLookupError(errno.ESRCH, f"the first process of container {state.name} has ended")

    def close(self) -> None:
        for descriptor in (self.pidfd, self.root):
            if descriptor >= 0:
                os.close(descriptor)
        self.root = -1


def _open_pidfd(state: ContainerState) -> int:
    try:
        return os.pidfd_open(state.pid)
    except OSError as error:
        raise _elsewhere(state) if error.errno == errno.ESRCH else error from None


def _open_root(state: ContainerState) -> int:
    try:
        return os.open(f"/proc/{state.pid}/root", _ROOT_FLAGS)
    except PermissionError:
        advice = "run as its owner or root, or use --transport agent"
        raise PermissionError(errno.EACCES, f"no access to container {state.name}: {advice}") from None


def _check_is_of(state: ContainerState) -> None:
    """Raise ESRCH unless a conmon of this machine with the container's id started the process."""
    parent = re.search(r"^PPid:\s*(\d+)$", _read(f"/proc/{state.pid}/status"), re.MULTILINE)
    words = _read(f"/proc/{state.conmon_pid}/cmdline").split("\0")
    if parent is None or int(parent[1]) != state.conmon_pid or state.id not in words:
        raise _elsewhere(state)


def _elsewhere(state: ContainerState) -> OSError:
    return ProcessLookupError(errno.ESRCH, f"container {state.name} does not run among the processes of this machine")


def _effective_id(status: str, what: str) -> int:
    """proc_pid_status(5): real, effective, saved set, file system."""
    found = re.search(rf"^{what}:\s+\d+\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the process has ended, which the caller checks afterwards
