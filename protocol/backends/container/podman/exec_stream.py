"""ExecStream: a two-way stream to a process in a container, by the exec endpoint of Podman's service.

podman-py has no such stream (it ignores `exec_run(socket=True)`, and `stdin=True` hangs).  There are two
ways: the endpoint's HTTP upgrade, which this module speaks, and `podman exec -i`.  Measured against Podman 4.3 on one
machine: started in 20 ms (`podman exec -i`: 50 ms), 20 µs a round trip (15 µs; 40 µs with `--url`), 450 MB/s (450; 250
with `--url`).  Also, the endpoint needs no client program and no process for each stream, and it has fields for the
exit status, the pid and the terminal's size.

Without a terminal, standard output and standard error arrive in frames with a header of 8 bytes: one byte for the
stream, three zero bytes, four for the length (docs.docker.com, "Attach to a container": stream format).

An exec outlives its connection: the process gets EOF on its standard input and continues.  So `aclose` kills it: by its
pid if the service is on this machine and the process may be signalled, else by a `kill` in the container.

`PodmanConnection` is an HTTP/1.1 connection to a Podman service that may become a plain two-way stream (Upgrade).  h11
implements HTTP/1.1 without I/O, so data that was read beyond the head of the upgraded reply stays available.

`release_monitor` lets Podman's monitor of an ended command clean up now instead of in five minutes.  conmon waits that
long before it removes Podman's record of the command (containers.conf(5), exit_command_delay), so
that clients can still ask for the exit status: two processes for each command, hundreds while an agent works.  SIGTERM
only ends the wait: the command has ended, and conmon then runs the same clean-up (conmon, src/ctr_exit.c).

It works for monitors on this machine that this process may signal; the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import h11
import trio

from protocol.backends.container.agent.link import STDERR, STDOUT, Output
from protocol.backends.container.podman.service import PodmanService

_FRAME: Final = struct.Struct(">BxxxI")
_RECEIVE_BYTES: Final = 64 * 1024
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.5
_KILL_S: Final = 10.0
_CONNECT_S: Final = 30.0


class ExecStream:
    """A process in a container.  One task may receive while another sends.  See `open_exec`."""

    def __init__(
        self,
        service: PodmanService,
        exec_id: str,
        stream: trio.SocketStream,
        plain: socket.socket,
        early: bytes,
        *,
        tty: bool,
    ) -> None:
        self.id: Final = exec_id
        self._plain = plain
        self._service = service
        self._stream = stream
        self._pending = bytearray(early)
        self._tty = tty
        self._channel: Literal[1, 2] = STDOUT
        self._left = 0  # bytes of the current frame that have not arrived
        self._is_over = False
        self._status: int | None = None

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data` to standard input.  BrokenPipeError."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise BrokenPipeError(errno.EPIPE, "the process in the container no longer reads its input") from None

    def send_nowait(self, data: bytes) -> int:
        """Write what fits without waiting, while no `send` is under way; return the number of bytes."""
        try:
            return self._plain.send(data)
        except OSError:  # full or closed: `send` waits or reports it
            return 0

    async def close_stdin(self) -> None:
        """End standard input.  (A terminal's input has no end: send Ctrl-D.)"""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_eof()

    async def receive(self, max_bytes: int = _RECEIVE_BYTES) -> Output | None:
        """The next piece of output, at most `max_bytes`; None at the end.  OSError for an invalid stream."""
        if not self._tty:
            while not self._left:
                while len(self._pending) < _FRAME.size:
                    if not await self._fill(max_bytes):
                        return None
                channel, self._left = _FRAME.unpack_from(self._pending)
                if channel not in {STDOUT, STDERR}:
                    raise OSError(errno.EPROTO, f"the Podman service sent output of an unknown stream {channel}")
                self._channel = channel
                del self._pending[: _FRAME.size]
        if not self._pending and not await self._fill(max_bytes):
            return None
        data = bytes(self._pending[: max_bytes if self._tty else min(max_bytes, self._left)])
        del self._pending[: len(data)]
        self._left = max(0, self._left - len(data))
        return Output(self._channel, data)

    async def _fill(self, max_bytes: int) -> bool:
        if self._is_over:
            return False
        try:
            data = await self._stream.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self._pending += data
        self._is_over = not data
        return not self._is_over

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the process's terminal."""
        size = urlencode({"h": rows, "w": columns})
        await _ask(self._service, "POST", f"/exec/{self.id}/resize?{size}", {})

    async def wait(self) -> int:
        """Wait for the exit status (128 + N: killed by signal N; 126, 127: it could not be started).

        The caller must read the output meanwhile, or the process may block.  OSError if the status is unknown.
        """
        pause_s = _FIRST_PAUSE_S
        while self._status is None:
            shown = await self._inspect()
            if not shown.get("Running"):
                self._status = int(shown.get("ExitCode", -1))
                break
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._status

    async def _inspect(self) -> dict[str, Any]:
        shown = await _ask(self._service, "GET", f"/exec/{self.id}/json")
        if not isinstance(shown, dict):
            raise OSError(errno.EPROTO, "the Podman service does not describe the process")
        return shown

    async def kill(self) -> None:
        """Kill the process if it is running, but not its children.  OSError."""
        shown = await self._inspect()
        if shown.get("Running") and not await self._kill_from_outside(shown):
            await self._kill_from_inside(str(shown["ContainerID"]), int(shown["Pid"]))

    async def _kill_from_outside(self, shown: Mapping[str, Any]) -> bool:
        """Kill the process by its pid; False if it is not on this machine or may not be signalled."""
        if not self._service.is_local:
            return False
        pid, container = int(shown["Pid"]), str(shown["ContainerID"])
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            # The pid may belong to another machine, behind a forwarded socket, or may have been reused.
            with open(f"/proc/{pid}/cgroup", "rb") as file:
                if container.encode() not in file.read():
                    return False
            if (await self._inspect()).get("Pid") == pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    async def _kill_from_inside(self, container: str, host_pid: int) -> None:
        query = urlencode({"stream": "false", "ps_args": "hpid,pid"})
        shown = await _ask(self._service, "GET", f"/containers/{quote(container, safe='')}/top?{query}")
        inside = {row[0]: row[1] for row in shown.get("Processes") or ()}.get(str(host_pid))
        if inside is None:
            return
        for argv in (["kill", "-KILL", inside], ["sh", "-c", f"kill -KILL {int(inside)}"]):
            if await exec_status(self._service, container, argv, user="0") == 0:
                return
        raise OSError(errno.ESRCH, "a process in the container cannot be killed: the image has neither kill nor sh")

    async def disconnect(self) -> None:
        """Close the connection; a running process continues, with its standard input ended."""
        self._is_over = True
        if self._service.is_local:
            # In a thread that nothing waits for; it may outlive the loop.
            trio.lowlevel.start_thread_soon(lambda: release_monitor(self.id), lambda _: None)
        await trio.aclose_forcefully(self._stream)

    async def detach(self) -> None:
        """Close the connection to a process that goes on for another daemon."""
        self._is_over = True
        await trio.aclose_forcefully(self._stream)

    async def abandon(self) -> None:
        """As `detach`: the process may wait for another stream."""
        await self.detach()

    async def aclose(self) -> None:
        """Kill the process and close the connection, within _KILL_S even if cancelled.  Raises no OSError."""
        with trio.CancelScope(shield=True), trio.move_on_after(_KILL_S):
            with contextlib.suppress(OSError):
                if self._status is None:
                    await self.kill()
            await self.disconnect()
        await trio.lowlevel.checkpoint()  # raises Cancelled if the caller was cancelled


async def open_exec(
    service: PodmanService,
    container: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    tty: bool = False,
    user: str | None = None,
    stdin: bool = True,
    size: tuple[int, int] | None = None,
) -> ExecStream:
    """Start `argv` in the running `container` (name or id) of the service.

    `env` is added to the container's; `cwd` and `user` ("uid:gid", or a name) default to its own; `size` (rows,
    columns) is the terminal's.  FileNotFoundError: no such container; OSError with ENOTCONN: it is not running;
    other OSErrors: the service cannot be reached.  A missing program shows as exit status 127.
    """
    request: dict[str, Any] = {
        "AttachStdin": stdin,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": tty,
        "Cmd": list(argv),
        "Env": [f"{name}={value}" for name, value in (env or {}).items()],
        "WorkingDir": cwd or "",
        "User": user or "",
    }
    begin: dict[str, Any] = {"Detach": False, "Tty": tty}
    if size is not None:
        begin |= {"h": size[0], "w": size[1]}
    try:
        with trio.fail_after(_CONNECT_S):
            connection = await connect(service)
            try:
                made = await connection.request("POST", f"/containers/{quote(container, safe='')}/exec", request)
                exec_id = str(made["Id"])
                stream, early = await connection.upgrade(f"/exec/{exec_id}/start", begin)
            except BaseException:
                await connection.aclose()
                raise
    except trio.TooSlowError:
        raise TimeoutError(errno.ETIMEDOUT, "the Podman service does not answer") from None
    except (KeyError, TypeError):
        raise OSError(errno.EPROTO, "the Podman service does not identify the process that it started") from None
    return ExecStream(service, exec_id, stream, connection.plain, early, tty=tty)


async def exec_status(service: PodmanService, container: str, argv: Sequence[str], *, user: str | None = None) -> int:
    """Run `argv` at the root of a container without input, discard its output, and return its exit status.

    Errors as for `open_exec`.  If this is cancelled, the command continues.
    """
    stream = await open_exec(service, container, argv, user=user, cwd="/", stdin=False)
    try:
        while await stream.receive():
            pass
        return await stream.wait()
    finally:
        await stream.disconnect()


async def _ask(service: PodmanService, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request on a new connection: the process's own connection is a plain stream."""
    connection: PodmanConnection | None = None
    try:
        with trio.fail_after(_CONNECT_S):
            connection = await connect(service)
            return await connection.request(method, path, body)
    except trio.TooSlowError:
        raise TimeoutError(errno.ETIMEDOUT, "the Podman service does not answer") from None
    finally:
        if connection is not None:
            with trio.CancelScope(shield=True):
                await connection.aclose()


API: Final = "/v4.0.0/libpod"  # supported by every Podman since 4.0
_MOST_REPLY_BYTES: Final = 4 * 1024 * 1024
_ERRNO_OF: Final = {400: errno.EINVAL, 404: errno.ENOENT, 409: errno.EBUSY}
_NOT_RUNNING: Final = "container state improper"
_REMOVED: Final = "no such container"  # also with status 500, for a command whose container is removed meanwhile


class PodmanConnection:
    """Requests one after the other over `stream`, which wraps the non-blocking socket `plain`."""

    def __init__(self, stream: trio.SocketStream, plain: socket.socket) -> None:
        self.plain: Final = plain
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_RECEIVE_BYTES)

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the answer, None if it is empty.

        FileNotFoundError: no such container; OSError with ENOTCONN: it is not running; other OSErrors.
        """
        await self._send(method, path, body, ())
        status, data = await self._reply()
        if status >= 400:
            raise _refusal(status, data)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise OSError(errno.EPROTO, f"the Podman service does not answer with JSON: {error}") from None

    async def upgrade(self, path: str, body: Mapping[str, Any]) -> tuple[trio.SocketStream, bytes]:
        """Upgrade to a plain stream; return it with the data already read from it.  OSErrors as for `request`."""
        await self._send("POST", path, body, ((b"Connection", b"Upgrade"), (b"Upgrade", b"tcp")))
        event = await self._event()
        while isinstance(event, h11.InformationalResponse) and event.status_code != 101:
            event = await self._event()
        if isinstance(event, h11.Response) and event.status_code >= 400:
            raise _refusal(event.status_code, await self._body())
        if not isinstance(event, h11.InformationalResponse):
            raise OSError(errno.EPROTO, "the Podman service does not upgrade the connection")
        return self._stream, bytes(self._http.trailing_data[0])

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        headers = [
            (b"Host", b"d"),
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"%d" % len(data)),
            *more,
        ]
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        message = self._http.send(h11.Request(method=method, target=API + path, headers=headers)) or b""
        message += (self._http.send(h11.Data(data=data)) or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        try:
            await self._stream.send_all(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _lost() from None

    async def _reply(self) -> tuple[int, bytes]:
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        assert isinstance(event, h11.Response)
        return event.status_code, await self._body()

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > _MOST_REPLY_BYTES:
                raise OSError(errno.EMSGSIZE, "the Podman service's answer is too long")
        return bytes(body)

    async def _event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(bytes(await self._stream.receive_some(_RECEIVE_BYTES)))
        except h11.RemoteProtocolError as error:
            raise OSError(errno.EPROTO, f"the Podman service does not speak HTTP: {error}") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _lost() from None
        if isinstance(event, h11.ConnectionClosed):
            raise _lost()
        return event

    async def aclose(self) -> None:
        """Close the connection."""
        await trio.aclose_forcefully(self._stream)


def _lost() -> OSError:
    return OSError(errno.ECONNRESET, "the Podman service closed the connection")


def _refusal(status: int, data: bytes) -> OSError:
    """The error for a request that the service refused, with the text of its JSON."""
    message = data.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(data)
        message = str(answer.get("message") or answer.get("cause") or message)
    except (ValueError, AttributeError):
        pass
    code = _ERRNO_OF.get(status, errno.EIO)
    if _NOT_RUNNING in message:
        code = errno.ENOTCONN
    elif _REMOVED in message:
        code = errno.ENOENT
    return OSError(code, message[:1000] or f"HTTP status {status}")


async def connect(service: PodmanService) -> PodmanConnection:
    """Connect to `service`.  OSError that says what to do."""
    # Held by the first of two: the thread that made the socket, and the caller if it was cancelled.
    wanted = threading.Lock()
    made: list[socket.socket] = []

    def make() -> None:
        plain = service.connect()
        made.append(plain)
        if not wanted.acquire(blocking=False):
            plain.close()

    try:
        # In a thread: an ssh tunnel may have to be started first.
        await trio.to_thread.run_sync(make, abandon_on_cancel=True)
    except trio.Cancelled:
        if not wanted.acquire(blocking=False):
            made[0].close()
        raise
    (plain,) = made
    plain.setblocking(False)
    return PodmanConnection(trio.SocketStream(trio.socket.from_stdlib_socket(plain)), plain)


_PROGRAM: Final = b"conmon"
# conmon reports the command's end before it begins to wait; the gap can be seconds. The pauses between the tries double
# up to the longest one. All tries together take a minute, because a busy machine may need it.
_TRIES: Final = 67
_MONITOR_PAUSE_S: Final = 0.01
_MONITOR_LONGEST_PAUSE_S: Final = 1.0


def release_monitor(exec_id: str) -> None:
    """End the wait for the ended command `exec_id`, whose exit status nobody will read (again); else a no-op."""
    pause_s = _MONITOR_PAUSE_S
    for _ in range(_TRIES):
        monitors = _monitors(exec_id.encode())
        if not monitors:
            return
        for pid, (parent, state) in monitors.items():
            # There are two; the waiting one is the child of the other, and a signal before it sleeps has no effect.
            if parent in monitors and state == b"S":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MONITOR_LONGEST_PAUSE_S)


def _monitors(exec_id: bytes) -> dict[int, tuple[int, bytes]]:
    """The monitors of the command, with their parents and states (proc_pid_stat(5))."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if os.path.basename(words[0]) == _PROGRAM and exec_id in words:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent, *_ = file.read().rpartition(b")")[2].split()
                found[int(name)] = int(parent), state
    return found
