"""Begin a call over the control socket with few imports, and pass it on if it is not answered soon.

`ControlClient` continues a `BegunCall`: it reads the rest of the answer, and reports errors.  It does not send the
request again.  SIGINT and SIGTERM are blocked from the connection until then, because the full client handles them.
`ask` makes a whole call, for programs that do not have the full client.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_WAIT_S: Final = 0.25  # for the answer; longer calls are continued by the full client, with progress and Ctrl-C
_PATH_BYTES_MAX: Final = 107  # linux/un.h UNIX_PATH_MAX, without the closing NUL
_RECEIVE_BYTES: Final = 64 * 1024
_RECEIVED_BYTES_MAX: Final = 512 * 1024
_ATTEMPTS: Final = 3
_AGENT_WAITS_S: Final = 0.8  # for a hook, which takes a second with the start of its interpreter
_SHORTEST_WAIT_S: Final = 0.001  # a timeout of 0 would make the socket non-blocking
ANSWER_S: Final = 3.0  # how long a client waits for the outcome of a call that it cancelled
REQUEST_ID: Final = 1  # the first of a `ControlClient`
_PREFIX: Final = b'{"id":1,"jsonrpc":"2.0","result":'  # how vfsd's daemon begins the answer to it


class BegunCall:
    """A request that was sent, and what was received since."""

    def __init__(self, socket_path: str, sock: socket.socket, request: bytes) -> None:
        self.socket_path = socket_path
        self.sock = sock
        self.request = request
        self.received = b""
        self._mask: set[int] | None = None

    def block_signals(self) -> None:
        """Block SIGINT and SIGTERM until `release_signals`."""
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))

    def release_signals(self) -> None:
        """Restore the signal mask; pending signals are then delivered."""
        if self._mask is not None:
            mask, self._mask = self._mask, None
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """Close the connection and restore the signal mask."""
        self.sock.close()
        self.release_signals()

    def receive(self) -> bytes | None:
        """Return the result as JSON; None if it did not arrive in time, or if the answer is not a result."""
        while True:
            start = self.received.rfind(b"\n", 0, -1) + 1
            if self.received.endswith(b"\n") and self.received.startswith(_PREFIX, start):
                return None if _is_signal_pending() else self.received[start + len(_PREFIX) : -2]
            if len(self.received) > _RECEIVED_BYTES_MAX:
                return None
            try:
                data = self.sock.recv(_RECEIVE_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self.received += data

    def output(self) -> bytes | None:
        """Return what the "output" notifications contained; None if there are others than these and "progress"."""
        from binascii import a2b_base64  # noqa: PLC0415 start-up: only `diff` needs it

        pieces = []
        for line in self.received.splitlines()[:-1]:
            message = json.loads(line)
            if message.get("method") == "progress":
                continue
            if message.get("method") != "output":
                return None
            pieces.append(a2b_base64(message["params"]["data"]))
        return b"".join(pieces)


def _is_signal_pending() -> bool:
    return any(number in signal.sigpending() for number in _SIGNALS)


def _encoded(method: str, params: dict[str, Any]) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params, "id": REQUEST_ID}
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def begin(socket_path: str, method: str, params: dict[str, Any]) -> BegunCall | None:
    """Send a request.  None if nothing was sent."""
    request = _encoded(method, params)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_WAIT_S)
    call = BegunCall(socket_path, sock, request)
    call.block_signals()
    try:
        _connect(sock, socket_path)
    except OSError:
        call.close()
        return None
    try:
        sock.sendall(request)
    except OSError:
        pass  # the full client reads why, or reports that the connection ended
    return call


# -- hooks --------------------------------------------------------------------------------------------
def run_for_agent(work: Callable[[], object]) -> int:
    """Run `work` in a forked process for at most a second; return its exit status, or 1.

    An agent waits for its hooks, and for the end of what they write to.  So after a second this process says that it
    leaves, and the forked process goes on alone: a snapshot of a large host directory takes longer.
    """
    out, err = (os.memfd_create("vfsd-hook") for _ in range(2))
    pid = os.fork()
    if pid == 0:
        os.setsid()  # the end of the agent's process group does not end a snapshot
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os._exit(_status_of(work))
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], _AGENT_WAITS_S)[0]:
        os.write(2, b"vfsd: the daemon has not answered for a second: the state is kept later, or not at all\n")
        return 1
    _, status = os.waitpid(pid, 0)
    for source, target in ((out, 1), (err, 2)):
        os.write(target, os.pread(source, _RECEIVE_BYTES, 0))
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1


def _status_of(work: Callable[[], object]) -> int:
    status: object = 0
    try:
        work()
    except SystemExit as end:
        status = end.code
    except BaseException as error:  # noqa: BLE001 the process must not return into its copy of the caller
        sys.stderr.write(f"vfsd: {type(error).__name__}: {error}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status if isinstance(status, int) else int(status is not None)


# -- the whole call -------------------------------------------------------------------------------
def ask(socket_path: str, method: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Make a call, wait for its answer, and return the result.

    Takes at most `timeout_s` in total, after which the daemon cancels the call.  TimeoutError; ConnectionError if the
    daemon is gone; OSError with the daemon's message, and with its errno if it names one.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(_ATTEMPTS):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(_SHORTEST_WAIT_S, deadline - time.monotonic()))
            _connect(sock, socket_path)
            sock.sendall(_encoded(method, params))
            received = b""
            while data := _received(sock, deadline):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message.get("id") == REQUEST_ID and "method" not in message:
                        return _result(message)
        # The daemon closed an idle connection to accept this one, and did not run the call.
    raise ConnectionError(errno.ECONNRESET, "the daemon closed the connection")


def _connect(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        sock.connect(path)
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def _received(sock: socket.socket, deadline: float) -> bytes:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "the daemon does not answer")
    sock.settimeout(left_s)
    return sock.recv(_RECEIVE_BYTES)


def _result(message: dict[str, Any]) -> dict[str, Any]:
    error = message.get("error")
    if error is None:
        result: dict[str, Any] = message["result"]
        return result
    code = getattr(errno, str((error.get("data") or {}).get("errno")), errno.EIO)
    raise OSError(code, str(error.get("message")))
