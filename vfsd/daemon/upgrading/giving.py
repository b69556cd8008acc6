"""The old daemon's side of an upgrade: start the new one, hand the workspace over, and end.

Invariants:

1. The old daemon answers requests until the new one has loaded the state and lacks little; then it pauses.
2. Whatever fails before `Go` is sent, the old daemon goes on, and nothing in it has changed.
3. After `Go` it goes on only if the new daemon is gone, and no keeper restarts that (see `messages`).
4. While the upgrade runs no other call changes the workspace (`change_lock`), and the journal is not compacted.  Calls
   that come to change it wait; at the pause their clients are asked to call again, and reach the new daemon.

Threading: the serving loop.  `handing_over` and the fork of the image's writer are one step.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import trio
from msgspec.structs import replace

import vfsd
from protocol.linux import credentials
from protocol.volume_durability import HandedOverVolume, handed_over, journaled
from protocol.volume_extensions import forkable
from vfsd.daemon.attached import needs_mount
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.forks.process import check_memory, fork_writer
from vfsd.daemon.keeper.keeping import KEEPS, shared_memory
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.resume import FORMAT, Resume, encoded
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.daemon.upgrading import messages
from vfsd.daemon.upgrading.messages import (
    Begin,
    Channel,
    Finish,
    Follow,
    Followed,
    Go,
    Hello,
    Loaded,
    OpenFiles,
    PeerEndedError,
    Prepared,
    Serving,
    TakeOverError,
)
from vfsd.kernel.engines.base import ResumableEngine
from vfsd.machine import interpreter
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.workspace import UpgradeParams, UpgradeResult
from vfsd.wire.messages import from_wire_path
from vfsd.wire.options import encode_options

if TYPE_CHECKING:
    from protocol.volume_durability import GivenState
    from vfsd.daemon.daemon import Daemon
    from vfsd.daemon.exec.commands import Commands

_logger = logging.getLogger(__name__)
_START_S: Final = 60.0
_LOAD_S: Final = 600.0
_CALLS_S: Final = 10.0  # how long running calls may take to end
_QUIET_S: Final = 2.0  # the same, once new calls wait
_PAUSE_S: Final = 10.0  # the longest pause; then the old daemon goes on
_POLL_S: Final = 0.01
_LITTLE_BYTES: Final = 32 << 10  # of the log, which the new daemon reads in a few milliseconds
_ROUNDS: Final = 200  # of catching up; then the pause begins, however much is missing


class Upgrade:
    """The method `upgrade` of one workspace."""

    def __init__(
        self, daemon: Daemon, mounted: MountedVolume, snapshots: SnapshotService | None, commands: Commands
    ) -> None:
        self._daemon = daemon
        self._mounted = mounted
        self._snapshots = snapshots
        self._commands = commands
        self._ended: trio.Event | None = None  # while an upgrade runs

    async def upgrade(self, params: UpgradeParams, call: CallContext) -> UpgradeResult:
        """Hand the workspace over to a new daemon of the version that `params` names; then end.

        While another upgrade runs, wait: if it succeeds, the client is asked to call again, and gets the answer of the
        new daemon.  OSError if an upgrade is not possible; the daemon then serves on.
        """
        while self._ended is not None:
            await self._ended.wait()
        daemon, own = self._daemon, os.getpid()
        if params.instead_of not in (0, own) and daemon.upgraded_from is not None:
            name = daemon.options.workspace.name
            return UpgradeResult(name, daemon.upgraded_from, vfsd.__version__, own, 0.0, meanwhile=True)
        volume, engine = self._checked()
        self._ended = ended = trio.Event()
        try:
            await self._wait_for_calls(call)
            async with self._alone():
                return await self._hand_over(volume, engine, params, call)
        except (TakeOverError, PeerEndedError, TimeoutError) as error:
            reason = f"the new daemon {error.strerror or error}; the old one, of version {vfsd.__version__}, serves on"
            raise OSError(errno.EIO, reason) from None
        finally:
            self._ended = None
            ended.set()

    # -- what can be upgraded ----------------------------------------------------------------------
    def _checked(self) -> tuple[HandedOverVolume, ResumableEngine]:
        """Return volume and engine.  OSError with a reason if this workspace cannot be upgraded."""
        daemon = self._daemon
        volume, engine = handed_over(self._mounted.volume), daemon.engine
        kind = daemon.options.workspace.backend.kind
        again = "unmount it and mount it again"
        if daemon.options.is_attached:
            raise needs_mount(
                "an upgrade in place", "`vfsd unmount` it and `vfsd attach` it again, which loses nothing"
            )
        if volume is None:
            raise _unsupported(f"a workspace with the backend {kind} cannot be upgraded while programs use it: {again}")
        if not isinstance(engine, ResumableEngine):
            raise _unsupported(f"the engine {engine.name} cannot hand a mount over: {again}")
        family, shared = daemon.forks.family_to_give, forkable(self._mounted.volume)
        if family is not None and shared is not None:
            family.check_upgrade(shared.usage())
        if daemon.is_foreground and not os.environ.get("NOTIFY_SOCKET"):
            raise _unsupported(
                "the daemon runs with --foreground, and the program that started it would see it end: end it and"
                " start it again"
            )
        if self._commands.has_sandbox:
            raise _unsupported(f"the sandbox of this workspace would lose what is not in the workspace: {again}")
        journal = journaled(self._mounted.volume)
        failure = None if journal is None else journal.journal_status().failure
        if failure is not None:
            raise OSError(errno.EIO, f"the journal cannot be continued ({failure}): export the content")
        check_memory("the new daemon needs as much memory as this one")
        return volume, engine

    async def _wait_for_calls(self, call: CallContext) -> None:
        """Wait until no other call runs.  EBUSY if one runs on."""
        running: list[str] = []
        with trio.move_on_after(_CALLS_S):
            while running := self._daemon.server.running(call):
                if any(OPERATIONS[method].runs_command for method in running):
                    break
                await trio.sleep(_POLL_S)
        if running:
            raise _busy(running)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Exclude other changes of the workspace."""
        locks = (self._mounted.compaction_lock, self._mounted.change_lock)
        async with contextlib.AsyncExitStack() as stack:
            with trio.move_on_after(_CALLS_S) as waiting:
                for lock in locks:
                    await stack.enter_async_context(lock)
            if waiting.cancelled_caught:
                raise OSError(errno.EBUSY, "the workspace is being changed, or its journal compacted: try again")
            yield

    # -- the steps ---------------------------------------------------------------------------------
    async def _hand_over(
        self, volume: HandedOverVolume, engine: ResumableEngine, params: UpgradeParams, call: CallContext
    ) -> UpgradeResult:
        new = await trio.to_thread.run_sync(NewDaemon.start, params, self._daemon.options.workspace.name)
        given: GivenState | None = None
        is_over = False
        try:
            hello = await new.receive(Hello, _START_S)
            _check_version(hello)
            given = volume.handing_over()
            self._begin(new, volume, given)
            await new.receive(Loaded, _LOAD_S)
            await self._catch_up(new, given)
            await self._let_calls_end(call)
            await self._mounted.wait_unused()
            await self._catch_up(new, given)
            began = time.perf_counter()
            await self._pause(engine)
            successor = await self._finish(new, given, engine)
            call.commit()
            with trio.CancelScope(shield=True):
                is_over = await self._go(new, given)
                if not is_over:
                    raise TakeOverError("died before it served")
            pause_ms = (time.perf_counter() - began) * 1000
        finally:
            if not is_over:
                with trio.CancelScope(shield=True):
                    await new.end()
                    if given is not None:
                        given.end()
                engine.go_on()
                self._daemon.server.go_on()
        return self._end(new, volume, hello, successor, pause_ms, call)

    def _begin(self, new: NewDaemon, volume: HandedOverVolume, given: GivenState) -> None:
        """Fork the writer of the image, if there is one, and send what it writes and the log to the new daemon."""
        descriptors = [given.log_fd()]
        try:
            if given.has_image:
                descriptors[:0] = self._start_image(new, volume, given)
            daemon, backend, kept = self._daemon, self._daemon.backend, self._daemon.kept
            if backend.anchor is not None:
                descriptors.append(os.dup(backend.anchor))
            begin = Begin(
                vfsd.__version__,
                encode_options(daemon.options).decode(),
                given.start,
                kept.pid if kept is not None and kept.is_kept else 0,
                kept.start_ticks if kept is not None else 0,
                daemon.starter,
                below=given.below,
                reopening=backend.reopening,
                has_anchor=backend.anchor is not None,
                pid=os.getpid(),
                credentials=credentials.hidden(),
            )
            new.channel.send(begin, descriptors)
        finally:
            for each in descriptors:
                os.close(each)

    def _start_image(self, new: NewDaemon, volume: HandedOverVolume, given: GivenState) -> list[int]:
        """Fork the writer of the image; return the end of a pipe that has what it writes."""
        forked = forkable(volume)
        assert forked is not None, "the volume has an image"
        read_fd, write_fd = os.pipe()
        try:
            write = functools.partial(given.write_image, write_fd)
            new.writer = fork_writer(forked, write, self._mounted.mountpoint, kept={write_fd})
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return [read_fd]

    async def _catch_up(self, new: NewDaemon, given: GivenState) -> None:
        """Have the new daemon read the log, until little is missing."""
        for _ in range(_ROUNDS):
            position = given.position()
            new.channel.send(Follow(position.offset))
            await new.receive(Followed, _LOAD_S)
            if given.position().offset - position.offset < _LITTLE_BYTES:
                return

    async def _let_calls_end(self, call: CallContext) -> None:
        server = self._daemon.server
        with trio.move_on_after(_QUIET_S) as waiting:
            await server.pause(call, self._waits_for_the_end)
        if waiting.cancelled_caught:
            raise _busy(server.running(call))

    def _waits_for_the_end(self, call: CallContext) -> bool:
        """Whether `call` waits to change the workspace, which it can do only when the upgrade has ended."""
        return call.task is not None and self._mounted.change_lock.is_awaited_by(call.task)

    async def _pause(self, engine: ResumableEngine) -> None:
        with trio.move_on_after(_PAUSE_S) as waiting:
            await engine.pause()
        if waiting.cancelled_caught:
            raise OSError(errno.EBUSY, f"a request of a program takes more than {_PAUSE_S:g} s: try again")

    async def _finish(self, new: NewDaemon, given: GivenState, engine: ResumableEngine) -> int:
        """Send the rest, and return the process id of the new daemon, which could serve then."""
        daemon, bound = self._daemon, self._daemon.server.bound
        journal = journaled(self._mounted.volume)
        negotiated, device = engine.negotiated(), engine.descriptor
        if negotiated is None or device is None or bound is None:
            raise OSError(errno.ENOTCONN, "the workspace was unmounted")
        files = iter(given.files())
        while part := list(islice(files, messages.MAX_DESCRIPTORS)):
            await new.channel.send_when_ready(OpenFiles([number for number, _ in part]), [each for _, each in part])
        own: list[int] = []
        try:
            own.append(_in_memory(given.rest()))
            resume = await self._resume(negotiated.decode(), is_journaled=journal is not None)
            own.append(_in_memory(encoded(resume)))
            family = daemon.forks.family_to_give
            directory = None if journal is None else journal.journal_status().directory
            finish = Finish(given.position(), bound.device, bound.inode, directory, family is not None)
            descriptors = [device, bound.sock.fileno(), *own]
            if daemon.kept is not None and daemon.kept.is_kept:
                descriptors.append(daemon.kept.memory_fd)
            if family is not None:
                descriptors.append(family.table)
            new.channel.send(finish, descriptors)
        finally:
            for each in own:
                os.close(each)
        return await new.prepared(_PAUSE_S)

    async def _resume(self, negotiated: str, *, is_journaled: bool) -> Resume:
        """Return what the new daemon finds neither in the volume's state nor in its journal."""
        daemon, snapshots, forks = self._daemon, self._snapshots, self._daemon.forks
        family = forks.family_to_give
        resume = Resume(
            negotiated=negotiated,
            labels=tuple(daemon.audit.labels),
            history=None if snapshots is None else await snapshots.history(),
            instance=forks.instance,
            kept_bases=forks.kept_bases,
            forks_made=forks.count,
        )
        if snapshots is not None and not is_journaled:
            merges, pruned = snapshots.merges.encoded().decode(), tuple(snapshots.pruned_records())
            resume = replace(resume, merges=merges, pruned=pruned)
        if family is not None:
            resume = replace(resume, family_limit=family.limit, family_bases=tuple(sorted(family.bases)))
        if forks.base is not None:
            source, base = forks.ancestors[-1].name, forks.base.name
            resume = replace(resume, source=source, base=base, ancestors=forks.ancestors, twin=forks.twin)
        return resume

    async def _go(self, new: NewDaemon, given: GivenState) -> bool:
        """Send Go; return whether the new daemon serves, or its keeper restarts it."""
        kept = self._daemon.kept
        if kept is not None:
            kept.release(new.main)
        try:
            new.channel.send(Go(), [] if given.lock_fd is None else [given.lock_fd])
            is_over = await new.is_serving()
        except PeerEndedError:
            is_over = await new.is_restarted()
        if not is_over:
            if kept is not None:
                kept.release(0)
            self._daemon.write_record()
        return is_over

    def _end(
        self,
        new: NewDaemon,
        volume: HandedOverVolume,
        hello: Hello,
        successor: int,
        pause_ms: float,
        call: CallContext,
    ) -> UpgradeResult:
        """Give the workspace up, and end once the call is answered."""
        name = self._daemon.options.workspace.name
        self._daemon.server.hand_over()
        volume.discard_journal()  # and its lock
        _logger.info(
            "handed the workspace over to process %d, of version %s: requests waited for %.0f ms",
            successor, hello.version, pause_ms, extra={"operation": "upgrade"},
        )  # fmt: skip
        call.after_answer(functools.partial(self._daemon.leave, new.main))
        return UpgradeResult(name, vfsd.__version__, hello.version, successor, round(pause_ms, 1))


def _in_memory(data: bytes) -> int:
    """Return a descriptor of a file in memory with `data`."""
    descriptor = os.memfd_create("vfsd-handover")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_version(hello: Hello) -> None:
    """OSError (EPROTONOSUPPORT) if the new daemon cannot take over from this version."""
    if hello.format == FORMAT:
        return
    which = "older" if hello.format < FORMAT else "newer"
    raise OSError(
        errno.EPROTONOSUPPORT,
        f"version {hello.version} is too much {which} than the daemon's, {vfsd.__version__}, to take over from it"
        f" (handover format {FORMAT}, it takes {hello.format}): unmount the workspace with the old version, or export"
        " it, and mount it with the new one",
    )


def _unsupported(reason: str) -> OSError:
    return OSError(errno.EOPNOTSUPP, reason)


def _busy(running: list[str]) -> OSError:
    commands = sum(OPERATIONS[method].runs_command for method in running)
    if commands:
        what = "a command of `vfsd exec` runs" if commands == 1 else f"{commands} commands of `vfsd exec` run"
        return OSError(errno.EBUSY, f"{what}, and would be ended: wait for the end, or end it")
    return OSError(errno.EBUSY, f"calls run that would be interrupted ({', '.join(sorted(set(running)))}): try again")


M = TypeVar("M", bound=msgspec.Struct)
_MODULE: Final = "vfsd.daemon.upgrading"
_SERVE_S: Final = 30.0  # from Go to Serving, before a new daemon that hangs is killed


class NewDaemon:
    """The process that is to take over, and the one that writes the image for it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self.channel = channel
        self.writer: tuple[int, list[int]] | None = None
        self._keeper_memory: memoryview | None = None
        self._pidfd = -1
        self.main = 0  # the process of its keeper, if it has one, or its own, once it is prepared

    @classmethod
    def start(cls, params: UpgradeParams, name: str) -> NewDaemon:
        """Start the interpreter that `params` names.  Any thread.  OSError."""
        executable = os.fsdecode(from_wire_path(params.executable))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = interpreter.environment(os.environ)
        environment.pop("PYTHONPATH", None)
        if params.import_paths:
            paths = [os.fsdecode(from_wire_path(path)) for path in params.import_paths]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        if environment.get("WATCHDOG_PID") in {str(os.getpid()), str(os.getppid())}:
            del environment["WATCHDOG_PID"]  # the new daemon, or its keeper, feeds the watchdog
        with theirs:
            try:
                process = subprocess.Popen(
                    [executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    start_new_session=True,
                    env=environment,
                )
            except OSError as error:
                ours.close()
                reason = f"{executable} cannot be started ({error.strerror}), so {name} was not upgraded"
                raise OSError(error.errno, reason) from None
        return cls(process, Channel(ours))

    async def receive(self, kind: type[M], timeout_s: float) -> M:
        """Return its next message.  TakeOverError if it fails or dies, TimeoutError."""
        return (await self._receive(kind, timeout_s))[0]

    async def _receive(self, kind: type[M], timeout_s: float) -> tuple[M, list[int]]:
        try:
            with trio.move_on_after(timeout_s):
                return await self.channel.receive(kind)
        except PeerEndedError:
            raise TakeOverError(await self._how_it_ended()) from None
        except ValueError as error:
            raise TakeOverError(f"sent something that cannot be read: {error}") from None
        raise TimeoutError(errno.ETIMEDOUT, f"did not answer within {timeout_s:g} s")

    async def prepared(self, timeout_s: float) -> int:
        """Return its process id when it could serve.  Errors as for `receive`."""
        message, descriptors = await self._receive(Prepared, timeout_s)
        self._pidfd = os.pidfd_open(message.pid)
        self.main = message.main
        if descriptors:
            descriptor, self._keeper_memory = shared_memory(descriptors[0])
            os.close(descriptor)
        return message.pid

    async def is_serving(self) -> bool:
        """Wait until it serves; if it ended before, return whether its keeper restarts it.

        The next daemon needs the lock of the journal, which this one has: so nothing waits here to learn how it ended.
        """
        try:
            with trio.fail_after(_SERVE_S):
                await self.channel.receive(Serving)
        except (TakeOverError, PeerEndedError, ValueError, trio.TooSlowError) as error:
            reason = str(error) or type(error).__name__
            _logger.warning("the new daemon did not serve: %s", reason, extra={"operation": "upgrade"})
            return await self.is_restarted()
        return True

    async def is_restarted(self) -> bool:
        """Return whether its keeper restarts it; it has ended, or is killed.

        Its keeper ends with it, or says in its memory that it keeps the mount.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        while self._process.poll() is None:
            if self._keeper_memory is not None and self._keeper_memory[KEEPS]:
                return True
            await trio.sleep(_POLL_S)
        return False

    async def _how_it_ended(self) -> str:
        with trio.move_on_after(1):
            while self._process.poll() is None:
                await trio.sleep(_POLL_S)
        status = self._process.poll()
        if status is None:
            return "closed its connection"
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        return f"died before it could serve ({how}; the log of the workspace may say more)"

    async def end(self) -> None:
        """End the processes, if they run, and release what belongs to them."""
        with contextlib.suppress(PeerEndedError):
            self.channel.send(messages.Abort())
        self.channel.close()
        self._process.kill()
        # Its child ends with it, or when it finds the channel closed; it does nothing before Go.
        await trio.to_thread.run_sync(self._process.wait)
        await self._end_writer()

    async def _end_writer(self) -> None:
        if self.writer is None:
            return
        pid, pidfds = self.writer
        self.writer = None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfds[0])
        os.waitpid(pid, 0)
        for each in pidfds:
            os.close(each)
