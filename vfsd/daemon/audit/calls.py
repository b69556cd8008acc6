"""Which call of the control socket the current task works for, so that its changes are attributed to its client.

Threading: the serving loop.  A worker thread that trio starts for a call works for that call, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import trio

from protocol.errors import DeniedByPolicyError

if TYPE_CHECKING:
    from vfsd.daemon.audit.log import AuditLog
    from vfsd.daemon.audit.processes import Process


class _Call:
    """A running call: its method, its client, and the log."""

    def __init__(self, log: AuditLog, method: str, client: Process) -> None:
        self.log = log
        self.method = method
        self.client = client


_current: ContextVar[_Call | None] = ContextVar("audited call", default=None)


@contextlib.contextmanager
def working_for(log: AuditLog, method: str, caller: Hashable) -> Iterator[None]:
    """Inside the block, attribute changes to the client `caller` (a pid, if it is known), which called `method`."""
    client = log.processes.find_client(caller) if isinstance(caller, int) else log.processes.unknown
    token = _current.set(_Call(log, method, client))
    try:
        with log.names.suspended():
            yield
    except DeniedByPolicyError as error:
        log.denied_call(method, client, error.path)
        raise
    finally:
        _current.reset(token)


def record(paths: Iterable[bytes]) -> None:
    """Add an entry for the running call, which changed `paths` and did not go through the mount."""
    call = _current.get()
    if call is not None:
        call.log.applied(call.method, call.client, paths)


@contextlib.contextmanager
def acting_through_mount() -> Iterator[None]:
    """Inside the block, attribute what this worker thread changes through the mount to the call that it works for."""
    call = _current.get()
    if call is None:
        yield
        return
    thread = threading.get_native_id()
    trio.from_thread.run_sync(call.log.set_acting, thread, (f"vfsd {call.method}", call.client))
    try:
        yield
    finally:
        trio.from_thread.run_sync(call.log.set_acting, thread, None)
