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
        cancelled: list[BaseException] = []
        with anyio.CancelScope(shield=shield) as scope, contextlib.suppress(StopIteration):
            call = next(steps)
            while True:
                try:
                    answer = await (self._run_to_end(call, cancelled) if scope.shield else self._run(call))
                except BaseException as error:  # noqa: BLE001 the steps handle it, or raise it again
                    scope.shield = True
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        if cancelled:
            raise cancelled[0]

    async def _run_to_end(self, call: RemoteCall[Any], cancelled: list[BaseException]) -> Any:
        """Run `call`, and add to `cancelled` what asyncio's `Task.cancel` raised meanwhile.

        A shielded scope alone does not keep that from ending an await of this task; a task group waits for its tasks.
        """
        outcome: list[tuple[Any, BaseException | None]] = []

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                try:
                    outcome.append((await self._run(call), None))
                except BaseException as error:  # noqa: BLE001 raised below
                    outcome.append((None, error))

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(run)
        except BaseException as error:
            if not outcome:
                raise
            cancelled.append(error)
        answer, failure = outcome[0]
        if failure is not None:
            raise failure
        return answer
