"""Work of the snapshot services in worker threads."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final, ParamSpec, TypeVar

import trio

from protocol.tree import Tree
from vfsd.daemon.snapshots.archives import Origin, unlimited
from vfsd.daemon.snapshots.base import CallObserver, Staged, in_bytes

P = ParamSpec("P")
T = TypeVar("T")

_ANSWERS_AT_ONCE: Final = 40  # of all clients together; further ones wait
_answer_threads: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("answer threads")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a worker thread.  The loop waits for its end even if it is cancelled."""
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs))


async def in_answer_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`in_thread` for long answers: a client that does not read blocks a thread, but none of trio's default limiter.

    Those serve the mount, for example with the syncfs(2) before each snapshot.
    """
    try:
        limiter = _answer_threads.get()
    except LookupError:  # the first one of this trio.run
        limiter = trio.CapacityLimiter(_ANSWERS_AT_ONCE)
        _answer_threads.set(limiter)
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs), limiter=limiter)


@asynccontextmanager
async def entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter `manager` in a worker thread, because that may wait for a lock or read a whole archive."""
    value = await in_thread(manager.__enter__)
    error: BaseException | None = None
    try:
        yield value
    except BaseException as raised:
        error = raised
        raise
    finally:
        manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


@asynccontextmanager
async def checked(origin: Origin, observer: CallObserver) -> AsyncIterator[Staged]:
    """Open `origin` with its content checked, and count its files and bytes."""
    async with entered(origin.opened(in_bytes(observer), True, unlimited)) as tree:
        yield await in_thread(_counted, origin, tree)


def _counted(origin: Origin, tree: Tree) -> Staged:
    files = total_bytes = 0
    for entry in tree.walk():
        files += not entry.is_dir
        total_bytes += entry.size if entry.is_file else 0
    return Staged(origin.name, origin.label, tree, files, total_bytes)
