"""Terminals: the commands of a session that go on between the calls of the agent, with or without a terminal.

They implement `pty_exec_start` and `pty_write_stdin` with the SDK's own rules for waiting, numbers and truncation.

Threading: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from agents.sandbox.errors import PtySessionNotFoundError
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from vfsd.client.async_executor import AsyncProcess

# The daemon runs 64 interactive commands at once; the others are for `exec`.
_MOST: Final = 48
_KEPT_BYTES: Final = 16 << 20  # of output that the agent has not read; the oldest is dropped
_START_YIELD_S: Final = 10.0
_WRITE_YIELD_S: Final = 0.25
_INPUT_S: Final = 30.0
_ECHO_S: Final = 0.1


@dataclass
class _Terminal:
    process: AsyncProcess
    takes_input: bool
    chunks: deque[bytes] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    notify: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    last_used: float = field(default_factory=time.monotonic)
    pump: asyncio.Task[None] | None = None

    async def pump_output(self) -> None:
        """Collect output until the command has ended."""
        size = 0
        try:
            while outputs := await self.process.receive():
                async with self.lock:
                    self.chunks.extend(output.data for output in outputs)
                    size = sum(map(len, self.chunks))
                    while size > _KEPT_BYTES:
                        size -= len(self.chunks.popleft())
                self.notify.set()
            ended = self.process.ended
            assert ended is not None, "`receive` returned an empty list"
            self.exit_code = ended.exit_status
        except OSError as error:  # the daemon is gone
            self.chunks.append(f"\n{error}\n".encode())
            self.exit_code = 1
        finally:
            self.closed.set()
            self.notify.set()


class Terminals:
    """The running commands, by number."""

    def __init__(self) -> None:
        self._terminals: Final[dict[int, _Terminal]] = {}

    async def add(
        self, process: AsyncProcess, *, takes_input: bool, yield_time_s: float | None, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Add a command that has just started, and return its first output."""
        terminal = _Terminal(process, takes_input)
        terminal.pump = asyncio.create_task(terminal.pump_output())
        if len(self._terminals) >= _MOST:
            uses = [(number, each.last_used, each.closed.is_set()) for number, each in self._terminals.items()]
            oldest = process_id_to_prune_from_meta(uses)
            if oldest is not None:
                await _end(self._terminals.pop(oldest))
        number = allocate_pty_process_id(set(self._terminals))
        self._terminals[number] = terminal
        seconds = _START_YIELD_S if yield_time_s is None else yield_time_s
        return await self._update(number, terminal, clamp_pty_yield_time_ms(int(seconds * 1000)), max_output_tokens)

    async def write(
        self, number: int, chars: str, *, yield_time_s: float | None, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Write to a command's terminal, and return its new output.

        PtySessionNotFoundError if no such command runs.  RuntimeError if it has no terminal, or does not read.
        """
        terminal = self._terminals.get(number)
        if terminal is None:
            raise PtySessionNotFoundError(session_id=number)
        if chars:
            if not terminal.takes_input:
                raise RuntimeError("stdin is not available for this process")
            try:
                async with asyncio.timeout(_INPUT_S):
                    await terminal.process.send_input(chars.encode())
            except BrokenPipeError:
                pass  # it has ended; the update says so
            except TimeoutError:
                raise RuntimeError(f"the process has read no input for {_INPUT_S:g} s") from None
            await asyncio.sleep(_ECHO_S)
        seconds = _WRITE_YIELD_S if yield_time_s is None else yield_time_s
        wait_ms = resolve_pty_write_yield_time_ms(yield_time_ms=int(seconds * 1000), input_empty=not chars)
        terminal.last_used = time.monotonic()
        return await self._update(number, terminal, wait_ms, max_output_tokens)

    async def _update(
        self, number: int, terminal: _Terminal, wait_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        output, token_count, is_closed = await collect_pty_output(
            output_chunks=terminal.chunks,
            output_lock=terminal.lock,
            output_notify=terminal.notify,
            is_done=terminal.closed.is_set,
            yield_time_ms=wait_ms,
            max_output_tokens=max_output_tokens,
        )
        if not is_closed:
            return PtyExecUpdate(number, output, None, token_count)
        ended = self._terminals.pop(number, None)
        if ended is not None:
            await _end(ended)
        return PtyExecUpdate(None, output, terminal.exit_code, token_count)

    async def end_all(self) -> None:
        """Kill all commands with their processes."""
        terminals = list(self._terminals.values())
        self._terminals.clear()
        for terminal in terminals:
            await _end(terminal)


async def _end(terminal: _Terminal) -> None:
    if terminal.pump is not None:
        terminal.pump.cancel()
        await asyncio.gather(terminal.pump, return_exceptions=True)
    terminal.process.close()
