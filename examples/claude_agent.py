"""Let an agent of the Claude Agent SDK work on a copy of a project, and apply what it did.

.venv/bin/pip install --editable '.[claude-agent]'
python examples/claude_agent.py ~/project "make the tests pass"
"""

from __future__ import annotations

import sys
import tempfile

import anyio
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

from vfsd import AsyncWorkspace
from vfsd.integrations.claude_agent import hooks


async def main(project: str, prompt: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        # An overlay: the agent sees the project, and the project does not change.
        async with AsyncWorkspace.mount(place, f"overlay:{project}") as workspace:
            options = ClaudeAgentOptions(
                cwd=workspace.path,
                hooks=hooks(workspace),
                allowed_tools=["Bash", "Read", "Write", "Edit"],
            )
            succeeded = False
            async for message in query(prompt=prompt, options=options):
                if isinstance(message, ResultMessage):
                    succeeded = not message.is_error
                    print(message.result)

            # Each tool call is a snapshot; `await workspace.restore("toolu_...")` returns to one.
            for snapshot in await workspace.snapshots():
                print(snapshot.name, snapshot.tag)

            if succeeded:
                applied = await workspace.apply()
                print(f"applied {applied.counts.total} changes to {project}")


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
