"""Leases: keep the contents of a snapshot in the store while a process uses them, even if the snapshot is dropped.

A lease is a file in leases/, with the digest of the snapshot's root listing, the row of the root, and its inode row if
there is one.  Its owner holds a shared flock(2) on it.  The lock ends with the last process that has the descriptor: a
crashed daemon leaves no lock, a forked one shares it, and a keeper holds it until the next daemon has a lease of its
own.  A garbage collection keeps what the locked leases need, and removes the others.

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

from protocol.linux.regular_file import open_regular, read_regular
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, decode_listing, encode_listing

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout

_LEASES: Final = "leases"
_LEASE_MAX_BYTES: Final = 1 << 20
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Lease:
    """A lease on the snapshot with this root.  Make it while the store's lock is held shared.  OSError.

    Another process that has a duplicate of `descriptor` holds the lease, too.
    """

    def __init__(self, layout: Layout, root: Row, inodes: Row | None) -> None:
        directory = os.path.join(layout.directory, _LEASES)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._path = os.path.join(directory, secrets.token_hex(12))
        self._fd = open_regular(self._path, _NEW)
        rows = [root] if inodes is None else [root, inodes]
        content = f"{root.content.hex()}\n{encode_listing(rows).hex()}\n".encode()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(self._fd, content)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor that holds the lease."""
        return self._fd

    def close(self) -> None:
        """End the lease, unless a forked process still has it."""
        if self._fd < 0:
            return
        os.close(self._fd)  # not LOCK_UN, which would end it for a forked process, too
        self._fd = -1
        with contextlib.suppress(OSError):
            _remove_if_dead(self._path)


def leased(layout: Layout) -> Iterator[bytes]:
    """Yield the digests of the root listings with a live lease; remove dead leases.

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
            first, *rest = read_regular(path, _LEASE_MAX_BYTES).split(b"\n")
            yield bytes.fromhex(first.decode("ascii"))
            if len(rest) > 1:  # none in the leases of older versions
                yield from (row.content for row in _rows(rest[0])[1:])
        except FileNotFoundError:
            continue  # it ended meanwhile
        except ValueError:
            raise DamagedError("the lease of a mounted snapshot is damaged: unmount the workspaces", path) from None


def leased_roots(layout: Layout, digest: bytes) -> tuple[Row, Row | None] | None:
    """Return the root of the snapshot with the listing `digest`, and its inode row, if a live lease has them.

    Its name may be dropped.

    Call it with the store's lock held shared.
    """
    directory = os.path.join(layout.directory, _LEASES)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if _remove_if_dead(path):
                continue
            with contextlib.suppress(FileNotFoundError, ValueError):  # it ended meanwhile, or is damaged
                first, second, *_ = read_regular(path, _LEASE_MAX_BYTES).split(b"\n")
                if bytes.fromhex(first.decode("ascii")) == digest:
                    root, *inodes = _rows(second)
                    return root, inodes[0] if inodes else None
    return None


def _rows(line: bytes) -> list[Row]:
    return decode_listing(bytes.fromhex(line.decode("ascii")))


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
