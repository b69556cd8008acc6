"""Removal: the removal of what was made for a workspace, such as the container of an image, after the unmount.

The commands and the helper in the container end first, because they would report its end as a failure.  The answer to
an unmount waits for the removal, so that it names what stays.

Threading: the serving loop; the removal itself runs in a worker thread.  Once it has begun, nothing cancels it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

_RELEASE_S: Final = 30.0  # how long what uses the container may take to end
_ANSWER_S: Final = 60.0  # after which the answer to an unmount does not wait any more
_POLL_S: Final = 0.01


class Removal:
    """Removes with `discard` (`vfsd.daemon.backends.Backend.discard`), if that is given."""

    def __init__(self, discard: Callable[[], str | None] | None) -> None:
        self._discard = discard
        self._is_over = trio.Event()
        self._left: str | None = None
        self._connecting = trio.CancelScope()
        self._is_connected = False

    async def connect(
        self, attend: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the container connected, which `attend` does, until it is removed."""
        self._is_connected = True
        try:
            with self._connecting:
                await attend(task_status=task_status)
        finally:
            self._is_connected = False

    async def run(self, end_commands: Callable[[], Awaitable[None]], *, is_used: bool) -> None:
        """Remove, after the unmount.

        Without `is_used`, programs could not use the mount: a start that is undone leaves what was there before it,
        such as the container of a daemon that died.
        """
        if self._discard is not None and is_used:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_RELEASE_S):
                    await end_commands()
                    self._connecting.cancel()
                    while self._is_connected:
                        await trio.sleep(_POLL_S)
                self._left = await trio.to_thread.run_sync(self._discard)
        self._is_over.set()

    async def wait(self) -> str | None:
        """Wait, after the unmount, for the removal.

        Return a sentence for the user if something stays, or if that takes long.
        """
        if self._discard is None:
            return None
        with trio.move_on_after(_ANSWER_S):
            await self._is_over.wait()
            return self._left
        return (
            f"the container is still being removed: Podman has not answered for {_ANSWER_S:g} s; if that fails,"
            " `vfsd doctor` lists the container"
        )
