"""AgentTree: the live state of a container's directory as a tree, read through a helper in bulk.

One request lists thousands of entries, and the next one is in flight while they are used.  A reader that reads a file
during a walk will read the following ones too, so they are requested ahead, up to _AHEAD_BYTES.  So a workspace of many
small files costs few round trips.

The tree shows the state at the time of each read: a concurrent change is seen before or after it.

Threading: any one thread but the serving loop's, which must be running.
"""

from __future__ import annotations

import errno
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import trio

from protocol.backends.container.agent.link import AgentLink, Pending, Reply
from protocol.backends.container.agent.replies import number_in, string_in, tree_entries_in
from protocol.backends.container.helper.wire import CHUNK_BYTES, NAME_MAX, Op, WireError
from protocol.backends.container.inode_map import IDENTITY, IdMap
from protocol.backends.host.files import MAX_FILE_BYTES
from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES as TREE_CHUNK_BYTES
from protocol.tree import Chunk, Hole, LookupTree, TreeEntry, sparse

_PAGE_BYTES: Final = 256 * 1024
_ENTRY_BYTES: Final = 512 * 1024  # the largest entry with its xattrs, which may be longer than a page
_AHEAD_BYTES: Final = 4 * CHUNK_BYTES
_AHEAD_FILES: Final = 128
_COMING_FILES: Final = 65536
# Memory for the entries of a directory and its parents: some five million, more than any real workspace has.
_LISTED_BYTES: Final = 512 * 1024 * 1024
_EACH_BYTES: Final = 64  # per entry, without its name


class AgentTree(LookupTree):
    """Implements `protocol.tree.Tree`.  `token` belongs to the loop that serves `link`."""

    def __init__(
        self,
        link: AgentLink,
        token: trio.lowlevel.TrioToken,
        ids: IdMap = IDENTITY,
        *,
        most_listed_bytes: int = _LISTED_BYTES,
    ) -> None:
        self._link = link
        self._token = token
        self._ids = ids
        self._most_listed_bytes = most_listed_bytes
        # Files of the last walk that were not read yet (path, size), and those that were requested.
        self._coming: OrderedDict[bytes, int] = OrderedDict()
        self._ahead: OrderedDict[bytes, tuple[Pending, int]] = OrderedDict()
        self._ahead_bytes = 0

    # -- requests --------------------------------------------------------------------------------
    def _call(self, op: int, numbers: tuple[int, ...], strings: tuple[bytes, ...], most_bytes: int) -> Reply:
        async def call() -> Reply:
            return await self._link.call(op, numbers, strings, most_bytes=most_bytes)

        return trio.from_thread.run(call, trio_token=self._token)

    def _post(self, *requests: tuple[int, tuple[int, ...], tuple[bytes, ...], int]) -> list[Pending]:
        def post() -> list[Pending]:
            return [self._link.post(op, numbers, strings, most_bytes=most) for op, numbers, strings, most in requests]

        return trio.from_thread.run_sync(post, trio_token=self._token)

    def _answer(self, pending: Pending) -> Reply:
        return trio.from_thread.run(self._link.answer, pending, trio_token=self._token)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Lose the link if the block finds an invalid reply."""
        try:
            yield
        except WireError as error:
            trio.from_thread.run_sync(self._link.lose, f"invalid reply: {error}", trio_token=self._token)
            raise os_error(errno.EIO) from None

    # -- entries ---------------------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`."""
        _, strings = self._call(Op.TREE_ENTRY, (), (path,), _ENTRY_BYTES)
        with self._checked():
            found = list(tree_entries_in(string_in(strings, _ENTRY_BYTES), self._ids))
            if len(found) != 1 or found[0].path != path:
                raise WireError(f"{len(found)} entries for {path!r}")
        return found[0]

    def children(self, path: bytes) -> list[bytes]:
        names: list[bytes] = []
        room = self._most_listed_bytes
        more = True
        while more:
            after = names[-1] if names else b""
            numbers, strings = self._call(Op.TREE_CHILDREN, (), (path, after), CHUNK_BYTES)
            with self._checked():
                more = bool(number_in(numbers, 1))
                page = string_in(strings, CHUNK_BYTES).split(b"\0")[:-1]
                _check_names(page, after)
                if more and not page:
                    raise WireError("an empty page before the end")
                room -= sum(map(len, page)) + _EACH_BYTES * len(page)
                if room < 0:
                    raise WireError(f"too many entries in {path!r}")
            names += page
        return names

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        numbers, _ = self._call(Op.TREE_WALK, (), (path,), 0)
        with self._checked():
            walk = number_in(numbers, 1 << 62)
        self._coming.clear()
        try:
            yield from self._walked(path, walk)
        finally:
            # Also if the walk is abandoned, in any thread, or after the link was lost.
            with suppress(OSError, RuntimeError):
                self._post((Op.TREE_END, (walk,), (), 0))

    def _walked(self, path: bytes, walk: int) -> Iterator[TreeEntry]:
        request = (Op.TREE_NEXT, (walk, _PAGE_BYTES), (), _PAGE_BYTES + _ENTRY_BYTES)
        order = _Order(path, self._most_listed_bytes)
        more = True
        (pending,) = self._post(request)
        while more:
            numbers, strings = self._answer(pending)
            with self._checked():
                more = bool(number_in(numbers, 1))
                page = list(tree_entries_in(string_in(strings, _PAGE_BYTES + _ENTRY_BYTES), self._ids))
                for entry in page:
                    order.check(entry)
                if more and not page:
                    raise WireError("an empty page before the end")
            if more:
                (pending,) = self._post(request)
            self._coming.update((entry.path, entry.size) for entry in page if entry.is_file and entry.size)
            while len(self._coming) > _COMING_FILES:
                self._coming.popitem(last=False)
            yield from page

    # -- content ---------------------------------------------------------------------------------
    def read(self, path: bytes, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            wanted = min(size, CHUNK_BYTES)
            found = self._content(self._call(Op.TREE_READ, (offset, wanted), (path,), wanted), wanted, offset)
            data = bytes(min(len(found), wanted)) if isinstance(found, Hole) else found
            parts.append(data)
            offset += len(data)
            size -= len(data)
            if not isinstance(found, Hole) and len(data) < wanted:
                break
        return b"".join(parts)

    def _content(self, reply: Reply, most: int, offset: int) -> Chunk:
        with self._checked():
            # (A helper of an earlier version, which an upgrade has joined, says nothing of holes.)
            hole = number_in(reply[0] or (0,), MAX_FILE_BYTES - offset)
            return Hole(hole) if hole else string_in(reply[1], most)

    def chunks(self, path: bytes, size: int = TREE_CHUNK_BYTES) -> Iterator[Chunk]:
        offset = 0
        while True:
            pending, wanted = self._start_of(path) if not offset else self._request(path, offset, CHUNK_BYTES)
            found = self._content(self._answer(pending), wanted, offset)
            offset += len(found)
            if isinstance(found, Hole):
                yield found
                continue
            for at in range(0, len(found), size):
                yield from sparse(found[at : at + size])
            if len(found) < wanted:
                return

    def _request(self, path: bytes, offset: int, size: int) -> tuple[Pending, int]:
        (pending,) = self._post((Op.TREE_READ, (offset, size), (path,), size))
        return pending, size

    def _start_of(self, path: bytes) -> tuple[Pending, int]:
        """The request for the start of a file; also requests the files that follow it in the walk."""
        if path not in self._ahead:
            if path not in self._coming:
                return self._request(path, 0, CHUNK_BYTES)
            # Drop the files before this one in the walk: they will not be read.
            self._ahead.clear()
            self._ahead_bytes = 0
            while next(iter(self._coming)) != path:
                self._coming.popitem(last=False)
        if self._ahead_bytes < _AHEAD_BYTES // 2:
            self._request_ahead()
        pending, wanted = self._ahead.pop(path)
        self._ahead_bytes -= wanted
        return pending, wanted

    def _request_ahead(self) -> None:
        wanted: list[tuple[bytes, int]] = []
        total = self._ahead_bytes
        while self._coming and total < _AHEAD_BYTES and len(self._ahead) + len(wanted) < _AHEAD_FILES:
            path, size = self._coming.popitem(last=False)
            # One byte more than its size, to see whether it has grown.
            size = min(size + 1, CHUNK_BYTES)
            wanted.append((path, size))
            total += size
        posted = self._post(*((Op.TREE_READ, (0, size), (path,), size) for path, size in wanted))
        for (path, size), pending in zip(wanted, posted, strict=True):
            self._ahead[path] = pending, size
        self._ahead_bytes = total


class _Order:
    """Checks the order of a walk of `root`: parents before children, siblings sorted, nothing twice.

    Also limits the entries of the directories that the walk is in, which the caller keeps, to `room` bytes.
    """

    def __init__(self, root: bytes, room: int) -> None:
        self._root = root
        self._room = room
        self._begun = False
        # The directories that the walk is in: path, last name yielded, and bytes of the names so far.
        self._inside: list[tuple[bytes, bytes, int]] = []

    def check(self, entry: TreeEntry) -> None:
        """Raise WireError if a correct walk would not yield `entry` next."""
        if not self._begun:
            if entry.path != self._root:
                raise WireError(f"a walk of {self._root!r} that begins with {entry.path!r}")
            self._begun = True
        else:
            above, _, name = entry.path.rpartition(b"/")
            while self._inside and self._inside[-1][0] != above:
                self._room += self._inside.pop()[2]
            if not self._inside:
                raise WireError(f"{entry.path!r} out of place")
            _, last, taken = self._inside[-1]
            _check_names([name], last)
            size = _EACH_BYTES + len(name)
            self._room -= size
            if self._room < 0:
                raise WireError(f"too many entries in {above!r}")
            self._inside[-1] = (above, name, taken + size)
        if stat.S_ISDIR(entry.mode):
            self._inside.append((entry.path, b"", 0))


def _check_names(names: list[bytes], after: bytes) -> None:
    for name in names:
        if not after < name or len(name) > NAME_MAX or b"/" in name or name in {b".", b".."}:
            raise WireError(f"name {name!r} after {after!r}")
        after = name
