"""The mounts as the kernel lists them, and paths resolved against that list.

Nothing here asks a FUSE daemon anything, so nothing hangs on one that does not answer.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Final

__all__ = [
    "VFSD_TYPE",
    "Mount",
    "find_mount",
    "mount_at",
    "mounts",
    "nested_mounts",
    "parse_mountinfo",
    "resolve",
    "vfsd_mounts",
]

VFSD_TYPE: Final = "fuse.vfsd"
SOURCE_PREFIX: Final = "vfsd:"
_SYMLINKS_MAX: Final = 40  # MAXSYMLINKS of linux/namei.h
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.  Paths are text as `os.fsdecode` makes it; `options` the superblock's."""

    mount_id: int
    parent_id: int
    device: int  # as os.makedev() and st_dev have it
    root: str
    mountpoint: str
    filesystem: str
    source: str
    options: str

    @property
    def is_vfsd(self) -> bool:
        return self.filesystem == VFSD_TYPE

    @property
    def is_fuse(self) -> bool:
        return self.filesystem == "fuse" or self.filesystem.startswith("fuse.")

    @property
    def workspace(self) -> str | None:
        """The workspace's name, where this is a vfsd mount."""
        return self.source.removeprefix(SOURCE_PREFIX) if self.is_vfsd else None

    def describe(self) -> str:
        """What is mounted, for a message: "workspace 'a'", or "ext4 (/dev/vda)"."""
        return f"workspace {self.workspace!r}" if self.is_vfsd else f"{self.filesystem} ({self.source})"


def parse_mountinfo(content: bytes) -> list[Mount]:
    """The mounts of a mountinfo file, in its order: of two at one path the later lies on top."""
    return [_parse_line(line) for line in content.splitlines() if line]


def _parse_line(line: bytes) -> Mount:
    fields = line.split(b" ")
    separator = fields.index(b"-", 6)  # after the optional fields
    major, minor = fields[2].split(b":")
    filesystem, source, options = fields[separator + 1 : separator + 4]
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=os.makedev(int(major), int(minor)),
        root=_decode(fields[3]),
        mountpoint=_decode(fields[4]),
        filesystem=_decode(filesystem),
        source=_decode(source),
        options=_decode(options),
    )


def _decode(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def mounts(pid: int | str = "self") -> list[Mount]:
    """All mounts in the mount namespace of process `pid`."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def vfsd_mounts() -> list[Mount]:
    """The mounts of vfsd, dead ones included."""
    return [mount for mount in mounts() if mount.is_vfsd]


def resolve(path: str) -> str:
    """`path` absolute and free of symlinks, like `os.path.realpath`, but without asking any FUSE daemon.

    What lies below a FUSE mount is left as it is written: looking further would be its daemon's answer.
    OSError(ELOOP) for symlinks that go in circles.
    """
    fuse_points = {mount.mountpoint for mount in mounts() if mount.is_fuse}
    pending = _components(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    current = "/"
    links = 0
    while pending:
        name = pending.pop()
        if name == "..":
            current = os.path.dirname(current)
            continue
        current = os.path.join(current, name)
        if current in fuse_points:
            return os.path.normpath(os.path.join(current, *reversed(pending)))
        try:
            target = os.readlink(current)
        except OSError:
            continue  # no symlink, or nothing there: for the caller to find out
        links += 1
        if links > _SYMLINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        current = "/" if os.path.isabs(target) else os.path.dirname(current)
        pending.extend(_components(target))
    return current


def _components(path: str) -> list[str]:
    """The names in `path`, last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def mount_at(path: str) -> Mount | None:
    """The topmost mount whose mountpoint is `path`, or None."""
    resolved = resolve(path)
    return next((mount for mount in reversed(mounts()) if mount.mountpoint == resolved), None)


def find_mount(path: str) -> Mount | None:
    """The mount that `path` lies in: the one with the longest mountpoint, and of several the topmost."""
    resolved = resolve(path)
    found: Mount | None = None
    for mount in mounts():
        longer = found is None or len(mount.mountpoint) >= len(found.mountpoint)
        if longer and _is_below(resolved, mount.mountpoint):
            found = mount
    return found


def nested_mounts(mountpoint: str) -> list[Mount]:
    """The mounts below the topmost one at `mountpoint`, which keep it busy."""
    top = mount_at(mountpoint)
    if top is None:
        return []
    inside = {top.mount_id}
    found = []
    for mount in mounts():  # a parent stands before its children
        if mount.parent_id in inside and mount.mount_id not in inside:
            inside.add(mount.mount_id)
            found.append(mount)
    return found


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
