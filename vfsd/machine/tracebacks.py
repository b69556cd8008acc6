"""Release the objects that the traceback of an error keeps alive."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Remove the tracebacks of `error`, its group, cause and context, and the variables of all finished frames in them.

    An error that is stored in a local variable forms a reference cycle with its traceback, whose frames keep their
    variables alive: a manifest of hundreds of megabytes, for example.  The collector may find the cycle only hours
    later (`vfsd.machine.interpreter`).  The log record of an error keeps its traceback, and prints the same lines.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # a cleared frame still has its function, and so what that encloses
        waiting += [other for other in (error.__cause__, error.__context__) if other is not None]
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
