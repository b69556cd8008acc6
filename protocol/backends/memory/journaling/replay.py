"""Replay: applies recorded effects to a new state, with its snapshots.

It uses the primitives of `MemoryState`, so the undo log takes its pre-images and the ledger its charges as when the
changes were made.  Limits are not checked: what was recorded fitted once.

`apply` reads the most frequent effects itself, and calls a method for each of the others.  Attributes wait in
`_waiting` until `settle` sets them: a log has those of a directory for each new name in it, and those of a new file
twice, but only the last ones count.  They are set before anything that depends on them: the beginning or the end of an
epoch, and the effects of overlays.  100,000 files of 1 KB, from a log: 1.7 s of CPU time instead of 6.5 s.

Invariant: after each batch and `settle` the state equals the recorded one after the same batch, in every attribute,
every snapshot and every inode number; except for lookups, and access times that changed after the last recorded change
of an inode.  An inode without links exists until its FREE effect, or until `disconnect`.

Threading: nothing else uses the state.
"""

from __future__ import annotations

import functools
import stat
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.backends.memory.blocks import Reserved, SparseBlock
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, Inode, with_link, without_link
from protocol.backends.memory.ledger import CONTENT_BYTES, DIRECTORY_BYTES, ENTRY_BYTES, INODE_BYTES
from protocol.backends.memory.xattrs import with_value, without
from protocol.directory_cookies import AscendingCookies, DirectoryCookies, downward
from protocol.journal import effects
from protocol.tree import TYPE_MASK
from protocol.volume import ROOT_INODE
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange, SnapshotInfo

if TYPE_CHECKING:
    from protocol.backends.memory.state import MemoryState

_XATTRS: Final = list[tuple[bytes, bytes]]
_XATTR: Final = tuple[bytes, bytes | None]
_SPARSE: Final = tuple[int, list[tuple[int, bytes]]]
_RESERVED: Final = list[tuple[int, int, bool]]
_COOKIES: Final = tuple[list[tuple[bytes, int]], int]
# Only requests of the last moments can be without an answer.
_RESULTS_KEPT: Final = 4096
_WAITING_MOST: Final = 1000
_NS: Final = 10**9
_DIRECTORY: Final = stat.S_IFDIR
_SYMLINK: Final = stat.S_IFLNK
_SETTLED_BEFORE: Final = frozenset({effects.SNAPSHOT, effects.DROP, effects.CONNECTION})
# Names of this module are found sooner than those of another one.
_INODE: Final = effects.INODE
_ENTRY: Final = effects.ENTRY
_WRITE: Final = effects.WRITE
_WITH_BYTES: Final = frozenset({effects.WRITE, effects.BLOCK})
_REQUEST: Final = effects.REQUEST
_INODE_BYTES: Final = effects.INODE_LAYOUT.size
_ENTRY_BYTES: Final = effects.ENTRY_LAYOUT.size
_WRITE_BYTES: Final = effects.WRITE_LAYOUT.size
_RESULT_BYTES: Final = effects.REQUEST_LAYOUT.size
_unpack_inode: Final = effects.INODE_LAYOUT.unpack
_unpack_mode: Final = effects.MODE_LAYOUT.unpack_from
_unpack_entry: Final = effects.ENTRY_LAYOUT.unpack_from
_unpack_write: Final = effects.WRITE_LAYOUT.unpack_from
_unpack_result: Final = effects.REQUEST_LAYOUT.unpack_from


class Replay:
    """Applies effects to `state`.  `notes` receives the NOTE effects."""

    def __init__(self, state: MemoryState, notes: dict[str, bytes]) -> None:
        self._state = state
        self._notes = notes
        self._handlers: dict[int, Callable[..., None]] = {
            effects.TRUNCATE: self._truncate,
            effects.PUNCH: self._punch,
            effects.RESERVE: self._reserve,
            effects.XATTRS: self._xattrs,
            effects.XATTR: self._xattr,
            effects.TARGET: self._target,
            effects.FREE: self._free,
            effects.RESET: self._reset,
            effects.SPARSE_BLOCK: self._sparse_block,
            effects.SHARED_BLOCK: self._shared_block,
            effects.STORE: self._store,
            effects.STORED_BLOCK: self._stored_block,
            effects.STORED_EFFECTS: self._stored_effects,
            effects.NO_BLOCK: self._no_block,
            effects.RESERVATIONS: self._reservations,
            effects.SNAPSHOT: self._snapshot,
            effects.DROP: self._drop,
            effects.NOTE: self._note,
            effects.NEXT: self._next,
            effects.CONNECTION: self._connection,
            effects.LISTED: self._listed_ascending,
            effects.COOKIES: functools.partial(self._cookies, AscendingCookies),
            effects.LISTED_DOWNWARD: self._listed,
            effects.COOKIES_DOWNWARD: functools.partial(self._cookies, DirectoryCookies),
            effects.INVALIDATED: self._invalidated,
        }
        self._waiting: dict[int, bytes] = {}  # INODE effects whose attributes are not set yet, by inode
        self._stored: dict[int, bytes] = {}
        self._results: deque[tuple[int, int, int]] = deque(maxlen=_RESULTS_KEPT)  # the newest REQUEST effects
        # Changes without a request of the kernel since its caches agreed with the state.
        self.inodes_to_invalidate: dict[int, None] = {}
        self.names_to_invalidate: dict[tuple[int, bytes], None] = {}

    # In one loop: a call for each effect would take a fifth longer.
    def apply(self, batch: Sequence[bytes]) -> None:  # noqa: C901, PLR0912
        """Apply the payloads of one batch.  ValueError for an unknown effect, KeyError for one that does not fit."""
        state, waiting = self._state, self._waiting
        inodes = state.inodes
        last = batch[-1] if batch else b""
        # The effect of a request is the last one.  If this is something else, it is noticed at the end.
        is_collecting = len(last) < _RESULT_BYTES or last[-_RESULT_BYTES] != _REQUEST
        is_of_request = False
        for payload in batch:
            at, end = 0, len(payload)
            while at < end:
                code = payload[at]
                if code == _INODE:
                    _, number, mode = _unpack_mode(payload, at)
                    if number not in waiting and inodes.get(number) is None:
                        self._make(number, mode)
                    waiting[number] = payload[at : at + _INODE_BYTES]
                    at += _INODE_BYTES
                    if is_collecting:
                        self.inodes_to_invalidate[number] = None
                elif code == _ENTRY:
                    _, number, child, length = _unpack_entry(payload, at)
                    at += _ENTRY_BYTES + length
                    name = payload[at - length : at]
                    self._entry(number, name, child)
                    if is_collecting:
                        self.names_to_invalidate[number, name] = None
                elif code in _WITH_BYTES:
                    _, number, offset, length = _unpack_write(payload, at)
                    at += _WRITE_BYTES + length
                    data = payload[at - length : at]
                    node = inodes[number]
                    if node.epoch != state.epoch:
                        node = state.own(node)
                    if code == _WRITE:
                        self._write(node, offset, data)
                    else:
                        self._block(node, offset, data)
                elif code == _REQUEST:
                    is_of_request = True
                    self._results.append(_unpack_result(payload, at))
                    at += _RESULT_BYTES
                else:
                    effect, at = effects.decode(payload, at)
                    if code in _SETTLED_BEFORE or code >= effects.LOWER:
                        self.settle()
                    self._handlers[code](*effect[1:])
        if not (is_of_request or is_collecting):
            self._collect(batch)
        if state.revived:
            state.end_revived()
        if len(waiting) > _WAITING_MOST:
            self.settle()

    def settle(self) -> None:
        """Set the attributes that wait."""
        state = self._state
        inodes = state.inodes
        for number, encoded in self._waiting.items():
            node = inodes[number]
            if node.epoch != state.epoch:
                node = state.own(node)
            (
                _, _, mode, nlink, node.uid, node.gid, node.rdev, size,
                atime, atime_ns, mtime, mtime_ns, ctime, ctime_ns, birth, birth_ns, node.generation,
            ) = _unpack_inode(encoded)  # fmt: skip
            node.atime_ns = atime * _NS + atime_ns
            node.mtime_ns = mtime * _NS + mtime_ns
            node.ctime_ns = ctime * _NS + ctime_ns
            node.birth_ns = birth * _NS + birth_ns
            counted = node.nlink
            if counted and (counted, node.mode, node.size) == (nlink, mode, size):
                continue
            if counted:
                state.count(node, -1)
            node.mode, node.nlink, node.size = mode, nlink, size
            if nlink:
                state.count(node, +1)
                state.orphans.discard(number)
            else:
                state.orphans.add(number)
        self._waiting.clear()

    def finish(self) -> None:
        """End the replay: lookups are known of the root and of inodes without links, which exist until `disconnect`."""
        self.settle()
        self._stored.clear()
        lookups = self._state.lookups
        lookups.clear()
        lookups.update(dict.fromkeys((ROOT_INODE, *self._state.orphans), 1))

    def disconnect(self) -> None:
        """Forget the kernel: programs have lost the files that they had open, and no request comes again."""
        self.settle()
        state = self._state
        for number in list(state.orphans):
            state.lookups.pop(number, None)
            state.release(state.inodes[number])
        for node in state.inodes.values():
            node.cookies = None
        self._results.clear()
        self._invalidated(0)

    # -- the kernel ------------------------------------------------------------------------------
    @property
    def requests(self) -> dict[int, list[int]]:
        """The results of the newest requests of the kernel, oldest first, by the number of the request."""
        found: dict[int, list[int]] = {}
        for _, unique, result in self._results:
            found.setdefault(unique, []).append(result)
        if found and len(self._results) == _RESULTS_KEPT:
            del found[next(iter(found))]  # its first results may be missing
        return found

    def _connection(self, _number: int) -> None:
        self.disconnect()

    def _listed(self, number: int) -> None:
        node = self._state.inodes[number]  # cookies belong to no version
        node.cookies = downward(node.cookies, node.children or ())

    def _listed_ascending(self, number: int) -> None:
        node = self._state.inodes[number]
        node.cookies = AscendingCookies(node.children or ())

    def _cookies(self, kind: type[DirectoryCookies], number: int, encoded: bytes) -> None:
        names, following = msgspec.msgpack.decode(encoded, type=_COOKIES)
        self._state.inodes[number].cookies = kind.of(names, following)

    def _collect(self, batch: Sequence[bytes]) -> None:
        """Collect the inodes and names that a change without a request may have made stale in the kernel's caches."""
        for payload in batch:
            for code, *fields in effects.decoded(payload):
                if code == effects.INODE:
                    self.inodes_to_invalidate[fields[0].inode] = None
                elif code == effects.ENTRY:
                    self.names_to_invalidate[fields[0], fields[1]] = None
                elif code == effects.INVALIDATED:
                    self._invalidated(0)

    def invalidation(self) -> CacheInvalidation:
        """Return the inodes and names that may be stale in the kernel's caches after the last batch."""
        inodes = self._state.inodes
        names = [
            EntryChange(parent, name, 0, (inodes[parent].children or {}).get(name, 0))
            for parent, name in self.names_to_invalidate
            if parent in inodes
        ]
        changed = [InodeChange(number, content=True) for number in self.inodes_to_invalidate if number in inodes]
        return CacheInvalidation(names, changed)

    def _invalidated(self, _number: int) -> None:
        self.inodes_to_invalidate.clear()
        self.names_to_invalidate.clear()

    # -- inodes ----------------------------------------------------------------------------------
    def _make(self, number: int, mode: int) -> None:
        """Make an inode; from the version of a snapshot if that has the number: a restore has revived it."""
        state = self._state
        version = self._version(number) if number < state.next_inode else None
        if version is not None:
            state.revive(version)
            return
        node = Inode(number, mode, 0, 0, 0, state.epoch)
        state.ledger.metadata += INODE_BYTES
        kind = mode & TYPE_MASK
        if kind == _DIRECTORY:
            node.children = {}
            node.size = DIRECTORY_BASE_BYTES
            state.ledger.metadata += DIRECTORY_BYTES
        elif kind == _SYMLINK:
            node.target = b""
        if state.log.newest is not None:
            state.record_new(number)
        state.inodes[number] = node
        if number >= state.next_inode:
            state.next_inode = number + 1

    def _version(self, number: int) -> Inode | None:
        """Return an old version of an inode that does not exist; None if no snapshot has one."""
        for epoch in reversed(self._state.log.epochs()):
            version = epoch.inodes.get(number)
            if version is not None:
                return version
        return None

    def _owned(self, number: int) -> Inode:
        return self._state.own(self._state.inodes[number])

    def _free(self, number: int) -> None:
        state = self._state
        self._waiting.pop(number, None)
        node = state.inodes.get(number)
        if node is None:
            return  # it was made and freed within the batch
        node = state.own(node)
        if node.nlink:
            state.count(node, -1)
            node.nlink = 0
        state.lookups.pop(number, None)
        state.release(node)

    def _reset(self, number: int) -> None:
        node = self._owned(number)
        if node.content is not None:
            self._state.swap_content(node, None, shared=False)
        self._state.ledger.set_xattrs(node, None)

    def _xattrs(self, number: int, encoded: bytes) -> None:
        values = dict(msgspec.msgpack.decode(encoded, type=_XATTRS))
        self._state.ledger.set_xattrs(self._owned(number), values or None)

    def _xattr(self, number: int, encoded: bytes) -> None:
        name, value = msgspec.msgpack.decode(encoded, type=_XATTR)
        node = self._owned(number)
        changed = without(node.xattrs, name) if value is None else with_value(node.xattrs, name, value)
        self._state.ledger.set_xattrs(node, changed)

    def _target(self, number: int, value: bytes) -> None:
        self._state.set_target(self._owned(number), value)

    # -- names -----------------------------------------------------------------------------------
    def _entry(self, directory: int, name: bytes, number: int) -> None:
        state = self._state
        above = state.inodes[directory]
        if above.epoch != state.epoch:
            above = state.own(above)
        children = above.children
        assert children is not None
        old = children.get(name, 0)
        if old == number:
            return
        if not old and above.cookies is None and state.log.newest is None:
            # The most frequent case: a new name, so no snapshot has to keep anything.
            node = self._owned(number)
            node.links = with_link(node.links, (directory, name))
            state.ledger.metadata += ENTRY_BYTES + len(name)
            children[name] = number
            return
        if old:
            node = self._owned(old)
            node.links = without_link(node.links, (directory, name))
            state.ledger.metadata -= ENTRY_BYTES + len(name)
        if number:
            node = self._owned(number)
            node.links = with_link(node.links, (directory, name))
            state.ledger.metadata += ENTRY_BYTES + len(name)
        state.set_name(above, name, number)

    # -- content ---------------------------------------------------------------------------------
    def _change(self, number: int, change: Callable[[Content], None]) -> None:
        """Change the content of a file, and count its pages and its charge."""
        state = self._state
        content = state.content(self._owned(number))
        pages, charge = content.pages, content.charge
        change(content)
        state.pages += content.pages - pages
        state.ledger.content += content.charge - charge

    def _write(self, node: Inode, offset: int, data: bytes) -> None:
        state = self._state
        content, length = node.content, len(data)
        if content is None and not offset % BLOCK_BYTES and length <= BLOCK_BYTES:
            content = node.content = Content.of_block(state.ledger, offset // BLOCK_BYTES, data)
            state.pages += content.pages
            state.ledger.content += content.allocated
            state.ledger.metadata += CONTENT_BYTES
            return
        content = state.content(node)
        plain = type(content) is Content
        growth = content.write_plainly(offset, offset + length, data, state.ledger) if plain else -1
        if growth < 0:
            self._change(node.inode, lambda content: content.write(offset, data, content.growth(offset, length)))
        else:
            state.pages += growth

    def _block(self, node: Inode, index: int, data: bytes) -> None:
        content = node.content
        # A write to content over a lower file would copy the rest of the block up.
        if content is None or (index not in content.blocks and type(content) is Content):
            self._write(node, index * BLOCK_BYTES, data)
        else:
            self._change(node.inode, lambda content: content.set_block(index, data))

    def _truncate(self, number: int, size: int) -> None:
        node = self._owned(number)
        if node.content is not None:
            self._change(number, lambda content: content.truncate(size))

    def _punch(self, number: int, offset: int, length: int) -> None:
        self._change(number, lambda content: content.punch(offset, length))

    def _reserve(self, number: int, offset: int, length: int) -> None:
        self._change(number, lambda content: content.reserve(offset, length))

    def _sparse_block(self, number: int, index: int, encoded: memoryview) -> None:
        length, pages = msgspec.msgpack.decode(encoded, type=_SPARSE)
        self._change(number, lambda content: content.set_block(index, SparseBlock(length, dict(pages))))

    def _no_block(self, number: int, index: int) -> None:
        self._change(number, lambda content: content.set_block(index, None))

    def _shared_block(self, number: int, index: int, serial: int, source: int, source_index: int) -> None:
        version = self._shown(serial, source)
        assert version is not None
        lender = version.content
        assert lender is not None
        self._change(number, lambda content: content.share_block(index, lender, source_index))

    def _shown(self, serial: int, number: int) -> Inode | None:
        """Return the version of an inode that the snapshot `serial` shows."""
        for epoch in self._state.log.by_serial(serial).chain():
            if number in epoch.inodes:
                return epoch.inodes[number]
        return self._state.inodes.get(number)

    def _store(self, number: int, _offset: int, data: memoryview) -> None:
        if number == 0:
            self._stored.clear()
        self._stored[number] = bytes(data)

    def _stored_block(self, number: int, index: int, stored: int) -> None:
        self._block(self._owned(number), index, self._stored.pop(stored))

    def _stored_effects(self, stored: int) -> None:
        self.apply([self._stored.pop(stored)])

    def _reservations(self, number: int, encoded: bytes) -> None:
        ranges = msgspec.msgpack.decode(encoded, type=_RESERVED)
        self._change(number, lambda content: content.set_reservations(tuple(Reserved(*each) for each in ranges)))

    # -- snapshots -------------------------------------------------------------------------------
    def _snapshot(self, _number: int, encoded: bytes) -> None:
        info = msgspec.msgpack.decode(encoded, type=SnapshotInfo)
        log = self._state.log
        log.serial = max(log.serial, info.serial - 1)
        self._state.open_epoch(info)

    def _drop(self, serial: int) -> None:
        log = self._state.log
        log.close(log.by_serial(serial))

    def _next(self, number: int) -> None:
        self._state.next_inode = max(self._state.next_inode, number)

    def _note(self, key: str, value: bytes) -> None:
        if value:
            self._notes[key] = value
        else:
            self._notes.pop(key, None)
