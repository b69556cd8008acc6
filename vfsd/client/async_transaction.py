"""AsyncTransaction: the transaction of `AsyncWorkspace`.  `vfsd.client.transaction` describes it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import anyio

from vfsd.client.requests import RemoteCall, Requests
from vfsd.client.transaction import BaseTransaction, OpenTransactions, Steps


class AsyncTransaction(BaseTransaction):
    """An async context manager.  A block that is cancelled is undone as well: the restore is shielded."""

    def __init__(
        self,
        requests: Requests,
        others: OpenTransactions,
        tag: str | None,
        run: Callable[[RemoteCall[Any]], Awaitable[Any]],
    ) -> None:
        """Use `AsyncWorkspace.transaction`.  `run` sends a request and returns its answer."""
        super().__init__(requests, others, tag)
        self._run = run

    async def __aenter__(self) -> Self:
        await self._drive(self._begin(), shield=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._drive(self._end(error), shield=True)

    async def _drive(self, steps: Steps, *, shield: bool) -> None:
        """Run `steps`.  What follows a failed step cleans up, and is shielded from cancellation, too."""
        with anyio.CancelScope(shield=shield) as scope, contextlib.suppress(StopIteration):
            call = next(steps)
            while True:
                try:
                    answer = await self._run(call)
                except BaseException as error:  # noqa: BLE001 the steps handle it, or raise it again
                    scope.shield = True
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
