"""open_remote: the workspace at the other end of a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.backends.container.connection import TransportConnection
from protocol.backends.remote.command import RemoteCommand
from protocol.backends.remote.transport import RemoteTransport

DEFAULT_DIRECTORY: Final = "/workspace"
_LONGEST_PAUSE_S: Final = 10.0  # each attempt may be a login on another machine


def open_remote(
    command: str,
    *,
    directory: str = DEFAULT_DIRECTORY,
    read_only: bool = False,
    is_continued: bool = False,
    keep_going: Callable[[], None] = lambda: None,
) -> TransportConnection[RemoteCommand]:
    """Check that `command` gives a Python that reaches `directory` (absolute, there; created if it is missing).

    Blocks, for a worker thread; an exception from `keep_going`, which is called all the time, ends that.
    `TransportConnection.attend` connects.  ValueError for a command that cannot be split
    into words; OSError with what the command said if it gives no Python, or the directory cannot be reached.
    `is_continued`: it was checked by another daemon of the mount, so that one login, to connect, is enough.
    """
    target = RemoteCommand(command)
    transport = RemoteTransport(directory, read_only=read_only)
    if not is_continued:  # else the kernel knows already whether there are ACLs, which `probe` finds out
        transport.probe(target, keep_going)
    return TransportConnection(target, transport, read_only=read_only, longest_pause_s=_LONGEST_PAUSE_S)
