"""Service notifications to systemd: datagrams to $NOTIFY_SOCKET.

systemd takes them from the main process of a unit only (NotifyAccess=main), which is the keeper of a daemon that has
one: such a daemon notifies its keeper, which passes that on.

Implemented here because the protocol is one datagram: `sdnotify` has had no release since 2017 and does not read the
watchdog interval, and `systemd-python` needs a compiler and libsystemd.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import array
import logging
import os
import select
import socket
from collections.abc import Callable, Mapping
from typing import Final

from protocol.values import Value

_log = logging.getLogger(__name__)
_BARRIER_TIMEOUT_S: Final = 5.0


class Notifier(Value):
    """Sends notifications to `address`; without an address (not started by systemd) every method does nothing.

    `watchdog_interval_s` is how often to call `watchdog`, half of systemd's timeout; None without a watchdog.
    `keeper`: sends a message to the keeper instead, which is the main process.  Methods return whether the message was
    sent.  They never raise or block: a lost datagram must not end the daemon.
    """

    address: str | None = None
    watchdog_interval_s: float | None = None
    keeper: Callable[[bytes], bool] | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> Notifier:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID for process `pid`, this process by default."""
        return cls(environ.get("NOTIFY_SOCKET") or None, _watchdog_interval_s(environ, pid or os.getpid()))

    def ready(self, status: str = "") -> bool:
        """Report that the mount answers, and that this is the service's main process.

        `systemctl status` shows `status`.
        """
        main = os.getpid() if self.keeper is None else os.getppid()
        return self._send("READY=1", f"MAINPID={main}", *_status(status))

    def successor(self, pid: int) -> bool:
        """Report that process `pid` is the service's main process from now on."""
        return self._send(f"MAINPID={pid}")

    def watchdog(self) -> bool:
        """Reset the watchdog's timeout."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """Report that the daemon is unmounting and will exit."""
        return self._send("STOPPING=1", *_status(status))

    def wait_processed(self) -> None:
        """Wait until systemd has processed every message that was sent before, or some seconds."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            if self._send("BARRIER=1", descriptors=[writing]):  # which systemd then closes
                os.close(writing)
                writing = -1
                poll = select.poll()
                poll.register(reading, 0)
                poll.poll(_BARRIER_TIMEOUT_S * 1000)
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)

    def _send(self, *assignments: str, descriptors: list[int] | None = None) -> bool:
        if self.address is None:
            return False
        message = "\n".join(assignments).encode("utf-8", "backslashreplace")
        return self.send(message, descriptors) if self.keeper is None else self.keeper(message)

    def send(self, message: bytes, descriptors: list[int] | None = None) -> bool:
        """Send a message of assignments, one on each line."""
        assert self.address is not None
        # "@" represents the NUL byte at the start of an abstract socket's name, unix(7).
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                sender.sendmsg([message], rights, 0, os.fsencode(address))
        except OSError as error:
            _log.warning("cannot notify systemd: %s", error.strerror or error, extra={"operation": "sd_notify"})
            return False
        return True


def _status(text: str) -> list[str]:
    """Return the STATUS= assignment for a non-empty `text`, as one line: a second one would be another assignment."""
    return [f"STATUS={' '.join(text.split())}"] if text else []


def _watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # for the process that started us
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2e6 if usec.isdecimal() and int(usec) > 0 else None
