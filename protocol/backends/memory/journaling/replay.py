"""Replay: applies recorded effects to a new state, with its snapshots.

It uses the primitives of `MemoryState`, so the undo log takes its pre-images and the ledger its charges as when the
changes were made.  Limits are not checked: what was recorded fitted once.

Invariant: after each batch the state equals the recorded one after the same batch, in every attribute, every snapshot
and every inode number; except for lookups, and access times that changed
after the last recorded change of an inode.  An inode without links exists until its FREE effect, or until `disconnect`.

Threading: nothing else uses the state.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.backends.memory.blocks import SparseBlock
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, Inode, with_link, without_link
from protocol.backends.memory.ledger import DIRECTORY_BYTES, ENTRY_BYTES, INODE_BYTES
from protocol.backends.memory.reservations import Reserved
from protocol.directory_cookies import DirectoryCookies
from protocol.journal import effects
from protocol.volume import ROOT_INODE
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange, SnapshotInfo

if TYPE_CHECKING:
    from protocol.backends.memory.content import Content
    from protocol.backends.memory.state import MemoryState

_XATTRS: Final = list[tuple[bytes, bytes]]
_SPARSE: Final = tuple[int, list[tuple[int, bytes]]]
_RESERVED: Final = list[tuple[int, int, bool]]
_COOKIES: Final = tuple[list[tuple[bytes, int]], int]
_COLLECTED: Final = frozenset({effects.INODE, effects.ENTRY})
# A daemon executes one request at a time, so only those of the last moments can be without an answer.
_REQUESTS_KEPT: Final = 1000


class Replay:
    """Applies effects to `state`.  `notes` receives the NOTE effects."""

    def __init__(self, state: MemoryState, notes: dict[str, bytes]) -> None:
        self._state = state
        self._notes = notes
        self._handlers: dict[int, Callable[..., None]] = {
            effects.INODE: self._inode,
            effects.ENTRY: self._entry,
            effects.WRITE: self._write,
            effects.TRUNCATE: self._truncate,
            effects.PUNCH: self._punch,
            effects.RESERVE: self._reserve,
            effects.XATTRS: self._xattrs,
            effects.TARGET: self._target,
            effects.FREE: self._free,
            effects.RESET: self._reset,
            effects.BLOCK: self._block,
            effects.SPARSE_BLOCK: self._sparse_block,
            effects.SHARED_BLOCK: self._shared_block,
            effects.NO_BLOCK: self._no_block,
            effects.RESERVATIONS: self._reservations,
            effects.SNAPSHOT: self._snapshot,
            effects.DROP: self._drop,
            effects.NOTE: self._note,
            effects.NEXT: self._next,
            effects.REQUEST: self._request,
            effects.CONNECTION: self._connection,
            effects.LISTED: self._listed,
            effects.COOKIES: self._cookies,
            effects.INVALIDATED: self._invalidated,
        }
        # The results of the newest requests of the kernel, oldest first, by the number of the request.
        self.requests: dict[int, list[int]] = {}
        # What changed without a request of the kernel since its caches agreed with the state.
        self.inodes_to_invalidate: dict[int, None] = {}
        self.names_to_invalidate: dict[tuple[int, bytes], None] = {}
        self._is_of_request = False

    def apply(self, batch: Sequence[bytes]) -> None:
        """Apply the payloads of one batch.  ValueError for an unknown effect, KeyError for one that does not fit."""
        changed: list[effects.Effect] = []
        self._is_of_request = False
        handlers = self._handlers
        for payload in batch:
            for effect in effects.decoded(payload):
                code = effect[0]
                handlers[code](*effect[1:])
                if code in _COLLECTED:
                    changed.append(effect)
                elif code == effects.INVALIDATED:
                    changed.clear()  # an image is one batch with everything before it
        if changed and not self._is_of_request:
            self._collect(changed)
        self._state.forget_revived()

    def finish(self) -> None:
        """End the replay: lookups are known of the root and of inodes without links, which exist until `disconnect`."""
        lookups = self._state.lookups
        lookups.clear()
        lookups.update(dict.fromkeys((ROOT_INODE, *self._state.orphans), 1))

    def disconnect(self) -> None:
        """Forget the kernel: programs have lost the files that they had open, and no request comes again."""
        state = self._state
        for number in list(state.orphans):
            state.lookups.pop(number, None)
            state.release(state.inodes[number])
        for node in state.inodes.values():
            node.cookies = None
        self.requests.clear()
        self._invalidated(0)

    # -- the kernel ------------------------------------------------------------------------------
    def _request(self, unique: int, result: int) -> None:
        self._is_of_request = True
        self.requests.setdefault(unique, []).append(result)
        # Many at once: each removal makes finding the first key of a dict slower.
        if len(self.requests) >= 2 * _REQUESTS_KEPT:
            for number in list(islice(self.requests, _REQUESTS_KEPT)):
                del self.requests[number]

    def _connection(self, _number: int) -> None:
        self.disconnect()

    def _listed(self, number: int) -> None:
        node = self._state.inodes[number]  # cookies belong to no version
        node.cookies = DirectoryCookies(node.children or ())

    def _cookies(self, number: int, encoded: bytes) -> None:
        names, following = msgspec.msgpack.decode(encoded, type=_COOKIES)
        self._state.inodes[number].cookies = DirectoryCookies.of(names, following)

    def _collect(self, changed: list[effects.Effect]) -> None:
        """Collect what a change without a request of the kernel may have made wrong in the kernel's caches."""
        for code, *fields in changed:
            if code == effects.INODE:
                self.inodes_to_invalidate[fields[0].inode] = None
            else:
                self.names_to_invalidate[fields[0], fields[1]] = None

    def invalidation(self) -> CacheInvalidation:
        """Return what the kernel's caches may have wrong after the last batch."""
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
    def _inode(self, attributes: effects.Attributes) -> None:
        state = self._state
        node = state.inodes.get(attributes.inode)
        node = state.own(node) if node is not None else self._made(attributes)
        counts = node.nlink, node.mode, node.size
        is_counted = (attributes.nlink, attributes.mode, attributes.size) == counts and counts[0]
        if node.nlink and not is_counted:
            state.count(node, -1)
        (
            _, node.mode, node.nlink, node.uid, node.gid, node.rdev, node.size,
            node.atime_ns, node.mtime_ns, node.ctime_ns, node.birth_ns, node.generation,
        ) = attributes  # fmt: skip
        if is_counted:
            return
        if node.nlink:
            state.count(node, +1)
            state.orphans.discard(node.inode)
        else:
            state.orphans.add(node.inode)

    def _made(self, attributes: effects.Attributes) -> Inode:
        """Make an inode; from the version of a snapshot if that has the number: a restore has revived it."""
        state = self._state
        number = attributes.inode
        version = self._version(number) if number < state.next_inode else None
        if version is not None:
            node = state.revive(version)
        else:
            node = Inode(number, attributes.mode, attributes.uid, attributes.gid, 0, state.epoch)
            state.ledger.metadata += INODE_BYTES
            if stat.S_ISDIR(attributes.mode):
                node.children = {}
                node.size = DIRECTORY_BASE_BYTES
                state.ledger.metadata += DIRECTORY_BYTES
            elif stat.S_ISLNK(attributes.mode):
                node.target = b""
            state.record_new(number)
            state.inodes[number] = node
            state.next_inode = max(state.next_inode, number + 1)
        state.lookups[number] = 1  # until it is freed
        return node

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

    def _target(self, number: int, value: bytes) -> None:
        self._state.set_target(self._owned(number), value)

    # -- names -----------------------------------------------------------------------------------
    def _entry(self, directory: int, name: bytes, number: int) -> None:
        state = self._state
        above = self._owned(directory)
        assert above.children is not None
        old = above.children.get(name, 0)
        if old == number:
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

    def _write(self, number: int, offset: int, data: memoryview) -> None:
        self._change(number, lambda content: content.write(offset, data, content.growth(offset, len(data))))

    def _truncate(self, number: int, size: int) -> None:
        node = self._owned(number)
        if node.content is not None:
            self._change(number, lambda content: content.truncate(size))

    def _punch(self, number: int, offset: int, length: int) -> None:
        self._change(number, lambda content: content.punch(offset, length))

    def _reserve(self, number: int, offset: int, length: int) -> None:
        self._change(number, lambda content: content.reserve(offset, length))

    def _block(self, number: int, index: int, data: memoryview) -> None:
        self._change(number, lambda content: content.set_block(index, bytes(data)))

    def _sparse_block(self, number: int, index: int, encoded: memoryview) -> None:
        length, pages = msgspec.msgpack.decode(encoded, type=_SPARSE)
        self._change(number, lambda content: content.set_block(index, SparseBlock(length, dict(pages))))

    def _no_block(self, number: int, index: int) -> None:
        self._change(number, lambda content: content.set_block(index, None))

    def _shared_block(self, number: int, index: int, serial: int, source: int, source_index: int) -> None:
        version = self._shown(serial, source)
        assert version is not None
        assert version.content is not None
        block = version.content.blocks[source_index]
        self._change(number, lambda content: content.share_block(index, block))

    def _shown(self, serial: int, number: int) -> Inode | None:
        """Return the version of an inode that the snapshot `serial` shows."""
        for epoch in self._state.log.by_serial(serial).chain():
            if number in epoch.inodes:
                return epoch.inodes[number]
        return self._state.inodes.get(number)

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
        self._notes[key] = value
