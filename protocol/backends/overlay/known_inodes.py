"""KnownInodes: what an overlay has loaded from its lower layer, for the next process: in a `SharedLog`, or handed over.

A kernel refers to an inode by its number.  The journal has the inodes that changed.  Of the others this log has the
entries of each directory that was loaded, with their numbers and in their order, and the attributes of each inode that
was loaded, so a process that continues to serve the kernel has the numbers and the cookies that the kernel has.

Directories are loaded at once, because numbers are found through the entries above them.  An inode is loaded when it is
used, and is then as the process before had it, so a change of the file below meanwhile is noticed as any other.  If
the layer cannot change, it is loaded without reading the layer, whose source may not answer.

Invariant: `_expected` has only inodes that are not loaded.

Threading: under the state's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from protocol.backends.overlay.inode import OverlayInode, UnfilledChildren
from protocol.backends.overlay.lower import IdentityRecord, RecordedStat, identity_record, recorded_identity
from protocol.directory_cookies import AscendingCookies, DirectoryCookies, downward
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from protocol.backends.memory.xattrs import Xattrs
    from protocol.backends.overlay.state import OverlayState
    from protocol.linux.shared_log import SharedLog

Key: TypeAlias = tuple[int, int]
_NS: Final = 10**9
# The codes of records. A record is [code, number, value].
_FILLED: Final = 1  # the entries of a directory: [name, number, type bits, key]
_LOADED: Final = 2  # the attributes of an inode: `_STAT`
_CORRECTED: Final = 3  # the type bits that a name has below by now, 0: none
_LISTED: Final = 4  # written until cookies went down: the entries of a directory got cookies, in their order
_COOKIES: Final = 5  # they have these cookies: [[name, cookie]], the next cookie, which goes up
_LISTED_DOWNWARD: Final = 6  # the entries of a directory got cookies in the order of the names, or get lower ones
_COOKIES_DOWNWARD: Final = 7  # as _COOKIES; the next cookie goes down

# Mode, links, uid, gid, device of a device node, sectors, atime in s and ns, the identity, xattrs, target of a symlink.
_STAT: Final = tuple[
    int, int, int, int, int, int, int, int, IdentityRecord, list[tuple[bytes, bytes]] | None, bytes | None
]
_Rows: TypeAlias = list[tuple[bytes, int, int, Key | None]]
_Cookies: TypeAlias = tuple[list[tuple[bytes, int]], int]
_Record: TypeAlias = tuple[int, int, msgspec.Raw]


class Expected(NamedTuple):
    """An inode as the process before had loaded it."""

    seen: RecordedStat
    xattrs: Xattrs | None
    target: bytes | None


class KnownInodes:
    """Keeps the record of `state` in `log`; None: nobody needs it.

    `recent`: what was recorded since a handover began; None without one.
    """

    def __init__(self, state: OverlayState, log: SharedLog | None) -> None:
        self._state = state
        self._log = log
        self._expected: dict[int, msgspec.Raw] = {}
        self._from_log: set[int] = set()  # directories whose entries came from another process
        self.recent: list[bytes] | None = None

    def load(self) -> None:
        """Load what the process before recorded; the state has what is in the journal."""
        assert self._log is not None
        for record in list(self._log.records()):  # loading appends to it
            self._load(record)

    def take(self, record: bytes) -> None:
        """Load a record that the process before hands over, and record it here."""
        self._load(record)
        self._append(record)

    def _load(self, record: bytes) -> None:
        state = self._state
        code, number, value = msgspec.msgpack.decode(record, type=_Record)
        if code == _LOADED:
            if state.table.loaded(number) is None:
                self._expected[number] = value
        elif code == _FILLED:
            self._from_log.add(number)
            with suppress(OSError):  # requests for what is below it fail
                state.put_filled(number, msgspec.msgpack.decode(value, type=_Rows))
        elif code == _CORRECTED:
            state.correct(number, msgspec.msgpack.decode(value, type=int))
        elif number in self._from_log:
            self._set_cookies(number, code, value)

    def _set_cookies(self, number: int, code: int, value: msgspec.Raw) -> None:
        directory = self._state.table.loaded(number)
        if directory is None or number in self._state.listed:
            return
        names = directory.children or ()
        if code == _LISTED_DOWNWARD:
            directory.cookies = downward(directory.cookies, names)
        elif directory.cookies is None:
            kind = DirectoryCookies if code == _COOKIES_DOWNWARD else AscendingCookies
            pairs, following = msgspec.msgpack.decode(value, type=_Cookies) if code != _LISTED else (None, 0)
            directory.cookies = kind(names) if pairs is None else kind.of(pairs, following)

    # -- what the process before had -----------------------------------------------------------------
    @property
    def expected_numbers(self) -> list[int]:
        """The inodes that the process before had loaded, and this one has not."""
        return list(self._expected)

    def expected(self, number: int) -> Expected | None:
        """Return what the process before had loaded for an inode that is not loaded here."""
        value = self._expected.get(number)
        if value is None:
            return None
        mode, nlink, uid, gid, rdev, sectors, atime_s, atime_ns, found, xattrs, target = msgspec.msgpack.decode(
            value, type=_STAT
        )
        device, inode, size, mtime_ns, ctime_ns = recorded_identity(found)
        atime = atime_s * _NS + atime_ns
        seen = RecordedStat(mode, inode, device, nlink, uid, gid, size, atime, mtime_ns, ctime_ns, sectors, rdev)
        return Expected(seen, None if xattrs is None else dict(xattrs), target)

    def set_atime(self, number: int, atime_ns: int) -> None:
        """Set the access time of an inode that is not loaded, if there is such an inode."""
        value = self._expected.get(number)
        if value is not None:
            *before, _, _, found, xattrs, target = msgspec.msgpack.decode(value, type=_STAT)
            now = (*before, *divmod(atime_ns, _NS), found, xattrs, target)
            self._expected[number] = msgspec.Raw(msgspec.msgpack.encode(now))

    def forget(self, number: int) -> None:
        """Forget an inode that is not loaded, if there is such an inode."""
        self._expected.pop(number, None)

    # -- what this process loads ---------------------------------------------------------------------
    def loaded(self, inode: OverlayInode) -> None:
        """Record an inode that has no changes, as it is."""
        self._expected.pop(inode.inode, None)
        self._append(_loaded(inode))

    def filled(self, number: int, entries: Mapping[bytes, int], keys: Mapping[bytes, Key]) -> None:
        """Record the entries of a directory."""
        kind = self._state.kind
        rows = [(name, child, kind(child) & TYPE_MASK, keys.get(name)) for name, child in entries.items()]
        self._append(_record(_FILLED, number, rows))

    def corrected(self, number: int, kind: int) -> None:
        """Record that a name, which is not loaded, has become another type of file, or none."""
        self._append(_record(_CORRECTED, number, kind))

    def listed(self, number: int) -> None:
        """Record that the entries of a directory get cookies."""
        self._append(_record(_LISTED_DOWNWARD, number, None))

    def _append(self, record: bytes) -> None:
        if self.recent is not None:
            self.recent.append(record)
        if self._log is not None:
            self._log.append(record)
            self._state.ledger.charge_overhead(len(record))

    def tidy(self) -> None:
        """Write the log anew if it has grown too much."""
        if self._log is not None and self._log.is_large:
            self.rewrite()

    def rewrite(self) -> None:
        """Replace the log, which there is, by what the state has."""
        assert self._log is not None
        self._log.replace(self.records())

    def records(self) -> Iterator[bytes]:
        """Yield the records of what the state has, without what a journal or an image has."""
        state = self._state
        keys = {number: key for key, number in state.numbers_by_key.items()}
        for number, inode in list(dict.items(state.table)):
            children = inode.children
            if not isinstance(inode, OverlayInode) or number in state.listed or isinstance(children, UnfilledChildren):
                continue
            if children is not None:
                rows = [(name, at, state.kind(at) & TYPE_MASK, keys.get(at)) for name, at in children.items()]
                yield _record(_FILLED, number, rows)
                if inode.cookies is not None:
                    code = _COOKIES if inode.cookies.ascends else _COOKIES_DOWNWARD
                    yield _record(code, number, (list(inode.cookies.pairs()), inode.cookies.following))
        for number, inode in list(dict.items(state.table)):
            if isinstance(inode, OverlayInode) and number not in state.recorded:
                yield _loaded(inode)
        for number, value in self._expected.items():
            yield msgspec.msgpack.encode((_LOADED, number, value))


def _record(code: int, number: int, value: object) -> bytes:
    return msgspec.msgpack.encode((code, number, value))


def _loaded(inode: OverlayInode) -> bytes:
    file = inode.lower
    times = divmod(inode.atime_ns, _NS)
    value = (
        inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, file.sectors, *times, identity_record(file.identity),
        None if inode.xattrs is None else list(inode.xattrs.items()), inode.target,
    )  # fmt: skip
    return _record(_LOADED, inode.inode, value)
