"""Pydantic AI (extra `pydantic-ai`): `python examples/pydantic_ai_agent.py /tmp/agent`.

The model is a script here, so that the example runs without a key: it damages a file and returns to its snapshot.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from vfsd.integrations.pydantic_ai import VfsdBackend, snapshot_toolset

CALLS = [
    ToolCallPart("take_snapshot", {"tag": "before"}),
    ToolCallPart("execute", {"line": "rm notes.txt"}),
    ToolCallPart("changes_since", {"name": "snap-1"}),
    ToolCallPart("restore_snapshot", {"name": "snap-1"}),
]


def scripted(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
    for part in messages[-1].parts:
        if part.part_kind == "tool-return":
            print(f"{part.tool_name}: {part.content}")
    return ModelResponse(parts=[CALLS.pop(0)] if CALLS else [TextPart("done")])


async def main(directory: str) -> None:
    backend = VfsdBackend(directory, exec_on_host=True)  # mounted at its first use
    agent = Agent(FunctionModel(scripted), toolsets=[snapshot_toolset(backend)])

    @agent.tool
    async def execute(context: RunContext[None], line: str) -> str:
        """Run a shell line in the workspace."""
        result = await context.workspace.run(line, shell=True, timeout=60)
        return f"exit status {result.exit_code}"

    root = await backend.working_dir()
    await backend.write_bytes(f"{root}/notes.txt", b"draft")
    await agent.run("Tidy up", workspace=backend)
    print("notes.txt:", (await backend.read_bytes(f"{root}/notes.txt")).decode())
    await (await backend.workspace()).unmount()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
