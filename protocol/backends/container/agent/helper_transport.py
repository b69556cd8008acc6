"""HelperTransport: a directory anywhere, through a helper that a subclass starts there.

Ids: a root daemon shows those of the other end.  For another daemon its own user is the helper's, and vice versa.  So
an unprivileged user owns the files that the helper's user owns: with rootless Podman, those of the container's root.

A helper outlives its daemon if that has a keeper: it holds for HOLD_S when its stream ends, so that the next daemon
can join it over a stream of its own (`protocol.backends.container.helper.sessions`).  Without a keeper it ends with its
stream, but another daemon can join it in an upgrade.  If the stream is cut under a living daemon, that daemon joins the
helper again, and starts a new one only if the helper has ended or does not answer.

vfsd sends the helper's sources over the stream on which the helper then serves.  In a container the command is `python3
-I -S -c LOADER`, which reads a program of known length from standard input.  The program creates the modules and calls
`main`.  So nothing is installed in the image, and nothing is left there.  A relay to a helper that runs already
(`protocol.backends.container.helper.sessions`) is started in the same way.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio
from msgspec.structs import replace

from protocol.backends.container.agent.link import AgentLink, HelperEndedError
from protocol.backends.container.agent.replies import KnownInode, known_in, number_in, string_in
from protocol.backends.container.agent.tree import AgentTree
from protocol.backends.container.agent.volume import AgentVolume, HeldHelper, load_helper, save_helper
from protocol.backends.container.helper.wire import CHUNK_BYTES, MAGIC, RELAY_MAGIC, VERSION, Op, WireError
from protocol.backends.container.inode_map import IDENTITY, IdMap, swapped
from protocol.errors import only_error, os_error

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog

_logger = logging.getLogger(__name__)
S = TypeVar("S")
_WATCH_S: Final = 0.1
HOLD_S: Final = 300
_MOST_REJOINS: Final = 3  # in a row, in which the helper was there and was lost again at once
_REJOINED_S: Final = 20.0  # for the first answer of a helper that was joined again


class HelperTransport(ABC, Generic[S]):
    """Implements `protocol.backends.container.connection.Transport`, except for starting the helper.

    `place` says where the helper runs, for messages: " in it".  `program` is the helper's.
    """

    name: Final = "agent"
    run: Final = "of a helper"
    keeps_numbers: Final = True

    def __init__(self, program: bytes, *, place: str = "", read_only: bool = False) -> None:
        self.supports_acl = False
        self._program = program
        self._place = place
        self._read_only = read_only
        self._log: SharedLog | None = None
        self._is_resumed = False  # the log is of a dead daemon, whose helper `open` joins
        self._taken: tuple[AgentVolume, HeldHelper] | None = None  # in an upgrade: what `open` joins
        self._held: HeldHelper | None = None  # the helper of the last `open`, if it can be joined
        self._rejoins = 0  # how often the next `open` calls may try to join it again
        self.is_left: Callable[[], bool] = lambda: False
        self._link: AgentLink | None = None
        self._ids = IDENTITY
        self._ended = trio.Event()
        self._serving = trio.CancelScope()

    @abstractmethod
    def _started(self, state: S, program: bytes, magic: bytes) -> AbstractAsyncContextManager[AgentLink]:
        """Start a program, whose output begins with `magic`, for the length of a block.  OSError with advice."""

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """See `Transport`."""
        self._log, self._is_resumed = log, is_known

    def prepare(self, state: S) -> AgentVolume:  # noqa: ARG002 (`open` joins the helper)
        """See `Transport`: the volume has no helper yet, which the predecessor names."""
        volume = self._volume()

        def take(held: HeldHelper) -> None:
            self._taken = volume, held

        volume.on_taken = take
        return volume

    def _volume(self) -> AgentVolume:
        return AgentVolume(read_only=self._read_only, supports_acl=self.supports_acl)

    def probe(self, state: S, keep_going: Callable[[], None] = lambda: None) -> None:
        """Raise OSError with advice if this transport cannot reach the directory; blocks, for a worker thread.

        `keep_going` is called all the time; an exception from it ends the attempt, and is raised.
        """
        stopped: list[BaseException] = []

        async def watch(scope: trio.CancelScope) -> None:
            while not stopped:
                try:
                    keep_going()
                except BaseException as error:  # noqa: BLE001 (raised below: it may be of another loop)
                    stopped.append(error)
                    scope.cancel()
                await trio.sleep(_WATCH_S)

        async def start_once() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                async with self._started(state, self._program, MAGIC) as link:
                    ids, _, has_acls = _met(await _hello(link))
                    self.supports_acl = has_acls and ids.is_identity
                nursery.cancel_scope.cancel()

        try:
            trio.run(start_once)
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        if stopped:
            raise stopped[0]

    async def open(self, state: S, nursery: trio.Nursery) -> AgentVolume:
        """See `Transport`."""
        if self._taken is not None:
            (volume, held), self._taken = self._taken, None
            link = await self._joined(state, nursery, held)
            if self._log is not None:
                save_helper(self._log, held)
        elif self._is_resumed and self._log is not None:
            volume, held = self._volume(), load_helper(self._log)
            held.check()
            link = await self._joined(state, nursery, held)
            held = replace(held, hello=await _hello(link))
            volume.known = await _known(link)
            self._is_resumed = False
        else:
            volume = self._volume()
            rejoined = await self._rejoined(state, nursery, volume)
            link, held = rejoined or await self._new(state, nursery)
        self._ids, user, _ = _met(held.hello)
        self._held = held if held.name else None
        self._rejoins = _MOST_REJOINS
        link.executes_once = link.holds = self._log is not None and self._held is not None
        volume.serve(link, self._ids, user, self._held)
        return volume

    @property
    def _hold_s(self) -> int:
        return 0 if self._log is None else HOLD_S

    async def _joined(self, state: S, nursery: trio.Nursery, held: HeldHelper) -> AgentLink:
        """A link to a helper that the predecessor has started, which serves it from the first request on."""
        try:
            return await self._relayed(state, nursery, held)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"the helper{self._place} cannot be continued: {reason}") from None

    async def _relayed(self, state: S, nursery: trio.Nursery, held: HeldHelper) -> AgentLink:
        link = await self._begun(state, nursery, relay_program(held.name, held.secret, self._hold_s), RELAY_MAGIC)
        link.join()
        return link

    async def _begun(self, state: S, nursery: trio.Nursery, program: bytes, magic: bytes) -> AgentLink:
        self._ended, self._serving = trio.Event(), trio.CancelScope()
        link: AgentLink = await nursery.start(self._serve, state, program, magic)
        link.is_left = self.is_left
        self._link = link
        return link

    async def _new(self, state: S, nursery: trio.Nursery) -> tuple[AgentLink, HeldHelper]:
        """Start a helper."""
        link = await self._begun(state, nursery, self._program, MAGIC)
        return link, await self._hold(link)

    async def _rejoined(
        self, state: S, nursery: trio.Nursery, volume: AgentVolume
    ) -> tuple[AgentLink, HeldHelper] | None:
        """Join the helper of the last `open` again.  None if it is to be replaced; OSError if it cannot be reached now.

        The requests that were under way have failed.  Those that the helper has not begun by now it never executes, and
        it has finished the others when this returns.
        """
        held = self._held
        if self._log is None or held is None or not self._rejoins:
            return None
        try:
            link = await self._relayed(state, nursery, held)
        except HelperEndedError as error:
            _logger.info("%s: another one is started", error.strerror)
            self._rejoins = 0
            return None
        self._rejoins -= 1
        link.holds = True
        hello = None
        with trio.move_on_after(_REJOINED_S):
            hello = await _hello(link)
        if hello is None:
            _logger.info("the helper%s does not answer: another one is started", self._place)
            self._rejoins = 0
            await self.close()
            return None
        await link.call(Op.SETTLE)
        volume.known = await _known(link)
        return link, replace(held, hello=hello)

    @property
    def helper(self) -> bytes:
        """See `Transport`."""
        return b"" if self._held is None else self._held.name

    async def _hold(self, link: AgentLink) -> HeldHelper:
        """Have a new helper wait for other daemons; the result has no name if it cannot."""
        held = replace(HeldHelper.new(), hello=await _hello(link))
        try:
            await link.call(Op.HOLD, (self._hold_s,), (held.name, held.secret))
        except OSError as error:
            if link.lost.is_set():
                raise
            _logger.warning("no other daemon can continue with the helper%s: %s", self._place, error)
            return replace(held, name=b"")
        return held

    def tree(self) -> AgentTree:
        """The live state as a tree, for use in another thread than the serving one.  EIO while nothing is open."""
        if self._link is None:
            raise os_error(errno.EIO)
        return AgentTree(self._link, trio.lowlevel.current_trio_token(), self._ids)

    def begin(self) -> None:
        """See `Transport`: a helper that no daemon has joined ends after HOLD_S."""
        if self._link is not None:
            self._link.begin()

    async def wait_lost(self) -> str:
        assert self._link is not None
        await self._link.wait_lost()
        return f"the helper{self._place} is lost: {self._link.reason}"

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            if link.lost.is_set() and not link.is_cut:
                self._rejoins = 0  # its replies made no sense
            self._serving.cancel()
            await self._ended.wait()
            link.lose("closed")

    async def _serve(self, state: S, program: bytes, magic: bytes, *, task_status: trio.TaskStatus[AgentLink]) -> None:
        try:
            with self._serving:
                async with self._started(state, program, magic) as link:
                    task_status.started(link)
                    await link.lost.wait()
        finally:
            self._ended.set()


async def _hello(link: AgentLink) -> tuple[int, ...]:
    """Return the helper's reply to HELLO, checked."""
    numbers, _ = await link.call(Op.HELLO)
    if len(numbers) != 6 or numbers[0] != VERSION or min(numbers) < 0:
        raise OSError(errno.EPROTO, f"the helper is not compatible: {numbers}")
    return numbers


def _met(hello: tuple[int, ...]) -> tuple[IdMap, tuple[int, int], bool]:
    """The ids to show, user and group of the first process there, and whether the directory has ACLs."""
    _, uid, gid, has_acls, user, group = hello
    ids = IdMap(swapped(uid, os.geteuid()), swapped(gid, os.getegid()))
    return IDENTITY if os.geteuid() == 0 or ids.is_identity else ids, (user, group), bool(has_acls)


async def _known(link: AgentLink) -> list[KnownInode]:
    """The inodes that the helper counts lookups of."""
    found: list[KnownInode] = []
    more = True
    while more:
        after = found[-1].number if found else 0
        numbers, strings = await link.call(Op.KNOWN, (after,), most_bytes=CHUNK_BYTES)
        try:
            more = bool(number_in(numbers, 1))
            found += known_in(string_in(strings, CHUNK_BYTES), after)
        except WireError as error:
            link.lose(f"invalid reply: {error}")
            raise os_error(errno.EIO) from None
    return found


PYTHONS: Final = ("python3", "python", "/usr/local/bin/python3", "/usr/bin/python3", "/usr/libexec/platform-python")
# In the order of their imports.
HELPER_MODULES: Final = (
    "protocol.linux.portable",
    *(f"protocol.backends.host.{name}" for name in ("inode_table", "descriptors", "listings", "files")),
    *(f"protocol.backends.container.helper.{name}" for name in ("wire", "files", "sessions", "serve")),
)
RELAY_MODULES: Final = (
    "protocol.linux.portable",
    *(f"protocol.backends.container.helper.{name}" for name in ("wire", "sessions")),
)
_LOADER: Final = """\
import os
data = b""
while len(data) < {length}:
    more = os.read(0, {length} - len(data))
    if not more:
        raise SystemExit(1)
    data += more
exec(data)
"""
_PROGRAM: Final = """\
import sys, types
for name, source in {sources!r}:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
module.main({arguments!r})
"""


@functools.cache
def helper_source(module: str) -> str:
    """The source of one of HELPER_MODULES, or RELAY_MODULES, as it was when it was first asked for."""
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")


def read_sources() -> None:
    """Read all sources now: later the files may be those of another version of vfsd."""
    for module in {*HELPER_MODULES, *RELAY_MODULES}:
        helper_source(module)


def helper_program(directory: str) -> bytes:
    """The program that serves `directory`, and creates it if it is missing; to be sent first."""
    return _program(HELPER_MODULES, [directory])


def relay_program(name: bytes, secret: bytes, hold_s: int) -> bytes:
    """The program that hands its streams over to the helper with this name and secret, which holds for `hold_s`."""
    return _program(RELAY_MODULES, [name.hex(), secret.hex(), str(hold_s)])


def _program(modules: Sequence[str], arguments: list[str]) -> bytes:
    sources = [(name, helper_source(name)) for name in modules]
    return _PROGRAM.format(sources=sources, arguments=arguments).encode()


def helper_command(program: bytes, python: str = PYTHONS[0]) -> list[str]:
    """The command that vfsd runs in the container, and then sends `program` to."""
    # -I -S: nothing in the workspace is imported.
    return [python, "-I", "-S", "-c", _LOADER.format(length=len(program))]
