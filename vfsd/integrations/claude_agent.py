"""Hooks for the Claude Agent SDK that keep a state of a workspace after each step of the agent.

    async with AsyncWorkspace.mount("/tmp/work", "overlay:/home/me/project") as ws:
        options = ClaudeAgentOptions(cwd=ws.path, hooks=hooks(ws))
        async for message in query(prompt="fix the tests", options=options):
            ...
        await ws.restore("toolu_01A09q90qw90")  # the state after that tool call

Needs the extra `claude-agent`.  Threading: the hooks run in the SDK's event loop (asyncio or trio) and do not block it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio
import anyio.to_thread
from claude_agent_sdk import HookMatcher

from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace
from vfsd.machine.agent_points import AGENTS, KINDS, AgentPoint, point_of, snapshot_name

TIMEOUT_S: Final = 20.0  # a snapshot of a large host directory takes seconds
_MARGIN_S: Final = 20.0  # a cancelled call waits for the daemon for a while
_EVENTS: Final = [event for event, kind in AGENTS["claude"]["events"].items() if kind in KINDS]
_logger = logging.getLogger(__name__)


def hooks(workspace: Workspace | AsyncWorkspace) -> dict[Any, list[HookMatcher]]:
    """Return the `hooks` of `ClaudeAgentOptions` that keep the states of `workspace`.

    An automatic snapshot follows each tool call, whether it succeeded or failed, each prompt, and the end of each
    turn.  The snapshot after a tool call has the name of its `tool_use_id`, so `workspace.restore(tool_use_id)`
    returns to it; `vfsd rewind` knows all of them.  The hooks never fail: a state that cannot be kept within 20 s is
    logged as a warning.

    To add hooks of your own, append to the lists of the result.
    """

    async def keep(event: Mapping[str, Any], _tool_use_id: str | None, _context: object) -> dict[str, Any]:
        point = point_of("claude", event)
        if point is not None:
            await _keep(workspace, point)
        return {}

    return {event: [HookMatcher(hooks=[keep], timeout=TIMEOUT_S + _MARGIN_S)] for event in _EVENTS}


async def _keep(workspace: Workspace | AsyncWorkspace, point: AgentPoint) -> None:
    reason = f"no answer within {TIMEOUT_S:g} s"
    with anyio.move_on_after(TIMEOUT_S):
        try:
            await _take(workspace, snapshot_name(point), point.tag())
        except OSError as error:
            reason = str(error)
        else:
            return
    _logger.warning("no snapshot of %s was taken: %s", workspace.name, reason)


async def _take(workspace: Workspace | AsyncWorkspace, name: str | None, tag: str) -> None:
    take = _taker(workspace)
    try:
        await take(name, tag)
    except FileExistsError:  # an id that the agent gave twice
        await take(None, tag)


def _taker(workspace: Workspace | AsyncWorkspace) -> Callable[[str | None, str], Awaitable[object]]:
    if isinstance(workspace, AsyncWorkspace):
        return lambda name, tag: workspace.snapshot(name, tag=tag, automatic=True)

    def take(name: str | None, tag: str) -> Awaitable[object]:
        call = functools.partial(workspace.snapshot, name, tag=tag, automatic=True)
        return anyio.to_thread.run_sync(call, abandon_on_cancel=True)

    return take
