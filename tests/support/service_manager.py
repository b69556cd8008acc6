"""A stand-in for systemd, which runs on no machine of the tests: it runs one unit with Type=notify.

It follows sd_notify(3): messages of the main process only (NotifyAccess=main); BARRIER, READY, MAINPID, WATCHDOG.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support.waiting import wait_until

_CLEAN: Final = frozenset({0, -signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE})
_UCRED: Final = struct.Struct("3i")
_POLL_S: Final = 0.02


class ServiceManager:
    """Runs `command`, and restarts it as Restart=on-failure does, at most `most_starts` times.

    `log`: what the unit writes to standard error.  `ended`: the status of the main process at the end of the unit.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], place: Path) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.ignored: set[int] = set()  # other processes than the main one that sent messages
        self.main = 0
        self.starts = 0
        self.fed = 0  # how often the watchdog was fed
        self.ended: int | None = None
        self.most_starts = sys.maxsize
        self.log = place / "unit.log"
        self._is_ready = False
        self._is_over = False
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._address = str(place / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._run)

    # -- for the test ------------------------------------------------------------------------------
    def __enter__(self) -> ServiceManager:
        self._thread.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._socket.close()
        os.unlink(self._address)

    def wait_ready(self, starts: int = 1) -> None:
        """Return when the unit was started so often, and the last start is ready."""
        try:
            wait_until(lambda: self._is_over or (self.starts >= starts and self._is_ready), "a ready start", 60)
        except AssertionError as error:
            raise AssertionError(self.log.read_text()) from error
        assert not self._is_over, self.log.read_text()

    def wait_over(self) -> None:
        """Return when the unit has ended for good."""
        wait_until(lambda: self._is_over, "the end of the unit")
        self._thread.join()

    def stop(self) -> None:
        """Do as `systemctl stop`."""
        self._is_stopping = True
        if not self._is_over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.main, signal.SIGTERM)
        self.wait_over()

    # -- the manager -------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._start()
            while True:
                select.select([self._socket], [], [], _POLL_S)
                self._take_messages()
                self.ended = self._ended()
                if self.ended in _CLEAN:
                    return
                if self.ended is not None:
                    self._is_ready = False
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.main, signal.SIGKILL)  # KillMode=mixed
                    if self._is_stopping:
                        return
                    if self.starts < self.most_starts:
                        self._start()
        finally:
            self._is_over = True

    def _ended(self) -> int | None:
        """The exit status of the main process, negative for a signal; 1 if it is not a child of this process."""
        assert self._process is not None
        if self.main == self._process.pid:
            return self._process.poll()
        self._process.poll()
        return None if os.path.exists(f"/proc/{self.main}") else 1

    def _start(self) -> None:
        self._is_ready = False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**self.environment, "NOTIFY_SOCKET": self._address},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self.main = self._process.pid
        self.ended = None
        self.starts += 1

    def _take_messages(self) -> None:
        while True:
            size = socket.CMSG_SPACE(8 * 4) + socket.CMSG_SPACE(_UCRED.size)
            try:
                message, ancillary, _, _ = self._socket.recvmsg(65536, size, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            descriptors = array.array("i")
            sender = 0
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(content)
                elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    sender = _UCRED.unpack(content[: _UCRED.size])[0]
            lines = [line.partition("=") for line in message.decode().split("\n")]
            said = {name: value for name, _, value in lines}
            if sender == self.main:
                self._take(said)
            else:
                self.ignored.add(sender)
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, said: dict[str, str]) -> None:
        if "MAINPID" in said:
            self.main = int(said["MAINPID"])
        if said.get("READY") == "1":
            self._is_ready = True
        self.fed += said.get("WATCHDOG") == "1"


class Unit:
    """An instance of a unit of this project, with the variables that systemd would set."""

    def __init__(self, unit: Path, place: Path, vfsd: Sequence[str], options: str = "") -> None:
        self.name = place.name
        self.mountpoint = place / "m"
        self.state = place / "state"
        self.place = place
        self._text = unit.read_text().replace("\\\n", " ")
        program = place / "vfsd"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(vfsd)} "$@"\n')
        program.chmod(0o755)
        for directory in (self.mountpoint, self.state):
            directory.mkdir()
        self.variables = {
            **os.environ,
            "VFSD": str(program),
            "VFSD_MOUNTPOINT": str(self.mountpoint),
            "VFSD_OPTIONS": options,
            "XDG_STATE_HOME": str(self.state),
        }

    def setting(self, name: str) -> str:
        """The last value of a setting; %i is the instance's name."""
        values = [line.partition("=")[2] for line in self._text.splitlines() if line.startswith(f"{name}=")]
        return values[-1].replace("%i", self.name)

    def command(self, setting: str) -> list[str]:
        """The words of Exec...=, as systemd.service(5) makes them: "$$" is "$"."""
        return [word.replace("$$", "$") for word in shlex.split(self.setting(setting))]

    @contextlib.contextmanager
    def managed(self) -> Iterator[ServiceManager]:
        """Run under a manager."""
        with ServiceManager(self.command("ExecStart"), self.variables, self.place) as manager:
            yield manager
