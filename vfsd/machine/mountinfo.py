"""Parse mountinfo, and resolve paths without touching a FUSE mount.

Nothing here sends a request to a FUSE daemon, so nothing hangs on a daemon that does not answer.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from typing import Final, NamedTuple

from protocol.errors import NotMountedError
from protocol.linux.syscalls import MountId, mount_of, open_mount
from vfsd.machine.selection import follow_symlinks

VFSD_TYPE: Final = "fuse.vfsd"
SOURCE_PREFIX: Final = "vfsd:"
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")
# The mountpoint of a FUSE mount.  Starts use this: to parse 1,000 lines takes milliseconds.
_FUSE_POINT: Final = re.compile(rb"^(?:\S+ ){4}(\S+) .* - fuse(?:\.\S*)? ", re.MULTILINE)


class Mount(NamedTuple):
    """One line of mountinfo.  Paths are decoded with `os.fsdecode`; `options` are those of the superblock."""

    mount_id: int
    parent_id: int
    device: int  # encoded as st_dev and os.makedev()
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
        """The workspace's name; None if this is not a vfsd mount."""
        return self.source.removeprefix(SOURCE_PREFIX) if self.is_vfsd else None

    def describe(self) -> str:
        """Name the mount in a message: "workspace 'a'", or "ext4 (/dev/vda)"."""
        return f"workspace {self.workspace!r}" if self.is_vfsd else f"{self.filesystem} ({self.source})"


def unmounting_command(mountpoint: str, *, lazy: bool = False) -> str:
    """Return the shell command with which a person unmounts `mountpoint`; root need not have fusermount3."""
    program = "fusermount3 -u" if shutil.which("fusermount3") or os.geteuid() else "umount"
    options = ["", " -z" if program != "umount" else " -l"][lazy]
    return f"{program}{options} {shlex.quote(mountpoint)}"


def parse_mountinfo(content: bytes) -> list[Mount]:
    """Parse a mountinfo file.  Keeps its order: of two mounts at one path, the later one is on top."""
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
    if b"\\" not in field:
        return os.fsdecode(field)
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def mounts(pid: int | str = "self") -> list[Mount]:
    """List the mounts in the mount namespace of process `pid`."""
    return parse_mountinfo(_read(pid))


def _read(pid: int | str = "self") -> bytes:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        return file.read()


def mounts_at(mountpoint: str) -> list[Mount]:
    """List the mounts at `mountpoint` (absolute, without symlinks), the topmost last."""
    return [_parse_line(line) for line in _read().splitlines() if _decode(line.split(b" ", 5)[4]) == mountpoint]


def vfsd_mounts() -> list[Mount]:
    """List the mounts of vfsd, including those without a daemon."""
    return [mount for mount in mounts() if mount.is_vfsd]


def resolve(path: str) -> str:
    """Make `path` absolute and resolve its symlinks, as `os.path.realpath` does, up to the first FUSE mount.

    The part below a FUSE mount is normalized but not looked up, because only the daemon could answer.
    OSError (ELOOP) for a cycle of symlinks.
    """
    fuse_points = {_decode(point) for point in _FUSE_POINT.findall(_read())}
    return follow_symlinks(path if os.path.isabs(path) else os.path.join(os.getcwd(), path), fuse_points)


def mount_at(path: str) -> Mount | None:
    """Return the topmost mount at `path`, or None."""
    found = mounts_at(resolve(path))
    return found[-1] if found else None


def workspace_mount(path: str, name: str) -> MountId:
    """Return the identity of the mount of the workspace `name` at `path`.  NotMountedError if there is none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise NotMountedError(path) from None
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            number = re.search(rb"^mnt_id:\t(\d+)$", file.read(), re.MULTILINE)
        line = number and re.search(rb"^%s .*$" % number[1], _read(), re.MULTILINE)
        if not line or _parse_line(line[0]).workspace != name:
            raise NotMountedError(path)
        return mount_of(descriptor)
    finally:
        os.close(descriptor)


def directory_id(path: str) -> MountId:
    """Return the identity of the directory `path`, for a workspace without a mount.  NotMountedError if it is gone."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise NotMountedError(path, "this directory is gone, or cannot be entered") from None
    try:
        return mount_of(descriptor)._replace(directory=os.fstat(descriptor).st_ino)
    finally:
        os.close(descriptor)


class WorkspaceRoot:
    """The root of the mount at `path`, for the daemon that serves it as workspace `name`.

    A path of the daemon leads elsewhere once the mount was detached, which the daemon outlives while it is in use.
    `is_attached`: the directory itself, of a workspace without a mount, which may be renamed.
    """

    def __init__(self, path: str, name: str, *, is_attached: bool = False) -> None:
        self._path = path
        self._name = name
        self._mount = directory_id(path) if is_attached else None

    @property
    def mount(self) -> MountId:
        """The identity of the mount.  NotMountedError if this process does not see it."""
        if self._mount is None:
            self._mount = workspace_mount(self._path, self._name)
        return self._mount

    def open(self, flags: int = os.O_PATH) -> int:
        """Open the root.  NotMountedError if something else is at its path now."""
        return open_mount(self._path, self.mount, flags)


def find_mount(path: str) -> Mount | None:
    """Return the mount that contains `path`: the one with the longest mountpoint; of several, the topmost."""
    resolved = resolve(path)
    found: Mount | None = None
    for mount in mounts():
        longer = found is None or len(mount.mountpoint) >= len(found.mountpoint)
        if longer and is_at_or_below(resolved, mount.mountpoint):
            found = mount
    return found


def nested_mounts(mountpoint: str) -> list[Mount]:
    """List the mounts below the topmost mount at `mountpoint`; they keep it busy."""
    top = mount_at(mountpoint)
    if top is None:
        return []
    inside = {top.mount_id}
    found = []
    for mount in mounts():  # a parent is listed before its children
        if mount.parent_id in inside and mount.mount_id not in inside:
            inside.add(mount.mount_id)
            found.append(mount)
    return found


def is_at_or_below(path: str, *directories: str) -> bool:
    """Return whether the absolute path `path` is one of the directories or below one."""
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)
