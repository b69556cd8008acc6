"""Mounting by mount(2), which only root may call, or through fusermount3; unmounting through fusermount3.

fusermount3 opens /dev/fuse, mounts it and passes the descriptor back over the socket that the environment variable
_FUSE_COMMFD names, as it does for libfuse (lib/mount.c).  libfuse itself is not used, because it answers INIT in its
own loop.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
from typing import Final

from protocol.linux import syscalls
from protocol.values import Value
from vfsd.kernel.engines.base import EngineSettings, mount_options
from vfsd.machine.mountinfo import SOURCE_PREFIX, VFSD_TYPE, mounts_at
from vfsd.wire.sockets import receive_descriptors

_FUSERMOUNT: Final = "fusermount3"
_DEVICE: Final = "/dev/fuse"
_KERNEL_OPTIONS: Final = {"allow_other", "default_permissions"}  # fs/fuse/inode.c
# linux/mount.h
_MS_RDONLY: Final = 1
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4


class FuseMount(Value):
    """A mount of this process: its mountpoint (absolute, without symlinks), and its device number as in st_dev."""

    mountpoint: str
    device: int

    @property
    def device_text(self) -> str:
        """The device number as sysfs shows it: "major:minor"."""
        return f"{os.major(self.device)}:{os.minor(self.device)}"


def mount(settings: EngineSettings, *, checked: bool = True) -> tuple[int, FuseMount]:
    """Mount, and return the descriptor of /dev/fuse, whose first request is INIT.  OSError with fusermount3's message.

    `checked`: the kernel checks permissions from the attributes; the volume never does.
    """
    # Resolved before the mount exists: afterwards this process would have to answer its own request.
    mountpoint = os.path.realpath(settings.mountpoint)
    descriptor = _mount_as_root(settings, mountpoint, checked) if os.geteuid() == 0 else None
    if descriptor is None:
        descriptor = _mount_with_fusermount(settings, mountpoint, checked)
    devices = _devices(mountpoint)
    return descriptor, FuseMount(mountpoint, devices[-1] if devices else 0)


def _mount_as_root(settings: EngineSettings, mountpoint: str, checked: bool) -> int | None:
    """Mount without a helper process.  None if that fails: fusermount3 finds the same error and says more about it."""
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        root_type = stat.S_IFMT(os.stat(mountpoint).st_mode)
        options = [f"fd={descriptor},rootmode={root_type:o},user_id=0,group_id={os.getegid()}"]
        options += mount_options(settings, checked=checked) & _KERNEL_OPTIONS
        flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if settings.read_only else 0)
        syscalls.mount(SOURCE_PREFIX + settings.name, mountpoint, VFSD_TYPE, flags, ",".join(options))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _mount_with_fusermount(settings: EngineSettings, mountpoint: str, checked: bool) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            done = subprocess.run(
                [_FUSERMOUNT, "-o", ",".join(mount_options(settings, checked=checked)), "--", mountpoint],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        _, descriptors = receive_descriptors(ours, 1, 1)
    if not descriptors:
        message = done.stderr.decode(errors="replace").strip() or f"{_FUSERMOUNT} failed"
        code = errno.EPERM if os.path.isdir(mountpoint) else errno.ENOENT
        raise OSError(code, message, settings.mountpoint)
    return descriptors[0]


def is_mounted(made: FuseMount) -> bool:
    """Whether the mount still exists, according to the mount table: the mount itself may not answer."""
    return made.device in _devices(made.mountpoint)


def unmount(made: FuseMount) -> None:
    """Unmount, lazily if the mount is busy.  OSError if that fails too.

    EBUSY if another mount covers this one: fusermount3 would remove that mount.
    """
    message = "covered by another mount"
    for arguments in (["-u"], ["-u", "-z"]):
        devices = _devices(made.mountpoint)
        if made.device not in devices:
            return
        if devices[-1] != made.device:
            break
        done = subprocess.run(
            [_FUSERMOUNT, *arguments, "--", made.mountpoint], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        message = done.stderr.decode(errors="replace").strip()
    if is_mounted(made):
        raise OSError(errno.EBUSY, message, made.mountpoint)


def abort(made: FuseMount) -> None:
    """Abort the connection, so that no caller waits for an answer; only if fusectl is mounted and writable."""
    _write(f"/sys/fs/fuse/connections/{os.minor(made.device)}/abort", "1")


def set_readahead(made: FuseMount, size_bytes: int) -> None:
    """Set how far the kernel reads ahead (default 128 KiB).  Only root may; for other users the default stays."""
    _write(f"/sys/class/bdi/{made.device_text}/read_ahead_kb", str(size_bytes // 1024))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        pass  # both are optional, and need privileges


def _devices(mountpoint: str) -> list[int]:
    """Return the device numbers of the mounts at `mountpoint`, the topmost last."""
    return [mount.device for mount in mounts_at(mountpoint)]
