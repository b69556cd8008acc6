"""What a service tells systemd about itself: datagrams to $NOTIFY_SOCKET.

Our own, since the protocol is one datagram and the libraries are no help: `sdnotify` has had no release
since 2017 and no watchdog interval; `systemd-python` needs a compiler and libsystemd for the same bytes.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Notifier"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notifier:
    """Sends to `address`; without one (not started by systemd) every call does nothing.

    `watchdog_interval_s` is how often to call `watchdog`, half of what systemd waits; None when it does not wait.
    A call returns whether the message was sent.  None raises or blocks: no daemon should end of a lost datagram.
    """

    address: str | None = None
    watchdog_interval_s: float | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> Notifier:
        """As NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID say to process `pid`, by default this one."""
        return cls(environ.get("NOTIFY_SOCKET") or None, _watchdog_interval_s(environ, pid or os.getpid()))

    def ready(self, status: str = "") -> bool:
        """Started: the mount answers.  Says which process is the service's main one, too."""
        return self._send("READY=1", f"MAINPID={os.getpid()}", *_status(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status(text))

    def watchdog(self) -> bool:
        """Still alive."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """Shutting down: unmounting has begun."""
        return self._send("STOPPING=1", *_status(status))

    def _send(self, *assignments: str) -> bool:
        if self.address is None:
            return False
        # "@" stands for the NUL byte that an abstract socket's name begins with, unix(7).
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(assignments).encode("utf-8", "backslashreplace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message, os.fsencode(address))
        except OSError as error:
            _log.warning("cannot notify systemd: %s", error.strerror or error, extra={"operation": "sd_notify"})
            return False
        return True


def _status(text: str) -> list[str]:
    """STATUS=, where there is something to say; on one line, or its second would be an assignment of its own."""
    return [f"STATUS={' '.join(text.split())}"] if text else []


def _watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for the process that started us
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2e6 if usec.isdecimal() and int(usec) > 0 else None
