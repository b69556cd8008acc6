"""The helper's main program: reads requests from standard input and writes one reply each to standard output.

Threading: one thread, the leader, reads a request, serves it, replies and reads the next.  If an operation blocks (a
slow disk, a network file system), another thread becomes the leader: at once for operations that are known to be slow
(`wire.SLOW`), else when `_watch` has seen the leader busy with the same request for _PATIENCE_S.  The former leader
replies when its operation is done, and ends.  So fast requests cost no thread switch, and do not wait for slow ones.

A change that is executed when its stream is replaced goes on.  A daemon that has failed its request, because the stream
was cut, waits for it (SETTLE) before it changes anything else.  A directory that its stream has locked (LOCK) stays
locked until then, and no longer.

The program ends when its standard input ends, or, if it holds, when no other stream follows in time (`sessions`).

`Answers` has the replies to requests that change something, for a daemon that repeats a request of a daemon before it.
The kernel sends a request again, with the same number, if the daemon that read it died before it replied.  The helper
may have executed it by then, or may be executing it.  So it keeps the reply until vfsd says that the kernel has it
(`wire.Op.ANSWERED`).  NFS calls this a duplicate request cache.

One request of the kernel may need several calls.  A repeated call is recognised by its operation and its content, and
answers one call of each stream.  Invariants: a call is executed once, however often it is repeated.  The replies that
vfsd has not confirmed are bounded by the requests in flight (and by _MOST_KEPT, if they never are).  Every method is
called with the server's lock held.
"""

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict

from protocol.backends.container.helper.files import Files, Trees, first_process
from protocol.backends.container.helper.sessions import Listener, Session, SessionEndError, first_session, use_stderr
from protocol.backends.container.helper.wire import (
    CHANGES,
    HEADER,
    KEY,
    MAGIC,
    MAKES,
    SILENT,
    SLOW,
    Op,
    Operation,
    Reply,
    WireError,
    pack,
    unpack,
)

_PATIENCE_S = 0.005
_IDLE_ROUNDS = 200  # rounds without a request before `_watch` sleeps
_MOST_THREADS = 64
_REASONS = {
    errno.EROFS: "does not exist, and the root there is read-only; name a volume's place with --workdir",
    errno.EEXIST: "is not a directory there, or is a dangling symlink",
    errno.ENOTDIR: "is not a directory there",
}


class Server:
    """Serves the requests of `session`, and of those that follow it."""

    def __init__(self, files: Files, session: Session) -> None:
        self._files = files
        self._operations: "dict[int, Operation]" = {
            **files.operations,
            **Trees(files).operations,
            Op.HOLD: self._hold,
            Op.ANSWERED: self._answered,
            Op.END: self._end,
            Op.SETTLE: self._settle,
        }
        self._session: "Session | None" = session
        self._listener: "Listener | None" = None
        self._hold_s = 0
        self._joined = 0  # sessions that followed the first one
        self._answers = Answers()
        self._lock = threading.Lock()
        self._changing: "dict[Session, int]" = {}  # how many changes of each stream are executed
        self._changed = threading.Condition(self._lock)
        self._locking: "Session | None" = None  # the stream that locked a directory last
        self._awake = threading.Event()
        self._term = 0  # the leader has this number; threads with others end after their reply
        self._served = 0
        self._busy = False
        self._threads = 0

    def run(self) -> None:
        """Serve until the process ends."""
        assert self._session is not None
        self._session.write(MAGIC)
        with self._lock:
            self._elect(self._session)
            if not self._term:
                os._exit(5)
        self._watch()

    def _elect(self, session: Session) -> None:
        """Start a thread that leads from now on, unless the process limit is reached (by a fork bomb, say)."""
        try:
            threading.Thread(target=self._lead, args=(self._term + 1, session), daemon=True).start()
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
                if self._busy and self._served == last and self._threads < _MOST_THREADS and self._session:
                    self._elect(self._session)
                idle = idle + 1 if self._served == last else 0
                last = self._served
                if idle <= _IDLE_ROUNDS or self._busy:
                    continue
                self._awake.clear()
            # A request that arrived in between has set it again.
            self._awake.wait()

    def _lead(self, term: int, session: Session) -> None:
        with self._lock:
            pass  # `_elect` is called with the lock held: wait until it has recorded the new term
        try:
            while True:
                try:
                    number, op, key, body = session.request()
                except SessionEndError:
                    self._ended(session)
                    return
                with self._lock:
                    if session is not self._session:
                        self._threads -= 1  # another stream has followed: this request comes again there
                        return
                    self._served += 1
                    self._busy = True
                    if op in CHANGES:
                        self._changing[session] = self._changing.get(session, 0) + 1
                        if op == Op.LOCK:
                            self._locking = session
                    if op in SLOW and self._threads < _MOST_THREADS:
                        self._elect(session)
                if not self._awake.is_set():
                    self._awake.set()
                reply = self._serve_once(session, number, op, key, body) if key else self._serve(number, op, body)
                if op in CHANGES:
                    self._end_change(session)
                if reply and session is self._session:
                    session.write(reply)
                with self._lock:
                    if self._term != term or session is not self._session:
                        self._threads -= 1
                        return
                    self._busy = False
        except BaseException:  # noqa: BLE001 (without a leader no request would be answered)
            _print_error()
            os._exit(3)

    def _serve(self, number: int, op: int, body: bytes) -> bytes:
        operation = self._operations.get(op)
        if operation is None:
            return pack(number, errno.ENOSYS)
        try:
            given, names = unpack(body)
            numbers, strings = operation(*given, *names)
            return b"" if op in SILENT else pack(number, 0, numbers, strings)
        except OSError as error:
            return pack(number, error.errno or errno.EIO)
        except WireError:
            return pack(number, errno.EBADMSG)
        except (TypeError, ValueError, OverflowError):  # not the numbers and strings that the operation takes
            return pack(number, errno.EINVAL)
        except Exception:  # noqa: BLE001 (the failure of one request)
            _print_error()
            return pack(number, errno.EIO)

    # -- requests that come again ----------------------------------------------------------------
    def _serve_once(self, session: Session, number: int, op: int, key: int, body: bytes) -> bytes:
        """As `_serve`; b"" for a call that is still being executed for an earlier stream, which replies later."""
        with self._lock:
            call = self._answers.find(session, key, op, body)
            if call is not None and not call.reply:
                call.waiting.append((session, number))
                return b""
            if call is not None:
                return self._repeated(call.reply, number, op)
            call = self._answers.begin(session, key, op, body)
        reply = self._serve(number, op, body)
        with self._lock:
            waiting = [(other, self._repeated(reply, its, op)) for other, its in self._answers.finish(call, reply)]
        for other, repeated in waiting:
            other.write(repeated)
        return reply

    def _repeated(self, reply: bytes, number: int, op: int) -> bytes:
        """The reply, for another daemon, with a lookup of its own."""
        reply = renumbered(reply, number)
        if op in MAKES:
            self._files.look_up_again(reply)
        return reply

    def _answered(self, keys: bytes) -> Reply:
        with self._lock:
            for (key,) in KEY.iter_unpack(keys):
                self._answers.drop(key)
        return (), ()

    # -- streams that follow ----------------------------------------------------------------------
    def _end_change(self, session: Session) -> None:
        with self._lock:
            self._changing[session] -= 1
            if not self._changing[session]:
                del self._changing[session]
                self._changed.notify_all()
            self._unlock_after()

    def _unlock_after(self) -> None:
        """Unlock the directory of a stream that has ended, once none of its changes is executed any more."""
        if self._locking not in (None, self._session) and self._locking not in self._changing:
            self._locking = None
            self._files.inodes.unlock()

    def _settle(self) -> Reply:
        with self._lock:
            while any(session is not self._session for session in self._changing):
                self._changed.wait()
        return (), ()

    def _hold(self, seconds: int, name: bytes, secret: bytes) -> Reply:
        if self._listener is None:
            self._listener = Listener(name, secret, self._join)
        self._hold_s = seconds
        return (), ()

    def _join(self, session: Session, seconds: int) -> None:
        """Serve `session` instead of the one before."""
        session.write(MAGIC)
        with self._lock:
            before, self._session = self._session, session
            self._hold_s = seconds
            self._unlock_after()
            self._joined += 1
            term = self._term
            self._elect(session)
            self._busy = self._term == term  # no thread could be started: `_watch` tries again
        self._awake.set()
        if before is not None:
            before.close()

    def _ended(self, session: Session) -> None:
        """In the leader, which ends: the stream has ended."""
        with self._lock:
            self._threads -= 1
            if session is not self._session:
                return
            if not self._hold_s:
                os._exit(0)
            self._session = None
            self._unlock_after()
            joined = self._joined
        session.close()
        use_stderr(None)
        timer = threading.Timer(self._hold_s, self._give_up, [joined])
        timer.daemon = True
        timer.start()

    def _give_up(self, joined: int) -> None:
        with self._lock:
            if self._session is None and self._joined == joined:
                os._exit(0)

    def _end(self) -> Reply:
        os._exit(0)


def _print_error() -> None:
    try:
        traceback.print_exc()
    except OSError:
        pass  # nobody reads it any more


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
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of its terminal or connection is not that of its files
    Server(files, first_session()).run()


_MOST_KEPT = 4096
_COMPARED_BYTES = 1024  # of a call's content; the rest is data, which belongs to the request's number


class Call:
    """A call that is executed, or was.  `waiting`: streams that wait for the reply, and their numbers for it."""

    __slots__ = ("content", "op", "reply", "stream", "waiting")

    def __init__(self, op: int, content: "tuple[int, int]", stream: Session) -> None:
        self.op = op
        self.content = content
        self.stream = stream
        self.reply = b""
        self.waiting: "list[tuple[Session, int]]" = []


class Answers:
    """The calls by the number of the kernel's request."""

    def __init__(self) -> None:
        self._calls: "OrderedDict[int, list[Call]]" = OrderedDict()

    def find(self, stream: Session, key: int, op: int, body: bytes) -> "Call | None":
        """The call that an earlier stream has made already, which `stream` repeats; None for a new one."""
        content = _content(body)
        for call in self._calls.get(key, ()):
            if call.stream is not stream and (call.op, call.content) == (op, content):
                call.stream = stream
                return call
        return None

    def begin(self, stream: Session, key: int, op: int, body: bytes) -> Call:
        """Record a call that is executed now; pass it to `finish`."""
        call = Call(op, _content(body), stream)
        self._calls.setdefault(key, []).append(call)
        if len(self._calls) > _MOST_KEPT:
            self._calls.popitem(last=False)
        return call

    def finish(self, call: Call, reply: bytes) -> "list[tuple[Session, int]]":
        """Record the reply; return which streams wait for it."""
        call.reply = reply
        waiting, call.waiting = call.waiting, []
        return waiting

    def drop(self, key: int) -> None:
        """The kernel has the reply to this request."""
        self._calls.pop(key, None)

    def __len__(self) -> int:
        return len(self._calls)


def renumbered(reply: bytes, number: int) -> bytes:
    """The same reply to the request `number`."""
    length, _, code = HEADER.unpack_from(reply)
    return HEADER.pack(length, number, code) + reply[HEADER.size :]


def _content(body: bytes) -> "tuple[int, int]":
    return len(body), hash(body[:_COMPARED_BYTES])
