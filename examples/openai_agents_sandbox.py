"""OpenAI Agents SDK (extra `openai-agents`): `python examples/openai_agents_sandbox.py /tmp/agent`.

The model is a script here, so that the example runs without a key: it damages a file, and the program takes that back.
"""

from __future__ import annotations

import asyncio
import sys

from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.testing import ScriptedModel, assistant_message, function_call

from vfsd import AsyncWorkspace
from vfsd.integrations.openai_agents import VfsdSandboxClient, VfsdSnapshotSpec

STEPS = [
    [function_call("exec_command", {"cmd": "rm notes.txt; echo draft > new.txt"}, call_id="1")],
    [assistant_message("done")],
]


async def main(directory: str) -> None:
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    async with AsyncWorkspace.mount(directory, exec_on_host=True) as workspace:
        await workspace.async_filesystem.write("notes.txt", "important\n")
        before = await workspace.snapshot(tag="before the run")
        sandbox = SandboxRunConfig(client=VfsdSandboxClient(workspace), snapshot=VfsdSnapshotSpec())
        agent = SandboxAgent(name="coder", model=ScriptedModel(STEPS))
        result = await Runner.run(agent, "Tidy up", run_config=RunConfig(sandbox=sandbox))
        print("the agent:", result.final_output)
        for change in (await workspace.diff(before.name)).changes:
            print(change.change, change.path)
        await workspace.restore(before.name)
        print("notes.txt:", (await workspace.async_filesystem.read("notes.txt")).content, end="")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
