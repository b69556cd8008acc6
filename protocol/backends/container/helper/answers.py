"""The replies to requests that change something, for a daemon that repeats a request of a daemon before it.

The kernel sends a request again, with the same number, if the daemon that read it died before it replied.  The helper
may have executed it by then, or may be executing it.  So it keeps the reply until vfsd says that the kernel has it
(`wire.Op.ANSWERED`).  NFS calls this a duplicate request cache.

One request of the kernel may need several calls.  A repeated call is recognised by its operation and its content, and
answers one call of each stream.

Invariants: a call is executed once, however often it is repeated.  The replies that vfsd has not confirmed are bounded
by the requests in flight (and by _MOST_KEPT, if they never are).

Threading: every method is called with the server's lock held.
"""

from collections import OrderedDict

from protocol.backends.container.helper.sessions import Session
from protocol.backends.container.helper.wire import HEADER

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

    def forget(self, key: int) -> None:
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
