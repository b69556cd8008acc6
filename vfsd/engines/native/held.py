"""Reading and writing the device without letting go of the interpreter's lock, for while other threads compute.

Python gives the lock away at every system call.  Beside a thread that computes, getting it back takes a switch
interval (`sys.setswitchinterval`) and a trip through the scheduler each time: for a request that is read and
answered, twice, and more than all else it costs.  The device is not blocking, so nothing is lost by keeping the lock.
Without such threads these calls only take longer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

__all__ = ["read_into", "write"]

_LIBC: Final = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
_READ: Final = _LIBC.read
_READ.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_READ.restype = ctypes.c_ssize_t
_WRITE: Final = _LIBC.write
_WRITE.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
_WRITE.restype = ctypes.c_ssize_t


def read_into(descriptor: int, buffer: bytearray, otherwise: Callable[[bytearray], int | None]) -> int | None:
    """Read; where that fails `otherwise` is called, which tries once more and says why."""
    length: int = _READ(descriptor, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
    return length if length >= 0 else otherwise(buffer)


def write(descriptor: int, message: bytes) -> int:
    """os.write."""
    length: int = _WRITE(descriptor, message, len(message))
    # The kernel takes a reply whole or not at all; refused, it is refused again, with the errno.
    return length if length >= 0 else os.write(descriptor, message)
