"""What handles a request of one opcode, and goes on with the volume's answer, which may be an awaitable.

A message lies in the session's buffer, which the next request overwrites.  So everything that outlives the call is
copied, except the data of WRITE: if the volume's answer is an awaitable, the session gives this buffer up.
"""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.replies import Message

T = TypeVar("T")
Request = bytearray | mmap.mmap  # the session's buffer; the message is its first `length` bytes
Method = Callable[[int, Request, int], Any]

BODY: Final = wire.IN_HEADER_BYTES


class Handler(NamedTuple):
    """The handling of one opcode: the minimum length of its message, its method, and the packer of its answer."""

    min_length: int
    method: Method
    reply: Callable[[int, Any], Message]


def then(answer: T | Awaitable[T], change: Callable[[T], object]) -> object:
    """Return `change(answer)`, or an awaitable of it if `answer` is an awaitable."""
    # isinstance() of an abstract class takes longer than most changes.
    return _after(cast("Awaitable[T]", answer), change) if hasattr(answer, "__await__") else change(answer)


async def _after(answer: Awaitable[T], change: Callable[[T], object]) -> object:
    result = change(await answer)
    return await result if isinstance(result, Awaitable) else result


def tried(work: Callable[[], object], refuse: Callable[[Exception], object]) -> object:
    """Return `work()`, or an awaitable of it; `refuse(error)` if that fails with `error`: OSError, MemoryError."""

    async def finish(answer: Awaitable[object]) -> object:
        try:
            return await answer
        except (OSError, MemoryError) as error:
            result = refuse(error)
        return await result if isinstance(result, Awaitable) else result

    try:
        answer = work()
    except (OSError, MemoryError) as error:
        return refuse(error)
    return finish(cast("Awaitable[object]", answer)) if hasattr(answer, "__await__") else answer
