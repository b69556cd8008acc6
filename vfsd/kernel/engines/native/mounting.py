"""The mount besides its requests: made and ended, negotiated, notified, and taken over from a daemon that died.

Mounting is by mount(2), which root may call, also root of a user namespace with its own mounts, or through fusermount3.
That opens /dev/fuse, mounts it and passes the descriptor back over the socket that the environment variable
_FUSE_COMMFD names, as it does for libfuse (lib/mount.c).  libfuse itself is not used, because it answers INIT in its
own loop.

Requests that a process read and will never answer, because it died:

- FUSE_NOTIFY_RESEND (protocol 7.40, Linux 6.9) queues them again, with bit 63 of their number set, before the new ones.
  The reply has to keep the bit.  A FORGET that was read is lost: it has no reply.
- A program that waits for the answer to a request that was read cannot be killed.  That holds for the threads of a
  daemon, too: if one of them waits for its own daemon, the process does not end when it is killed, and its descriptors
  and locks stay.  `answer_threads` releases such threads.
- Older kernels do not send requests again.  There a daemon reads requests into memory that it shares with its keeper,
  and notes there which of them wait for an answer, so the next daemon can answer them with EIO.

Source: fs/fuse/dev.c (fuse_resend, request_wait_answer, fuse_dev_do_read).

Threading: any thread but the loop's sends notifications; `Notifications.open` and `close` are called on the loop's.
Notifications wait for requests that the loop answers (see `vfsd.kernel.engines.base`).
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Container, Sequence
from typing import Final

from protocol.linux import syscalls
from protocol.values import Value
from vfsd.kernel.engines.base import EngineSettings, mount_options
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.wire import InitFlag, Opcode
from vfsd.machine.mountinfo import SOURCE_PREFIX, VFSD_TYPE, mounts_at
from vfsd.machine.mounts import detach, why_no_mount
from vfsd.wire.sockets import receive_descriptors

_FUSERMOUNT: Final = "fusermount3"
_DEVICE: Final = "/dev/fuse"
_WITHOUT_MOUNT: Final = "without a mount, `vfsd attach DIR` gives a directory snapshots, diff and restore"
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
    """Mount, and return the descriptor of /dev/fuse, whose first request is INIT.

    OSError with fusermount3's message; ENODEV if there is no /dev/fuse.

    `checked`: the kernel checks permissions from the attributes; the volume never does.
    """
    # Resolved before the mount exists: afterwards this process would have to answer its own request.
    mountpoint = os.path.realpath(settings.mountpoint)
    try:
        descriptor = _mount_directly(settings, mountpoint, checked)
    except OSError as error:
        is_missing = error.filename == _DEVICE and error.errno == errno.ENOENT
        if is_missing or shutil.which(_FUSERMOUNT) is None:
            raise _explained(error, mountpoint) from None
        # It finds the same error as mount(2), and says more about it.
        descriptor = _mount_with_fusermount(settings, mountpoint, checked)
    devices = _devices(mountpoint)
    return descriptor, FuseMount(mountpoint, devices[-1] if devices else 0)


def _mount_directly(settings: EngineSettings, mountpoint: str, checked: bool) -> int:
    """Mount without a helper process.  OSError: EPERM for a user without CAP_SYS_ADMIN."""
    descriptor = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        root_type = stat.S_IFMT(os.stat(mountpoint).st_mode)
        options = [f"fd={descriptor},rootmode={root_type:o},user_id={os.geteuid()},group_id={os.getegid()}"]
        options += mount_options(settings, checked=checked) & _KERNEL_OPTIONS
        flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if settings.read_only else 0)
        syscalls.mount(SOURCE_PREFIX + settings.name, mountpoint, VFSD_TYPE, flags, ",".join(options))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _explained(error: OSError, mountpoint: str) -> OSError:
    """Return `error` of `_mount_directly`, which fusermount3 cannot help, with what to do."""
    if error.filename == _DEVICE:
        reason = f"{_DEVICE} cannot be opened ({error.strerror}): `vfsd doctor` says what to do; {_WITHOUT_MOUNT}"
        return OSError(errno.ENODEV, f"cannot mount at {mountpoint}: {reason}")
    reason = f"cannot mount at {mountpoint}: mount(2) failed ({error.strerror})"
    if error.errno == errno.EPERM:
        reason += (
            f", and {_FUSERMOUNT}, which mounts for users, is missing: install it (package fuse3); {_WITHOUT_MOUNT}"
        )
    return OSError(error.errno, reason)


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
        if why_no_mount() is not None or "not permitted" in message:
            message = f"{message}; {_WITHOUT_MOUNT}"
        raise OSError(code, f"cannot mount at {settings.mountpoint}: {message}")
    return descriptors[0]


def is_mounted(made: FuseMount) -> bool:
    """Whether the mount still exists, according to the mount table: the mount itself may not answer."""
    return made.device in _devices(made.mountpoint)


def unmount(made: FuseMount) -> None:
    """Unmount, lazily if the mount is busy.  OSError if that fails too.

    EBUSY if another mount covers this one: that mount would be removed.
    """
    message = "covered by another mount"
    for lazy in (False, True):
        devices = _devices(made.mountpoint)
        if made.device not in devices:
            return
        if devices[-1] != made.device:
            break
        try:
            detach(made.mountpoint, lazy=lazy)
        except OSError as error:
            message = error.strerror or str(error)
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


# -- the answer to INIT: the features that the engine accepts of those that the kernel offers ----------------
MAX_PAGES: Final = 256  # FUSE_MAX_MAX_PAGES of every kernel since 4.20
MAX_WRITE_BYTES: Final = MAX_PAGES * 4096
# The largest request: a WRITE of MAX_WRITE_BYTES with its headers.
MAX_REQUEST_BYTES: Final = MAX_WRITE_BYTES + 4096
# The limit of background requests (readahead) that the kernel may have outstanding; its default is 12.
MAX_BACKGROUND: Final = 64

_WANTED: Final = (
    InitFlag.ASYNC_READ
    | InitFlag.ASYNC_DIO
    | InitFlag.BIG_WRITES
    | InitFlag.MAX_PAGES
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.NO_OPEN_SUPPORT
    | InitFlag.NO_OPENDIR_SUPPORT
    # Without this flag the kernel requests security.capability before every write.
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.INIT_EXT
    | InitFlag.HAS_EXPIRE_ONLY
    | InitFlag.HAS_RESEND
)
# This engine has no handlers of OPEN and OPENDIR.
_REQUIRED: Final = InitFlag.NO_OPEN_SUPPORT | InitFlag.NO_OPENDIR_SUPPORT | InitFlag.MAX_PAGES


# For tests: set in the environment, this kernel is treated as one before Linux 6.9.
NO_RESEND: Final = "VFSD_TEST_NO_RESEND"


class Agreement(Value):
    """The negotiated protocol."""

    minor: int
    flags: InitFlag
    reply: bytes


def negotiate(
    message: bytes | bytearray | mmap.mmap,
    length: int,
    *,
    cache_timeout_s: float,
    acl: bool,
    checked: bool = True,
    write_back: bool = False,
) -> Agreement:
    """Answer the INIT request in `message[:length]`.  OSError (EPROTONOSUPPORT) if the kernel lacks a required feature.

    `acl`: the volume stores POSIX ACLs, and applies them and the umask to new entries.  `checked`: the kernel checks
    permissions, ACLs included.  `write_back`: the kernel keeps written pages, and the sizes and times of files.
    """
    _, opcode, unique, _, _, _, _, _, _ = wire.FUSE_IN_HEADER.unpack_from(message, 0)
    if opcode != Opcode.INIT or length < wire.IN_HEADER_BYTES + wire.FUSE_INIT_IN.size:
        raise OSError(errno.EPROTO, "the kernel's first request is not INIT")
    major, minor, readahead, flags = wire.FUSE_INIT_IN.unpack_from(message, wire.IN_HEADER_BYTES)
    if major != wire.FUSE_KERNEL_VERSION:
        raise OSError(errno.EPROTONOSUPPORT, f"the kernel speaks FUSE {major}.{minor}")
    extra = wire.IN_HEADER_BYTES + wire.FUSE_INIT_IN.size
    if flags & InitFlag.INIT_EXT and length >= extra + wire.FUSE_INIT_IN_FLAGS2.size:
        flags |= wire.FUSE_INIT_IN_FLAGS2.unpack_from(message, extra)[0] << 32
    offered = InitFlag(flags)
    required = _REQUIRED | InitFlag.WRITEBACK_CACHE if write_back else _REQUIRED
    missing = required & ~offered
    if missing:
        raise OSError(errno.EPROTONOSUPPORT, f"the kernel's FUSE {major}.{minor} lacks {missing!r}")
    taken = offered & (_wanted(cache_timeout_s, acl, checked) | required)
    minor = min(minor, wire.FUSE_KERNEL_MINOR_VERSION)
    body = wire.FUSE_INIT_OUT.pack(
        major, minor, max(readahead, MAX_WRITE_BYTES), taken & 0xFFFFFFFF,
        MAX_BACKGROUND, MAX_BACKGROUND * 3 // 4, MAX_WRITE_BYTES, 1, MAX_PAGES, 0, taken >> 32,
    )  # fmt: skip
    return Agreement(minor, taken, wire.body_reply(unique, body))


def _wanted(cache_timeout_s: float, acl: bool, checked: bool) -> InitFlag:
    wanted = _WANTED
    if NO_RESEND in os.environ:
        wanted &= ~InitFlag.HAS_RESEND
    if math.isinf(cache_timeout_s):
        # The kernel drops pages only on request, even if attributes change.
        wanted |= InitFlag.EXPLICIT_INVAL_DATA
    else:
        wanted |= InitFlag.AUTO_INVAL_DATA
    if acl:
        # A default ACL replaces the umask, so the volume must apply the umask, not the kernel.
        wanted |= InitFlag.DONT_MASK | InitFlag.SETXATTR_EXT
        if checked:  # the flag implies permission checks; without it, ACLs are ordinary extended attributes
            wanted |= InitFlag.POSIX_ACL
    return wanted


# -- requests that a daemon read before it died -------------------------------------------------------------
RING_AT: Final = 4096  # in the shared memory: the numbers of requests that were not answered at once
RING_WORDS: Final = 4096
BUFFER_AT: Final = RING_AT + 8 * RING_WORDS  # ... and the request that was read last
SHARED_BYTES: Final = BUFFER_AT + MAX_REQUEST_BYTES
_NUMBER: Final = struct.Struct("=Q")

_WITHOUT_REPLY = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})


def resend_unanswered(descriptor: int) -> None:
    """Have the kernel send the requests again that were read and not answered.  OSError (EINVAL) before Linux 6.9."""
    os.write(descriptor, wire.notification(wire.FUSE_NOTIFY_RESEND, b""))


def answer_threads(descriptor: int, threads: Container[int]) -> int:
    """Answer the waiting requests of these threads with EIO; return how many.

    No process serves the mount.  Every other request is read and queued again; FORGETs are lost.
    """
    count = 0
    resend_unanswered(descriptor)
    with mmap.mmap(-1, MAX_REQUEST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
        while _read_request(descriptor, buffer):
            opcode, unique, _, pid = wire.IN_HEADER_ROUTE.unpack_from(buffer, 0)
            if pid in threads and opcode not in _WITHOUT_REPLY:
                os.write(descriptor, wire.error_reply(unique, errno.EIO))
                count += 1
    resend_unanswered(descriptor)
    return count


def fail_noted(descriptor: int, memory_fd: int) -> int:
    """Answer the requests that the memory `memory_fd` has with EIO; return how many waited."""
    ring = os.pread(memory_fd, 8 * RING_WORDS, RING_AT)
    last = os.pread(memory_fd, 8, BUFFER_AT + 8)  # fuse_in_header.unique
    numbers = {number for (number,) in _NUMBER.iter_unpack(ring + last)} - {0}
    count = 0
    for number in numbers:
        try:
            os.write(descriptor, wire.error_reply(number, errno.EIO))
        except FileNotFoundError:  # it was answered
            continue
        count += 1
    return count


def _read_request(descriptor: int, buffer: mmap.mmap) -> bool:
    """Read a request; False if there is none."""
    while True:
        try:
            return os.readv(descriptor, [buffer]) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.ENOENT:  # the request was withdrawn while it was read
                raise


# -- notifications to the kernel: what it is to drop from its caches ------------------------------------------
_PRUNED_AT_ONCE: Final = 256
# Errors of an invalidation of something that the kernel does not cache.
_NOT_CACHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN, errno.ENODEV})


class Notifications:
    """Sends notifications on the device of one mount, and closes the device when nobody sends any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the others
        self._threads = 0  # that are sending a notification
        self._device: io.FileIO | None = None
        self._is_closed = False

    def open(self, device: io.FileIO) -> None:
        """Send on `device` from now on."""
        self._device = device

    def close(self) -> None:
        """Close the device; if threads are sending notifications, the last of them does."""
        with self._lock:
            self._is_closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._threads and self._device:
            self._device.close()
            self._device = None

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """See `vfsd.kernel.engines.base.Engine`."""
        # A negative offset means attributes only, length 0 up to the end (fs/fuse/inode.c).
        body = wire.FUSE_NOTIFY_INVAL_INODE_OUT.pack(inode, 0 if content else -1, 0)
        self._send(wire.notification(wire.FUSE_NOTIFY_INVAL_INODE, body))

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """See `vfsd.kernel.engines.base.Engine`."""
        body = wire.FUSE_NOTIFY_INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
        self._send(wire.notification(wire.FUSE_NOTIFY_INVAL_ENTRY, body))

    def prune(self, inodes: Sequence[int]) -> None:
        """Have the kernel evict the inodes that no program uses."""
        for start in range(0, len(inodes), _PRUNED_AT_ONCE):
            some = inodes[start : start + _PRUNED_AT_ONCE]
            body = wire.FUSE_NOTIFY_PRUNE_OUT.pack(len(some), 0, 0) + struct.pack(f"={len(some)}Q", *some)
            self._send(wire.notification(wire.FUSE_NOTIFY_PRUNE, body))

    def _send(self, message: bytes) -> None:
        with self._lock:
            if self._is_closed or self._device is None:
                return
            descriptor = self._device.fileno()
            self._threads += 1
        try:
            os.write(descriptor, message)
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
        finally:
            with self._lock:
                self._threads -= 1
                self._close_if_unused()
