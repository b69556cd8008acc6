"""A helper without a container: the program that goes into containers, run by a Python of this machine.

`LocalStream` stands for the stream into a container, `Agent` drives the volume behind it from a thread without a loop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import trio

from protocol.backends.container.agent.helper_transport import helper_command, helper_program
from protocol.backends.container.agent.link import STDERR, STDOUT, AgentLink, HelperStream, Output
from protocol.backends.container.agent.tree import AgentTree
from protocol.backends.container.agent.volume import AgentVolume
from protocol.backends.container.inode_map import IDENTITY, IdMap
from protocol.volume import DirectoryEntry

TIMEOUT_S = 60.0
T = TypeVar("T")


class LocalStream:
    """Standard input, output and error of a process here, as `ExecStream` has those of one in a container."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._send, self._output = trio.open_memory_channel[Output](0)

    @classmethod
    async def start(cls, argv: Sequence[str], nursery: trio.Nursery) -> LocalStream:
        process = await trio.lowlevel.open_process(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        stream = cls(process)
        nursery.start_soon(stream._pump)
        return stream

    async def _pump(self) -> None:
        async def pump(source: Any, channel: Any) -> None:
            try:
                while data := await source.receive_some(65536):
                    await self._send.send(Output(channel, bytes(data)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump, self._stdout, STDOUT)
            nursery.start_soon(pump, self._stderr, STDERR)
        await self._send.aclose()

    async def send(self, data: bytes) -> None:
        try:
            await self._stdin.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise BrokenPipeError(32, "it reads no more") from None

    def send_nowait(self, data: bytes) -> int:
        try:
            return os.write(self._stdin.fileno(), data)  # trio has made the pipe non-blocking
        except OSError:
            return 0

    async def receive(self, max_bytes: int = 65536) -> Output | None:
        try:
            return await self._output.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return None

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            self.process.kill()
            for end in (self._stdin, self._stdout, self._stderr, self._output):
                await trio.aclose_forcefully(end) if isinstance(end, trio.abc.AsyncResource) else None
            await self.process.wait()


class Driven:
    """A volume of a loop in another thread, whose methods wait for their answers: like any other volume."""

    def __init__(self, volume: Any, token: trio.lowlevel.TrioToken) -> None:
        self.inner = volume
        self._token = token

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if not callable(method):
            return method
        return lambda *args, **options: self.run(lambda: method(*args, **options))

    def run(self, ask: Callable[[], Any]) -> Any:
        """What `ask` answers, once it is there."""

        async def asked() -> Any:
            answer = ask()
            return await answer if hasattr(answer, "__await__") else answer

        return trio.from_thread.run(asked, trio_token=self._token)

    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        first = list(self.run(lambda: self.inner.readdir(inode, cookie)))  # errors come at once

        def every() -> Iterator[DirectoryEntry]:
            page = first
            while page:
                yield from page
                at = page[-1].cookie
                page = list(self.run(lambda: self.inner.readdir(inode, at)))  # noqa: B023 (called at once)

        return every()


class Agent(Driven):
    """A volume over a helper."""

    inner: AgentVolume

    def __init__(self, volume: AgentVolume, link: AgentLink, token: trio.lowlevel.TrioToken) -> None:
        super().__init__(volume, token)
        self.agent_link = link

    def tree(self, ids: IdMap = IDENTITY, **options: Any) -> AgentTree:
        """The live state, for the thread that asks."""
        return AgentTree(self.agent_link, self._token, ids, **options)


@contextmanager
def served(
    open_stream: Callable[[trio.Nursery], Any], program: bytes, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> Iterator[Agent]:
    """A helper behind the stream that `open_stream` opens, served by a loop of its own in another thread."""

    async def serve(started: Callable[[Agent], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            stream: HelperStream = await open_stream(nursery)
            link = AgentLink(stream, timeout_s=timeout_s)
            try:
                await link.start(program)
            except BaseException:
                await stream.aclose()
                raise
            async with link.running():
                volume = AgentVolume(link, **options)
                await started(Agent(volume, link, trio.lowlevel.current_trio_token()))
            nursery.cancel_scope.cancel()

    with in_thread(serve) as agent:
        yield agent


@contextmanager
def in_thread(serve: Callable[[Callable[[T], Awaitable[None]]], Awaitable[None]]) -> Iterator[T]:
    """Yield the value that `serve` passes on, on a loop of its own in another thread; that call waits for the end."""
    ready: list[tuple[T, trio.lowlevel.TrioToken]] = []
    failed: list[BaseException] = []
    event = threading.Event()
    stop = trio.Event()

    async def started(value: T) -> None:
        ready.append((value, trio.lowlevel.current_trio_token()))
        event.set()
        await stop.wait()

    def run() -> None:
        try:
            trio.run(serve, started)
        except BaseException as error:
            failed.append(error)
        finally:
            event.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        event.wait()
        if failed:
            raise failed[0]
        yield ready[0][0]
    finally:
        if ready:
            with suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(stop.set, trio_token=ready[0][1])
        thread.join()
    if failed:
        raise failed[0]


@contextmanager
def local_agent(directory: str, *, python: str = sys.executable, **options: Any) -> Iterator[Agent]:
    """The directory of this machine, served by a helper of this machine."""
    program = helper_program(directory)
    command = helper_command(program, python)
    with served(lambda nursery: LocalStream.start(command, nursery), program, **options) as agent:
        yield agent
