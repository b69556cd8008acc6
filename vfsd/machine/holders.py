"""Find the processes that keep a mount busy: with a directory, an open file, a program or a mapping on it.

Never waits for a process that holds the lock of its memory because it waits for another mount that hangs: such a
process is left out (`vfsd.machine.bounded_reads`), and umount(2) still refuses if it has something open.

Never touches the mount: opening /proc/PID/cwd with O_PATH sends the daemon no request, and the descriptor's fdinfo
names the mount.  An unprivileged caller sees only its own processes.

Source: proc_pid_fdinfo(5) (mnt_id), proc_pid_maps(5); ptrace(2) for the access rules.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Final, NamedTuple

from vfsd.machine.bounded_reads import BoundedReads
from vfsd.machine.mountinfo import mount_at, mounts

_LINKS: Final = (("cwd", "current directory"), ("root", "root directory"), ("exe", "program"))
_PATIENCE_S: Final = 0.2
_MOUNT_ID: Final = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
# address perms offset dev:inode pathname; the device in hexadecimal
_MAPPING: Final = re.compile(rb"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) \d+ *(.*)$", re.MULTILINE)


class Holder(NamedTuple):
    """A process that keeps a mount busy, and `what` it has there: "current directory", "open file /x/y", ..."""

    pid: int
    command: str
    what: str

    def describe(self) -> str:
        return f"pid {self.pid} ({self.command}), {self.what}"


def holders(mountpoint: str, *, unseen_by_umount: bool = False) -> list[Holder]:
    """List the processes that keep the file system at `mountpoint` busy, by pid; empty if nothing is mounted there.

    With `unseen_by_umount`, only those that do not make umount(2) of `mountpoint` fail: they use another mount of the
    file system, which is a copy in another mount namespace or a bind mount.  That is much faster if there is no bind
    mount, because the processes of this namespace are not examined.
    """
    mount = mount_at(mountpoint)
    if mount is None:
        return []
    # Bind mounts, and copies in other mount namespaces, are separate mounts of the same device.
    own = frozenset(m.mount_id for m in mounts() if m.device == mount.device)
    if unseen_by_umount:
        own -= {mount.mount_id}
    own_namespace = os.readlink("/proc/self/ns/mnt")
    mount_ids = {own_namespace: own}
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    reads = BoundedReads(_PATIENCE_S)
    # Where one of these fails, the process has ended, or we may not inspect it, or it waits for a mount that hangs.
    namespaces = reads.ask_each(pids, lambda pid: os.readlink(f"/proc/{pid}/ns/mnt"))
    for pid, namespace in namespaces.items():
        if namespace not in mount_ids:
            with suppress(OSError):
                mount_ids[namespace] = frozenset(m.mount_id for m in mounts(pid) if m.device == mount.device)
    candidates = [
        pid for pid, namespace in namespaces.items() if namespace in mount_ids and (own or namespace != own_namespace)
    ]
    held = reads.ask_each(candidates, lambda pid: _holds(pid, mount.device, mount_ids[namespaces[pid]]))
    reads.close()
    found = []
    for pid, what in held.items():
        with suppress(OSError):
            if what:
                found.append(Holder(pid, _command(pid), ", ".join(what)))
    return found


def _holds(pid: int, device: int, mount_ids: frozenset[int]) -> list[str]:
    """Describe what process `pid` uses on the device, at most one of each kind."""
    found = [kind for link, kind in _LINKS if _mount_of_link(f"/proc/{pid}/{link}") in mount_ids]
    open_file = _open_file(pid, mount_ids)
    if open_file is not None:
        found.append(f"open file {open_file}")
    mapped_file = _mapped_file(pid, device)
    if mapped_file is not None:
        found.append(f"mapped file {mapped_file}")
    return found


def _mount_of_link(path: str) -> int | None:
    """Return the id of the mount that the magic link `path` points into; None for a kernel thread's link."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mount_of_descriptor("self", str(descriptor))
    finally:
        os.close(descriptor)


def _mount_of_descriptor(pid: int | str, descriptor: str) -> int | None:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        match = _MOUNT_ID.search(file.read())
    return int(match[1]) if match else None


def _open_file(pid: int, mount_ids: frozenset[int]) -> str | None:
    for descriptor in os.listdir(f"/proc/{pid}/fdinfo"):
        try:
            if _mount_of_descriptor(pid, descriptor) in mount_ids:
                return os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue  # closed meanwhile
    return None


def _mapped_file(pid: int, device: int) -> str | None:
    with open(f"/proc/{pid}/maps", "rb") as file:
        for match in _MAPPING.finditer(file.read()):
            if os.makedev(int(match[1], 16), int(match[2], 16)) == device:
                return os.fsdecode(match[3])
    return None


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/comm", "rb") as file:
        return file.read().rstrip(b"\n").decode("utf-8", "replace")
