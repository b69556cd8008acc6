"""The helper's main program: reads requests from standard input and writes one reply each to standard output.

Threading: one thread, the leader, reads a request, serves it, replies and reads the next.  If an operation blocks (a
slow disk, a network file system), another thread becomes the leader: at once for operations that are known to be slow
(`wire.SLOW`), else when `_watch` has seen the leader busy with the same request for _PATIENCE_S.  The former leader
replies when its operation is done, and ends.  So fast requests cost no thread switch, and do not wait for slow ones.

The program ends when its standard input ends.
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
    Operation,
    WireError,
    pack,
    unpack,
)

_PATIENCE_S = 0.005
_IDLE_ROUNDS = 200  # rounds without a request before `_watch` sleeps
_MOST_THREADS = 64
_READ_BYTES = 256 * 1024
_REASONS = {
    errno.EROFS: "does not exist, and the root there is read-only; name a volume's place with --workdir",
    errno.EEXIST: "is not a directory there, or is a dangling symlink",
    errno.ENOTDIR: "is not a directory there",
}


class Server:
    """Serves the requests from `source` and replies on `target`."""

    def __init__(self, files: Files, source: int, target: int) -> None:
        self._operations: "dict[int, Operation]" = {
            **files.operations,
            **Trees(files).operations,
        }
        self._source = source
        self._target = target
        self._buffer = bytearray()
        # One buffer for all reads: allocating this much each time would map and unmap memory each time.
        self._read = memoryview(bytearray(_READ_BYTES))
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._awake = threading.Event()
        self._term = 0  # the leader has this number; threads with others end after their reply
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
        """Start a thread that leads from now on, unless the process limit is reached (by a fork bomb, say)."""
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
            # A request that arrived in between has set it again.
            self._awake.wait()

    def _lead(self, term: int) -> None:
        with self._lock:
            pass  # `_elect` is called with the lock held: wait until it has recorded the new term
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
        except BaseException:  # noqa: BLE001 (without a leader no request would be answered)
            traceback.print_exc()
            os._exit(3)

    def _serve(self, number: int, op: int, body: bytes) -> bytes:
        operation = self._operations.get(op)
        if operation is None:
            return pack(number, errno.ENOSYS)
        try:
            given, names = unpack(body)
            numbers, strings = operation(*given, *names)
            return b"" if op == Op.FORGET else pack(number, 0, numbers, strings)
        except OSError as error:
            return pack(number, error.errno or errno.EIO)
        except WireError:
            return pack(number, errno.EBADMSG)
        except (TypeError, ValueError, OverflowError):  # not the numbers and strings that the operation takes
            return pack(number, errno.EINVAL)
        except Exception:  # noqa: BLE001 (the failure of one request)
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
                    os._exit(0)  # the other end is closed


def make_directories(path: bytes) -> None:
    """Create the missing directories of a path, owned by the container's own user."""
    if os.path.isdir(path):
        return
    make_directories(os.path.dirname(path))
    os.mkdir(path, 0o755)
    if os.geteuid() == 0:
        os.chown(path, *first_process())


def main(arguments: "list[str]") -> None:
    """Serve the directory `arguments[0]`, which is created if it is missing."""
    root = os.fsencode(arguments[0])
    try:
        make_directories(root)
        files = Files(root)
    except OSError as error:
        sys.stderr.write(
            "the working directory %s\n"
            % _REASONS.get(error.errno or 0, "cannot be used: %s; name another with --workdir" % error.strerror)
        )
        sys.exit(2)
    # Printed text must not mix with frames.
    target = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(target, False)
    Server(files, 0, target).run()
