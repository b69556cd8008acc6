"""A TCP proxy that simulates a distant server: it delays what it forwards, and counts requests and bytes.

    python -m bench._slow_link PORT DELAY_S

It forwards connections to 127.0.0.1:PORT, and prints its own port.  Each line on standard input makes it print the
numbers since the last one, as JSON.  It ends with its standard input.

Half of the round trip passes before a piece of data is forwarded, in each direction; a new connection waits a whole one
first, as a TCP handshake does.  The rate is not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PIECE_BYTES = 256 << 10
_REQUEST = b" HTTP/1.1\r\n"  # ends the first line of a request


@dataclass(frozen=True, slots=True)
class Traffic:
    """What passed a link: requests, bytes to the server, and bytes from it, with headers."""

    requests: int
    sent_bytes: int
    received_bytes: int


class SlowLink:
    """A running proxy, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def traffic(self) -> Traffic:
        """Return the traffic since the last call."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Traffic(**json.loads(self._process.stdout.readline()))


@contextmanager
def slow_link(port: int, delay_s: float) -> Iterator[SlowLink]:
    """Run a proxy to a port of this machine whose round trip takes `delay_s`."""
    command = [sys.executable, "-m", "bench._slow_link", str(port), str(delay_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        yield SlowLink(process, int(process.stdout.readline()))
        process.stdin.close()


class _Proxy:
    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self._delay_s = delay_s
        self.requests = self.sent_bytes = self.received_bytes = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        await asyncio.sleep(self._delay_s)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(reader, back, to_server=True))
            group.create_task(self._forward(there, writer, to_server=False))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        """Forward one direction.  Pieces are delayed, not spaced: the next is read while one is under way."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send(under_way, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                self._count(data, to_server=to_server)
                under_way.put_nowait((loop.time() + self._delay_s / 2, data))
        under_way.put_nowait((loop.time() + self._delay_s / 2, b""))
        await sender

    async def _send(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while True:
                at, data = await under_way.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def _count(self, data: bytes, *, to_server: bool) -> None:
        if to_server:
            self.requests += data.count(_REQUEST)
            self.sent_bytes += len(data)
        else:
            self.received_bytes += len(data)

    def report(self) -> None:
        """Print the numbers, and begin new ones."""
        print(json.dumps({name: getattr(self, name) for name in Traffic.__slots__}), flush=True)
        self.requests = self.sent_bytes = self.received_bytes = 0


async def _main(port: int, delay_s: float) -> None:
    proxy = _Proxy(port, delay_s)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        for _ in sys.stdin:
            loop.call_soon_threadsafe(proxy.report)
        loop.call_soon_threadsafe(ended.set)

    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0, limit=_PIECE_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    threading.Thread(target=read, daemon=True).start()
    await ended.wait()
    os._exit(0)  # connections may be open


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
