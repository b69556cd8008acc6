"""The other workspace of a merge: which states both have, and its changes, received and ready to read.

The content of the changes is in an unnamed file.  For a workspace in memory the file is in memory, and it is charged to
the memory limit, as is what is known of each path.  For others the file is in the store.  Everything is checked against
its hash before it is used.

`call_peer` calls the daemon of another workspace over its control socket.  Only a daemon of the same user is called.
Each call has a connection of its own; a cancelled call closes it, which cancels it on the other side too.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
import trio

from protocol.tree import Tree
from protocol.values import Value
from protocol.volume import Volume
from protocol.volume_extensions import snapshotable
from vfsd.daemon.merging.delta import Buffer, Delta, DeltaReader, buffer_in_memory, buffer_on_disk
from vfsd.daemon.merging.lineage import Bases, MergeLog, find_bases
from vfsd.daemon.merging.trees import EmptyTree, LayeredTree
from vfsd.daemon.snapshots.base import in_thread
from vfsd.operations.declaration import Empty, Peer
from vfsd.operations.forks import ChangesParams, ChangesResult, DropMergedParams, Lineage, StateId
from vfsd.wire.messages import ATTEMPTS, RECEIVE_BYTES, ClosingError, ControlError, Exchange, LineBuffer, from_wire_path
from vfsd.wire.sockets import connect, peer_credentials

_DROP_S: Final = 5.0


class Other(Value):
    """The other workspace, and the lineages of both.

    `base` is the tree of the base of the merge, and `theirs` that of the other workspace's present state, which it
    keeps as the snapshot `state` if this was asked for.  Without a common state, `bases` is None and `base` is empty.
    """

    here: Lineage
    lineage: Lineage
    bases: Bases | None
    base: Tree
    theirs: Tree
    state: StateId | None


class OtherWorkspaces:
    """Fetches the changes of other workspaces for the one with `volume`.

    `lineage` returns the lineage of that workspace, and `tree` opens one of its states.  `directory` returns where the
    content of changes is kept that a volume outside memory receives.
    """

    def __init__(
        self,
        volume: Volume,
        lineage: Callable[[], Awaitable[Lineage]],
        tree: Callable[[StateId], AbstractAsyncContextManager[Tree]],
        directory: Callable[[], str],
    ) -> None:
        self._volume = volume
        self._lineage = lineage
        self._tree = tree
        self._directory = directory

    @asynccontextmanager
    async def opened(
        self, peer: Peer, *, merges: MergeLog | None = None, needs_base: bool = True
    ) -> AsyncIterator[Other]:
        """Fetch the changes of `peer`, for the length of the block.  Serving loop.

        With `merges`, what was merged before, that workspace keeps the state that it sent, for the next merge.  If the
        block raises, it drops it.  Without `needs_base`, all of `peer` is fetched if there is no common state.
        """
        here = await self._lineage()
        other = await call_peer(peer, "lineage", Empty())
        try:
            bases = find_bases(here, other)
        except OSError:
            if needs_base or here.instance == other.instance:
                raise
            async with AsyncExitStack() as stack:
                yield await self._whole(peer, here, other, stack)
            return
        async with AsyncExitStack() as stack:
            buffer = self._buffer(stack)
            params = ChangesParams(
                fork_point=bases.fork_point,
                base=bases.base.state if bases.base.of_other else None,
                max_bytes=buffer.free_bytes,
                merge_into=None if merges is None else here.name,
                keep=[] if merges is None else list(merges.serials_of(other.instance)),
            )
            fork_point = await stack.enter_async_context(self._tree(bases.fork_point))
            deltas = _Deltas(1 + bases.base.of_other, buffer)
            try:
                result: ChangesResult = await call_peer(peer, "changes", params, deltas.feed)
                base = theirs = LayeredTree(fork_point)
                *older, newest = deltas.finish()
                for delta in older:
                    base = theirs = await in_thread(LayeredTree, theirs, delta, buffer.read)
                theirs = await in_thread(LayeredTree, theirs, newest, buffer.read)
                if not bases.base.of_other and bases.base.state != bases.fork_point:
                    base = LayeredTree(await stack.enter_async_context(self._tree(bases.base.state)))
                yield Other(here, other, bases, base, theirs, result.state)
            except BaseException:
                if merges is not None:
                    await _have_dropped(peer, here.name, params.keep)
                raise

    async def _whole(self, peer: Peer, here: Lineage, other: Lineage, stack: AsyncExitStack) -> Other:
        buffer = self._buffer(stack)
        deltas = _Deltas(1, buffer)
        await call_peer(peer, "changes", ChangesParams(max_bytes=buffer.free_bytes), deltas.feed)
        nothing = LayeredTree(EmptyTree())
        theirs = await in_thread(LayeredTree, nothing, deltas.finish()[0], buffer.read)
        return Other(here, other, None, nothing, theirs, None)

    def _buffer(self, stack: AsyncExitStack) -> Buffer:
        if snapshotable(self._volume) is None:
            return buffer_on_disk(self._directory(), stack)
        return buffer_in_memory(self._volume, stack)


class _Deltas:
    """Reads `count` deltas that arrive one after the other."""

    def __init__(self, count: int, buffer: Buffer) -> None:
        self._readers = [DeltaReader(buffer.store, buffer.reserve) for _ in range(count)]
        self._at = 0

    def feed(self, piece: bytes) -> None:
        while piece and self._at < len(self._readers):
            piece = self._readers[self._at].feed(piece)
            if self._readers[self._at].is_complete:
                self._at += 1

    def finish(self) -> list[Delta]:
        return [reader.finish() for reader in self._readers]


async def _have_dropped(peer: Peer, target: str, keep: list[int]) -> None:
    """Have `peer` drop a state that was not merged after all.  If it cannot, it does so before the next merge."""
    with trio.move_on_after(_DROP_S, shield=True), contextlib.suppress(OSError):
        await call_peer(peer, "drop_merged", DropMergedParams(target=target, keep=keep))


_SILENCE_S: Final = 60.0  # without any message; the other daemon reports progress several times a second


async def call_peer(
    peer: Peer, method: str, params: msgspec.Struct, on_output: Callable[[bytes], None] = lambda _: None
) -> Any:
    """Call `method` of `peer` and return its result.

    OSError: the error that the other daemon answered; ECONNREFUSED if it does not run, EPERM if it belongs to another
    user, ECONNRESET if it ended meanwhile, ETIMEDOUT if it is silent.
    """
    for _ in range(ATTEMPTS):
        exchange = Exchange(1, method, params, on_output=on_output)
        with _connected(peer) as sock:
            try:
                return await _answer(sock, exchange, peer)
            except ControlError as error:
                raise OSError(error.errno or errno.EIO, f"workspace {peer.name!r}: {error}") from None
            except ClosingError:
                continue
            except (ConnectionError, trio.BrokenResourceError):
                break
    raise _ended(peer)


def _connected(peer: Peer) -> trio.socket.SocketType:
    try:
        sock = connect(os.fsdecode(from_wire_path(peer.socket)), 0)
    except (ConnectionRefusedError, FileNotFoundError):
        raise OSError(errno.ECONNREFUSED, f"workspace {peer.name!r} is not running; nothing was changed") from None
    if peer_credentials(sock).uid != os.geteuid():
        sock.close()
        raise OSError(errno.EPERM, f"workspace {peer.name!r} belongs to another user, whose changes cannot be merged")
    sock.setblocking(False)
    return trio.socket.from_stdlib_socket(sock)


async def _answer(sock: trio.socket.SocketType, exchange: Exchange, peer: Peer) -> Any:
    left = memoryview(exchange.request)
    while left:
        left = left[await sock.send(left) :]
    lines = LineBuffer()
    while not exchange.done:
        while (line := lines.next_line()) is None:
            with trio.move_on_after(_SILENCE_S) as waiting:
                data = await sock.recv(RECEIVE_BYTES)
            if waiting.cancelled_caught:
                text = f"the daemon of workspace {peer.name!r} does not answer; nothing was changed"
                raise TimeoutError(errno.ETIMEDOUT, text)
            if not data:
                raise _ended(peer)
            lines.feed(data)
        exchange.take(line)
    return exchange.result


def _ended(peer: Peer) -> OSError:
    return OSError(errno.ECONNRESET, f"the daemon of workspace {peer.name!r} ended; nothing was changed")
