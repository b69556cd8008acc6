"""System calls that Python's os lacks (renameat2, fallocate, statx, copy_file_range before 3.8).

Source: the man pages of section 2.  If Python was built without ctypes, or the C library is too old, a call fails with
EOPNOTSUPP or falls back to other calls.
"""

import errno
import os
import struct

try:
    import ctypes

    _LIBC = ctypes.CDLL(None, use_errno=True)
except (ImportError, OSError):  # built without
    _LIBC = None  # type: ignore[assignment]

_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_STATX_BTIME_AT = 80
_COPY_BYTES = 1024 * 1024
_ELSEWHERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def os_error(code: int) -> OSError:
    """The OSError for an errno."""
    return OSError(code, os.strerror(code))


def _call(name: str, *arguments: object) -> None:
    call = getattr(_LIBC, name, None)
    if call is None:
        raise os_error(errno.EOPNOTSUPP)
    if call(*arguments):
        raise os_error(ctypes.get_errno())


def renameat2(source: int, name: bytes, target: int, new_name: bytes, flags: int) -> None:
    """renameat2(2) with flags."""
    try:
        _call("renameat2", source, name, target, new_name, ctypes.c_uint(flags) if _LIBC else flags)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise os_error(errno.EINVAL) from None
        raise


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2)."""
    if _LIBC is None:
        raise os_error(errno.EOPNOTSUPP)
    name = "fallocate64" if hasattr(_LIBC, "fallocate64") else "fallocate"
    _call(name, descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def born_ns_of(descriptor: int) -> int:
    """An inode's birth time in nanoseconds since the epoch; 0 if unknown."""
    if not hasattr(_LIBC, "statx"):
        return 0
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer):
        return 0
    if not struct.unpack_from("=I", buffer)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STATX_BTIME_AT)
    return int(seconds * 1000000000 + nanoseconds)


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    """copy_file_range(2) until `length` bytes or the end of the source; pread and pwrite if the kernel cannot."""
    kernel = getattr(os, "copy_file_range", None)
    copied = 0
    while copied < length:
        if kernel is not None:
            try:
                count = kernel(source, target, length - copied, source_offset + copied, target_offset + copied)
            except OSError as error:
                if copied or error.errno not in _ELSEWHERE:
                    raise
                kernel = None
                continue
        else:
            data = os.pread(source, min(_COPY_BYTES, length - copied), source_offset + copied)
            count = os.pwrite(target, data, target_offset + copied) if data else 0
        if not count:
            break
        copied += count
    return copied
