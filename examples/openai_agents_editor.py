"""OpenAI Agents SDK (extra `openai-agents`): `python examples/openai_agents_editor.py /tmp/agent`.

The operation is what a model sends to the tool, so that the example runs without a key.  With a model:
Agent(name="coder", tools=[ApplyPatchTool(editor=VfsdEditor(workspace))]).
"""

from __future__ import annotations

import sys

from agents import ApplyPatchOperation

from vfsd import Workspace
from vfsd.integrations.openai_agents import VfsdEditor


def main(directory: str) -> None:
    with Workspace.mount(directory) as workspace:
        workspace.filesystem.write("notes.txt", "draft\n")
        before = workspace.snapshot()
        edit = ApplyPatchOperation(type="update_file", path="notes.txt", diff="@@\n-draft\n+final\n")
        print(VfsdEditor(workspace).update_file(edit).output)
        print(workspace.patch(before.name).decode(), end="")
        workspace.restore(before.name)
        print("notes.txt:", workspace.filesystem.read("notes.txt").content)


if __name__ == "__main__":
    main(sys.argv[1])
