"""The helper's main program: takes requests from standard input, one reply each to standard output.

Threads: one leads.  It reads a request, serves it, replies, reads the next.  Should an operation wait (a slow disk, a
file system over a network), somebody else leads on: at once where that is to be expected (`wire.SLOW`), else
when `watch` has seen it busy with the same request for _PATIENCE_S.  Who led before replies when he is done, and ends.
So requests that take no time cost no change of threads, and none waits for those that take long.

It ends with its standard input.
"""

import errno
import os
import sys
import threading
import time
import traceback

from protocol.backends.container.helper.files import Files, first_process
from protocol.backends.container.helper.trees import Trees
from protocol.backends.container.helper.wire import (
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    SLOW,
    Op,
    Reply,
    WireError,
    pack,
    unpack,
)

_PATIENCE_S = 0.005
_IDLE_ROUNDS = 200  # for so long it is watched without anything to do
_MOST_THREADS = 64
_READ_BYTES = 256 * 1024
_REASONS = {
    errno.EROFS: "does not exist in the container, whose root is read-only; name a volume's place with --workdir",
    errno.EEXIST: "is no directory in the container, or a symlink that leads nowhere",
    errno.ENOTDIR: "is no directory in the container",
}


class Server:
    """Serves the requests that come on `source`, replying on `target`."""

    def __init__(self, files: Files, source: int, target: int) -> None:
        self._operations = {**files.operations, **Trees(files).operations, Op.PING: _pong}
        self._source = source
        self._target = target
        self._buffer = bytearray()
        # Read into, and kept: so much memory asked for each time would be mapped and unmapped each time.
        self._read = memoryview(bytearray(_READ_BYTES))
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._awake = threading.Event()
        self._term = 0  # who leads says this number; others are on their way out
        self._served = 0
        self._busy = False
        self._threads = 0

    def run(self) -> None:
        """Serve until the process ends."""
        self._write(MAGIC)
        with self._lock:
            self._elect()
            if not self._term:
                os._exit(5)
        self._watch()

    def _elect(self) -> None:
        """Another thread leads from now on; unless there may be no more (a fork bomb, say)."""
        try:
            threading.Thread(target=self._lead, args=(self._term + 1,), daemon=True).start()
        except RuntimeError:
            return
        self._term += 1
        self._threads += 1
        self._busy = False

    def _watch(self) -> None:
        last, idle = -1, 0
        while True:
            time.sleep(_PATIENCE_S)
            with self._lock:
                if self._busy and self._served == last and self._threads < _MOST_THREADS:
                    self._elect()
                idle = idle + 1 if self._served == last else 0
                last = self._served
                if idle <= _IDLE_ROUNDS or self._busy:
                    continue
                self._awake.clear()
            # A request that came in between has set it again.
            self._awake.wait()

    def _lead(self, term: int) -> None:
        with self._lock:
            pass  # who elected this thread holds it until that is entered
        try:
            while True:
                number, op, body = self._request()
                with self._lock:
                    self._served += 1
                    self._busy = True
                    if op in SLOW and self._threads < _MOST_THREADS:
                        self._elect()
                if not self._awake.is_set():
                    self._awake.set()
                reply = self._serve(number, op, body)
                if reply:
                    self._write(reply)
                with self._lock:
                    if self._term != term:
                        self._threads -= 1
                        return
                    self._busy = False
        except BaseException:  # noqa: BLE001 (without a leader nobody would be answered)
            traceback.print_exc()
            os._exit(3)

    def _serve(self, number: int, op: int, body: bytes) -> bytes:
        operation = self._operations.get(op)
        if operation is None:
            return pack(number, errno.ENOSYS)
        try:
            numbers, strings = operation(*unpack(body))
            return b"" if op == Op.FORGET else pack(number, 0, numbers, strings)
        except OSError as error:
            return pack(number, error.errno or errno.EIO)
        except WireError:
            return pack(number, errno.EBADMSG)
        except (ValueError, OverflowError):  # not the numbers and strings that the operation takes
            return pack(number, errno.EINVAL)
        except Exception:  # noqa: BLE001 (it is the request's own failure)
            traceback.print_exc()
            return pack(number, errno.EIO)

    def _request(self) -> "tuple[int, int, bytes]":
        self._fill(HEADER.size)
        length, number, op = HEADER.unpack_from(self._buffer)
        if length > MAX_BODY_BYTES:
            os._exit(4)
        end = HEADER.size + length
        self._fill(end)
        body = bytes(memoryview(self._buffer)[HEADER.size : end])
        del self._buffer[:end]
        return number, op, body

    def _fill(self, length: int) -> None:
        while len(self._buffer) < length:
            count = os.readv(self._source, [self._read])
            if not count:
                os._exit(0)
            self._buffer += self._read[:count]

    def _write(self, data: bytes) -> None:
        with self._writing:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._target, view) :]
                except OSError:
                    os._exit(0)  # nobody reads


def _pong(numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
    return (), ()


def make_directories(path: bytes) -> None:
    """Make what is missing of a path; it belongs to the container's own user."""
    if os.path.isdir(path):
        return
    make_directories(os.path.dirname(path))
    os.mkdir(path, 0o755)
    if os.geteuid() == 0:
        os.chown(path, *first_process())


def main(arguments: "list[str]") -> None:
    """`arguments`: the directory to serve, made where it is missing."""
    root = os.fsencode(arguments[0])
    try:
        make_directories(root)
        files = Files(root)
    except OSError as error:
        sys.stderr.write("the working directory %s\n" % _REASONS.get(error.errno or 0, error.strerror))
        sys.exit(2)
    # What is printed must not come between frames.
    target = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(target, False)
    Server(files, 0, target).run()
