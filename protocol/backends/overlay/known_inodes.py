"""KnownInodes: what an overlay has loaded from its lower layer, for the next process: in a `SharedLog`, or handed over.

A record is one effect (`protocol.journal.effects`): LISTING, with the keys of the files, and later corrections of a
name (KIND); LISTED_DOWNWARD or COOKIES for its cookies; LOWER for an inode.

A kernel refers to an inode by its number.  The journal has the inodes that changed.  Of the others this log has the
entries of each directory that was loaded, with their numbers and in their order, and the attributes of each inode that
was loaded, so a process that continues to serve the kernel has the numbers and the cookies that the kernel has.

Directories are loaded at once, because numbers are found through the entries above them.  An inode is loaded when it is
used, and is then as the predecessor had it, so a change of the file below meanwhile is noticed as any other.  If
the layer cannot change, it is loaded without reading the layer, whose source may not answer.

Invariant: `_expected` has only inodes that are not loaded.

Threading: under the state's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from protocol.backends.overlay.inode import OverlayInode, UnfilledChildren
from protocol.backends.overlay.lower import FileRecord, RecordedStat
from protocol.directory_cookies import AscendingCookies, DirectoryCookies, downward
from protocol.journal import effects
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from protocol.backends.memory.xattrs import Xattrs
    from protocol.backends.overlay.state import OverlayState
    from protocol.linux.shared_log import SharedLog

Key: TypeAlias = tuple[int, int]
_Rows: TypeAlias = list[tuple[bytes, int, int, Key | None]]  # name, number, type bits and key of each entry
_Cookies: TypeAlias = tuple[list[tuple[bytes, int]], int]


class LowerValue(NamedTuple):
    """The value of a LOWER effect, an inode of the lower layer.  `attributes` is an INODE effect."""

    file: FileRecord
    attributes: bytes
    links: list[tuple[int, bytes]]
    xattrs: list[tuple[bytes, bytes]] | None
    target: bytes | None


def lower_effect(inode: OverlayInode, links: list[tuple[int, bytes]]) -> bytes:
    """Return the LOWER effect of an inode."""
    xattrs = None if inode.xattrs is None else list(inode.xattrs.items())
    value = LowerValue(inode.lower.record, effects.inode(inode), links, xattrs, inode.target)
    return effects.with_value(effects.LOWER, inode.inode, value)


class Expected(NamedTuple):
    """An inode as the predecessor had loaded it."""

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
        self._expected: dict[int, bytes] = {}  # the values of LOWER effects
        self._from_log: set[int] = set()  # directories whose entries came from the predecessor
        self.recent: list[bytes] | None = None

    def load(self) -> None:
        """Load the predecessor's records; the state has the content of the journal."""
        assert self._log is not None
        for record in list(self._log.records()):  # loading appends to it
            self._load(record)

    def take(self, record: bytes) -> None:
        """Load a record that the predecessor hands over, and record it here."""
        self._load(record)
        self._append(record)

    def _load(self, record: bytes) -> None:
        state = self._state
        (effect,) = effects.decoded(record)
        code, number, *fields = effect
        if code == effects.LOWER:
            if state.table.loaded(number) is None:
                self._expected[number] = fields[0]
        elif code == effects.LISTING:
            self._from_log.add(number)
            with suppress(OSError):  # requests for what is below it fail
                state.put_filled(number, msgspec.msgpack.decode(fields[0], type=_Rows))
        elif code == effects.KIND:
            state.correct(number, msgspec.msgpack.decode(fields[0], type=int))
        elif number in self._from_log:
            self._set_cookies(number, code, *fields)

    def _set_cookies(self, number: int, code: int, encoded: bytes = b"") -> None:
        directory = self._state.table.loaded(number)
        if directory is None or number in self._state.listed:
            return
        if code == effects.LISTED_DOWNWARD:
            directory.cookies = downward(directory.cookies, directory.children or ())
        elif directory.cookies is None:
            kind = DirectoryCookies if code == effects.COOKIES_DOWNWARD else AscendingCookies
            directory.cookies = kind.of(*msgspec.msgpack.decode(encoded, type=_Cookies))

    # -- inodes that the predecessor had loaded -------------------------------------------------------
    @property
    def expected_numbers(self) -> list[int]:
        """The inodes that the predecessor had loaded, and this process has not."""
        return list(self._expected)

    def expected(self, number: int) -> Expected | None:
        """Return an inode as the predecessor had loaded it, if it is not loaded here."""
        value = self._expected.get(number)
        if value is None:
            return None
        decoded = msgspec.msgpack.decode(value, type=LowerValue)
        found = effects.attributes(decoded.attributes)
        seen = RecordedStat.of(decoded.file)._replace(
            st_mode=found.mode, st_nlink=found.nlink, st_uid=found.uid, st_gid=found.gid,
            st_atime_ns=found.atime_ns, st_rdev=found.rdev,
        )  # fmt: skip
        return Expected(seen, None if decoded.xattrs is None else dict(decoded.xattrs), decoded.target)

    def set_atime(self, number: int, atime_ns: int) -> None:
        """Set the access time of an inode that is not loaded, if there is such an inode."""
        value = self._expected.get(number)
        if value is not None:
            decoded = msgspec.msgpack.decode(value, type=LowerValue)
            attributes = effects.inode(effects.attributes(decoded.attributes)._replace(atime_ns=atime_ns))
            self._expected[number] = msgspec.msgpack.encode(decoded._replace(attributes=attributes))

    def drop(self, number: int) -> None:
        """Drop the record of an inode that is not loaded, if there is such an inode."""
        self._expected.pop(number, None)

    # -- what this process loads ---------------------------------------------------------------------
    def loaded(self, inode: OverlayInode) -> None:
        """Record an inode that has no changes, as it is."""
        self._expected.pop(inode.inode, None)
        self._append(lower_effect(inode, []))

    def filled(self, number: int, entries: Mapping[bytes, int], keys: Mapping[bytes, Key]) -> None:
        """Record the entries of a directory."""
        kind = self._state.kind
        rows = [(name, child, kind(child) & TYPE_MASK, keys.get(name)) for name, child in entries.items()]
        self._append(effects.with_value(effects.LISTING, number, rows))

    def corrected(self, number: int, kind: int) -> None:
        """Record that a name, which is not loaded, has become another type of file, or none."""
        self._append(effects.with_value(effects.KIND, number, kind))

    def listed(self, number: int) -> None:
        """Record that the entries of a directory get cookies."""
        self._append(effects.listed(number))

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
        """Replace the log, which there is, by the records of the present state."""
        assert self._log is not None
        self._log.replace(self.records())

    def records(self) -> Iterator[bytes]:
        """Yield the records of the state, without inodes that a journal or an image has."""
        state = self._state
        keys = {number: key for key, number in state.numbers_by_key.items()}
        for number, inode in list(dict.items(state.table)):
            children = inode.children
            if not isinstance(inode, OverlayInode) or number in state.listed or isinstance(children, UnfilledChildren):
                continue
            if children is not None:
                rows = [(name, at, state.kind(at) & TYPE_MASK, keys.get(at)) for name, at in children.items()]
                yield effects.with_value(effects.LISTING, number, rows)
                if inode.cookies is not None:
                    yield effects.cookies(number, inode.cookies)
        for number, inode in list(dict.items(state.table)):
            if isinstance(inode, OverlayInode) and number not in state.recorded:
                yield lower_effect(inode, [])
        for number, value in self._expected.items():
            yield effects.with_value(effects.LOWER, number, msgspec.Raw(value))
