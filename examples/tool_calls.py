"""Undo the tool calls of an agent that fail, under asyncio.

    python examples/tool_calls.py

Each tool call runs in a transaction: if it fails, the files are as before it, whatever it had written.
"""

import asyncio
import tempfile

from vfsd import AsyncWorkspace

TOOL_CALLS = [
    ("call-1", ["sh", "-c", "mkdir src && echo 'print(1)' >src/main.py"]),
    ("call-2", ["sh", "-c", "rm -rf src; echo half >result; exit 1"]),  # a mistake
    ("call-3", ["sh", "-c", "cat src/main.py"]),
]


class ToolError(Exception):
    pass


async def run_tool(ws: AsyncWorkspace, command: list[str]) -> str:
    done = await ws.async_executor.run(command, timeout_s=60)
    if done.exit_status:
        raise ToolError(f"exit status {done.exit_status}")
    return done.stdout.decode()


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncWorkspace.mount(f"{directory}/agent", exec_on_host=True) as ws:
            for name, command in TOOL_CALLS:
                transaction = ws.transaction(tag=name)
                try:
                    async with transaction:
                        output = await run_tool(ws, command)
                except ToolError as error:
                    assert transaction.undone is not None
                    print(f"{name}: {error}, undone: {[change.path for change in transaction.undone.changes]}")
                else:
                    print(f"{name}: {output!r}")


asyncio.run(main())
