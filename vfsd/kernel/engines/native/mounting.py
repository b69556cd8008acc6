"""Mounting and unmounting through fusermount3, which works for root and for everybody else.

fusermount3 opens /dev/fuse, mounts it and hands the descriptor back over the socket that the
environment variable _FUSE_COMMFD names: the protocol that libfuse speaks with it (lib/mount.c).  Going
through it rather than through libfuse's session leaves INIT to us: libfuse answers INIT in its own loop.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import subprocess
from dataclasses import dataclass
from typing import Final

from vfsd.kernel.engines.base import EngineSettings
from vfsd.machine.mountinfo import mounts

__all__ = ["Mount", "abort", "is_mounted", "mount", "set_readahead", "unmount"]

_FUSERMOUNT: Final = "fusermount3"


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that was made: where (absolute, no symlinks), and as which device ("major:minor")."""

    mountpoint: str
    device: str


def mount(settings: EngineSettings, *, checked: bool = True) -> tuple[int, Mount]:
    """Mount; returns the descriptor of /dev/fuse, from which INIT can be read.  OSError, with fusermount3's words.

    `checked`: the kernel checks permissions from the attributes; the volume never does.
    """
    # Resolved before the mount is there: afterwards it would be a request to ourselves.
    mountpoint = os.path.realpath(settings.mountpoint)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            done = subprocess.run(
                [_FUSERMOUNT, "-o", _options(settings, checked), "--", mountpoint],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        descriptor = _receive_descriptor(ours)
    if descriptor is None:
        words = done.stderr.decode(errors="replace").strip() or f"{_FUSERMOUNT} failed"
        code = errno.EPERM if os.path.isdir(mountpoint) else errno.ENOENT
        raise OSError(code, words, settings.mountpoint)
    device = _devices(mountpoint)
    return descriptor, Mount(mountpoint, device[-1] if device else "")


def is_mounted(made: Mount) -> bool:
    """Whether the mount is still there: asked of the mount table, not of the mount, which may not answer."""
    return made.device in _devices(made.mountpoint)


def unmount(made: Mount) -> None:
    """Unmount, lazily where it is busy.  OSError when even that fails.

    EBUSY where another mount covers ours: fusermount3 would take that one away.
    """
    words = "covered by another mount"
    for arguments in (["-u"], ["-u", "-z"]):
        devices = _devices(made.mountpoint)
        if made.device not in devices:
            return
        if devices[-1] != made.device:
            break
        done = subprocess.run(
            [_FUSERMOUNT, *arguments, "--", made.mountpoint], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        words = done.stderr.decode(errors="replace").strip()
    if is_mounted(made):
        raise OSError(errno.EBUSY, words, made.mountpoint)


def abort(made: Mount) -> None:
    """End the connection, so that nobody waits for an answer any more; where fusectl is mounted and lets us."""
    _write(f"/sys/fs/fuse/connections/{made.device.partition(':')[2]}/abort", "1")


def set_readahead(made: Mount, size_bytes: int) -> None:
    """Let the kernel read ahead that far (default 128 KiB); only root may, others keep the default."""
    _write(f"/sys/class/bdi/{made.device}/read_ahead_kb", str(size_bytes // 1024))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        pass  # both are improvements that not everybody is allowed


def _options(settings: EngineSettings, checked: bool) -> str:
    options = [f"fsname=vfsd:{settings.name}", "subtype=vfsd"]
    if checked:
        options.append("default_permissions")
    if settings.allow_other:
        options.append("allow_other")
    if settings.read_only:
        options.append("ro")
    return ",".join(options)


def _receive_descriptor(channel: socket.socket) -> int | None:
    """The descriptor that fusermount3 sent, or None when it ended without one."""
    descriptors = array.array("i")
    size = descriptors.itemsize
    _, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % size])
    return descriptors[0] if descriptors else None


def _devices(mountpoint: str) -> list[str]:
    """List the devices mounted at `mountpoint`, the topmost one last."""
    devices = [mount.device for mount in mounts() if mount.mountpoint == mountpoint]
    return [f"{os.major(device)}:{os.minor(device)}" for device in devices]
