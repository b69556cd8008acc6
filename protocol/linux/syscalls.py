"""System calls that Python's os module lacks: openat2, syncfs, fstatfs, mount, statx for the identity of a mount.

Also what a process needs to bound its memory (malloc_trim and its resident set), and to favor threads that answer
requests over threads that compute for long (`lower_priority`).

(See also `statx` and `portable`.)

Source: the man pages of section 2; include/uapi/linux/openat2.h.  The numbers of system calls above 424 are the same on
every architecture (arch/*/kernel/syscalls: "common").

A thread that wakes up may have to wait until the thread on its CPU has used its time slice (Linux's EEVDF: 0.75 to
3 ms), independent of their nice values.  If all CPUs compress data, a stat through the mount takes that long.  Only a
thread with a longer slice is preempted at once by threads with shorter ones (kernel/sched/fair.c, PREEMPT_SHORT).  The
thread keeps its share of CPU time, because it may hold a lock that others wait for: with idle-time scheduling
(SCHED_IDLE) it would almost never run on a busy machine, and if it held the interpreter lock, all threads would wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from typing import Final, NamedTuple

from protocol.errors import NotMountedError, os_error

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SYS_OPENAT2: Final = 437
_OPEN_HOW: Final = struct.Struct("=QQQ")  # flags, mode, resolve
_DEAD: Final = (errno.ENOTCONN, errno.ECONNABORTED)  # of calls on a mount whose daemon has died
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_OFFSET_MAX: Final = (1 << 63) - 1
_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_FORCE_SYNC: Final = 0x2000
_STATX_MTIME: Final = 0x40
_STATX_MNT_ID_UNIQUE: Final = 0x4000
_STATX_BYTES: Final = 256
_STATX_MOUNT: Final = struct.Struct("=136xIIQ")  # dev_major, dev_minor, mnt_id
_STATFS_BYTES: Final = 512  # struct statfs takes 120 on 64 bits; f_type is its first field

_syscall = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _LIBC))
_statx = getattr(_LIBC, "statx", None)  # glibc has it from 2.28 on
_lseek = _LIBC.lseek64 if hasattr(_LIBC, "lseek64") else _LIBC.lseek
_lseek.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
_lseek.restype = ctypes.c_int64
# Keeps the interpreter lock, for calls that do not wait.
_SHORT_CALLS: Final = ctypes.PyDLL(None)
_pread: Final = _SHORT_CALLS.pread64 if hasattr(_SHORT_CALLS, "pread64") else _SHORT_CALLS.pread
_ONE_BYTE: Final = ctypes.c_size_t(1)
_START: Final = ctypes.c_int64(0)
_hows: Final[dict[tuple[int, int], bytes]] = {}


def trim_heap() -> None:
    """Return the free pages of the heap to the system (malloc_trim(3)); nothing where the C library lacks that call.

    Takes about 0.1 s for each GiB that it returns, without the interpreter lock.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:  # proc_pid_statm(5)
        return int(file.read().split()[1]) * _PAGE_BYTES


def openat2(directory: int, path: bytes, flags: int, resolve: int) -> int:
    """Open an existing path with openat2(2).  ENOSYS before Linux 5.6; EPERM in some sandboxes."""
    how = _hows.get((flags, resolve))
    if how is None:
        how = _hows[flags, resolve] = _OPEN_HOW.pack(flags, 0, resolve)
    descriptor: int = _syscall(_SYS_OPENAT2, directory, path, how, _OPEN_HOW.size)
    if descriptor < 0:
        raise os_error(ctypes.get_errno(), path.decode("utf-8", "backslashreplace"))
    return descriptor


def fails_to_read(descriptor: int) -> bool:
    """Return whether pread(2) of the first byte fails.  For a file that is never read: there is no buffer.

    For a check that is made often: os.pread, which formats and raises the error, takes 3.5 times as long.
    """
    result: int = _pread(descriptor, None, _ONE_BYTE, _START)
    return result < 0


def seek_hole(descriptor: int, offset: int) -> int:
    """lseek(2) with SEEK_HOLE.  Returns 2**63 - 1 for the result 2**63, which off_t cannot represent.

    (os.lseek returns in that case with an exception set, which is then raised at an unrelated place.)
    """
    found: int = _lseek(descriptor, offset, os.SEEK_HOLE)
    if found == -1:
        raise os_error(ctypes.get_errno())
    return found if found >= 0 else _OFFSET_MAX


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2): mount a file system of type `kind` at `target`.  `flags` are MS_* of linux/mount.h."""
    if _LIBC.mount(*(os.fsencode(each) for each in (source, target, kind)), ctypes.c_ulong(flags), options.encode()):
        raise os_error(ctypes.get_errno(), target)


class MountId(NamedTuple):
    """The identity of a mount.  `number` is never used again from Linux 6.8 on; before, a later mount may have both.

    `directory`: of a directory that need not be the root of its mount, its inode number; else 0.
    """

    device: int
    number: int
    directory: int = 0


def mount_of(descriptor: int, *, asks: bool = False) -> MountId:
    """Return the identity of the mount that a descriptor (also an O_PATH one) is on.

    With `asks` the file system has to answer, even if the kernel has all attributes: ENOTCONN if its server has died.
    Otherwise this never waits for a file system.
    """
    flags, mask = _AT_EMPTY_PATH, _STATX_MNT_ID_UNIQUE
    if asks:
        flags, mask = flags | _AT_STATX_FORCE_SYNC, mask | _STATX_MTIME
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx is None:
        return MountId(os.fstat(descriptor).st_dev, 0)
    if _statx(descriptor, b"", flags, mask, buffer):
        raise os_error(ctypes.get_errno())
    major, minor, number = _STATX_MOUNT.unpack_from(buffer)
    return MountId(os.makedev(major, minor), number)


def open_mount(path: str, mount: MountId, flags: int = os.O_PATH, *, asks: bool = False) -> int:
    """Open the directory `path`, the root of `mount`, or the directory in it.

    NotMountedError if the mount is gone or covered, or if its server has died and `asks` (see `mount_of`).  A path
    below the descriptor stays in that mount, whatever is unmounted later.
    """
    try:
        descriptor = os.open(path, flags | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path, mount) from None
    try:
        found = mount_of(descriptor, asks=asks)
        if mount.directory:
            found = found._replace(directory=os.fstat(descriptor).st_ino)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _DEAD:
            raise NotMountedError(path, "the daemon of this mount has died") from None
        raise
    if found != mount:
        os.close(descriptor)
        raise _not_there(path, mount)
    return descriptor


def _not_there(path: str, mount: MountId) -> NotMountedError:
    if not mount.directory:
        return NotMountedError(path)
    reason = "the attached directory was moved, removed or replaced: put it back, or `vfsd unmount` and attach again"
    return NotMountedError(path, reason)


def syncfs(descriptor: int) -> None:
    """syncfs(2): write all data of the file system of a descriptor to its disk.  Retries after EINTR."""
    while _LIBC.syncfs(descriptor):
        if ctypes.get_errno() != errno.EINTR:
            raise os_error(ctypes.get_errno())


def filesystem_type(descriptor: int) -> int:
    """Return f_type of fstatfs(2): the number of the file system's type (include/uapi/linux/magic.h); 0 if unknown."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.fstatfs(descriptor, buffer):
        return 0
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # system call numbers; glibc has no function
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")  # sched_attr(2) without the clamps: its first version
_SLICE_NS: Final = 10_000_000
_NICE_STEP: Final = 10
_NICE_MAX: Final = 19


def lower_priority() -> None:
    """Lower the priority of this thread for the rest of its life.  Before Linux 6.12 only its nice value changes."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # only an optimization, which some sandboxes forbid
        nice = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE_STEP, _NICE_MAX)
        if not _set_longer_slice(thread, nice):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def _set_longer_slice(thread: int, nice: int) -> bool:
    call = _SCHED_SETATTR.get(os.uname().machine)
    # Keep another policy, which the user chose (chrt(1), CPUSchedulingPolicy=).
    if call is None or os.sched_getscheduler(thread) != os.SCHED_OTHER:
        return False
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(call, thread, attributes, 0) == 0)
