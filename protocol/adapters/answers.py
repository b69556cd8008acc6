"""Continue with the answer of a volume, which is a result or, if the volume has to wait, an awaitable of one.

Threading: that of the volume.  With a result everything is one step; nothing awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from protocol.volume import Answer

__all__ = ["catching", "then"]

T = TypeVar("T")
U = TypeVar("U")
E = TypeVar("E", bound=Exception)


def then(answer: Answer[T], function: Callable[[T], Answer[U]]) -> Answer[U]:
    """Return `function(answer)`, or an awaitable of it if `answer` is an awaitable."""
    # isinstance() of an abstract class takes longer than most answers.
    if not hasattr(answer, "__await__"):
        return function(answer)

    async def later() -> U:
        result = function(await cast("Awaitable[T]", answer))
        return await result if isinstance(result, Awaitable) else result

    return later()


def catching(kind: type[E], act: Callable[[], Answer[T]], otherwise: Callable[[E], Answer[T]]) -> Answer[T]:
    """Return the answer of `act`, or that of `otherwise` if `act` raises an error of this kind."""
    try:
        answer = act()
    except kind as error:
        return otherwise(error)
    if not hasattr(answer, "__await__"):
        return answer

    async def later() -> T:
        try:
            return await cast("Awaitable[T]", answer)
        except kind as error:
            other = otherwise(error)
        return await other if isinstance(other, Awaitable) else other

    return later()
