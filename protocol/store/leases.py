"""Leases: keep the contents of a snapshot in the store while a process uses them, even if the snapshot is dropped.

A lease is a file in leases/, with the digest of the snapshot's root listing.  Its owner holds a shared flock(2) on it.
The lock ends with the last process that has the descriptor: a crashed daemon leaves no lock, and a forked one shares
it.  A garbage collection keeps what the locked leases need, and removes the others.

A lease is made and read under the store's lock, shared and exclusive, so that a collection sees it complete or not at
all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protocol.linux.regular_file import open_regular, read_prefix
from protocol.store.format.packs import DamagedError

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout

_LEASES: Final = "leases"
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Lease:
    """A lease on the listing `digest`.  Make it while the store's lock is held shared.  OSError."""

    def __init__(self, layout: Layout, digest: bytes) -> None:
        directory = os.path.join(layout.directory, _LEASES)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._path = os.path.join(directory, secrets.token_hex(12))
        self._fd = open_regular(self._path, _NEW)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(self._fd, digest.hex().encode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the lease, unless a forked process still has it."""
        if self._fd < 0:
            return
        os.close(self._fd)  # not LOCK_UN, which would end it for a forked process, too
        self._fd = -1
        with contextlib.suppress(OSError):
            _remove_if_dead(self._path)


def leased(layout: Layout) -> Iterator[bytes]:
    """Yield the digest of each listing with a live lease; remove dead leases.

    Call it with the store's lock held exclusively.  DamagedError if a live lease cannot be read.
    """
    directory = os.path.join(layout.directory, _LEASES)
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(directory, name)
        if _remove_if_dead(path):
            continue
        try:
            yield bytes.fromhex(read_prefix(path).decode("ascii"))
        except FileNotFoundError:
            continue  # it ended meanwhile
        except ValueError:
            raise DamagedError("the lease of a mounted snapshot is damaged: unmount the workspaces", path) from None


def _remove_if_dead(path: str) -> bool:
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
