"""A stand-in for systemd, which runs on no machine of the tests: it runs one unit with Type=notify.

It follows sd_notify(3), sd_listen_fds(3) and the file descriptor store of systemd.service(5): messages of the main
process only (NotifyAccess=main); FDSTORE, FDNAME, FDSTOREREMOVE, BARRIER, READY, MAINPID; a stored descriptor is
dropped when a poll of it reports an error, and all of them when the unit ends for good.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
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
_ABOVE_PASSED: Final = 60  # `passed_descriptors` moves them to 3 and the following numbers
_PASSING: Final = "tests.support.passed_descriptors"
_POLL_S: Final = 0.02


class ServiceManager:
    """Runs `command`, and restarts it as Restart=on-failure does, unless `is_paused`, and at most `most_starts` times.

    `store_size`: FileDescriptorStoreMax=.  `log`: what the unit writes to standard error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], place: Path, store_size: int) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.store: list[tuple[str, int]] = []
        self.removed: set[str] = set()  # what the unit itself has removed from the store
        self.ignored: set[int] = set()  # other processes than the main one that sent messages
        self.main = 0
        self.starts = 0
        self.is_paused = False
        self.most_starts = sys.maxsize
        self.log = place / "unit.log"
        self._store_size = store_size
        self._is_ready = False
        self._is_over = False
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

    def wait_ready(self, starts: int = 1) -> None:
        """Return when the unit was started so often, and the last start is ready."""
        try:
            wait_until(lambda: self._is_over or (self.starts >= starts and self._is_ready), "a ready start", 60)
        except AssertionError as error:
            raise AssertionError(self.log.read_text()) from error
        assert not self._is_over, self.log.read_text()

    def kill(self) -> None:
        """Kill the main process; return when another one is ready."""
        starts = self.starts
        os.kill(self.main, signal.SIGKILL)
        self.wait_ready(starts + 1)

    def wait_over(self) -> None:
        """Return when the unit has ended for good."""
        wait_until(lambda: self._is_over, "the end of the unit")
        self._thread.join()

    def stop(self) -> None:
        """Do as `systemctl stop`."""
        self.is_paused = False
        self.most_starts = sys.maxsize
        if not self._is_over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.main, signal.SIGTERM)
        self.wait_over()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.store]

    # -- the manager -------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._start()
            while True:
                select.select([self._socket], [], [], _POLL_S)
                self._take_messages()
                self._drop_failed()
                status = self._ended()
                if status in _CLEAN:
                    return
                if status is not None and not self.is_paused and self.starts < self.most_starts:
                    self._start()
        finally:
            self._is_over = True
            for _, descriptor in self.store:
                os.close(descriptor)
            self.store.clear()

    def _ended(self) -> int | None:
        """The exit status of the main process, negative for a signal; 1 if it is not a child of this process."""
        assert self._process is not None
        if self.main == self._process.pid:
            return self._process.poll()
        self._process.poll()
        return None if os.path.exists(f"/proc/{self.main}") else 1

    def _start(self) -> None:
        passed = [descriptor for _, descriptor in self.store]
        variables = {"NOTIFY_SOCKET": self._address}
        if passed:
            variables |= {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join(self.names)}
        numbers = ",".join(map(str, passed)) or "-"
        self._is_ready = False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PASSING, numbers, *self.command],
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stderr=log,
                pass_fds=passed,
            )
        self.main = self._process.pid
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
                self._take(said, descriptors.tolist())
            else:
                self.ignored.add(sender)
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, said: dict[str, str], descriptors: list[int]) -> None:
        if "MAINPID" in said:
            self.main = int(said["MAINPID"])
        if said.get("READY") == "1":
            self._is_ready = True
        name = said.get("FDNAME", "stored")
        if said.get("FDSTORE") == "1":
            for descriptor in descriptors:
                if len(self.store) < self._store_size:
                    self.store.append((name, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_PASSED)))
        elif said.get("FDSTOREREMOVE") == "1":
            self.removed.add(name)
            self._drop([stored for stored in self.store if stored[0] == name])

    def _drop_failed(self) -> None:
        poll = select.poll()
        for _, descriptor in self.store:
            poll.register(descriptor, 0)
        failed = {descriptor for descriptor, _ in poll.poll(0)}
        self._drop([stored for stored in self.store if stored[1] in failed])

    def _drop(self, some: list[tuple[str, int]]) -> None:
        self.store = [stored for stored in self.store if stored not in some]
        for _, descriptor in some:
            os.close(descriptor)


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
    def managed(self, store_size: int | None = None) -> Iterator[ServiceManager]:
        """Run under a manager; `store_size` other than that of the unit."""
        size = int(self.setting("FileDescriptorStoreMax")) if store_size is None else store_size
        with ServiceManager(self.command("ExecStart"), self.variables, self.place, size) as manager:
            yield manager
