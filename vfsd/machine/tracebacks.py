"""Clear what the traceback of an error keeps alive."""

from __future__ import annotations

import traceback

__all__ = ["clear_frames"]


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of all frames that `error` ended, and of those of its group, cause and context.

    An error that a frame holds in a variable is in a reference cycle with its traceback, and every frame of that
    traceback holds its variables: a manifest of hundreds of megabytes, say.  The collector may find the cycle hours
    later (`vfsd.machine.interpreter`).  Frames that still run, and the lines that a traceback shows, stay.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        waiting += [other for other in (error.__cause__, error.__context__) if other is not None]
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
