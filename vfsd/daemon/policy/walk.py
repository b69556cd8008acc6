"""A walk over the names of a volume, from a directory down, through the calls that every volume has.

Threading: the serving loop.  A volume that answers at once is walked in one step, so nothing changes meanwhile; one
that has to wait is walked in a coroutine, and programs go on.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from protocol.errors import os_error
from protocol.volume import ROOT_INODE, Answer, DirectoryEntry, Volume

T = TypeVar("T")
_DOTS = frozenset({b".", b".."})


class Name(NamedTuple):
    """One name: `path` is relative to where the walk began, `inode` what it leads to."""

    path: bytes
    parent: int
    name: bytes
    inode: int
    is_directory: bool


Visit = Callable[[Name], bool]
"""Called with each name, directories before what is in them: whether the walk goes down into this directory."""


def walk(volume: Volume, top: int, visit: Visit) -> Answer[None]:
    """Call `visit` for each name below directory `top`, which the caller holds by a lookup."""
    probe = volume.getattr(ROOT_INODE)
    if isinstance(probe, Awaitable):
        return _later(probe, _walk(volume, top, visit))
    _now(_walk(volume, top, visit))
    return None


async def _later(probe: Awaitable[object], work: Coroutine[Any, Any, None]) -> None:
    try:
        await probe
    except BaseException:
        work.close()
        raise
    await work


def _now(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise OSError(errno.EIO, "the volume answered the first call at once and a later one not")


async def _walk(volume: Volume, top: int, visit: Visit) -> None:
    waiting: list[tuple[int, bytes, bool]] = [(top, b"", False)]  # directories; whether the walk holds a lookup
    try:
        while waiting:
            directory, path, is_held = waiting.pop()
            try:
                await _list(volume, directory, path, visit, waiting)
            finally:
                if is_held:
                    volume.forget(directory, 1)
    finally:
        for directory, _, is_held in waiting:
            if is_held:
                volume.forget(directory, 1)


async def _list(
    volume: Volume, directory: int, path: bytes, visit: Visit, waiting: list[tuple[int, bytes, bool]]
) -> None:
    cookie = 0
    while True:
        answer = volume.readdir(directory, cookie)
        entries = list(await answer if isinstance(answer, Awaitable) else answer)
        if not entries:
            return
        cookie = entries[-1][3]
        for name, inode, mode, _ in map(DirectoryEntry._make, entries):
            if name in _DOTS:
                continue
            below = path + b"/" + name if path else name
            if not visit(Name(below, directory, name, inode, stat.S_ISDIR(mode))) or not stat.S_ISDIR(mode):
                continue
            try:
                found = volume.lookup(directory, name)
                number = (await found if isinstance(found, Awaitable) else found).inode
            except FileNotFoundError:
                continue  # another program removed it
            waiting.append((number, below, True))


def stale() -> OSError:
    """Return the error for a call on a file that became hidden while a program had it open."""
    return os_error(errno.ESTALE)
