"""A helper that several daemons use, one after the other: how the next one finds it, and what an upgrade hands over.

The helper owns the state: inodes, open files, listings.  A daemon that continues needs the name and the secret of the
helper's socket (`HeldHelper`).  With a keeper they are in the slot of the `SharedLog`; an upgrade sends them.

Threading: the serving loop in the old process; the new one reads in a worker thread.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Self

import msgspec

from protocol.backends.container.helper.wire import VERSION
from protocol.linux.shared_log import SharedLog, written_records
from protocol.values import Value
from protocol.volume_durability import JournalEnd

# The words of the slot: the version of the helper's protocol (0: there is none), its name, its secret.
_WORDS: Final = slice(410, 414)
_NAME_BYTES: Final = 8
_SECRET_BYTES: Final = 16


class HeldHelper(Value):
    """A helper that waits for another daemon.  `hello`: what it replied to HELLO, which stays the same."""

    version: int
    name: bytes
    secret: bytes
    hello: tuple[int, ...] = ()

    @classmethod
    def new(cls) -> Self:
        """A name and a secret for a helper."""
        return cls(VERSION, secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(_SECRET_BYTES))

    def check(self) -> None:
        """Check that this version of vfsd can use the helper.  OSError (EPROTONOSUPPORT)."""
        if self.version != VERSION:
            raise OSError(
                errno.EPROTONOSUPPORT,
                f"the helper that has the files open speaks another protocol ({self.version}) than this version"
                f" ({VERSION}): unmount the workspace and mount it again",
            )


def save(log: SharedLog, held: HeldHelper | None) -> None:
    """Write the helper to the slot of the log; None: the next daemon cannot continue."""
    words = log.slot[_WORDS]
    words[0] = 0  # a daemon that dies meanwhile has no helper to continue with
    if held is not None:
        numbers = memoryview(held.name + held.secret).cast("Q")
        for at, number in enumerate(numbers, 1):
            words[at] = number
        words[0] = held.version


def load(log: SharedLog) -> HeldHelper:
    """Read the helper of the process before.  OSError (ESTALE) if there is none."""
    version, *numbers = log.slot[_WORDS]
    if not version:
        raise OSError(errno.ESTALE, "the daemon before had no helper that waits for another daemon: mount again")
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return HeldHelper(version, data[:_NAME_BYTES], data[_NAME_BYTES:])


class HelperGiving:
    """The old process's side.  See `protocol.volume_durability.GivenState`.

    `give` notes whether the other process may have the helper.
    """

    below = ""
    has_image = False
    lock_fd = None

    def __init__(self, held: HeldHelper, give: Callable[[bool], None]) -> None:
        self._log = SharedLog.create()
        self.start = self.position()
        self._log.append(msgspec.msgpack.encode(held))
        self._give = give

    def log_fd(self) -> int:
        return os.dup(self._log.descriptor)

    def position(self) -> JournalEnd:
        return JournalEnd(0, self._log.end, 0, 0, 0, 0)

    def write_image(self, descriptor: int) -> None:
        """Nothing: the helper has everything."""

    def files(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def rest(self) -> bytes:
        self._give(True)
        return b""

    def end(self) -> None:
        self._give(False)
        os.close(self._log.descriptor)


class HelperTaking:
    """The new process's side.  See `protocol.volume_durability.TakenState`.  `take` gets the helper."""

    def __init__(self, take: Callable[[HeldHelper], None]) -> None:
        self.below = ""
        self._take = take
        self._log_fd = self._at = -1

    def read(self, _image_fd: int, log_fd: int, start: JournalEnd) -> None:
        self._log_fd, self._at = log_fd, start.offset

    def follow(self, end: int) -> None:
        for record in written_records(self._log_fd, self._at, end):
            held = msgspec.msgpack.decode(record, type=HeldHelper)
            held.check()
            self._take(held)
        self._at = end

    def take_files(self, files: Mapping[int, int]) -> None:
        for descriptor in files.values():
            os.close(descriptor)

    def complete(self, rest: bytes) -> None:
        os.close(self._log_fd)
        if rest:
            raise ValueError("a state of another kind")
