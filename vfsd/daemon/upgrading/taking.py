"""The new daemon's side of an upgrade: take the state over, and serve when the old daemon does not any more.

Invariants:

1. Before `wait_go` returns, nothing that the old daemon uses is changed: neither the mount, the socket, the record nor
   the journal.  So a new daemon that fails just ends.
2. If memory runs out before that, the kernel ends this process, or the one that writes the image, and not the old
   daemon (`KilledFirst`).
3. `wait_go` returns only if the old daemon sent `Go`, or died with everything handed over and nobody to restart it.

Threading: the serving loop.  Worker threads read the image and the log; nothing else uses the volume meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import trio
from msgspec.structs import replace

from protocol.volume_durability import handed_over, recoverable
from protocol.volume_extensions import forkable
from vfsd.daemon.backends.persistence import ContinuedJournal, continue_journal
from vfsd.daemon.backends.registry import Backend, open_backend
from vfsd.daemon.forks.family import ForkFamily, total
from vfsd.daemon.forks.forks import Origin
from vfsd.daemon.keeper.keeping import RELEASED, Kept, shared_memory
from vfsd.daemon.opening import alone
from vfsd.daemon.resume import Resume, decoded
from vfsd.daemon.upgrading.messages import (
    Begin,
    Channel,
    Failed,
    Finish,
    Follow,
    Followed,
    Go,
    Loaded,
    OpenFiles,
    PeerEndedError,
    Prepared,
    Serving,
    TakeOverError,
)
from vfsd.machine.resources import KilledFirst
from vfsd.machine.runtime import process_start_ticks, socket_path
from vfsd.wire.options import Below, JournalOptions, MountOptions
from vfsd.wire.options import Failed as FailedStart
from vfsd.wire.sockets import BoundSocket

if TYPE_CHECKING:
    from protocol.volume_durability import HandedOverVolume, TakenState

_logger = logging.getLogger(__name__)


class Successor:
    """A workspace that this daemon takes over.  The descriptors of the image, if any, and the log came with `begin`."""

    def __init__(self, channel: Channel, begin: Begin, *descriptors: int) -> None:
        self._channel = channel
        self._begin = begin
        *image, self._log_fd = descriptors[:-1] if begin.has_anchor else descriptors
        self._anchor = descriptors[-1] if begin.has_anchor else None
        self._image_fd = image[0] if image else -1
        self._journal: ContinuedJournal | None = None
        self._keeper_memory: memoryview | None = None
        self._is_serving = False
        self._killed_first: KilledFirst | None = None
        self._table: int | None = None  # of the memory of its fork family
        self.device = -1  # of the mount
        self.resume = Resume()
        self.socket: BoundSocket | None = None
        self.family: ForkFamily | None = None

    @property
    def starter(self) -> int:
        """The process that started the first daemon of the workspace."""
        return self._begin.starter

    @property
    def version(self) -> str:
        """The version of the old daemon."""
        return self._begin.version

    @property
    def replaces(self) -> int:
        """The process of the old daemon."""
        return self._begin.pid

    @property
    def started_by(self) -> str:
        """How this daemon was started, for `vfsd status`."""
        return f"vfsd upgrade, from version {self.version}"

    # -- the state ---------------------------------------------------------------------------------
    async def open(self, options: MountOptions, kept: Kept | None) -> Backend:
        """Open the backend, and take the old daemon's state over; it pauses when this returns.

        `kept`: the keeper of this daemon.  TakeOverError, OSError, ValueError.
        """
        self._killed_first = KilledFirst()
        backend = await trio.to_thread.run_sync(open_backend, self._empty(options), _no_progress)
        if self._anchor is not None:
            os.close(self._anchor)
        try:
            volume, recovered = _handed_over(backend), recoverable(backend.volume)
            if kept is not None and recovered is not None:
                recovered.keep_log(kept.log, is_known=False)
            state = volume.taking_over()
            self._check_below(state, options.workspace.backend.argument)
            gc.disable()  # it would look at every object again and again
            try:
                finish = await self._read(options, state)
            finally:
                gc.freeze()  # before `enable`, which collects at once
                gc.enable()
            await trio.to_thread.run_sync(self._join_family, backend)
            if finish.journal is not None:
                self._journal = continue_journal(options, volume, finish.journal, finish.end)
        except BaseException:
            backend.close()
            raise
        return replace(backend, close=lambda: self._close(volume, backend), recovered=None)

    def _empty(self, options: MountOptions) -> MountOptions:
        """Return the options of an empty workspace: content comes from the old daemon, not an archive or a journal."""
        begin = self._begin
        content = replace(options.content, archive=None)
        below = Below(begin.below, begin.reopening) if begin.below else None
        return replace(
            options,
            journal=JournalOptions(),
            content=content,
            below=below,
            anchor=self._anchor,
            is_continued=True,
        )

    def _check_below(self, state: TakenState, argument: str) -> None:
        if state.below != self._begin.below:
            raise TakeOverError(f"cannot take over: {argument} is not what the workspace was mounted over any more")

    async def _read(self, options: MountOptions, state: TakenState) -> Finish:
        begin = self._begin
        await trio.to_thread.run_sync(state.read, self._image_fd, self._log_fd, begin.start)
        self._channel.send(Loaded())
        while True:
            message, descriptors = await self._channel.receive(msgspec.Struct)
            if isinstance(message, Follow):
                await trio.to_thread.run_sync(state.follow, message.end)
                self._channel.send(Followed())
            elif isinstance(message, OpenFiles):
                state.take_files(dict(zip(message.inodes, descriptors, strict=True)))
            elif isinstance(message, Finish):
                await trio.to_thread.run_sync(state.follow, message.end.offset)
                rest = self._handed_over(options, message, descriptors)
                await trio.to_thread.run_sync(state.complete, rest)
                return message
            else:
                raise TakeOverError(f"an unexpected message: {type(message).__name__}")

    def _handed_over(self, options: MountOptions, finish: Finish, descriptors: list[int]) -> bytes:
        """Take the descriptors of `finish`; return the rest of the state."""
        self.device, listener, rest_fd, resume_fd, *memory = descriptors
        self.resume = decoded(_read_all(resume_fd))
        self._table = memory.pop() if finish.has_family else None
        path = socket_path(options.workspace.name)
        self.socket = BoundSocket(path, socket.socket(fileno=listener), finish.socket_device, finish.socket_inode)
        if memory:
            _, self._keeper_memory = shared_memory(memory[0])
            os.close(memory[0])
        return _read_all(rest_fd)

    def _join_family(self, backend: Backend) -> None:
        if self._table is not None:
            volume = forkable(backend.volume)
            assert volume is not None, "it has forks"
            self.family = ForkFamily(self.resume.family_limit, total(volume.usage()), self._table)
            self.family.bases.update(self.resume.family_bases)
            with alone():
                self.family.join_alone()

    def origin(self, backend: Backend) -> Origin | None:
        """Return what the workspace comes from, if it is a fork."""
        if self.resume.source is None:
            return None
        return Origin(self.resume, backend, self.family, source_pid=0)  # the source's record says whether it runs

    def _close(self, volume: HandedOverVolume, backend: Backend) -> None:
        if self._journal is not None:
            if self._is_serving:
                self._journal.end()
            else:
                volume.discard_journal()
        backend.close()

    # -- the change of daemons ---------------------------------------------------------------------
    async def wait_go(self, kept: Kept | None) -> None:
        """Return when this daemon, whose keeper is `kept`, is to serve.  TakeOverError if the old one goes on."""
        lock_fd = None
        try:
            prepared = Prepared(os.getpid(), os.getpid() if kept is None else kept.pid)
            self._channel.send(prepared, [] if kept is None else [kept.memory_fd])
            _, descriptors = await self._channel.receive(Go)
            lock_fd = descriptors[0] if descriptors else None
        except PeerEndedError:
            if self._is_restarted:
                raise TakeOverError("the old daemon died, and its keeper restarts it") from None
            _logger.warning("the old daemon died during the upgrade; this one serves", extra={"operation": "upgrade"})
        self._is_serving = True
        if self._killed_first is not None:
            self._killed_first.end()
        if self._journal is not None:
            await self._journal.begin(lock_fd)

    @property
    def _is_restarted(self) -> bool:
        """Whether the keeper of the old daemon, which died, restarts it."""
        begin, memory = self._begin, self._keeper_memory
        if not begin.keeper or memory is None or memory[RELEASED]:
            return False
        return process_start_ticks(begin.keeper) == begin.keeper_start_ticks

    def close(self) -> None:
        """Close what belongs to the daemon, in its keeper."""
        self._channel.close()
        for each in (self._image_fd, self._log_fd, self._anchor):
            if each is not None and each >= 0:
                os.close(each)

    def serving(self) -> None:
        """Tell the old daemon that this one serves."""
        with contextlib.suppress(PeerEndedError):
            self._channel.send(Serving())
        self._channel.close()

    def failed(self, error: BaseException) -> None:
        """Tell the old daemon why this one does not take over."""
        with contextlib.suppress(PeerEndedError, OSError):
            self._channel.send(Failed(f"cannot take over: {FailedStart.of(error).message}"))


def _read_all(descriptor: int) -> bytes:
    """Return the content of a file in memory, and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _handed_over(backend: Backend) -> HandedOverVolume:
    volume = handed_over(backend.volume)
    if volume is None:
        raise TakeOverError("cannot take over a workspace with this backend")
    return volume


def _no_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass
