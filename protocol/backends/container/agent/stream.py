"""HelperStream: the contract of a two-way stream to a helper, whatever carries it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol

STDOUT: Final = 1
STDERR: Final = 2


class Output(NamedTuple):
    """A piece of output, from STDOUT or STDERR (with a terminal always STDOUT)."""

    channel: Literal[1, 2]
    data: bytes


class HelperStream(Protocol):
    """The standard streams of a helper, such as `protocol.backends.container.podman.exec_stream.ExecStream`."""

    async def send(self, data: bytes) -> None:
        """Write to standard input.  BrokenPipeError."""
        ...

    def send_nowait(self, data: bytes) -> int:
        """Send what fits without waiting, while no `send` is under way; return the number of bytes."""
        ...

    async def receive(self, max_bytes: int = ...) -> Output | None:
        """The next piece of output; None at the end."""
        ...

    async def aclose(self) -> None:
        """End the helper and close the stream."""
        ...

    async def detach(self) -> None:
        """Close the stream, and leave the process at its other end."""
        ...

    async def abandon(self) -> None:
        """Close a stream that was cut, and leave a helper that may wait for another stream."""
        ...
