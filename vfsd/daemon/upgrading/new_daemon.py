"""The process that an upgrade starts, and the one that writes the image for it, as the old daemon sees them.

Threading: the serving loop; `start` in any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
from typing import Final, TypeVar

import msgspec
import trio

from protocol.linux import credentials
from vfsd.daemon.keeper.kept import KEEPS, shared_memory
from vfsd.daemon.upgrading import messages
from vfsd.daemon.upgrading.messages import Channel, PeerEndedError, Prepared, Serving, TakeOverError
from vfsd.machine import interpreter
from vfsd.wire.messages import UpgradeParams, from_wire_path

M = TypeVar("M", bound=msgspec.Struct)
_logger = logging.getLogger(__name__)
_MODULE: Final = "vfsd.daemon.upgrading"
_SERVE_S: Final = 30.0  # from Go to Serving, before a new daemon that hangs is killed
_POLL_S: Final = 0.01


class NewDaemon:
    """The process that is to take over, and the one that writes the image for it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self.channel = channel
        self.writer: tuple[int, list[int]] | None = None
        self._keeper_memory: memoryview | None = None
        self._pidfd = -1

    @classmethod
    def start(cls, params: UpgradeParams, name: str) -> NewDaemon:
        """Start the interpreter that `params` names.  Any thread.  OSError."""
        executable = os.fsdecode(from_wire_path(params.executable))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = interpreter.environment(credentials.environment())
        environment.pop("PYTHONPATH", None)
        if params.import_paths:
            paths = [os.fsdecode(from_wire_path(path)) for path in params.import_paths]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        if environment.get("WATCHDOG_PID") == str(os.getpid()):
            del environment["WATCHDOG_PID"]  # the new daemon feeds the watchdog
        with theirs:
            try:
                process = subprocess.Popen(
                    [executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    start_new_session=True,
                    env=environment,
                )
            except OSError as error:
                ours.close()
                reason = f"{executable} cannot be started ({error.strerror}), so {name} was not upgraded"
                raise OSError(error.errno, reason) from None
        return cls(process, Channel(ours))

    async def receive(self, kind: type[M], timeout_s: float) -> M:
        """Return its next message.  TakeOverError if it fails or dies, TimeoutError."""
        return (await self._receive(kind, timeout_s))[0]

    async def _receive(self, kind: type[M], timeout_s: float) -> tuple[M, list[int]]:
        try:
            with trio.move_on_after(timeout_s):
                return await self.channel.receive(kind)
        except PeerEndedError:
            raise TakeOverError(await self._how_it_ended()) from None
        except ValueError as error:
            raise TakeOverError(f"sent something that cannot be read: {error}") from None
        raise TimeoutError(errno.ETIMEDOUT, f"did not answer within {timeout_s:g} s")

    async def prepared(self, timeout_s: float) -> int:
        """Return its process id when it could serve.  Errors as for `receive`."""
        message, descriptors = await self._receive(Prepared, timeout_s)
        self._pidfd = os.pidfd_open(message.pid)
        if descriptors:
            descriptor, self._keeper_memory = shared_memory(descriptors[0])
            os.close(descriptor)
        return message.pid

    async def is_serving(self) -> bool:
        """Wait until it serves; if it ended before, return whether its keeper restarts it.

        The next daemon needs the lock of the journal, which this one has: so nothing waits here to learn how it ended.
        """
        try:
            with trio.fail_after(_SERVE_S):
                await self.channel.receive(Serving)
        except (TakeOverError, PeerEndedError, ValueError, trio.TooSlowError) as error:
            reason = str(error) or type(error).__name__
            _logger.warning("the new daemon did not serve: %s", reason, extra={"operation": "upgrade"})
            return await self.is_restarted()
        return True

    async def is_restarted(self) -> bool:
        """Return whether its keeper restarts it; it has ended, or is killed.

        Its keeper ends with it, or says in its memory that it keeps the mount.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        while self._process.poll() is None:
            if self._keeper_memory is not None and self._keeper_memory[KEEPS]:
                return True
            await trio.sleep(_POLL_S)
        return False

    async def _how_it_ended(self) -> str:
        with trio.move_on_after(1):
            while self._process.poll() is None:
                await trio.sleep(_POLL_S)
        status = self._process.poll()
        if status is None:
            return "closed its connection"
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        return f"died before it could serve ({how}; the log of the workspace may say more)"

    async def end(self) -> None:
        """End the processes, if they run, and release what belongs to them."""
        with contextlib.suppress(PeerEndedError):
            self.channel.send(messages.Abort())
        self.channel.close()
        self._process.kill()
        # Its child ends with it, or when it finds the channel closed; it does nothing before Go.
        await trio.to_thread.run_sync(self._process.wait)
        await self._end_writer()

    async def _end_writer(self) -> None:
        if self.writer is None:
            return
        pid, pidfds = self.writer
        self.writer = None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfds[0])
        os.waitpid(pid, 0)
        for each in pidfds:
            os.close(each)
