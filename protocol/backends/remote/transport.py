"""RemoteTransport: a directory at the other end of a command, through a helper that runs there.

The Python that the command gives runs each line of its input when it arrives (`command`).  The first line makes it
print a marker and wait for the helper's program.  What the other end prints before the marker, such as a greeting, is
ignored.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.backends.container.agent.helper_transport import HelperTransport
from protocol.backends.container.agent.link import TIMEOUT_S, AgentLink
from protocol.backends.container.agent.start import helper_program
from protocol.backends.container.agent.stream import STDOUT
from protocol.backends.remote.command import RemoteCommand
from protocol.backends.remote.command_stream import CommandStream, running_command
from protocol.errors import only_error

_START_S: Final = 30.0
_LAST_WORDS_S: Final = 1.0
_GREETING_BYTES: Final = 256 * 1024
_NO_PROGRAM: Final = "; name a Python 3 that is installed there"
# By exit status: of programs for wrong usage; of a shell, and of `docker exec`, for a program that cannot be run.
_ADVICE: Final = {
    2: "; is it Python 3.6 or newer, and does it get the options that vfsd adds at the end?",
    126: _NO_PROGRAM,
    127: _NO_PROGRAM,
}
# Runs in the interactive Python, whose exceptions do not end it.  The marker is reversed, so that an echo of this line
# is not taken for it.
_LOADER: Final = """\
import os, sys
sys.ps1 = sys.ps2 = ""
def refuse(reason):
    sys.stderr.write(reason + "\\n")
    sys.stderr.flush()
    os._exit(9)
if sys.version_info < (3, 6):
    refuse("Python %d.%d is too old: vfsd needs 3.6 or newer there" % sys.version_info[:2])
if os.isatty(0):
    refuse("its standard input is a terminal, which changes what passes: leave out -t")
os.write(1, {reversed_marker!r}[::-1].encode())
data = b""
while len(data) < {length}:
    more = os.read(0, {length} - len(data))
    if not more:
        os._exit(1)
    data += more
try:
    exec(data)
except SystemExit as end:
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)
except BaseException:
    import traceback
    traceback.print_exc()
    os._exit(1)
"""


class RemoteTransport(HelperTransport[RemoteCommand]):
    """Implements `protocol.backends.container.transports.transport.Transport`.  `directory`: absolute, there."""

    def __init__(
        self, directory: str, *, read_only: bool = False, timeout_s: float = TIMEOUT_S, start_s: float = _START_S
    ) -> None:
        super().__init__(helper_program(directory), read_only=read_only)
        self._timeout_s = timeout_s
        self._start_s = start_s

    @asynccontextmanager
    async def _started(self, state: RemoteCommand, program: bytes, magic: bytes) -> AsyncIterator[AgentLink]:
        try:
            async with running_command(state.argv) as stream:
                link = AgentLink(stream, timeout_s=self._timeout_s, start_s=self._start_s)
                await self._start(state, stream, link, program, magic)
                await stream.has_started()
                async with link.running():
                    yield link
        except BaseExceptionGroup as group:
            raise only_error(group) from None

    async def _start(
        self, command: RemoteCommand, stream: CommandStream, link: AgentLink, program: bytes, magic: bytes
    ) -> None:
        marker = secrets.token_hex(16)
        loader = _LOADER.format(reversed_marker=marker[::-1], length=len(program))
        printed = b""
        try:
            with trio.fail_after(self._start_s):
                await stream.send(f"exec({loader!r})\n".encode())
                while not printed.endswith(marker.encode()):
                    output = await stream.receive()
                    if output is None:
                        raise await _ended(command, stream, printed)
                    if output.channel == STDOUT:
                        printed += output.data
                    if len(printed) > _GREETING_BYTES:
                        raise OSError(errno.EPROTO, f"{command.label} prints much and starts no Python")
            await link.start(program, magic)
        except trio.TooSlowError:
            last = stream.last_line or _last_line(printed)
            said = f"; it printed: {last}" if last else ""
            advice = "it must start a Python that reads its standard input, and take options at its end"
            raise TimeoutError(
                errno.ETIMEDOUT, f"{command.label} gives no Python within {self._start_s:g} seconds{said}; {advice}"
            ) from None
        except BrokenPipeError:
            raise await _ended(command, stream, printed) from None


async def _ended(command: RemoteCommand, stream: CommandStream, printed: bytes) -> OSError:
    """Why there is no Python: what the command said last, and its exit status."""
    with trio.move_on_after(_LAST_WORDS_S):
        while (output := await stream.receive()) is not None and len(printed) <= _GREETING_BYTES:
            if output.channel == STDOUT:
                printed += output.data
    status = await stream.status()
    reason = stream.last_line or _last_line(printed) or "it printed nothing"
    ended = "has ended its output" if status is None else f"has ended with status {status}"
    return OSError(errno.EIO, f"{command.label} {ended}: {reason}{_ADVICE.get(status or 0, '')}")


def _last_line(printed: bytes) -> str:
    lines = [line.strip() for line in printed.decode("utf-8", "replace").split("\n")]
    return next((line[-200:] for line in reversed(lines) if line), "")
